"""On the real stack: teachers, demonstrations, several agents, and several objectives in one step."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_stand_in import KEY
from inference_server import EXACT, Run
from main_job import MainJob
from policy_stand_in import OUTSIDE
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.config.schema import WarmStartConfig
from rlx.data.source import read_recorded
from rlx.models import tiny
from rlx.paths import RunPaths
from rlx.polling import wait_for
from rlx.types import TrainingSample

pytestmark = [pytest.mark.slow, pytest.mark.long]
QUICK = ("max_async_level=0", "ckpt.interval=null", "orchestrator.batch_size=48", "orchestrator.rollouts_per_example=4")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny model with random weights."""
    folder = tmp_path / "tiny"
    tiny.save(tiny.build_model(WarmStartConfig(), 256), tiny.build_tokenizer(256), folder)
    return folder


def samples(job: MainJob, step: int) -> list[TrainingSample]:
    return [sample for part in read_recorded(RunPaths(job.run_dir).recorded_of(step), step).mini_batches for sample in part]


def logprobs(model: Any, ids: np.ndarray) -> np.ndarray:
    """Of every token but the first, by a Hugging Face forward."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.nightly
def test_a_teacher_scores_one_environment_plays_another_and_rewards_train_the_third(
    start: Callable[..., MainJob], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "teacher").mkdir()
    teacher = Run(tmp_path / "teacher", tied=True)
    teacher.start()
    try:
        (endpoint,) = teacher.ready()
        mix = (
            *("env=reverse_text", "+envs.game.id=rlx_test_v1", "+envs.words.id=rlx-reverse-text", *QUICK, "max_steps=4", "optim.lr=1e-3"),
            *("model=tiny_trained", f"model.name={model}", "seq_len=128", "envs.reverse_text.loss=opd", "+envs.game.loss=dr_grpo"),
            *("+envs.words.sampled_by=teacher", "+envs.words.loss=sft", "+envs.words.loss.ce_coef=1"),
            *(f"teacher.base_url=[{endpoint.url}]", f"teacher.api_key={endpoint.api_key}", "teacher.model=policy"),
        )
        job = start("run", *mix, "hardware.trainer_processes=2", env={"PYTHONPATH": OUTSIDE})
        assert job.wait() == 0, job.text()
    finally:
        teacher.stop()
    for step in range(4):
        by_env = defaultdict(list)
        for sample in samples(job, step):
            by_env[sample.env].append(sample)
        assert {env for env, found in by_env.items() if found} == {"game", "reverse_text", "words"}
        assert all(sample.teacher_logprobs is None for sample in by_env["game"])
        for sample in by_env["reverse_text"]:
            assert np.array_equal(np.isfinite(sample.teacher_logprobs), sample.loss_mask)
            wanted = logprobs(teacher.models[0], sample.token_ids)[sample.loss_mask[1:]]
            assert np.abs(wanted - sample.teacher_logprobs[sample.loss_mask]).max() < EXACT
        for sample in by_env["words"]:
            assert not sample.loss_mask.any()
            assert sample.ce_weights.any()
    records = job.metrics("trainer")
    assert any(record["loss/game/total"] != 0 for record in records)

    again = start("again", f"replay={job.run_dir}", *mix, env={"PYTHONPATH": OUTSIDE})
    assert again.wait() == 0, again.text()
    for one, two in zip(again.metrics("trainer"), records, strict=True):
        for name in ("loss/total", "loss/game/total", "optim/grad_norm", "teacher/kl", "ce/nll", "policy/entropy"):
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-4), name


def test_a_teacher_that_plays_is_overloaded_then_hangs_at_one_address_then_dies_for_good(
    start: Callable[..., MainJob], model: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        teachers = []
        for name in ("one", "two"):
            script = str(Path(__file__).parent / "api_stand_in.py")
            teachers.append(subprocess.Popen([sys.executable, script, str(tmp_path / name), "flaky"]))
            stack.callback(teachers[-1].wait)
            stack.callback(teachers[-1].kill)
        wait_for(lambda: all((tmp_path / name).exists() for name in ("one", "two")), "the teachers", 60)
        one, two = ((tmp_path / name).read_text() for name in ("one", "two"))
        job = start(
            "run",
            *("model=tiny_trained", f"model.name={model}", "max_steps=1000", "ckpt.interval=null", "orchestrator.batch_size=16"),
            *("orchestrator.rollouts_per_example=4", "orchestrator.max_concurrent=16", "orchestrator.max_retries=1"),
            *("envs.reverse_text.sampled_by=teacher", "loss=sft", "loss.ce_coef=1"),
            *(f"teacher.base_url=[{one},{two}]", f"teacher.api_key={KEY}", "teacher.model=m", "teacher.timeout=10"),
        )
        job.until_step(1)
        teachers[0].send_signal(signal.SIGSTOP)  # it takes connections and never answers
        job.until_step(job.metrics("trainer")[-1]["step"] + 4)
        for teacher in teachers:
            teacher.kill()
        assert job.wait(240) != 0, job.text()
        job.wait_until_nothing_is_left()
    assert job.status()["state"] == "failed"
    text = job.text()
    assert re.search(r"environment reverse_text: \d+ of its latest \d+ rollouts failed", text), text
    how = "(cannot be reached|did not answer in 10 s), tried 2 times"
    assert any(re.search(f"\\d+ × .*{re.escape(url)} {how}", text) for url in (one, two)), text
    assert KEY not in text


def said_by(role: str, ids: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """(bool [L], texts) of the contents of the messages of a role in a sample of the tiny model, whose tokens are single characters."""
    head = [tiny.VOCABULARY.index(token) for token in (tiny.START, role, "\n")]
    end = tiny.VOCABULARY.index(tiny.END)
    found, texts = np.zeros(len(ids), bool), []
    for at in range(len(ids)):
        if ids[at : at + 3].tolist() == head:
            stop = at + 3 + ids[at + 3 :].tolist().index(end)
            found[at + 3 : stop] = True
            texts.append("".join(tiny.VOCABULARY[token] for token in ids[at + 3 : stop]))
    return found, texts


def policy(job: MainJob, version: int) -> Any:
    """The weights of a policy version of a run, as Hugging Face loads them."""
    paths = RunPaths(job.run_dir)
    return AutoModelForCausalLM.from_pretrained(paths.weights_of(version) if version else paths.initial_model.read_text().strip())


def answers_nll(model: Any, batch: list[TrainingSample]) -> float:
    """Nats a token that samples learn by cross-entropy, by a Hugging Face forward of the samples that have such tokens."""
    learned = [(sample.ce_weights[1:], -logprobs(model, sample.token_ids)) for sample in batch if sample.ce_weights is not None]
    return float(sum(weights @ nll for weights, nll in learned) / sum(weights.sum() for weights, _ in learned))


@pytest.mark.nightly
def test_cross_entropy_learns_exactly_what_tools_answer_beside_grpo(start: Callable[..., MainJob]) -> None:
    job = start(
        "run",
        *("experiment=tool_math_tiny", "loss=grpo", "loss.ce_coef=1", "envs.tool_math.observation_ce_weights.tool=1"),
        *("max_steps=8", "ckpt.interval=null", "model.warm_start.steps=150", "weight_broadcast.keep_last=3"),
    )
    assert job.wait() == 0, job.text()
    answers, advantages = 0, 0
    for step in range(8):
        played = {(rollout["group"], rollout["member"]): rollout for rollout in job.rollouts(step)}
        for sample in samples(job, step):
            tokens, texts = said_by("tool", sample.token_ids)
            learned = np.zeros(len(tokens)) if sample.ce_weights is None else sample.ce_weights
            assert np.array_equal(learned, tokens.astype(np.float32))
            assert not (sample.loss_mask & tokens).any(), "no policy sampled them"
            seen = [message["content"] for message in played[sample.group, sample.member]["completion"] if message["role"] == "tool"]
            assert texts == seen[: len(texts)]
            answers, advantages = answers + len(texts), advantages + bool(sample.advantages.any())
    assert answers > 100
    assert advantages > 100, "GRPO has something to learn, too"
    records = job.metrics("trainer")
    assert all(record["ce/tokens"] > 0 and record["loss/ce"] > 0 for record in records), [record["ce/tokens"] for record in records]
    # Each step's answers differ in number and in kind, so its metric says little about learning: the same answers are scored again.
    first, late, final = (policy(job, version) for version in (0, 7, 8))
    assert records[0]["ce/nll"] == pytest.approx(answers_nll(first, samples(job, 0)), rel=1e-3)
    assert records[7]["ce/nll"] == pytest.approx(answers_nll(late, samples(job, 7)), rel=1e-3)
    for step in (0, 7):
        before, after = (answers_nll(model, samples(job, step)) for model in (first, final))
        assert after < 0.75 * before, (step, before, after)


@pytest.mark.nightly
def test_self_distillation_reads_the_demonstration_and_agents_are_compared_with_themselves(
    start: Callable[..., MainJob], model: Path
) -> None:
    job = start(
        "run",
        *("env=[reverse_text,custom]", "model=tiny_trained", f"model.name={model}", *QUICK, "max_steps=2", "seq_len=128"),
        *("loss=dr_grpo", "envs.custom.id=rlx_test_v1", "envs.custom.agents_per_group=all", "envs.custom.args.twice=true"),
        *("envs.reverse_text.loss=sdft", "teacher.demonstration=answer", "inference.max_model_len=192"),
        "teacher.template='{prompt} is {demonstration}'",
        env={"PYTHONPATH": OUTSIDE},
    )
    assert job.wait() == 0, job.text()
    played = {(rollout["env"], rollout["group"], rollout["member"]): rollout for rollout in job.rollouts(0)}
    initial, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    demonstrated = [sample for sample in samples(job, 0) if sample.env == "reverse_text"]
    assert demonstrated
    for sample in demonstrated:
        rollout = played["reverse_text", sample.group, sample.member]
        word = rollout["prompt"][-1]["content"]
        shown = [*rollout["prompt"][:-1], {"role": "user", "content": f"{word} is {rollout['answer']}"}]
        prompt = tokenizer.apply_chat_template(shown, add_generation_prompt=True, return_dict=False)
        said = sample.token_ids[sample.loss_mask]
        wanted = logprobs(initial, np.array([*prompt, *said.tolist()]))[-len(said) :]
        assert np.abs(wanted - sample.teacher_logprobs[sample.loss_mask]).max() < EXACT

    compared = defaultdict(list)
    for rollout in (rollout for step in range(2) for rollout in job.rollouts(step) if rollout["env"] == "custom"):
        compared[rollout["group"], rollout["compared"]].append(rollout)
    assert {rollout["agent"] for runs in compared.values() for rollout in runs} == {"left", "right"}
    for runs in compared.values():
        assert len({rollout["agent"] for rollout in runs}) == 1
        assert len(runs) > 1
        mean = np.mean([rollout["reward"] for rollout in runs])
        assert [rollout["advantage"] for rollout in runs] == pytest.approx([rollout["reward"] - mean for rollout in runs], abs=1e-6)
