"""Where hydra searches for files: the user's directories first, then the shipped ones, then the schema."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult

from rlx.config.shipped import BESIDE, conf_directory


class BesideConf(FileConfigSource):
    """The parent folder of `conf/`. Only its groups `sweeps/` and `slurm/` are configuration."""

    @staticmethod
    def scheme() -> str:
        return "rlx"

    def is_group(self, config_path: str) -> bool:
        return _is_ours(config_path) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        return _is_ours(config_path) and super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path:
            return super().list(config_path, results_filter) if _is_ours(config_path) else []
        return [] if results_filter is ObjectType.CONFIG else [name for name in BESIDE if super(BesideConf, self).is_group(name)]


def _is_ours(config_path: str) -> bool:
    return not config_path or config_path.partition("/")[0] in BESIDE


def search_path(directories: list[str]) -> ConfigSearchPathImpl:
    """The search path, with the user's `directories` first."""
    SourcesRegistry.instance().register(BesideConf)  # repeating this has no effect
    path = ConfigSearchPathImpl()
    for directory in directories:
        path.append("user", Path(directory).resolve().as_uri())
    path.append("main", conf_directory().as_uri())
    path.append("beside", f"{BesideConf.scheme()}://{conf_directory().parent}")
    path.append("schema", "structured://")
    return path


def is_shipped(loaded: ConfigResult) -> bool:
    """Whether a file ships with rlx."""
    scheme, _, folder = loaded.path.partition("://")
    return scheme == BesideConf.scheme() or Path(folder) == conf_directory()


def label(loaded: ConfigResult, path: str) -> str:
    """The name of a file in messages: `conf/model/tiny.yaml` or `sweeps/losses.yaml` if shipped, else relative to the current directory."""
    scheme, _, folder = loaded.path.partition("://")
    if scheme == BesideConf.scheme():
        return f"{path}.yaml"
    if is_shipped(loaded):
        return f"conf/{path}.yaml"
    file = Path(folder) / f"{path}.yaml"
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
