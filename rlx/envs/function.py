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
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.schema import EnvConfig
from rlx.config.signatures import locate
from rlx.data.conversations import RowError, read_message
from rlx.data.rows import Rows, open_rows
from rlx.envs.base import RAISED, REWARD_ERROR, with_raised_reward
from rlx.envs.errors import in_one_line
from rlx.envs.local import LocalEnvironment
from rlx.json_values import CodecError, to_json
from rlx.policy.base import Message
from rlx.trace import Trace
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

Reward = Callable[..., Any]
MADE_UP = "a made-up answer"
FULL = "context_length"  # end of `stop` of an episode that the policy's context, or its time, ended: what there is counts, truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Rows as tasks: the arguments that `env=function`, `env=program` and `env=gateway` share.

    Args:
        data: a JSONL or Parquet file, a pattern of files, a folder, or a data set's name on the hub.
        prompt: the column with the prompt: a text, which is the user's message, or messages.
        answer: the column that `row["answer"]` is to have, if it has another name.
        system: the system message before a prompt that is a text.
        subset: configuration of a data set on the hub.
        split: of the data, or a part of it: `train[:1000]`.
        eval_data: the data for evaluation; None: `data` with `eval_split`.
        eval_split: its split; None: `split`.
    """

    data: str
    prompt: str = "question"
    answer: str | None = None
    system: str | None = None
    subset: str | None = None
    split: str = "train"
    eval_data: str | None = None
    eval_split: str | None = None

    def rows(self, evaluates: bool) -> Rows:
        """The rows for evaluation, or those for training."""
        if not evaluates:
            return open_rows(self.data, subset=self.subset, split=self.split)
        if self.eval_data is None and self.eval_split is None:
            log.warning("%s: neither eval_data nor eval_split names rows for evaluation; those of training are evaluated", self.data)
        return open_rows(self.eval_data or self.data, subset=self.subset, split=self.eval_split or self.split)


@dataclass(frozen=True, slots=True)
class RowSource:
    """What `envs.NAME.args` names."""

    tasks: Tasks
    reward: Reward
    rows: Sequence[dict[str, Any]] | None = None  # in place of those of `tasks`


@dataclass(frozen=True, slots=True)
class Ended:
    """An episode that has ended, and what the function says of it: a number, or the exception that it raised."""

    trace: Trace
    completion: list[Message]
    reward: Any
    stop: str
    metrics: Mapping[str, float] = field(default_factory=dict)


def load_environment(data: str, reward: str, **tasks: Any) -> RowSource:
    """A reward function and the rows that it scores.

    Args:
        reward: dotted path of `function(completion, row) -> float`.
    """
    return RowSource(Tasks(data=data, **tasks), locate(reward))


class TaskRows(Sequence[dict[str, Any]]):
    """The rows of a data set as tasks. A row is read when it is asked for."""

    def __init__(self, source: RowSource, evaluates: bool, most: int | None) -> None:
        self.tasks = source.tasks
        self.data: Any = source.tasks.rows(evaluates) if source.rows is None else source.rows
        self.size = min(len(self.data), most or len(self.data))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self.size))]
        tasks, index = self.tasks, range(self.size)[place]
        row = dict(self.data[index])
        where = getattr(self.data, "where", "task {}".format)(index)
        for key, column in (("prompt", tasks.prompt), ("answer", tasks.answer)):
            if column is not None and column not in row:
                raise ValueError(f"{where} has no column {column!r} (args.{key}); it has {', '.join(row)}")
        if tasks.answer is not None:
            row["answer"] = row[tasks.answer]
        row |= {"example_id": index, "prompt": _messages(row[tasks.prompt], tasks.system, where, getattr(self.data, "fills", False))}
        return {name: value for name, value in row.items() if _plain(value)}  # not dates and images: a row is recorded as JSON


def _plain(value: Any) -> bool:
    try:
        to_json(value)
    except CodecError:
        return False
    return True


def _messages(prompt: Any, system: str | None, where: str, fills: bool) -> list[Message]:
    if isinstance(prompt, str):
        return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
    if not (isinstance(prompt, list) and prompt and all(isinstance(one, Mapping) and "role" in one for one in prompt)):
        raise ValueError(f"{where}: a prompt is a text or a list of messages, but this is {str(prompt)[:100]!r}")
    try:
        return [dict(one) if one["role"] == "text" else read_message(one, fills=fills) for one in prompt]
    except RowError as error:
        raise ValueError(f"{where} cannot be a prompt: {error}") from error


def load(module: Any, name: str, config: EnvConfig, sampling: Mapping[str, Any], timeout: float, concurrency: int = 1) -> Any:
    """Load the environment `name` of one of rlx's own kinds, and its first row. `concurrency` belongs to the protocol.

    `module`: its `ENVIRONMENT`, whose `config.args` its `load_environment` takes. Raises ValueError with a sentence for people.
    """
    if config.agents or config.agents_per_group != "one":
        raise ValueError(f"envs.{name}: {config.id} has no agents to choose among; remove agents and agents_per_group")
    try:
        env = module.ENVIRONMENT(name, module.load_environment(**config.args), config, config.rollout_timeout or timeout)
        env.longest = sampling.get("max_tokens")
        env.prepare()
    except (ConfigError, ValueError, TypeError) as error:  # a wrong argument is a TypeError
        raise ValueError(f"envs.{name}: {error}") from error
    return env


class FunctionEnvironment(LocalEnvironment):
    """See `rlx.envs.base.Environment`."""

    failures_of: Mapping[type[BaseException], str] = {}  # causes of a rollout that has failed, by what it raised; else model_error
    longest: int | None = None  # sampled tokens of one answer
    most = 2  # what a reward may read: completion, row

    def __init__(self, name: str, source: RowSource, config: EnvConfig, timeout: float) -> None:
        file = getattr(sys.modules.get(str(config.args.get("reward")).rpartition(".")[0]), "__file__", None)
        super().__init__(name, timeout, config.on_reward_error, Path(file) if file else None)
        self.config, self.reward = config, source.reward
        self.rows = TaskRows(source, config.split == "eval", config.num_tasks)
        self._label = str(getattr(source.reward, "__name__", "reward"))
        self.reads = read_by(source.reward, self.most)

    def prepare(self) -> None:
        """Read the first row, to see that it can be read. Raises ValueError."""
        self.rows[0]

    def rehearse(self) -> None:
        """Score a made-up answer to the first task. Raises ValueError if the function has a mistake, or returns what is no reward.

        Not for what else may fail: a judge or a variable that is not there on this host, a library's own error.
        """
        found = asyncio.run(self._score(Trace(), MADE_UP, dict(self.rows[0])))
        builtin = isinstance(found, BaseException) and type(found).__module__ == "builtins" and not isinstance(found, OSError)
        if builtin and self.on_reward_error != "zero" and extract_tb(found.__traceback__)[-1].filename == str(self.sources):
            raise ValueError(
                f"envs.{self.name}: args.reward fails for the answer {MADE_UP!r}: {in_one_line(found, self.sources)}; "
                "if that is to score 0: on_reward_error=zero"
            )
        if not isinstance(found, BaseException) and _number(found) is None:
            raise ValueError(
                f"envs.{self.name}: args.reward returned {found!r:.100} for the answer {MADE_UP!r}; a reward is a finite number"
            )

    async def _rollout(self, task: Task, member: int, attempt: int) -> Rollout:
        episode, timing = self._episode_of(task, member, attempt), {"generation": 0.0, "scoring": 0.0}
        ended = await self._timed(self._episode(task, member, episode, timing), task, member, episode, timing)
        if isinstance(ended, Rollout):
            return ended
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
            is_truncated=ended.stop.endswith(FULL) or any(node.finish_reason == "length" for node in ended.trace.nodes),
            timing=timing,
        )
        return self._scored(rollout, ended.reward)

    def _cause_of(self, error: BaseException) -> str:
        return next((cause for kind, cause in self.failures_of.items() if isinstance(error, kind)), "model_error")

    async def _episode(self, task: Task, member: int, episode: Any, timing: dict[str, Any]) -> Ended:
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
            call = functools.partial(self.reward, *arguments[: self.reads])
            if inspect.iscoroutinefunction(self.reward):
                return await call()
            reward = await asyncio.get_running_loop().run_in_executor(None, call)
            return await reward if inspect.isawaitable(reward) else reward
        except (Exception, SystemExit) as error:  # a reward that runs what the model wrote may meet `exit()`
            return error

    def _scored(self, rollout: Rollout, reward: Any) -> Rollout:
        if isinstance(reward, BaseException):
            text = f"{self._label} raised {self._noted(f'reward function {self._label}', reward)}"
            return with_raised_reward(rollout, text, self.on_reward_error)
        value = _number(reward)
        if value is None:
            error = f"{self._label} returned {reward!r:.100}; a reward is a finite number"
            return replace(rollout, status="error", stop=RAISED if reward is None else "reward_not_finite", error=error)
        return replace(rollout, reward=value, rewards={self._label: value})


def read_by(reward: Reward, most: int) -> int:
    """How many of completion, row and box a function takes, at most `most`. Raises ValueError if it cannot be called with any."""
    for number in range(most, 0, -1):
        try:
            inspect.signature(reward).bind(*range(number))
        except TypeError:
            continue
        return number
    own = f"{reward.__module__}.{getattr(reward, '__name__', 'reward')}{inspect.signature(reward)}"
    raise ValueError(f"args.reward is called with a completion and its row, and {own} does not take these")


def _number(reward: Any) -> float | None:
    """A reward as a number; None if it is not a finite one."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def after_prompt(trace: Trace) -> list[Message]:
    """The conversation of the last answer, from the first answer on."""
    said = trace.conversation(trace.answers[-1])
    first = next(place for place, message in enumerate(said) if message["role"] == "assistant")
    return said[first:]


ENVIRONMENT = FunctionEnvironment
