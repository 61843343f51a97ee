"""A deterministic little policy for tests: it knows the answers, and errs with a probability drawn from the request's seed."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.config.schema import EnvConfig, ModelConfig
from rlx.models.tiny import build_tokenizer
from rlx.policy.chat import Chat, load_chat
from rlx.policy.spec import PolicySpec
from rlx.policy.tokens import TokenPolicy
from rlx.trace import Turn
from rlx.types import Rollout, Task

CONTEXT = 256


class StandIn:
    """Answers through `answer(last user text) -> text`; with probability `error` it repeats the text instead.

    `version` is stamped on the tokens sampled after it was set, `delay` is seconds a request takes.
    """

    away = 0.0  # `Sampler.away`

    def __init__(self, chat: Chat, answer: Callable[[str], str] = lambda text: text[::-1], error: float = 0.5, delay: float = 0.0) -> None:
        self.chat = chat
        self.answer = answer
        self.error = error
        self.delay = delay
        self.version = 0
        self.requests: list[dict[str, Any]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        self.requests.append({"prompt_ids": list(prompt_ids), "sampling": sampling, "request_id": request_id, "affinity": affinity})
        version = self.version
        await asyncio.sleep(self.delay)
        rng = random.Random(sampling["seed"])
        prompt = self.chat.tokenizer.decode(prompt_ids)
        user = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        text = user if rng.random() < self.error else self.answer(user)
        ids = [*self.chat.tokenizer.encode(text), self.chat.stop_token_ids[0]]
        finish = "stop" if len(ids) <= sampling["max_tokens"] else "length"
        ids = ids[: sampling["max_tokens"]]
        logprobs = [-rng.random() for _ in ids]
        return Turn(
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            completion_ids=np.asarray(ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=np.full(len(ids), version, dtype=np.int32),
            temperature=float(sampling.get("temperature", 1.0)) or 1.0,
            finish_reason=finish,
        )


_chat: Chat | None = None


def tiny_chat() -> Chat:
    """The chat format of the tiny model, built once."""
    global _chat
    if _chat is None:
        _chat = load_chat(build_tokenizer(CONTEXT), ModelConfig(name="tiny"))
    return _chat


def policy_of(generator: Any, chat: Chat | None = None, *, seed: int = 0, context_length: int = CONTEXT, **spec: Any) -> TokenPolicy:
    return TokenPolicy(PolicySpec(seed=seed, context_length=context_length, **spec), chat or tiny_chat(), generator)


SAMPLING = {"max_tokens": 96, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0}

OUTSIDE = str(Path(__file__).parent / "packages" / "rlx_test_envs")


def load(
    id: str, timeout: float = 300.0, sampling: dict[str, Any] | None = None, name: str = "e", on_reward_error: str = "fail", **args: Any
) -> Any:
    """An environment, shipped or of the test package outside the source tree."""
    from rlx.envs.verifiers_v0 import load_environment

    if OUTSIDE not in sys.path:
        sys.path.insert(0, OUTSIDE)
    return load_environment(name, EnvConfig(id=id, args=args, on_reward_error=on_reward_error), sampling or SAMPLING, timeout)


def task_of(env: Any, index: int = 0) -> Task:
    row = env.rows[index % len(env.rows)]
    return Task(env=env.name, example_id=row["example_id"], index=index, row=row)


class InTurn(StandIn):
    """Answers each request with the next of the given texts."""

    def __init__(self, *texts: str) -> None:
        super().__init__(tiny_chat(), error=0.0)
        self.texts = list(texts)

    async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
        ids = np.array([*self.chat.tokenizer.encode(self.texts.pop(0)), self.chat.stop_token_ids[0]], np.int32)
        zeros = np.zeros(len(ids), np.int32)
        prompt = np.asarray(prompt_ids, np.int32)
        return Turn(
            prompt_ids=prompt, completion_ids=ids, logprobs=zeros.astype(np.float32), versions=zeros, finish_reason="stop", temperature=1.0
        )


def play_texts(env: Any, *texts: str, index: int = 0) -> Rollout:
    """The rollout of one example in which the policy says these texts, one in each turn."""
    env.policy = policy_of(InTurn(*texts), context_length=8192)
    (rollout,) = asyncio.run(env.play(task_of(env, index), [0], 0))
    return rollout
