"""Changes to a loaded verifiers environment: errors of reward functions are recorded, and work without a result is left out.

verifiers inspects the signature of every hook and reward function at every call. That is a third of a short episode's CPU time. It also
looks for the tokens of every answer in a thread. Our answers have none there, because the tokens stay with the policy.
Episodes are played and scored by verifiers' own methods.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import verifiers as vf
from verifiers.envs import multiturn_env
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Response, State
from verifiers.utils.async_utils import maybe_await

REWARD_ERRORS = "rlx_reward_errors"  # key of verifiers' state: [(name of the reward function, the exception)]
_parse_tokens = multiturn_env.parse_response_tokens


def hook(env: vf.Environment) -> None:
    """Change `env` in place, and the tokens that verifiers looks for, for all environments of this process."""
    multiturn_env.parse_response_tokens = _tokens_of
    env._stop_conditions = [_with_signature(func) for func in env._stop_conditions]
    env._cleanup_handlers = [_with_signature(func) for func in env._cleanup_handlers]
    rubrics = [env.rubric]
    while rubrics:
        rubric = rubrics.pop()
        rubrics += getattr(rubric, "rubrics", [])
        for func in rubric.funcs:
            _keep_signature(func)
        if type(rubric)._call_individual_reward_func is Rubric._call_individual_reward_func:
            rubric._call_individual_reward_func = functools.partial(_call_reward, rubric)
        if type(rubric)._call_group_reward_func is Rubric._call_group_reward_func:
            rubric._call_group_reward_func = functools.partial(_call_group_reward, rubric)


async def _tokens_of(response: Response, max_seq_len: int | None = None) -> Any:
    """verifiers' `parse_response_tokens`, which uses a thread only if there are tokens."""
    return None if response is None or response.message.tokens is None else await _parse_tokens(response, max_seq_len)


async def _call_reward(rubric: Rubric, func: Any, state: State) -> float:
    """As in Rubric, a reward function that raises scores 0. The error is also recorded in the state."""
    objects = rubric.score_objects(state)
    try:
        return float(await maybe_await(func, **_accepted(func, objects)))
    except Exception as error:
        _note_reward_error(func, [state], error)
        return 0.0


async def _call_group_reward(rubric: Rubric, func: Any, states: list[State]) -> list[float]:
    """As in Rubric, a group reward function that raises scores 0 for every rollout. The error is also recorded in the states."""
    objects = rubric.group_score_objects(states)
    try:
        scores = [float(score) for score in await maybe_await(func, **_accepted(func, objects))]
        if len(scores) != len(states):
            raise ValueError(f"it returned {len(scores)} rewards for a group of {len(states)} rollouts")
        return scores
    except Exception as error:
        _note_reward_error(func, states, error)
        return [0.0] * len(states)


def _accepted(func: Any, objects: dict[str, Any]) -> dict[str, Any]:
    """The objects that a function takes as arguments; all of them if it has `**kwargs`."""
    parameters = inspect.signature(func).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return objects
    return {name: value for name, value in objects.items() if name in parameters}


def _keep_signature(func: Any) -> None:
    """Cache the function's signature, so that the next inspection is a look-up."""
    plain = getattr(func, "__func__", func)
    if inspect.isfunction(plain):
        plain.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]


def _with_signature(func: Any) -> Any:
    """The function with its signature at hand. The signature of a method, without `self`, would be made anew at each inspection."""
    if not inspect.ismethod(func):
        _keep_signature(func)
        return func

    @functools.wraps(func)
    def call(*args: Any, **named: Any) -> Any:
        return func(*args, **named)

    call.__signature__ = inspect.signature(func)  # type: ignore[attr-defined]
    return call


def _note_reward_error(func: Any, states: list[State], error: Exception) -> None:
    name = getattr(func, "__name__", repr(func))
    for state in states:
        state.setdefault(REWARD_ERRORS, []).append((name, error))
