"""One real vLLM for environments: members of a group say what a script says, the others what the model samples; and a trainer beside it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inference_server import START, Run
from policy_stand_in import SAMPLING, tiny_chat
from public_classic import Said, check_tokens
from run_servers import Servers

from rlx.config.schema import LossTerms
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.policy import PolicyModel
from rlx.policy.base import Reply
from rlx.policy.tokens import TokenEpisode, TokenPolicy
from rlx.rollout.samples import samples_of
from rlx.train.step import PolicyTrainer
from rlx.types import Group, Rollout, StepBatch, Task, Turn

CONTEXT = 8192  # the tiny tokenizer spells prompts in characters
LIMITS = {**SAMPLING, "max_tokens": 256}
MISMATCH = 1e-6  # largest mismatch/kl in float32 at k=0
Says = Callable[[str, int], str]  # prompt, number of the request in its rollout → what the model says


class Hearing(TokenEpisode):
    """Notes the replies."""

    async def respond(self, *args: Any, **keys: Any) -> Reply:
        reply = await super().respond(*args, **keys)
        self.policy.generator.replies[self.member].append(reply)  # type: ignore[attr-defined]
        return reply


class HeardPolicy(TokenPolicy):
    def episode(self, task: Task, member: int, attempt: int) -> TokenEpisode:
        return Hearing(self, task, member, attempt)


class Heard:
    """A sampler that steers the first members of a group, and what all members sampled."""

    def __init__(self, servers: Servers, scripts: Path, says: Says, steered: int) -> None:
        self.servers, self.scripts, self.says, self.steered = servers, scripts, says, steered
        self.replies: dict[int, list[Reply]] = defaultdict(list)  # by member
        self.sampling: list[dict[str, Any]] = []
        self.away = 0.0

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        member, _, number = (int(part) for part in re.findall(r"\d+", request_id)[-3:])
        self.sampling.append(sampling)
        if member >= self.steered:
            return await self.servers.generate(prompt_ids, sampling, request_id, affinity)
        chat = tiny_chat()
        script = [*chat.tokenizer.encode(self.says(chat.tokenizer.decode(prompt_ids), number)), chat.stop_token_ids[0]]
        (self.scripts / str(sampling["seed"])).write_text(json.dumps(script))
        turn = await self.servers.generate(prompt_ids, sampling, request_id, affinity)
        assert turn.completion_ids.tolist() == script[: len(turn.completion_ids)]
        return turn

    def turns(self, member: int) -> list[Turn]:
        return [reply.turn for reply in self.replies[member] if reply.turn is not None]

    def script(self, member: int) -> list[Said]:
        """The replies for stock verifiers."""
        return [
            Said(reply.content, tuple((call.name, json.loads(call.arguments)) for call in reply.calls), reply.truncated)
            for reply in self.replies[member]
        ]


class Engine:
    """The server process."""

    def __init__(self, root: Path) -> None:
        vllm = {"logits_processors": ["steer:Steer"], "logprobs_mode": "raw_logprobs"}
        self.scripts = root / "scripts"
        self.scripts.mkdir()
        self.run = Run(root / "run", tied=True, vllm=vllm, context=CONTEXT)
        tests = str(Path(__file__).parent)
        self.run.start(f"import os, sys; os.environ['RLX_TEST_SCRIPTS'] = {str(self.scripts)!r}; sys.path.append({tests!r}); {START}")
        model = PolicyModel(self.run.models[0])
        self.trainer = PolicyTrainer(
            model, Objective(grpo, LossTerms(aggregate="token_mean"), max_length=CONTEXT), torch.optim.SGD(model.parameters(), lr=0.0)
        )

    def play(self, env: Any, task: Task, says: Says, members: int = 2, steered: int = 1) -> tuple[list[Rollout], Heard]:
        """The rollouts of a group. The first `steered` members say what `says` returns."""

        for script in self.scripts.iterdir():  # of an earlier environment, whose tasks had the same seeds
            script.unlink()

        async def main() -> tuple[list[Rollout], Heard]:
            async with Servers(self.run.ready()) as servers:
                heard = Heard(servers, self.scripts, says, steered)
                env.policy = HeardPolicy(generator=heard, chat=tiny_chat(), context_length=CONTEXT, seed=0, sampling=LIMITS)
                try:
                    return await env.play(task, range(members), 0), heard
                finally:
                    await env.close()

        return asyncio.run(main())

    def train(self, rollouts: Sequence[Rollout]) -> None:
        """Check what is trained, token by token, and that the trainer computes the engine's log-probabilities."""
        for rollout in rollouts:
            check_tokens(rollout, rollout.turns)
        advantages = np.linspace(-1, 1, len(rollouts), dtype=np.float32)
        group = Group(id=0, task=rollouts[0].task, rollouts=tuple(rollouts), advantages=advantages)
        batch = StepBatch(step=0, mini_batches=(tuple(samples_of(group, strategy="interleaved")),))
        found = self.trainer.train_batch(pack(batch, rank=0, ranks=1, tokens=CONTEXT))
        assert found["mismatch/kl"] <= MISMATCH
        assert found["mismatch/abs_logp_diff_max"] <= 1e-3
        assert found["off_policy/lag_max"] == 0
