"""Boxes and programs for agents of v1 tasksets: bubblewrap as one of verifiers' runtimes, and a harness that is a command.

verifiers' runtimes are a closed list, so `rollout.make_runtime` is replaced (one name, in 0.3 and 0.4). docker, podman, apptainer and the
remote ones are its own. What its servers of this machine offer (the model, tools, state) is forwarded into a box at the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import PrivateAttr
from verifiers.v1 import rollout
from verifiers.v1.configs.harness import HarnessConfig as TheirHarnessConfig
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.runtimes import ProgramResult, SubprocessRuntime
from verifiers.v1.runtimes.base import Runtime, register
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessProcess

from rlx.agents.box import HOME, Box, open_box
from rlx.agents.gateway import UNTRAINED
from rlx.agents.images import choose, installed, prepared, problem_of
from rlx.agents.processes import end
from rlx.config.schema import EnvConfig
from rlx.config.schema_rollout import BoxConfig, HarnessConfig
from rlx.envs import verifiers_mcp
from rlx.envs.program import command_of, filled, readable, variables
from rlx.envs.verifiers_v1_client import LANGUAGES
from rlx.envs.verifiers_v1_needs import hooks, reads

BOXES: dict[str, tuple[BoxConfig, str | None]] = {}
"""By the name of an environment and of its agent: what a box of it holds."""
_make_runtime = rollout.make_runtime


class BoxedConfig(SubprocessConfig):
    """A runtime `subprocess` whose commands run in a box."""

    _of: str = PrivateAttr("")  # a key of BOXES


class BoxRuntime(SubprocessRuntime):
    """A box with verifiers' interface of a runtime."""

    def __init__(self, config: BoxedConfig, name: str | None = None) -> None:
        super().__init__(config, name)
        self._box: Box | None = None
        self._forwards: dict[int, asyncio.Task[Any]] = {}

    @property
    def box(self) -> Box:
        """The box, once it is started."""
        assert self._box is not None
        return self._box

    async def start(self) -> None:
        """See Runtime."""
        own, image = BOXES[self.config._of]
        mine = [*readable(sys.executable), *([verifiers_mcp.__file__] if verifiers_mcp.needed() else [])]
        config = BoxConfig(**{**vars(own), "folders": [*own.folders, *mine]})
        self._box = await open_box("bwrap", config, image)
        self.workdir, self.info.id = HOME, self.name

    def host_url(self, url: str) -> str:
        """The same address: the port is forwarded into the box before its next command."""
        port = urlsplit(url).port if urlsplit(url).hostname in ("127.0.0.1", "localhost") else None
        if port is not None and port not in self._forwards and not self.box.config.network:
            self._forwards[port] = asyncio.ensure_future(forward(self.box, port))
        return url

    async def _variables(self, env: Mapping[str, str]) -> dict[str, str]:
        await asyncio.gather(*self._forwards.values())
        own = self.process_env(dict(env)) if hasattr(self, "process_env") else dict(env)
        return self.box.variables(own)

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """See Runtime."""
        result = await self.box.run(argv, await self._variables(env))
        return ProgramResult(exit_code=result.code, stdout=result.stdout, stderr=result.stderr)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> SubprocessProcess:
        """See Runtime."""
        command = [*self.box.bounds(), *self.box.command(argv, await self._variables(env))]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._background.append(process)
        return SubprocessProcess(process)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """See Runtime."""
        own = self.box.command(["sh", "-c", 'exec "$@" > "$0" 2>&1', log, *argv], await self._variables(env))
        command = [*self.box.bounds(), *own]
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        self._background.append(process)

    async def _read(self, path: str, *more: Any) -> bytes:
        return await Runtime._read(self, path, *more)

    async def write(self, path: str, data: bytes) -> None:
        """See Runtime."""
        await self.box.write({path: data})

    async def teardown(self) -> None:
        """See Runtime."""
        for forwarding in self._forwards.values():
            forwarding.cancel()
            if forwarding.done() and not forwarding.cancelled() and not forwarding.exception():
                forwarding.result().close()
        if self._box is not None:
            await self._box.close()

    def cleanup(self) -> None:
        """See Runtime: the box ends with this process."""
        for process in self._background:
            end(process)


async def forward(box: Box, port: int) -> asyncio.Server:
    """Let what connects to a port of the box reach the same port of this machine."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(ConnectionError, RuntimeError):
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, here = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, here), copy(there, writer))

    return await asyncio.start_server(serve, sock=await box.listening(port))


class CommandHarness(Harness[TheirHarnessConfig]):
    """A program by its command line (`envs.NAME.harness.command`), which finds the policy as one of env=program does."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    def __init__(self, config: HarnessConfig, command: Sequence[str], folder: str) -> None:
        super().__init__(TheirHarnessConfig(id="null"))
        self.own, self.command, self.folder = config, command, folder

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any, *_: Any, **__: Any
    ) -> ProgramResult:
        """See Harness."""
        system, prompt = self.resolve_text_prompt(data) if hasattr(self, "resolve_text_prompt") else self.resolve_prompt(data)
        url = endpoint.removesuffix("/v1")
        words = {"prompt": str(prompt or ""), "system": system or "", "base_url": endpoint, "key": secret, "folder": self.folder}
        env = variables(words, url, secret, self.own, self.folder) | {f"MCP_{name.upper()}": each for name, each in mcp_urls.items()}
        program = runtime.run_program(filled(self.command, words), env)
        try:
            return await asyncio.wait_for(program, self.own.timeout)
        except TimeoutError:  # what it has done by then is scored
            return ProgramResult(exit_code=0, stdout="", stderr="")


def install() -> None:
    """Let verifiers make boxes, and speak to programs that stream in the languages of Anthropic and of Responses."""

    def made(config: Any, name: str | None = None) -> Any:
        if not isinstance(config, BoxedConfig):
            return _make_runtime(config, name)
        runtime = BoxRuntime(config, name)
        register(runtime)
        return runtime

    rollout.make_runtime = made
    for theirs in DIALECTS:
        if (language := LANGUAGES.get(type(theirs).__name__)) is not None:
            type(theirs).stream_events = lambda self, raw, language=language: list(language.events(raw, True))
        type(theirs).apply_overrides = keeping_untrained(type(theirs).apply_overrides)


def keeping_untrained(overrides: Any) -> Any:
    """verifiers' `apply_overrides`, which writes the policy's name into each request, but for one that is not to be trained."""

    @functools.wraps(overrides)
    def kept(self: Any, body: dict, *more: Any) -> dict:
        made = overrides(self, body, *more)
        return {**made, "model": UNTRAINED} if body.get("model") == UNTRAINED else made

    return overrides if hasattr(overrides, "__wrapped__") else kept


def put_into_boxes(where: str, env: Any, agents: Sequence[str], config: BoxConfig, image: str | None) -> None:
    """Let these agents of an environment run in boxes."""
    for name in agents:
        key = f"{where}.{name}"
        BOXES[key] = config, image
        env._agent_specs[name].runtime = runtime = BoxedConfig()
        runtime._of = key


def runtime_of(where: str, config: EnvConfig) -> dict[str, Any]:
    """verifiers' runtime for `sandbox`. `in_boxes` makes a box of a subprocess where something runs in it."""
    if config.sandbox in ("auto", "bwrap", "none"):
        return {"type": "subprocess"}
    try:
        choose(config.sandbox, config.box.image or "of the task")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return {"type": config.sandbox} | ({"image": config.box.image} if config.box.image else {})


def in_boxes(where: str, env: Any, config: EnvConfig, chosen: frozenset[str]) -> frozenset[str]:
    """Put the agents that run something into boxes of bubblewrap, if `sandbox` is that; and give the policy's agents their program."""
    for name in ("max_turns", "max_tokens"):
        if getattr(config.harness, name) is not None:
            theirs = "max_turns" if name == "max_turns" else "max_output_tokens"
            raise ValueError(f"{where}.harness.{name} bounds programs of env=program; of a v1 taskset: {where}.args.AGENT.{theirs}")
    folder = installed(config.harness.install) if config.harness.install else ""
    command = command_of(config.harness)
    for name, spec in env._agent_specs.items():
        if command and spec.client is None:
            env._harnesses[name] = CommandHarness(config.harness, command, folder)
    uses = any(reads(hook, "runtime") for hook in hooks(type(env.taskset).task_type()))
    names = [
        name
        for name, spec in env._agent_specs.items()
        if spec.runtime.type == "subprocess" and name not in chosen and (uses or type(env._harnesses[name]) is not NullHarness)
    ]
    if not names or config.sandbox not in ("auto", "bwrap") or (config.sandbox == "auto" and problem_of("bwrap") is not None):
        return frozenset()
    try:
        image = prepared(choose("bwrap", config.box.image), config.box.image)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    own = [*config.box.folders, *([folder] if folder else []), *(path for part in command for path in readable(part))]
    put_into_boxes(where, env, names, type(config.box)(**{**vars(config.box), "folders": own}), image)
    return frozenset(names)
