"""Small GGUF files: what transformers would draw at random or leave out is refused, and text is split as the file says."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from from_gguf import check_numbers, convert

TOKENS = [*bytes_to_unicode().values(), "ĊĊ", "12", "<|im_end|>"]
HEADS, KEYS = 4, 2
NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
NAMES |= {f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"} | {
    f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")
}


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KEYS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), max_position_embeddings=64, tie_word_embeddings=tied, **sizes)).eval()


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """The weights by llama.cpp's names, with the two halves of each head's rows of queries and keys interleaved."""
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    found = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not model.config.tie_word_embeddings:
        found["output.weight"] = state["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            values = state[f"model.layers.{layer}.{theirs}.weight"]
            if heads := {"attn_q": HEADS, "attn_k": KEYS}.get(ours):
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            found[f"blk.{layer}.{ours}.weight"] = values
    return found


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    kind: gguf.GGMLQuantizationType,
    split: str = "gpt-2",
    scaling: tuple[str, float] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling[0]))
        writer.add_rope_scaling_factor(scaling[1])
    for add, value in (
        (writer.add_name, "small"), (writer.add_context_length, 64), (writer.add_embedding_length, 64), (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 96), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KEYS),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 10_000.0), (writer.add_vocab_size, len(TOKENS)),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_tokenizer_pre, split), (writer.add_token_list, TOKENS),
        (writer.add_token_types, [1] * (len(TOKENS) - 1) + [3]), (writer.add_token_merges, ["Ċ Ċ", "1 2"]),
        (writer.add_eos_token_id, len(TOKENS) - 1),
    ):  # fmt: skip
        add(value)  # type: ignore[operator]
    for name, values in tensors.items():
        plain = values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32
        stored = np.ascontiguousarray(values, np.float32) if plain else gguf.quantize(np.ascontiguousarray(values, np.float32), kind)
        writer.add_tensor(name, stored, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0])
def test_the_folder_computes_what_the_files_numbers_say(kind: gguf.GGMLQuantizationType, tied: bool, tmp_path: Path) -> None:
    model = llama(tied)
    if kind != gguf.GGMLQuantizationType.F32:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    convert(write(tmp_path / "small.gguf", tensors_of(model), kind), tmp_path / "folder", "float32")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    ids = torch.tensor([[3, 14, 15, 92, 65]])
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("left_out", ["blk.1.ffn_up.weight", "output_norm.weight", "blk.0.attn_k.weight"])
def test_a_file_without_a_weight_is_refused_which_would_be_drawn_at_random(left_out: str, tmp_path: Path) -> None:
    tensors = tensors_of(llama(True))
    del tensors[left_out]
    with pytest.raises(ValueError, match=r"small.gguf lacks 1 weights of LlamaForCausalLM: model\."):
        convert(write(tmp_path / "small.gguf", tensors, gguf.GGMLQuantizationType.F32), tmp_path / "folder", "float32")


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [("rope_freqs.weight", 8, r"\+8 numbers .*rope_freqs\.weight: rotary frequencies"), ("blk.0.attn_q.bias", 64, r"\+64 numbers")],
)
def test_a_file_with_a_tensor_that_the_model_has_no_place_for_is_refused(name: str, size: int, words: str, tmp_path: Path) -> None:
    """Scaled rotary frequencies of Llama 3.1 are such a tensor: without them the model would compute with others, in trainer and engine."""
    tensors = tensors_of(llama(True)) | {name: np.ones(size, np.float32)}
    with pytest.raises(ValueError, match=words):
        convert(write(tmp_path / "small.gguf", tensors, gguf.GGMLQuantizationType.F32), tmp_path / "folder", "float32")


@pytest.mark.parametrize("scaling", [("linear", 4.0), ("yarn", 2.0), ("none", 1.0), ("linear", 1.0)])
def test_a_file_with_scaled_rotary_frequencies_is_refused_because_transformers_leaves_the_scale_out(
    scaling: tuple[str, float], tmp_path: Path
) -> None:
    file = write(tmp_path / "small.gguf", tensors_of(llama(True)), gguf.GGMLQuantizationType.F32, scaling=scaling)
    words = rf"small\.gguf scales its rotary frequencies \({scaling[0]}, factor {scaling[1]:g}\).*model\.name=FOLDER"
    with nullcontext() if scaling[1] == 1.0 else pytest.raises(ValueError, match=words):
        convert(file, tmp_path / "folder", "float32")


def test_a_scale_that_transformers_takes_over_is_no_reason_to_refuse_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "small.gguf", tensors_of(llama(True)), gguf.GGMLQuantizationType.F32, scaling=("linear", 4.0))
    config = LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0})
    check_numbers(gguf.GGUFReader(file), config, file)


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemmas_whose_queries_have_a_scale_that_no_file_tells_are_refused(family: str, width: int, tmp_path: Path) -> None:
    """That of the 27B sizes, with heads 128 wide, is 144 or 168. transformers takes 256 for all, which is right for the others."""
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, family)
    writer.add_name("small")
    writer.add_key_length(width)
    writer.add_vocab_size(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    words = rf"does not say by what number the queries of {family} are scaled, and transformers would take 256, although its heads are 128"
    with nullcontext() if width == 256 else pytest.raises(ValueError, match=words):
        check_numbers(gguf.GGUFReader(file), config, file)


@pytest.mark.parametrize(
    ("split", "pieces", "warned"),
    [("gpt-2", ["12", "Ċ", "Ċ", "1"], False), ("smollm", ["1", "2", "ĊĊ", "1"], False), ("odd", ["12", "Ċ", "Ċ", "1"], True)],
)
def test_text_is_split_as_the_file_says(
    split: str, pieces: list[str], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "small.gguf", tensors_of(llama(True)), gguf.GGMLQuantizationType.F32, split)
    with caplog.at_level(logging.WARNING, "rlx"):
        convert(file, tmp_path / "folder", "float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.convert_ids_to_tokens(tokenizer("12\n\n1", add_special_tokens=False).input_ids) == pieces
    assert ("splits text by the rules named 'odd'" in caplog.text) == warned
