"""The fast attention of packed rows on CUDA: which kernels there are, and long samples by cuDNN.

torch's own FlashAttention with segment boundaries is the second generation, which is slow on Hopper GPUs. Where FlashAttention 3 is
installed, torch computes with that. Otherwise cuDNN computes long samples, each in a call of its own (1.7 times as fast
at 16k tokens on an H200). It plans each length anew, so samples are padded to multiples of `STEP` tokens. Padding lies behind a sample,
where no token sees it. Short samples would need too many calls. Either is used only if it agrees with the second generation.

Knows neither models nor layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

log = logging.getLogger("rlx.trainer")

LONG = 4096  # tokens
STEP = 512  # tokens
TOLERANCE = 0.02  # of the norm, between two ways in bfloat16
HOPPER = (9, 0)
TRIED = LONG + STEP // 2  # tokens of a sample that is padded
Heads = tuple[int, int, int]  # heads, key heads, their width


def install_flash_attention_3(device: torch.device, shapes: Sequence[Heads]) -> bool:
    """Let torch's FlashAttention be the third generation, if the package is installed, this GPU can run it, and both agree."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER or find_spec("flash_attn_interface") is None:
        return False
    from torch.nn.attention import activate_flash_attention_impl

    remove_flash_attention_3()  # an earlier model may have installed it, and it would be compared with itself
    before = _tried(device, shapes, _by_flash)
    try:
        activate_flash_attention_impl("FA3")
    except Exception as error:  # of another build of the package
        log.warning("FlashAttention 3 is installed, but torch cannot use it: %s", error)
        return False
    if before and _agree(before, _tried(device, shapes, _by_flash), "FlashAttention 3"):
        return True
    remove_flash_attention_3()
    return False


def remove_flash_attention_3() -> None:
    """Let torch's FlashAttention be the second generation again."""
    from torch.nn.attention import restore_flash_attention_impl

    restore_flash_attention_impl(_raise_warn=False)


def attend_long(q: Tensor, k: Tensor, v: Tensor, scale: float | None, grouped: bool) -> Tensor:
    """Causal attention of one sample: q [n, H, d], k and v [n, H_kv, d] → [n, H, d]. On CUDA by cuDNN or not at all (RuntimeError)."""
    length = len(q)
    if rest := -length % STEP:
        q, k, v = (torch.cat([tensor, tensor.new_zeros(rest, *tensor.shape[1:])]) for tensor in (q, k, v))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    whole = out.squeeze(0).transpose(0, 1)
    return whole.split([length, rest])[0] if rest else whole


def cudnn_agrees(device: torch.device, shapes: Sequence[Heads]) -> bool:
    """Whether cuDNN can compute all of these heads on this device, with the values and gradients of FlashAttention."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER or not torch.backends.cudnn.is_available():
        return False

    def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_long(q, k, v, None, q.shape[1] != k.shape[1])

    by_flash = _tried(device, shapes, _by_flash)
    return bool(by_flash) and _agree(by_flash, _tried(device, shapes, by_cudnn), "cuDNN")


def _by_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bounds = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    return flash(q, k, v, bounds, len(q), None, -1, q.shape[1] != k.shape[1])


def _tried(device: torch.device, shapes: Sequence[Heads], way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """The values and gradients of a long random sample with each of these heads; nothing if they cannot be computed."""
    found: list[Tensor] = []
    try:
        for heads, key_heads, width in shapes:
            generator = torch.Generator(device).manual_seed(0)
            sizes = [(TRIED, number, width) for number in (heads, key_heads, key_heads, heads)]
            *own, gradient = (torch.randn(size, generator=generator, device=device).bfloat16() for size in sizes)
            with torch.enable_grad():
                out = way(*(tensor.requires_grad_() for tensor in own))
                found += [out.detach(), *torch.autograd.grad(out, own, gradient)]
    except (RuntimeError, ValueError) as error:  # no kernel for such heads, or no memory for this sample
        log.info("attention of a sample of %d tokens could not be tried: %s", TRIED, str(error).partition("\n")[0])
        return []
    return found


def _agree(one: Sequence[Tensor], other: Sequence[Tensor], name: str) -> bool:
    """Whether two ways have the same results. The `other` is called `name`."""
    if len(one) != len(other):
        return False
    worst = max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(one, other, strict=True))
    if not worst <= TOLERANCE:
        log.warning("attention by %s differs from torch's FlashAttention by %.3g of the norm, so it is not used", name, worst)
    return worst <= TOLERANCE


def flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None, back: int, grouped: bool) -> Tensor:
    """torch's FlashAttention inside segments (CUDA, 16 bit): q [K, H, d], k and v [K, H_kv, d], bounds [S+1] int32 → [K, H, d].

    A query sees `back` tokens before itself; -1: all.
    """
    keys: Any = {"scale": scale, "window_size": (back, 0), "enable_gqa": grouped}
    out = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), bounds, bounds, longest, longest, **keys)
    assert isinstance(out, Tensor)
    return out
