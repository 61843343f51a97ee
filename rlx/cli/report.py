"""`rlx report RUN|SWEEP`: one HTML file with the curves, samples and provenance of a run, or the comparison of a sweep's runs."""

from __future__ import annotations

import sys
from pathlib import Path

SUMMARY = "one HTML page of a run or a sweep: curves, intervals, samples"


def help_text() -> str:
    return f"""\
rlx report: {SUMMARY}.

usage: rlx report RUN|SWEEP [--out FILE]        default: report.html in that directory

  rlx report outputs/mine                         curves, stage times, dropped rollouts, evaluations, samples, provenance
  rlx report outputs/losses                       a sweep: curves with bands over seeds, interquartile means, what differs
  rlx report /their/run --out /tmp/theirs.html    of a directory that you may only read

The file needs no network and no other file. The run may be starting, running, failed or half-made. Directories of
rlx eval and rlx synthesize are not shown. docs/report.md explains the statistics."""


def run(argv: list[str]) -> int:
    from rlx.config.errors import ConfigError
    from rlx.paths import RunPaths, atomic

    out, places = _read(argv)
    if len(places) != 1:
        print("usage: rlx report RUN|SWEEP [--out FILE]. See rlx report --help.", file=sys.stderr)
        return 2
    directory = Path(places[0]).expanduser()
    from rlx.report.gather import gather, open_all, training

    runs, is_sweep = open_all(directory)
    jobs = _jobs() if any(_has_job(run) for run in runs) else {}
    found, others = training(directory, [gather(each, jobs) for each in runs])
    if is_sweep:
        from rlx.report.sweep import report as sweep_report

        html = sweep_report(directory, found, others)
    else:
        from rlx.report.single import report as run_report

        html = run_report(found[0])
    target = Path(out).expanduser() if out is not None else RunPaths(directory).report
    if target.is_dir():
        raise ConfigError(f"--out={target} is a directory.\n  fix: name a file, such as --out {target / 'report.html'}")
    content = html.encode(errors="backslashreplace")
    try:
        with atomic(target) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}\n  fix: name another file with --out FILE") from error
    print(f"{target}   {len(content) / 1e6:.1f} MB, {_what(len(found), is_sweep)}")
    for line in others:
        print(f"  not shown: {line}", file=sys.stderr)
    for facts in found:
        for problem in facts.problems:
            print(f"  {facts.name}: {problem}", file=sys.stderr)
    return 0


def _read(argv: list[str]) -> tuple[str | None, list[str]]:
    """The file of --out, and the other arguments."""
    out, places, waiting = None, [], list(argv)
    while waiting:
        part = waiting.pop(0)
        if part == "--out":
            if not waiting:
                return None, []
            out = waiting.pop(0)
        elif part.startswith("--out="):
            out = part.partition("=")[2]
        elif part.startswith("-"):
            return None, []
        else:
            places.append(part)
    return out, places


def _what(count: int, is_sweep: bool) -> str:
    return f"a sweep of {count} run{'' if count == 1 else 's'}" if is_sweep else "a run"


def _has_job(run: object) -> bool:
    from rlx.config.errors import ConfigError

    try:
        return getattr(run, "job", None) is not None
    except ConfigError:
        return False


def _jobs() -> dict[str, str] | None:
    from rlx.cli.runs import _jobs as queue

    return queue()
