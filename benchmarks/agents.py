"""What boxes and programs cost: python benchmarks/agents.py [--image NAME] [--rollouts N]

For each kind of box: seconds to start it, to run a command, to close it, one after the other and 64 at once; the CPU of this process and
of its children; and a rollout of four turns by a bare program and through the gateway in a box. The policy is a stand-in that answers at
once, so that what is left is the cost of boxes, programs and gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from policy_stand_in import StandIn, policy_of, task_of, tiny_chat

from rlx.agents.box import open_box
from rlx.agents.images import prepared, problem_of
from rlx.config.schema import EnvConfig
from rlx.config.schema_rollout import BoxConfig, HarnessConfig
from rlx.envs.kinds import load_one
from rlx.envs.wire import Settings

AT_ONCE = 64
PROGRAM = """
import json, os, urllib.request
messages = [{"role": "user", "content": os.environ["TASK"]}]
for turn in range(4):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    os.system(f"echo {turn} >> answer.txt")
    messages += [said, {"role": "user", "content": "go on"}]
"""
BARE = PROGRAM.replace(
    'said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]', 'said = {"role": "assistant", "content": "x"}'
)


def cpu() -> tuple[float, float]:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


async def box_costs(kind: str, image: str | None) -> dict[str, float]:
    config, seconds = BoxConfig(memory_gb=1.0, disk_gb=0.05), {"start": [], "command": [], "quiet": [], "close": []}
    for _ in range(5):
        began = time.perf_counter()
        box = await open_box(kind, config, image)
        seconds["start"].append(time.perf_counter() - began)
        began = time.perf_counter()
        await box.run(["true"])
        seconds["command"].append(time.perf_counter() - began)
        began = time.perf_counter()
        await box.quiet()
        seconds["quiet"].append(time.perf_counter() - began)
        began = time.perf_counter()
        await box.close()
        seconds["close"].append(time.perf_counter() - began)
    costs = {name: statistics.median(values) for name, values in seconds.items()}
    count = AT_ONCE if kind in ("bwrap", "none") else 8

    async def one() -> None:
        box = await open_box(kind, config, image)
        await box.run(["true"])
        await box.close()

    began, before = time.perf_counter(), cpu()
    await asyncio.gather(*(one() for _ in range(count)))
    after = cpu()
    return costs | {
        "at_once": count,
        "seconds_each": (time.perf_counter() - began) / count,
        "own_cpu_each": (after[0] - before[0]) / count,
        "children_cpu_each": (after[1] - before[1]) / count,
    }


async def rollout_costs(kind: str, image: str | None, rollouts: int, folder: Path) -> dict[str, float]:
    (folder / "tasks.jsonl").write_text(json.dumps({"question": "go", "test": "test -s answer.txt"}) + "\n")
    (folder / "agent.py").write_text(PROGRAM)
    os.chdir(folder)
    python = "/usr/bin/python3" if kind == "bwrap" else "python3"
    harness = HarnessConfig(command=[python, "agent.py"])
    config = EnvConfig(
        id="rlx.envs.program", args={"data": "tasks.jsonl", "test": "true"}, sandbox=kind, box=BoxConfig(image=image), harness=harness
    )
    env: Any = load_one("e", config, Settings(timeout=300))
    env.policy = policy_of(StandIn(tiny_chat(), error=0.0), context_length=8192)
    await env.play(task_of(env), [0], 0)  # what is loaded once
    began, before = time.perf_counter(), cpu()
    played = await asyncio.gather(*(env.play(task_of(env), [0], number) for number in range(rollouts)))
    after = cpu()
    assert all(rollout.status == "ok" and rollout.reward == 1.0 for (rollout,) in played), played[0]
    await env.close()
    return {
        "rollouts": rollouts,
        "seconds_each": (time.perf_counter() - began) / rollouts,
        "own_cpu_each": (after[0] - before[0]) / rollouts,
        "children_cpu_each": (after[1] - before[1]) / rollouts,
        "server_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def bare_costs(rollouts: int, folder: Path) -> dict[str, float]:
    """The program alone, which asks nobody: two at a time, as there are two processors here."""
    (folder / "bare.py").write_text(BARE)
    variables = {**os.environ, "TASK": "go", "OPENAI_BASE_URL": "http://nowhere", "OPENAI_API_KEY": ""}
    began, before = time.perf_counter(), cpu()
    running: list[subprocess.Popen] = []
    for _ in range(rollouts):
        if len(running) == 2:
            running.pop(0).wait()
        running.append(subprocess.Popen(["/usr/bin/python3", "bare.py"], cwd=folder, env=variables))
    for process in running:
        process.wait()
    after = cpu()
    return {
        "rollouts": rollouts,
        "seconds_each": (time.perf_counter() - began) / rollouts,
        "children_cpu_each": (after[1] - before[1]) / rollouts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", help="an image's name, for podman and docker")
    parser.add_argument("--rollouts", type=int, default=AT_ONCE)
    asked = parser.parse_args()
    print(json.dumps({"machine": platform.platform(), "processors": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(json.dumps({"bare program": bare_costs(asked.rollouts, folder)}))
        for kind in ("none", "bwrap", "podman", "docker"):
            needs_image = kind in ("podman", "docker")
            if problem_of(kind) is not None or (needs_image and asked.image is None):
                print(json.dumps({kind: problem_of(kind) or "no --image"}))
                continue
            image = prepared(kind, asked.image) if needs_image else None
            print(json.dumps({kind: asyncio.run(box_costs(kind, image))}))
            rollouts = asked.rollouts if not needs_image else 8
            print(json.dumps({f"{kind}, rollout of four turns": asyncio.run(rollout_costs(kind, image, rollouts, folder))}))


if __name__ == "__main__":
    main()
