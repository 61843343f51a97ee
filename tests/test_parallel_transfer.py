"""The buffers of a sender whose tensors lie on a GPU. What arrives at receivers is tested in `test_weights_memory.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlx.parallel import transfer
from rlx.parallel.transfer import Announced, Group


def test_a_buffer_of_a_message_in_flight_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow network: each message is read only when its end is waited for. An empty tensor between large ones is a message of no bytes."""
    monkeypatch.setattr(transfer, "_in_host_memory", lambda _: False)
    monkeypatch.setattr(transfer, "SMALL", 1)
    monkeypatch.setattr(transfer, "PIECE", 64)
    arrived: list[bytes] = []

    def broadcast(piece: torch.Tensor, _: int) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: arrived.append(bytes(piece.tolist())))

    group: Any = Group.__new__(Group)
    group._group, group._pinned = SimpleNamespace(broadcast=broadcast), []
    sent = [(str(number), torch.full((number % 3 * 50,), number, dtype=torch.uint8)) for number in range(60)]
    for _ in range(2):
        arrived.clear()
        group.send(Announced.of((name, tensor.dtype, tensor.shape) for name, tensor in sent), sent)
        assert b"".join(arrived) == b"".join(bytes(tensor.tolist()) for _, tensor in sent)
    assert len(group._pinned) == transfer.AHEAD
