"""FlashAttention 3 where it is installed: a stand-in for its package, in plain torch, gets the calls that torch makes on a Hopper GPU.

torch chooses between the generations by the kernels that it registers for CUDA. Here the same kernels are called for tensors on a CPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_models_flash import gradients_of, row_of
from torch.nn.attention import _fa3, current_flash_attention_impl
from trainer_examples import make_model

from rlx.models import flash, load
from rlx.models.flash import install_flash_attention_3, remove_flash_attention_3
from rlx.models.policy import PolicyModel

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SHAPES = [(4, 2, 16), (4, 4, 32)]
NAME = "flash_attn_interface"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This machine has a Hopper GPU, whose tensors lie in host memory, and a second generation of FlashAttention."""
    tried = flash._tried
    monkeypatch.setattr(flash, "_tried", lambda device, *rest: tried(CPU if device.type == "cuda" else device, *rest))
    monkeypatch.setattr(flash, "TRIED", 48)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: flash.HOPPER)
    for refuses in ("_fa3_forward_support_error", "_fa3_backward_support_error"):  # they ask for tensors on a GPU
        monkeypatch.setattr(_fa3, refuses, lambda *_: None)
    with torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("_flash_attention_forward", forward, "CPU")
        kernels.impl("_flash_attention_backward", backward, "CPU")
        yield monkeypatch
    remove_flash_attention_3()


@pytest.fixture
def package(hopper: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package is installed."""
    hopper.syspath_prepend(Path(__file__).parent / "flash_attention_3")
    module = importlib.import_module(NAME)
    yield module
    remove_flash_attention_3()
    module.LIBRARY._destroy()
    del sys.modules[NAME]


def plain() -> ModuleType:
    return sys.modules[NAME]


def forward(q: Any, k: Any, v: Any, bounds: Any, bounds_k: Any, *rest: Any, **keys: Any) -> Any:
    """What torch's dispatcher does on CUDA: the kernel of the generation that is active."""
    if current_flash_attention_impl() == "FA3":
        return _fa3._fa3_flash_attention_forward_impl_default(q, k, v, bounds, bounds_k, *rest, **keys)
    causal, left, right = rest[3], keys["window_size_left"], keys["window_size_right"]
    out, lse, _ = plain().attend(q, k, v, bounds, keys.get("scale"), causal, left, right)
    unused = torch.zeros(2, dtype=torch.uint64)
    return out.to(q.dtype), lse, unused, unused[0].clone(), torch.empty(0)


def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, *rest: Any, **keys: Any) -> Any:
    if current_flash_attention_impl() == "FA3":
        return _fa3._fa3_flash_attention_backward_impl(dout, q, k, v, out, lse, bounds, *rest, **keys)
    _, _, kept = plain().attend(q, k, v, bounds, keys.get("scale"), rest[4], keys["window_size_left"], keys["window_size_right"])
    return tuple(gradient.to(q.dtype) for gradient in plain().gradients(dout, q, k, kept, keys.get("scale")))


def test_it_is_activated_after_it_was_compared_with_the_second_generation_and_removed(package: Any) -> None:
    assert install_flash_attention_3(CUDA, SHAPES)
    assert current_flash_attention_impl() == "FA3"
    assert [call["op"] for call in package.CALLS] == ["fwd", "bwd"] * len(SHAPES), "values and gradients of every width"
    for call, shape in zip(package.CALLS, (shape for shape in SHAPES for _ in range(2)), strict=True):
        heads, key_heads, width = shape
        assert call["q"].shape == (48, heads, width)
        assert call["k"].shape == call["v"].shape == (48, key_heads, width)
        assert call["q"].dtype == torch.bfloat16
        assert call["cu_seqlens_q"].tolist() == call["cu_seqlens_k"].tolist() == [0, 48]
    remove_flash_attention_3()
    assert current_flash_attention_impl() is None
    package.CALLS.clear()
    gradients_of(PolicyModel(make_model()), row_of([7, 5], "varlen"))
    assert package.CALLS == [], "the second generation computes again"


def test_a_build_that_differs_or_cannot_be_imported_is_not_used(
    package: Any, hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert install_flash_attention_3(CUDA, SHAPES)
    package.STATE["factor"] = 1.05
    assert not install_flash_attention_3(CUDA, SHAPES), "it is not compared with itself"
    assert current_flash_attention_impl() is None
    assert "attention by FlashAttention 3 differs from torch's FlashAttention by" in caplog.text

    package.STATE["factor"] = 1.0
    hopper.setattr(_fa3, "_fa3_import_module", lambda _: (_ for _ in ()).throw(ImportError("undefined symbol")))
    assert not install_flash_attention_3(CUDA, SHAPES)
    assert current_flash_attention_impl() is None
    assert "FlashAttention 3 is installed, but torch cannot use it: undefined symbol" in caplog.text


@pytest.mark.parametrize("everywhere", [True, False])
def test_all_ranks_use_the_same_generation(package: Any, everywhere: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlx.trainer")
    mesh: Any = SimpleNamespace(device=CUDA, any=lambda lacks: lacks or not everywhere)
    model = PolicyModel(make_model())
    load.choose_attention(model, mesh)
    assert current_flash_attention_impl() == ("FA3" if everywhere else None)
    assert not model.long_apart
    assert caplog.messages[-1] == f"attention: FlashAttention {3 if everywhere else 2}"
