"""Time before the first step: the command line's import, compose + check + plan, and a start with a cached warm start.

    python benchmarks/startup.py [--runs 3] [--no-run]

Prints one table. Whole processes are timed from outside; the phases of a start are read from the run directory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def timed(command: list[str], cache: str | None = None) -> float:
    """Wall-clock seconds of one process. `cache`: its cache folder; None: the user's. Raises if the process fails."""
    environ = os.environ if cache is None else {**os.environ, "RLX_CACHE": cache}
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environ)
    return time.perf_counter() - start


def timed_cold(command: list[str]) -> float:
    """Wall-clock seconds of one process that finds nothing in the cache."""
    with tempfile.TemporaryDirectory() as cache:
        return timed(command, cache)


def row(label: str, seconds: list[float], goal: str = "") -> None:
    print(f"| {label} | {statistics.median(seconds):.2f} | {min(seconds):.2f}–{max(seconds):.2f} | {goal} |")


def timed_start(command: list[str], run: Path) -> list[tuple[str, float]]:
    """Run the whole stack for one step. Returns the seconds from the command to each event of its start, in order."""
    endpoint = run / "endpoints" / "inference_0.json"  # deleted when the server ends
    started, answers = time.time(), 0.0
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        answers = answers or (endpoint.exists() and time.time())
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}; see {run}/logs")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = {source: next(r["time"] for r in metrics if r["source"] == source) for source in ("orchestrator", "trainer")}
    events = {
        "run directory written": (run / "config.yaml").stat().st_mtime,
        "model ready (cached)": (run / "initial_model.txt").stat().st_mtime,
        "inference server answers": answers,
        "first batch complete": first["orchestrator"],
        "first step trained": first["trainer"],
    }
    return sorted(((name, at - started) for name, at in events.items()), key=lambda e: e[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-run", action="store_true", help="leave out the starts of the whole stack")
    args = parser.parse_args()
    python = sys.executable
    own = "import rlx.losses.grpo; "  # imports torch too
    plan = "from rlx.config.load import compose; from rlx.plan.make import make_plan; c = compose({}); make_plan(c.cfg, 'none')"
    print("| what | median s | range | goal |\n| --- | --- | --- | --- |")
    row("`python -c pass`", [timed([python, "-c", "pass"]) for _ in range(args.runs)])
    row("import of the command line", [timed([python, "-c", "import rlx.cli"]) for _ in range(args.runs)], "≤ 0.3")
    row("`rlx --help`", [timed([python, "-m", "rlx.cli", "--help"]) for _ in range(args.runs)], "≤ 0.5")
    row("`rlx train --help`", [timed([python, "-m", "rlx.cli", "train", "--help"]) for _ in range(args.runs)], "≤ 0.5")
    row("compose + check + plan", [timed([python, "-c", plan]) for _ in range(args.runs)], "≤ 1.5")
    row("the same and the objective's own module", [timed([python, "-c", own + plan]) for _ in range(args.runs)], "≤ 3")
    dry = [python, "train.py", "dry_run=true"]
    row("`train.py dry_run=true`, the environment not in the cache", [timed_cold(dry) for _ in range(args.runs)], "≤ 3")
    timed(dry)  # fills the cache
    row("`train.py dry_run=true`", [timed(dry) for _ in range(args.runs)], "≤ 1")
    big = ["loss=gspo", "env=math", "model=qwen3_8b", "hardware=node8", "dry_run=true"]
    timed([python, "train.py", *big])
    row(f"`train.py {' '.join(big)}`", [timed([python, "train.py", *big]) for _ in range(args.runs)], "≤ 3")
    if args.no_run:
        return
    with tempfile.TemporaryDirectory() as folder:
        timed([python, "train.py", "max_steps=1", f"run.dir={folder}/warm"])  # fills the cache
        starts = []
        for i in range(args.runs):
            run = Path(folder) / f"run{i}"
            starts.append(dict(timed_start([python, "train.py", "max_steps=1", f"run.dir={run}"], run)))
        for name in starts[0]:
            row(f"from the command to: {name}", [s[name] for s in starts], "≤ 40" if name == "first step trained" else "")


if __name__ == "__main__":
    main()
