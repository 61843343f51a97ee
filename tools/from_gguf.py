"""Make a plain Hugging Face folder of a GGUF file, for `model.name=FOLDER`. It reads the whole file, as float32, into host memory.

    python tools/from_gguf.py FILE FOLDER [float32|bfloat16]

transformers reads the file (packages `gguf` and `accelerate`) and refuses to save what it read, because it counts as quantized. Its
weights are ordinary numbers by then, so they are given to a model of the same configuration without the quantization.

What transformers does not find in the file it draws at random, and what it has no place for it leaves out, both with a line in the log.
Such a model computes, but it is not the one in the file. Here both are errors.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("rlx.gguf")

PLAIN_SPLITS = ("", "default", "gpt-2", "gpt2")  # of text before its bytes are merged: GPT-2's, which transformers uses for unknown names
DIGITS_APART = ("smollm",)  # GPT-2's, after every digit was set apart; transformers does not know the name


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write the model, tokenizer and chat template of a GGUF `file` to `folder`, weights in `dtype` (`float32`, `bfloat16`).

    Raises ValueError if transformers does not know the file's architecture, if the file lacks weights of it, has other tensors beside them
    (the scaled rotary frequencies of Llama 3.1 and Phi 3), or computes by numbers that transformers leaves out (`check_numbers`).
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    header = GGUFReader(file)
    keys: dict[str, Any] = {"gguf_file": file.name, "dtype": getattr(torch, dtype), "output_loading_info": True}
    read, found = AutoModelForCausalLM.from_pretrained(file.parent, **keys)
    config = read.config
    check_numbers(header, config, file)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=read.dtype)
    state = {name: tensor for name, tensor in read.state_dict().items() if name in plain.state_dict()}
    missing = sorted((set(plain.state_dict()) - set(state)) | set(found["missing_keys"]))
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} weights of {type(plain).__name__}: {', '.join(missing[:3])}")
    beside = sum(int(tensor.n_elements) for tensor in header.tensors) - sum(parameter.numel() for parameter in plain.parameters())
    if beside:
        rotary = [tensor.name for tensor in header.tensors if tensor.name.startswith("rope_")]
        raise ValueError(
            f"{file} has {beside:+,} numbers beside the weights of {type(plain).__name__}"
            + (f" ({', '.join(rotary)}: rotary frequencies of its own)" if rotary else "")
            + ", for which transformers has no place: the model would compute something else. Use the model's own folder, model.name=FOLDER"
        )
    plain.load_state_dict(state, assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    _split_as_the_file_says(tokenizer, header, file)
    tokenizer.save_pretrained(folder)


def check_numbers(header: Any, config: Any, file: Path) -> None:
    """Raise ValueError if the model would compute something else by `config`, which transformers made of the file's header.

    transformers leaves out how rotary frequencies are scaled. No file says how Gemma's queries are scaled; transformers takes the default
    of the family, which is that of the sizes whose heads are as wide.
    """
    name = header.fields["general.architecture"].contents()
    said = {
        key.removeprefix(f"{name}.rope."): field.contents() for key, field in header.fields.items() if key.startswith(f"{name}.rope.scal")
    }
    factor = said.get("scaling.factor", said.get("scale_linear", 1.0)) or 1.0  # 0: llama.cpp takes it for 1
    kind = said.get("scaling.type", "linear")
    found = getattr(config, "rope_parameters", None) or {}
    ropes = [found] if "rope_type" in found else [each for each in found.values() if isinstance(each, dict)]
    if kind != "none" and factor != 1.0 and not any((rope["rope_type"], rope.get("factor")) == (kind, factor) for rope in ropes):
        raise ValueError(
            f"{file} scales its rotary frequencies ({kind}, factor {factor:g}), and transformers leaves that out: the model would compute "
            "something else. Use the model's own folder, model.name=FOLDER"
        )
    scale, width = getattr(config, "query_pre_attn_scalar", None), getattr(config, "head_dim", None)
    if scale is not None and scale != width:
        raise ValueError(
            f"{file} does not say by what number the queries of {name} are scaled, and transformers would take {scale}, although its heads "
            f"are {width} wide: a default of other sizes. Use the model's own folder, model.name=FOLDER"
        )


def _split_as_the_file_says(tokenizer: Any, header: Any, file: Path) -> None:
    """Have the tokenizer split text as the vocabulary's merges were learned; warn if neither transformers nor this module knows how."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    said = {name: field.contents() for name in ("model", "pre") if (field := header.fields.get(f"tokenizer.ggml.{name}")) is not None}
    split = str(said.get("pre", ""))
    if said.get("model") != "gpt2" or split in PLAIN_SPLITS or split in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if split in DIGITS_APART:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        return
    log.warning(
        "%s splits text by the rules named %r, which transformers does not know: it uses GPT-2's, so some texts get other tokens than the "
        "model was trained on. Use the model's own folder, model.name=FOLDER",
        file,
        split,
    )


def make_folder(file: Path, folder: Path, dtype: str = "float32") -> None:
    """`convert`, so that an interrupted call leaves no folder that looks whole. Exits if the folder exists."""
    if folder.exists():
        sys.exit(f"{folder} already exists")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        convert(file, Path(unfinished, folder.name), dtype)
        Path(unfinished, folder.name).rename(folder)


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    make_folder(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
