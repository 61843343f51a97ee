"""`rlx view`: the list of rollouts with a preview, and the screens that it opens. Needs a terminal, no mouse and no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from rlx.config.errors import ConfigError
from rlx.runs.rollouts import Rollouts, Table
from rlx.runs.selection import HELP, newest_first, select, sort
from rlx.view.chosen import summary
from rlx.view.detail import CompareScreen, RolloutScreen
from rlx.view.documents import BOLD as HEADING
from rlx.view.documents import headline, spoken
from rlx.view.flow import flow, words
from rlx.view.widgets import LongText, RolloutList

REDRAW = 0.25  # seconds between the first two displays of a table that is being read; later pauses are longer
LOOK = 3.0  # seconds between two looks for new steps of a run that goes on
LARGEST_FIRST = {"step", "reward", "advantage", "tokens", "turns", "error"}
SORT_KEYS = {"s": "step", "e": "error", "v": "env", "i": "example", "r": "reward", "a": "advantage", "l": "tokens", "o": "stop"}

KEYS = f"""\
in the list
  up down pgup pgdn home end    move (also k j g G, space)
  enter                         open the rollout
  x                             the same example at two steps, side by side
  /                             filter; enter applies it, esc leaves it as it was; an empty filter shows all
  {"  ".join(f"{key} {name}" for key, name in SORT_KEYS.items())}
                                sort by this column; again: the other way round
  u                             look for new steps now (a running experiment is looked at every {LOOK:g} s)
  w                             show or hide the preview
  q                             leave

in a rollout
  t                             text, tokens in colours, tokens as numbers
  c                             colour tokens by log-probability, entropy, mismatch, version, advantage, or a replay of the step
  n p                           next and previous rollout of the list
  x                             the same example at another step
  q esc                         back

filter: conditions with spaces between; a rollout must meet all; ! negates
  {HELP}"""


class Help(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "back")]

    def compose(self) -> ComposeResult:
        yield LongText(id="help")
        yield Footer()

    def on_mount(self) -> None:
        from rlx.view.documents import PLAIN

        self.query_one(LongText).show(lambda width: [line for text in KEYS.split("\n") for line in flow(words(text, PLAIN), width)])


class ListScreen(Screen[None]):
    """All rollouts, and a preview of the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open"),
        Binding("slash", "filter", "filter"),
        Binding("r", "sort('reward')", "reward"),
        Binding("l", "sort('tokens')", "length"),
        Binding("e", "sort('error')", "error"),
        Binding("v", "sort('env')", "env"),
        Binding("s", "sort('step')", "step"),
        *(Binding(key, f"sort('{name}')", name, show=False) for key, name in SORT_KEYS.items() if key not in "rlevs"),
        Binding("x", "compare", "two steps"),
        Binding("w", "preview", "preview", show=False),
        Binding("u", "look", "update", show=False),
        Binding("question_mark", "help", "keys"),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, rollouts: Rollouts, options: Mapping[str, str]) -> None:
        super().__init__()
        self.rollouts, self.table = rollouts, Table([])
        steps = f"step={options['step']} " if "step" in options else ""
        self.filter = steps + options.get("filter", "")
        self.by, self.descending = options.get("sort", "-step").removeprefix("-"), options.get("sort", "-step").startswith("-")
        self.reading = "reading …"
        self.loading_files = False  # whether a thread reads files now
        self.wrong = ""  # what is wrong with the filter that was typed

    def compose(self) -> ComposeResult:
        yield Static(id="status", markup=False)
        yield RolloutList(id="list")
        yield LongText(id="preview")
        yield Input(id="filter", placeholder="reward<0.5 env=math step=10..20 !error", select_on_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#preview").can_focus = False
        self.list.asked_for_filter = self.action_filter
        self.list.focus()
        self.set_interval(LOOK, self.action_look)
        self._start(look=False)

    @property
    def list(self) -> RolloutList:
        return self.query_one(RolloutList)

    @work(thread=True)
    def _load(self, look: bool) -> None:
        """Read all indices, newest step first, and show what is read so far in between. `look`: only if there are new files."""
        worker, shown, pause = get_current_worker(), 0.0, REDRAW
        try:
            if look and not self.rollouts.look():
                self.app.call_from_thread(self._done)
                return
            for number in self.rollouts.load():
                if worker.is_cancelled:
                    return
                if time.monotonic() - shown > pause:
                    pause = 2 * pause if shown else pause  # a larger table takes longer to display
                    self.app.call_from_thread(self._have, self.rollouts.table(), f"reading {number} of {len(self.rollouts.sources)} files")
                    shown = time.monotonic()
            problems = self.rollouts.problems
            more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
            self.app.call_from_thread(self._have, self.rollouts.table(), f"not shown: {problems[0]}{more}" if problems else "")
        except ConfigError as error:  # the directory was deleted
            self.app.call_from_thread(self._have, self.rollouts.table(), str(error))
        self.app.call_from_thread(self._done)

    def _done(self) -> None:
        self.loading_files = False

    def _have(self, table: Table, reading: str) -> None:
        keep = self.list.place() if self.list.cursor else None  # a cursor on the first line stays on the newest
        self.table, self.reading = table, reading
        self._show(keep)

    def _show(self, keep: tuple[Any, int] | None = None) -> None:
        try:
            rows = sort(self.table, newest_first(self.table, select(self.table, self.filter)), self.by, self.descending)
            self.wrong = ""
        except ValueError as error:
            self.wrong, rows = str(error), np.empty(0, dtype=np.int64)
        self.list.sorted_by, self.list.descending = self.by, self.descending
        self.list.show(self.table, rows, keep)
        self._status()

    def _status(self) -> None:
        parts = [str(self.rollouts.root), summary(self.table, self.list.rows)]
        parts += [f"filter: {self.filter}"] if self.filter.strip() else []
        parts += [self.reading] if self.reading else []
        self.query_one("#status", Static).update(self.wrong or "   ".join(parts))

    def on_rollout_list_moved(self) -> None:
        preview = self.query_one("#preview", LongText)
        if preview.display:
            self._preview(self.table, self.list.row)

    @work(thread=True, exclusive=True, group="preview")
    def _preview(self, table: Table, row: int | None) -> None:
        """Read the rollout beside the screen, because a large step takes some time to decompress."""
        worker = get_current_worker()
        record, error = None, ""
        if row is not None:
            try:
                record = table.record(row)
            except ConfigError as problem:
                error = str(problem)
        if not worker.is_cancelled:
            self.app.call_from_thread(self._previewed, record, error)

    def _previewed(self, record: dict[str, Any] | None, error: str) -> None:
        def lines(width: int) -> Any:
            return flow([(error, HEADING)], width) if record is None else [*headline(record, width), [], *spoken(record, width)]

        self.query_one("#preview", LongText).show(lines)

    # what the keys do

    def action_open(self) -> None:
        if self.list.row is not None:
            self.app.push_screen(RolloutScreen(self.table, self.list.rows, self.list.cursor), self._returned)

    def _returned(self, place: int | None) -> None:
        if place is not None:
            self.list.action_go(place)

    def action_compare(self) -> None:
        if self.list.row is not None:
            self.app.push_screen(CompareScreen(self.table, self.list.row))

    def action_sort(self, by: str) -> None:
        self.descending = not self.descending if by == self.by else by in LARGEST_FIRST
        self.by = by
        self._show()

    def action_preview(self) -> None:
        preview = self.query_one("#preview")
        preview.display = not preview.display
        self.on_rollout_list_moved()

    def action_look(self) -> None:
        self._start(look=True)

    def _start(self, look: bool) -> None:
        """Read in a thread, because a network's disk may be slow; one at a time."""
        if not self.loading_files:
            self.loading_files = True
            self._load(look)

    def action_help(self) -> None:
        self.app.push_screen(Help())

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display, box.value = True, self.filter.strip()
        box.cursor_position = len(box.value)
        self.set_focus(box)  # at once, because the next keys are text

    def on_input_submitted(self, event: Input.Submitted) -> None:
        before, self.filter = self.filter, event.value
        self._show()
        if self.wrong:  # the box stays open and shows the problem
            self.filter = before
            return
        self._close_filter()

    def key_escape(self) -> None:
        if self.query_one("#filter").display:
            self._show()
            self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter").display = False
        self.set_focus(self.list)


class ViewApp(App[int]):
    """The browser. Uses the terminal's own colours, so it fits light and dark ones."""

    TITLE = "rlx view"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #status { height: auto; max-height: 4; text-style: bold; }
    #list { height: 1fr; scrollbar-size-horizontal: 0; }
    #preview { height: 40%; border-top: solid ansi_default; }
    LongText { overflow-x: hidden; scrollbar-size-vertical: 1; }
    #list, LongText { scrollbar-background: ansi_default; scrollbar-color: ansi_blue; scrollbar-corner-color: ansi_default; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #document, #help { height: 1fr; }
    #legend { height: auto; max-height: 3; }
    #side0, #side1 { width: 1fr; height: 1fr; border: solid ansi_default; }
    #side0.active, #side1.active { border: heavy ansi_default; }
    Help { background: ansi_default; }
    """

    def __init__(self, rollouts: Rollouts, options: Mapping[str, str] | None = None) -> None:
        super().__init__(ansi_color=True)
        self.rollouts, self.options = rollouts, options or {}

    def on_mount(self) -> None:
        self.theme = "ansi-dark" if "ansi-dark" in self.available_themes else "textual-ansi"
        self.push_screen(ListScreen(self.rollouts, self.options))
