"""Supervised batches: which examples make the batch of a step, and their samples.

    (Conversations, weight) of each set  →  order: (set, row) of every place in the batch  →  samples  →  StepBatch

The batch of a step follows from the seed and the step alone, so a run that resumes at a step needs no other state. `Conversations` are
rows that are rendered when a step needs them. `Prepared` makes batches in a thread, one step ahead, on rank 0, and
sends them to the other ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from rlx import codec
from rlx.data.conversations import RowError, read_conversation
from rlx.data.masks import ASSISTANT, Format, Marked, mark, to_sample
from rlx.data.rows import Rows
from rlx.data.source import Source, Tick
from rlx.types import StepBatch, TrainingSample

if TYPE_CHECKING:
    from rlx.parallel.mesh import Mesh

TICK = 0.2  # seconds between calls of `tick` while a batch is made

KEPT_BYTES = 2**26  # of rendered rows kept for later passes over a data set
SAMPLE_BYTES, TOKEN_BYTES = 1024, 21  # about what a sample and each of its tokens take

LEFT_OUT = OVERLONG, TRUNCATED, REFUSED = "data/overlong", "data/truncated", "data/refused"


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The rows of a data set, rendered by a model's chat format when they are needed."""

    name: str
    rows: Rows
    chat: Format
    columns: Mapping[str, str] = field(default_factory=dict)  # of a row's parts, where they have other names
    seq_len: int  # the longest sample, in tokens
    vocab_size: int  # of the model: rows of its embedding
    roles: Collection[str] = ASSISTANT  # whose messages are trained
    truncate: bool = False  # cut a longer sample to `seq_len`; False: leave it out
    skip_refused: bool = False  # leave out rows that cannot be marked exactly; False: they are errors
    escapes: bool = False  # break up marks of the chat format that texts of rows spell; False: such a row cannot be marked
    _kept: dict[int, list[TrainingSample]] = field(default_factory=dict)  # samples of rows that lost nothing, while there is room
    _room: list[int] = field(default_factory=lambda: [KEPT_BYTES])

    def __len__(self) -> int:
        return len(self.rows)

    def samples(self, index: int, counts: Counter[str]) -> list[TrainingSample]:
        """The samples of an example; empty if it is left out. `counts` gets what was left out or cut, by the metric's name.

        Raises ValueError with the place of a row that cannot be marked exactly.
        """
        if index in self._kept:
            return self._kept[index]
        before = counts.total()
        samples = self._rendered(index, counts)
        size = sum(SAMPLE_BYTES + TOKEN_BYTES * len(sample.token_ids) for sample in samples)
        if counts.total() == before and size <= self._room[0]:
            self._kept[index] = samples
            self._room[0] -= size
        return samples

    def _rendered(self, index: int, counts: Counter[str]) -> list[TrainingSample]:
        try:
            row = read_conversation(self.rows[index], fills=self.rows.fills, columns=self.columns)
            if self.escapes:
                row = replace(row, messages=self.chat.inert(row.messages), tools=self.chat.inert(row.tools))
            parts = mark(row, self.chat, self.roles)
            if not any(any(part.trained) for part in parts):
                roles = ", ".join(sorted(self.roles))
                raise RowError(f"it has nothing to train: no message of role {roles}, or only its first token, which nothing predicts")
        except RowError as error:
            if self.skip_refused:
                counts[REFUSED] += 1
                return []
            raise ValueError(
                f"{self.rows.where(index)} cannot be trained on: {error}.\n"
                "Correct or remove the row; or leave out and count all such rows: data.on_bad_row=skip; marks that are meant as text: "
                "data.control_tokens=escape"
            ) from error
        samples = []
        for part in parts:
            if (largest := max(part.token_ids)) >= self.vocab_size:
                raise ValueError(
                    f"{self.rows.where(index)} has the token {largest} ({self.chat.text([largest])!r}), but the model's embedding has "
                    f"{self.vocab_size} rows: its tokenizer belongs to another model, or has tokens that the model does not know"
                )
            if len(part) > self.seq_len:
                if not self.truncate or not any(part.trained[: self.seq_len]):
                    counts[OVERLONG] += 1
                    continue
                counts[TRUNCATED] += 1
                part = replace(part, token_ids=part.token_ids[: self.seq_len], trained=part.trained[: self.seq_len])
            if any(part.trained):
                samples.append(to_sample(part, env=self.name))
        return samples


NOTHING = to_sample(Marked(token_ids=[0, 0], trained=[False, False]), env="none")
"""The one sample of a batch whose rows are all left out: nothing is trained, and the metrics are those of supervised data."""


class SupervisedSource(Source):
    """Batches of a mixture of examples. Every example of a set comes once before any of it comes again."""

    def __init__(
        self, sets: Sequence[tuple[Conversations, float]], *, batch_size: int, seed: int, shuffle: bool = True, shift: int = 0
    ) -> None:
        """`sets`: examples, and the weight by which they share the places of a batch, which is one mini-batch of `batch_size` examples.

        Each example is its own group. Without `shuffle` the examples come in their order. The batch of a step begins at the place
        `shift + step * batch_size` of the order. A fork has a shift if its steps before had other rows, or batches of another size.
        """
        self.shift = shift
        self.sets, self.batch_size, self.seed, self.shuffle = [examples for examples, _ in sets], batch_size, seed, shuffle
        self.weights = [weight for _, weight in sets]
        self._drawn, self._order = 0, self._places()
        self._unusable = 0  # rows in a row that are left out
        self._reports: dict[int, dict[str, float]] = {}

    def receive(self, step: int, tick: Tick = lambda: None) -> StepBatch:
        """The batch of `step`. Steps may come in any order; the next step is the cheapest.

        If all its rows are left out, it trains nothing. Raises ValueError for a row that it cannot use, and after a whole pass of such
        batches.
        """
        first = self.shift + step * self.batch_size
        if first < self._drawn:
            self._drawn, self._order = 0, self._places()
        places = list(islice(self._order, first - self._drawn, first - self._drawn + self.batch_size))
        self._drawn = first + self.batch_size
        counts: Counter[str] = Counter()
        samples = []
        for group, (number, index) in enumerate(places):
            parts = self.sets[number].samples(index, counts)
            samples += [replace(part, group=group, member=member) for member, part in enumerate(parts)]
        self._unusable = 0 if samples else self._unusable + len(places)
        rows = sum(map(len, self.sets))
        if self._unusable >= rows:
            lost = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ValueError(
                f"step {step}: none of the last {rows} rows, a whole pass, can be trained on (of this batch: {lost}); raise seq_len"
            )
        self._reports[step] = self._report(step, places, samples, counts)
        return StepBatch(step=step, mini_batches=(tuple(samples) or (NOTHING,),))

    def report(self, step: int) -> dict[str, float]:
        """What the batch of `step` consists of, as metrics. It can be asked once."""
        return self._reports.pop(step, {})

    def _report(self, step: int, places: Sequence[tuple[int, int]], samples: Sequence[TrainingSample], counts: Counter[str]) -> dict:
        rows = sum(map(len, self.sets))
        values: dict[str, float] = {
            "data/epoch": (self.shift + (step + 1) * self.batch_size) / rows,
            "batch/samples": len(samples),
            "batch/tokens": sum(len(sample.token_ids) for sample in samples),
            "batch/loss_tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
            **{name: counts[name] for name in LEFT_OUT},
        }
        if len(self.sets) > 1:
            drawn = Counter(number for number, _ in places)
            values |= {f"data/{examples.name}/rows": drawn[number] for number, examples in enumerate(self.sets)}
        return values

    def _places(self) -> Iterator[tuple[int, int]]:
        """Endless: the (set, example) of every place."""
        orders = [
            shuffled_batches(len(examples), 1, self.seed if number == 0 else f"{self.seed}/{number}", self.shuffle)
            for number, examples in enumerate(self.sets)
        ]
        return ((number, next(orders[number])[0]) for number in shares(self.weights))


def shares(weights: Sequence[float]) -> Iterator[int]:
    """Endless: indices of the weights, each as often as its share, as evenly as possible. Equal claims go to the first."""
    total, given = sum(weights), [0] * len(weights)
    while True:
        count = sum(given) + 1
        number = max(range(len(weights)), key=lambda i: (weights[i] / total * count - given[i], -i))
        given[number] += 1
        yield number


def shuffled_batches(num_examples: int, batch_size: int, seed: int | str, shuffle: bool = True) -> Iterator[list[int]]:
    """An endless stream of index batches. Every example comes once before any comes again, shuffled anew for each pass."""
    state = random.Random(seed)
    waiting: list[int] = []
    at = 0
    while True:
        while len(waiting) - at < batch_size:
            waiting = waiting[at:] + (state.sample(range(num_examples), num_examples) if shuffle else list(range(num_examples)))
            at = 0
        yield waiting[at : at + batch_size]
        at += batch_size


@dataclass
class Prepared(Source):
    """A source whose batches rank 0 makes in a thread, one step ahead, and sends to the other ranks."""

    source: Callable[[], SupervisedSource]  # called on rank 0, in the thread, once
    mesh: Mesh
    ahead: int = 1  # how many further batches to begin with
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="batches"))
    _made: dict[int, Future[bytes]] = field(default_factory=dict)
    _source: SupervisedSource | None = None

    def receive(self, step: int, tick: Tick = lambda: None) -> StepBatch:
        """The batch of `step`; begins with the next. Raises what making it raised, on rank 0."""

        def read(waits: Tick) -> bytes:
            for each in range(step, step + 1 + self.ahead):
                if each not in self._made:
                    self._made[each] = self._thread.submit(self._make, each)
            made = self._made[step]
            while not made.done():  # `result` with a timeout would not tell a TimeoutError of the files from its own
                wait([made], TICK)
                waits()
            self._made = {each: future for each, future in self._made.items() if each > step}
            return made.result()

        return codec.decode(bytearray(self.mesh.read(read, tick)), StepBatch)

    def report(self, step: int) -> dict[str, float]:
        """What the batch of `step` consists of, on rank 0; elsewhere nothing."""
        return self._source.report(step) if self._source is not None else {}

    def _make(self, step: int) -> bytes:
        if self._source is None:
            self._source = self.source()
        return codec.encode(self._source.receive(step))
