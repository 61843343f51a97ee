"""`rlx view`: the list of rollouts with a preview, and the screens that it opens. Needs a terminal, no mouse and no torch."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from rlx.config.errors import ConfigError
from rlx.runs.rollouts import RolloutRow, Rollouts
from rlx.runs.selection import HELP, newest_first, select, sort
from rlx.view.detail import CompareScreen, Document, RolloutScreen, rollout_texts
from rlx.view.selection import COLUMNS, cells, summary

REDRAW = 0.25  # seconds between the first two displays of a table that is being read; later pauses are longer
POLL_SECONDS = 3.0  # seconds between two looks for new steps of a run that goes on
AHEAD = 500  # lines that are put into the list below the cursor
WIDEST = 24  # cells of a column
TEXT_COLUMNS = {"set", "env", "stop", "error"}
LARGEST_FIRST = {"step", "reward", "advantage", "tokens", "turns", "error"}
SORT_KEYS = {"s": "step", "e": "error", "v": "env", "i": "example", "r": "reward", "a": "advantage", "l": "tokens", "o": "stop"}

KEYS = f"""\
in the list
  up down pgup pgdn home end    move (also k j g G, space); the list is filled as you go down
  enter                         open the rollout
  x                             the same example at two steps, side by side
  /                             filter; enter applies it, esc leaves it as it was; an empty filter shows all
  {"  ".join(f"{key} {name}" for key, name in SORT_KEYS.items())}
                                sort by this column; again: the other way round
  u                             look for new steps now (a running experiment is looked at every {POLL_SECONDS:g} s)
  w                             show or hide the preview
  q                             leave

in a rollout
  t                             text, tokens in colours, tokens as numbers
  c                             colour tokens by log-probability, entropy, mismatch, version or advantage
  n p                           next and previous rollout of the list
  x                             the same example at another step
  q esc                         back

filter: conditions with spaces between; a rollout must meet all; ! negates
  {HELP}"""


class Help(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "back")]

    def compose(self) -> ComposeResult:
        yield Document(id="help")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Document).show([Text(KEYS)])


class RolloutList(DataTable[Text]):
    """Rollouts, one a line. Lines are added as the cursor comes near the last, because a line takes half a millisecond."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "open"),
        Binding("slash", "screen.filter", "filter", priority=True),  # before the next key is read, which belongs to the filter
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("space", "page_down", show=False),
        Binding("home,g", "scroll_top", show=False),
        Binding("end,G", "scroll_bottom", show=False),
    ]

    def __init__(self, **options: Any) -> None:
        super().__init__(cursor_type="row", **options)
        self.rollouts: list[RolloutRow] = []

    def show(self, rollouts: list[RolloutRow], by: str, descending: bool, cursor: int) -> None:
        """Display rollouts that are sorted by a column, with the cursor on one of them."""
        self.rollouts = rollouts
        self.clear(columns=True)
        for name, *texts in zip(COLUMNS, *map(cells, rollouts[:AHEAD]), strict=True):
            label = name + ("" if name != by else " ▼" if descending else " ▲")
            self.add_column(label, width=min(WIDEST, max(map(cell_len, (label, *texts)))))
        self.go(cursor)

    def go(self, place: int) -> None:
        """Move the cursor."""
        self.fill(place)
        self.move_cursor(row=place)

    def fill(self, place: int) -> None:
        """Have the lines around a place."""
        for row in self.rollouts[self.row_count : place + AHEAD]:
            sides: list[JustifyMethod] = ["left" if name in TEXT_COLUMNS else "right" for name in COLUMNS]
            texts = zip(cells(row), sides, strict=True)
            self.add_row(*(Text(text, justify=side, no_wrap=True, overflow="ellipsis") for text, side in texts))

    @property
    def current(self) -> RolloutRow | None:
        """The rollout under the cursor."""
        return self.rollouts[self.cursor_row] if self.cursor_row < len(self.rollouts) else None


class ListScreen(Screen[None]):
    """All rollouts, and a preview of the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "sort('reward')", "reward"),
        Binding("l", "sort('tokens')", "length"),
        Binding("e", "sort('error')", "error"),
        Binding("v", "sort('env')", "env"),
        Binding("s", "sort('step')", "step"),
        *(Binding(key, f"sort('{name}')", name, show=False) for key, name in SORT_KEYS.items() if key not in "rlevs"),
        Binding("x", "compare", "two steps"),
        Binding("w", "preview", "preview", show=False),
        Binding("u", "load(True)", "update", show=False),
        Binding("question_mark", "help", "keys"),
        Binding("q", "app.quit", "quit"),
        Binding("escape", "close_filter", show=False),
    ]

    def __init__(self, rollouts: Rollouts, conditions: str, by: str) -> None:
        super().__init__()
        self.rollouts = rollouts
        self.every: list[RolloutRow] = []  # that are read so far
        self.filter, self.by, self.descending = conditions, by.removeprefix("-"), by.startswith("-")
        self.reading = "reading …"

    def compose(self) -> ComposeResult:
        yield Static(id="status", markup=False)
        yield RolloutList(id="list")
        yield Document(id="preview")
        yield Input(id="filter", placeholder="reward<0.5 env=math step=10..20 !error", select_on_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#preview").can_focus = False
        self.table.focus()
        self.set_interval(POLL_SECONDS, lambda: self.action_load(look=True))
        self.action_load()

    @property
    def table(self) -> RolloutList:
        return self.query_one(RolloutList)

    def action_load(self, look: bool = False) -> None:
        """Read in a thread, because a network's disk may be slow; one at a time. `look`: only if there are new files."""
        if not any(worker.group == "load" and not worker.is_finished for worker in self.workers):
            self._load(look)

    @work(thread=True, group="load")
    def _load(self, look: bool) -> None:
        """Read all files, newest step first, and show what is read so far in between."""
        worker, shown, pause = get_current_worker(), 0.0, REDRAW
        try:
            if look and not self.rollouts.look():
                return
            for number in self.rollouts.load():
                if worker.is_cancelled:
                    return
                if time.monotonic() - shown > pause:
                    pause = 2 * pause if shown else pause  # more rows take longer to display
                    self.app.call_from_thread(self._have, self.rollouts.rows(), f"reading {number} of {len(self.rollouts.sources)} files")
                    shown = time.monotonic()
            problems = self.rollouts.problems
        except ConfigError as error:  # the directory was deleted
            problems = [str(error)]
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        self.app.call_from_thread(self._have, self.rollouts.rows(), f"not shown: {problems[0]}{more}" if problems else "")

    def _have(self, rows: list[RolloutRow], reading: str) -> None:
        self.every, self.reading = rows, reading
        self._show(self.table.current if self.table.cursor_row else None)  # a cursor on the first line stays on the newest

    def _show(self, keep: RolloutRow | None = None) -> bool:
        """Fill the list. `keep`: the rollout that the cursor should stay on. Returns whether the filter could be understood."""
        rows, wrong = list[RolloutRow](), ""
        try:
            rows = sort(newest_first(select(self.every, self.filter)), self.by, self.descending)
        except ConfigError as error:
            wrong = str(error)
        self.table.show(rows, self.by, self.descending, rows.index(keep) if keep in rows else 0)
        parts = [str(self.rollouts.root), summary(rows, len(self.every))]
        parts += [f"filter: {self.filter}"] if self.filter.strip() else []
        parts += [self.reading] if self.reading else []
        self.query_one("#status", Static).update(wrong or "   ".join(parts))
        self._preview(self.table.current)
        return not wrong

    def on_data_table_row_highlighted(self) -> None:
        self.table.fill(self.table.cursor_row)
        self._preview(self.table.current)

    @work(thread=True, exclusive=True, group="preview")
    def _preview(self, row: RolloutRow | None) -> None:
        """Read the rollout beside the screen, because a large step takes some time to decompress."""
        worker = get_current_worker()
        texts = [] if row is None else rollout_texts(row)
        if not worker.is_cancelled:
            self.app.call_from_thread(self.query_one("#preview", Document).show, texts)

    # what the keys do

    def on_data_table_row_selected(self) -> None:
        if self.table.current is not None:
            self.app.push_screen(RolloutScreen(self.every, self.table.rollouts, self.table.cursor_row), self._returned)

    def _returned(self, row: RolloutRow | None) -> None:
        if row is not None and row in self.table.rollouts:  # which may have grown in the meantime
            self.table.go(self.table.rollouts.index(row))

    def action_compare(self) -> None:
        if self.table.current is not None:
            self.app.push_screen(CompareScreen(self.every, self.table.current))

    def action_sort(self, by: str) -> None:
        self.descending = not self.descending if by == self.by else by in LARGEST_FIRST
        self.by = by
        self._show()

    def action_preview(self) -> None:
        preview = self.query_one("#preview")
        preview.display = not preview.display

    def action_help(self) -> None:
        self.app.push_screen(Help())

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display, box.value = True, self.filter.strip()
        box.cursor_position = len(box.value)
        self.set_focus(box)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        before, self.filter = self.filter, event.value
        if self._show():
            self.action_close_filter()
        else:  # the box stays open, and the status shows the problem
            self.filter = before

    def action_close_filter(self) -> None:
        self.query_one("#filter").display = False
        self.set_focus(self.table)


class ViewApp(App[int]):
    """The browser. Uses the terminal's own colours, so it fits light and dark ones."""

    TITLE = "rlx view"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #status { height: auto; max-height: 4; text-style: bold; }
    #list { height: 1fr; }
    #list > .datatable--header { background: ansi_default; color: ansi_default; text-style: bold underline; }
    #list, Document { scrollbar-background: ansi_default; scrollbar-color: ansi_blue; scrollbar-corner-color: ansi_default; }
    #preview { height: 40%; border-top: solid ansi_default; }
    Document { height: 1fr; overflow-y: scroll; scrollbar-size-vertical: 1; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #legend { height: auto; max-height: 3; }
    .numbers { text-wrap: nowrap; }
    #side0, #side1 { width: 1fr; border: solid ansi_default; }
    #side0.active, #side1.active { border: heavy ansi_default; }
    Help { background: ansi_default; }
    """

    def __init__(self, rollouts: Rollouts, conditions: str = "", by: str = "-step") -> None:
        super().__init__(ansi_color=True)
        self.rollouts, self.conditions, self.by = rollouts, conditions, by

    def on_mount(self) -> None:
        self.theme = "ansi-dark" if "ansi-dark" in self.available_themes else "textual-ansi"
        self.push_screen(ListScreen(self.rollouts, self.conditions, self.by))
