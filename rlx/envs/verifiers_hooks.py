"""Changes to a loaded verifiers environment: errors of reward functions are recorded, and episodes cost less CPU.

verifiers' episode loop and rubrics inspect the signature of every hook at every call. That is two thirds of a short episode's CPU time.
`prepare` returns one function that plays an episode and one that scores it. If the environment overrides none of verifiers' methods,
they take the same steps without the inspection. Otherwise they are verifiers' own methods. Both leave the same state (tests compare them).
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import verifiers as vf
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.errors import Error, OverlongPromptError
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.rubric_group import RubricGroup
from verifiers.types import AssistantMessage, Response, State, TrajectoryStep

REWARD_ERRORS = "rlx_reward_errors"  # key of verifiers' state: [(name of the reward function, the exception)]

Play = Callable[..., Awaitable[State]]  # (row, client, model, sampling arguments)
Score = Callable[[State], Awaitable[None]]
Named = tuple[Any, float, frozenset[str] | None]  # reward function, weight, parameters (None: takes any)


def prepare(env: vf.Environment) -> tuple[Play, Score]:
    """Change `env` and its child environments in place. Returns the functions that play and score one episode."""
    for child in getattr(env, "envs", []):
        prepare(child)
    if isinstance(env, MultiTurnEnv) and type(env).add_model_response is MultiTurnEnv.add_model_response:
        env.add_model_response = functools.partial(_add_model_response, env)
    for func in (*env._stop_conditions, *env._cleanup_handlers):
        _keep_signature(func)
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
    play = functools.partial(_play_single_turn, env) if _is_plain_single_turn(env) else env.rollout
    plain = _plain_rubrics(env.rubric)
    return play, env.rubric.score_rollout if plain is None else functools.partial(_score_plain, plain)


# playing


def _is_plain_single_turn(env: vf.Environment) -> bool:
    """Whether an episode is exactly one request. False if any hook of verifiers' loop is overridden or added."""
    if not isinstance(env, vf.SingleTurnEnv) or env.max_turns != 1 or env.timeout_seconds is not None:
        return False
    hooks = (
        "setup_state",
        "get_prompt_messages",
        "add_model_response",
        "add_trajectory_step",
        "get_model_response",
        "is_completed",
        "cleanup",
    )
    plain = {name for name in dir(MultiTurnEnv) if hasattr(getattr(MultiTurnEnv, name), "stop")}
    return (
        all(getattr(type(env), name) is getattr(MultiTurnEnv, name) for name in (*hooks, *plain, "render_state"))
        and type(env).render_completion is vf.SingleTurnEnv.render_completion
        and not set(vars(env)) & ({*hooks, *plain} - {"add_model_response"})
        and {func.__name__ for func in env._stop_conditions} == plain
        and [func.__name__ for func in env._cleanup_handlers] == ["render_state"]
    )


async def _play_single_turn(env: MultiTurnEnv, row: dict[str, Any], client: Any, model: str, sampling: dict[str, Any]) -> State:
    """The steps of `MultiTurnEnv.rollout` for an environment of one turn."""
    state = await env.init_state(row, client, model, sampling)
    timing = state["timing"]
    timing.generation.start = timing.setup.start = timing.setup.end = time.time()
    try:
        response = await env.get_model_response(state, state["prompt"])
        await env.add_model_response(state, state["prompt"], response)
        state["stop_condition"] = "max_turns_reached"
    except OverlongPromptError:
        state["prompt_too_long"] = state["is_truncated"] = True
        state["stop_condition"] = "prompt_too_long"
    except Error as error:
        state["error"] = error
        state["stop_condition"] = "has_error"
    state["is_completed"] = True
    state["is_truncated"] = state["is_truncated"] or any(step["is_truncated"] for step in state["trajectory"])
    await env.render_state(state)
    return state


async def _add_model_response(env: MultiTurnEnv, state: State, prompt_messages: list, response: Response) -> None:
    """As `MultiTurnEnv.add_model_response`, without its thread: that one handles tokens, and rlx keeps tokens elsewhere."""
    message = response.message
    answer = AssistantMessage.model_construct(
        role="assistant",
        content=message.content,
        reasoning_content=message.reasoning_content,
        thinking_blocks=None,
        tool_calls=message.tool_calls,
    )
    step = TrajectoryStep(
        prompt=prompt_messages,
        completion=[answer],
        response=response,
        tokens=None,
        reward=None,
        advantage=None,
        is_truncated=bool(message.is_truncated),
        trajectory_id=state["trajectory_id"],
        extras={},
    )
    await env.add_trajectory_step(state, step)


# scoring


def _plain_rubrics(rubric: Rubric) -> list[tuple[Rubric, list[Named]]] | None:
    """The rubrics that score an episode, in their order; None if one of them overrides verifiers' scoring."""
    if type(rubric) is RubricGroup:
        found: list[tuple[Rubric, list[Named]]] = []
        for child in rubric.rubrics:
            inner = _plain_rubrics(child)
            if inner is None:
                return None
            found += inner
        return found
    methods = ("score_rollout", "score_objects", "task_for_state", "task_score_fields", "_call_individual_reward_func", "_is_group_func")
    if not all(getattr(type(rubric), name) is getattr(Rubric, name) for name in methods) or rubric.has_group_rewards or not rubric.funcs:
        return None
    return [(rubric, [(func, weight, _parameters(func)) for func, weight in zip(rubric.funcs, rubric.weights, strict=True)])]


async def _score_plain(rubrics: list[tuple[Rubric, list[Named]]], state: State) -> None:
    """The steps of `RubricGroup.score_rollout` and `Rubric.score_rollout`."""
    reward = 0.0
    metrics: dict[str, float] = {}
    for rubric, funcs in rubrics:
        for func, weight, names in funcs:
            score = await _call(rubric, func, names, state)
            reward += weight * score
            metrics[func.__name__] = metrics.get(func.__name__, 0.0) + score
    state["reward"], state["metrics"] = reward, metrics


async def _call(rubric: Rubric, func: Any, names: frozenset[str] | None, state: State) -> float:
    """As in Rubric, a reward function that raises scores 0. The error is also recorded in the state."""
    try:
        objects = rubric.score_objects(state)
        value = func(**(objects if names is None else {name: value for name, value in objects.items() if name in names}))
        return float(await value if inspect.isawaitable(value) else value)
    except Exception as error:
        _note_reward_error(func, [state], error)
        return 0.0


async def _call_reward(rubric: Rubric, func: Any, state: State) -> float:
    return await _call(rubric, func, _parameters(func), state)


async def _call_group_reward(rubric: Rubric, func: Any, states: list[State]) -> list[float]:
    """As in Rubric, a group reward function that raises scores 0 for every rollout. The error is also recorded in the states."""
    try:
        objects, names = rubric.group_score_objects(states), _parameters(func)
        value = func(**(objects if names is None else {name: value for name, value in objects.items() if name in names}))
        return [float(score) for score in (await value if inspect.isawaitable(value) else value)]
    except Exception as error:
        _note_reward_error(func, states, error)
        return [0.0] * len(states)


def _parameters(func: Any) -> frozenset[str] | None:
    """The parameter names of a function; None if it accepts any (`**kwargs`)."""
    parameters = inspect.signature(func).parameters
    return None if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()) else frozenset(parameters)


def _keep_signature(func: Any) -> None:
    """Cache the function's signature, so that the next inspection is a look-up."""
    plain = getattr(func, "__func__", func)
    if inspect.isfunction(plain):
        plain.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]


def _note_reward_error(func: Any, states: list[State], error: Exception) -> None:
    name = getattr(func, "__name__", repr(func))
    for state in states:
        state.setdefault(REWARD_ERRORS, []).append((name, error))
