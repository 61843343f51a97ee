"""What differs between two runs: configuration, code, packages, data and metrics.

Only reads the two run directories; starts, imports and writes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlx.config.errors import ConfigError
from rlx.metrics import read_metrics
from rlx.runs.config_diff import NOT_COMPARED, differing
from rlx.runs.own_code import recorded
from rlx.runs.run import Run

SHOWN = 12  # number of metrics shown for the last common step
FIRST = ("reward/mean", "loss/total", "policy/entropy", "mismatch/kl", "optim/grad_norm")  # metrics shown before all others


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of difference."""

    title: str
    lines: list[str] = field(default_factory=list)  # differences as `name: there → here`; empty if there are none
    note: str = ""  # shown beside the lines, or instead of them


def compare(a: Run, b: Run) -> list[Section]:
    """All sections, with or without differences. Raises ConfigError if a directory holds no complete run."""
    for run in (a, b):
        if run.config is None or run.provenance is None:
            raise ConfigError(
                f"{run.root} cannot be compared: a run directory has both {run.paths.config.name} and {run.paths.provenance.name}."
            )
    assert a.provenance and b.provenance and a.config and b.config  # noqa: PT018
    before, after = a.provenance, b.provenance
    return [
        Section("configuration", list(differing(asdict(a.config), asdict(b.config), NOT_COMPARED, "→"))),
        Section("code", list(differing(_code(a, before), _code(b, after), between="→"))),
        Section("packages", list(differing(_packages(before), _packages(after), between="→"))),
        _data(a, b),
        _metrics(a, b),
    ]


def _code(run: Run, provenance: Mapping[str, Any]) -> dict[str, Any]:
    source = provenance["source"]
    diff = run.root / source["diff"] if source["diff"] else None
    changes = f"digest {hashlib.sha256(diff.read_bytes()).hexdigest()[:12]}" if diff is not None and diff.exists() else "none"
    own = {f"own {name}": digest for name, digest in recorded(provenance).items()}
    digest = source.get("code")  # the changes that are kept are without what looks like a secret
    return {"rlx": provenance["rlx"], "commit": source["commit"], "digest": digest, "uncommitted changes": changes, **own}


def _packages(provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {"python": provenance["python"]["version"], **provenance["packages"]}


def _data(a: Run, b: Run) -> Section:
    there, here = a.data, b.data
    if there is None or here is None:
        who = " and ".join(run.name for run, found in ((a, there), (b, here)) if found is None)
        return Section("data", [] if there is here else ["recorded for one run only"], f"{who} ended too early, or was a replay")
    return Section("data", list(differing(there, here, between="→")))


def _metrics(a: Run, b: Run) -> Section:
    """The first record in which the two files differ, and the differences at the last common step. Ignores wall-clock fields."""
    there, here = (_records(run) for run in (a, b))
    if there == here:
        return Section("metrics", [], f"{len(here)} records, bitwise equal except for wall-clock times")
    source, step = next(key for key in {**there, **here} if there.get(key) != here.get(key))
    lines = [f"first record that differs: step {step} of the {source}"]
    for source in dict.fromkeys(source for source, _ in there):
        ends = [max((step for name, step in records if name == source), default=None) for records in (there, here)]
        if ends[0] != ends[1]:
            lines.append(f"last step of the {source}: {ends[0]} → {ends[1]}")
        common = [step for name, step in there if name == source and (name, step) in here]
        if common:
            lines += _last_step(source, max(common), there[source, max(common)], here[source, max(common)])
    return Section("metrics", lines)


def _records(run: Run) -> dict[tuple[str, int], dict[str, Any]]:
    """The records by source and step, ordered by step: roles write them in whatever order they come to it."""
    found = {
        (record["source"], record["step"]): {n: v for n, v in record.items() if n != "time" and not n.startswith(("time/", "perf/"))}
        for record, _ in read_metrics(run.paths.metrics)
    }
    return dict(sorted(found.items(), key=lambda each: (each[0][1], each[0][0])))


def _last_step(source: str, step: int, there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """The metrics of one step that differ, those of `FIRST` first."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    for name in sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))[:SHOWN]:
        x, y = there.get(name), here.get(name)
        change = f"  ({y - x:+.4g})" if x is not None and y is not None else ""
        yield f"{source}, step {step}: {name}: {_number(x)} → {_number(y)}{change}"
    if len(names) > SHOWN:
        yield f"{source}, step {step}: and {len(names) - SHOWN} more"


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.6g}"
