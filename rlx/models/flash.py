"""The fast attention of packed rows on CUDA: which kernels there are, and long samples by cuDNN.

torch's own FlashAttention with segment boundaries is the second generation, which reaches half of a Hopper GPU's speed. Where
FlashAttention 3 is installed, torch computes with that. Otherwise cuDNN computes long samples, each in a call of its own, about twice as
fast. It plans each length anew, which takes a tenth of a second, so samples are padded to multiples of `STEP` tokens. Padding lies behind
a sample, where no token sees it. Short samples would need too many calls.

Knows neither models nor layouts.
"""

from __future__ import annotations

import logging
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


def install_flash_attention_3(device: torch.device) -> bool:
    """Let torch's FlashAttention be the third generation, if the package is installed and this GPU can run it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER or find_spec("flash_attn_interface") is None:
        return False
    from torch.nn.attention import activate_flash_attention_impl

    try:
        activate_flash_attention_impl("FA3")
    except Exception as error:  # of another build of the package
        log.warning("FlashAttention 3 is installed, but torch cannot use it (%s); the second generation computes", error)
        return False
    return True


def attend_long(q: Tensor, k: Tensor, v: Tensor, scale: float | None, grouped: bool) -> Tensor:
    """Causal attention of one sample: q [n, H, d], k and v [n, H_kv, d] → [n, H, d]. On CUDA by cuDNN or not at all (RuntimeError)."""
    length = len(q)
    if rest := -length % STEP:
        q, k, v = (F.pad(tensor, (0, 0, 0, 0, 0, rest)) for tensor in (q, k, v))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)[:length]


def cudnn_agrees(device: torch.device, heads: int, key_heads: int, width: int) -> bool:
    """Whether cuDNN can compute such heads on this device, with the values and gradients of FlashAttention."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER or not torch.backends.cudnn.is_available():
        return False
    generator = torch.Generator(device).manual_seed(0)
    length, grouped = LONG + STEP // 2, heads != key_heads
    shapes = [(length, heads, width), (length, key_heads, width), (length, key_heads, width), (length, heads, width)]
    *inputs, gradient = (torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes)
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    found = []
    try:
        with torch.enable_grad():
            for by_cudnn in (True, False):
                q, k, v = own = [tensor.clone().requires_grad_() for tensor in inputs]
                out = attend_long(q, k, v, None, grouped) if by_cudnn else flash(q, k, v, bounds, length, None, -1, grouped)
                found.append([out.detach(), *torch.autograd.grad(out, own, gradient)])
    except RuntimeError as error:
        log.info("cuDNN cannot compute the attention of this model: %s", str(error).splitlines()[0])
        return False
    worst = max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in zip(*found, strict=True))
    if not worst <= TOLERANCE:
        log.warning("cuDNN's attention differs from FlashAttention by %.3g of the norm, so it is not used", worst)
    return worst <= TOLERANCE


SAYS_GROUPED = "enable_gqa" in varlen_attn.__code__.co_varnames  # before 2.12, torch takes fewer key heads without a word


def flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None, back: int, grouped: bool) -> Tensor:
    """torch's FlashAttention inside segments (CUDA, 16 bit): q [K, H, d], k and v [K, H_kv, d], bounds [S+1] int32 → [K, H, d].

    A query sees `back` tokens before itself; -1: all.
    """
    keys: Any = {"scale": scale, "window_size": (back, 0)}
    if SAYS_GROUPED:
        keys["enable_gqa"] = grouped
    out = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), bounds, bounds, longest, longest, **keys)
    assert isinstance(out, Tensor)
    return out
