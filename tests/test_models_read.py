"""Reading weights: ranks without rows, files that differ between hosts, buffers with a dtype of their own, more files than may be open."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoint_worker import make_trainer
from forked import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trainer_examples import make_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.phi3 import Phi3Config

from rlx.config.load import compose
from rlx.models.load import check_rotary, load_policy, longest_served
from rlx.models.policy import PolicyModel
from rlx.models.read import read_weights
from rlx.models.shard import shard
from rlx.parallel.mesh import join, one_process
from rlx.train import checkpoint
from rlx.train.build import policy_of
from rlx.train.checkpoint import Saver, TrainerProgress
from rlx.weights.shapes import digest_of

RANKS = 3


def load(rank: int, folder: str, models: list[str]) -> None:
    """One of several ranks: load each model, from files of its own if the name has `{rank}`. Write the outcomes and the log to files."""
    torch.set_num_threads(1)
    mesh = join(torch.device("cpu"), rank=rank, world_size=RANKS, timeout=300, store=dist.FileStore(f"{folder}/store", RANKS))
    logging.getLogger("rlx.trainer").addHandler(logging.FileHandler(f"{folder}/{rank}.log"))
    found: list[dict[str, torch.Tensor] | str] = []
    for name in models:
        try:
            model = load_policy(f"{folder}/{name.format(rank=rank)}", mesh, dtype="float32")
            found.append({key: tensor.full_tensor() for key, tensor in model.hf.state_dict().items()})
        except ValueError as error:
            found.append(str(error))
    torch.save(found, f"{folder}/{rank}.pt")
    mesh.close()


def outcomes(folder: Path, *models: str) -> list[list]:
    """What each rank found. The processes are forked, because importing takes far longer than the test."""
    (folder / "store").unlink(missing_ok=True)  # of an earlier call
    run_ranks(load, (str(folder), list(models)), RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_all_ranks_read_the_same_also_one_without_rows_or_all_say_which_files_differ(tmp_path: Path):
    make_model(vocab_size=4, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")  # 2 rows of the embedding, 2 rows, none
    for rank in range(RANKS):
        make_model(seed=int(rank == 1)).save_pretrained(tmp_path / f"revision_{rank}")
        make_model().save_pretrained(tmp_path / f"format_{rank}")
    pickle(tmp_path / "format_2")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "tied").state_dict()
    for rank, (tied, revision, format) in enumerate(outcomes(tmp_path, "tied", "revision_{rank}", "format_{rank}")):
        assert all(torch.equal(tied[key], tensor) for key, tensor in expected.items())
        said = "the files of {}/{}_{} differ between hosts: those of rank {} are not those of rank 0 (of 3 ranks). Give every host the same"
        assert revision.startswith(said.format(tmp_path, "revision", rank, 1))
        assert format.startswith(said.format(tmp_path, "format", rank, 2))


def pickle(folder: Path) -> None:
    """Turn the weights of a model folder into another file than safetensors."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_weights_that_are_not_whole_or_not_safetensors_are_refused(tmp_path: Path):
    make_model().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    lacking = {name: tensor for name, tensor in stored.items() if name != "model.norm.weight"}
    save_file(lacking, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of Qwen3ForCausalLM: model\.norm\.weight"):
        load_policy(str(tmp_path), one_process("cpu"), dtype="float32")
    pickle(tmp_path)
    with pytest.raises(ValueError, match=r"has no safetensors files, or quantized weights\. Convert it once"):
        load_policy(str(tmp_path), one_process("cpu"), dtype="float32")


@pytest.mark.parametrize(("kind", "name_of_it"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_weights_that_are_quantized_without_a_word_in_the_configuration_are_refused(kind: torch.dtype, name_of_it: str, tmp_path: Path):
    """Their numbers would be taken for weights, without the scales beside them."""
    make_model().save_pretrained(tmp_path)
    weights, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    weights[name], weights[f"{name}_scale"] = (100 * weights[name]).to(kind), torch.tensor(0.01)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"are quantized, and only plain ones can be trained: {name} is {name_of_it}\. Name a version"):
        load_policy(str(tmp_path), one_process("cpu"), dtype="float32")


def test_shards_in_host_memory_stay_there_although_their_mesh_is_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`trainer.fsdp_cpu_offload`: FSDP refuses parameters on a GPU."""
    make_model().save_pretrained(tmp_path)
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
        shard(PolicyModel(hf), mesh, compute_dtype=torch.float32, reduce_dtype=torch.float32, cpu_offload=True)
        monkeypatch.setattr(DTensor, "from_local", lambda *_, **__: pytest.fail("it moves the shard to the device of the mesh"))
        read_weights(hf, str(tmp_path), replace(mesh, device=torch.device("cuda")), torch.device("cpu"))
        stored = load_file(tmp_path / "model.safetensors")
        for name, tensor in hf.state_dict().items():
            assert torch.equal(tensor.to_local(), stored[name]), name
    finally:
        mesh.close()


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_embedding_and_head_are_gathered_only_while_they_compute(tied: bool):
    """In the root they would be gathered, with their gradients, until the end of backward."""
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    try:
        model = PolicyModel(make_model(tie_word_embeddings=tied))
        shard(model, mesh, compute_dtype=torch.float32, reduce_dtype=torch.float32)
        units = {name.removeprefix("hf.") for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        layers = {name for name, module in model.hf.named_modules() if module in set(model.layers)}
        assert units == {"", *layers} | (set() if tied else {"model.embed_tokens", "lm_head"})
        assert model.head_is_fsdp_unit is not tied
    finally:
        mesh.close()


@pytest.mark.parametrize(("rope", "most"), [
    ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}, 8),
    ({"rope_type": "dynamic", "factor": 2.0}, 64),
])  # fmt: skip
def test_frequencies_that_would_depend_on_the_packing_are_refused(rope: dict, most: int):
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=64)
    check_rotary("model", config, most)
    with pytest.raises(ValueError, match=rf"beyond {most} tokens \({rope['rope_type']}\).*Set seq_len={most} or less, not {most + 1}"):
        check_rotary("model", config, most + 1)
    by_layer = SimpleNamespace(rope_parameters={"full_attention": config.rope_parameters, "sliding_attention": {"rope_type": "default"}})
    by_layer.max_position_embeddings = 64
    with pytest.raises(ValueError, match=f"not {most + 1}"):
        check_rotary("model", by_layer, most + 1)
    check_rotary("model", SimpleNamespace(rope_parameters={"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=8), 1000)


LONGROPE = {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}


def test_frequencies_that_servers_with_a_longer_context_would_not_have_are_refused(tmp_path: Path):
    """vLLM takes the long ones for all requests once its context is longer than the first training, also for short requests."""
    keys = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24, "pad_token_id": 0, "head_dim": 4}
    make_model(Phi3Config, **keys).save_pretrained(tmp_path)

    def policy(*overrides: str) -> PolicyModel:
        cfg = compose(["hardware=cpu", "seq_len=24", "sampling.max_tokens=8", *overrides], environ={}).cfg
        return policy_of(cfg, str(tmp_path), one_process("cpu"), lambda _: nullcontext())

    assert longest_served(str(tmp_path)) == 24  # what servers that already run are told
    policy()
    policy("inference.base_url=[http://127.0.0.1:1]", "inference.max_model_len=25")  # servers with a context of their own
    with pytest.raises(
        ValueError, match=r"beyond 24 tokens \(longrope\).*at 25 tokens \(inference\.max_model_len\).*max_model_len=24 or less"
    ):
        policy("inference.max_model_len=25")


@pytest.mark.parametrize("read", [True, False])
def test_the_routers_bias_stays_float32_in_a_bfloat16_model(tmp_path: Path, read: bool):
    keys = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    hf = make_model(DeepseekV3Config, **keys, **experts, first_k_dense_replace=1)
    bias = hf.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.tensor([1.001, 0.999, 1.0005, 0.998]))
    hf.save_pretrained(tmp_path)
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    try:
        model = load_policy(str(tmp_path), mesh, dtype="bfloat16", optimization_dtype="bfloat16", attention="rows", read=read)
    finally:
        mesh.close()
    found = model.hf.model.layers[1].mlp.gate.e_score_correction_bias
    assert found.dtype == torch.float32
    assert not read or torch.equal(found, bias)
    assert model.hf.dtype == torch.bfloat16


def test_a_head_of_its_own_is_not_lost_when_a_run_goes_on(tmp_path: Path):
    make_model(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    make_model(tie_word_embeddings=False).save_pretrained(tmp_path / "untied")
    Saver(make_trainer(str(tmp_path / "untied")), digest_of).save(tmp_path / "saved", TrainerProgress(1, 1)).files()
    with pytest.raises(ValueError, match=r"has 1 weights that this model lacks: model\.lm_head\.weight\. Resume with"):
        checkpoint.load(tmp_path / "saved", make_trainer(str(tmp_path / "tied"), read=False))
    weights = load_file(tmp_path / "untied" / "model.safetensors")
    save_file(weights, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    resumed = make_trainer(str(tmp_path / "tied"), read=False)
    checkpoint.load(tmp_path / "saved", resumed)
    assert torch.equal(resumed.model.hf.lm_head.weight, weights["lm_head.weight"])
