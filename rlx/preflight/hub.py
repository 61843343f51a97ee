"""The cache of models and data sets from the Hugging Face hub: fills it before a job, and says what a job would miss.

A cluster's file may name the cache that its nodes see (`slurm.hf_home`) and say that they have no internet (`slurm.offline`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.schema import CommandConfig
from rlx.config.schema_eval import PlayWithModel
from rlx.runs.weights import initial_model

NOTHING = ["all of it"]  # what a cache lacks without the model
# A model needs one of these. A tokenizer of its own code (model.trust_remote_code) reads another file than transformers' would.
TOKENIZERS = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")


def use_cache(variables: Mapping[str, str]) -> None:
    """Have this process and those that it starts use that cache.

    Raises ConfigError if the hub's library has been imported with another: it reads the variables once.
    """
    os.environ.update(variables)
    imported = sys.modules.get("huggingface_hub.constants")
    home, cache = variables.get("HF_HOME"), variables.get("HF_HUB_CACHE")
    if imported is not None and cache is not None and Path(imported.HF_HUB_CACHE).resolve() != Path(cache).resolve():
        raise ConfigError(
            f"this process uses the cache {imported.HF_HUB_CACHE} already, and slurm.hf_home={home}.\n"
            f"  fix: export HF_HOME={home}, and unset HF_HUB_CACHE"
        )


def hub_cache() -> str:
    """Where the hub's library keeps models, in words."""
    return os.environ.get("HF_HUB_CACHE") or f"{os.environ.get('HF_HOME') or '~/.cache/huggingface'}/hub"


def models_of(cfg: CommandConfig) -> list[str]:
    """The models that the processes of a command load from the hub, by name."""
    own = initial_model(cfg) if isinstance(cfg, PlayWithModel) else None
    plays_elsewhere = getattr(getattr(cfg, "client", None), "base_url", None)
    model = None if cfg.model.prepared or plays_elsewhere else own or cfg.model.name
    named = [model, getattr(getattr(cfg, "ref", None), "name", None)]
    return [name for name in dict.fromkeys(named) if name and not Path(name).expanduser().is_dir()]


def fetch_models(cfg: CommandConfig) -> dict[str, Path]:
    """Download the models of a command into the cache; their folders by name. Raises ConfigError with the hub's reason."""
    from rlx.weights.hub import fetch

    found: dict[str, Path] = {}
    for name in models_of(cfg):
        try:
            found[name] = fetch(name, None)
        except Exception as error:  # of the network, the hub, or the name: the hub's library and its client raise many types
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            fix = "check model.name, HF_ENDPOINT and HF_TOKEN; run it where there is internet"
            raise ConfigError(f"the model {name} cannot be fetched: {why}\n  fix: {fix}") from error
        if lacking := lacks(name):
            raise ConfigError(f"the hub has no complete model {name}: it lacks {', '.join(lacking)}.\n  fix: another model.name")
    return found


def lacks(name: str) -> list[str]:
    """What the cache lacks of a model of the hub; empty if it is complete, as far as the cache has the hub's list. Asks no hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from rlx.weights.hub import UNWANTED, WANTED

    lacking: list[str] = []
    try:
        folder = Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True))
    except LocalEntryNotFoundError as error:
        if not (found := getattr(error, "snapshot_path", None)):
            return NOTHING
        folder, lacking = Path(found), ["some of its smaller files"]
    return [file for file in needed(folder) if not (folder / file).is_file()] or lacking


def needed(folder: Path) -> list[str]:
    """The files without which a model's folder cannot be loaded."""
    index = folder / "model.safetensors.index.json"
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
    whole = [] if shards or any(folder.glob("*.safetensors")) else ["model.safetensors"]
    tokenizer = [] if any(path.is_file() for kind in TOKENIZERS for path in folder.glob(kind)) else ["tokenizer.json"]
    return ["config.json", *tokenizer, *whole, *shards]


def check_cache(configs: Sequence[CommandConfig]) -> None:
    """Raise ConfigError if nodes without internet would miss a model in their cache."""
    offline = [cfg for cfg in configs if cfg.launcher.name == "slurm" and cfg.slurm.offline and not cfg.dry_run]
    lacking = {name: lacks(name) for name in dict.fromkeys(name for cfg in offline for name in models_of(cfg))}
    texts = [
        f"the nodes have no internet (slurm.offline=true), and the cache {hub_cache()} lacks of the model {name}: {', '.join(files[:3])}"
        + (f" and {len(files) - 3} more files" if len(files) > 3 else "")
        + ".\n  fix: rlx fetch, with the same arguments, where there is internet"
        for name, files in lacking.items()
        if files
    ]
    if texts:
        raise ConfigError(texts)
