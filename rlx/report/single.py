"""The report of one run."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlx.report.chart import draw, number
from rlx.report.gather import Facts, Samples, defaults, failures, samples, sections_of
from rlx.report.page import bar, folded, grid, lines_of, note, page, rollout, table, text, tiles
from rlx.report.panels import EVAL, ORCHESTRATOR, SECTIONS, TRAINER, charts, evaluations

STAGES = {  # source -> metric -> label, for the shares of the whole run
    TRAINER: {
        "time/wait_batch": "wait for batch",
        "time/forward_backward": "forward and backward",
        "time/optimizer": "optimizer",
        "time/broadcast": "gather weights",
    },
    ORCHESTRATOR: {
        "time/wait_rollouts": "wait for rollouts",
        "time/wait_weights": "wait for weights",
        "time/update_weights": "update servers",
    },
}
OF_THE_RUN = ("run.", "dry_run", "clean", "resume")  # keys that say where a run is, not what it computes


def report(facts: Facts, folder: Path | None = None) -> str:
    """The page. `folder`: where it will lie; None: in the run directory."""

    def drawn(name: str) -> str:
        return grid("".join(draw(chart, f"{name[:3].lower()}{n}") for n, chart in enumerate(charts(facts, SECTIONS[name]))))

    parts = {
        "Overview": lambda: tiles(_tiles(facts)) + _cause(facts) + note(_warnings(facts)),
        "Learning": lambda: drawn("Learning"),
        "Evaluation": lambda: grid(draw(chart, f"eval{n}") for n, chart in enumerate(evaluations(facts))) + _scores(facts),
        "Off-policy": lambda: drawn("Off-policy"),
        "Lengths": lambda: drawn("Lengths"),
        "Time": lambda: _stages(facts) + drawn("Time") + _traces(facts, folder),
        "Dropped rollouts": lambda: _dropped(facts) + drawn("Dropped rollouts"),
        "Samples": lambda: "".join(sample(each) for each in samples(facts)),
        "Configuration": lambda: configuration(facts),
        "Provenance": lambda: provenance(facts),
    }
    # In this order, because making the parts adds problems.
    sections = [*sections_of(parts, facts.problems), ("Not readable", note(facts.problems))]
    return page(facts.name, str(facts.run.root.absolute()), facts.state, sections)


def _tiles(facts: Facts) -> dict[str, str]:
    steps, most = facts.history.steps, facts.max_steps
    found = {"steps": f"{steps:,} of {most:,}" if most is not None else f"{steps:,}"}
    rewards = facts.series("reward/mean", ORCHESTRATOR)[1]
    if len(rewards):
        few = min(5, len(rewards))
        found[f"reward, first and last {few} steps"] = f"{number(rewards[:few].mean())} → {number(rewards[-few:].mean())}"
    for name, values in facts.history.scores().items():
        found[f"evaluation {name}"] = (
            f"{number(values[min(values)])} → {number(values[max(values)])}" if len(values) > 1 else number(values[max(values)])
        )
    if facts.status is not None:
        ended = facts.status.updated if facts.state != "running" else time.time()
        found["duration of the last attempt"] = duration(ended - facts.status.started)
        found["attempt"] = str(facts.status.attempt)
    for label, name in (("tokens/s sampled", "perf/inference_tokens_per_second"), ("tokens/s trained", "perf/tokens_per_second")):
        speed = facts.history.speed(name, first=0)
        if speed is not None:
            found[label] = f"{speed:,.0f}"
    lag = facts.series("off_policy/lag_max", TRAINER)[1]
    if len(lag):
        found["largest lag"] = number(lag.max())
    tokens = facts.series("batch/loss_tokens", ORCHESTRATOR)[1]
    if len(tokens):
        found["tokens trained on"] = f"{tokens.sum():,.0f}"
    return found


def duration(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _cause(facts: Facts) -> str:
    """Why the run failed."""
    cause = facts.status.cause if facts.status is not None else None
    if cause is None:
        return ""
    said = folded(f"last lines of {cause.log}", lines_of("\n".join(cause.last_lines)), is_open=True) if cause.last_lines else ""
    return note([f"{cause.role} {cause.replica}: {cause.reason}"], "bad") + said


def _warnings(facts: Facts) -> list[str]:
    lines = []
    if not facts.history.steps:
        lines.append("The run has not finished a step yet.")
    if facts.state == "lost":
        lines.append("No process of the run is alive and it has no final state: resume it with resume=latest.")
    return lines


def _scores(facts: Facts) -> str:
    """The table of all evaluations."""
    names = [name for name in facts.names(EVAL) if "@" in name and not name.endswith(("_low", "_high"))]
    rows = []
    for step, record in sorted(facts.history.records.get(EVAL, {}).items()):
        cells = []
        for name in names:
            ends = [record.get(f"{name}_{end}") for end in ("low", "high")]
            interval = f" <small>[{number(ends[0])}, {number(ends[1])}]</small>" if None not in ends else ""
            cells.append(f"{number(record.get(name))}{interval}")
        rows.append([number(step), *cells])
    return folded("all evaluations, with 95 % intervals over examples", table(["version", *(n.removeprefix("eval/") for n in names)], rows))


def _stages(facts: Facts) -> str:
    parts = []
    for source, stages in STAGES.items():
        total = float(facts.series("time/step", source)[1].sum())
        shares = {label: float(facts.series(name, source)[1].sum()) for name, label in stages.items() if len(facts.series(name, source)[0])}
        if total and shares:
            longest = dict(sorted(shares.items(), key=lambda item: -item[1]))
            parts.append(f'<div class="card"><h3>{source}: {duration(total)} in all steps</h3>{bar(longest, total)}</div>')
    return f'<div class="two">{"".join(parts)}</div><p></p>' if parts else ""


def _traces(facts: Facts, folder: Path | None) -> str:
    """Links to the timeline and to the traces of torch's profiler, which are in the run directory."""
    paths = facts.run.paths
    found = [*filter(Path.exists, [paths.timeline]), *sorted(paths.profile.glob("step_*.json.gz"))]
    links = [f'<a href="{text(quote(os.path.relpath(file, folder or paths.root)))}">{text(file.name)}</a>' for file in found]
    return f"<p>For https://ui.perfetto.dev: {', '.join(links)}</p>" if links else ""


def _dropped(facts: Facts) -> str:
    last = facts.last(ORCHESTRATOR)
    counts = {
        name.split("/", 1)[1]: value for name, value in last.items() if name.startswith(("rollouts/dropped_", "rollouts/failed_")) and value
    }
    filters = {name: float(facts.series(name, ORCHESTRATOR)[1].sum()) for name in facts.names(ORCHESTRATOR) if name.startswith("filter/")}
    rows = [[text(name.replace("_", " ")), number(value), "rollouts"] for name, value in sorted(counts.items(), key=lambda item: -item[1])]
    rows += [[text(name.replace("/", " ")), number(value), "groups"] for name, value in filters.items() if value]
    if not last:
        return ""
    shown = table(["cause", "number since the run began", ""], rows) or "<p>No rollout was dropped.</p>"
    return shown + note(failures(facts))


def sample(taken: Samples) -> str:
    """A few rollouts of one step."""
    shown = "".join(map(rollout, taken.records))
    head = f"step {taken.step}: {len(taken.records)} of {taken.total:,} rollouts, from the highest reward to the lowest"
    return f'<h4>{head}</h4><div class="two">{shown}</div>'


def configuration(facts: Facts) -> str:
    """What was asked, what differs from the defaults, and everything."""
    asked = table(["overrides of the command line"], [[f"<code>{text(line)}</code>"] for line in facts.overrides], "facts")
    if facts.config is None:
        return asked
    usual = defaults() or {}
    mine = {key: value for key, value in facts.config.items() if not key.startswith(OF_THE_RUN)}
    differ = [
        [text(key), text(_value(mine.get(key, "–"))), text(_value(usual.get(key, "–")))]
        for key in dict.fromkeys([*mine, *usual])
        if not key.startswith(OF_THE_RUN) and mine.get(key, "–") != usual.get(key, "–")
    ]
    rows = [[text(key), text(_value(value))] for key, value in facts.config.items()]
    everything = folded("the whole configuration", table(["key", "value"], rows, "facts"))
    if not usual:
        return asked + everything
    changed = table(["key", "here", "default of this rlx"], differ, "facts") or "<p>Every key has its default.</p>"
    return asked + folded(f"{len(differ)} keys differ from the default run", changed) + everything


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def provenance(facts: Facts) -> str:
    """Where the run came from."""
    record = facts.provenance
    if not isinstance(record, Mapping):
        return ""
    source, machine, python, seeds, packages = (
        found if isinstance(found := record.get(name), Mapping) else {} for name in ("source", "machine", "python", "seeds", "packages")
    )
    rows = {
        "command": shlex.join(map(str, record.get("command") or [])),
        "time": record.get("time"),
        "folder": record.get("cwd"),
        "rlx": record.get("rlx"),
        "commit": source.get("commit"),
        "uncommitted changes": source.get("diff") or "none",
        "host": machine.get("host"),
        "processor": f"{machine.get('cpus')} × {machine.get('cpu')}, {machine.get('memory_gib')} GiB",
        "GPUs": ", ".join(machine.get("gpus") or []) or "none",
        "python": python.get("version"),
        "seeds": ", ".join(f"{name} {value}" for name, value in seeds.items()),
        "later attempts": len(record.get("later_attempts") or []),
        "run again": shlex.join(["bash", str(facts.run.paths.reproduce.absolute())]),
    }
    return table(["", ""], [[text(name), text(value)] for name, value in rows.items()], "facts") + folded(
        f"{len(packages)} packages", table(["package", "version"], [[text(n), text(v)] for n, v in packages.items()], "facts")
    )
