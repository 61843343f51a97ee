"""Starts a worker with an environment that needs no verifiers, so that tests of workers take no seconds to start one.

It is run in place of `rlx/envs/boot.py`. The arguments of the environment's configuration say what goes wrong, for which examples.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.config.schema import EnvConfig
from rlx.envs import worker
from rlx.envs.wire import Settings
from rlx.types import Rollout, Task

KEPT: list[bytes] = []


def sleep_in_c() -> None:
    """Sleeps for ever in C with the interpreter held."""
    while True:  # a signal wakes it
        ctypes.PyDLL(None).sleep(3600)


class StandInEnvironment:
    """Each member asks once, or `turns` times, and gets 1 for a reply that is the reversed word."""

    def __init__(self, name: str, config: EnvConfig, settings: Settings) -> None:
        args: dict[str, Any] = {"trouble": "", "bad": [], "group": False, "turns": 1, "salt": 0} | config.args
        if args["trouble"] == "load":
            raise RuntimeError("the word list is not there")
        if args["trouble"] == "print":
            print("this package cannot live here", flush=True)
            os._exit(7)
        if args["trouble"] == "fork":  # the child has the link, too, and outlives this process
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(7)
        if args["trouble"] == "slow":
            time.sleep(3600)
        if args["trouble"] in ("first", "first_slow"):  # only the first process of the pool can load it
            if os.path.exists(args["bad"][0]):
                if args["trouble"] == "first_slow":
                    time.sleep(3600)
                raise RuntimeError("the second process cannot load")
            open(args["bad"][0], "w").close()
        if "server" in args:  # as a tool server of verifiers: in a session of its own; it takes its mebibytes and says its number
            code = (
                f"import os, time; kept = bytearray(b'x') * ({args['server_mib']} << 20); print(os.getpid(), flush=True); time.sleep(3600)"
            )
            with open(args["server"], "w") as file:
                subprocess.Popen([sys.executable, "-S", "-c", code], stdout=file, start_new_session=True)
            while not Path(args["server"]).read_text():
                time.sleep(0.01)
        self.name, self.args, self.timeout = name, args, settings.timeout
        self.scores_groups = args["group"]
        self.agents: list[str] = []
        salt = os.getpid() if args["salt"] else 0
        words = [f"word {number} {salt}" for number in range(2500 if args["salt"] is None else 40)]
        self.rows = [{"example_id": number, "prompt": [{"role": "user", "content": word}]} for number, word in enumerate(words)]
        self.policy: Any = None
        self.scores: Any = None
        self.tools = ()

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """See `rlx.envs.base.Environment`."""
        return list(await asyncio.gather(*(self.rollout(task, member, attempt) for member in members)))

    async def rollout(self, task: Task, member: int, attempt: int) -> Rollout:
        """One episode."""
        episode = self.policy.episode(task, member, attempt)
        messages, ids = list(task.row["prompt"]), []
        for _ in range(self.args["turns"]):
            reply = await episode.respond(messages)
            messages += [reply.message, task.row["prompt"][0]]
            ids.append(reply.request_id)
        if self.scores is not None:
            self.scores(episode.trace)
        end = time.process_time() + self.args.get("busy", 0.0)
        while time.process_time() < end:
            pass
        if task.example_id in self.args["bad"] and (not self.scores_groups or member == 1) and attempt < self.args.get("attempts", 99):
            await asyncio.create_task(self.misbehave(task))
        return Rollout(
            task=task,
            member=member,
            trace=episode.keep(ids[-1:]) if self.args.get("keep") else episode.trace,
            prompt=task.row["prompt"],
            completion=messages[1:],
            reward=float(messages[1]["content"] == task.row["prompt"][0]["content"][::-1]),
            rewards={"pid": float(os.getpid())},
            metrics={},
            status="ok",
            stop="done",
        )

    async def misbehave(self, task: Task) -> None:
        """What goes wrong."""
        match self.args["trouble"]:
            case "c":
                sleep_in_c()
            case "thread":
                await asyncio.to_thread(sleep_in_c)
            case "cpu":
                end = time.process_time() + self.args["seconds"]
                while time.process_time() < end:
                    pass
            case "exit":
                os._exit(3)
            case "leak":
                KEPT.append(b"x" * (100 * 2**20))
                time.sleep(1.5)  # long enough to be asked for its stacks
            case "terminate":  # as multiprocessing ends its processes
                ready, started = os.pipe()
                if (child := os.fork()) == 0:
                    os.write(started, b"x")
                    time.sleep(3600)
                    os._exit(0)
                os.read(ready, 1)
                os.kill(child, signal.SIGTERM)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            case "bug":
                raise KeyError("a bug in the adapter")

    async def close(self) -> None:
        """Leave a file, if the configuration names one. With `closing` it takes that many seconds."""
        await asyncio.sleep(self.args.get("closing", 0.0))
        if "closed" in self.args:
            open(self.args["closed"], "w").close()


if __name__ == "__main__":
    worker.load_one = StandInEnvironment  # type: ignore[assignment, misc]
    worker.main(*sys.argv[2:])
