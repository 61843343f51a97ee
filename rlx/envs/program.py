"""Programs, or the model itself with a shell, as an environment: `env=program`. It needs no verifiers.

    rlx train env=program env.args.data=tasks.jsonl env.args.test='python -m pytest -q' env.harness.command='[python,agent.py]'

Each rollout gets a box with the task's files; the program in it finds the policy at $OPENAI_BASE_URL and $ANTHROPIC_BASE_URL, and nothing
else. When it has ended, a command in the box or a function scores what it left. Without a command the model plays itself: it is offered
one tool, a shell in the box.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from rlx.agents.box import Box, BoxError, open_box, sweep
from rlx.agents.commands import Result
from rlx.agents.dialects import Refused, Request, function
from rlx.agents.gateway import Gateway, Session
from rlx.agents.harness import Program
from rlx.agents.images import choose, prepared
from rlx.config.schema import EnvConfig
from rlx.config.signatures import locate
from rlx.envs.function import FULL, Ended, FunctionEnvironment, RowSource, Tasks, after_prompt
from rlx.envs.harbor import harbor_rows
from rlx.json_values import one_text
from rlx.policy.base import PolicyError, PromptTooLong
from rlx.trace import Trace
from rlx.types import Task

END_SECONDS = 10.0  # seconds that a program gets to end after the policy answers it no more
COMMAND = 60.0  # seconds for one command of the model in its shell
SHOWN = 16_384  # characters of a command's output that the model sees
SHELL = function(
    "shell",
    "Run a command in a shell and read what it prints.",
    {"type": "object", "properties": {"command": {"type": "string", "description": "the command"}}, "required": ["command"]},
)


class ProgramError(PolicyError):
    """A program that played nothing, or a test that could not run."""


def load_environment(
    data: str, reward: str | None = None, test: str | None = None, files: str = "files", test_files: str = "test_files", **tasks: Any
) -> RowSource:
    """Tasks for programs in boxes.

    Args:
        data: as of env=function, or a folder of Harbor's tasks.
        reward: dotted path of `function(completion, row[, box]) -> float`, which may be a coroutine.
        test: a shell command that scores in the box: 1 if it ends with 0, otherwise 0; a column `test` of a task comes before it.
        files: the column with the files of the box, a mapping of names to texts.
        test_files: the column with files that are written when the program has ended, before the test.
    """
    rows = harbor_rows(data) or None
    if (reward is None) == (test is None) and (rows is None or test is not None):
        raise ValueError("one of args.reward=MODULE.FUNCTION and args.test=COMMAND scores what the program left; set one of them")
    return RowSource(Tasks(data=data, **tasks), test_of(str(test)) if reward is None else locate(reward), rows)


def test_of(command: str) -> Any:
    """The score by a command in the box, or by that of a task's column `test`."""

    async def test(completion: str, row: Mapping[str, Any], box: Box) -> float:
        own = str(row.get("test") or command)
        result = await box.run(["sh", "-c", own])
        if (file := row.get("score_file")) is not None:
            named, plain = await box.read(f"{file}.json"), await box.read(f"{file}.txt")
            try:
                return float(str(plain) if named is None else json.loads(named)["reward"])
            except (ValueError, KeyError, TypeError):
                raise ProgramError(f"the test left no number in {file}.json or .txt: {_last(result)}") from None
        if result.code in (126, 127):  # as a shell says that there is no such command: not a task that was failed
            raise ProgramError(f"the test `{own}` cannot run in the box: {_last(result)}")
        return float(result.code == 0)

    return test


class ProgramEnvironment(FunctionEnvironment):
    """See `rlx.envs.base.Environment`."""

    failures_of: Mapping[type[BaseException], str] = {BoxError: "sandbox_error", ProgramError: "program_error"}
    most = 3  # the box, too
    kind = "none"
    image: str | None = None  # what boxes are made of
    first: str | None = None  # the same for the first task, if it has an image of its own

    def __init__(self, name: str, source: RowSource, config: EnvConfig, timeout: float) -> None:
        super().__init__(name, source, config, timeout)
        self.harness = config.harness
        self.tools = () if config.harness.command else (SHELL,)
        self.gateway = Gateway()

    def prepare(self) -> None:
        row, own = self.rows[0], self.config.box.image
        self.kind = choose(self.config.sandbox, row.get("image") or own)
        if self.kind == "none" and row.get("score_file"):
            raise ValueError("the verifiers of Harbor's tasks write outside the box's folder: sandbox=none cannot keep them apart")
        if self.kind == "apptainer":
            raise ValueError("sandbox=apptainer runs v1 tasksets; use bwrap, podman or docker for programs")
        self.image, self.first = prepared(self.kind, own), prepared(self.kind, row.get("image"))
        self.sandbox = "no sandbox" if self.kind == "none" else self.kind  # for people
        self.program = Program(self.harness)
        sweep()

    def demonstration(self, row: Mapping[str, Any], errs: bool, state: Any) -> Any:
        """The messages of a row's column `demonstration`, if it has one."""
        return None if errs else row.get("demonstration")

    def rehearse(self) -> None:
        """Open a box once, to see that it opens. Raises BoxError."""

        async def tried() -> None:
            await (await self._open(self.first or self.image)).close()

        asyncio.run(tried())

    async def _open(self, image: str | None) -> Box:
        return await open_box(self.kind, self.program.seen(self.config.box), image)

    async def _serve(self) -> None:
        await self.gateway.start()

    async def close(self) -> None:
        """Stop the gateway."""
        await super().close()
        await self.gateway.stop()

    async def _episode(self, task: Task, member: int, episode: Any, timing: dict[str, Any]) -> Ended:
        row, began = dict(task.row), time.monotonic()
        image = await asyncio.to_thread(prepared, self.kind, row["image"]) if row.get("image") else self.image
        box = await self._open(image)
        try:
            box.workdir = row.get("workdir") or box.workdir
            await box.write(row.get(self.config.args.get("files", "files")) or {})
            timing["setup"] = time.monotonic() - began
            if self.harness.command:
                trace, completion, stop, code = await self._program(row, box, episode)
            else:
                trace, completion, stop, code = await self._shell(row, box, episode)
            timing["generation"] = time.monotonic() - began - timing["setup"]
            await box.quiet()  # what it has left running would read and change the test's files
            if row.get("before_test"):
                await box.run(["sh", "-c", str(row["before_test"])])
            await box.write(row.get(self.config.args.get("test_files", "test_files")) or {})
            reward = await self._score(trace, completion, row, box)
            if isinstance(reward, BoxError | ProgramError):
                raise reward
            timing["scoring"] = time.monotonic() - began - timing["setup"] - timing["generation"]
        finally:
            await box.close()
        return Ended(trace, after_prompt(trace), reward, stop, {"turns": float(len(trace.answers)), "exit_code": float(code)})

    async def _shell(self, row: Mapping[str, Any], box: Box, episode: Any) -> tuple[Trace, str, str, int]:
        """The model with a shell: (trace, its last words, why it ended, exit code of its last command)."""
        session, messages, code, said = Session(episode, self.harness, self.longest), list(row["prompt"]), 0, ""
        try:
            while True:
                reply = await session.answer(Request(messages=messages, tools=[SHELL], sampling={}))
                said = reply.content
                messages.append(reply.message)
                if not reply.calls:
                    return episode.trace, said, "length" if reply.truncated else "answered", code
                for call in reply.calls:
                    code, text = await self._called(box, call.name, call.arguments)
                    messages.append({"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name})
        except Refused:
            if not session.stop:
                raise
            return episode.trace, said, session.stop, code
        except PromptTooLong:
            if not episode.trace.answers:
                raise
            return episode.trace, said, FULL, code

    async def _called(self, box: Box, name: str, arguments: str) -> tuple[int, str]:
        try:
            command = json.loads(arguments or "{}")["command"]
        except (ValueError, KeyError, TypeError):
            return 2, "error: the arguments must be a JSON object with `command`"
        if name != "shell":
            return 2, f"error: there is no tool {name}; the only one is shell"
        result = await box.run(["sh", "-c", str(command)], timeout=COMMAND)
        said = result.stdout + result.stderr + (f"\nended after {COMMAND:g} seconds" if result.late else "")
        return result.code, said[:SHOWN].strip() or f"(exit code {result.code})"

    async def _program(self, row: Mapping[str, Any], box: Box, episode: Any) -> tuple[Trace, str, str, int]:
        """A program: (trace of the answers that it has received, what it printed, why it ended, its exit code)."""
        limit = self.timeout if self.harness.timeout is None else min(self.timeout, self.harness.timeout)
        box.reach(self.gateway.port)
        session = self.gateway.open(episode, self.harness, self.longest, time.monotonic() + limit)
        try:
            texts = [(message["role"] == "system", str(message["content"])) for message in row["prompt"]]
            prompt, system = [one_text(text for is_system, text in texts if is_system is wanted) for wanted in (False, True)]
            command, own = self.program.call(self.gateway.url, session.key, prompt, system, row)
            result = await box.run(command, own, timeout=limit, until=session.ended, grace=END_SECONDS)
        finally:
            await self.gateway.close(session, "ended")
        if not session.delivered:
            if session.failure is not None:
                raise session.failure
            raise ProgramError(f"the program ended with exit code {result.code} before it had an answer of the model: {_last(result)}")
        is_full = isinstance(session.failure, PromptTooLong)
        if result.code and session.failure is not None and not is_full:
            raise session.failure
        stop = FULL if is_full else session.stop if session.stop not in ("", "ended") else "timeout" if result.late else "ended"
        return episode.keep(session.delivered), result.stdout.strip(), f"program_{stop}", result.code


def _last(result: Result) -> str:
    lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


ENVIRONMENT = ProgramEnvironment
