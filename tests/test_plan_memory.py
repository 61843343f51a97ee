"""What the plan says of memory: estimates against peaks that were measured, the cache of a server on CPU, and whether a run fits a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_configs import config

from rlx.config.load import compose
from rlx.config.memory import CONTEXT, kv_token_bytes, trainer_memory
from rlx.plan.make import make_plan
from rlx.plan.memory import fit_lines, memory_lines

ALONE = "hardware=gpu2"  # one rank
MANY = "hardware=node8 hardware.nodes=3 hardware.trainer_processes=16"


@pytest.mark.parametrize(
    ("keys", "peak"),
    [  # GiB. The first five are what torch had at its peak on an H200 (benchmarks/RESULTS.md), the last one is simulated
        (f"model=qwen3_0_6b seq_len=16384 trainer.ac.freq=0 {ALONE}", 29.9),
        (f"model=qwen3_8b seq_len=8192 trainer.optimization_dtype=bfloat16 {ALONE}", 65.3),
        (f"model=qwen3_8b seq_len=16384 trainer.optimization_dtype=bfloat16 {ALONE}", 68.3),
        (f"model=qwen3_4b seq_len=4096 trainer.ac.freq=0 lora.rank=16 {ALONE}", 23.6),
        (f"model=qwen3_4b seq_len=16384 trainer.ac.freq=0 lora.rank=16 {ALONE}", 70.0),
        (f"model=qwen3_30b_a3b seq_len=8192 trainer.ac.freq=0 trainer.ep=8 {MANY}", 89 - 1),
    ],
)
def test_the_estimate_is_close_to_the_peak(keys: str, peak: float) -> None:
    given = dict(word.split("=") for word in keys.split())
    words = [*keys.split(), f"trainer.micro_batch_tokens={given['seq_len']}", "env=math", "sampling.max_tokens=512", "dry_run=true"]
    cfg = compose(words, {}).cfg
    assert 0.9 <= peak / ((trainer_memory(cfg).device - CONTEXT) / 2**30) <= 1.15


@pytest.mark.parametrize(("experts", "inner"), [(None, 12288), (128, 96)])
def test_a_width_that_is_not_given_follows_from_the_number_of_parameters(experts: int | None, inner: int) -> None:
    sizes = {"num_experts": experts, "num_parameters": 151936 * 4096 + 36 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * inner * (experts or 1))}
    given, derived = (config("node8", model=sizes | more) for more in ({"intermediate_size": inner}, {}))
    assert trainer_memory(given).activations == pytest.approx(trainer_memory(derived).activations)


def test_the_plan_says_how_many_sequences_the_cache_holds_and_what_all_would_take() -> None:
    cfg = compose(["experiment=math_smollm2", "hardware=cpu"], {}).cfg
    token = 2 * 30 * 3 * 64 * 4  # keys and values of 30 layers with 3 heads of 64, float32
    assert kv_token_bytes(cfg) == token
    text = "\n".join(memory_lines(cfg, make_plan(cfg, Path("/run"))))
    assert f"KV cache 1.0 GiB (inference.kv_cache_gb): {2**30 / token:,.0f} tokens, 91 sequences of full length" in text, text
    assert f"{256 * 256 * token / 2**30:.1f} GiB would hold all concurrent sequences at full length; they need less" in text, text


def test_the_plan_says_what_does_not_fit_with_both_numbers_and_the_keys_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config("node8", hardware={"gpu_memory_gb": 16})
    trainer, *fixes, server, fix = fit_lines(small)
    assert trainer.startswith("does not fit: the trainer needs ")
    assert trainer.endswith(" of each GPU, and 16.0 GiB of 16.0 GiB are there for it")
    assert any("trainer.ac.freq=1" in line for line in fixes)
    assert server.startswith("does not fit: a server needs 16.4 GiB of each GPU, and 14.4 GiB of 16.0 GiB")
    assert "hardware.tensor_parallel" in fix
    large = config("node8", hardware={"gpu_memory_gb": 140})
    assert [line.partition(":")[0] for line in fit_lines(large)] == ["fits", "fits"]
    assert fit_lines(large, only_wrong=True) == []
    assert fit_lines(config("node8")) == ["each GPU must have at least 76.9 GiB; hardware.gpu_memory_gb=… says whether it has"]
    monkeypatch.setattr("rlx.plan.memory.gpu_memory", lambda: 16.0 * 2**30)
    for there, known in ((8, fit_lines(small)), (1, fit_lines(config("node8", launcher={"name": "slurm"})))):
        monkeypatch.setattr("rlx.plan.memory.visible_gpus", lambda there=there: there)
        assert fit_lines(config("node8")) == known, "of this machine, if it has them"
    assert fit_lines(config("cpu")) == []


def test_the_trainer_on_a_shared_gpu_has_what_the_engine_leaves() -> None:
    cfg = config("gpu1_shared", hardware={"gpu_memory_gb": 80}, inference={"gpu_memory_utilization": 0.4})
    assert "and 48.0 GiB of 80.0 GiB are there for it" in fit_lines(cfg)[0]
