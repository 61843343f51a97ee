"""Where the agents of v1 tasksets run: bubblewrap as one of verifiers' runtimes, and a harness that is a command.

verifiers' runtimes are a closed list, so `rollout.make_runtime` is replaced (one name, in 0.3 and 0.4). docker, podman, apptainer and the
remote ones are its own. What its servers of this machine offer (the model, tools, state) is forwarded into a box at the same port.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import verifiers.v1 as vf
from pydantic import PrivateAttr
from verifiers.v1 import rollout
from verifiers.v1.configs.harness import HarnessConfig as TheirHarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.runtimes import ProgramResult, SubprocessRuntime
from verifiers.v1.runtimes.base import Runtime
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessProcess
from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing

from rlx.agents.box import HOME, Box, open_box
from rlx.agents.harness import Program
from rlx.agents.images import choose, prepared
from rlx.config.schema import EnvConfig
from rlx.config.schema_rollout import BoxConfig
from rlx.envs.messages import for_template

_make_runtime = rollout.make_runtime


class BoxedConfig(SubprocessConfig):
    """A runtime `subprocess` whose commands run in a box."""

    _holds: BoxConfig = PrivateAttr()
    _image: str | None = PrivateAttr(None)


class BoxRuntime(SubprocessRuntime):
    """A box with verifiers' interface of a runtime. All that runs in it ends with it, or with this process."""

    box: Box  # once it is started

    async def start(self) -> None:
        self.box = await open_box("bwrap", self.config._holds, self.config._image)
        self.workdir, self.info.id = HOME, self.name

    def host_url(self, url: str) -> str:
        """The same address, which the box reaches."""
        if urlsplit(url).hostname in ("127.0.0.1", "localhost"):
            self.box.reach(urlsplit(url).port or 80)
        return url

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        result = await self.box.run(argv, self.process_env(env))
        return ProgramResult(exit_code=result.code, stdout=result.stdout, stderr=result.stderr)

    async def _started(self, argv: Sequence[str], env: dict[str, str], pipe: int) -> asyncio.subprocess.Process:
        command = await self.box.entered(argv, self.process_env(env))
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> SubprocessProcess:
        return SubprocessProcess(await self._started(argv, env, asyncio.subprocess.PIPE))

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        await self._started(["sh", "-c", 'exec "$@" > "$0" 2>&1', log, *argv], env, asyncio.subprocess.DEVNULL)

    async def _read(self, path: str, *more: Any) -> bytes:
        return await Runtime._read(self, path, *more)

    async def write(self, path: str, data: bytes) -> None:
        await self.box.write({path: data})

    async def teardown(self) -> None:
        if hasattr(self, "box"):
            await self.box.close()

    def cleanup(self) -> None:
        """Nothing is left when this process has ended."""


class CommandHarness(Harness[TheirHarnessConfig]):
    """A program by its command line (`envs.NAME.harness.command`), which finds the policy as one of env=program does."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    SUPPORTS_MCP = True  # it finds the servers in MCP_NAME

    def __init__(self, program: Program) -> None:
        super().__init__(TheirHarnessConfig(id="null"))
        self.program = program

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any, *_: Any, **__: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        command, env = self.program.call(endpoint.removesuffix("/v1"), secret, str(prompt or ""), system or "", {})
        program = runtime.run_program(command, env | {f"MCP_{name.upper()}": each for name, each in mcp_urls.items()})
        try:
            return await asyncio.wait_for(program, self.program.config.timeout)
        except TimeoutError:  # what it has done by then is scored
            return ProgramResult(exit_code=0, stdout="", stderr="")


def install() -> None:
    """Let verifiers make boxes, and run scripts with this Python; it would have uv install one for each, from the network."""

    def made(config: Any, name: str | None = None) -> Any:
        return BoxRuntime(config, name) if isinstance(config, BoxedConfig) else _make_runtime(config, name)

    async def prepare_uv_script(self: Any, script: str | bytes, env: dict | None = None, *, activate: bool = True) -> list[str]:
        data = script.encode() if isinstance(script, str) else script
        name = f"script-{abs(hash(data)):x}.py"
        await self.write(name, data)
        return [sys.executable, str(Path(self.workdir, name))]

    rollout.make_runtime = made
    SubprocessRuntime.prepare_uv_script = prepare_uv_script


def runtime_of(where: str, config: EnvConfig) -> dict[str, Any]:
    """verifiers' runtime for `sandbox`. `fit` makes a box of a subprocess where something runs in it."""
    if config.sandbox in ("auto", "bwrap", "none"):
        return {"type": "subprocess"}
    try:
        choose(config.sandbox, config.box.image or "of the task")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return {"type": config.sandbox} | ({"image": config.box.image} if config.box.image else {})


def hooks(task_type: type[vf.Task]) -> list[Callable]:
    """The functions of a task class that verifiers calls around and after an agent's run; those of `vf.Task` itself are left out."""
    own = [(name, value) for name, value in inspect.getmembers(task_type, inspect.isfunction) if value is not getattr(vf.Task, name, None)]
    return [value for name, value in own if name in ("setup", "finalize") or hasattr(value, "reward") or hasattr(value, "metric")]


def fit(where: str, env: vf.Env, config: EnvConfig, chosen: frozenset[str], task: vf.Task) -> str:
    """Give the policy's agents their program, and a box to those that may run something. Returns what the boxes are; empty: there are none.

    `chosen`: the agents that may run commands on this machine, because the user or the environment's author has said so. `task`: the first.
    Raises ValueError, in verifiers' words where it has some, if the environment cannot run here.
    """
    for name, theirs in (("max_turns", "max_turns"), ("max_tokens", "max_output_tokens")):
        if getattr(config.harness, name) is not None:
            raise ValueError(f"{where}.harness.{name} bounds programs of env=program; of a v1 taskset: {where}.args.AGENT.{theirs}")
    program = Program(config.harness)
    for name, spec in env._agent_specs.items():
        if program.command and spec.client is None:
            env._harnesses[name] = CommandHarness(program)
    try:
        for name, spec in env._agent_specs.items():
            validate_pairing(env._harnesses[name], type(task), spec.runtime)
            resolve_runtime_config(spec.runtime, task)
            if spec.model is not None and spec.client is None:
                raise ValueError(f"args.{name}.model={spec.model}, but the run's servers have only the policy; set its client.base_url")
        for message in task.data.prompt if isinstance(task.data.prompt, list) else ():
            for_template(message)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    uses = [hook.__qualname__ for hook in hooks(type(task)) if "runtime" in inspect.signature(hook).parameters]
    programs = {name: harness.config.id for name, harness in env._harnesses.items() if type(harness) is not NullHarness}
    local = [name for name, spec in env._agent_specs.items() if spec.runtime.type == "subprocess" and name not in chosen]
    boxed = [name for name in local if uses or name in programs]
    if boxed:
        try:
            image = prepared(choose("bwrap", config.box.image), config.box.image)
        except ValueError as error:
            what = ", ".join([*uses, *(f"the program {programs[name]}" for name in boxed if name in programs)])
            advice = f"to run it as processes of this machine, without isolation: {where}.sandbox=none"
            raise ValueError(f"{where}: {what} of {config.id} runs commands, and {error}; {advice}") from error
        for name in boxed:
            env._agent_specs[name].runtime = runtime = BoxedConfig()
            runtime._holds, runtime._image = program.seen(config.box, sys.executable), image
    return "bwrap" if boxed else ""
