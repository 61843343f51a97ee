"""Checksums of tensors, and whether they detect that an engine's fused parameters differ from the written ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlx.inference.server import served
from rlx.inference.server.served import Compared, Split, compare, faithful, settle
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.weights import attest, files
from rlx.weights.attest import ROW, as_checksum, checksum, copied, partial_sum
from rlx.weights.files import ModelFiles
from rlx.weights.publish import Publisher
from rlx.weights.saving import facts


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (33, 5), (64, 128), (200_003,), (200_004,)])
def test_a_copy_has_the_values_and_the_checksum_of_what_was_copied(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    target = torch.empty_like(source)
    assert copied(source, target) == by_hand(source)
    assert torch.equal(source, target)
    if source.ndim == 2:
        turned, part = torch.empty_like(source.t()).t(), torch.empty(len(source) + 1, *source.shape[1:], dtype=dtype)[1:]
        for place in (turned, part):
            assert copied(source, place) == by_hand(source)
            assert torch.equal(source, place)
    assert copied(source, wider := torch.empty(shape, dtype=torch.float64)) == by_hand(wider), "what the target holds is summed"


@pytest.mark.gpu
def test_a_gpu_sums_what_a_cpu_sums() -> None:
    for shape, dtype in [((3 * attest.ROW + 5,), torch.float32), ((77, 33), torch.bfloat16), ((0,), torch.float32)]:
        tensor = torch.randn(shape).to(dtype)
        assert checksum(tensor.cuda()) == checksum(tensor)


def test_sums_by_blocks_as_a_gpu_computes_them_are_those_of_rows() -> None:
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
    model.embed_in = Layer(weight=(16, 4))
    model.embed_in.org_vocab_size = 13  # as vLLM's embeddings have it, which are padded
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
        "embed_in.weight": model.embed_in.weight[:13], "norm.weight": model.norm.weight, "attn.o_proj.weight": kept,
        **{f"attn.{p}_proj.weight": qkv.weight[rows] for p, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8)))},
        **{f"attn.{p}_proj.bias": qkv.bias[rows] for p, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8)))},
    }  # fmt: skip
    return {name: facts(tensor) for name, tensor in tensors.items()}


def test_every_tensor_is_found_in_the_engines_parameters_and_a_wrong_one_is_named() -> None:
    model, kept = engine_model(), torch.randn(4, 8)
    del model.cut
    facts_of = written(model, kept)
    layers = {model.attn.o_proj: kept}
    every = frozenset(facts_of)
    assert compare(model, layers, facts_of, every) == (1.0, {}, {})
    assert compare(model, layers, {}, every).share == 0.0
    with torch.no_grad():
        model.attn.qkv_proj.weight[5, 0] += 1
        model.embed_in.weight[14] += 1  # padding
    with pytest.raises(ValueError, match=r"not those that were trained: 1 of 9 tensors differ: attn\.k_proj\.weight$"):
        compare(model, layers, facts_of, every)
    with torch.no_grad():
        kept[0, 0] += 1
    with pytest.raises(ValueError, match=r"2 of 9 .* attn\.o_proj\.weight, attn\.k_proj\.weight"):
        compare(model, layers, facts_of, every)


def test_what_is_cut_cast_or_renamed_is_not_compared_and_named_with_its_share() -> None:
    model = engine_model()
    facts_of = {
        "norm.weight": facts(model.norm.weight),
        "cut.weight": facts(torch.zeros(4, 4)),
        "layers.0.elsewhere.weight": facts(torch.zeros(1)),
        "layers.1.elsewhere.weight": facts(torch.zeros(3)),
        "attn.qkv_proj.bias": facts(torch.zeros(8, dtype=torch.bfloat16)),
    }
    share, left_out = settle([compare(model, {}, facts_of, frozenset(facts_of))])
    total = 32 + 64 + 32  # sent, and the embedding and the fused projection beside them
    assert share == 4 / total
    assert left_out == {
        "cut.weight (served under another name or shape)": 16 / total,
        "layers.*.elsewhere.weight (served under another name or shape)": 4 / total,
        "attn.qkv_proj.bias (cast to float32)": 8 / total,
        "embed_in.weight (not among the trained tensors)": 64 / total,
        "attn.qkv_proj.weight (not among the trained tensors)": 32 / total,
    }


def test_a_parameter_that_no_sent_tensor_fills_is_named_with_its_share() -> None:
    model, kept = engine_model(), torch.randn(4, 8)
    facts_of = written(model, kept)
    model.again = nn.Module()
    model.again.weight = model.norm.weight  # tied: sent under its other name
    share, left_out = settle([compare(model, {model.attn.o_proj: kept}, facts_of, frozenset(facts_of))])
    sent = 13 * 4 + 4 + 4 * 8 + 8 * 4 + 8
    assert left_out == {"cut.weight (not among the trained tensors)": 8 / (sent + 8)}
    assert share == pytest.approx(sent / (sent + 8))


def experts_of(prefix: str, names: tuple[str, str, str], count: int = 3) -> dict[str, torch.Tensor]:
    """The matrices of `count` experts under the files' names: gate and up [8, 4], down [4, 8]."""
    gate, up, down = names
    shapes = {gate: (8, 4), up: (8, 4), down: (4, 8)}
    return {f"{prefix}.{expert}.{name}.weight": torch.randn(shape) for expert in range(count) for name, shape in shapes.items()}


def stacked(files: dict[str, torch.Tensor], prefix: str, names: tuple[str, str, str], inside: str, rank: int, ranks: int) -> Any:
    """A worker's model with these experts, as vLLM stacks them."""
    gate, up, down = ([files[f"{prefix}.{expert}.{name}.weight"] for expert in range(3)] for name in names)
    halves = [torch.cat([one.chunk(ranks)[rank], other.chunk(ranks)[rank]]) for one, other in zip(gate, up, strict=True)]
    layer = Layer(w13_weight=(3, 16 // ranks, 4), w2_weight=(3, 4, 8 // ranks))
    layer.load_state_dict({"w13_weight": torch.stack(halves), "w2_weight": torch.stack([one.chunk(ranks, 1)[rank] for one in down])})
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = layer
    if inside:
        model.mlp.experts = nn.Module()
        setattr(model.mlp.experts, inside, layer)
    return model, layer


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("inside", ["", "routed_experts"])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_every_matrix_of_stacked_experts_is_compared_and_a_wrong_one_is_named(names: tuple[str, str, str], inside: str, ranks: int) -> None:
    files = experts_of("mlp.experts", names)
    workers_of = [stacked(files, "mlp.experts", names, inside, rank, ranks) for rank in range(ranks)]
    trained, shapes = {name: facts(tensor) for name, tensor in files.items()}, {name: tensor.shape for name, tensor in files.items()}
    splits = [Split(rank, ranks) for rank in range(ranks)]
    alike = [faithful(model, {}, shapes, files.items(), split) for (model, _), split in zip(workers_of, splits, strict=True)]
    assert alike == [trained] * ranks

    def found() -> tuple[float, dict[str, float]]:
        return settle([compare(model, {}, trained, frozenset(files), split) for (model, _), split in zip(workers_of, splits, strict=True)])

    assert found() == (1.0, {})
    (_, last) = workers_of[-1]
    for stack, row, name in ((last.w13_weight, 0, names[0]), (last.w13_weight, 16 // ranks - 1, names[1]), (last.w2_weight, 2, names[2])):
        before = stack[1, row, 0].item()
        with torch.no_grad():
            stack[1, row, 0] += 1
        with pytest.raises(ValueError, match=rf"1 of 9 tensors differ: mlp\.experts\.1\.{name}\.weight$"):
            found()
        with torch.no_grad():
            stack[1, row, 0] = before


def test_of_experts_that_are_spread_over_workers_none_is_compared_and_stacks_in_the_files_are() -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    files = experts_of("mlp.experts", names, count=6)
    model, layer = stacked(files, "mlp.experts", names, "", 0, 1)
    trained = {name: facts(tensor) for name, tensor in files.items()}
    share, left_out = settle([compare(model, {}, trained, frozenset(files))])
    assert share == pytest.approx(0.0)
    assert all("experts" in name for name in left_out)
    whole = {"mlp.experts.gate_up_proj": facts(layer.w13_weight), "mlp.experts.down_proj": facts(layer.w2_weight)}
    assert settle([compare(model, {}, whole, frozenset(whole))]) == (1.0, {})


@dataclasses.dataclass
class Renames:
    """Like vLLM's table of names."""

    orig_to_new_prefix: dict[str, str]
    orig_to_new_stacked: dict[str, tuple[str, str]]

    def apply_list(self, names: list[str]) -> list[str]:
        assert not self.orig_to_new_stacked, "else the parts of a fused tensor have one name"
        for old, new in self.orig_to_new_prefix.items():
            names = [new + name.removeprefix(old) if name.startswith(old) else name for name in names]
        return names


def test_tensors_that_the_engine_renames_by_a_table_are_compared() -> None:
    model, kept = engine_model(), torch.randn(4, 8)
    del model.cut
    facts_of = {f"model.text.{name}": fact for name, fact in written(model, kept).items()}
    layers = {model.attn.o_proj: kept}
    model.hf_to_vllm_mapper = Renames({"model.text.": ""}, {".q_proj": (".qkv_proj", "q")})
    assert compare(model, layers, facts_of, frozenset(facts_of)) == (1.0, {}, {})
    with torch.no_grad():
        model.attn.qkv_proj.weight[5, 0] += 1
    with pytest.raises(ValueError, match=r"1 of 9 tensors differ: model\.text\.attn\.k_proj\.weight$"):
        compare(model, layers, facts_of, frozenset(facts_of))


def test_large_models_are_compared_by_several_threads_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    models, tensors = workers(1)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    alone = faithful(models[0], {}, shapes, tensors.items())
    assert alone == {name: facts(tensor) for name, tensor in tensors.items()}
    monkeypatch.setattr(files, "ALONE", 0)
    monkeypatch.setattr(served, "BATCH", 3)
    assert faithful(models[0], {}, shapes, tensors.items()) == alone


def test_what_the_engine_rearranges_when_it_loads_is_not_compared() -> None:
    model = engine_model()
    qkv = model.attn.qkv_proj.weight
    files = {
        "embed_in.weight": model.embed_in.weight[:13].double(),  # cast on loading
        "norm.weight": model.norm.weight.flip(0),  # reordered under the same name and shape
        **{f"attn.{p}_proj.weight": qkv[rows] for p, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8)))},
        "elsewhere.weight": torch.zeros(4),
    }
    names = faithful(model, {}, {name: tensor.shape for name, tensor in files.items()}, files.items())
    assert set(names) == {"embed_in.weight", *(f"attn.{p}_proj.weight" for p in "qkv")}
    assert names["embed_in.weight"] == facts(model.embed_in.weight[:13]), "cast as it is served, so that version 0 can be compared"
    trained = {name: facts(tensor.to(torch.float32)) for name, tensor in files.items()}
    found = compare(model, {}, trained, names)
    assert found.share == pytest.approx((13 * 4 + 8 * 4) / (13 * 4 + 4 + 8 * 4 + 4 + 8 + 8))  # bias and `cut` were not sent
    assert found.left_out["norm.weight"][0] == "rearranged by the engine"


def test_a_tensor_of_equal_values_is_compared_only_if_the_rest_of_its_module_has_not_moved() -> None:
    """As the biases of a new GPT-NeoX: the engine reorders them with their weight, which shows only once they were trained."""
    model = engine_model()
    with torch.no_grad():
        model.attn.qkv_proj.bias.zero_()
        model.norm.weight.fill_(1)
    qkv = model.attn.qkv_proj
    rows = {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}
    files = {f"attn.{p}_proj.weight": qkv.weight[mine].clone() for p, mine in rows.items()}
    files |= {f"attn.{p}_proj.bias": qkv.bias[mine].clone() for p, mine in rows.items()} | {"norm.weight": torch.ones(4)}
    shapes = {name: tensor.shape for name, tensor in files.items()}
    assert set(faithful(model, {}, shapes, files.items())) == set(files), "a norm of ones has nothing beside it"
    files["attn.k_proj.weight"] = files["attn.k_proj.weight"].flip(0)
    assert set(files) - set(faithful(model, {}, shapes, files.items())) == {"attn.k_proj.weight", "attn.k_proj.bias"}


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


def workers(ranks: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The models of a tensor-parallel engine's workers, and the tensors of the files."""
    torch.manual_seed(1)
    files = {
        "embed_in.weight": torch.randn(13, 4), "norm.weight": torch.randn(6), "attn.o_proj.weight": torch.randn(6, 16),
        "attn.q_proj.weight": torch.randn(8, 6), "attn.k_proj.weight": torch.randn(4, 6), "attn.v_proj.weight": torch.randn(4, 6),
        "attn.q_proj.bias": torch.randn(8), "attn.k_proj.bias": torch.randn(4), "attn.v_proj.bias": torch.randn(4),
        "odd.weight": torch.randn(3, 2 * ranks),
    }  # fmt: skip
    models = []
    for rank in range(ranks):
        model = nn.Module()
        table = torch.cat([files["embed_in.weight"], torch.zeros(3, 4)])
        fused = {kind: torch.cat([files[f"attn.{p}_proj.{kind}"].chunk(ranks)[rank] for p in "qkv"]) for kind in ("weight", "bias")}
        model.embed_in, model.norm, model.odd = Layer(weight=(16 // ranks, 4)), Layer(weight=(6,)), Layer(weight=(3, 2))
        model.embed_in.org_vocab_size = 13
        model.attn = nn.Module()
        model.attn.qkv_proj = Layer(weight=fused["weight"].shape, bias=fused["bias"].shape)
        model.attn.o_proj = Layer(weight=(6, 16 // ranks))
        values = {
            "embed_in.weight": table.chunk(ranks)[rank], "norm.weight": files["norm.weight"],
            "attn.o_proj.weight": files["attn.o_proj.weight"].chunk(ranks, 1)[rank],
            "odd.weight": files["odd.weight"].chunk(ranks, 1)[rank],
            "attn.qkv_proj.weight": fused["weight"], "attn.qkv_proj.bias": fused["bias"],
        }  # fmt: skip
        model.load_state_dict(values)
        model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        models.append(model)
    return models, files


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_slices_of_tensor_parallel_workers_together_are_what_was_trained_and_one_wrong_slice_is_named(ranks: int) -> None:
    models, files = workers(ranks)
    trained, shapes = {name: facts(tensor) for name, tensor in files.items()}, {name: tensor.shape for name, tensor in files.items()}

    def found() -> list[Compared]:
        return [
            compare(model, {}, trained, faithful(at_start, {}, shapes, files.items(), Split(rank, ranks)), Split(rank, ranks))
            for rank, (model, at_start) in enumerate(zip(models, workers(ranks)[0], strict=True))
        ]

    share, left_out = settle(found())
    odd = {"attn.k_proj.bias (a slice of odd size)": 4, "attn.v_proj.bias (a slice of odd size)": 4} if ranks == 4 else {}
    total = sum(tensor.numel() for tensor in files.values())
    assert left_out == {name: size / total for name, size in odd.items()}
    assert share == pytest.approx(1 - sum(odd.values()) / total)
    for name, rank in (("attn.o_proj", 1), ("embed_in", 0), ("odd", ranks - 1)):
        weight = models[rank].get_submodule(name).weight
        with torch.no_grad():
            weight[0, 0] += 1
        with pytest.raises(ValueError, match=rf"1 of \d+ tensors differ: {name}\.weight$"):
            settle(found())
        with torch.no_grad():
            weight.copy_(workers(ranks)[0][rank].get_submodule(name).weight)
    models[0], models[1] = models[1], models[0]
    with pytest.raises(ValueError, match="tensors differ: attn"):
        settle(found())


def test_data_parallel_engines_have_slices_of_experts_together_and_of_all_else_each_for_itself() -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    experts = experts_of("mlp.experts", names)
    files = experts | workers(2)[1]
    trained, shapes = {name: facts(tensor) for name, tensor in files.items()}, {name: tensor.shape for name, tensor in files.items()}
    models, splits = [], [Split(rank, 2, engine, 2) for engine in range(2) for rank in range(2)]
    for split in splits:
        model = workers(2)[0][split.rank]
        model.mlp = stacked(experts, "mlp.experts", names, "", 2 * split.engine + split.rank, 4)[0].mlp
        models.append(model)
    at_start = [faithful(model, {}, shapes, files.items(), split) for model, split in zip(models, splits, strict=True)]
    assert at_start == [trained] * 4

    def found() -> tuple[float, dict[str, float]]:
        return settle([compare(model, {}, trained, frozenset(files), split) for model, split in zip(models, splits, strict=True)], 2)

    assert found() == (1.0, {})
    attention, expert = models[3].attn.o_proj.weight, models[2].mlp.experts.w2_weight[1]
    for weight, name in ((attention, "attn.o_proj.weight"), (expert, "mlp.experts.1.down_proj")):
        with torch.no_grad():
            weight[0, 0] *= -1
        with pytest.raises(ValueError, match=rf"1 of \d+ tensors differ: {name}"):
            found()
        with torch.no_grad():
            weight[0, 0] *= -1


def test_a_tensor_that_one_worker_cannot_compare_is_left_out_and_named() -> None:
    models, files = workers(2)
    trained = {name: facts(tensor) for name, tensor in files.items()}
    every = frozenset(files)
    found = [compare(model, {}, trained, every - ({"odd.weight"} if rank else set()), Split(rank, 2)) for rank, model in enumerate(models)]
    share, left_out = settle(found)
    mine = files["odd.weight"].numel() / sum(tensor.numel() for tensor in files.values())
    assert (share, left_out) == (pytest.approx(1 - mine), {"odd.weight (rearranged by the engine)": mine})


def test_partial_sums_of_long_tensors_cross_the_rows_of_the_checksum() -> None:
    tensor = torch.randn(5, 3 * ROW)
    for dim, parts in ((0, tensor.split(2)), (1, tensor.split(ROW // 2 + 2, 1))):
        starts = np.cumsum([0, *(part.shape[dim] for part in parts)]).tolist()
        found = [partial_sum(part, tensor.shape, start, dim) for part, start in zip(parts, starts, strict=False)]
        assert as_checksum(sum(part for part in found if part is not None)) == checksum(tensor)
