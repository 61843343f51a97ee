"""Any classic `verifiers` environment as an `rlx.envs.base.Environment`.

Tokens never pass through verifiers: the policy's episode keeps the `Turn` of each request, and the environment sees only the message.
A row of an `EnvGroup` is played and scored by its member, as in verifiers. Retries of failed rollouts belong to `rlx.rollout.groups`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import verifiers as vf
from verifiers.rubrics import rubric as rubrics
from verifiers.rubrics.rubric import Rubric
from verifiers.types import State
from verifiers.utils import async_utils
from verifiers.utils.async_utils import maybe_call_with_named_args

from rlx.config.pythons import sources_of
from rlx.config.schema import EnvConfig
from rlx.envs.base import REWARD_ERROR, failed, filled, finite, with_raised_reward
from rlx.envs.errors import snake
from rlx.envs.local import CLEANUP_GRACE, LocalEnvironment, abandon, raised_by, run_for, together
from rlx.envs.messages import recorded
from rlx.envs.verifiers_client import EpisodeClient, functions_of, info_of
from rlx.policy.base import Episode
from rlx.policy.sampling_params import KNOWN, PENALTIES, servers_names
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

ANSWERED = "rlx_answered"  # key of verifiers' state: the ids of all answers, also of those beside the trajectory
REWARD_ERRORS = "rlx_reward_errors"  # key of verifiers' state: [(name of the reward function, the exception)]


def load_environment(name: str, config: EnvConfig, sampling: dict[str, Any], timeout: float, concurrency: int = 1) -> VerifiersEnvironment:
    """Load `config.id` as the rlx environment `name`. Call it on the main thread, before installing signal handlers.

    `sampling`: the run's sampling parameters for it (`envs.base.sampling_of`). `timeout`: seconds for one rollout, unless `config`
    sets `rollout_timeout`. `concurrency`: size of the thread and process pools that verifiers keeps for reward functions.
    Raises ValueError when the package is not installed or `config` chooses agents, RuntimeError when its `load_environment` fails.
    """
    if config.agents or config.agents_per_group != "one":
        raise ValueError(f"envs.{name}: {config.id} is a classic environment, which has no agents; remove agents and agents_per_group")
    import datasets

    datasets.disable_progress_bars()
    env = vf.load_environment(config.id, **config.args)
    logger = logging.getLogger("verifiers")  # importing verifiers gives it a handler; its warnings and errors belong in our log
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    if concurrency > 1:
        env.set_concurrency(concurrency)
    limit = config.rollout_timeout or timeout
    return VerifiersEnvironment(name, env, sampling, limit, config.split, config.num_tasks, config.on_reward_error)


@dataclass(frozen=True, slots=True)
class Player:
    """One of verifiers' environments that plays episodes: the one that was loaded, or a member of a group."""

    env: vf.Environment
    sampling: dict[str, Any]  # of its requests, by vLLM's names
    rewards: frozenset[str]  # names of the functions that count in the reward; the others are metrics
    scores_groups: bool  # rewards compare the rollouts of a group

    @classmethod
    def of(cls, name: str, group: vf.Environment, env: vf.Environment, sampling: Mapping[str, Any]) -> Player:
        """The player of `env`, which is changed in place (`record_reward_errors`). `sampling`: the run's, which wins."""
        # verifiers' run_rollout ignores the environment's own sampling parameters (stop strings, for example), so they are added here.
        own = servers_names(group.sampling_args) | servers_names(env.sampling_args)
        used = {key: value for key, value in own.items() if key in KNOWN and key not in PENALTIES} | dict(sampling)
        if unused := {key: value for key, value in own.items() if used.get(key) != value}:
            log.warning("envs.%s asks for %s, which is not used: the configuration's sampling stands", name, unused)
        record_reward_errors(env.rubric)
        names, weights = env.rubric._get_reward_func_names(), env.rubric._get_reward_weights()
        counted = frozenset(name for name, weight in zip(names, weights, strict=True) if weight != 0)
        return cls(env, used, counted, env.requires_group_rollouts)


class VerifiersEnvironment(LocalEnvironment):
    """See `rlx.envs.base.Environment`."""

    def __init__(
        self,
        name: str,
        env: vf.Environment,
        sampling: dict[str, Any],
        timeout: float,
        split: str = "train",
        num_tasks: int | None = None,
        on_reward_error: str = "fail",
    ) -> None:
        """`num_tasks`: use only the first examples."""
        super().__init__(name, timeout, on_reward_error, sources_of(env.env_id) if env.env_id else None)
        self.env = env
        rows = rows_of(name, env, split)
        self.rows = rows if num_tasks is None else rows.select(range(min(num_tasks, len(rows))))
        self.players = {id(leaf): Player.of(name, env, leaf, sampling) for leaf in leaves(env)}
        offered = [tool for each in (env, *leaves(env)) for tool in functions_of(env, each.tool_defs)]
        offered += functions_of(env, info_of(self.rows[0]).get("tool_defs")) if len(self.rows) else []
        self.tools: Sequence[Mapping[str, Any]] = list({tool["function"]["name"]: tool for tool in offered}.values())
        # One member of a group of environments is enough: a request plays either a whole group or one rollout, for all rows.
        self.scores_groups = any(player.scores_groups for player in self.players.values())

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """See `rlx.envs.base.Environment`. An episode may take `timeout` seconds, and the scoring of a group as long again."""
        try:
            env, row = routed(self.env, task.row)
        except ValueError as error:  # the row names no environment of the group
            noted = self._noted("a row", error)
            return [failed(task, member, None, "error", "environment_error", noted, {}) for member in members]
        player = self.players[id(env)]
        played = await together([self._one(player, row, task, member, attempt) for member in members])
        rollouts = [rollout for rollout, _ in played]
        if not player.scores_groups:
            return rollouts
        if all(rollout.status == "ok" for rollout in rollouts):
            rollouts = await self._scored_group(player, rollouts, [state for _, state in played])
        if all(rollout.status == "ok" for rollout in rollouts):
            return rollouts
        # Rewards compare the group, so one without a reward leaves the others without one.
        lost: dict[str, Any] = {"status": "cancelled", "stop": "group_failed", "error": "another rollout of the group failed"}
        return [replace(rollout, **lost) if rollout.status == "ok" else rollout for rollout in rollouts]

    async def close(self) -> None:
        """Let the environment and its rubrics release their resources (process pools, sandboxes), for at most CLEANUP_GRACE seconds."""
        await super().close()
        envs = {id(env): env for env in (self.env, *leaves(self.env))}.values()
        closing = asyncio.create_task(together([env._teardown() for env in envs]))
        await asyncio.wait({closing}, timeout=CLEANUP_GRACE)
        if not closing.done():
            await abandon(closing)

    def rehearse(self) -> None:
        """Let verifiers read the first example, as at the begin of an episode. Raises verifiers' refusal."""
        env, row = routed(self.env, self.rows[0])
        asyncio.run(env.init_state(row, EpisodeClient(None), "policy", {}))  # type: ignore[arg-type]

    def demonstration(self, row: Mapping[str, Any], errs: bool, random: Any) -> Any:
        teacher = getattr(routed(self.env, row)[0], "demonstration", None)
        return None if teacher is None else teacher(row, errs, random)

    def answer_of(self, row: Mapping[str, Any]) -> str | None:
        """A reasoning-gym row holds the index of an entry, and the entry holds the answer. An XML parser needs its tags."""
        env, answer = routed(self.env, row)[0], row.get("answer")
        if (entries := getattr(env, "rg_dataset", None)) is not None:  # vf.ReasoningGymEnv; others do not import reasoning-gym
            answer = entries[int(row["answer"])]["answer"]
        if not isinstance(answer, str) or not answer:
            return None
        fields = env.parser.get_fields() if isinstance(env.parser, vf.XMLParser) else []
        return env.parser.format(**{fields[0]: answer}) if len(fields) == 1 else answer

    def tools_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        env = routed(self.env, row)[0]
        return functions_of(env, info_of(row).get("tool_defs", env.tool_defs))

    def is_raw(self, row: Mapping[str, Any]) -> bool:
        prompt = row["prompt"]
        return routed(self.env, row)[0].message_type == "completion" or isinstance(prompt, str) or prompt[0]["role"] == "text"

    async def _one(self, player: Player, row: dict[str, Any], task: Task, member: int, attempt: int) -> tuple[Rollout, Any]:
        """A rollout, scored unless rewards compare a group, and verifiers' state of it."""
        episode = self._episode_of(task, member, attempt)
        client = EpisodeClient(episode, raw=player.env.message_type == "completion")
        ended = await self._timed(self._ended(player, row, task, member, episode, client), task, member, episode, client.timing)
        return (ended, None) if isinstance(ended, Rollout) else ended

    async def _ended(
        self, player: Player, row: dict[str, Any], task: Task, member: int, episode: Episode, client: EpisodeClient
    ) -> Rollout | tuple[Rollout, State]:
        """Play an episode. Raises what the environment raises, and what an unusual state of its raises."""
        state = await player.env.rollout(row, client, "policy", dict(player.sampling))
        if (error := state.get("error")) is not None:
            text = self._noted(f"example {task.example_id}", error)
            return failed(task, member, episode, "error", snake(type(error).__name__), text, client.timing)
        if state.get("timed_out"):
            text = "the environment's own time limit (timeout_seconds)"
            return failed(task, member, episode, "timeout", "environment_timeout", text, client.timing)
        state[ANSWERED] = client.answered
        trajectory = trajectory_of(state)
        trained = set(trajectory) & set(client.answered)
        if not trained and state.get("prompt_too_long"):
            return failed(task, member, episode, "error", "prompt_too_long", filled(self.policy), client.timing)
        if not trained:
            text = f"it ended with {state.get('stop_condition')}, and none of its {len(client.answered)} requests is in its trajectory"
            return failed(task, member, episode, "error", "no_turns", text, client.timing)
        trace, env = episode.keep(trajectory), player.env
        if not player.scores_groups:
            if self.scores is not None:
                self.scores(trace)
            began = time.monotonic()
            await (env.rubric.score_rollout(state) if env.score_rollouts else env.rubric.dummy_score_rollout(state))
            client.timing["scoring"] = time.monotonic() - began
            await env.rubric.cleanup(state)
        rollout = Rollout(
            task=task,
            member=member,
            trace=trace,
            prompt=[recorded(message) for message in state["prompt"]],
            completion=[recorded(message) for message in state.get("completion") or []],
            reward=0.0,
            rewards={},
            metrics={},
            status="ok",
            stop=state.get("stop_condition") or "",
            is_truncated=bool(state.get("is_truncated")),
            timing=client.timing,
        )
        return (rollout if player.scores_groups else self._scored(player, rollout, state)), state

    async def _scored_group(self, player: Player, rollouts: Sequence[Rollout], states: list[State]) -> list[Rollout]:
        """The rollouts with the rewards that compare them. If the rubric raises, every rollout fails."""

        async def score() -> list[Rollout]:
            rubric = player.env.rubric
            await (rubric.score_group(states) if player.env.score_rollouts else rubric.dummy_score_group(states))
            for state in states:
                await rubric.cleanup(state)
            return [self._scored(player, rollout, state) for rollout, state in zip(rollouts, states, strict=True)]

        began = time.monotonic()
        scoring = await run_for(self.timeout, score())
        if not scoring.done():
            await abandon(scoring)
            return [replace(r, status="timeout", stop="scoring_timeout", error=f"no rewards after {self.timeout:g} s") for r in rollouts]
        if (raised := raised_by(scoring)) is not None:
            text = self._noted(f"scoring example {rollouts[0].task.example_id}", raised)
            return [replace(r, status="error", stop="environment_error", error=text) for r in rollouts]
        each = (time.monotonic() - began) / len(rollouts)
        return [replace(r, timing={**r.timing, "total": r.timing["total"] + each, "scoring": each}) for r in scoring.result()]

    def _scored(self, player: Player, rollout: Rollout, state: State) -> Rollout:
        """The rollout with its rewards. In verifiers a reward function that raised scored 0; `with_raised_reward` decides what follows."""
        values = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        metrics = finite({name: value for name, value in values.items() if name not in player.rewards})
        metrics |= {"requests_beside": float(len(set(state[ANSWERED]) - set(trajectory_of(state)))), REWARD_ERROR: 0.0}
        errors = state.get(REWARD_ERRORS, [])
        said = "; ".join(f"{name} raised {self._noted(f'reward function {name}', error)}" for name, error in errors) or None
        reward = float(state["reward"])
        if not math.isfinite(reward):
            causes = ", ".join(f"{name} returned {value}" for name, value in values.items() if not math.isfinite(value))
            what = f"the reward is {reward}" + (f": {causes}" if causes else "")
            return replace(rollout, status="error", stop="reward_not_finite", error=what, metrics=metrics)
        rewards = finite({name: value for name, value in values.items() if name in player.rewards})
        scored = replace(rollout, reward=reward, rewards=rewards, metrics=metrics, error=said)
        raised = any(name in player.rewards for name, _ in errors)  # one with weight 0 is a metric, and no part of the reward
        return with_raised_reward(scored, said or "", self.on_reward_error) if raised else scored


def trajectory_of(state: State) -> list[str]:
    """The ids of the requests in the trajectory."""
    return [step["response"].id for step in state["trajectory"] if step.get("response") is not None]


def leaves(env: vf.Environment) -> Iterator[vf.Environment]:
    """The environments that play: `env`, or the members of a group, and of the groups in it."""
    if isinstance(env, vf.EnvGroup):
        for child in env.envs:
            yield from leaves(child)
    else:
        yield env


def routed(env: vf.Environment, row: Mapping[str, Any]) -> tuple[vf.Environment, dict[str, Any]]:
    """The environment that plays this row, and the row as that environment knows it."""
    own = without_old_task(row)
    while isinstance(env, vf.EnvGroup):
        name, own, _ = env._route_child_input(own)
        env = env.get_env_for_name(name)
    return env, own


def without_old_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without a `task` column that is a plain name, as in environments of earlier verifiers. Today's refuses such rows."""
    task = row.get("task")
    is_name = isinstance(task, str) and not task.lstrip().startswith("{")
    return {key: value for key, value in row.items() if not (is_name and key == "task")}


def rows_of(name: str, env: vf.Environment, split: str) -> Any:
    """The `datasets.Dataset` of a split: `train` or `eval`. Without one for evaluation, the training examples, with a warning.

    Raises ValueError without training examples.
    """
    if split == "eval" and (env.eval_dataset_source is not None or env.eval_dataset is not None):
        return env.get_eval_dataset()
    if env.dataset_source is None and env.dataset is None:
        raise ValueError(f"envs.{name}: the environment {env.env_id} has no training data set, only one for evaluation")
    if split == "eval":
        log.warning("%s: the environment %s has no evaluation data set; its training examples are evaluated", name, env.env_id)
    return env.get_dataset()


def record_reward_errors(rubric: Rubric) -> None:
    """Let a rubric, and those in it, keep what a reward function raised. verifiers logs it and scores 0."""
    for child in getattr(rubric, "rubrics", []):
        record_reward_errors(child)
    if type(rubric)._call_individual_reward_func is Rubric._call_individual_reward_func:
        rubric._call_individual_reward_func = functools.partial(_call_reward, rubric)
    if type(rubric)._call_group_reward_func is Rubric._call_group_reward_func:
        rubric._call_group_reward_func = functools.partial(_call_group_reward, rubric)


async def _call_reward(rubric: Rubric, func: Any, state: State) -> float:
    try:
        return float(await maybe_call_with_named_args(func, **rubric.score_objects(state)))
    except Exception as error:
        return _note(func, [state], error)[0]


async def _call_group_reward(rubric: Rubric, func: Any, states: list[State]) -> list[float]:
    try:
        scores = [float(score) for score in await maybe_call_with_named_args(func, **rubric.group_score_objects(states))]
        if len(scores) != len(states):
            raise ValueError(f"it returned {len(scores)} rewards for a group of {len(states)} rollouts")
        return scores
    except Exception as error:
        return _note(func, states, error)


def _note(func: Any, states: list[State], error: Exception) -> list[float]:
    for state in states:
        state.setdefault(REWARD_ERRORS, []).append((getattr(func, "__name__", repr(func)), error))
    return [0.0] * len(states)


_read_signature = functools.lru_cache(maxsize=256)(inspect.signature)


def _signature(func: Any) -> inspect.Signature:
    return _read_signature(func) if isinstance(func, Hashable) else inspect.signature(func)


# verifiers reads the signatures of all hooks and reward functions at every call, which is a third of a short episode's CPU time.
async_utils.inspect = rubrics.inspect = SimpleNamespace(**{**vars(inspect), "signature": _signature})
