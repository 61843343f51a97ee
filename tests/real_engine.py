"""One real vLLM for environments: members of a group say what a script says, the others what the model samples; and a trainer beside it.

What the engine was asked and answered is noted between policy and servers, before rlx makes turns of a trajectory of it. What a run would
record and train is compared with these notes.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inference_server import Run
from policy_stand_in import SAMPLING, tiny_chat
from public_classic import Said
from recorded import check_recorded, normalised, recorded_samples
from run_servers import Servers
from traces import same, turns_of

from rlx.config.schema import Config, LossTerms, TrainedEnvConfig
from rlx.data.packing import pack
from rlx.data.source import read_recorded
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.policy import PolicyModel
from rlx.paths import RunPaths
from rlx.policy.base import Message, Reply
from rlx.policy.chat import Chat
from rlx.policy.spec import PolicySpec
from rlx.policy.tokens import TokenEpisode, TokenPolicy
from rlx.rollout.batch import advantages_of, make_batch, make_groups, scores_of
from rlx.rollout.record import record_batch, write_rollouts
from rlx.trace import Turn
from rlx.train.step import PolicyTrainer
from rlx.types import Rollout, Task, TrainingSample

CONTEXT = 8192  # the tiny tokenizer spells prompts in characters
LIMITS = {**SAMPLING, "max_tokens": 256}
MISMATCH = 1e-6  # largest mismatch/kl in float32 at k=0
Says = Callable[[str, int], str]  # prompt, number of the request in its rollout → what the model says


class Hearing(TokenEpisode):
    """Notes the replies, and what they answer."""

    async def respond(self, messages: Sequence[Message], *args: Any, **keys: Any) -> Reply:
        reply = await super().respond(messages, *args, **keys)
        heard: Heard = self.policy.generator  # type: ignore[assignment]
        heard.replies[self.member].append(reply)
        heard.messages[reply.request_id] = [*messages, reply.message]
        return reply


class HeardPolicy(TokenPolicy):
    def episode(self, task: Task, member: int, attempt: int) -> TokenEpisode:
        return Hearing(self, task, member, attempt)


class Heard:
    """A sampler that steers the first members of a group, and what all members sampled."""

    def __init__(self, servers: Servers, scripts: Path, says: Says, steered: int) -> None:
        self.servers, self.scripts, self.says, self.steered = servers, scripts, says, steered
        self.replies: dict[int, list[Reply]] = defaultdict(list)  # by member
        self.messages: dict[str, list[Message]] = {}  # by request: what it asked, and the answer
        self.answered: dict[str, Turn] = {}  # by request: the ids and the temperature that it asked for, and what the engine answered
        self.sampling: list[dict[str, Any]] = []
        self.away = 0.0

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        member, _, number = (int(part) for part in re.findall(r"\d+", request_id)[-3:])
        self.sampling.append(sampling)
        if member >= self.steered:
            return self.noted(await self.servers.generate(prompt_ids, sampling, request_id, affinity), prompt_ids, sampling, request_id)
        chat = tiny_chat()
        script = [*chat.tokenizer.encode(self.says(chat.tokenizer.decode(prompt_ids), number)), chat.stop_token_ids[0]]
        (self.scripts / str(sampling["seed"])).write_text(json.dumps(script))
        turn = await self.servers.generate(prompt_ids, sampling, request_id, affinity)
        assert turn.completion_ids.tolist() == script[: len(turn.completion_ids)]
        return self.noted(turn, prompt_ids, sampling, request_id)

    def noted(self, turn: Turn, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str) -> Turn:
        """The turn, after a copy of it is noted. The engine has the weights of version 0 alone."""
        assert request_id not in self.answered, "a request id is used twice"
        self.answered[request_id] = replace(
            turn,
            prompt_ids=np.array(prompt_ids, np.int32),
            completion_ids=turn.completion_ids.copy(),
            logprobs=turn.logprobs.copy(),
            versions=np.zeros(len(turn.completion_ids), np.int32),
            temperature=sampling["temperature"],
        )
        return turn

    def of_trajectory(self, member: int, beside: Sequence[int] = ()) -> list[Turn]:
        """What a member sampled, without the requests `beside` the trajectory, by their numbers."""
        requests = [reply.request_id for reply in self.replies[member]]
        return [self.answered[one] for one in requests if int(one.rpartition("-")[2]) not in beside]

    def of_agent(self, rollout: Rollout) -> list[Turn]:
        """What an episode's trained agent sampled, if the others sample, too: where its conversation is what the rollout says it was.

        Of two runs that said the same in the same conversation nobody can tell which it was: then that one which is trained.
        """
        said, found = spoken([*rollout.prompt, *rollout.completion]), []
        for number, (role, words) in enumerate(said, 1):
            if role == "assistant":
                alike = [reply for reply in self.replies[rollout.member] if spoken(self.messages[reply.request_id]) == said[:number]]
                assert alike, f"nobody said {words}"
                chosen = next((reply for reply in alike if any(same(reply.turn, turn) for turn in turns_of(rollout))), alike[0])
                found.append(self.answered[chosen.request_id])
        return found

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
        self.run.start(RLX_TEST_SCRIPTS=str(self.scripts))
        model = PolicyModel(self.run.models[0])
        self.trainer = PolicyTrainer(
            model, Objective(grpo, LossTerms(aggregate="token_mean"), max_length=CONTEXT), torch.optim.SGD(model.parameters(), lr=0.0)
        )

    def play(
        self, env: Any, task: Task, says: Says, members: int = 2, steered: int = 1, chat: Chat | None = None
    ) -> tuple[list[Rollout], Heard]:
        """The rollouts of a group. The first `steered` members say what `says` returns.

        `chat`: a format with the tiny model's tokens, in place of its own.
        """
        chat = chat or tiny_chat()

        for script in self.scripts.iterdir():  # of an earlier environment, whose tasks had the same seeds
            script.unlink()

        async def main() -> tuple[list[Rollout], Heard]:
            async with Servers(self.run.ready()) as servers:
                await servers.ready()
                heard = Heard(servers, self.scripts, says, steered)
                env.policy = HeardPolicy(PolicySpec(context_length=CONTEXT, seed=0, sampling=LIMITS), chat, heard)
                try:
                    return await env.play(task, range(members), 0), heard
                finally:
                    await env.close()

        return asyncio.run(main())

    def train(
        self, rollouts: Sequence[Rollout], sampled: Mapping[int, Sequence[Turn]], run_dir: Path, strategy: str = "interleaved"
    ) -> list[TrainingSample]:
        """Record a group as a run does, check the files, token by token, and that the trainer computes the engine's log-probabilities.

        `sampled`: what the engine answered in each member's trajectory. `run_dir`: an empty folder. Returns what was trained.
        """
        task, paths = rollouts[0].task, RunPaths(run_dir)
        config = Config(loss={"_target_": "unused"}, advantage={"_target_": "rlx.advantages.group.group_norm"})
        config.orchestrator.trajectory_strategy = strategy
        config.envs = {task.env: TrainedEnvConfig(id=task.env)}
        groups = make_groups([rollouts], scores_of([rollouts]), advantages_of(config))
        record_batch(paths.recorded_of(0), make_batch(0, groups, config))
        write_rollouts(paths.rollouts_of(0), groups)
        tokens, _ = check_recorded(run_dir, 1, normalised, {(task.index, member): turns for member, turns in sampled.items()})
        assert tokens > 0
        found = self.trainer.train_batch(pack(read_recorded(paths.recorded_of(0), 0), rank=0, ranks=1, tokens=CONTEXT))
        assert found["mismatch/kl"] <= MISMATCH
        assert found["mismatch/abs_logp_diff_max"] <= 1e-3
        assert found["off_policy/lag_max"] == 0
        return recorded_samples(run_dir, 0)


def spoken(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Roles and words."""
    return [(message["role"], message["content"] or "") for message in messages]
