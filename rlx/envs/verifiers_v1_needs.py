"""What a v1 taskset needs that this machine's processes do not offer: said when it is loaded, before any server starts.

Each need is one sentence with what to do about it. Agents run in this process (the chat loop), in boxes of bubblewrap, in
containers, or, if somebody has said so, in processes of this machine.
"""

from __future__ import annotations

import asyncio
import dis
import importlib.metadata
import importlib.util
import re
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any
from urllib.parse import urlsplit

import verifiers.v1 as vf
from packaging.requirements import Requirement
from pydantic import BaseModel
from verifiers.v1.configs.client import BaseClientConfig, resolve_api_key
from verifiers.v1.errors import ToolsetError
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import SubprocessRuntime

from rlx.agents.images import TESTS, problem_of
from rlx.envs import verifiers_mcp
from rlx.envs.verifiers_v1_client import PolicyEndpoint

SCRIPT = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")  # the form that PEP 723 gives
HOOKS = ("setup", "finalize")
NO_BOX = "this machine makes no sandbox (install bubblewrap; rlx doctor)"
CONNECT_TIMEOUT = 3.0  # seconds
_serve_in_runtime = launch.serve_in_runtime
_run_background = SubprocessRuntime.run_background


class Needs:
    """The needs of one environment. `key` is the start of the configuration keys that a sentence names: `envs.NAME.args`."""

    def __init__(self, key: str, chosen: frozenset[str]) -> None:
        """`chosen`: the agents that may run commands: in boxes, or because the user or the environment's author has said so."""
        self.key = key
        self.sandbox = f"{key.removesuffix('.args')}.sandbox"
        self.chosen = chosen

    def of(self, env: vf.Env, first: vf.Task | None) -> Iterator[str]:
        """The needs of a loaded environment. `first`: its first task."""
        config = env.config
        for name, spec in env._agent_specs.items():
            yield from self._agent(name, spec, env._harnesses[name])
        task_type = type(env.taskset).task_type()
        for name, spec in env._agent_specs.items():
            yield from self.task(task_type, name, spec.runtime.type)
        for server in self._servers(env):
            yield from self._server(server)
        yield from self._resource_server(env)
        for where, endpoint in endpoints(config, self.key):
            yield from self._endpoint(where, endpoint)
        if first is not None:
            yield from self._data(first)

    def _servers(self, env: vf.Env) -> list[Any]:
        tasks = env.config.taskset
        return [*env.taskset.toolsets(tasks), *type(env.taskset).task_type().toolsets(tasks.task)]

    def task(self, task_type: type[vf.Task], agent: str, runtime: str = "subprocess") -> Iterator[str]:
        """The needs of the tasks of a class, if `agent` plays them in a runtime."""
        if runtime != "subprocess":
            return
        if task_type.NEEDS_CONTAINER:
            yield f"its tasks ({task_type.__name__}) need a container: {self.sandbox}=podman, docker or apptainer"
            return
        uses = [function.__qualname__ for function in hooks(task_type) if reads(function, "runtime")]
        if not uses:
            return
        if agent not in self.chosen:
            yield (
                f"its tasks run commands in the agent's sandbox ({', '.join(sorted(uses))}), and {NO_BOX}; "
                f"to run them as processes of this machine, without isolation: {self.sandbox}=none"
            )
        yield from missing_packages(task_type, "its tasks run a script")

    def _agent(self, name: str, spec: Any, harness: Harness) -> Iterator[str]:
        where = f"{self.key}.{name}"
        if spec.runtime.type in TESTS:
            if (problem := problem_of(spec.runtime.type)) is not None:
                yield f"its agent `{name}` is to run in a {spec.runtime.type} sandbox, and {problem}; choose another: {self.sandbox}"
        elif spec.runtime.type == "subprocess" and type(harness) is not NullHarness:
            if harness.NEEDS_CONTAINER:
                yield (
                    f"its agent `{name}` plays through the program {harness.config.id}, which must run in a container: "
                    f"{self.sandbox}=podman, docker or apptainer; to play through the chat loop instead: {where}.harness.id='\"null\"'"
                )
            elif name not in self.chosen and _runs_programs(type(harness)):
                yield (
                    f"its agent `{name}` plays through the program {harness.config.id}, by default in a sandbox, and {NO_BOX}; to "
                    f"run it as a process of this machine, without isolation: {self.sandbox}=none"
                )
            yield from missing_packages(type(harness), f"its agent `{name}` plays through a script")
        if spec.model is not None and spec.client is None:
            yield (
                f"its agent `{name}` plays with the model {spec.model}, but the run's servers have only the policy; leave "
                f"{where}.model out, or give it an endpoint with {where}.client.base_url"
            )

    def _server(self, server: Any) -> Iterator[str]:
        config = server.config
        if config.url:
            parts = urlsplit(config.url)
            address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
            try:
                socket.create_connection(address, CONNECT_TIMEOUT).close()
            except OSError as error:
                yield (
                    f"its tool server `{server.server_name}` is at {config.url}, which this machine does not reach ({error}); run it where "
                    "that address can be reached, or set the server's url to one that can"
                )
        elif config.runtime.type != "subprocess":
            yield (
                f"its tool server `{server.server_name}` is to run in a {config.runtime.type} sandbox, and rlx starts no sandbox; set its "
                "runtime.type to subprocess"
            )

    def _resource_server(self, env: vf.Env) -> Iterator[str]:
        """A taskset of NeMo Gym asks a server, which verifiers starts from the package nemo-gym."""
        nemo = sys.modules.get("verifiers.v1.tasksets.nemo_gym")  # not imported: the taskset is of another kind
        if nemo is None or not isinstance(env, nemo.NeMoGymEnv) or env.config.taskset.task.resources_url is not None:
            return
        if not _is_installed("nemo_gym"):
            yield (
                f"its resource server is part of the package nemo-gym, which this Python lacks ({sys.executable}); install it (it needs "
                f"Python 3.12 or newer), or point {self.key}.taskset.task.resources_url to a server that runs"
            )

    def _endpoint(self, where: str, endpoint: BaseClientConfig) -> Iterator[str]:
        host = urlsplit(endpoint.base_url).hostname or ""
        if host.endswith("pinference.ai") and resolve_api_key(endpoint) == "EMPTY":
            yield (
                f"it asks another model at {endpoint.base_url} ({where}), which needs a key, and PRIME_API_KEY is not set; export it, or "
                f"point {where}.base_url (and .model, .api_key_var) to another OpenAI-compatible endpoint"
            )

    def _data(self, task: vf.Task) -> Iterator[str]:
        data = task.data
        if data.image is not None:
            yield f"its tasks run in the container {data.image}, and rlx starts no container"
        if "*" not in data.network_allow or data.network_block:
            yield "its tasks restrict the network of their sandbox, and rlx starts no sandbox"
        if isinstance(data.prompt, list) and any(
            getattr(part, "type", "text") != "text"
            for message in data.prompt
            for part in (message.content if isinstance(message.content, list) else ())
        ):
            yield "its prompts have images, and rlx trains on text alone"


def hooks(task_type: type[vf.Task]) -> list[Callable]:
    """The functions of a task class that verifiers calls around and after an agent's run; those of `vf.Task` itself are left out."""
    found: dict[str, Callable] = {}
    for base in reversed([one for one in task_type.__mro__ if one not in vf.Task.__mro__]):
        for name, value in vars(base).items():
            if name in HOOKS or any(hasattr(value, mark) for mark in ("reward", "metric")):
                found[name] = value
    return list(found.values())


def missing_packages(of: type, what: str) -> Iterator[str]:
    """Packages that the scripts in a class's module declare and that this Python lacks."""
    module = sys.modules[of.__module__]
    for value in vars(module).values():
        text = value.decode(errors="ignore") if isinstance(value, bytes) else value
        if not isinstance(text, str) or "# /// script" not in text:
            continue
        if lacking := [str(one) for one in requirements_of(text) if not is_met(one)]:
            yield (
                f"{what} of {module.__name__} that needs {', '.join(lacking)}, which verifiers would install from the network in each "
                f"sandbox; install it into this Python ({sys.executable}) instead"
            )


def requirements_of(script: str) -> list[Requirement]:
    """The packages that a script declares (PEP 723)."""
    found = SCRIPT.search(script)
    if found is None:
        return []
    lines = (line[2:] if line.startswith("# ") else line[1:] for line in found["content"].splitlines(keepends=True))
    return [Requirement(each) for each in tomllib.loads("".join(lines)).get("dependencies", [])]


def is_met(requirement: Requirement) -> bool:
    """Whether this Python has a package in a suitable version."""
    try:
        installed = importlib.metadata.version(requirement.name)
        return requirement.specifier.contains(installed, prereleases=True) or verifiers_mcp.is_offered(requirement)
    except importlib.metadata.PackageNotFoundError:
        return False


def adapt_processes() -> None:
    """Change three things about the processes of this machine that verifiers starts.

    Scripts of local agents run in this Python if it has their packages, instead of in one that uv installs. A tool server that ends before
    it serves raises what it said; verifiers would go on waiting for it, for three minutes. Both find the mcp that they are written for.
    """
    SubprocessRuntime.prepare_uv_script = _prepared
    SubprocessRuntime.run_background = _in_background
    launch.serve_in_runtime = _serving


async def _prepared(self: Any, script: str | bytes, env: dict | None = None, *, activate: bool = True) -> list[str]:
    text = script.decode() if isinstance(script, bytes) else script
    if lacking := [str(one) for one in requirements_of(text) if not is_met(one)]:
        raise RuntimeError(f"a script needs {', '.join(lacking)}; install it into this Python ({sys.executable})")
    name = f"script-{abs(hash(text)):x}.py"
    await self.write(name, text.encode())
    return verifiers_mcp.python(str(Path(self.workdir, name)))


async def _in_background(self: Any, argv: list[str], env: dict[str, str], log: str) -> None:
    if argv[:2] == [sys.executable, "-m"]:
        argv = verifiers_mcp.python(*argv[1:])
    await _run_background(self, argv, env, log)


async def _serving(server: Any, runtime: Any, **keys: Any) -> int:
    """The port of a tool server that answers. Raises ToolsetError with the server's last words if it has failed."""
    processes = getattr(runtime, "_background", None)
    if processes is None:  # it runs elsewhere
        return await _serve_in_runtime(server, runtime, **keys)
    number = len(processes)
    answering = asyncio.ensure_future(_serve_in_runtime(server, runtime, **keys))
    try:
        while len(processes) == number and not answering.done():
            await asyncio.sleep(0.02)
        if len(processes) > number:
            ending = asyncio.ensure_future(processes[number].wait())
            await asyncio.wait({answering, ending}, return_when=asyncio.FIRST_COMPLETED)
            log = Path(runtime.workdir) / f"vf_tool_{server.server_name}.log"
            if ending.done() and ending.result() != 0 and not answering.done() and log.is_file():
                said = log.read_text(errors="replace").split("\n")
                last = next((line.strip() for line in reversed(said) if line.strip()), "none")
                raise ToolsetError(f"its tool server ended with exit code {ending.result()}; its last line: {last}")
            ending.cancel()
        return await answering
    finally:
        answering.cancel()


def endpoints(config: BaseModel, where: str) -> Iterator[tuple[str, BaseClientConfig]]:
    """(key, endpoint) of every model endpoint in a configuration: judges, and agents that do not play with the policy."""
    for name in type(config).model_fields:
        value = getattr(config, name, None)
        for place, one in (
            [(f"{where}.{name}.{number}", each) for number, each in enumerate(value)]
            if isinstance(value, list)
            else [(f"{where}.{name}", value)]
        ):
            if isinstance(one, BaseClientConfig) and not isinstance(one, PolicyEndpoint):
                yield place, one
            elif isinstance(one, BaseModel):
                yield from endpoints(one, place)


def _runs_programs(harness: type[Harness]) -> bool:
    """Whether a harness starts a program; one that asks the model in this process does not."""
    names: set[str] = set()
    for base in harness.__mro__:
        if base is not Harness and issubclass(base, Harness):
            for value in vars(base).values():
                names |= _names(getattr(value, "__code__", None))
    return bool(names & {"prepare_uv_script", "run_uv_script", "run_program", "open_process", "run_background"})


def _names(code: CodeType | None) -> set[str]:
    """The names that a function uses, those of functions inside it included."""
    if code is None:
        return set()
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def reads(function: Callable, name: str) -> bool:
    """Whether a function has a parameter of this name and reads it."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    if name in code.co_cellvars:
        return True
    read = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_FAST"))
    return any(name in (one if isinstance(one, tuple) else (one,)) for one in read)


def _is_installed(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
