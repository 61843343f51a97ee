"""What an environment and a policy are to the rest of rlx.

`Environment` turns a task and a policy into a scored rollout; `Policy` is everything an environment needs to talk to the model.
Knows nothing of verifiers (`envs/verifiers_v0.py`) nor of groups, retries and batches (`rlx.rollout`).
Both cross a process boundary as they are: an environment worker builds its own `Policy` and answers with `Rollout` records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlx.config.schema import Config, EnvConfig
from rlx.types import Rollout, Task, Turn

if TYPE_CHECKING:
    from rlx.envs.chat import Chat


class Generator(Protocol):
    """Whatever samples tokens: the inference client, or a stand-in."""

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        """Sample one completion of `prompt_ids` [P]. `sampling` has vLLM's names; equal `affinity` goes to one server."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model as an environment sees it."""

    generator: Generator
    chat: Chat  # messages to tokens and back
    context_length: int  # most tokens of prompt and completion together
    seed: int  # the run's seed
    label: str = ""  # begins every request id, so that two runs may share a server


class Environment(Protocol):
    """One environment of the mix."""

    name: str  # key of the `envs` section
    rows: Sequence[dict[str, Any]]  # the data set: `example_id`, `prompt`, `answer`, … always in the same order
    scores_groups: bool  # rewards compare the rollouts of a group: a rollout has its reward only after `score_group`

    async def rollout(self, task: Task, member: int, attempt: int, policy: Policy) -> Rollout:
        """Play and score one episode. Never raises for a failing episode: `status` and `error` say what happened."""
        ...

    async def score_group(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Give the rollouts of one task their rewards, where `scores_groups`."""
        ...

    def forget(self, task: Task) -> None:
        """The group of `task` was given up; drop what is kept for scoring it."""
        ...

    async def close(self) -> None:
        """The run is over; put away what is held."""
        ...


def request_seed(seed: int, task: Task, member: int, attempt: int, turn: int) -> int:
    """The sampling seed of one request, 0 … 2^63 - 1: a hash of run seed, environment, example, task, member, attempt and turn.

    The same in every process and Python version. A second visit of an example (another `task.index`) samples anew.
    """
    key = f"{seed}|{task.env}|{task.example_id}|{task.index}|{member}|{attempt}|{turn}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def sampling_of(config: Config, env: EnvConfig) -> dict[str, Any]:
    """The sampling parameters of one environment by vLLM's names: the run's, with the environment's own in their place."""
    run = config.sampling
    return {
        "max_tokens": run.max_tokens if env.sampling.max_tokens is None else env.sampling.max_tokens,
        "temperature": run.temperature if env.sampling.temperature is None else env.sampling.temperature,
        "top_p": run.top_p,
        "top_k": run.top_k,
        "min_p": run.min_p,
        "min_tokens": run.min_tokens,
    }
