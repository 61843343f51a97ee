"""One recorded step under two objectives: token weights against formulas written from the papers, and the command on a recorded run."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixed_examples import SFT, mix_of, taught
from trainer_examples import make_model, make_samples, make_trainer, step_batch

from rlx.cli import main
from rlx.config.load import compose
from rlx.config.schema import RunConfig, WarmStartConfig
from rlx.data.packing import pack
from rlx.losses.grpo import grpo
from rlx.losses.gspo import gspo
from rlx.metrics import MetricsWriter
from rlx.models.tiny import build_model, build_tokenizer, save
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.plan.make import make_plan
from rlx.rollout.record import record_batch
from rlx.runs.run_dir import create
from rlx.train.build import build
from rlx.train.checkpoint import Saver, TrainerProgress
from rlx.train.compare import Begin, Measured, compare, cosine, in_one_process
from rlx.types import TrainingSample
from rlx.weights.shapes import digest_of

pytestmark = pytest.mark.slow

EPS = 0.2


def logps(hf: Any, sample: TrainingSample) -> np.ndarray:
    """[L] log-probability of each token by the model's own forward, one sample at a time; 0 where it is not trainable."""
    with torch.no_grad():
        logits = hf(torch.from_numpy(sample.token_ids[None]).long()).logits[0].double()
    found = np.zeros(len(sample.token_ids))
    for position in np.flatnonzero(sample.loss_mask):
        row = logits[position - 1] / float(sample.temperature[position])
        found[position] = float(torch.log_softmax(row, dim=0)[sample.token_ids[position]])
    return found


def by_rollout(samples: list[TrainingSample], hf: Any) -> dict[tuple[int, int], list[tuple[int, int, float, float, float]]]:
    """For each rollout its trainable tokens: (sample, position, log-probability, the engine's, advantage)."""
    found = defaultdict(list)
    for number, sample in enumerate(samples):
        logp = logps(hf, sample)
        for at in np.flatnonzero(sample.loss_mask):
            found[sample.group, sample.member].append(
                (number, int(at), logp[at], float(sample.inference_logprobs[at]), float(sample.advantages[at]))
            )
    return found


def clipped(ratio: float, advantage: float, eps: float = EPS) -> bool:
    return (advantage > 0 and ratio > 1 + eps) or (advantage < 0 and ratio < 1 - eps)


def weights_of_grpo(rollouts: dict, aggregate: str) -> dict[tuple[int, int], float]:
    """−∂L/∂log π_t · N_tok: ρ_t A_t, 0 if clipped, divided by tokens, or by rollouts and their lengths."""
    total = sum(map(len, rollouts.values()))
    found = {}
    for tokens in rollouts.values():
        scale = 1.0 if aggregate == "token_mean" else total / (len(rollouts) * len(tokens))
        for number, at, logp, engine, advantage in tokens:
            ratio = math.exp(logp - engine)
            found[number, at] = 0.0 if clipped(ratio, advantage) else ratio * advantage * scale
    return found


def weights_of_gspo(rollouts: dict) -> dict[tuple[int, int], float]:
    """∂/∂log π_t of s_i A_i with s_i = exp(mean over |y_i| tokens): s_i A_i / |y_i|, averaged over rollouts."""
    total = sum(map(len, rollouts.values()))
    found = {}
    for tokens in rollouts.values():
        ratio = math.exp(sum(logp - engine for _, _, logp, engine, _ in tokens) / len(tokens))
        advantage = sum(token[4] for token in tokens) / len(tokens)
        for number, at, *_ in tokens:
            found[number, at] = 0.0 if clipped(ratio, advantage) else ratio * advantage * total / (len(rollouts) * len(tokens))
    return found


@pytest.mark.parametrize("case", ["grpo by token", "grpo by rollout", "gspo"])
def test_weights_are_those_of_the_papers_formulas_and_give_the_gradient(case: str) -> None:
    samples = [
        replace(s, inference_logprobs=np.where(s.loss_mask, s.inference_logprobs * 0.8 - 0.9, 0).astype(np.float32)) for s in make_samples()
    ]
    hf = make_model()
    rollouts = by_rollout(samples, hf)
    if case == "gspo":
        function, aggregate, expected = (lambda tokens: gspo(tokens, eps_low=EPS, eps_high=EPS)), "seq_mean", weights_of_gspo(rollouts)
    else:
        aggregate = "token_mean" if case == "grpo by token" else "seq_mean"
        function, expected = (lambda tokens: grpo(tokens, eps_low=EPS, eps_high=EPS)), weights_of_grpo(rollouts, aggregate)
    kinds = {"none": sum(w == 0 for w in expected.values()), "some": sum(w != 0 for w in expected.values())}
    assert min(kinds.values()) >= 3, "the example has clipped and unclipped tokens"
    trainer = make_trainer(make_model(), function, aggregate, proximal="inference")
    measured = Measured(trainer, step_batch(2, [samples]), tokens=40)
    (gradient,) = measured.gradients()
    side, logp = measured.side, measured.logp

    begin = 0
    total = torch.zeros((), dtype=torch.float64)
    for number, sample in enumerate(samples):
        part = slice(begin, begin + len(sample.token_ids))
        begin = part.stop
        assert np.array_equal(~np.isnan(side.weights[part]), sample.loss_mask), "every trainable token is found in its sample"
        for at in np.flatnonzero(sample.loss_mask):
            assert side.weights[part][at] == pytest.approx(expected[number, int(at)], rel=2e-4, abs=1e-7)
        assert logp[part][sample.loss_mask] == pytest.approx(logps(hf, sample)[sample.loss_mask], abs=1e-5)
        logits = hf(torch.from_numpy(sample.token_ids[None]).long()).logits[0].double()
        for at in np.flatnonzero(sample.loss_mask):
            row = logits[at - 1] / float(sample.temperature[at])
            total = total - expected[number, int(at)] * torch.log_softmax(row, dim=0)[sample.token_ids[at]] / len(expected)
    hf.zero_grad()
    total.backward()
    independent = [p.grad for p in hf.parameters()]
    assert side.gradient_norms == [pytest.approx(math.sqrt(sum(float(g.double().square().sum()) for g in independent)), rel=1e-4)]
    assert cosine(gradient, independent) == pytest.approx(1, abs=1e-6)


def test_tokens_that_only_cross_entropy_reads_have_their_weight() -> None:
    samples = [taught(sample) for sample in make_samples()]
    trainer = make_trainer(make_model())
    trainer.losses = mix_of({"test": SFT})
    measured = Measured(trainer, step_batch(2, [samples]), tokens=40)
    assert len(list(measured.gradients())) == 1
    side = measured.side
    read = np.concatenate([sample.ce_weights for sample in samples if sample.ce_weights is not None])
    assert side.num_tokens == [int(read.sum())]
    assert side.weights[read > 0] == pytest.approx(1)


# the command


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps as its trainer leaves it: batches, metrics, weights of all versions; the tiny model, but random batches."""
    root = tmp_path_factory.mktemp("replay") / "run"
    cfg = compose(["max_steps=3", "optim.lr=1e-2", "scheduler.warmup_steps=0"], {}).cfg
    cfg = replace(cfg, run=RunConfig(name="run", dir=str(root)))
    paths, lock = create(cfg, ["max_steps=3"], make_plan(cfg, root))
    lock.close()
    initial = root.parent / "initial"
    tokenizer, hf = (
        build_tokenizer(cfg.model.context_length),
        build_model(cfg.model.warm_start or WarmStartConfig(), cfg.model.context_length),
    )
    save(hf, tokenizer, initial)
    paths.initial_model.write_text(f"{initial}\n")
    metrics = MetricsWriter(paths.metrics, "trainer")

    trainer = build(in_one_process(cfg, "cpu"), str(initial), one_process("cpu"), lambda _: nullcontext())
    for step in range(3):
        samples = [replace(sample, env="reverse_text") for sample in make_samples(seed=step)]
        batch = step_batch(step, [samples])
        record_batch(paths.recorded_of(step), batch)
        packed = pack(batch, rank=0, ranks=1, tokens=cfg.micro_batch_tokens, loss_of=trainer.losses.loss_of)
        metrics.write(step, trainer.train_batch(packed))
        save(trainer.model.hf, tokenizer, paths.weights_of(step + 1))
        (paths.weights_of(step + 1) / COMPLETE).write_text("{}")
    return root


def test_adapters_of_a_run_in_bfloat16_are_compared_from_a_checkpoint_and_without_dropout(tmp_path: Path) -> None:
    hf = make_model()
    hf.save_pretrained(tmp_path / "initial")
    arguments = ["max_steps=2", "lora.rank=4", "lora.dropout=0.5", "model.dtype=bfloat16", "trainer.optimization_dtype=bfloat16"]
    cfg, paths, initial = compose(arguments, {}).cfg, RunPaths(tmp_path / "run"), str(tmp_path / "initial")
    trainer = build(cfg, initial, one_process("cpu"), lambda _: nullcontext())
    Saver(trainer, digest_of).save(tmp_path / "saved", TrainerProgress(0, 0))
    record_batch(paths.recorded_of(0), step_batch(0, [[replace(sample, env="reverse_text") for sample in make_samples()]]))
    found = compare(cfg, cfg, paths, Begin(model=initial, step=0, checkpoint=tmp_path / "saved"), 0)
    assert found.cosines == [pytest.approx(1.0)]
    assert found.recorded.gradient_norms == found.other.gradient_norms


@pytest.fixture
def kl_sides(tmp_path: Path) -> Callable[..., list[list[float]]]:
    """Weights of the tokens under the run's objective and under another, at a policy that has left its reference."""
    for name, seed in (("initial", 0), ("policy", 1)):
        make_model(seed=seed).save_pretrained(tmp_path / name)
    samples = [replace(sample, env=["reverse_text", "sums"][sample.group % 2]) for sample in make_samples()]
    assert {sample.env for sample in samples} == {"reverse_text", "sums"}
    paths = RunPaths(tmp_path / "run")

    def sides(recorded: Sequence[str], other: Sequence[str], beta: float | None = None) -> list[list[float]]:
        of_one = [sample if any("sums" in line for line in recorded) else replace(sample, env="reverse_text") for sample in samples]
        record_batch(paths.recorded_of(0), step_batch(0, [of_one]))
        begin = Begin(model=str(tmp_path / "policy"), step=0, reference=str(tmp_path / "initial"))
        found = compare(compose(recorded, {}).cfg, compose([*recorded, *other], {}).cfg, paths, begin, 0, beta=beta)
        return [side.weights[~np.isnan(side.weights)].tolist() for side in (found.recorded, found.other)]

    return sides


def test_a_kl_weight_that_adapts_is_the_recorded_one_wherever_the_kl_term_is_the_same(kl_sides: Callable[..., list[list[float]]]) -> None:
    adapts = ["loss.kl.beta=0.1", "loss.kl.target_kl=0.05"]
    (at_30, at_50), (at_10, _) = kl_sides(["loss.kl.beta=0.3"], ["loss.kl.beta=0.5"]), kl_sides(["loss.kl.beta=0.1"], [])
    assert at_10 != at_30 != at_50 != at_10
    assert kl_sides(adapts, [], beta=0.3) == [at_30, at_30]
    assert kl_sides(adapts, ["envs.reverse_text.loss.kl.beta=0.5"], beta=0.3) == [at_30, at_50]
    assert kl_sides(adapts, ["loss.kl.target_kl=null"], beta=0.3) == [at_30, at_10]


def test_another_kl_weight_of_one_environment_is_the_one_that_its_key_says(kl_sides: Callable[..., list[list[float]]]) -> None:
    (at_10, at_50) = kl_sides(["loss.kl.beta=0.1"], ["loss.kl.beta=0.5"])
    assert at_10 != at_50
    assert kl_sides(["loss.kl.beta=0.1"], ["envs.reverse_text.loss.kl.beta=0.5"], beta=0.1) == [at_10, at_50]


def test_the_objectives_of_a_mix_keep_a_kl_weight_each(kl_sides: Callable[..., list[list[float]]]) -> None:
    mix = ["env=[reverse_text,sums]", "loss.kl.beta=0.02", "envs.sums.loss.kl.beta=0.1"]
    own = kl_sides(mix, [])
    assert own != kl_sides([*mix, "envs.sums.loss.kl.beta=0.02"], [])
    assert kl_sides(mix, [], beta=0.02) == own


def replayed(root: Path, *arguments: str) -> dict[str, Any]:
    assert main(["replay", str(root), *arguments]) == 0
    (folder,) = RunPaths(root).replays.iterdir()
    return json.loads((folder / "summary.json").read_text())


def test_a_recorded_step_under_another_objective(recorded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = shutil.copytree(recorded_run, tmp_path / "run")
    config = (root / "config.yaml").read_text()
    found = replayed(root, "--step", "2", "loss=gspo", "loss.proximal=inference", "--top", "3")
    assert found["schema"] == "rlx.replay/1"
    assert found["policy"] == f"policy 2 from {root / 'weights' / 'step_2'}"
    assert found["changes"]["loss._target_"] == ["rlx.losses.grpo.grpo", "rlx.losses.gspo.gspo"]
    assert [check["close"] for check in found["checks"]] == [True] * 4
    assert found["mini_batches"][0]["recorded"]["gradient_norm"] != found["mini_batches"][0]["other"]["gradient_norm"]
    folder = root / "replays" / "step_2--loss.proximal=inference,loss=gspo"
    rows = list(csv.DictReader((folder / "tokens.csv").open(newline="")))
    assert len(rows) == found["tokens"] == sum(share["tokens"] for share in found["by_env"])
    for row in rows:
        assert json.loads(row["text"]) != ""
    largest = max(rows, key=lambda row: abs(float(row["weight_other"]) - float(row["weight_recorded"])))
    assert (found["largest_differences"][0]["position"], found["largest_differences"][0]["group"]) == (
        int(largest["position"]), int(largest["group"])
    )  # fmt: skip
    assert len(found["largest_differences"]) == 3
    assert "largest differences" in capsys.readouterr().out
    assert (root / "config.yaml").read_text() == config


def test_a_policy_that_is_gone_is_trained_again_or_missed_clearly(
    recorded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(recorded_run, tmp_path / "run")
    shutil.rmtree(root / "weights" / "step_2")
    found = replayed(root, "--step", "2", "loss.eps_high=0.01")
    assert found["steps_trained_again"] == 2
    assert all(check["here"] == pytest.approx(check["recorded"], rel=1e-9) for check in found["checks"]), "exact"
    assert found["changes"] == {"loss.eps_high": [0.2, 0.01]}
    RunPaths(root).recorded_of(0).unlink()
    assert main(["replay", str(root), "--step", "2", "loss=gspo"]) == 2
    said = capsys.readouterr().err
    assert "the policy of step 2 is gone: weights/ has versions 1, 3; checkpoints/ has none" in said
    assert "weight_broadcast.keep_last" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "7", "loss=gspo"], "only of steps 0, 1, 2"),
        (["--step", "1"], "give another objective"),
        (["--step", "1", "optim.lr=1", "loss=gspo"], "optim.lr=1: has no effect"),
        (["--step", "1", "loss.mask_overlong=true"], "loss.mask_overlong=true: has no effect"),
        (["--step", "1", "loss.epps=1"], "unknown key loss.epps"),
        (["--step", "1", "loss.kl.beta=0.1", "ref.sync_interval=2"], "the run's did not"),
        (["--step", "1", "loss=gspo", "loss.correction=tis"], "loss.correction"),
        (["--step", "one", "loss=gspo"], "invalid int value: 'one'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_model_is_loaded(
    recorded_run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded_run), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not RunPaths(recorded_run).replays.exists()
