"""A proposer and its solvers, from the engine's tokens to the gradient: orchestrator, batch file, trainer, against plain loops in float64.

The engine is scripted: it answers known tokens with known log-probabilities. What every answer is worth follows from the script alone.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import naive_objectives as naive
import numpy as np
import pytest
import torch
from naive_objectives import NaiveRollout
from policy_stand_in import OUTSIDE, tiny_chat
from recorded import recorded_samples
from test_orchestrator_run import StandInServers, config_of
from trainer_examples import make_model

from rlx.aio import first_failure
from rlx.config.schema import LossTerms, TrainedEnvConfig
from rlx.data.packing import pack
from rlx.data.source import OrchestratorSource
from rlx.envs.load import give_policy
from rlx.heartbeat import Heartbeat
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.roles.orchestrator import Orchestrator
from rlx.trace import Turn
from rlx.train.step import PolicyTrainer
from rlx.types import TrainingSample

pytestmark = pytest.mark.slow

SOLVERS, EPISODES, TOPICS, STEPS = 4, 3, 2, 2
Key = tuple[tuple[int, ...], bytes]  # the tokens of an answer and its prompt, and the answer's log-probabilities


@dataclass
class Answer:
    """What the script said once."""

    version: int
    prompt: list[int]
    said: list[int]
    logprobs: np.ndarray  # [C]
    topic: str | None  # of a proposer
    problem: str  # proposed, or to be solved
    right: bool = False  # a solver's

    @property
    def key(self) -> Key:
        return (*self.prompt, *self.said), self.logprobs.tobytes()


class Script(StandInServers):
    """Proposes new sums; how many solvers solve one depends on its place among its topic's. Log-probabilities are near the model's.

    So a topic's proposals are worth different amounts in whatever order requests arrive.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model  # Hugging Face, float64
        self.answers: list[Answer] = []
        self.solvable: dict[str, int] = {}  # how many of a problem's solvers are right: the first ones that ask
        self.draw = np.random.default_rng(3)

    async def generate(self, prompt_ids: Any, sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        tokenizer, prompt = self.chat.tokenizer, list(map(int, prompt_ids))
        asked = tokenizer.decode(prompt).rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        verb, _, about = asked.partition(" ")
        assert verb in ("propose", "solve")
        right = False
        if verb == "propose":
            text = f"{len(self.answers) + 10}+{self.draw.integers(1, 90)}"
            before = sum(one.topic == about for one in self.answers)
            self.solvable[text] = (1, 2, SOLVERS)[before % EPISODES]
        else:
            right = sum(one.problem == about and one.topic is None for one in self.answers) < self.solvable[about]
            text = str(sum(map(int, about.split("+"))) + (0 if right else self.draw.integers(1, 9)))
        said = [*tokenizer.encode(text), self.chat.stop_token_ids[0]]
        own = scores(self.model, [*prompt, *said])[-len(said) :].detach().numpy()
        near = True
        while near:  # a ratio at a bound of GRPO's clip would be within it in float32 and not in float64, or the reverse
            logprobs = np.minimum(own + self.draw.normal(0, 0.25, len(said)), 0).astype(np.float32)
            near = bool((np.abs(np.exp(own - logprobs)[:, None] - [0.8, 1.2]) < 1e-3).any())
        topic, problem = (about, text) if verb == "propose" else (None, about)
        self.answers.append(Answer(self.version, prompt, said, logprobs, topic, problem, right))
        return Turn(
            prompt_ids=np.array(prompt, np.int32),
            completion_ids=np.array(said, np.int32),
            logprobs=logprobs,
            versions=np.full(len(said), self.version, np.int32),
            temperature=1.0,
            finish_reason="stop",
        )


def scores(model: Any, ids: list[int]) -> torch.Tensor:
    """[L - 1] log-probability of every token but the first, by a Hugging Face forward."""
    tokens = torch.tensor(ids)
    return torch.log_softmax(model(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]


def norm(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def against_the_others(rewards: list[float]) -> list[float]:
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


class Worth:
    """The advantages that a step's answers must get."""

    def __init__(self, compare: Callable[[list[float]], list[float]] | None) -> None:
        """None: a moving average for each agent is what rewards are compared with."""
        self.compare = compare
        self.average = {"proposer": 0.0, "solver": 0.0}

    def of(self, answers: list[Answer]) -> dict[Key, float]:
        solvers: dict[str, list[Answer]] = defaultdict(list)  # by problem
        proposers: dict[str, list[Answer]] = defaultdict(list)  # by topic
        for one in answers:
            (solvers[one.problem] if one.topic is None else proposers[one.topic]).append(one)
        assert {len(group) for group in solvers.values()} == {SOLVERS}
        assert {len(group) for group in proposers.values()} == {EPISODES}
        share = {problem: sum(one.right for one in group) / SOLVERS for problem, group in solvers.items()}
        assert len(set(share.values())) > 1, "the proposers differ"
        found, seen = {}, defaultdict(list)
        for agent, groups in (("solver", solvers), ("proposer", proposers)):
            for group in groups.values():
                rewards = [float(one.right) if agent == "solver" else 4 * share[one.problem] * (1 - share[one.problem]) for one in group]
                values = [r - self.average[agent] for r in rewards] if self.compare is None else self.compare(rewards)
                found |= {one.key: value for one, value in zip(group, values, strict=True)}
                seen[agent] += rewards
        for agent, rewards in seen.items():
            self.average[agent] = 0.95 * self.average[agent] + 0.05 * sum(rewards) / len(rewards)
        return found


class Trainer:
    """Trains on the orchestrator's batches as the role does, and gives every version's weights to the engine."""

    def __init__(self, paths: RunPaths, servers: Script, aggregate: str) -> None:
        self.paths, self.servers = paths, servers
        hf = copy.deepcopy(servers.model).float()
        model = PolicyModel(hf)
        objective = Objective(grpo, LossTerms(aggregate=aggregate))
        self.trainer = PolicyTrainer(model, objective, torch.optim.SGD(model.parameters(), lr=0.3))
        self.models = [copy.deepcopy(servers.model)]  # by version
        self.gradients: list[dict[str, torch.Tensor]] = []  # by step

    async def run(self) -> None:
        source = OrchestratorSource(self.paths, one_process("cpu"), timeout=1)
        for step in range(STEPS):
            while not self.paths.batch_of(step).exists():
                await asyncio.sleep(0.002)
            batch = source.receive(step, lambda: None)
            source.done(step)
            for rank in range(2):  # gradients are sums over ranks and rows
                (rows,) = pack(batch, rank=rank, ranks=2, tokens=160).mini_batches
                assert len(rows.micro_batches) > 1
                self.trainer.accumulate_gradients(rows, step=step)
            named = self.trainer.model.named_parameters()
            self.gradients.append({name.removeprefix("hf."): p.grad.clone() for name, p in named if p.grad is not None})
            self.trainer.optimizer.zero_grad()
            self.trainer.train_batch(pack(batch, rank=0, ranks=1, tokens=160))
            self.servers.model.load_state_dict(self.trainer.model.hf.state_dict())
            self.models.append(copy.deepcopy(self.servers.model))
            folder = self.paths.weights_of(step + 1)
            folder.mkdir(parents=True)
            (folder / COMPLETE).write_text("{}")


def play(root: Path, advantage: str, aggregate: str) -> tuple[Script, Trainer]:
    if OUTSIDE not in sys.path:
        sys.path.insert(0, OUTSIDE)
    from rlx.envs.verifiers_v1 import load_environment

    env = TrainedEnvConfig(id="rlx_test_proposer", args={"solvers": SOLVERS}, agents_per_group="all")
    config = config_of(max_steps=STEPS, seq_len=512, ckpt__interval=None, envs={"e": env}, advantage={"_target_": advantage})
    config.orchestrator.batch_size, config.orchestrator.rollouts_per_example = TOPICS * EPISODES, EPISODES
    model = make_model(vocab_size=len(tiny_chat().tokenizer), max_position_embeddings=512).double()
    paths, servers = RunPaths(root), Script(model)
    trainer, served = Trainer(paths, servers, aggregate), servers
    envs = {"e": load_environment("e", env, {"max_tokens": 12, "temperature": 1.0}, 60.0)}
    give_policy(envs, config, tiny_chat(), served)

    async def main() -> None:
        orchestrator = Orchestrator(config, paths, envs, served, served, Heartbeat(paths, "orchestrator"))  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(first_failure(orchestrator.run(), trainer.run()), 120)
        finally:
            await envs["e"].close()

    asyncio.run(main())
    return servers, trainer


def key_of(sample: TrainingSample) -> Key:
    return tuple(sample.token_ids.tolist()), sample.inference_logprobs[sample.loss_mask].tobytes()


@pytest.mark.parametrize(
    ("advantage", "compare", "aggregate"),
    [
        ("rlx.advantages.group.group_norm", norm, "token_mean"),
        ("rlx.advantages.group.leave_one_out", against_the_others, "seq_mean"),
        ("rlx.advantages.batch.Ema", None, "token_mean"),
    ],
)
def test_proposers_and_solvers_are_trained_with_what_each_is_compared_with(advantage: str, compare: Any, aggregate: str, tmp_path: Path):
    script, trained = play(tmp_path, advantage, aggregate)
    worth = Worth(compare)
    for step in range(STEPS):
        answers = [one for one in script.answers if one.version == step]
        assert len(answers) == TOPICS * EPISODES * (1 + SOLVERS)
        wanted, samples = worth.of(answers), recorded_samples(tmp_path, step)
        assert sorted(map(key_of, samples)) == sorted(one.key for one in answers), "both agents' answers are trained, each once"
        for sample in samples:
            assert sample.loss_mask.sum() == sample.loss_mask[::-1].argmin() > 0, "the answer, and nothing of the prompt"
            assert sample.advantages[sample.loss_mask] == pytest.approx(wanted[key_of(sample)], abs=1e-6)
        proposing = {one.key for one in answers if one.topic is not None}
        assert any(wanted[key] for key in proposing)
        assert any(value for key, value in wanted.items() if key not in proposing)

        model = trained.models[step]
        model.zero_grad()
        num_tokens = sum(len(one.said) for one in answers)
        total = torch.zeros((), dtype=torch.float64)
        for one in answers:
            logp = scores(model, [*one.prompt, *one.said])[-len(one.said) :]
            known = one.logprobs.astype(np.float64).tolist()
            zeros = [0.0] * len(known)
            rollout = NaiveRollout(
                logp=list(logp), old=known, inf=known, ref=zeros, adv=[wanted[one.key]] * len(known), entropy=list(torch.zeros(len(known)))
            )
            losses = sum(naive.grpo(rollout))
            total = total + (losses / num_tokens if aggregate == "token_mean" else losses / len(known) / len(answers))
        total.backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        assert trained.gradients[step].keys() == expected.keys()
        for name, gradient in trained.gradients[step].items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=2e-3, atol=2e-5 * scale, msg=name)
