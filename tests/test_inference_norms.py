"""RMS norms of the CPU engine (`rlx/inference/server/norms.py`): vLLM's kernels against float64, chosen as vLLM's engine chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_examples import make_model
from vllm import ir
from vllm.engine.arg_utils import AsyncEngineArgs

from rlx.config.schema import Config, HardwareConfig, InferenceConfig, ModelConfig
from rlx.inference.server.arguments import CPU_NORMS, engine_arguments
from rlx.inference.server.norms import offer_kernels

pytestmark = pytest.mark.slow
EPSILON = 1e-6


def expected(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def engine_of(folder: Path, **vllm: Any) -> Any:
    """vLLM's configuration of an engine that rlx starts, with `inference.vllm` of the user."""
    config = Config(max_steps=1, seq_len=64, seed=0, inference=InferenceConfig(kv_cache_gb=0.1, vllm=vllm))
    config.model = ModelConfig(name="tiny", dtype="float32", num_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    config.hardware = HardwareConfig(name="cpu", device="cpu")
    return AsyncEngineArgs(**engine_arguments(config, str(folder), 0)).create_engine_config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture
def preferred(folder: Path) -> Iterator[None]:
    """Operations with the priorities of an engine that rlx starts."""
    offer_kernels()
    with engine_of(folder).kernel_config.ir_op_priority.set_priority():
        yield


@pytest.mark.parametrize("width", [8, 100, 576])  # the kernels do not take 100
def test_norms_are_those_of_float64_and_of_a_row_alone(preferred: None, width: int) -> None:
    torch.manual_seed(0)
    both, weight = 3 * torch.randn(7, 2, 3, width), torch.randn(width)
    x = both[:, 0]  # rows that lie apart, as a query's in a fused product
    assert (ir.ops.rms_norm.dispatch(x, weight, EPSILON).provider == CPU_NORMS) == (width != 100)
    found = ir.ops.rms_norm(x, weight, EPSILON)
    torch.testing.assert_close(found.double(), expected(x, weight), rtol=2e-6, atol=1e-6)
    assert torch.equal(ir.ops.rms_norm(x[4:5], weight, EPSILON), found[4:5])


def test_a_sum_is_normed_and_kept(preferred: None) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(7, 64), torch.randn(7, 64), torch.randn(64)
    before = x.double() + residual.double()
    normed, kept = ir.ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, EPSILON)
    torch.testing.assert_close(normed.double(), expected(before, weight), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(kept.double(), before, rtol=1e-6, atol=1e-6)


def test_16_bit_norms_stay_vllms(preferred: None) -> None:
    x, weight = torch.randn(7, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    assert ir.ops.rms_norm.dispatch(x, weight, EPSILON).provider == "native"


def test_a_users_order_of_priority_stays(folder: Path) -> None:
    for asked in ({"ir_op_priority": {"rms_norm": ["native"]}}, {"kernel_config": {"ir_op_priority": {"rms_norm": ["native"]}}}):
        assert CPU_NORMS not in engine_of(folder, **asked).kernel_config.ir_op_priority.rms_norm
