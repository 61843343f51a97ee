"""Checksums of tensors, and whether they detect that an engine's fused parameters differ from the written ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlx.inference.server.served import compare, faithful
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.weights import attest
from rlx.weights.attest import checksum
from rlx.weights.files import ModelFiles, facts
from rlx.weights.publish import Publisher


def by_hand(tensor: torch.Tensor) -> str:
    """The same sum, with Python's integers."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(raw + b"\0" * (-len(raw) % 8), np.uint64).tolist()
    golden = 0x9E3779B97F4A7C15
    odd = [(number * golden % 2**64 | 1) for number in range(attest.ROW)]
    return f"{sum(word * odd[place % attest.ROW] * odd[place // attest.ROW] for place, word in enumerate(words)) % 2**64:016x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (33, 5), (64, 128), (200_003,)])
def test_the_checksum_is_the_same_for_equal_values_however_they_lie(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    expected = by_hand(tensor)
    assert checksum(tensor) == expected
    if tensor.ndim == 2:
        assert checksum(tensor.t().contiguous().t()) == expected
        around = torch.cat([tensor[:3], tensor, tensor[:1]])
        assert checksum(around[3 : 3 + len(tensor)]) == expected, "a slice of a larger tensor may begin at an odd address"


def test_a_gpu_sums_what_a_cpu_sums() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (3 * attest.ROW + 5,))
    for count in (0, 1, attest.ROW - 1, attest.ROW, attest.ROW + 1, len(words)):
        rows, blocks = attest._sums_of_rows(words[:count]), attest._sums_of_blocks(words[:count])
        assert [row for row in rows if row] == [row for row in blocks if row]


def test_another_value_place_or_dtype_is_another_checksum() -> None:
    tensor = torch.randn(40, 8)
    sums = {checksum(tensor), checksum(tensor.flip(0)), checksum(tensor.double()), checksum(torch.cat([tensor[1:], tensor[:1]]))}
    for place in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(torch.int32).view(-1)[place] ^= 1
        sums.add(checksum(changed))
    assert len(sums) == 4 + tensor.numel()


class Layer(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def engine_model() -> Any:
    model = nn.Module()
    model.embed_tokens = Layer(weight=(16, 4))  # padded from 13 tokens
    model.attn = nn.Module()
    model.attn.qkv_proj = Layer(weight=(8, 4), bias=(8,))
    model.attn.o_proj = Layer(weight=(0,))  # emptied by repacking
    model.norm = Layer(weight=(4,))
    model.cut = Layer(weight=(4, 2))
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return model


def written(model: Any, kept: torch.Tensor) -> dict[str, dict[str, Any]]:
    qkv = model.attn.qkv_proj
    tensors = {
        "embed_tokens.weight": model.embed_tokens.weight[:13], "norm.weight": model.norm.weight, "attn.o_proj.weight": kept,
        **{f"attn.{p}_proj.weight": qkv.weight[rows] for p, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8)))},
        **{f"attn.{p}_proj.bias": qkv.bias[rows] for p, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8)))},
    }  # fmt: skip
    return {name: facts(tensor) for name, tensor in tensors.items()}


def test_every_tensor_is_found_in_the_engines_parameters_and_a_wrong_one_is_named() -> None:
    model, kept = engine_model(), torch.randn(4, 8)
    facts_of = written(model, kept)
    layers = {model.attn.o_proj: kept}
    every = frozenset(facts_of)
    assert compare(model, layers, facts_of, every) == 1.0
    assert compare(model, layers, {}, every) == 0.0
    with torch.no_grad():
        model.attn.qkv_proj.weight[5, 0] += 1
        model.embed_tokens.weight[14] += 1  # padding
    with pytest.raises(ValueError, match=r"not those that were trained: 1 of 9 tensors differ: attn\.k_proj\.weight$"):
        compare(model, layers, facts_of, every)
    with torch.no_grad():
        kept[0, 0] += 1
    with pytest.raises(ValueError, match=r"2 of 9 .* attn\.o_proj\.weight, attn\.k_proj\.weight"):
        compare(model, layers, facts_of, every)


def test_what_is_cut_cast_or_renamed_is_not_compared_and_the_share_says_so() -> None:
    model = engine_model()
    facts_of = {
        "norm.weight": facts(model.norm.weight),
        "cut.weight": facts(torch.zeros(4, 4)),
        "elsewhere.weight": facts(torch.zeros(4)),
        "attn.qkv_proj.bias": facts(torch.zeros(8, dtype=torch.bfloat16)),
    }
    assert compare(model, {}, facts_of, frozenset(facts_of)) == 4 / 32


def test_what_the_engine_rearranges_when_it_loads_is_not_compared() -> None:
    model = engine_model()
    qkv = model.attn.qkv_proj.weight
    files = {
        "embed_tokens.weight": model.embed_tokens.weight[:13].double(),  # cast on loading
        "norm.weight": model.norm.weight.flip(0),  # reordered under the same name and shape
        **{f"attn.{p}_proj.weight": qkv[rows] for p, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8)))},
        "elsewhere.weight": torch.zeros(4),
    }
    names = faithful(model, {}, {name: tensor.shape for name, tensor in files.items()}, files.items())
    assert names == {"embed_tokens.weight", *(f"attn.{p}_proj.weight" for p in "qkv")}
    trained = {name: facts(tensor.to(torch.float32)) for name, tensor in files.items()}
    assert compare(model, {}, trained, names) == pytest.approx((13 * 4 + 8 * 4) / (13 * 4 + 4 + 8 * 4 + 4))


def test_the_manifest_of_a_version_has_the_sums_of_what_is_in_its_file(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}
    hf = Qwen3ForCausalLM(Qwen3Config(**size, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True))
    paths = RunPaths(tmp_path)
    Publisher(PolicyModel(hf), one_process("cpu"), paths, ModelFiles({}), torch.bfloat16).ensure(3)
    folder = paths.weights_of(3)
    manifest = json.loads((folder / COMPLETE).read_text())
    assert manifest["tensors"] == {name: facts(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert {fact["dtype"] for fact in manifest["tensors"].values()} == {"bfloat16"}
