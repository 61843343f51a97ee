"""How long a sweep takes from the command to the prompt: compose, check and plan 64 runs, make their directories, submit one array.
Then the same command again, when there is nothing left to do.

    slurm/dev_cluster.sh up; python benchmarks/sweep.py [--runs 3] [--elements 64]

The jobs are submitted held and cancelled at once. `--stand-in` needs no SLURM: its commands are scripts that answer at once.
`--dry` stops before the directories.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "sbatch": "echo Submitted batch job 12",
    "squeue": 'for i in $(seq 0 999); do echo "12_$i|PENDING"; done',
    "srun": ":",
    "scontrol": ":",
    "scancel": ":",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--dry", action="store_true", help="compose, check and plan only")
    parser.add_argument("--stand-in", action="store_true", help="without SLURM")
    args = parser.parse_args()
    cluster = ["launcher=slurm", "slurm=dev", "hardware=cpu", "slurm.options={hold: true}"]
    first, again = [], []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | ({"PATH": f"{stand_ins(Path(folder))}:{os.environ['PATH']}"} if args.stand_in else {})
            line = ["train.py", "-m", "loss=grpo,gspo", f"seed=range({args.elements // 2})", f"run.dir={folder}/sweep", *cluster]
            seconds, text = timed([*line, *(["dry_run=true"] if args.dry else [])], environment)
            first.append(seconds)
            if found := re.search(r"^  (\d+)_0 ", text, re.MULTILINE):
                again.append(timed(line, environment)[0])
                subprocess.run(["scancel", found[1]], check=True, env=environment)
                time.sleep(0 if args.stand_in else 1)  # the controller still writes to the folder
    what = "compose + check + plan" if args.dry else "compose + check + plan + submit"
    print("| what | median s | range | goal |\n| --- | --- | --- | --- |")
    for name, seconds, goal in ((f"{what}, {args.elements} runs", first, 10), ("the same again, nothing to do", again, 2)):
        if seconds:
            print(f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f}–{max(seconds):.2f} | ≤ {goal} |")


def stand_ins(folder: Path) -> Path:
    """A folder with scripts in place of SLURM's commands."""
    (folder / "bin").mkdir()
    for name, does in COMMANDS.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"


def timed(line: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Seconds and output of a command, which must succeed."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return seconds, done.stdout


if __name__ == "__main__":
    main()
