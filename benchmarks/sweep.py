"""How long a sweep takes from the command to the prompt: compose, check and plan 64 runs, make their directories, submit one array.

    slurm/dev_cluster.sh up; python benchmarks/sweep.py [--runs 3] [--elements 64]

The jobs are submitted held and cancelled at once. `--dry` needs no SLURM and stops before the directories.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--dry", action="store_true", help="compose, check and plan only")
    args = parser.parse_args()
    cluster = ["launcher=slurm", "slurm=dev", "hardware=cpu", "slurm.options={hold: true}"]
    seconds = []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            line = ["train.py", "-m", "loss=grpo,gspo", f"seed=range({args.elements // 2})", f"run.dir={folder}/sweep", *cluster]
            started = time.perf_counter()
            more = ["dry_run=true"] if args.dry else []
            done = subprocess.run([sys.executable, *line, *more], cwd=ROOT, capture_output=True, text=True, check=False)
            seconds.append(time.perf_counter() - started)
            if done.returncode != 0:
                sys.exit(done.stdout + done.stderr)
            found = re.search(r"^  (\d+)_0 ", done.stdout, re.MULTILINE)
            if found:
                subprocess.run(["scancel", found[1]], check=True)
                time.sleep(1)  # the controller still writes to the folder
    what = "compose + check + plan" if args.dry else "compose + check + plan + submit"
    print("| what | median s | range | goal |\n| --- | --- | --- | --- |")
    print(f"| {what}, {args.elements} runs | {statistics.median(seconds):.2f} | {min(seconds):.2f}–{max(seconds):.2f} | ≤ 15 |")


if __name__ == "__main__":
    main()
