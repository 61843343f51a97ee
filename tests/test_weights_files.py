"""A version's files: written, damaged, checked, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainer_examples import VOCABULARY, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gpt2 import GPT2Config
from transformers.models.llama import LlamaConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.config.load import compose
from rlx.config.schema import LoraConfig
from rlx.models.load import load_policy
from rlx.models.policy import PolicyModel
from rlx.models.tiny import build_tokenizer
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.weights import files
from rlx.weights.files import ModelFiles, WeightsError, check_folder, latest_version, prune, verify
from rlx.weights.publish import Publisher
from rlx.weights.shapes import ADAPTER, check_shapes, entries, manifest, tensor_shapes
from rlx.weights.subscribe import digest_at

MODELS = {
    "qwen3_tied": lambda: make_model(tie_word_embeddings=True),
    "llama_untied": lambda: make_model(LlamaConfig, tie_word_embeddings=False),
    "gpt2": lambda: make_model(GPT2Config, n_embd=16, n_layer=2, n_head=4, n_positions=128),
    "qwen3_moe": lambda: make_model(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder like that of version 0."""
    folder = tmp_path / "initial"
    make_model(tie_word_embeddings=True).save_pretrained(folder)
    build_tokenizer(128).save_pretrained(folder)
    return folder


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def save(hf, source: Path, paths: RunPaths, version: int, dtype: str = "float32") -> Path:
    static = ModelFiles.read(source, hf, dtype)
    publisher = Publisher(PolicyModel(hf), one_process("cpu"), paths, static, getattr(torch, dtype))
    publisher.gather(version)
    publisher.announce(version)
    publisher.close()
    return paths.weights_of(version)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_version_loads_as_the_same_model(name, source, paths):
    hf = MODELS[name]()
    folder = save(hf, source, paths, 7)
    assert folder == paths.weights_of(7)
    assert verify(folder)["version"] == 7
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(3, VOCABULARY, (2, 9))
    torch.testing.assert_close(loaded(ids).logits, hf.set_attn_implementation("sdpa") or hf(ids).logits, rtol=1e-5, atol=1e-6)


def test_tied_weights_are_saved_once_and_the_tokenizer_comes_along(source, paths):
    folder = save(make_model(tie_word_embeddings=True), source, paths, 1)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "ab"}], tokenize=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32"


def test_experts_are_saved_under_published_names(source, paths):
    folder = save(MODELS["qwen3_moe"](), source, paths, 1)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in set(file.keys())


def test_large_models_are_saved_in_several_files_with_an_index(source, paths, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 5000)
    hf = MODELS["llama_untied"]()
    folder = save(hf, source, paths, 1)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    verify(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in hf.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_every_damage_is_seen_and_named(source, paths):
    folder = save(make_model(tie_word_embeddings=True), source, paths, 3)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()

    weights.write_bytes(good[:-1])
    with pytest.raises(WeightsError, match=rf"model\.safetensors: expected {len(good)} bytes, found {len(good) - 1}"):
        verify(folder)
    for position in (0, good.index(b"model.norm.weight"), good.index(b"F32"), len(good) // 2, len(good) - 1):
        weights.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(WeightsError, match=r"model\.safetensors: expected checksum \w{16}, found \w{16}; its \d+ bytes are damaged"):
            verify(folder)
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes()[:-1] + b" ")
    weights.write_bytes(good)
    with pytest.raises(WeightsError, match=r"config\.json: expected checksum \w{16}, found \w{16}; its \d+ bytes are damaged"):
        verify(folder)
    assert verify(folder, digests=False)["version"] == 3
    folder = save(make_model(tie_word_embeddings=True), source, paths, 3)
    weights.unlink()
    with pytest.raises(WeightsError, match="found no such file"):
        verify(folder)
    weights.write_bytes(good)
    assert verify(folder)["version"] == 3

    (folder / COMPLETE).write_text("{")
    with pytest.raises(WeightsError, match="not a manifest"):
        verify(folder)
    (folder / COMPLETE).unlink()
    with pytest.raises(WeightsError, match="no file COMPLETE"):
        verify(folder)


def test_a_version_is_replaced_by_a_later_attempt(source, paths):
    save(make_model(seed=1), source, paths, 1)
    hf = make_model(seed=2)
    folder = save(hf, source, paths, 1)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.norm.weight, hf.model.norm.weight)
    assert torch.equal(loaded.model.embed_tokens.weight, hf.model.embed_tokens.weight)


def test_old_versions_are_deleted_but_not_the_protected_ones(paths):
    assert latest_version(paths) is None
    for version in (1, 2, 9, 10, 11):
        paths.weights_of(version).mkdir(parents=True)
        (paths.weights_of(version) / COMPLETE).write_text("{}")
    paths.weights_of(12).mkdir()  # not complete
    assert latest_version(paths) == 11
    assert prune(paths, keep_last=2, protect={2}) == [1, 9]
    assert sorted(path.name for path in paths.weights.iterdir()) == ["step_10", "step_11", "step_12", "step_2"]


def test_of_a_version_that_a_user_has_moved_and_linked_only_the_link_goes(paths, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for version in range(3):
        paths.weights_of(version).mkdir(parents=True)
        (paths.weights_of(version) / COMPLETE).write_text("{}")
    paths.weights_of(0).rename(elsewhere)
    paths.weights_of(0).symlink_to(elsewhere)
    prune(paths, keep_last=1)
    assert not paths.weights_of(0).is_symlink()
    assert (elsewhere / COMPLETE).exists()


FILE = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(tie_word_embeddings=True).save_pretrained(folder)
    build_tokenizer(64).save_pretrained(folder)
    return folder


def publish(root: Path, model: Path, version: int = 1, **lora: int) -> Path:
    """Publish the model, or adapters of it."""
    mesh, paths = one_process("cpu"), RunPaths(root / "run")
    config = LoraConfig(**lora) if lora else None  # type: ignore[arg-type]
    policy = load_policy(str(model), mesh, dtype="float32", lora=config)
    Publisher.of(policy, mesh, paths, source=str(model), dtype=torch.float32, lora=config).publish(version)
    return paths.weights_of(version)


def change(folder: Path, file: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def check(folder: Path, model: Path, tied: bool = True) -> int:
    return len(check_folder(folder, digest_at(str(folder)) or "", model, tied))


def test_a_version_and_the_initial_model_are_loaded_and_a_tied_head_may_be_stored(tmp_path: Path, model: Path) -> None:
    folder = publish(tmp_path, model)
    number = check(folder, model)
    assert number == len(load_file(folder / FILE)) == len(check_folder(model, "", model, True))
    change(folder, FILE, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert len(check_folder(folder, "", model, True)) == number + 1
    with pytest.raises(ValueError, match=r"is not this model; unknown: lm_head\.weight$"):
        check_folder(folder, "", model, False)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: tensors["model.norm.weight"].add_(1), r"model\.safetensors: expected checksum"),
        (lambda tensors: tensors.pop("model.norm.weight"), r"is not this model; missing: model\.norm\.weight$"),
        (lambda tensors: tensors.update(more=torch.ones(2)), r"is not this model; unknown: more$"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(2)}),
            r"is not this model; wrong shape: model\.norm\.weight \[2\] instead of \[\d+\]$",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].half()}), r"expected \d+ bytes, found \d+"),
    ],
)
def test_what_the_trainer_did_not_write_is_refused(tmp_path: Path, model: Path, edit: Callable[..., object], said: str) -> None:
    folder = publish(tmp_path, model)
    change(folder, FILE, edit)
    with pytest.raises(ValueError, match=said):
        check(folder, model)


def test_a_manifest_that_changed_since_the_client_read_it_is_refused(tmp_path: Path, model: Path) -> None:
    folder = publish(tmp_path, model)
    expected = digest_at(str(folder))
    assert expected is not None
    (folder / COMPLETE).write_text((folder / COMPLETE).read_text() + " ")
    with pytest.raises(ValueError, match="is not the manifest that the client read"):
        check_folder(folder, expected, model, True)


def test_files_that_are_cut_short_or_have_a_tensor_twice_are_refused(tmp_path: Path, model: Path) -> None:
    content = (model / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"has {len(content) - 1} bytes, but its header says {len(content)}"):
        entries(tmp_path)
    (tmp_path / FILE).write_bytes(content[:100])
    with pytest.raises(ValueError, match="is not a safetensors file, or was cut short"):
        entries(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match=r"holds no model\*\.safetensors"):
        entries(tmp_path)
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(content)
    (tmp_path / "consolidated.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"twice: in model-1\.safetensors and in model-2\.safetensors"):
        entries(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "model-3.safetensors"}})
    )
    with pytest.raises(FileNotFoundError, match=r"model-3\.safetensors"):
        entries(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    assert {entry.path.name for entry in entries(tmp_path).values()} == {"model-2.safetensors"}


def test_adapters_of_another_model_of_other_layers_or_damaged_ones_are_refused(tmp_path: Path, model: Path) -> None:
    folder = publish(tmp_path, model, rank=3)
    assert check(folder, model) == len(load_file(folder / ADAPTER)) > 0
    other = tmp_path / "other"
    make_model(tie_word_embeddings=True, seed=7).save_pretrained(other)
    with pytest.raises(ValueError, match=r"holds adapters of another model \(.*model0\) than .*other"):
        check(folder, other)
    name = next(name for name in load_file(folder / ADAPTER) if "lora_A" in name)
    change(folder, ADAPTER, lambda tensors: tensors[name].add_(1))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: expected checksum"):
        check(folder, model)
    change(folder, ADAPTER, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=r"holds no adapters for this model: \S+lora_B\.weight without its other half"):
        check(folder, model)


def test_checking_needs_no_torch() -> None:
    code = "import sys, rlx.weights.files; sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
}  # fmt: skip
FURTHER, TABLE = "model.layers.61.shared_head.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
MORE: dict[str, tuple[type, dict[str, Any], str]] = {
    "a layer that predicts further tokens": (DeepseekV3Config, LATENT, FURTHER),
    "a rotary table": (LlamaConfig, {}, TABLE),
}


def saved(folder: Path, config: type, keys: dict[str, Any], more: dict[str, torch.Tensor], prefix: str = "") -> str:
    """A model folder with more tensors than the model has, its own without the `prefix` of their names."""
    make_model(config, tie_word_embeddings=False, **keys).save_pretrained(folder)
    build_tokenizer(64).save_pretrained(folder)
    weights = {name.removeprefix(prefix): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights | more, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def begun(tmp_path: Path, source: str, *overrides: str) -> tuple[Publisher, RunPaths]:
    """The trainer's end of a run that begins with `source`."""
    cfg = compose(["hardware=cpu", "seq_len=60", "sampling.max_tokens=8", *overrides], environ={}).cfg
    mesh, paths = one_process("cpu"), RunPaths(tmp_path / "run")
    model = load_policy(source, mesh, dtype="float32", lora=cfg.lora if cfg.lora.enabled else None)
    return Publisher.from_config(cfg, model, mesh, paths, source, lambda *_: nullcontext()), paths


@pytest.mark.parametrize("what", MORE)
def test_versions_without_what_transformers_leaves_out_are_served_but_not_without_a_trained_tensor(what: str, tmp_path: Path) -> None:
    config, keys, name = MORE[what]
    source = saved(tmp_path / "model", config, keys, {name: torch.ones(2)})
    served = tensor_shapes(Path(source))
    broadcast, paths = begun(tmp_path, source)
    broadcast.ensure(1)
    trained, left_out = tensor_shapes(paths.weights_of(1)), manifest(paths.weights_of(1))["untrained"]
    check_shapes("version 1", trained, served, False, left_out)
    with pytest.raises(ValueError, match=r"is not this model; missing: another\.weight$"):
        check_shapes("version 1", trained, served | {"another.weight": (2,)}, False, left_out)
    broadcast.close()


def test_a_model_whose_versions_its_servers_would_refuse_is_refused_before_the_first_step_and_can_be_converted(tmp_path: Path) -> None:
    """GPT-2's files on the hub have names without the prefix `transformer.`, which versions have."""
    source = saved(tmp_path / "model", GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}, {}, "transformer.")
    words = rf"(?s)start with {source} would refuse .* missing: h\.0\..*; unknown: transformer\.h\.0.*save_pretrained\(FOLDER\)"
    with pytest.raises(ValueError, match=words):
        begun(tmp_path, source)
    begun(tmp_path, source, "inference.base_url=[http://127.0.0.1:1]")  # servers that already run may have other files of the model
    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(tmp_path / "converted")
    build_tokenizer(64).save_pretrained(tmp_path / "converted")
    begun(tmp_path, str(tmp_path / "converted"))


def test_adapters_of_layers_that_the_servers_files_call_otherwise_are_refused_before_the_first_step(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", LlamaConfig, {}, {TABLE: torch.ones(2)})
    adapters = ("lora.rank=4", "lora.target_modules=[q_proj]")
    begun(tmp_path, source, *adapters)
    bare = saved(tmp_path / "bare", LlamaConfig, {}, {}, "model.")
    with pytest.raises(ValueError, match=r"would refuse .*a version holds no adapters for this model: base_model\.model\.model\.layers\.0"):
        begun(tmp_path, bare, *adapters)
