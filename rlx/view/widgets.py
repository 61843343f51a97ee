"""Two widgets that draw only the lines on the screen: a list of any number of rollouts, and a long text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Key, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from rlx.runs.rollouts import Table
from rlx.view.chosen import COLUMNS, cells
from rlx.view.lines import printable

WIDEST = 24  # cells of a text column
TEXT_COLUMNS = {"set", "env", "stop", "error"}
HEAD, CURSOR = Style(bold=True, underline=True), Style(reverse=True)


class RolloutList(ScrollView, can_focus=True):
    """Rollouts, one a line, under a head. Formats only the visible lines."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown,space", "page(1)", "page down", show=False),
        Binding("home,g", "go(0)", "first", show=False),
        Binding("end,G", "go(-1)", "last", show=False),
    ]

    class Moved(Message):
        """The cursor is on another rollout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.table, self.rows = Table([]), np.empty(0, dtype=np.int64)
        self.cursor, self.sorted_by, self.descending = 0, "", False
        self.asked_for_filter: Callable[[], None] = lambda: None
        self._widths = _widths(self.table)

    @property
    def row(self) -> int | None:
        """The row under the cursor."""
        return int(self.rows[self.cursor]) if len(self.rows) else None

    def show(self, table: Table, rows: NDArray[np.int64], keep: tuple[Any, int] | None = None) -> None:
        """Display rows. `keep`: path and line of a rollout that the cursor should stay on."""
        self.table, self.rows = table, rows
        self._widths = _widths(table, self.sorted_by)
        self.virtual_size = Size(sum(self._widths) + 2 * (sum(map(bool, self._widths)) - 1), len(rows) + 1)
        place = 0
        if keep is not None and len(rows):
            number = next((i for i, source in enumerate(table.sources) if source.path == keep[0]), -1)
            found = np.flatnonzero((table.columns["source"][rows] == number) & (table.columns["line"][rows] == keep[1]))
            place = int(found[0]) if len(found) else 0
        self.action_go(place)
        self.refresh()

    def place(self) -> tuple[Any, int] | None:
        """Path and line of the rollout under the cursor, which stay the same when the table grows."""
        if self.row is None:
            return None
        c = self.table.columns
        return self.table.sources[c["source"][self.row]].path, int(c["line"][self.row])

    def on_key(self, event: Key) -> None:
        """Open the filter's box at once and pass the next keys on to it: those typed quickly, or pasted, were already sent to this list."""
        focused = self.screen.focused
        if focused is self and event.key == "slash":
            event.stop().prevent_default()
            self.asked_for_filter()
        elif focused is not None and focused is not self:
            event.stop().prevent_default()
            meant = Key(event.key, event.character)
            meant._set_forwarded()
            focused.post_message(meant)

    def action_move(self, by: int) -> None:
        self.action_go(min(max(self.cursor + by, 0), len(self.rows) - 1))

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.scrollable_content_region.height - 2))

    def action_go(self, place: int) -> None:
        self.cursor = max(0, place if place >= 0 else len(self.rows) + place)
        self.scroll_to_region(Region(self.scroll_offset.x, self.cursor, 1, 2), animate=False, force=True)
        self.refresh()
        self.post_message(self.Moved())

    def render_line(self, y: int) -> Strip:
        left, top = self.scroll_offset
        width = self.scrollable_content_region.width
        if y == 0:
            names = [name + ("" if name != self.sorted_by else " ▼" if self.descending else " ▲") for name in COLUMNS]
            return self._strip(names, HEAD, left, width)
        place = top + y - 1
        if place >= len(self.rows):
            return Strip.blank(width)
        row = int(self.rows[place])
        style = CURSOR if place == self.cursor else Style.null()
        return self._strip(cells(self.table, row), style, left, width)

    def _strip(self, values: Sequence[str], style: Style, left: int, width: int) -> Strip:
        parts = []
        for name, value, size in zip(COLUMNS, values, self._widths, strict=True):
            if size:
                value = printable(value)
                shown = value if cell_len(value) <= size else value[: size - 1] + "…"
                parts.append(set_cell_size(shown if name in TEXT_COLUMNS else " " * (size - cell_len(shown)) + shown, size))
        return Strip([Segment("  ".join(parts), style)]).crop_extend(left, left + width, style)


def _widths(table: Table, sorted_by: str = "") -> list[int]:
    """Cells of each column, from the extremes of the whole table. 0 hides a column that says the same everywhere."""
    if not len(table):
        return [len(name) + 2 for name in COLUMNS]
    c = table.columns
    examples = {
        name: [int(np.argmax(c[column])), int(np.argmin(c[column]))]
        for name, column in (("step", "step"), ("example", "example"), ("tokens", "tokens"), ("turns", "turns"), ("version", "newest"))
    }
    for name in ("reward", "advantage"):
        examples[name] = [int(np.argmax(np.nan_to_num(c[name]))), int(np.argmin(np.nan_to_num(c[name])))]
    widths = []
    for place, name in enumerate(COLUMNS):
        if name in TEXT_COLUMNS:
            column = {"error": "status"}.get(name, name)
            cut = 6 if name == "stop" and c["truncated"].any() else 0  # for ` (cut)`
            longest = max(cell_len(text) for text in {*c[column]}) + cut
        else:
            longest = max(cell_len(cells(table, row)[place]) for row in examples[name])
        widths.append(min(WIDEST, max(longest, len(name) + (2 if name == sorted_by else 0))))
    if len({*c["set"]}) == 1:
        widths[COLUMNS.index("set")] = 0
    return widths


class LongText(ScrollView, can_focus=True):
    """Lines made for the current width by a function, drawn as far as they are visible."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", "up", show=False),
        Binding("down,j", "scroll_down", "down", show=False),
        Binding("pageup", "page_up", "page up", show=False),
        Binding("pagedown,space", "page_down", "page down", show=False),
        Binding("home", "scroll_home", "first", show=False),
        Binding("end", "scroll_end", "last", show=False),
    ]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._make: Callable[[int], list[list[Segment]]] = lambda width: []
        self._lines: list[Strip] = []
        self._width = -1

    def show(self, make: Callable[[int], list[list[Segment]]], home: bool = True) -> None:
        """Display what `make(width)` returns. `home`: from its beginning."""
        self._make, self._width = make, -1
        self._fit()
        if home:
            self.scroll_home(animate=False)

    def _fit(self) -> None:
        width = self.scrollable_content_region.width
        if width > 0 and width != self._width:
            self._width = width
            self._lines = [Strip(line) for line in self._make(width)]
            self.virtual_size = Size(width, len(self._lines))
            self.refresh()

    def on_resize(self, _: Resize) -> None:
        self._fit()

    def text(self) -> str:
        """Everything as plain text."""
        return "\n".join(line.text for line in self._lines)

    def render_line(self, y: int) -> Strip:
        place = self.scroll_offset.y + y
        width = self.scrollable_content_region.width
        return (self._lines[place] if place < len(self._lines) else Strip([])).crop_extend(0, width, None)
