"""The rows of a data set that came from a worker, unpacked when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from rlx.envs.wire import unpack_row


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
