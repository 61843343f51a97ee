"""A reward function over the rows of a data set, as an environment: `env=function`. It needs no verifiers.

    # rewards.py, where the run starts or anywhere on PYTHONPATH
    def exact(completion: str, row: dict) -> float:
        return float(completion.strip() == row["answer"])

    rlx train env=function envs.function.args.data=problems.jsonl envs.function.args.reward=rewards.exact

One request a rollout: the row's prompt in, the model's text out, which the function scores in a thread, or as a coroutine.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from rlx.config.schema import EnvConfig
from rlx.data.rows import Rows, open_rows
from rlx.envs.base import RAISED, REWARD_ERROR, failed, filled, with_raised_reward
from rlx.envs.errors import FailureLog, failure_of
from rlx.envs.stacks import waits_at
from rlx.envs.together import abandon, raised_by, run_for, together
from rlx.plain import CodecError, to_json
from rlx.policy.base import Message, Policy, PromptTooLong
from rlx.stacks import rollout_name
from rlx.trace import Trace
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

Reward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Source:
    """What `envs.NAME.args` names."""

    rows: Callable[[bool], Rows]  # those for evaluation, or those for training
    reward: Reward
    prompt: str
    answer: str | None
    system: str | None


@dataclass(frozen=True, slots=True)
class Ended:
    """An episode that has ended, and what the function says of it: a number, or the exception that it raised."""

    trace: Trace
    completion: list[Message]
    reward: Any
    stop: str
    metrics: Mapping[str, float] = field(default_factory=dict)


def load_environment(
    data: str,
    reward: str,
    prompt: str = "question",
    answer: str | None = None,
    system: str | None = None,
    subset: str | None = None,
    split: str = "train",
    eval_data: str | None = None,
    eval_split: str | None = None,
) -> Source:
    """A reward function and the rows that it scores.

    Args:
        data: a JSONL or Parquet file, a pattern of files, a folder, or a data set's name on the hub.
        reward: dotted path of `function(completion, row) -> float`.
        prompt: the column with the prompt: a text, which is the user's message, or messages.
        answer: the column that `row["answer"]` is to have, if it has another name.
        system: the system message before a prompt that is a text.
        subset: configuration of a data set on the hub.
        split: of the data, or a part of it: `train[:1000]`.
        eval_data: the data for evaluation; None: `data` with `eval_split`.
        eval_split: its split; None: `split`.
    """

    return Source(opened(data, subset, split, eval_data, eval_split), function_of(reward), prompt, answer, system)


def opened(data: str, subset: str | None, split: str, eval_data: str | None, eval_split: str | None) -> Callable[[bool], Rows]:
    """Opens the rows for evaluation, or those for training."""

    def rows(evaluates: bool) -> Rows:
        if evaluates and eval_data is None and eval_split is None:
            log.warning("%s: neither eval_data nor eval_split names rows for evaluation; those of training are evaluated", data)
        name, part = (eval_data or data, eval_split or split) if evaluates else (data, split)
        return open_rows(name, subset=subset, split=part)

    return rows


def function_of(path: str) -> Reward:
    """The function of a dotted path. Raises ValueError if there is none; what its module raises is raised as it is."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"reward={path} is no dotted path; write MODULE.FUNCTION, as in rewards.exact for the file rewards.py")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        where = f"It is looked for where the run starts and on PYTHONPATH ({sys.executable})"
        raise ValueError(f"reward={path}: there is no module {error.name}. {where}") from error
    if not callable(found):
        raise ValueError(f"reward={path}: the module {module} has no function {name}")
    return found


class TaskRows(Sequence[dict[str, Any]]):
    """The rows of a data set as tasks. A row is read when it is asked for."""

    def __init__(self, source: Source, evaluates: bool, most: int | None) -> None:
        self.source, self.data = source, source.rows(evaluates)
        self.size = min(len(self.data), most or len(self.data))

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self.size))]
        source, index = self.source, range(self.size)[place]
        row = dict(self.data[index])
        where = self.data.where(index)
        if source.prompt not in row:
            raise ValueError(f"{where} has no column {source.prompt!r} (args.prompt); it has {', '.join(row)}")
        if source.answer is not None:
            if source.answer not in row:
                raise ValueError(f"{where} has no column {source.answer!r} (args.answer); it has {', '.join(row)}")
            row["answer"] = row[source.answer]
        row |= {"example_id": index, "prompt": _messages(row[source.prompt], source.system, where)}
        try:
            to_json(row)
        except CodecError:  # dates, images: the reward gets what JSON can hold
            row = {name: value for name, value in row.items() if _plain(value)}
        return row


def _plain(value: Any) -> bool:
    try:
        to_json(value)
    except CodecError:
        return False
    return True


def _messages(prompt: Any, system: str | None, where: str) -> list[Message]:
    if isinstance(prompt, str):
        return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
    if not (isinstance(prompt, list) and prompt and all(isinstance(one, Mapping) and "role" in one for one in prompt)):
        raise ValueError(f"{where}: a prompt is a text or a list of messages, but this is {str(prompt)[:100]!r}")
    return [dict(one) for one in prompt]


def load(name: str, config: EnvConfig, sampling: dict[str, Any], timeout: float, concurrency: int = 1) -> FunctionEnvironment:
    """Load the rlx environment `name`. `sampling` and `concurrency` belong to the protocol.

    Raises ValueError with a sentence for people, or what the module of the function raises.
    """
    if config.agents or config.agents_per_group != "one":
        raise ValueError(f"envs.{name}: a reward function has no agents to choose among; remove agents and agents_per_group")
    try:
        env = FunctionEnvironment(name, load_environment(**config.args), config, config.rollout_timeout or timeout)
        env.rows[0]
    except ValueError as error:
        raise ValueError(f"envs.{name}: {error}") from error
    return env


class FunctionEnvironment:
    """See `rlx.envs.base.Environment`."""

    tools: Sequence[Mapping[str, Any]] = ()
    agents: Sequence[str] = ()
    scores_groups = False
    env = None  # nothing of another library

    failures_of: Mapping[type[BaseException], str] = {}  # causes of a rollout that has failed, by what it raised; else model_error

    def __init__(self, name: str, source: Source, config: EnvConfig, timeout: float) -> None:
        self.name, self.reward, self.timeout, self.reward_raises = name, source.reward, timeout, config.reward_raises
        self.policy: Policy | None = None
        self.scores: Callable[[Trace], None] | None = None  # called before rewards compute, with what is trained if it has any
        self.rows = TaskRows(source, config.split == "eval", config.num_tasks)
        file = getattr(sys.modules.get(str(config.args.get("reward")).rpartition(".")[0]), "__file__", None)
        self.sources = Path(file) if file else None
        self.failures = FailureLog(log)
        self._label = str(getattr(source.reward, "__name__", "reward"))

    def rehearse(self) -> None:
        """Loading has read the first row; nothing else can be tried before a rollout."""

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """See `rlx.envs.base.Environment`."""
        return await together([self._rollout(task, member, attempt) for member in members])

    async def close(self) -> None:
        """Write how often each failure came."""
        self.failures.close()

    async def _rollout(self, task: Task, member: int, attempt: int) -> Rollout:
        assert self.policy is not None, "the environment has no policy; set it before the first play"
        episode, began, timing = self.policy.episode(task, member, attempt), time.monotonic(), {"generation": 0.0, "scoring": 0.0}
        playing = await run_for(self.timeout, self._episode(task, episode, timing), rollout_name(task, member))
        timing["total"] = time.monotonic() - began
        if not playing.done():
            where = waits_at(playing, self.sources) + episode.waits_for
            await abandon(playing)
            error = f"no result after {self.timeout:g} s (rollout_timeout){where}"
            return failed(task, member, episode, "timeout", "timeout", error, timing)
        if (raised := raised_by(playing)) is not None:
            if isinstance(raised, PromptTooLong):
                return failed(task, member, episode, "error", "prompt_too_long", filled(self.policy), timing)
            failure = failure_of(raised, self.sources)
            self.failures.note(self.name, f"example {task.example_id}", failure)
            cause = next((cause for kind, cause in self.failures_of.items() if isinstance(raised, kind)), "model_error")
            return failed(task, member, episode, "error", cause, failure.text, timing)
        ended = playing.result()
        rollout = Rollout(
            task=task,
            member=member,
            trace=ended.trace,
            prompt=task.row["prompt"],
            completion=ended.completion,
            reward=0.0,
            rewards={},
            metrics={REWARD_ERROR: 0.0, **ended.metrics},
            status="ok",
            stop=ended.stop,
            is_truncated=any(node.finish_reason == "length" for node in ended.trace.nodes),
            timing=timing,
        )
        return self._scored(rollout, ended.reward)

    async def _episode(self, task: Task, episode: Any, timing: dict[str, float]) -> Ended:
        """Play and score."""
        began = time.monotonic()
        reply = await episode.respond(task.row["prompt"])
        timing["generation"] = time.monotonic() - began
        reward = await self._score(episode.trace, reply.content, dict(task.row))
        timing["scoring"] = time.monotonic() - began - timing["generation"]
        return Ended(episode.trace, [reply.message], reward, "length" if reply.truncated else "answered")

    async def _score(self, trace: Trace, *arguments: Any) -> Any:
        """What the function says, or the exception that it raised."""
        if self.scores is not None:
            self.scores(trace)
        try:
            call = functools.partial(self.reward, *arguments)
            if inspect.iscoroutinefunction(self.reward):
                return await call()
            reward = await asyncio.get_running_loop().run_in_executor(None, call)
            return await reward if inspect.isawaitable(reward) else reward
        except (Exception, SystemExit) as error:  # a reward that runs what the model wrote may meet `exit()`
            return error

    def _scored(self, rollout: Rollout, reward: Any) -> Rollout:
        if isinstance(reward, BaseException):
            failure = failure_of(reward, self.sources)
            self.failures.note(self.name, f"reward function {self._label}", failure)
            return with_raised_reward(rollout, f"{self._label} raised {failure.text}", self.reward_raises)
        try:
            value = float(reward)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            error = f"{self._label} returned {reward!r:.100}; a reward is a finite number"
            return replace(rollout, status="error", stop=RAISED if reward is None else "reward_not_finite", error=error)
        return replace(rollout, reward=value, rewards={self._label: value})
