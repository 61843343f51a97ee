"""Any v1 taskset of verifiers as an `rlx.envs.base.Environment`.

A v1 environment is a taskset (rows), agents (each with a model, a harness and a runtime) and `run(task, agents)`, which may let several
agents play. The policy's tokens never pass through verifiers: its client is the policy's episode (`verifiers_v1_client`).

An agent's run leaves a *trace* with rewards of its own, so a rollout trains **one** trace: each group trains one of the agents, in turn by
the task's index, and its other agents are answered and not trained. So an advantage compares rewards of the same agent in episodes of the
same row, and no token gets the advantage of an opponent. If an agent runs several times in an episode, member m trains its run m modulo
their number. Where episodes of one row give that agent different tasks (problems that another agent invents), the log and a metric say so.
With `agents_per_group=all` the other runs come along (`Rollout.siblings`), each with a mark of its agent and its task
(`Rollout.baseline_key`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import re
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.utils.loaders import default_harness_id, env_config_type
from verifiers.v1.utils.loaders import load_environment as load_v1

from rlx.config.pythons import sources_of
from rlx.config.schema import EnvConfig
from rlx.envs import verifiers_v1_boxes, verifiers_v1_client, verifiers_v1_tools
from rlx.envs.base import RAISED, REWARD_ERROR, failed, filled, finite, with_raised_reward
from rlx.envs.errors import in_one_line, snake
from rlx.envs.local import CLEANUP_GRACE, LocalEnvironment, abandon
from rlx.envs.messages import recorded
from rlx.envs.verifiers_v1_boxes import CommandHarness, fit, runtime_of
from rlx.envs.verifiers_v1_client import ChatLoop, PolicyClient, PolicyEndpoint, give_clients, mark_of
from rlx.envs.verifiers_v1_tools import functions_of
from rlx.json_values import utf8
from rlx.policy.base import Episode, Message
from rlx.trace import Trace
from rlx.types import Rollout, Status, Task

log = logging.getLogger(__name__)

STARTUP_TIMEOUT = 600.0  # seconds for the tool servers that all rollouts share; verifiers gives each 180 to take a port and 180 to answer
CONNECT_TIMEOUT = 3.0  # seconds to reach a tool server elsewhere
ENDLESS_ROWS = 1000  # tasks of an endless taskset, unless `num_tasks` is set
POLICY = "policy"  # the model's name in requests
CUT = ("max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
"""How verifiers ends an episode that a length limit cut. It counts `max_turns` as truncated, too, and of answers only the last."""


def load_environment(name: str, config: EnvConfig, sampling: dict[str, Any], timeout: float, concurrency: int = 1) -> V1Environment:
    """Load the taskset `config.id` as the rlx environment `name`. Starts nothing.

    `config.args` is verifiers' `env` block without `taskset.id`: `taskset` (its own keys), one key for each agent, `timeout`, …
    `sampling` and `concurrency` are part of the protocol; the policy has the sampling parameters, and reward functions get no threads.
    Raises ValueError, with one sentence for people, if the package is not installed, if its arguments are wrong, if it has no tasks, or if
    it cannot run on this machine (`fit`). Errors of the package's own code are raised as they are.
    """
    where = f"envs.{name}"
    block, chosen = block_of(where, config)
    for module in (verifiers_v1_boxes, verifiers_v1_client, verifiers_v1_tools):
        module.install()
    env = load_v1(block)
    for noisy in ("verifiers", "aiohttp.access", "httpx", "httpx2", "mcp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if config.on_reward_error == "zero" and type(env) is not SingleAgentEnv:
        raise ValueError(f"{where}.on_reward_error=zero cannot be met: the agents of {config.id} are judged together; remove the key")
    if config.split == "eval":
        log.warning("%s: a v1 taskset has no data set for evaluation; its tasks are those of training, unless its args choose others", name)
    tasks = tasks_of(where, env, config.num_tasks)
    sandbox = fit(where, env, config, chosen, tasks[0])
    agents = trained_agents(where, env, config.agents)
    give_harnesses(env)
    made = V1Environment(name, env, tasks, agents, config, config.rollout_timeout or timeout)
    made.longest, made.sandbox = sampling.get("max_tokens"), sandbox
    return made


class V1Environment(LocalEnvironment):
    """See `rlx.envs.base.Environment`. v1 compares the agents of an episode (in its `finalize`), never episodes."""

    sandbox = ""  # what its agents' boxes are, for people
    longest: int | None = None  # sampled tokens of one answer to a program

    def __init__(self, name: str, env: vf.Env, tasks: Sequence[vf.Task], agents: Sequence[str], config: EnvConfig, timeout: float) -> None:
        """`agents`: those that train, in turn."""
        super().__init__(name, timeout, config.on_reward_error, sources_of(config.id))
        self.env, self.agents = env, tuple(agents)
        self.whole = config.agents_per_group == "all"
        self.several = len(env._agent_specs) > 1
        self.rows = [
            {"example_id": number, "prompt": _prompt(task.data), "task": task.data.model_dump(mode="json")}
            for number, task in enumerate(tasks)
        ]
        self._type, self._data = type(tasks[0]), type(tasks[0].data)
        keys = env.config.taskset
        self._toolsets = [*env.taskset.toolsets(keys), *self._type.toolsets(keys.task)]
        self.tools = functions_of([each for each in self._toolsets if not each.config.url])
        self._shared = contextlib.AsyncExitStack()

    def trained_agent(self, task: Task) -> str:
        """The agent that the group of `task` trains: each as often as the others, in an order that follows from the task's index."""
        spread = task.index * 0x9E3779B97F4A7C15 % 2**64  # the golden ratio: evenly spread in every stretch of indices, also of every n-th
        return self.agents[spread * len(self.agents) >> 64]

    def rehearse(self) -> None:
        """Start and stop what the rollouts share, and reach its tool servers elsewhere, if there is anything. Raises RuntimeError."""
        for url in (urlsplit(each.config.url) for each in self._toolsets if each.config.url):
            try:
                socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), CONNECT_TIMEOUT).close()
            except OSError as error:
                text = f"this machine does not reach its tool server at {url.geturl()} ({error}); set the server's url to one that it can"
                raise RuntimeError(f"envs.{self.name}: {text}") from error

        async def tried() -> None:
            try:
                await self._start()
            finally:
                await self.close()

        if type(self.env).start is not vf.Env.start or self._toolsets:
            asyncio.run(tried())

    async def close(self) -> None:
        """Stop the tool servers, for at most CLEANUP_GRACE seconds."""
        await super().close()
        closing = asyncio.create_task(self._shared.aclose())
        await asyncio.wait({closing}, timeout=CLEANUP_GRACE)
        await abandon(closing)

    async def _serve(self) -> None:
        """The interception server, and shared tool servers. Raises RuntimeError."""
        try:
            async with asyncio.timeout(STARTUP_TIMEOUT):
                await self._shared.enter_async_context(self.env.serving())
        except Exception as error:
            text = in_one_line(error, self.sources)
            raise RuntimeError(f"envs.{self.name}: what its rollouts share (tool servers) did not start: {text}") from error
        give_clients(self.env._interception)

    async def _rollout(self, task: Task, member: int, attempt: int) -> Rollout:
        episode = self._episode_of(task, member, attempt)
        client = PolicyClient(episode, self.longest)
        played = await self._timed(self._episode(task, client), task, member, episode, client.timing)
        ended = played if isinstance(played, Rollout) else self._played(task, member, episode, client, played)
        if self.several and ended.status == "timeout":  # which of its answers are the trained agent's is not known
            return replace(ended, trace=Trace())
        return ended

    def _played(self, task: Task, member: int, episode: Episode, client: PolicyClient, played: vf.Episode) -> Rollout:
        """The rollout of a finished episode: the trace of the agent that trains, with its own reward."""

        def fail(status: Status, stop: str, error: str) -> Rollout:
            return failed(task, member, episode, status, stop, error, client.timing)

        client.timing["scoring"] = sum(trace.timing.scoring.duration for trace in played.traces)
        agent = self.trained_agent(task)
        able = [trace for trace in played.traces if trace.agent.name in self.agents and trace.agent.trainable]
        able.sort(key=lambda trace: trace.timing.start)  # verifiers lists them as they end; the fastest would always be chosen
        if self.whole and (asked := [trace for trace in able if client.requests.get(trace.id)]):
            able = asked  # who was never asked has nothing to train
            agent = agent if any(trace.agent.name == agent for trace in able) else able[0].agent.name
        traces = [trace for trace in able if trace.agent.name == agent]
        stop, said, written = ("", "", "") if played.ok else self._failure(played, client)
        if said:
            self.failures.note(self.name, f"example {task.example_id}", said, written)
        if said and not (stop == RAISED and type(self.env) is SingleAgentEnv and traces):
            late = getattr(played, "is_timeout", False) or "deadline (--env.timeout" in said
            return fail("timeout" if late else "error", "environment_timeout" if late else stop, said)
        if not traces:
            return fail("error", "no_turns", f"the agent `{agent}`, which this group trains, did not play or does not train")
        trace = traces[member % len(traces)]
        if trace.id in client.too_long and not client.requests.get(trace.id):
            return fail("error", "prompt_too_long", filled(self.policy))
        if not client.requests.get(trace.id):
            return fail("error", "no_turns", f"the episode ended with {trace.stop_condition} before the agent `{agent}` was asked")
        names = dict.fromkeys(each.agent.name for each in played.traces) if self.several else {}
        shared = {f"{name}/reward": fmean(float(each.reward) for each in played.traces if each.agent.name == name) for name in names}
        first, *others = [
            self._trained(task, member, episode, client, each, shared)
            for each in (trace, *(other for other in able if self.whole and other is not trace))
        ]
        if said:
            first = replace(first, reward=0.0, rewards={})  # verifiers keeps what was recorded before the error
            return with_raised_reward(first, said, self.on_reward_error)
        return replace(first, siblings=tuple(others))

    def _trained(
        self, task: Task, member: int, episode: Episode, client: PolicyClient, trace: vf.Trace, shared: dict[str, float]
    ) -> Rollout:
        """The rollout that trains one trace."""
        kept, too_long = episode.keep(client.requests[trace.id]), trace.id in client.too_long
        messages = [recorded(message) for message in trace.messages]
        first = next((number for number, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        rollout = Rollout(
            task=task,
            member=member,
            trace=kept,
            prompt=messages[:first],
            completion=messages[first:],
            reward=float(trace.reward),
            rewards=finite({name: float(value.score) for name, value in trace.rewards.items() if value is not None}),
            metrics=finite(metrics | {REWARD_ERROR: 0.0} | shared),
            status="ok",
            stop="context_length" if too_long else trace.stop_condition or "",
            is_truncated=too_long or trace.stop_condition in CUT or any(node.finish_reason == "length" for node in kept.nodes),
            timing=client.timing,
            agent=trace.agent.name if len(self.agents) > 1 else None,
            baseline_key=mark_of(trace) if self.whole else None,
            task_key=mark_of(trace) if self.several and not self.whole else None,
        )
        if math.isfinite(rollout.reward):
            return rollout
        return replace(rollout, reward=0.0, status="error", stop="reward_not_finite", error=f"the reward is {rollout.reward}")

    async def _episode(self, task: Task, client: PolicyClient) -> vf.Episode:
        data = self._data.model_validate(task.row["task"])
        (slot,) = self.env.slots(self._type(data, self.env.config.taskset.task))
        endpoint = PolicyEndpoint()
        endpoint._client = client
        context = vf.ModelContext(model=POLICY, client=endpoint, sampling=vf.SamplingConfig())
        return await self.env.run_slot(slot, context)

    def _failure(self, played: vf.Episode, client: PolicyClient) -> tuple[str, str, str]:
        """(cause, what was raised, its traceback) of an episode that is not ok."""
        for trace in played.traces:
            if (raised := client.failures.get(trace.id)) is not None:
                return "model_error", in_one_line(raised, self.sources), "".join(traceback.format_exception(raised)).rstrip()
        errors = [*played.errors, *(error for trace in played.traces if not trace.ok for error in trace.errors)]
        if not errors:
            return "environment_error", "the episode failed without an error", ""
        error = errors[-1]
        written = error.traceback or ""
        text = utf8(f"{error.type}: {' '.join(error.message.split())[:400]}{_place(written, self.sources)}")
        bad = [trace for trace in played.traces if not trace.ok]
        scored = bool(bad) and all(trace.timing.scoring.start for trace in bad)  # only a reward or a metric failed
        return RAISED if scored else snake(error.type), text, written.rstrip()


def block_of(where: str, config: EnvConfig) -> tuple[Any, frozenset[str]]:
    """(verifiers' configuration of the environment, the agents with a runtime `subprocess` that someone chose)."""
    args = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.args.items()}
    args["taskset"] = {**(args.get("taskset") or {}), "id": config.id}
    kind = env_config_type(config.id, args.get("id") or "")
    bundled = default_harness_id(config.id)
    chosen = set()
    for name, field in kind.model_fields.items():
        default = field.default
        if not isinstance(default, AgentConfig):
            continue
        own = dict(args.get(name) or {})
        if "harness" not in own and default.harness is None and bundled == "bash":
            own["harness"] = {"id": "null"}  # verifiers' default gives the model a shell in a sandbox
        if "runtime" not in own and "runtime" not in default.model_fields_set:
            own["runtime"] = runtime_of(where, config)  # verifiers' default costs money
            if config.sandbox == "none":
                chosen.add(name)
        elif (own.get("runtime") or default.runtime.model_dump()).get("type") == "subprocess":
            chosen.add(name)
        args[name] = own
    args.setdefault("interception", {"type": "server"})
    try:
        return kind.model_validate(args), frozenset(chosen)
    except ValidationError as error:
        raise ValueError(f"{where}.args: {' '.join(str(error).split())}") from error


def tasks_of(where: str, env: vf.Env, limit: int | None) -> list[vf.Task]:
    """The tasks of a taskset, at most `limit`; of an endless one ENDLESS_ROWS."""
    if limit is None and env.taskset.INFINITE:
        limit = ENDLESS_ROWS
        log.info("%s: the taskset is endless; its first %d tasks are the data set (%s.num_tasks)", where, limit, where)
    tasks = list(itertools.islice(iter(env.taskset), limit))
    if not tasks:
        raise ValueError(f"{where}: the taskset {env.config.taskset.id} has no tasks")
    return tasks


def trained_agents(where: str, env: vf.Env, asked: Sequence[str]) -> list[str]:
    """The agents that train: those of the policy that the environment does not freeze, or those of them that the configuration names."""
    context = vf.ModelContext(model=POLICY, client=PolicyEndpoint(), sampling=vf.SamplingConfig())
    agents = env._episode_agents(context, [], None, None)
    asyncio.run(env.setup(agents))
    can = [name for name, spec in env._agent_specs.items() if spec.client is None and getattr(agents, name).trainable]
    if not can or set(asked) - set(can):
        raise ValueError(f"{where}.agents={list(asked)}; the agents that can train are {', '.join(can) or 'none'}")
    return list(asked) or can


def give_harnesses(env: vf.Env) -> None:
    """Let the policy's program play the agents that have one, and the chat loop of this process those that have verifiers'."""
    stock = env._episode_agents

    def made(*args: Any) -> Any:
        agents = stock(*args)
        for name, harness in env._harnesses.items():
            agent = getattr(agents, name)
            if isinstance(harness, CommandHarness):
                agent.harness = harness
            elif type(agent.harness) is NullHarness:
                agent.harness = ChatLoop(agent.harness.config, env._interception)
        return agents

    env._episode_agents = made


def _prompt(data: vf.TaskData) -> list[Message]:
    """The prompt of a row, for people; empty if the environment opens the conversation."""
    system: list[Message] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None:
        return system
    return [*system, {"role": "user", "content": data.prompt_text}]


FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def _place(written: str, sources: Path | None) -> str:
    """The innermost line of the environment's own code in a traceback: `; at /…/my_env.py:42 in ask`; empty if there is none."""
    own = [each for each in FRAME.finditer(written) if sources is not None and each["file"].startswith(str(sources))]
    return f"; at {own[-1]['file']}:{own[-1]['line']} in {own[-1]['function']}" if own else ""
