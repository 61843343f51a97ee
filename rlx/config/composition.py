"""Composes one plain tree from `conf/`, the user's own directories, environment variables and the command line, with hydra.

Order, weakest first: the schema's defaults, the group options and values of `train.yaml`, `RLX_…` variables, the experiment or
the user's file, the command line. Hydra merges plain values here; types, ranges and unknown keys are found afterwards, all at
once, in `tree.py`, which also knows from `Origins` where each value came from.

Uses hydra as a library: nothing is written, no logging is configured, the working directory stays.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, InterpolationToMissingValueError, OmegaConfBaseException

from rlx.config.environment import Variable, read_variables
from rlx.config.errors import ConfigError
from rlx.config.gpus import choose_layout
from rlx.config.schema import MISSING, Config
from rlx.config.shipped import PRIMARY, conf_directory
from rlx.config.tree import Origins, Problem, closest, optional_sections, show

SCHEMA = "rlx_schema"  # every key with its default; first in the defaults list
VARIABLES = "rlx_variables"  # what environment variables set; before the experiment in the defaults list
MAY_BE_ABSENT = ("experiment", "logger")  # groups that may be set to null
OPEN = ("loss", "advantage", "optim", "envs", "inference.vllm")  # nodes whose keys may be deleted


@dataclass
class Tree:
    """A composed configuration before types and rules are checked."""

    data: dict[str, Any]
    origins: Origins
    choices: dict[str, str]  # group -> option; several options are joined with "+"
    overrides: list[str]  # the command line's, as they were written
    notes: list[str]  # what the user should be told
    problems: list[Problem] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)  # keys without a value because of a problem that is listed


def compose_tree(argv: list[str], environ: Mapping[str, str]) -> Tree:
    """Compose what the command line asks for. Raises ConfigError when no tree can be made; other problems are in the result."""
    options = _parse_arguments(argv)
    overrides = options.overrides
    parsed = _parse_overrides(overrides)
    loader = _make_loader(options, environ, parsed)
    groups = [group for group in loader.list_groups("") if group != "hydra"]
    variables, problems = read_variables(environ, groups)
    problems += _store_nodes(variables)
    experiment = next((v.text for v in variables if v.key == "experiment" and v.is_group), None)
    if experiment is not None and not any(o.key_or_group == "experiment" for o in parsed):
        parsed += _parse_overrides([f"experiment={experiment}"])
    name = options.config_name
    if not any(source.is_config(name) for source in loader.get_sources()):
        names = sorted({n for n in loader.get_group_options("", ObjectType.CONFIG) if n not in (SCHEMA, VARIABLES, "_dummy_empty_config_")})
        raise ConfigError(f"there is no configuration file {name}.yaml (--config-name). Known: {', '.join(names)}.")
    problems += _wrong_options(loader, groups, [(o.key_or_group, _value_of(o), "") for o in parsed if _is_choice(loader, o)])
    problems += _wrong_options(loader, groups, [(v.key, _read_value(v), v.name) for v in variables if v.is_group])
    parsed = _short_env_keys(loader, name, parsed)
    problems += _forbidden(loader, parsed)
    if problems:
        raise ConfigError(problems)
    absent = [o.key_or_group for o in parsed if _is_choice(loader, o) and _value_of(o) is None and not o.is_delete()]
    kept = [o for o in parsed if _is_choice(loader, o) or o.is_hydra_override() or o.is_delete()]
    lines = [_line(o) if o in kept else "++" + _line(o).lstrip("+") for o in parsed if o.key_or_group not in absent]
    lines += [f"~{group}" for group in absent]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hydra's notice on a missing `_self_`; the file's own values then come last, as is meant
            cfg = loader.load_configuration(name, lines, run_mode=RunMode.RUN)
            defaults = loader.compute_defaults_list(name, lines, run_mode=RunMode.RUN).defaults
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, loader, groups)) from None
    values = [o for o in parsed if not _is_choice(loader, o) and not o.is_hydra_override()]
    origins = _find_origins(loader, defaults, variables, values)
    with open_dict(cfg):
        del cfg["hydra"]
    unresolved_problems, unresolved = _resolve(cfg, origins)
    data = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    assert isinstance(data, dict)
    choices = _find_choices(defaults, groups)
    off = _sections_off([v for v in variables if not v.is_group], values, origins)
    notes = [f"hardware=auto: {choose_layout()[1]}"] if choices.get("hardware") == "auto" else []
    return Tree({str(k): v for k, v in data.items()}, origins, choices, overrides, notes, off + unresolved_problems, unresolved)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message}. Known options: --config-dir DIR, --config-name NAME, --config-path DIR; everything else is key=value."
        )


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn", default=PRIMARY)
    options = parser.parse_intermixed_args(argv)
    options.config_name = options.config_name.removesuffix(".yaml")
    return options


def _make_loader(options: argparse.Namespace, environ: Mapping[str, str], parsed: list[Override]) -> ConfigLoaderImpl:
    """A loader that looks into the user's directories first, then into the shipped one."""
    search = [str(path).removeprefix("file://") for o in parsed if o.key_or_group == "hydra.searchpath" for path in _value_of(o)]
    asked = [("--config-path", options.config_path)] if options.config_path else []
    asked += [("--config-dir", directory) for directory in options.config_dir]
    asked += [("RLX_CONFIG_DIR", directory) for directory in environ.get("RLX_CONFIG_DIR", "").split(os.pathsep) if directory]
    asked += [("hydra.searchpath", path) for path in search]
    if absent := [(origin, directory) for origin, directory in asked if not Path(directory).is_dir()]:
        raise ConfigError([f"{origin} {directory} is not a directory (seen from {os.getcwd()})." for origin, directory in absent])
    version.setbase("1.3")
    Plugins.instance()
    setup_globals()
    OmegaConf.register_new_resolver("rlx.layout", lambda: choose_layout()[0], replace=True)
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for origin, directory in asked:
        path.append(origin, Path(directory).resolve().as_uri())
    path.append("main", conf_directory().as_uri())
    path.append("schema", "structured://")
    return ConfigLoaderImpl(path)


def _parse_overrides(lines: list[str]) -> list[Override]:
    """Read the overrides; one ConfigError for all that cannot be read."""
    parser, parsed, problems = OverridesParser.create(), [], []
    for line in lines:
        try:
            parsed.append(parser.parse_override(line))
        except HydraException:
            problems.append(
                f"`{line}` cannot be read. Write key=value without spaces around `=`; quote special characters: 'key=\"a, b\"'."
            )
    if problems:
        raise ConfigError(problems)
    return parsed


def _value_of(override: Override) -> Any:
    return None if override.is_sweep_override() else override.value()


def _line(override: Override) -> str:
    """An override as it was written."""
    assert override.input_line is not None  # only overrides made without the parser have none
    return override.input_line


def _is_choice(loader: ConfigLoaderImpl, override: Override) -> bool:
    """Whether an override chooses the option of a group, rather than setting a key."""
    return loader.repository.group_exists(override.key_or_group) and not isinstance(_value_of(override), dict)


def _read_value(variable: Variable) -> Any:
    """A variable's value. Raises ConfigError when it cannot be read."""
    if variable.is_text:
        return None if variable.text == "null" else variable.text
    try:
        return _value_of(OverridesParser.create().parse_override(f"{variable.key}={variable.text}"))
    except HydraException:
        raise ConfigError(f"the value of {variable.name} cannot be read: {variable.text!r}. Write it as on the command line.") from None


def _store_nodes(variables: list[Variable]) -> list[str]:
    """Put the schema and the environment's values where defaults lists find them."""
    node: dict[str, Any] = {}
    problems = []
    for variable in variables:
        try:
            value = _read_value(variable)
        except ConfigError as error:
            problems += error.problems
            continue
        if variable.is_group:
            if variable.key != "experiment":  # comes later in the defaults list; chosen like an override
                node.setdefault("defaults", []).append({f"override /{variable.key}": value})
            continue
        section = node
        *above, last = variable.key.split(".")
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    store = ConfigStore.instance()
    store.store(name=SCHEMA, node=dataclasses.asdict(Config()), package="_global_", provider="rlx")
    store.store(name=VARIABLES, node=node, package="_global_", provider="environment variables")
    return problems


def _wrong_options(loader: ConfigLoaderImpl, groups: list[str], chosen: Iterable[tuple[str, Any, str]]) -> list[str]:
    """One problem for each chosen option that its group does not have."""
    problems = []
    for group, value, variable in chosen:
        if group not in groups:
            continue
        options = loader.get_group_options(group, ObjectType.CONFIG)
        for option in value if isinstance(value, list) else [value]:
            if str(option) in options or (option is None and group in MAY_BE_ABSENT):
                continue
            near = closest(str(option), options, 1)
            origin = f" ({variable})" if variable else ""
            problems.append(
                f"there is no {group}={show(option)}{origin}."
                + (f" Did you mean {group}={near[0]}?" if near else "")
                + f"\nChoices: {', '.join(options)}."
            )
    return problems


def _forbidden(loader: ConfigLoaderImpl, parsed: list[Override]) -> list[str]:
    problems = []
    for o in parsed:
        if o.is_sweep_override():
            problems.append(f"`{_line(o)}` gives several values to one run. A list is written {o.key_or_group}=[a,b].")
        elif o.type == OverrideType.DEL and not _is_choice(loader, o) and not o.key_or_group.startswith(tuple(f"{key}." for key in OPEN)):
            problems.append(
                f"`{_line(o)}`: only keys of {', '.join(OPEN)} can be removed. Set {o.key_or_group}=null where null is allowed."
            )
    return problems


def _short_env_keys(loader: ConfigLoaderImpl, name: str, parsed: list[Override]) -> list[Override]:
    """Read `env.KEY=…` as a key of the run's only environment; `env.id=…` without `env=` takes the preset `custom`."""
    short = [o for o in parsed if o.key_or_group.startswith("env.")]
    if not short:
        return parsed
    rest = [o for o in parsed if o not in short]
    if any(o.key_or_group == "env.id" for o in short) and not any(o.key_or_group == "env" for o in rest):
        rest += _parse_overrides(["env=custom"])
    choices = [_line(o) for o in rest if _is_choice(loader, o)]
    try:
        defaults = loader.compute_defaults_list(name, choices, run_mode=RunMode.RUN).defaults
    except HydraException:
        return rest  # the same failure is explained when the whole is composed
    names = [d.package.removeprefix("envs.") for d in defaults if d.package and d.package.startswith("envs.")]
    if len(names) != 1:
        raise ConfigError(
            f"`{_line(short[0])}` means the run's only environment, but there are {len(names)}: {', '.join(names)}.\n"
            f"Name the one you mean: envs.<name>.{_line(short[0]).removeprefix('env.')}"
        )
    return rest + _parse_overrides([f"envs.{names[0]}.{_line(o).lstrip('+').removeprefix('env.')}" for o in short])


def _find_choices(defaults: list[ResultDefault], groups: list[str]) -> dict[str, str]:
    """The chosen option of each group, as the defaults list has them. What a chosen option takes from its own group is its affair."""
    chosen: dict[str, list[str]] = {}
    for default in defaults:
        group, _, option = (default.config_path or "").rpartition("/")
        parent = (default.parent or "").rpartition("/")[0]
        if group in groups and (group != parent or default.is_self) and option not in chosen.get(group, []):
            chosen.setdefault(group, []).append(option)
    return {group: "+".join(options) for group, options in chosen.items()}


def _find_origins(loader: ConfigLoaderImpl, defaults: list[ResultDefault], variables: list[Variable], values: list[Override]) -> Origins:
    """Walk the defaults list in order and note who set each key last."""
    origins = Origins()
    shipped = conf_directory()
    for default in defaults:
        path = default.config_path
        if path == VARIABLES:
            for variable in variables:
                if not variable.is_group:
                    origins.note(_flatten(_read_value(variable), variable.key), variable.name)
        elif path is not None and path != SCHEMA and not path.startswith("hydra/"):
            loaded = loader.repository.load_config(path)
            assert loaded is not None  # the defaults list holds what was found
            folder = Path(loaded.path.removeprefix("file://"))
            label = f"conf/{path}.yaml" if folder == shipped else str(_relative(folder / f"{path}.yaml"))
            keys = list(_flatten(OmegaConf.to_container(loaded.config, resolve=False), default.package or ""))
            origins.note(keys, label)
            origins.in_files.update(keys)
    for override in values:
        origins.note(_flatten(_value_of(override), override.key_or_group), "command line")
    return origins


def _sections_off(variables: list[Variable], values: list[Override], origins: Origins) -> list[Problem]:
    """Single keys of a section that is null: setting one must not turn the section on."""
    problems = []
    set_keys = [(o.key_or_group, _line(o).lstrip("+")) for o in values] + [(v.key, f"{v.name}={v.text}") for v in variables]
    for section in optional_sections(Config):
        for key, line in set_keys:
            if key.startswith(section + ".") and not any(known.startswith(section + ".") for known in origins.in_files):
                group = section.partition(".")[0]
                hint = f"Choose it: {section.replace('.', '=')}." if group == "logger" else f"The chosen {group} has none."
                problems.append(Problem(f"`{line}` sets a key of {section}, which is null here. {hint}", (section,)))
    return problems


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _flatten(value: Any, prefix: str) -> Iterable[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix


def _resolve(cfg: DictConfig, origins: Origins) -> tuple[list[Problem], list[str]]:
    """Replace interpolations by their values. Those that have none become `???`: one problem for each cause, and all their keys."""
    problems: list[Problem] = []
    keys: list[str] = []
    while True:
        try:
            OmegaConf.to_container(cfg, resolve=True)
            return problems, keys
        except (InterpolationResolutionError, InterpolationKeyError) as error:
            key = error.full_key
            if not key:
                raise
            text: Any = OmegaConf.to_container(cfg, resolve=False)
            for part in key.split("."):
                text = text[part]
            if not isinstance(error, InterpolationToMissingValueError):  # the value that is missing is a problem of its own
                cause = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
                problems.append(Problem(f"`{key}` cannot be resolved: {origins.show(key, text)}.\n{cause}.", (key,)))
            keys.append(key)
            OmegaConf.update(cfg, key, MISSING)


def _explain(error: Exception, loader: ConfigLoaderImpl, groups: list[str]) -> str:
    """Hydra's message, with the cause and without its search path."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith(("Config search path", "See https")):
            lines = lines[:number]
            break
    if error.__cause__ is not None:
        lines += [line for line in str(error.__cause__).splitlines() if line.strip()][:2]
    for group in groups:
        if any(f"Could not load '{group}/" in line for line in lines):
            lines.append(f"Choices: {', '.join(loader.get_group_options(group, ObjectType.CONFIG))}.")
    return "the configuration cannot be composed: " + "\n".join(lines)
