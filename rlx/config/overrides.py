"""Parses a command line: options, choices of groups, values of keys. Each invalid override is reported separately.

Knows hydra's override grammar and which groups and options exist. `composition.py` composes them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource

from rlx.config.environment import Variable
from rlx.config.errors import ConfigError
from rlx.config.near import near_keys
from rlx.config.roots import Root, has_key, key_of, where_else
from rlx.config.secret import conceal
from rlx.config.shipped import shipped_groups
from rlx.config.tree import closest, show, split_optional, type_at

LATE = ("sweeps", "experiment")  # groups composed after the environment variables; a variable for one counts as a command-line choice
MAY_BE_ABSENT = ("experiment", "logger", "slurm", "sweeps")  # groups that may be set to null
OPTIONS = "Known options: --config-dir DIR, --config-name NAME, --config-path DIR; everything else is key=value."
COMBINED = ("env", "experiment", "logger", "sweeps")  # shipped groups of which a configuration may have several options
PATHS = (  # keys that may hold the path of something that exists; the folder of a sweep's run is called loss=grpo,seed=1
    *("resume", "replay", "run.dir", "weights_dir", "model.name", "model.chat_template", "ref.name", "teacher.template"),
    *("trainer.shared", "weight_broadcast.folder", "data.name", "client.endpoints"),
)
OPEN = ("loss", "advantage", "optim", "envs", "eval.envs", "inference.vllm")  # nodes whose keys may be deleted


@dataclass(frozen=True)
class Request:
    """A command line, split into its parts."""

    config_name: str
    directories: tuple[tuple[str, str], ...]  # the user's own directories, as (option or variable that names it, directory)
    lines: tuple[str, ...]  # the overrides, as written
    overrides: tuple[Override, ...]  # the overrides, parsed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. {OPTIONS}")


def read_request(argv: list[str], environ: Mapping[str, str], root: Root) -> Request:
    """Parse a command line. Raises ConfigError that lists every invalid option, override and directory."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn", default=root.command)
    options, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise ConfigError([_unknown_option(option, root) for option in unknown])
    overrides = parse(options.overrides, root.schema)
    asked = [("--config-path", options.config_path)] if options.config_path else []
    asked += [("--config-dir", directory) for directory in options.config_dir]
    asked += [("RLX_CONFIG_DIR", directory) for directory in environ.get("RLX_CONFIG_DIR", "").split(os.pathsep) if directory]
    problems = []
    for o in (o for o in overrides if o.is_hydra_override()):
        value = value_of(o)
        if o.key_or_group != "hydra.searchpath":
            problems.append(
                f"`{line_of(o)}` has no effect on a single run. Remove it: without -m, hydra.searchpath=[DIR] is the only hydra key that "
                "rlx reads."
            )
        elif isinstance(value, list) and all(isinstance(path, str) for path in value):
            asked += [("hydra.searchpath", path.removeprefix("file://")) for path in value]
        else:
            problems.append(f"`hydra.searchpath` must be a list of directories, like [DIR]: {line_of(o)} (command line).")
    problems += [
        f"{origin} {directory} is not a directory (current directory: {Path.cwd()})."
        for origin, directory in asked
        if not Path(directory).is_dir()
    ]
    if problems:
        raise ConfigError(problems)
    overrides = [o for o in overrides if not o.is_hydra_override()]
    return Request(options.config_name.removesuffix(".yaml"), tuple(asked), tuple(options.overrides), tuple(overrides))


def _unknown_option(option: str, root: Root) -> str:
    name, _, value = option.lstrip("-").replace("-", "_").partition("=")
    key = next((near for near in near_keys(root.schema, name) if near.rpartition(".")[2] == name), None)
    hint = f"Write keys without dashes: {key}={value or '…'}." if key else OPTIONS
    return f"there is no option {option}. {hint}"


def parse(lines: list[str], schema: type | None = None) -> list[Override]:
    """Parse overrides. `schema`: its keys of text keep what looks like a number. Raises ConfigError that lists all invalid ones."""
    parsed, problems = [], []
    for line in lines:
        try:
            parsed.append(copy.copy(_with_text(_parse_plain(line), line, schema)))
        except HydraException:
            key, _, value = line.partition("=")
            absent = f" {value} does not exist; a path to be made needs quotes." if key.lstrip("+") in PATHS and "/" in value else ""
            problems.append(
                f"`{conceal(line)}` cannot be parsed. Write key=value without spaces around `=`, and quote special characters: "
                f"'key=\"a, b\"'.{absent}"
            )
    if problems:
        raise ConfigError(problems)
    return parsed


def _parse_plain(line: str) -> Override:
    """An override whose value may be plain text where hydra's grammar needs quotes. Its line then has them."""
    key, _, value = line.partition("=")
    if not value.isascii() and re.fullmatch(r"[\w./~@:+-]+", value):  # hydra's grammar knows no such letters without quotes
        return _parse(f'{key}="{value}"')
    if key.lstrip("+") not in PATHS or value == "null" or "${" in value or "\\" in value or not _exists(value):
        return _parse(line)
    try:
        parsed = _parse(line)
        if value_of(parsed) == value:
            return parsed
    except HydraException:
        pass
    escaped = value.replace("'", "\\'")
    return _parse(f"{key}='{escaped}'")


def _with_text(override: Override, line: str, schema: type | None) -> Override:
    """An override whose value is the text of the line, where hydra reads a number (2024_06_01, 1e3, 007) and the key holds text."""
    key, _, text = line.partition("=")
    value = value_of(override)
    if isinstance(value, int | float) and not isinstance(value, bool) and str(value) != text and kind_of(schema, key.lstrip("+")) is str:
        return _parse(f"{key}='{text}'")
    return override


def kind_of(schema: type | None, key: str) -> Any:
    """The type of a key without None; `Any` if the schema does not say it."""
    try:
        return Any if schema is None else split_optional(type_at(schema, key))[0]
    except KeyError:
        return Any


def _exists(path: str) -> bool:
    try:
        return path != "" and Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # a name that is too long, the home of an unknown user
        return False


@functools.lru_cache(maxsize=4096)
def _parse(line: str) -> Override:
    """Hydra's parser takes a millisecond a line. The runs of a sweep share most lines."""
    return OverridesParser.create().parse_override(line)


def line_of(override: Override) -> str:
    """An override, as written."""
    assert override.input_line is not None  # only overrides made without the parser have none
    return override.input_line


def value_of(override: Override) -> Any:
    """An override's value; None for a sweep, which is refused elsewhere."""
    return None if override.is_sweep_override() else override.value()


def read_variable(variable: Variable) -> Any:
    """A variable's value. Raises ConfigError when it cannot be parsed."""
    if variable.is_text:
        return None if variable.text == "null" else variable.text
    try:
        override = _parse_plain(f"{variable.key}={variable.text}")
    except HydraException:
        raise ConfigError(
            f"the value of {variable.name} cannot be parsed: {conceal(variable.text)!r}. Write it as on the command line."
        ) from None
    if override.is_sweep_override():
        raise ConfigError(
            f"`{variable.name}={conceal(variable.text)}` gives one run several values. {_for_a_list(variable.key, f'{variable.name}=')}"
            f"For one run per value, unset it and write -m {variable.key}=VALUE,VALUE on the command line."
        )
    return copy.deepcopy(override.value())


def _for_a_list(key: str, before: str, schema: type | None = None) -> str:
    """How to write a list, or a text with commas. Empty for a key that holds neither; a group may have one option only."""
    kind = kind_of(schema, key)
    if kind is str:
        return f"For one text with a comma, quote it: '{before}\"a,b\"'. "
    if kind in (int, float, bool):
        return ""
    return f"A configuration has one {key}. " if chooses_one(key) else f"For a list, write {before}[a,b]. "


def chooses_one(group: str) -> bool:
    """Whether a key is a shipped group of which a configuration has one option. A group of the user's own may have several."""
    return group in shipped_groups() and group not in COMBINED


class Groups:
    """The groups and options in a set of directories, without the groups of other commands."""

    def __init__(self, sources: list[ConfigSource], root: Root) -> None:
        self.sources, self.schema = sources, root.schema
        names = {name for source in sources for name in source.list("", ObjectType.GROUP)}
        lacking = {name: where_else(root.schema, key_of(name)) for name in names if not has_key(root.schema, key_of(name))}
        self.foreign = {name: hint for name, hint in lacking.items() if hint}  # group -> a sentence that names its command
        self.names = sorted(names - self.foreign.keys() - {"hydra"})
        self._options: dict[str, list[str]] = {}

    def options(self, group: str) -> list[str]:
        """Names of the files of a group; of the top level when `group` is empty."""
        if group not in self._options:
            there = [source for source in self.sources if not group or source.is_group(group)]
            self._options[group] = sorted({name for source in there for name in source.list(group, ObjectType.CONFIG)})
        return self._options[group]

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses an option of a group; otherwise it sets a key."""
        return override.key_or_group in self.names and not isinstance(value_of(override), dict)

    def problems(self, overrides: Iterable[Override], variables: Iterable[Variable]) -> list[str]:
        """Problems of group choices, sweeps and deletions."""
        overrides = list(overrides)
        found = [
            text
            for o in overrides
            if self.is_choice(o) and not o.is_delete() and not o.is_sweep_override()
            for text in self.wrong(o.key_or_group, value_of(o), "command line")
        ]
        found += [text for v in variables if v.is_group for text in self.wrong(v.key, read_variable(v), v.name)]
        for position, o in enumerate(overrides):
            key, line = o.key_or_group, conceal(line_of(o))
            inside = next((other for other in overrides[position + 1 :] if other.key_or_group.startswith(f"{key}.")), None)
            if inside is not None and not self.is_choice(o) and not o.is_delete() and not isinstance(value_of(o), dict | NoneType):
                found.append(
                    f"`{line}` and `{conceal(line_of(inside))}` exclude each other: {key} is a value or a section. Remove one of them."
                )
            if key in self.foreign and not isinstance(value_of(o), dict):
                found.append(f"`{line}`: this command has no group {key}. {self.foreign[key]}")
            elif o.is_sweep_override():
                found.append(
                    f"`{line}` gives one run several values. {_for_a_list(key, f'{key}=', self.schema)}For one run per value, add -m."
                )
            elif o.is_delete() and key in self.names and key not in MAY_BE_ABSENT:
                found.append(f"`{line}`: a configuration needs one option of {key}. Choices: {', '.join(self.options(key))}.")
            elif o.type == OverrideType.DEL and not self.is_choice(o) and not key.startswith(tuple(f"{each}." for each in OPEN)):
                found.append(f"`{line}`: only keys of {', '.join(OPEN)} can be removed. If the key allows null, set {key}=null.")
        return found

    def wrong(self, group: str, value: Any, origin: str) -> Iterable[str]:
        """A problem for each option in `value` that the group does not have, and for several where one is chosen.

        `origin` says where they were chosen.
        """
        options = self.options(group)
        if isinstance(value, list) and len(value) > 1 and chooses_one(group):
            yield (
                f"{group}={show(value)} ({origin}) chooses several options, but a configuration has one {group}.\n"
                f"Choose one: {group}={show(value[0])}. For one run per option: -m {group}={','.join(map(show, value))}."
            )
        for option in value if isinstance(value, list) else [value]:
            if str(option) in options or (value is None and group in MAY_BE_ABSENT):
                continue
            near = closest(str(option), options, 1)
            hint = f" Did you mean {group}={near[0]}?" if near else ""
            yield f"there is no {group}={show(option)} ({origin}).{hint}\nChoices: {', '.join(options)}."

    def lines(self, overrides: Iterable[Override]) -> list[Override]:
        """The overrides in the form for hydra: a value is set whether or not the key exists, a null choice becomes a deletion."""
        lines = []
        for o in overrides:
            if not self.is_choice(o):
                lines.append(line_of(o) if o.is_delete() else "++" + line_of(o).lstrip("+"))
            else:
                known = o.key_or_group in shipped_groups()  # in the defaults list of train.yaml, so `+` is not needed
                line = line_of(o).lstrip("+") if known else line_of(o)
                if o.package is not None:  # an option for another place than its file names, such as env@eval.envs.math=math
                    line = "+" + line.lstrip("+")
                lines.append(line if o.is_delete() or value_of(o) is not None else f"~{o.key_or_group}")
        return parse(lines)


def expand_env_keys(overrides: list[Override], envs_of: Callable[[list[Override]], list[str]]) -> list[Override]:
    """Rewrite `env.KEY=…` as a key of the run's only environment. `env.id=…` without `env=` chooses the preset `custom`.

    `envs_of` returns the names of the environments that a list of overrides chooses.
    """
    short = [o for o in overrides if o.key_or_group.startswith("env.")]
    if not short:
        return overrides
    rest = [o for o in overrides if o not in short]
    if any(o.key_or_group == "env.id" for o in short) and not any(o.key_or_group == "env" for o in rest):
        rest += parse(["env=custom"])
    names = envs_of(rest)
    if len(names) != 1:
        raise ConfigError(
            f"`{line_of(short[0])}` needs a run with exactly one environment, but this run has {len(names)}: {', '.join(names)}.\n"
            f"Name the one you mean: envs.<name>.{line_of(short[0]).removeprefix('env.')}"
        )
    return rest + parse([f"envs.{names[0]}.{line_of(o).lstrip('+').removeprefix('env.')}" for o in short])
