"""The screen of one rollout, and the screen of two side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from rlx.config.errors import ConfigError
from rlx.runs.rollouts import TRAIN, RolloutRow, same_example
from rlx.runs.tokens import Tokens, texts_of, tokens_of
from rlx.view.rollout_text import BOLD, coloured, headline, key_to_colours, known, numbered, spoken

MODES = ("text", "tokens", "numbers")


class Document(VerticalScroll):
    """A long text, in parts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
        Binding("space", "page_down", show=False),
    ]

    def show(self, parts: Iterable[Text], home: bool = True) -> None:
        """Display texts, one below the other. `home`: from the beginning."""
        self.remove_children()
        self.mount_all(Static(part) for part in parts)
        if home:
            self.scroll_home(animate=False)


def rollout_texts(row: RolloutRow, body: list[Text] | None = None) -> list[Text]:
    """The facts of a rollout and its conversation, or another body. Or why it cannot be read."""
    try:
        record = row.record()
    except ConfigError as error:
        return [Text(str(error), BOLD)]
    return [headline(record), *(spoken(record) if body is None else body)]


class RolloutScreen(Screen[RolloutRow]):
    """One rollout. Returns the last that was shown to the screen below."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,left", "leave", "back"),
        Binding("n", "go(1)", "next"),
        Binding("p", "go(-1)", "previous"),
        Binding("t", "mode", "text/tokens/numbers"),
        Binding("c", "colour", "colour by"),
        Binding("x", "compare", "other step"),
    ]

    def __init__(self, every: Sequence[RolloutRow], rows: Sequence[RolloutRow], place: int) -> None:
        super().__init__()
        self.every, self.rows, self.place = every, rows, place
        self.mode, self.quantity = "text", "log-probability"
        self.samples: list[Tokens] = []
        self.texts: list[list[str]] = []  # of their tokens
        self.why = "reading the tokens of this step …"  # why there are none

    def compose(self) -> ComposeResult:
        yield Document()
        yield Static(id="legend", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self._read()

    @property
    def row(self) -> RolloutRow:
        return self.rows[self.place]

    def _read(self) -> None:
        self.samples, self.texts = [], []
        self._read_tokens(self.row)
        self._show()

    @work(thread=True, exclusive=True)
    def _read_tokens(self, row: RolloutRow) -> None:
        worker, samples, why = get_current_worker(), list[Tokens](), ""
        texts: list[list[str]] = []
        try:
            if row.set != TRAIN or row.source.run is None:
                raise ConfigError("tokens are recorded for the rollouts of training only")
            samples = tokens_of(row.source.run, row.source.step, row.group or 0, row.member or 0)
            texts = [texts_of(row.source.run, one.sample.token_ids.tolist()) for one in samples]
        except (ConfigError, OSError) as error:
            why = f"no tokens: {error}"
        if not worker.is_cancelled:
            self.app.call_from_thread(self._have, samples, texts, why)

    def _have(self, samples: list[Tokens], texts: list[list[str]], why: str) -> None:
        self.samples, self.texts, self.why = samples, texts, why
        if self.mode != "text":
            self._show()

    def _show(self, home: bool = True) -> None:
        legend = Text(f"step {self.row.source.step} · rollout {self.place + 1:,} of {len(self.rows):,} · {self.mode}   ")
        body = None
        if self.mode == "text":
            legend.append("▌ sampled by the policy")
        elif not self.samples:
            body = [Text(self.why, BOLD)]
        elif self.mode == "tokens":
            body = coloured(self.samples, self.texts, self.quantity)
            legend.append_text(key_to_colours(self.samples, self.quantity))
        else:
            body = numbered(self.samples, self.texts)
        document = self.query_one(Document)
        document.set_class(self.mode == "numbers", "numbers")
        document.show(rollout_texts(self.row, body), home)
        self.query_one("#legend", Static).update(legend)

    def action_leave(self) -> None:
        self.dismiss(self.row)

    def action_go(self, by: int) -> None:
        if 0 <= self.place + by < len(self.rows):
            self.place += by
            self._read()

    def action_mode(self) -> None:
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self._show()

    def action_colour(self) -> None:
        if self.mode == "tokens" and self.samples:
            names = known(self.samples)
            self.quantity = names[(names.index(self.quantity) + 1) % len(names)]
        self.mode = "tokens"
        self._show(home=False)

    def action_compare(self) -> None:
        self.app.push_screen(CompareScreen(self.every, self.row))


class CompareScreen(Screen[None]):
    """Rollouts of one example at two steps, side by side."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "back"),
        Binding("tab", "switch", "other side", priority=True),
        Binding("left,comma", "step(-1)", "step before"),
        Binding("right,full_stop", "step(1)", "step after"),
        Binding("n", "member(1)", "next rollout of the step"),
        Binding("p", "member(-1)", "previous"),
    ]

    def __init__(self, every: Sequence[RolloutRow], row: RolloutRow) -> None:
        super().__init__()
        self.rows = same_example(every, row)
        self.steps = sorted({one.source.step for one in self.rows})
        others = [one for one in self.rows if one.source.step != row.source.step]
        # The last other step, or else another rollout of this one. The earlier step is on the left.
        other = next((one for one in others if one.source.step == others[-1].source.step), None)
        sides = [row, other or next((one for one in self.rows if one != row), row)]
        self.sides = sorted(sides, key=lambda one: one.source.step)
        self.active = 1

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Document(id="side0")
            yield Document(id="side1")
        yield Static(id="legend", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        for self.active in (0, 1):
            self._show(self.sides[self.active])
        self._focus()

    def _of_step(self, step: int) -> list[RolloutRow]:
        return [one for one in self.rows if one.source.step == step]

    def _show(self, row: RolloutRow) -> None:
        """Display a rollout on the active side."""
        self.sides[self.active] = row
        members = self._of_step(row.source.step)
        title = Text(f"step {row.source.step} · rollout {members.index(row) + 1} of {len(members)}", "bold underline")
        self.query_one(f"#side{self.active}", Document).show([title, *rollout_texts(row)])

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
        place = self.steps.index(self.sides[self.active].source.step) + by
        if 0 <= place < len(self.steps):
            self._show(self._of_step(self.steps[place])[0])

    def action_member(self, by: int) -> None:
        members = self._of_step(self.sides[self.active].source.step)
        place = members.index(self.sides[self.active]) + by
        if 0 <= place < len(members):
            self._show(members[place])
