"""Patches Liger's layer kernels (norms, rotary positions, gated feed-forward layers) into one model, for the families that Liger supports.

Liger patches the given model's modules, but also names in the family's transformers module, which would affect every later model in the
process. `patch` restores those names: classes as they were, and functions so that CPU tensors use transformers' own. Three things are left
out. The losses, because the log-probability op is rlx's own. The experts, whose kernels round float32 to TF32, try 32 configurations
for more than 20 s when they first run, and wait for the device in every layer. And feed-forward layers with another activation than the
kernel's: Liger would put its own in its place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
FEED_FORWARD = "swiglu"  # of dense layers and of experts: Liger has one switch for both
ACTIVATIONS = {FEED_FORWARD: {"silu", "swish"}, "geglu": {"gelu_pytorch_tanh", "gelu_new", "gelu_fast"}}  # that each kernel computes


def apply_liger(hf: Any, wanted: bool | str, device: torch.device, *, rope: bool = True) -> str:
    """Patch `hf`, a transformers `…ForCausalLM` that will compute on `device`. Returns a description of the result.

    `rope=False` leaves out the rotary kernel. It rotates queries and keys in place, unseen by autograd: selective checkpointing would keep
    the rotated ones and rotate them again. It also breaks the graph of a layer that is compiled.
    `wanted` is True, False or `auto` (patch if possible). Raises ValueError with the reason if it is True and patching is impossible.
    """
    if wanted is False:
        return "off: model.liger is false"
    reason = _why_not(hf, device)
    if reason is None:
        return patch(hf, rope=rope)
    if wanted is True:
        raise ValueError(f"model.liger is true: {reason}; set model.liger=auto")
    return f"off: {reason}"


def may_patch(wanted: bool | str) -> bool:
    """Whether `apply_liger` would put Triton kernels into a model on CUDA, if Liger supports its family."""
    return wanted is not False and find_spec("liger_kernel") is not None


def _why_not(hf: Any, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"its kernels need CUDA, but this is {device.type}"
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if hf.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"it has no kernels for the family {hf.config.model_type}"
    return None


def patch(hf: Any, *, rope: bool = True) -> str:
    """Put Liger's kernels into this model, of a family that Liger supports. Returns their names and the number of patched modules."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = hf.config.model_type
    function = MODEL_TYPE_TO_APPLY_LIGER_FN[family]
    options = inspect.signature(function).parameters
    module = vars(sys.modules[type(hf).__module__])
    before = dict(module)
    has_experts = any(name.endswith(".experts") for name, _ in hf.named_modules())
    config = hf.config.get_text_config()
    named = {getattr(config, key, None) for key in ("hidden_act", "hidden_activation")} - {None}  # families have one or the other
    unlike = [kernel for kernel, computed in ACTIVATIONS.items() if not named <= computed]
    left_out = {*LOSSES, *unlike, *([] if rope else ["rope"]), *([FEED_FORWARD] if has_experts else [])}
    function(model=hf, **{name: False for name in left_out if name in options})
    for name, plain in before.items():
        if module[name] is not plain:
            module[name] = plain if isinstance(plain, type) else _by_device(module[name], plain)
    kernels = [name for name, option in options.items() if option.default is True and name not in left_out]
    patched = sum(child._get_name().startswith("Liger") for child in hf.modules())
    return f"{', '.join(kernels)} of {family}; {patched} modules"


def _by_device(fast: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `fast` for CUDA tensors and `plain` for others."""

    def choose(first: torch.Tensor, *args: Any, **keys: Any) -> Any:
        return (fast if first.is_cuda else plain)(first, *args, **keys)

    return choose
