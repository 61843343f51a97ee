"""What a server checks of a folder before it loads it, read from files alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_examples import make_model

from rlx.config.schema import LoraConfig
from rlx.models.load import load_policy
from rlx.models.tiny import build_tokenizer
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.weights.files import check_folder
from rlx.weights.publish import Publisher
from rlx.weights.shapes import ADAPTER, entries
from rlx.weights.subscribe import digest_at

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
