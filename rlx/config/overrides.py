"""Parses a command line: options, choices of groups, values of keys. Each invalid override is reported separately.

Knows hydra's override grammar and which groups and options exist. `composition.py` composes them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlx.config.environment import Variable
from rlx.config.errors import ConfigError
from rlx.config.nested import own_name
from rlx.config.presets import shipped_groups
from rlx.config.roots import Root, has_key, key_of, where_else
from rlx.config.search_path import folders_of
from rlx.config.secret import redact
from rlx.config.validate import closest, show, split_optional, type_at

LATE = ("sweeps", "experiment")  # groups composed after the environment variables; a variable for one counts as a command-line choice
MAY_BE_ABSENT = ("experiment", "logger", "slurm", "sweeps")  # groups that may be set to null
COMBINED = ("env", "experiment", "logger", "sweeps")  # shipped groups of which a configuration may have several options


@dataclass(frozen=True)
class CommandLine:
    """A command line, split into its parts."""

    config_name: str
    directories: tuple[tuple[str, str], ...]  # the user's own directories, as (option or variable that names it, directory)
    lines: tuple[str, ...]  # the overrides, as written
    overrides: tuple[Override, ...]  # the overrides, parsed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Options are --config-dir DIR, --config-name NAME, --config-path DIR; write keys without dashes.")


def read_request(argv: list[str], environ: Mapping[str, str], root: Root) -> CommandLine:
    """Parse a command line. Raises ConfigError that lists every invalid override and directory, or names an unknown option."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn", default=root.command)
    options = parser.parse_intermixed_args(with_benchmarks(argv, environ, root))
    overrides = parse(options.overrides, root.schema)
    asked = [("--config-dir", directory) for directory in (*filter(None, [options.config_path]), *options.config_dir)]
    asked += [("RLX_CONFIG_DIR", directory) for directory in environ.get("RLX_CONFIG_DIR", "").split(os.pathsep) if directory]
    problems = []
    for o in (o for o in overrides if o.is_hydra_override()):
        if o.key_or_group == "hydra.searchpath" and isinstance(value_of(o), list):
            asked += [("hydra.searchpath", str(path).removeprefix("file://")) for path in value_of(o)]
        else:
            problems.append(f"`{line_of(o)}` has no effect: hydra.searchpath=[DIR] is the only hydra key that rlx reads.")
    problems += [
        f"{origin} {directory} is not a directory (current directory: {Path.cwd()})."
        for origin, directory in asked
        if not Path(directory).is_dir()
    ]
    if problems:
        raise ConfigError(problems)
    values = tuple(o for o in overrides if not o.is_hydra_override())
    return CommandLine(options.config_name.removesuffix(".yaml"), tuple(asked), tuple(options.overrides), values)


def with_benchmarks(argv: Sequence[str], environ: Mapping[str, str], root: Root) -> list[str]:
    """A command line with `env=` for the `bench=` of `rlx eval`: environments, of which all examples count unless a key says less."""
    if root.command != "eval" or not any(part.startswith("bench=") for part in argv):
        return list(argv)
    whole = [] if "RLX_NUM_EXAMPLES" in environ else ["num_examples=null"]  # a later one wins
    return [*whole, *(re.sub(r"^bench=", "env=", part) for part in argv)]


def parse(lines: Iterable[str], schema: type | None = None) -> list[Override]:
    """Parse overrides. `schema`: its keys of text keep what looks like a number. Raises ConfigError that lists all invalid ones."""
    parsed, problems = [], []
    for line in lines:
        try:
            override = copy.copy(_with_text(_parse(line), line, schema))
            name = own_name(override.key_or_group)
            override.key_or_group = name if schema is None or has_key(schema, name) else override.key_or_group
            parsed.append(override)
        except HydraException:
            problems.append(
                f"`{redact(line)}` cannot be parsed. Write key=value without spaces around `=`, and quote special characters: "
                "'key=\"a, b\"'."
            )
    if problems:
        raise ConfigError(problems)
    return parsed


def _with_text(override: Override, line: str, schema: type | None) -> Override:
    """An override whose value is the text of the line, where hydra reads a number (2024_06_01, 1e3, 007) and the key holds text."""
    key, _, text = line.partition("=")
    value, name = value_of(override), key.lstrip("+")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    holds_text = is_number and schema is not None and has_key(schema, name) and split_optional(type_at(schema, name))[0] is str
    return _parse(f"{key}='{text}'") if holds_text else override


@functools.lru_cache(maxsize=4096)
def _parse(line: str) -> Override:
    """Hydra's parser takes a millisecond a line. The runs of a sweep share most lines.

    Its grammar wants quotes around letters beyond ASCII, which many users have in their paths, and around commas, which the folders of a
    sweep's runs have.
    """
    key, _, text = line.partition("=")
    plain = text.isprintable() and not set(text) & set("'\"\\[]{}()")
    plain = plain and (Path(text).exists() if "," in text else not text.isascii())
    return OverridesParser.create().parse_override(f"{key}='{text}'" if plain else line)


def line_of(override: Override) -> str:
    """An override, as written."""
    assert override.input_line is not None  # only overrides made without the parser have none
    return override.input_line


def value_of(override: Override) -> Any:
    """An override's value; None for a sweep, which is refused elsewhere."""
    return None if override.is_sweep_override() else copy.deepcopy(override.value())


def read_variable(variable: Variable) -> Any:
    """A variable's value. Raises ConfigError when it cannot be parsed."""
    if variable.is_text:
        return None if variable.text == "null" else variable.text
    (override,) = parse([f"{variable.key}={variable.text}"])
    if override.is_sweep_override():
        raise ConfigError(f"{variable.name}={redact(variable.text)} gives one run several values. {one_each(variable.key)}")
    return value_of(override)


def one_each(key: str) -> str:
    """How to give a key or a group several values."""
    lists = "" if chooses_one(key) else f"For a list write {key}=[a,b], for text with a comma {key}='\"a,b\"'. "
    return f"{lists}For one run per value: -m {key}=a,b."


def chooses_one(group: str) -> bool:
    """Whether a key is a shipped group of which a configuration has one option. A group of the user's own may have several."""
    return group in shipped_groups() and group not in COMBINED


class Groups:
    """The groups and options that a loader finds, without the groups of other commands."""

    def __init__(self, loader: ConfigLoader, root: Root) -> None:
        self.schema, self.folders = root.schema, folders_of(loader)  # the last one is around `conf/`
        names = {*shipped_groups(), *(name for folder in self.folders[:-1] for name in folder.list("", ObjectType.GROUP))}
        self.names = sorted(name for name in names if self._is_ours(key_of(name)))

    def _is_ours(self, key: str) -> bool:
        return has_key(self.schema, key) or not where_else(self.schema, key)

    def of_command(self, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """Values without those for other commands: `model=tiny` sets a learning rate for every command that uses the model."""
        return {
            name: self.of_command(value, f"{prefix}{name}.") if isinstance(value, dict) else value
            for name, value in values.items()
            if self._is_ours(f"{prefix}{name}")
        }

    def options(self, group: str) -> list[str]:
        """Names of the files of a group."""
        there = [folder for folder in self.folders if folder.is_group(group)]
        return sorted({name for folder in there for name in folder.list(group, ObjectType.CONFIG)})

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses an option of a group; otherwise it sets a key."""
        return override.key_or_group in self.names and not isinstance(value_of(override), dict)

    def problems(self, overrides: Iterable[Override], variables: Iterable[Variable]) -> list[str]:
        """Problems of group choices, sweeps and deletions."""
        found = []
        for o in overrides:
            group, line = o.key_or_group, redact(line_of(o))
            if o.is_sweep_override():
                found.append(f"`{line}` gives one run several values. {one_each(group)}")
            elif self.is_choice(o) and not (o.is_delete() and group in MAY_BE_ABSENT):
                found += self.wrong(group, value_of(o), "command line")
        return found + [text for v in variables if v.is_group for text in self.wrong(v.key, read_variable(v), v.name)]

    def wrong(self, group: str, value: Any, origin: str) -> Iterable[str]:
        """A problem for each option in `value` that the group does not have. `origin` says where they were chosen."""
        options = self.options(group)
        for option in value if isinstance(value, list) else [value]:
            if str(option) not in options and not (value is None and group in MAY_BE_ABSENT):
                near = closest(str(option), options, 1)
                hint = f" Did you mean {group}={near[0]}?" if near else ""
                yield f"there is no {group}={show(option)} ({origin}).{hint}\nChoices: {', '.join(options)}."

    def line(self, override: Override) -> str:
        """A choice in the form for hydra: a null choice becomes a deletion, and groups of the files to start from need no `+`."""
        line = line_of(override)
        if override.package is not None:  # an option for another place than its file names, such as env@eval.envs.math=math
            return "+" + line.lstrip("+")
        if not override.is_delete() and value_of(override) is None:
            return f"~{override.key_or_group}"
        return line.lstrip("+") if override.key_or_group in shipped_groups() else line
