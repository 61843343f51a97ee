"""The rows of a data set as they travel: those that came from a worker, unpacked when they are read, and those that go to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from rlx.envs.wire import pack_row, unpack_row
from rlx.types import Task

ROW_CACHE = 512  # packed rows kept: the members of a group share theirs


class PackedRows(Sequence[Any]):
    """The rows of an environment in their order. A slice is a dict of columns if `columns`, as in `datasets`; otherwise a list."""

    def __init__(self, packed: list[bytes], columns: bool) -> None:
        self._packed, self._columns = packed, columns

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Any: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, int):
            return unpack_row(self._packed[place])
        rows = [unpack_row(row) for row in self._packed[place]]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())} if self._columns else rows


class RowPacker:
    """Packs the rows of tasks, and remembers the last ROW_CACHE of them."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[Any, bytes]] = {}  # by task index, with what they were packed from

    def __call__(self, task: Task) -> bytes:
        """The row of a task as bytes. Raises CodecError if it holds other than plain values."""
        found = self._packed.get(task.index)
        if found is None or found[0] is not task.row:
            found = self._packed[task.index] = (task.row, pack_row(task.row))
            if len(self._packed) > ROW_CACHE:
                del self._packed[next(iter(self._packed))]
        return found[1]
