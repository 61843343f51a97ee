"""Reads a policy version from its files into a worker while the old version generates. Each byte is read once.

    begin_reading(folder)  →  done?  →  done?  →  the engine pauses  →  load_policy(folder) takes what is left

A CPU engine multiplies with packed copies of its weights, so nothing reads the originals (`kept.py`) while it generates: their new values
are copied straight into them, and summed as they lie there. Everything else is mapped into memory and summed; in the pause it is copied
from the mapping, out of the kernel's cache of the file. So there is no second model in memory on the way.
A tensor whose sum is not that of the manifest ends the reading with an error, and the old version is served on. What the originals hold
then is of no use to anybody: every version overwrites all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.inference.server.served import ALONE, Place, Split, each
from rlx.weights.attest import checksum, copied
from rlx.weights.files import weight_files

POLL = (0.001, 0.02)  # seconds between two questions: the first time, and at most. Each takes the engine's time between two steps


class State(NamedTuple):
    """How far a worker is. Plain values: it crosses processes."""

    done: bool
    why: str  # the version is refused; empty if it is not


class Reading:
    """One version on its way into one worker, read by threads of its own."""

    def __init__(
        self,
        folder: Path,
        entries: Iterable[tuple[str, Tensor]],
        written: Mapping[str, Mapping[str, Any]],
        places: Mapping[str, Place],
        split: Split = ALONE,
    ) -> None:
        """Begin. `entries`: names and mapped tensors of the folder. `written`: their checksums, as in a manifest; without, nothing is
        compared. `places`: where the values of some may be written at once. Each tensor is summed by one worker."""
        self.folder = folder
        self.size = sum(path.stat().st_size for path in weight_files(folder))
        self.rest: list[tuple[str, Tensor]] = []  # mapped, to be loaded in the pause
        self._written, self._places, self._split = written, places, split
        self._why = ""
        self._thread = threading.Thread(target=self._run, args=(entries,), name="reading", daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        return State(not self._thread.is_alive(), self._why)

    def wait(self) -> None:
        """Return when nothing is read or written any more."""
        self._thread.join()

    def _run(self, entries: Iterable[tuple[str, Tensor]]) -> None:
        try:
            with torch.no_grad():
                for left in each(self._read, enumerate(entries), self.size):
                    self.rest += left
        except Exception as error:
            self._why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.rest = []

    def _read(self, numbered: tuple[int, tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Read a tensor. Returns what is left of it to be loaded."""
        number, (name, tensor) = numbered
        place = self._places.get(name)
        direct = place is not None and place.served.dtype == tensor.dtype
        found = ""
        if direct and place is not None:
            if place.dim is None:
                found = copied(tensor, place.served)
            else:
                place.served.copy_(tensor.narrow(place.dim, place.start, place.served.shape[place.dim]))
        if name in self._written and (found or number % self._split.ranks == self._split.rank):
            found = found or checksum(tensor)
            if (expected := self._written[name]["sum"]) != found:
                raise ValueError(f"{self.folder}: expected checksum {expected}, found {found}; the tensor {name} is damaged")
        return [] if direct else [(name, tensor)]


async def read(call: Callable[..., Awaitable[Any]], folder: Path) -> None:
    """Have all workers read a version while they generate. `call` calls a method of all of them (`orders.obeyed`).

    Raises ValueError if a worker refuses it.
    """
    await call("begin_reading", str(folder))
    states: Sequence[State] = [State(False, "")]
    seconds, longest = POLL
    while not all(state.done for state in states):
        await asyncio.sleep(seconds)
        seconds = min(2 * seconds, longest)
        states = [State(*state) for state in await call("reading_state")]
    if refused := [state.why for state in states if state.why]:
        raise ValueError(refused[0])
