"""Every objective on the default run, or on the run of the overrides, with the same budget on the CPU: does the reward rise, and how fast?

    python benchmarks/objectives.py [--only grpo rloo …] [--seeds 0 1 2] [--steps 100] [--out DIR] [--table] [--write] [OVERRIDE …]

Runs `python train.py loss=NAME seed=S` one after the other. Complete run directories are not run again, so the benchmark can be
stopped and continued. `--table` only prints existing results. `--write` appends the table to `benchmarks/HISTORY.md`.
Presets keep their papers' constants; everything else is the default run's. `sft`, `opd` and `sdft` ignore the reward and are left out.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from demo import GOAL, WINDOW, Curve, ours

from rlx.config.presets import conf_directory
from rlx.runs.run import Run

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("sft", "opd", "sdft")


def presets() -> list[str]:
    """Names of the objectives that use the reward."""
    return [path.stem for path in sorted((conf_directory() / "loss").glob("*.yaml")) if path.stem not in LEFT_OUT]


def run_of(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-seed{seed}"


def is_complete(run: Path, steps: int) -> bool:
    """Whether the run completed with this budget of steps, so that all rows of the table have the same budget."""
    status = Run(run).status
    return status is not None and status.state == "completed" and status.max_steps == steps


def play(out: Path, name: str, seed: int, steps: int, overrides: list[str]) -> None:
    """Run one objective unless it is complete. Deletes the rest of an interrupted run."""
    run = run_of(out, name, seed)
    if is_complete(run, steps):
        return
    command = [
        sys.executable,
        "train.py",
        f"loss={name}",
        f"seed={seed}",
        f"run.dir={run}",
        "clean=true",
        f"max_steps={steps}",
        *overrides,
    ]
    print("$", shlex.join(["python", *command[1:]]), flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{name}, seed {seed}: exit code {done.returncode}\n{done.stderr[-2000:]}", flush=True)


def table(out: Path, steps: int) -> str:
    """One row per objective, with its seeds' values side by side."""
    lines = [
        f"| objective | seeds | reward, first {WINDOW} steps | last {WINDOW} steps | first step with a {WINDOW}-step mean of {GOAL} "
        "| seconds to it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in presets():
        found = {int(run.name.rpartition("seed")[2]): ours(run) for run in out.glob(f"{name}-seed*") if is_complete(run, steps)}
        if found:
            seeds = sorted(found)
            reached, seconds = ([of(found[seed]) for seed in seeds] for of in (Curve.goal_step, Curve.goal_seconds))
            cells = [
                ", ".join(map(str, seeds)),
                ", ".join(f"{statistics.mean(found[seed].rewards[:WINDOW]):.3f}" for seed in seeds),
                ", ".join(f"{statistics.mean(found[seed].rewards[-WINDOW:]):.3f}" for seed in seeds),
                ", ".join("–" if step is None else str(step) for step in reached),
                ", ".join("–" if took is None else f"{took:.0f}" for took in seconds),
            ]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=presets(), choices=presets(), metavar="NAME")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100, help="budget of every run; finished runs with another one are run again")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "objectives")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--write", action="store_true", help="append the table to benchmarks/HISTORY.md")
    arguments, overrides = parser.parse_known_args()
    if not arguments.table:
        for seed in arguments.seeds:
            for name in arguments.only:
                play(arguments.out.resolve(), name, seed, arguments.steps, overrides)
    found = table(arguments.out, arguments.steps)
    print(found)
    if arguments.write:
        with (ROOT / "benchmarks" / "HISTORY.md").open("a") as file:
            command = shlex.join(["python", "benchmarks/objectives.py", "--steps", str(arguments.steps), *overrides])
            title = f"## {datetime.date.today()} Every objective with the same budget: `{command}`"
            file.write(f"\n{title}\n\n{found}\n")


if __name__ == "__main__":
    main()
