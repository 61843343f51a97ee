"""`rlx report RUN|SWEEP`: one HTML file with the curves, samples and provenance of a run, or the comparison of a sweep's runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SUMMARY = "one HTML page of a run or a sweep: curves, intervals, samples"


def help_text() -> str:
    return f"""\
rlx report: {SUMMARY}.

usage: rlx report RUN|SWEEP [--out FILE] [--score METRIC] [--csv FILE]

  --out FILE                                      the page; default: report.html in that directory
  --score METRIC                                  a run's score in a sweep: its last value of eval/math/avg@1, say; default: its reward
  --csv FILE                                      also the runs of a sweep as a table, one a line

  rlx report outputs/mine                         curves, stage times, dropped rollouts, evaluations, samples, provenance
  rlx report outputs/losses                       a sweep: curves with bands over seeds, interquartile means, what differs
  rlx report /their/run --out /tmp/theirs.html    of a directory that you may only read

The file needs no network and no other file. The run may be starting, running, failed or half-made. Directories of
rlx eval and rlx synthesize are not shown. docs/report.md explains the statistics."""


def run(argv: list[str]) -> int:
    from rlx.config.errors import ConfigError
    from rlx.paths import RunPaths, atomic

    parser = argparse.ArgumentParser(prog="rlx report", add_help=False)
    parser.add_argument("directory")
    for name in ("--out", "--score", "--csv"):
        parser.add_argument(name)
    options = parser.parse_args(argv)
    directory = Path(options.directory).expanduser()
    from rlx.report.gather import gather, open_all, training

    runs, is_sweep = open_all(directory)
    jobs = _jobs() if any(_has_job(run) for run in runs) else {}
    found, others = training(directory, [gather(each, jobs, options.score) for each in runs])
    if options.score is not None and all(facts.score is None for facts in found):
        known = ", ".join(sorted({name for facts in found for name in facts.names("eval") if "@" in name}))
        raise ConfigError(f"no run has the metric {options.score} (--score).\n  fix: name one of {known or 'those in metrics.jsonl'}")
    if is_sweep:
        from rlx.report.sweep import csv_of
        from rlx.report.sweep import report as sweep_report

        html = sweep_report(directory, found, others)
        if options.csv:
            Path(options.csv).expanduser().write_text(csv_of(found), encoding="utf-8")
    else:
        from rlx.report.single import report as run_report

        html = run_report(found[0])
    target = Path(options.out).expanduser() if options.out is not None else RunPaths(directory).report
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
