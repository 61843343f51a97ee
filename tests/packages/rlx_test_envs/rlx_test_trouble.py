"""Environments that misbehave, by `kind`."""

import asyncio

import verifiers as vf
from rlx_test_envs import words


class Stumble(vf.SingleTurnEnv):
    """The set-up of every `every`-th example fails."""

    def __init__(self, every: int, error: type[BaseException], **kwargs) -> None:
        super().__init__(**kwargs)
        self.every = every
        self.stumble = error

    async def setup_state(self, state: vf.State) -> vf.State:
        if state["example_id"] % self.every == 0:
            raise self.stumble(f"example {state['example_id']} cannot be set up")
        return state


class Sleepy(vf.SingleTurnEnv):
    """Sleeps `seconds` before every `every`-th example. With `deaf` it ignores the first cancellation."""

    def __init__(self, every: int, seconds: float, deaf: bool, **kwargs) -> None:
        super().__init__(**kwargs)
        self.every = every
        self.seconds = seconds
        self.deaf = deaf

    async def setup_state(self, state: vf.State) -> vf.State:
        if state["example_id"] % self.every == 0:
            try:
                await asyncio.sleep(self.seconds)
            except asyncio.CancelledError:
                if not self.deaf:
                    raise
                await asyncio.sleep(self.seconds)
        return state


def backwards(completion: vf.Messages, answer: str) -> float:
    """1 if the reply is the answer."""
    return float(completion[-1]["content"].strip() == answer)


def raising(completion: vf.Messages) -> float:
    """Always raises."""
    raise ZeroDivisionError("this reward function is broken")


def sometimes_raising(completion: vf.Messages, answer: str) -> float:
    """Raises for a wrong reply, as careless parsers do."""
    return {answer: 1.0}[completion[-1]["content"].strip()]


def not_a_number(completion: vf.Messages) -> float:
    """Always returns NaN."""
    return float("nan")


async def slow(completion: vf.Messages) -> float:
    """Takes an hour."""
    await asyncio.sleep(3600)
    return 1.0


def load_environment(
    kind: str = "raising", num_examples: int = 64, every: int = 1, seconds: float = 3600.0, deaf: bool = False
) -> vf.Environment:
    """kind: raising, sometimes_raising, not_a_number, slow (reward functions), vf_error, error, cancelled (set-up), sleepy."""
    rewards = {f.__name__: f for f in (raising, sometimes_raising, not_a_number, slow)}
    data = words(num_examples)
    if kind in rewards:
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[rewards[kind]]))
    rubric = vf.Rubric(funcs=[backwards])
    if kind == "sleepy":
        return Sleepy(every, seconds, deaf, dataset=data, rubric=rubric)
    return Stumble(
        every, {"vf_error": vf.SandboxError, "error": KeyError, "cancelled": asyncio.CancelledError}[kind], dataset=data, rubric=rubric
    )
