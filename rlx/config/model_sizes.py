"""The sizes of a model from its own config.json: in its folder, in the hub's cache, or on the hub."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError

SIZES = {  # key of `model` → its names in the config.json of families; the first that is there counts
    "hidden_size": ("hidden_size", "n_embd"),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "n_positions"),
}


INNER = ("thinker_config", "text_config", "llm_config", "language_config")  # of the language model in one that sees or hears, too


def config_of(name: str) -> Path | None:
    """The config.json of a model: in its folder, or in the hub's cache on this machine."""
    if (found := Path(name).expanduser() / "config.json").is_file():
        return found
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    repository = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    cached = [path for path in (repository / "refs").glob("main") if path.is_file()]
    found = repository / "snapshots" / (cached[0].read_text().strip() if cached else "absent") / "config.json"
    return found if found.is_file() else None


def found_config(name: str) -> Path:
    """Like `config_of`, but also asks the hub. Raises ConfigError if there is none."""
    if (found := config_of(name)) is not None:
        return found
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # of the network, the hub or the name: the library and its client raise many types
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.name={name} is no folder with a config.json, and neither the hub nor its cache has one: {said}\n"
            "  fix: correct the name, or choose an option with sizes: model=OPTION model.name=NAME"
        ) from None


def sizes_in(path: Path) -> dict[str, int]:
    """The sizes that a config.json has, by the keys of `model`; empty if it cannot be read, because loading the model says why."""
    try:
        made: Any = _read(path, path.stat().st_mtime)
        for inner in INNER:
            made = made.get(inner) or made
        named = [(key, made.get(name)) for key, names in SIZES.items() for name in reversed(names)]
        found = {key: value for key, value in named if isinstance(value, int) and value > 0}
    except (OSError, ValueError, AttributeError):
        return {}
    if {"hidden_size", "num_layers", "num_attention_heads", "vocab_size"} <= found.keys():
        hidden, heads = found["hidden_size"], found["num_attention_heads"]
        attention = 2 * hidden * (found.get("head_dim") or hidden // heads) * (heads + found["num_key_value_heads"])
        # Without a width it is GPT-2's: two matrices of four times the model's.
        feed_forward = 3 * found["intermediate_size"] * found.get("num_experts", 1) if "intermediate_size" in found else 8 * hidden
        tables = 1 if made.get("tie_word_embeddings", "n_embd" in made) else 2
        found["num_parameters"] = found["num_layers"] * (attention + hidden * feed_forward) + tables * found["vocab_size"] * hidden
    return found


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: float) -> Any:
    """`changed`: so that a file which changes is read again."""
    return json.loads(path.read_text(encoding="utf-8"))
