"""Where hydra finds configuration files: in the user's directories first, then in rlx's own. Public interfaces of hydra alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from rlx.config.cgroup_limits import cores
from rlx.config.errors import may_parse, may_read
from rlx.config.gpus import choose_layout
from rlx.config.presets import BESIDE, conf_directory
from rlx.config.yaml_files import parsed


class Folder(ConfigSource):
    """A folder of configuration files, of which hydra reads the defaults lists alone. Errors name the file and the line."""

    @staticmethod
    def scheme() -> str:
        return "rlx"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file_of(config_path)
        with may_read(file), may_parse(label(file)):
            text = file.read_text(encoding="utf-8")
            content = parsed(text)
        listed = {"defaults": content["defaults"]} if "defaults" in content else {}
        values = {} if content.keys() <= {"defaults"} else {"has": "values"}
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(listed | values), self._get_header_dict(text[:512]))

    def is_group(self, config_path: str) -> bool:
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self.file_of(config_path).is_file()

    def available(self) -> bool:
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found: list[str] = []
        for name in os.listdir(Path(self.path, config_path)):
            self._list_add_result(found, os.path.join(config_path, name), name, results_filter)
        return sorted(set(found))

    def file_of(self, config_path: str) -> Path:
        """The file of a configuration here, which may be absent."""
        return Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")


class Directories(SearchPathPlugin):
    """The user's directories, rlx's `conf/`, and the folder around it, which has the groups of `BESIDE`."""

    of_user: ClassVar[Sequence[str]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        conf, path = conf_directory(), search_path.get_path()
        for each in [each for each in path if each.path == str(conf)]:  # none in another application of hydra
            path.remove(each)
            for directory in (*map(Path, self.of_user), conf, conf.parent):
                search_path.append("rlx", f"rlx://{directory.resolve()}")


def make_loader(directories: Sequence[str], layout: str | None = None) -> ConfigLoader:
    """A loader that searches the user's `directories` first. `layout`: what hardware=auto chooses; None: what fits this machine."""
    OmegaConf.register_new_resolver("rlx.layout", lambda: layout or choose_layout()[0], replace=True)
    OmegaConf.register_new_resolver("rlx.cores", cores, replace=True)
    for plugin in (Folder, Directories):
        Plugins.instance().register(plugin)  # repeating this has no effect
    Directories.of_user = directories
    with initialize_config_dir(str(conf_directory()), version_base="1.3"):
        return GlobalHydra.instance().config_loader()


def folders_of(loader: ConfigLoader) -> list[Folder]:
    """Where a loader searches, the user's directories first."""
    return [source for source in loader.get_sources() if isinstance(source, Folder)]


def file_at(loader: ConfigLoader, config_path: str) -> Path | None:
    """The file of a configuration; None for what is not in a file of the user's or rlx's."""
    return next((folder.file_of(config_path) for folder in folders_of(loader) if folder.is_config(config_path)), None)


def is_shipped(file: Path) -> bool:
    """Whether a file ships with rlx."""
    conf = conf_directory()
    return any(file.is_relative_to(folder) for folder in (conf, *(conf.parent / name for name in BESIDE)))


def label(file: Path) -> str:
    """The name of a file in messages: `conf/model/tiny.yaml` or `sweeps/losses.yaml` if shipped, else relative to the current directory."""
    around = conf_directory().parent if is_shipped(file) else Path.cwd()
    return str(file.relative_to(around) if file.is_relative_to(around) else file)
