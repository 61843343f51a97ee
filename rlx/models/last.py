"""Leaves out of the last decoder layer what nobody reads: its feed-forward part, at tokens that predict no trainable token.

Only attention mixes tokens, and no attention follows. So the last layer's feed-forward part at a prompt's tokens changes nothing that is
trained, nor any gradient. In short rows that are mostly prompt it is an eighth of a small model's work.

A model that runs its last layer several times, or attends after it, needs all tokens. Nothing here sees that: the check of a loaded model
does (`rlx.models.load`), and calls `read_all`.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor

from rlx.models.layout import Layout


def skip_unread(layer: Any) -> None:
    """Let the last decoder `layer` compute its `mlp` only at the tokens in `Layout.read`, and 0 elsewhere. Once for each layer.

    Does nothing to a layer without a plain `mlp`: experts balance their load over all tokens. Call it before the layer's forward is wrapped
    in anything that calls it again (recomputed activations).
    """
    mlp = getattr(layer, "mlp", None)
    if mlp is None or "forward" in vars(layer) or any("expert" in name or "router" in name for name, _ in mlp.named_modules()):
        return
    layer.reads_all = False
    layer.forward = MethodType(_forward, layer)  # a method, so that a deep copy of the layer has its own
    mlp.read, mlp.num_tokens = None, 0
    mlp.register_forward_pre_hook(_pick)
    mlp.register_forward_hook(_spread)


def read_all(layer: Any) -> None:
    """Let a layer compute all tokens again: where others need them, or where a selection for each row breaks a compiled layer's graph."""
    layer.reads_all = True


def leaves_out(layer: Any) -> bool:
    """Whether a layer leaves out what nobody reads."""
    return not getattr(layer, "reads_all", True)


def _forward(layer: Any, hidden: Tensor, *args: Any, **keys: Any) -> Any:
    """The layer's own forward; the keyword `layout` says what is read of it. hidden [1, K, D], or [4, 1, K, D] (Gemma 3n)."""
    if layer.reads_all:
        return type(layer).forward(layer, hidden, *args, **keys)
    layout: Layout | None = keys.get("layout")
    layer.mlp.read = None if layout is None else layout.read
    try:
        return type(layer).forward(layer, hidden, *args, **keys)
    finally:
        layer.mlp.read = None


def _pick(mlp: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """[1, K, D] → [1, U, D]."""
    if mlp.read is None:
        return inputs
    mlp.num_tokens = inputs[0].shape[1]
    return inputs[0].index_select(1, mlp.read), *inputs[1:]


def _spread(mlp: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """[1, U, D] → [1, K, D], with 0 at the other tokens."""
    if mlp.read is None:
        return output
    return output.new_zeros(1, mlp.num_tokens, output.shape[2]).index_copy(1, mlp.read, output)
