"""The finished rollouts of `rlx synthesize`, one line each as it finishes: `rollouts/finished.jsonl`.

A command that was killed plays only what is not in this file. What becomes training data is chosen from the file, never from memory, so it
does not matter in how many attempts the rollouts were played.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rlx.rollout.selection import Candidate

_encode = msgspec.json.Encoder(enc_hook=repr).encode  # an environment's own objects are written as their `repr`
_decode = msgspec.json.Decoder(Candidate).decode


class Finished:
    """The file of one run, open for appending. One process writes it at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file. A last line that a kill cut short is removed. Raises ValueError if another line is damaged."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab")
        self._file.truncate(_whole(path))
        self.done = {candidate.place for candidate in read(path)}  # (environment, index, member) of every rollout in the file

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Append rollouts. They are in the file, also after a kill of this process, when this returns."""
        lines = b""
        for candidate in candidates:
            assert candidate.place not in self.done, f"{candidate.place} was played twice"
            self.done.add(candidate.place)
            lines += _encode(candidate) + b"\n"
        self._file.write(lines)
        self._file.flush()

    def close(self) -> None:
        """Bring the file to the disk, and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read(path: Path) -> Iterator[Candidate]:
    """The rollouts of a file, in the order in which they finished. Raises ValueError, with the line, if the file is damaged."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}, is no finished rollout: {error}") from error


def _whole(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0
