"""Where the shipped configuration lies. Without hydra, so that help texts can list it at once."""

from __future__ import annotations

from pathlib import Path

from rlx.config.errors import ConfigError

PRIMARY = "train"
BESIDE = ("slurm", "sweeps")  # groups that lie beside conf/, at the top of the repository, where a user looks for them


def conf_directory() -> Path:
    """The shipped `conf/`: at the top of a checkout, or installed as the package `rlx.conf`."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "conf", package.parent / "conf")
    for directory in candidates:
        if (directory / f"{PRIMARY}.yaml").is_file():
            return directory
    raise ConfigError(
        f"the shipped configuration was not found: no {PRIMARY}.yaml in {candidates[0]} or {candidates[1]}. Install rlx again."
    )


def shipped_groups() -> dict[str, Path]:
    """The shipped groups by name, with their folders."""
    conf = conf_directory()
    folders = [*(conf.parent / name for name in BESIDE), *conf.iterdir()]
    return {folder.name: folder for folder in sorted(folders) if folder.is_dir() and any(folder.glob("*.yaml"))}
