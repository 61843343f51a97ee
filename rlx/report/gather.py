"""Reads what a report shows of a run directory. Works on running, failed and half-made runs: what cannot be read becomes a problem.

Writes nothing and takes no lock. `Facts` holds numbers and texts, no HTML. Texts of rollouts and logs are untrusted; `page.py` escapes
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlx.config.errors import ConfigError, may_read
from rlx.config.roots import root_of
from rlx.config.schema import TrainingRoot
from rlx.config.secret import redacted
from rlx.runs.config_diff import flat
from rlx.runs.history import History
from rlx.runs.own_code import recorded
from rlx.runs.run import Run, find
from rlx.runs.status import Status

T = TypeVar("T")
SAMPLES = 4  # rollouts shown of the first and of the last step
MAX_METRIC = 1e300  # of a metric's finite values

Array = NDArray[np.float64]
Series = tuple[Array, Array]  # steps [P], values [P]


@dataclass(kw_only=True)
class Facts:
    """What is known of one run."""

    run: Run
    problems: list[str] = field(default_factory=list)  # what could not be read, for the page
    state: str = "unknown"
    status: Status | None = None
    config: dict[str, Any] | None = None  # the leaves, by dotted name
    other: str | None = None  # the command of a directory that trains nothing: `eval`, `synthesize`
    overrides: list[str] = field(default_factory=list)
    provenance: Mapping[str, Any] | None = None
    history: History
    scored_by: str | None = None  # the metric that is the run's score; None: its mean reward

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def max_steps(self) -> int | None:
        if self.config is not None:
            return int(self.config["max_steps"])
        return self.status.max_steps if self.status is not None else None

    @property
    def score(self) -> float | None:
        """The last value of `scored_by`, or the mean of `reward/mean` over the last five steps; `None` without any."""
        if self.scored_by is None:
            return self.history.final_reward
        values = [y for source in self.history.records for y in self.series(self.scored_by, source)[1]]
        return float(values[-1]) if values else None

    @property
    def ended_well(self) -> bool:
        return self.state == "completed"

    def series(self, name: str, source: str) -> Series:
        """One metric by step. Values may be NaN or infinite: a run that diverged shows it."""
        found = [(step, record[name]) for step, record in sorted(self.history.records.get(source, {}).items()) if name in record]
        pairs = np.array(found, dtype=np.float64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def names(self, source: str) -> list[str]:
        """All metrics that a source wrote, sorted."""
        return sorted({name for record in self.history.records.get(source, {}).values() for name in record} - {"step", "source", "time"})

    def last(self, source: str) -> Mapping[str, Any]:
        """The newest record of a source; empty if there is none."""
        records = self.history.records.get(source, {})
        return records[max(records)] if records else {}


def gather(run: Run, jobs: Mapping[str, str] | None = None, scored_by: str | None = None) -> Facts:
    """Everything but the rollouts. `jobs`: job id → SLURM's state; `None` if unknown. `scored_by`: see `Facts`."""
    facts = Facts(run=run, history=History(run.paths), scored_by=scored_by)
    attempt = _attempts(facts.problems)
    attempt(facts.history.read, None)
    _keep_numbers(facts.history)
    facts.status = attempt(lambda: run.status, None)
    facts.state = attempt(lambda: run.state(jobs), "unknown")
    config = attempt(lambda: run.config, None)
    facts.config = flat(asdict(redacted(config))) if config is not None else None
    facts.other = root_of(config).command if config is not None and not isinstance(config, TrainingRoot) else None
    facts.overrides = attempt(lambda: [str(each) for each in run.overrides], [])
    provenance = attempt(lambda: run.provenance, None)
    facts.provenance = provenance if isinstance(provenance, Mapping) else None
    if facts.config is not None and facts.provenance is not None:  # runs of other own code are another setting
        own: dict[str, str] = attempt(partial(recorded, facts.provenance, ("own",)), {})  # config has the values of option files
        facts.config |= {f"code of {name}": digest for name, digest in own.items()}
    return facts


def _keep_numbers(history: History) -> None:
    """Leave out what is no number. Numbers beyond `MAX_METRIC` become infinite, because their sums and differences would overflow."""

    def kept(value: Any) -> float:
        return value if not abs(value) > MAX_METRIC else math.inf if value > 0 else -math.inf

    for source, records in history.records.items():
        history.records[source] = {
            step: {name: kept(value) for name, value in record.items() if isinstance(value, int | float)}
            for step, record in records.items()
            if isinstance(step, int)
        }


def training(directory: Path, found: Sequence[Facts]) -> tuple[list[Facts], list[str]]:
    """The runs that train, and a line about each of the others. Raises ConfigError if none trains."""
    trained = [facts for facts in found if facts.other is None]
    others = [f"{facts.name} is a directory of `rlx {facts.other}`" for facts in found if facts.other is not None]
    if not trained:
        commands = " and ".join(sorted({f"`rlx {facts.other}`" for facts in found}))
        have = "is a directory of" if len(found) == 1 and found[0].run.root == directory else "holds only directories of"
        raise ConfigError(
            f"{directory} {have} {commands}; a report shows runs that train: `rlx train` and `rlx sft`.\n"
            "  fix: rlx view DIRECTORY shows rollouts and results"
        )
    return trained, others


def _attempts(problems: list[str]) -> Callable[[Callable[[], T], T], T]:
    def attempt(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except ConfigError as error:
            problems.append(error.problems[0].partition("\n")[0])
        except (
            OSError,
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            ArithmeticError,
        ) as error:  # a half-written or foreign file
            problems.append(f"{type(error).__name__}: {error}")
        return otherwise

    return attempt


def sections_of(parts: Mapping[str, Callable[[], str]], problems: list[str]) -> list[tuple[str, str]]:
    """The sections of a page. One that cannot be made is left out, and is one of the problems."""
    sections = []
    for name, make in parts.items():
        found: list[str] = []
        sections.append((name, _attempts(found)(make, "")))
        problems += [f"section {name}: {problem}" for problem in found]
    return sections


def failures(facts: Facts) -> list[str]:
    """What failed in the run, by cause, in words."""
    from rlx.rollout.failures import in_words

    path = facts.run.paths.failures
    return _attempts(facts.problems)(lambda: in_words(json.loads(path.read_text()), most=8) if path.is_file() else [], [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A few rollouts of one step, as in `rollouts/step_N.jsonl.zst`."""

    step: int
    records: Sequence[Mapping[str, Any]]
    total: int  # rollouts in the file


def samples(facts: Facts, count: int = SAMPLES) -> Iterator[Samples]:
    """A few rollouts of the first and of the last saved step: the best and the worst reward, and those between, evenly chosen."""
    from rlx.rollout.record import read_rollouts

    attempt = _attempts(facts.problems)
    none: list[int] = []
    steps = attempt(lambda: facts.run.rollouts, none)
    for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
        nothing: list[dict[str, Any]] = []
        records = attempt(partial(_read, facts.run.paths.rollouts_of(step), read_rollouts), nothing)
        scored = sorted((r for r in records if isinstance(r.get("reward"), int | float)), key=lambda r: -r["reward"])
        chosen = scored or list(islice(records, count))
        if chosen:
            places = np.unique(np.linspace(0, len(chosen) - 1, min(count, len(chosen))).round().astype(int))
            yield Samples(step=step, records=[chosen[place] for place in places], total=len(records))


def _read(path: Path, read: Callable[[Path], Iterator[dict[str, Any]]]) -> list[dict[str, Any]]:
    import zstandard

    try:
        return [record for record in read(path) if isinstance(record, Mapping)]
    except (ValueError, zstandard.ZstdError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def defaults() -> dict[str, Any] | None:
    """The leaves of the default configuration; `None` if it cannot be composed here."""
    from rlx.config.load import compose

    try:
        return flat(asdict(compose([], {}).cfg))
    except ConfigError:
        return None


def open_all(directory: Path) -> tuple[list[Run], bool]:
    """The runs to report on, and whether they are a sweep. Raises ConfigError if there is no run."""
    with may_read(directory):
        there = directory.is_dir()
    if not there:
        raise ConfigError(f"there is no directory {directory}.\n  fix: name a run's or a sweep's directory; rlx runs lists runs")
    found = list(find(directory, planned=True))
    if not found:
        raise ConfigError(
            f"{directory} is neither a run's directory nor a sweep's: no folder in it has a config.yaml or a status.json.\n"
            "  fix: name a run's or a sweep's directory; rlx runs lists runs"
        )
    if found[0].root == directory:
        return [Run.open(directory)], False
    return found, True
