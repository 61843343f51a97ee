"""Any classic `verifiers` environment as an `rlx.envs.base.Environment`.

Tokens never pass through verifiers: the policy's episode keeps the `Turn` of each request, and the environment sees only the message.
Retries of failed rollouts belong to `rlx.rollout.groups`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import verifiers as vf
from verifiers.types import State

from rlx.config.pythons import sources_of
from rlx.config.schema import EnvConfig
from rlx.envs import verifiers_mcp
from rlx.envs.base import REWARD_ERROR, failed, filled, finite, with_raised_reward
from rlx.envs.errors import FailureLog, failure_of, snake
from rlx.envs.messages import recorded
from rlx.envs.stacks import waits_at
from rlx.envs.together import CLEANUP_GRACE, abandon, raised_by, run_for, together
from rlx.envs.verifiers_client import EpisodeClient, offered_tools
from rlx.envs.verifiers_group import Player, leaves, players_of, routed
from rlx.envs.verifiers_hooks import REWARD_ERRORS
from rlx.policy.base import Episode, Policy
from rlx.stacks import rollout_name
from rlx.trace import Trace
from rlx.types import Rollout, Status, Task

verifiers_mcp.install()
log = logging.getLogger(__name__)

ANSWERED = "rlx_answered"  # key of verifiers' state: the ids of all answers, also of those beside the trajectory


def load_environment(name: str, config: EnvConfig, sampling: dict[str, Any], timeout: float, concurrency: int = 1) -> VerifiersEnvironment:
    """Load `config.id` as the rlx environment `name`. Call it on the main thread, before installing signal handlers.

    `sampling`: the run's sampling parameters for it (`envs.base.sampling_of`). `timeout`: seconds for one rollout, unless `config`
    sets `rollout_timeout`. `concurrency`: size of the thread and process pools that verifiers keeps for reward functions.
    Raises ValueError when the package is not installed or `config` chooses agents, RuntimeError when its `load_environment` fails.
    """
    assert threading.current_thread() is threading.main_thread(), "verifiers installs signal handlers, which only the main thread can"
    agents = {"agents": f"[{','.join(config.agents)}]"} if config.agents else {}
    if config.agents_per_group != "one":
        agents["agents_per_group"] = config.agents_per_group
    if agents:
        raise ValueError(
            f"envs.{name}: {config.id} is a classic environment, which has no agents to choose among, but "
            f"{' and '.join(f'envs.{name}.{key}={value}' for key, value in agents.items())}. Only v1 tasksets have agents; remove the key"
        )
    import datasets

    datasets.disable_progress_bars()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    env = vf.load_environment(config.id, **config.args)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _quiet_logger()
    if concurrency > 1:
        env.set_concurrency(concurrency)
    limit = config.rollout_timeout or timeout
    return VerifiersEnvironment(name, env, sampling, limit, config.split, config.num_tasks, config.reward_raises)


class VerifiersEnvironment:
    """See `rlx.envs.base.Environment`."""

    def __init__(
        self,
        name: str,
        env: vf.Environment,
        sampling: dict[str, Any],
        timeout: float,
        split: str = "train",
        num_tasks: int | None = None,
        reward_raises: str = "fail",
    ) -> None:
        """`num_tasks`: use only the first examples. `reward_raises`: the rule of `with_raised_reward`."""
        self.name = name
        self.policy: Policy | None = None
        self.scores: Callable[[Trace], None] | None = None  # called before rewards compute, with what is trained if it has any
        self.env = env
        self.timeout = timeout
        self.reward_raises = reward_raises
        self.sources = sources_of(env.env_id) if env.env_id else None
        self.failures = FailureLog(log)
        rows = rows_of(name, env, split)
        self.rows = rows if num_tasks is None else rows.select(range(min(num_tasks, len(rows))))
        self.tools: Sequence[Mapping[str, Any]] = offered_tools(env, self.rows)
        self.players = players_of(name, env, sampling)
        self.agents: Sequence[str] = ()
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
        played = await together([self._rollout(player, row, task, member, attempt) for member in members])
        rollouts = [rollout for rollout, _ in played]
        if not player.scores_groups:
            return rollouts
        if any(rollout.status != "ok" for rollout in rollouts):
            return [_unscored(rollout) if rollout.status == "ok" else rollout for rollout in rollouts]
        return await self._scored_group(player, rollouts, [state for _, state in played if state is not None])

    async def _rollout(self, player: Player, row: dict[str, Any], task: Task, member: int, attempt: int) -> tuple[Rollout, State | None]:
        """Play one episode, and score it unless rewards compare a group. The state is verifiers' own; None if the episode failed."""
        assert self.policy is not None, "the environment has no policy; set it before the first play"
        episode = self.policy.episode(task, member, attempt)
        client = EpisodeClient(episode, raw=player.raw)
        started = time.monotonic()
        playing = await run_for(self.timeout, self._episode(player, row, client), rollout_name(task, member))
        timing = {"total": time.monotonic() - started, "generation": client.seconds, "scoring": client.scoring}

        def fail(status: Status, stop: str, error: str) -> tuple[Rollout, None]:
            return failed(task, member, episode, status, stop, error, timing), None

        if not playing.done():
            where = waits_at(playing, self.sources) + episode.waits_for
            await abandon(playing)
            return fail("timeout", "timeout", f"no result after {self.timeout:g} s (rollout_timeout){where}")
        if (raised := raised_by(playing)) is not None:
            return fail("error", "environment_error", self._noted(f"example {task.example_id}", raised))
        state = playing.result()
        try:
            return self._ended(player, task, member, episode, client, state, timing, fail)
        except Exception as error:  # the environment has put something of its own into the state: a completion that is no list of messages
            return fail("error", "environment_error", self._noted(f"the state after example {task.example_id}", error))

    def _ended(
        self,
        player: Player,
        task: Task,
        member: int,
        episode: Episode,
        client: EpisodeClient,
        state: State,
        timing: dict[str, float],
        fail: Callable[[Status, str, str], tuple[Rollout, None]],
    ) -> tuple[Rollout, State | None]:
        """The rollout of an episode that has ended, and its state; None if it failed. Raises what an unusual state raises."""
        assert self.policy is not None
        if (error := state.get("error")) is not None:
            return fail("error", snake(type(error).__name__), self._noted(f"example {task.example_id}", error))
        if state.get("timed_out"):
            return fail("timeout", "environment_timeout", "the environment's own time limit (timeout_seconds)")
        trajectory = trajectory_of(state)
        if not set(trajectory) & set(client.answered):
            if state.get("prompt_too_long"):
                return fail("error", "prompt_too_long", filled(self.policy))
            if client.answered:
                what = f"none of the {len(client.answered)} requests of the episode is in its trajectory, so nothing can be trained"
                return fail("error", "no_turns", what)
            return fail("error", "no_turns", f"the episode ended with {state.get('stop_condition')} before the model was asked")
        rollout = Rollout(
            task=task,
            member=member,
            trace=episode.keep(trajectory),
            prompt=[recorded(message) for message in state["prompt"]],
            completion=[recorded(message) for message in state.get("completion") or []],
            reward=0.0,
            rewards={},
            metrics={},
            status="ok",
            stop=state.get("stop_condition") or "",
            is_truncated=bool(state.get("is_truncated")),
            timing=timing,
        )
        return (rollout if player.scores_groups else self._scored(player, rollout, state)), state

    async def _scored_group(self, player: Player, rollouts: Sequence[Rollout], states: list[State]) -> list[Rollout]:
        """The rollouts with the rewards that compare them. If the rubric raises, every rollout fails."""
        began = time.monotonic()
        scoring = await run_for(self.timeout, self._score_states(player.env, states))
        if not scoring.done():
            await abandon(scoring)
            return [replace(r, status="timeout", stop="scoring_timeout", error=f"no rewards after {self.timeout:g} s") for r in rollouts]
        if (raised := raised_by(scoring)) is not None:
            text = self._noted(f"scoring example {rollouts[0].task.example_id}", raised)
            return [replace(r, status="error", stop="environment_error", error=text) for r in rollouts]
        each = (time.monotonic() - began) / len(rollouts)
        rollouts = [replace(r, timing={**r.timing, "total": r.timing["total"] + each, "scoring": each}) for r in rollouts]
        try:
            scored = [self._scored(player, rollout, state) for rollout, state in zip(rollouts, states, strict=True)]
        except Exception as error:  # a reward or metric in the state that is no number
            text = self._noted(f"the rewards of example {rollouts[0].task.example_id}", error)
            return [replace(r, status="error", stop="environment_error", error=text) for r in rollouts]
        # Rewards compare the group, so one without a reward leaves the others without one.
        whole = all(rollout.status == "ok" for rollout in scored)
        return scored if whole else [_unscored(rollout) if rollout.status == "ok" else rollout for rollout in scored]

    async def close(self) -> None:
        """Let the environment and its rubrics release their resources (process pools, sandboxes), for at most CLEANUP_GRACE seconds."""
        self.failures.close()
        envs = {id(env): env for env in (self.env, *leaves(self.env))}.values()
        closing = asyncio.create_task(together([env._teardown() for env in envs]))
        await asyncio.wait({closing}, timeout=CLEANUP_GRACE)
        if not closing.done():
            await abandon(closing)

    async def _episode(self, player: Player, row: dict[str, Any], client: EpisodeClient) -> State:
        env = player.env
        state = await env.rollout(row, client, "policy", dict(player.sampling))
        state[ANSWERED] = client.answered
        if state.get("error") is None and not state.get("timed_out") and state["trajectory"] and not player.scores_groups:
            if self.scores is not None:
                self.scores(client.episode.keep(trajectory_of(state)))
            began = time.monotonic()
            await (env.rubric.score_rollout(state) if env.score_rollouts else env.rubric.dummy_score_rollout(state))
            client.scoring = time.monotonic() - began
            await env.rubric.cleanup(state)
        return state

    async def _score_states(self, env: vf.Environment, states: list[State]) -> None:
        rubric = env.rubric
        await (rubric.score_group(states) if env.score_rollouts else rubric.dummy_score_group(states))
        for state in states:
            await rubric.cleanup(state)

    def _scored(self, player: Player, rollout: Rollout, state: State) -> Rollout:
        """The rollout with its rewards. In verifiers a reward function that raised scored 0; `with_raised_reward` decides what follows."""
        values = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        metrics = finite({name: value for name, value in values.items() if name not in player.rewards})
        metrics["requests_beside"] = float(len(set(state[ANSWERED]) - set(trajectory_of(state))))
        metrics[REWARD_ERROR] = 0.0
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
        return with_raised_reward(scored, said or "", self.reward_raises) if raised else scored

    def _noted(self, what: str, error: BaseException) -> str:
        """The error in one line. The log gets its traceback, once for all errors of its kind."""
        failure = failure_of(error, self.sources)
        self.failures.note(self.name, what, failure)
        return failure.text


def trajectory_of(state: State) -> list[str]:
    """The ids of the requests in the trajectory."""
    return [step["response"].id for step in state["trajectory"] if step.get("response") is not None]


def rows_of(name: str, env: vf.Environment, split: str) -> Any:
    """The `datasets.Dataset` of a split: `train` or `eval`. Without one for evaluation, the training examples, with a warning.

    Raises ValueError without training examples.
    """
    trains = env.dataset_source is not None or env.dataset is not None
    if split == "eval" and (env.eval_dataset_source is not None or env.eval_dataset is not None):
        return env.get_eval_dataset()
    if not trains:
        raise ValueError(f"envs.{name}: the environment {env.env_id} has no training data set, only one for evaluation")
    if split == "eval":
        log.warning("%s: the environment %s has no evaluation data set; its training examples are evaluated", name, env.env_id)
    return env.get_dataset()


def _unscored(rollout: Rollout) -> Rollout:
    return replace(rollout, status="cancelled", stop="group_failed", error="another rollout of the group failed")


def _quiet_logger() -> None:
    """Remove the handler that importing verifiers installs, so that its warnings and errors reach our log."""
    logger = logging.getLogger("verifiers")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
