"""`rlx report RUN|SWEEP`: one HTML file with the curves, samples and provenance of a run, or the comparison of a sweep's runs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

SUMMARY = "one HTML page of a run or a sweep: curves, intervals, samples"


def help_text() -> str:
    return f"""\
rlx report: {SUMMARY}.

usage: rlx report RUN|SWEEP [--out FILE] [--score METRIC] [--csv FILE]

  --out FILE                                      the page; default: report.html in that directory
  --score METRIC                                  a run's score in a sweep: its last value of eval/math/avg@1, say; default: its reward
  --csv FILE                                      also the run, or the runs of a sweep, as a table, one a line

  rlx report outputs/mine                         curves, stage times, dropped rollouts, evaluations, samples, provenance
  rlx report outputs/losses                       a sweep: curves with bands over seeds, interquartile means, what differs
  rlx report /their/run --out /tmp/theirs.html    of a directory that you may only read

A run's page links its timeline, which is written to the run: timeline.json.gz, for https://ui.perfetto.dev.
The page needs no network and no other file otherwise. The run may be starting, running, failed or half-made. Directories of
rlx eval and rlx synthesize are not shown. docs/report.md explains the statistics."""


def run(argv: list[str]) -> int:
    from rlx.cli.arguments import Parser
    from rlx.cli.runs import jobs_of
    from rlx.config.errors import ConfigError
    from rlx.paths import RunPaths, atomic
    from rlx.report.gather import gather, open_all, training
    from rlx.report.sweep import csv_of

    parser = Parser("report")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--score")
    given = parser.parse_args(argv)
    directory = given.directory.expanduser()
    runs, is_sweep = open_all(directory)
    found, others = training(directory, [gather(each, jobs, given.score) for jobs in [jobs_of(runs)] for each in runs])
    if given.score is not None and all(facts.score is None for facts in found):
        known = ", ".join(sorted({name for facts in found for name in facts.names("eval") if "@" in name}))
        raise ConfigError(f"no run has the metric {given.score} (--score).\n  fix: name one of {known or 'those in metrics.jsonl'}")
    target = given.out.expanduser() if given.out is not None else RunPaths(directory).report
    if is_sweep:
        from rlx.report.sweep import report as sweep_report

        html = sweep_report(directory, found, others)
    else:
        from rlx.report.single import report as run_report
        from rlx.report.timeline import write_timeline

        with contextlib.suppress(OSError):  # a directory that may only be read
            write_timeline(RunPaths(directory))
        html = run_report(found[0], target.parent)
    content = html.encode(errors="backslashreplace")
    files = {"--out": (target, content)} | ({"--csv": (given.csv.expanduser(), csv_of(found).encode())} if given.csv is not None else {})
    for option, (file, written) in files.items():
        try:
            with atomic(file) as temporary:
                temporary.write_bytes(written)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}\n  fix: name another file with {option} FILE") from error
    print(f"{target}   {len(content) / 1e6:.1f} MB, {f'a sweep of {len(found)} runs' if is_sweep else 'a run'}")
    problems = [f"{facts.name}: {problem}" for facts in found for problem in facts.problems]
    for line in [*(f"not shown: {line}" for line in others), *problems]:
        print(f"  {line}", file=sys.stderr)
    return 0
