"""The screen of one rollout, and the screen of two side by side."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.style import Style
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Footer, Static

from rlx.config.errors import ConfigError
from rlx.runs.rollouts import TRAIN, Table
from rlx.runs.tokens import NoTokens, Pieces, Tokens, tokens_of
from rlx.view.documents import Lines, coloured, headline, key_to_colours, known, numbered, spoken
from rlx.view.flow import flow
from rlx.view.widgets import LongText

MODES = ("text", "tokens", "numbers")


class RolloutScreen(Screen[int]):
    """One rollout. Returns its place in the list to the screen below."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,left", "leave", "back"),
        Binding("n", "go(1)", "next"),
        Binding("p", "go(-1)", "previous"),
        Binding("t", "mode", "text/tokens/numbers"),
        Binding("c", "colour", "colour by"),
        Binding("x", "compare", "other step"),
    ]

    def __init__(self, table: Table, rows: NDArray[np.int64], place: int) -> None:
        super().__init__()
        self.table, self.rows, self.place = table, rows, place
        self.record: dict[str, Any] = {}
        self.mode, self.quantity = "text", "log-probability"
        self.samples: list[Tokens] | None = None  # None: not read yet
        self.pieces: list[list[str]] = []
        self.why = ""  # why there are no tokens

    def compose(self) -> ComposeResult:
        yield LongText(id="document")
        yield Static(id="legend", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self._read()

    @property
    def document(self) -> LongText:
        return self.query_one(LongText)

    def _read(self) -> None:
        self.samples, self.pieces, self.why = None, [], ""
        try:
            self.record = self.table.record(int(self.rows[self.place]))
        except ConfigError as error:
            self.record = {}
            self.document.show(lambda width, error=str(error): flow([(error, Style(bold=True))], width))  # type: ignore[misc]
            return
        self._show()

    def _show(self, home: bool = True) -> None:
        if not self.record:
            return
        if self.mode != "text" and self.samples is None and not self.why:
            self.query_one("#legend", Static).update("reading the tokens of this step …")
            self._read_tokens(int(self.rows[self.place]))
            return
        self.document.show(self._lines, home)
        self._legend()

    def _lines(self, width: int) -> Lines:
        head = [*headline(self.record, width), []]
        if self.mode == "text":
            return head + spoken(self.record, width)
        if self.samples is None:
            return head + flow([(self.why, Style(bold=True))], width)
        if self.mode == "tokens":
            return head + coloured(self.samples, self.pieces, self.quantity, width)
        return head + numbered(self.samples, self.pieces, width)

    def _legend(self) -> None:
        from rich.text import Text

        where = f"step {self.record['step']} · rollout {self.place + 1:,} of {len(self.rows):,} · {self.mode}"
        legend = Text(f"{where}   ")
        if self.mode == "tokens" and self.samples is not None:
            for text, style in key_to_colours(self.samples, self.quantity):
                legend.append(text, style)
        elif self.mode == "text":
            legend.append("▌ sampled by the policy")
        self.query_one("#legend", Static).update(legend)

    @work(thread=True, exclusive=True)
    def _read_tokens(self, row: int) -> None:
        source = self.table.sources[self.table.columns["source"][row]]
        samples, pieces, why = None, [], ""
        try:
            if source.set != TRAIN or source.run is None:
                raise NoTokens("tokens are recorded for the rollouts of training only")
            c = self.table.columns
            samples = tokens_of(source.run, source.step, int(c["group"][row]), int(c["member"][row]))
            decoder = Pieces(source.run)
            pieces = [decoder.of(one.ids.tolist()) for one in samples]
        except (NoTokens, OSError) as error:
            why = f"no tokens: {error}"
        self.app.call_from_thread(self._have, row, samples, pieces, why)

    def _have(self, row: int, samples: list[Tokens] | None, pieces: list[list[str]], why: str) -> None:
        if row == int(self.rows[self.place]):  # else the user has moved on
            self.samples, self.pieces, self.why = samples, pieces, why
            self._show()

    def action_leave(self) -> None:
        self.dismiss(self.place)

    def action_go(self, by: int) -> None:
        place = self.place + by
        if 0 <= place < len(self.rows):
            self.place = place
            self._read()

    def action_mode(self) -> None:
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self._show()

    def action_colour(self) -> None:
        if self.samples is None:
            self.mode = "tokens"
        else:
            names = known(self.samples)
            self.quantity = names[(names.index(self.quantity) + 1) % len(names)] if self.mode == "tokens" else self.quantity
            self.mode = "tokens"
        self._show(home=False)

    def action_compare(self) -> None:
        self.app.push_screen(CompareScreen(self.table, int(self.rows[self.place])))


class CompareScreen(Screen[None]):
    """Rollouts of one example at two steps, side by side."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "back"),
        Binding("tab", "switch", "other side", priority=True),
        Binding("left,comma", "step(-1)", "step before"),
        Binding("right,full_stop", "step(1)", "step after"),
        Binding("n", "member(1)", "next rollout of the step"),
        Binding("p", "member(-1)", "previous"),
    ]

    def __init__(self, table: Table, row: int) -> None:
        super().__init__()
        self.table = table
        rows = table.same_example(row)
        steps = table.columns["step"][rows]
        self.steps: list[int] = np.unique(steps).tolist()
        self.by_step = {step: rows[steps == step].tolist() for step in self.steps}
        mine = int(table.columns["step"][row])
        self.members = [self.by_step[mine].index(row), 0]
        self.shown = [mine, next((step for step in reversed(self.steps) if step != mine), mine)]
        if self.shown[0] > self.shown[1]:  # the earlier step is on the left
            self.shown.reverse()
            self.members.reverse()
        if self.shown[0] == self.shown[1] and len(self.by_step[mine]) > 1:
            self.members[1] = (self.members[0] + 1) % len(self.by_step[mine])
        self.active = 1

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield LongText(id="side0")
            yield LongText(id="side1")
        yield Static(id="legend", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        for side in (0, 1):
            self._show(side)
        self._focus()

    def _show(self, side: int) -> None:
        rows, step = self.by_step[self.shown[side]], self.shown[side]
        place = self.members[side]
        try:
            record = self.table.record(rows[place])
        except ConfigError as error:
            self.query_one(f"#side{side}", LongText).show(lambda width, error=str(error): flow([(error, Style(bold=True))], width))  # type: ignore[misc]
            return
        title = f"step {step} · rollout {place + 1} of {len(rows)}"

        def lines(width: int) -> Lines:
            return [*flow([(title, Style(bold=True, underline=True))], width), *headline(record, width), [], *spoken(record, width)]

        self.query_one(f"#side{side}", LongText).show(lines)

    def _focus(self) -> None:
        for side in (0, 1):
            self.query_one(f"#side{side}").set_class(side == self.active, "active")
        self.query_one(f"#side{self.active}").focus()
        many = f"steps {self.steps[0]} … {self.steps[-1]} ({len(self.steps)})" if len(self.steps) > 1 else f"only step {self.steps[0]}"
        where = ("left", "right")[self.active]
        self.query_one("#legend", Static).update(f"the same example was played at {many}; the keys act on the {where} side")

    def action_switch(self) -> None:
        self.active = 1 - self.active
        self._focus()

    def action_step(self, by: int) -> None:
        place = self.steps.index(self.shown[self.active]) + by
        if 0 <= place < len(self.steps):
            self.shown[self.active], self.members[self.active] = self.steps[place], 0
            self._show(self.active)

    def action_member(self, by: int) -> None:
        place = self.members[self.active] + by
        if 0 <= place < len(self.by_step[self.shown[self.active]]):
            self.members[self.active] = place
            self._show(self.active)

    def action_leave(self) -> None:
        self.dismiss()
