"""Finds the shipped configuration. Does not import hydra, so that help texts can list presets quickly."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.keys import MISSING
from rlx.config.yaml_files import read

PRIMARY = "train"
LANGUAGE_MODEL = "model=qwen3_0_6b"  # suggested where the default model is too small
BESIDE = ("slurm", "sweeps")  # groups outside conf/, at the top of the repository, where users look for them


@functools.cache
def conf_directory() -> Path:
    """The shipped `conf/`: at the top of a checkout, or installed as the package `rlx.conf`."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "conf", package.parent / "conf")
    for directory in candidates:
        if (directory / f"{PRIMARY}.yaml").is_file():
            return directory
    raise ConfigError(f"the shipped configuration was not found: no {PRIMARY}.yaml in {candidates[0]} or {candidates[1]}. Reinstall rlx.")


@functools.cache
def shipped_groups() -> Mapping[str, Path]:
    """The folder of each shipped group, by name."""
    conf = conf_directory()
    folders = [*(conf.parent / name for name in BESIDE), *conf.iterdir()]
    return {folder.name: folder for folder in sorted(folders) if folder.is_dir() and any(folder.glob("*.yaml"))}


def shipped_options() -> dict[str, str]:
    """The environment of each shipped option of the group `env`: `{"math": "rlx-math"}`."""
    found = {path.stem: read(path)["id"] for path in sorted(shipped_groups()["env"].glob("*.yaml"))}
    return {option: env for option, env in found.items() if env != MISSING}


def options_by_id() -> dict[str, str]:
    """The shipped option of each environment: `{"rlx-math": "math"}`. Of several, as of benchmarks, the one with the shortest name."""
    longest_first = sorted(shipped_options().items(), key=lambda item: -len(item[0]))
    return {env: option for option, env in longest_first}


def default_seq_len() -> int:
    """`seq_len` of the default model, which has a token for each character."""
    return read(shipped_groups()["model"] / "tiny.yaml")["seq_len"]
