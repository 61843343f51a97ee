"""What would take less memory of the trainer's device: each override is one that the checks accept, and saves what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_run import FOREVER, Run, starting, toy

from rlx.config.load import compose
from rlx.config.memory import size, trainer_memory
from rlx.config.savings import ran_out, savings, when_out_of_memory

GIB = 2**30


@pytest.mark.parametrize(
    "argv",
    [
        "model=qwen3_8b hardware=gpu2 env=math",
        "model=qwen3_8b hardware=node8 env=math trainer.ac.freq=2 trainer.reshard_after_forward=false",
        "model=qwen3_8b hardware=gpu2 env=math optim=muon",
        "model=qwen3_8b hardware=gpu2 env=math trainer.optim_cpu_offload=true trainer.ac.freq=1",
        "model=qwen3_1_7b hardware=gpu1_shared env=math trainer.ac.freq=1 trainer.ac.mode=selective seq_len=4096",
        "model=smollm2_135m hardware=cpu env=sums",
    ],
)
@pytest.mark.usefixtures("known_environments")
def test_each_override_is_accepted_and_lowers_the_estimate_by_what_is_said(argv: str) -> None:
    given = ["dry_run=true", *argv.split()]
    before = trainer_memory(compose(given).cfg).device
    found = savings(compose(given).cfg)
    assert found
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for override, saved in found.items():
        names = {part.partition("=")[0] for part in override.split()}
        kept = [part for part in given if part.partition("=")[0] not in names]
        after = trainer_memory(compose([*kept, *override.split()]).cfg).device
        assert before - after == pytest.approx(saved), override


def test_what_is_switched_on_already_or_does_nothing_is_not_named() -> None:
    plain = savings(compose(["dry_run=true", "model=qwen3_8b", "hardware=gpu2", "env=math", "trainer.ac.freq=0"]).cfg)
    assert {"trainer.ac.freq=1", "trainer.fsdp_cpu_offload=true", "trainer.optim_cpu_offload=true"} <= set(plain)
    assert "trainer.ac_offloading=true" not in plain, "nothing is recomputed that could be kept in host memory"
    on = savings(
        compose(["dry_run=true", "model=qwen3_8b", "hardware=gpu2", "env=math", "trainer.ac.freq=1", "trainer.fsdp_cpu_offload=true"]).cfg
    )
    assert not {"trainer.ac.freq=1", "trainer.fsdp_cpu_offload=true", "trainer.optim_cpu_offload=true"} & set(on)
    assert not any(
        "fsdp_cpu_offload" in key
        for key in savings(compose(["dry_run=true", "model=qwen3_8b", "hardware=gpu2", "env=math", "optim=muon"]).cfg)
    )
    part = savings(compose(["dry_run=true", "model=qwen3_8b", "hardware=gpu2", "env=math", "trainer.optim_cpu_offload=true"]).cfg)
    assert "trainer.fsdp_cpu_offload=true trainer.optim_cpu_offload=false" in part


def test_the_advice_names_the_estimate_its_moment_and_the_engine_on_the_same_gpu() -> None:
    text = when_out_of_memory(compose(["dry_run=true", "model=qwen3_1_7b", "hardware=gpu1_shared", "env=math"]).cfg)
    peak = trainer_memory(compose(["dry_run=true", "model=qwen3_1_7b", "hardware=gpu1_shared", "env=math"]).cfg).device
    assert f"the estimate was {size(peak)} on each rank" in text
    assert "at its peak when" in text
    assert "inference.gpu_memory_utilization" in text


def test_the_words_of_torch_and_cuda_are_recognized() -> None:
    assert ran_out(["x", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"])
    assert ran_out(["RuntimeError: CUDA error: out of memory"])
    assert not ran_out(["ValueError: the data is out of date"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starting(tmp_path)


@pytest.mark.slow
def test_a_trainer_whose_gpu_has_no_memory_left_is_told_what_would_save_some(start: Callable[..., Run]) -> None:
    dies = """
        import sys
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        for i in range(40):
            print(i)
        sys.exit(1)
    """
    cause = start([toy("trainer", dies), toy("orchestrator", FOREVER)]).wait().cause
    assert cause is not None
    assert cause.reason.partition("; the estimate")[0] == "exit code 1; the device ran out of memory"
