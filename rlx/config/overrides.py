"""Reads a command line: options, choices of groups, values of keys. Every line that cannot be meant is a problem of its own.

Knows hydra's override grammar and which groups and options exist; nothing of what is composed from them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource

from rlx.config.environment import Variable
from rlx.config.errors import ConfigError
from rlx.config.roots import Root, has_key, key_of, where_else
from rlx.config.secret import conceal
from rlx.config.shipped import shipped_groups
from rlx.config.tree import closest, near_keys, show

LATE = ("sweeps", "experiment")  # groups that come after the environment variables: theirs are read as if on the command line
MAY_BE_ABSENT = ("experiment", "logger", "slurm", "sweeps")  # groups that may be set to null
OPTIONS = "Known options: --config-dir DIR, --config-name NAME, --config-path DIR; everything else is key=value."
OPEN = ("loss", "advantage", "optim", "envs", "inference.vllm")  # nodes whose keys may be deleted


@dataclass(frozen=True)
class Request:
    """What a command line asks for, as written."""

    config_name: str
    directories: tuple[tuple[str, str], ...]  # (who names it, directory) of the user's own directories
    lines: tuple[str, ...]  # the overrides
    overrides: tuple[Override, ...]  # the same, read


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. {OPTIONS}")


def read_request(argv: list[str], environ: Mapping[str, str], root: Root) -> Request:
    """Read a command line. Raises ConfigError with every option, override and directory that cannot be read."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn", default=root.command)
    options, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise ConfigError([_unknown_option(option, root) for option in unknown])
    overrides = parse(options.overrides)
    asked = [("--config-path", options.config_path)] if options.config_path else []
    asked += [("--config-dir", directory) for directory in options.config_dir]
    asked += [("RLX_CONFIG_DIR", directory) for directory in environ.get("RLX_CONFIG_DIR", "").split(os.pathsep) if directory]
    problems = []
    for o in (o for o in overrides if o.is_hydra_override()):
        value = value_of(o)
        if o.key_or_group != "hydra.searchpath":
            problems.append(f"`{line_of(o)}` changes nothing: of hydra's keys one run reads hydra.searchpath=[DIR]; others are for -m.")
        elif isinstance(value, list) and all(isinstance(path, str) for path in value):
            asked += [("hydra.searchpath", path.removeprefix("file://")) for path in value]
        else:
            problems.append(f"`hydra.searchpath` must be a list of directories, like [DIR]: {line_of(o)} (command line).")
    problems += [
        f"{origin} {directory} is not a directory (seen from {Path.cwd()})." for origin, directory in asked if not Path(directory).is_dir()
    ]
    if problems:
        raise ConfigError(problems)
    overrides = [o for o in overrides if not o.is_hydra_override()]
    return Request(options.config_name.removesuffix(".yaml"), tuple(asked), tuple(options.overrides), tuple(overrides))


def _unknown_option(option: str, root: Root) -> str:
    name, _, value = option.lstrip("-").replace("-", "_").partition("=")
    key = next((near for near in near_keys(root.schema, name) if near.rpartition(".")[2] == name), None)
    hint = f"Keys are written without dashes: {key}={value or '…'}." if key else OPTIONS
    return f"there is no option {option}. {hint}"


def parse(lines: list[str]) -> list[Override]:
    """Read overrides. Raises ConfigError with all that cannot be read."""
    parser, parsed, problems = OverridesParser.create(), [], []
    for line in lines:
        try:
            parsed.append(parser.parse_override(line))
        except HydraException:
            problems.append(
                f"`{conceal(line)}` cannot be read. Write key=value without spaces around `=`, and quote special characters: "
                "'key=\"a, b\"'."
            )
    if problems:
        raise ConfigError(problems)
    return parsed


def line_of(override: Override) -> str:
    """An override as it was written."""
    assert override.input_line is not None  # only overrides made without the parser have none
    return override.input_line


def value_of(override: Override) -> Any:
    """An override's value; None for a sweep, which is refused elsewhere."""
    return None if override.is_sweep_override() else override.value()


def read_variable(variable: Variable) -> Any:
    """A variable's value. Raises ConfigError when it cannot be read."""
    if variable.is_text:
        return None if variable.text == "null" else variable.text
    try:
        return value_of(OverridesParser.create().parse_override(f"{variable.key}={variable.text}"))
    except HydraException:
        raise ConfigError(f"the value of {variable.name} cannot be read: {variable.text!r}. Write it as on the command line.") from None


class Groups:
    """The groups and options that a set of directories has, without the groups of other commands."""

    def __init__(self, sources: list[ConfigSource], root: Root) -> None:
        self.sources = sources
        names = {name for source in sources for name in source.list("", ObjectType.GROUP)}
        lacking = {name: where_else(root.schema, key_of(name)) for name in names if not has_key(root.schema, key_of(name))}
        self.foreign = {name: hint for name, hint in lacking.items() if hint}  # with the command that has it, in words
        self.names = sorted(names - self.foreign.keys() - {"hydra"})

    def options(self, group: str) -> list[str]:
        """Names of the files of a group; of the top level for an empty name."""
        found = {name for source in self.sources if not group or source.is_group(group) for name in source.list(group, ObjectType.CONFIG)}
        return sorted(found)

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses an option of a group, rather than setting a key."""
        return override.key_or_group in self.names and not isinstance(value_of(override), dict)

    def problems(self, overrides: Iterable[Override], variables: Iterable[Variable]) -> list[str]:
        """What is wrong with choices, sweeps and deletions."""
        overrides = list(overrides)
        found = [
            text
            for o in overrides
            if self.is_choice(o) and not o.is_delete()
            for text in self.wrong(o.key_or_group, value_of(o), "command line")
        ]
        found += [text for v in variables if v.is_group for text in self.wrong(v.key, read_variable(v), v.name)]
        for o in overrides:
            key, line = o.key_or_group, conceal(line_of(o))
            if key in self.foreign and not isinstance(value_of(o), dict):
                found.append(f"`{line}`: there is no group {key} here. {self.foreign[key]}")
            elif o.is_sweep_override():
                found.append(f"`{line}` gives several values to one run. A list is written {key}=[a,b]; -m runs each.")
            elif o.is_delete() and key in self.names and key not in MAY_BE_ABSENT:
                found.append(f"`{line}`: a configuration needs one option of {key}. Choices: {', '.join(self.options(key))}.")
            elif o.type == OverrideType.DEL and not self.is_choice(o) and not key.startswith(tuple(f"{each}." for each in OPEN)):
                found.append(f"`{line}`: only keys of {', '.join(OPEN)} can be removed. Set {key}=null where null is allowed.")
        return found

    def wrong(self, group: str, value: Any, origin: str) -> Iterable[str]:
        """A problem for each option in `value` that the group does not have; `origin` says who chose it."""
        options = self.options(group)
        for option in value if isinstance(value, list) else [value]:
            if str(option) in options or (value is None and group in MAY_BE_ABSENT):
                continue
            near = closest(str(option), options, 1)
            hint = f" Did you mean {group}={near[0]}?" if near else ""
            yield f"there is no {group}={show(option)} ({origin}).{hint}\nChoices: {', '.join(options)}."

    def lines(self, overrides: Iterable[Override]) -> list[Override]:
        """The overrides as hydra should apply them: values set whether or not the key is there, null choices taken out."""
        lines = []
        for o in overrides:
            if not self.is_choice(o):
                lines.append(line_of(o) if o.is_delete() else "++" + line_of(o).lstrip("+"))
            else:
                known = o.key_or_group in shipped_groups()  # in the defaults list of train.yaml, so `+` adds nothing
                line = line_of(o).lstrip("+") if known else line_of(o)
                lines.append(line if o.is_delete() or value_of(o) is not None else f"~{o.key_or_group}")
        return parse(lines)


def expand_env_keys(overrides: list[Override], envs_of: Callable[[list[Override]], list[str]]) -> list[Override]:
    """Read `env.KEY=…` as a key of the run's only environment; `env.id=…` without `env=` takes the preset `custom`.

    `envs_of` tells the names of the environments that some overrides choose.
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
            f"`{line_of(short[0])}` means the run's only environment, but there are {len(names)}: {', '.join(names)}.\n"
            f"Name the one you mean: envs.<name>.{line_of(short[0]).removeprefix('env.')}"
        )
    return rest + parse([f"envs.{names[0]}.{line_of(o).lstrip('+').removeprefix('env.')}" for o in short])
