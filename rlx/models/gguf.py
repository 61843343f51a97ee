"""A GGUF file becomes a plain Hugging Face folder, which trainer and engine both load.

transformers reads the file (packages `gguf` and `accelerate`) and refuses to save what it read, because it counts as quantized. Its
weights are ordinary numbers by then, so they are given to a model of the same configuration without the quantization.
"""

from __future__ import annotations

from pathlib import Path


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write the model, tokenizer and chat template of a GGUF `file` to `folder`, weights in `dtype` (`float32`, `bfloat16`).

    Raises ValueError if transformers does not know the file's architecture, or if the file lacks weights of it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))
    config = read.config
    del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=read.dtype)
    state = {name: tensor for name, tensor in read.state_dict().items() if name in plain.state_dict()}
    missing = sorted(set(plain.state_dict()) - set(state))
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} weights of {type(plain).__name__}: {', '.join(missing[:3])}")
    plain.load_state_dict(state, assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
