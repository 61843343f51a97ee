"""Matrix products of vLLM's CPU backend with few distinct numbers of rows.

oneDNN compiles a kernel for every number of rows it meets (1 to 2 ms and a quarter of a MB each, of which it keeps 1024), and answers of
different lengths make that number change at almost every step: a ragged load ran at a third of the speed of an even one.
So rows are padded to one of eight sizes per power of two. Every row's result is the same bits as before: oneDNN computes each row alone.

Knows vLLM's `_custom_ops`. Knows nothing of models.
"""

from __future__ import annotations

from typing import Any

import torch


def padded_rows(rows: int) -> int:
    """The smallest size that is at least `rows`: all up to 16, then steps of an eighth of the power of two below."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def use_padded_rows() -> None:
    """Make vLLM's unquantized CPU layers of this process, and of processes forked from it, pad their rows."""
    from vllm import _custom_ops as ops

    def onednn_mm(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x` [..., K] times the handler's weight: [..., N]."""
        flat = x.reshape(-1, handler.k)
        rows = len(flat)
        wanted = padded_rows(rows)
        if wanted != rows:
            flat = torch.nn.functional.pad(flat, (0, 0, 0, wanted - rows))
        output = flat.new_empty((wanted, handler.n))
        torch.ops._C.onednn_mm(output, flat, bias, handler.handler_tensor)
        return output[:rows].view(*x.shape[:-1], handler.n)

    ops.onednn_mm = onednn_mm  # type: ignore[assignment]
