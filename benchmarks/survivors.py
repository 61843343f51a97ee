"""How much finished work a run loses where rollouts time out or their process crashes: `python benchmarks/survivors.py`.

The default run on real vLLM with an environment whose reward never returns for a share of the rollouts (`rollout_timeout` of SECONDS), or
ends its process for one of so many. The environment writes a line for each reward that it has given. What was finished and is not in a
batch is lost, apart from what is in flight when the run ends. This file needs only what both sides of the change to survivors have, so it
also runs in a checkout of b6449f95, installed in an environment of its own:

    (cd ../before; .venv/bin/python ../CHECKOUT/benchmarks/survivors.py)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH = 128
ENVIRONMENT = """
import asyncio, os, random
import rlx_reverse_text as base
import verifiers as vf

def load_environment(hang=0.0, crash=0.0, log="", **arguments):
    async def reward(completion, answer):
        drawn = random.random()
        if drawn < hang:
            await asyncio.sleep(3600)
        if drawn > 1 - crash:
            os._exit(1)
        with open(log, "a", encoding="utf-8") as file:
            file.write(".")
        return float(completion[-1]["content"].strip() == answer)

    inner = base.load_environment(**arguments)
    return vf.SingleTurnEnv(dataset=inner.dataset, rubric=vf.Rubric(funcs=[reward]))
"""


def measure(name: str, hang: float, crash: float, options: argparse.Namespace) -> str:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rlx_unreliable.py").write_text(ENVIRONMENT, encoding="utf-8")
        run, log = Path(folder) / "run", Path(folder) / "given"
        arguments = f"{{hang:{hang},crash:{crash},log:'{log}'}}"
        command = [
            sys.executable, "train.py", f"run.dir={run}", f"orchestrator.batch_size={BATCH}", f"max_steps={options.steps}",
            "envs.reverse_text.id=rlx_unreliable", f"envs.reverse_text.args={arguments}", "eval.interval=null",
            f"orchestrator.rollout_timeout={options.seconds}", *options.set,
        ]  # fmt: skip
        began = time.monotonic()
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": folder, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=options.limit
        )
        if not (run / "metrics.jsonl").exists():
            return f"| {name} | exit code {done.returncode}: {(done.stdout + done.stderr)[-600:]} |"
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        times = [record["time"] for record in records if record["source"] == "trainer"]
        batches = [record["batch/rollouts"] for record in records if "batch/rollouts" in record][: len(times)]
        trained, given = int(sum(batches)), log.stat().st_size
        pace = (times[-1] - times[0]) / max(1, len(times) - 1) if times else float("nan")
        last = done.stdout.strip().splitlines()[-1:] if done.returncode else []
        return (
            f"| {name} | {len(times)} of {options.steps}, exit code {done.returncode} {' '.join(last)} | {given} | {trained} | "
            f"{1 - trained / max(1, given):.3f} | {pace:.2f} | {time.monotonic() - began:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5.0, help="of orchestrator.rollout_timeout")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a run may take")
    parser.add_argument("--hang", type=float, nargs="*", default=[0.0, 0.05, 0.1, 0.2], help="shares of rollouts that never end")
    parser.add_argument("--crash", type=float, nargs="*", default=[0.005], help="shares of rollouts that end their process")
    parser.add_argument("--set", action="append", default=[], help="a key of the run, KEY=VALUE")
    options = parser.parse_args()
    print("| fault | steps | rewards given | trained | lost | s a step | s in all |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for share in options.hang:
        print(measure(f"{share:.0%} hang", share, 0.0, options), flush=True)
    for share in options.crash:
        print(measure(f"1 of {1 / share:.0f} crashes", 0.0, share, options), flush=True)


if __name__ == "__main__":
    main()
