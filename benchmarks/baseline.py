"""What a model scores in environments before any training: `python benchmarks/baseline.py model=smollm2_135m env=[math,countdown]`.

The arguments are those of `train`. One real inference server starts; then examples that each environment holds out are played, one rollout
each, and a table is printed: mean reward, rewards by function, share of truncated rollouts, tokens and turns of a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlx.config.load import compose, to_yaml
from rlx.config.schema import Config
from rlx.envs.load import check_chat, give_policy, load_environments, load_tokenizer
from rlx.inference.endpoints import Endpoint, endpoint_file, read_endpoint
from rlx.inference.sampler import Sampler
from rlx.paths import RunPaths
from rlx.types import Rollout, Task

HEAD = """| environment | rollouts | reward | by function | truncated | tokens | turns | s |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def row_of(name: str, rollouts: Sequence[Rollout], seconds: float) -> str:
    """The table's row of one environment."""
    done = [rollout for rollout in rollouts if rollout.status == "ok"]
    named = [one.rewards | one.metrics for one in done]
    mean = {key: np.mean([one[key] for one in named]) for key in (named[0] if named else {})}
    shown = {key: value for key, value in mean.items() if key not in ("num_turns", "reward_error", "requests_beside")}
    values = [
        f"`{name}`",
        str(len(done)),
        f"{np.mean([one.reward for one in done]):.3f}" if done else "-",
        ", ".join(f"{key} {value:.2f}" for key, value in shown.items()),
        f"{np.mean([one.is_truncated for one in done]):.2f}" if done else "-",
        f"{np.mean([one.num_completion_tokens for one in done]):.0f}" if done else "-",
        f"{np.mean([len(one.turns) for one in done]):.1f}" if done else "-",
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(values)} |"


async def play(config: Config, paths: RunPaths, num_examples: int, server: Endpoint, show: int) -> None:
    """Play the environments one after the other and print the table."""
    envs = load_environments(config, lambda phase: None)
    chat = load_tokenizer(config, paths, lambda phase: None)
    print(HEAD)
    async with Sampler([server], 600.0, 600.0) as sampler:
        give_policy(envs, config, chat, sampler)
        for name, env in envs.items():
            try:
                check_chat({name: env}, config, chat)
            except ValueError as error:
                print(f"| `{name}` | refused: {error} |", flush=True)
                continue
            began = time.monotonic()
            places = range(min(num_examples, len(env.rows)))
            tasks = [Task(env=name, example_id=int(env.rows[i]["example_id"]), index=i, row=env.rows[i]) for i in places]
            played = await asyncio.gather(*(env.play(task, [0], 0) for task in tasks))
            rollouts = [one for (one,) in played]
            print(row_of(name, rollouts, time.monotonic() - began), flush=True)
            for one in rollouts[:show]:
                print(
                    f"\n--- {name}, reward {one.reward:g}, expected {one.task.row.get('answer')}\n{one.prompt[-1]}\n{one.completion}",
                    file=sys.stderr,
                )
            if errors := {str(one.error) for one in rollouts if one.status != "ok"}:
                print("\n".join(sorted(errors)), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=32, help="examples of each environment")
    parser.add_argument("--show", type=int, default=0, help="rollouts of each environment to print on the standard error")
    args, overrides = parser.parse_known_args()
    config = compose(overrides, dict(os.environ)).cfg
    config.orchestrator.env_workers = 0
    for env in config.envs.values():
        env.split, env.workers = "eval", 0
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        paths.config.write_text(to_yaml(config))
        paths.initial_model.write_text(f"{config.model.name}\n")
        with (paths.root / "server.log").open("wb") as log:
            server = subprocess.Popen([sys.executable, "-m", "rlx.roles.inference", "--run-dir", folder], stdout=log, stderr=log)
        try:
            while (endpoint := read_endpoint(endpoint_file(paths, 0))) is None:
                if server.poll() is not None:
                    sys.exit((paths.root / "server.log").read_text()[-2000:])
                time.sleep(0.2)
            asyncio.run(play(config, paths, args.examples, endpoint, args.show))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
