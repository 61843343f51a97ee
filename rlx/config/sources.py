"""Where hydra searches for files: the user's directories first, then the shipped ones, then the schema."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from rlx.config import written
from rlx.config.errors import ConfigError, may_parse, may_read
from rlx.config.gpus import choose_layout
from rlx.config.limits import cores
from rlx.config.saved import escaped, has_quotes, is_saved
from rlx.config.shipped import BESIDE, conf_directory
from rlx.config.tree import show

SUFFIX = ".yaml"
SAVED = "saved"
"""In the header of what was loaded from a run's `config.yaml`: whether its version writes 1e-5 in quotes (`now`), or not (`before`)."""
WRITTEN = "written"
"""In the header of each file: its numbers as they are written (`written.read`)."""


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, str]:
    """The content of a file, and its numbers as they are written.

    A sweep composes the same files for each of its runs, and parsing them was a fifth of composing.
    Raises TypeError if it is no mapping or has a value that no key can have. OmegaConf's own function takes text for a key without a value.
    """
    plain = is_saved(text) and not has_quotes(text)
    data, as_written = written.read(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader) if plain else get_yaml_loader())
    if data is not None and not isinstance(data, dict):
        what = f"a list of {len(data)} values" if isinstance(data, list) else f"only the value {show(data)!r}"
        raise TypeError(f"it holds {what}, but a configuration file holds keys.\nWrite `key: value` in each line.")
    try:
        return OmegaConf.create(escaped(data) if is_saved(text) else data or {}), as_written
    except OmegaConfBaseException as error:
        key = f"`{error.full_key}`: " if error.full_key else ""
        raise TypeError(
            f"{key}{str(error).splitlines()[0]}.\nCorrect the value. `${{` begins a reference; as text it is `\\${{`."
        ) from None


def copied(node: Any, parent: Any = None) -> Any:
    """A copy of a tree of omegaconf's nodes, which composing may change. Twenty times faster than making the nodes or `copy.deepcopy`."""
    new, known = object.__new__(type(node)), node._metadata
    metadata = object.__new__(type(known))
    metadata.__dict__.update(known.__dict__, flags=dict(known.flags or {}), resolver_cache=defaultdict(dict))
    new.__dict__.update(node.__dict__, _metadata=metadata, _parent=parent, _flags_cache=None)
    content = node.__dict__.get("_content")
    if isinstance(content, dict):
        new.__dict__["_content"] = {key: copied(value, new) for key, value in content.items()}
    elif isinstance(content, list):
        new.__dict__["_content"] = [copied(value, new) for value in content]
    return new


class Folder(FileConfigSource):
    """A folder of configuration files. Hydra's own source does the same, but parses a file and resolves its path each time."""

    @staticmethod
    def scheme() -> str:
        return "folder"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file_of(config_path)
        try:
            with may_read(file), may_parse(shown(file)):
                text = file.read_text(encoding="utf-8")
                parsed, as_written = _parsed(text)
        except FileNotFoundError:
            raise ConfigLoadError(f"Config not found : {file}") from None
        except TypeError as error:
            raise ConfigError(f"{shown(file)}: {error}") from None
        header = self._get_header_dict(text[:512]) | ({SAVED: "now" if has_quotes(text) else "before"} if is_saved(text) else {})
        header[WRITTEN] = as_written
        return ConfigResult(config=copied(parsed), path=self.full_path(), provider=self.provider, header=header)

    def is_group(self, config_path: str) -> bool:
        return os.path.isdir(os.path.join(self.path, config_path))

    def is_config(self, config_path: str) -> bool:
        return self.file_of(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found: set[str] = set()
        with os.scandir(os.path.join(self.path, config_path)) as entries:
            for entry in entries:
                if entry.is_dir():
                    if results_filter is not ObjectType.CONFIG and entry.name != "__pycache__":
                        found.add(entry.name)
                elif results_filter is not ObjectType.GROUP and entry.name.endswith(SUFFIX) and entry.is_file():
                    found.add(entry.name.removesuffix(SUFFIX))
        return sorted(found)

    def file_of(self, config_path: str) -> Path:
        """The file of a configuration here, which may be absent."""
        return Path(self.path, config_path if config_path.endswith(SUFFIX) else config_path + SUFFIX)


class BesideConf(Folder):
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


class Repository(CachingConfigRepository):
    """What one composition loads. Hydra's own copies all that is stored, in case its search path changes, and the schema node by node.

    Ours does neither: each was a tenth of composing.
    """

    def __init__(self, delegate: IConfigRepository, schema: type, names: set[str]) -> None:
        """`names`: those under which defaults lists name the schema."""
        self.delegate = delegate
        result = ConfigResult(provider="rlx", path="structured://", config=copied(_nodes_of(schema)), header={"package": "_global_"})
        result.is_schema_source, result.defaults_list = True, []
        self.cache: dict[str, ConfigResult | None] = {f"config_path={name}": result for name in names}

    def load_config(self, config_path: str) -> ConfigResult | None:
        try:
            return super().load_config(config_path)
        except ValueError as error:  # a defaults list of another form
            folders = [source for source in self.get_sources() if isinstance(source, Folder) and source.is_config(config_path)]
            file = shown(folders[0].file_of(config_path)) if folders else f"{config_path}.yaml"
            raise ConfigError(f"{file}: {error}.\nCorrect its defaults list.") from None


@functools.cache
def _nodes_of(schema: type) -> Any:
    return OmegaConf.create(dataclasses.asdict(schema()))


def search_path(directories: list[str]) -> ConfigSearchPathImpl:
    """The search path, with the user's `directories` first."""
    for source in (Folder, BesideConf):
        SourcesRegistry.instance().register(source)  # repeating this has no effect
    path = ConfigSearchPathImpl()
    for directory in directories:
        path.append("user", f"{Folder.scheme()}://{Path(directory).resolve()}")
    path.append("main", f"{Folder.scheme()}://{conf_directory()}")
    path.append("beside", f"{BesideConf.scheme()}://{conf_directory().parent}")
    path.append("schema", "structured://")
    return path


def make_loader(directories: list[str], layout: str | None = None) -> ConfigLoaderImpl:
    """A loader that searches the user's directories first, then the shipped one. `layout`: what hardware=auto chooses."""
    version.setbase("1.3")
    Plugins.instance()
    setup_globals()
    OmegaConf.register_new_resolver("rlx.layout", lambda: layout or choose_layout()[0], replace=True)
    OmegaConf.register_new_resolver("rlx.cores", cores, replace=True)
    return ConfigLoaderImpl(search_path(directories))


class _SweepLoader(ConfigLoaderImpl):
    """Skips the check by which hydra's sweepers load every run that they propose: the launcher checks all runs anyway."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        return OmegaConf.create({})


def make_sweep_loader(directories: list[str]) -> ConfigLoaderImpl:
    """A loader that also finds the configuration of hydra itself and of its plugins."""
    make_loader(directories)  # registers the resolver that files may use
    path = search_path(directories)
    path.prepend("hydra", "pkg://hydra.conf")
    return _SweepLoader(path)


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
    return shown(Path(folder) / f"{path}.yaml")


def shown(file: Path) -> str:
    """The name of a file of the user's in messages."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
