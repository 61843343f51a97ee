"""Expands the command line of a sweep into the overrides of its runs, with hydra's grammar: `loss=grpo,gspo seed=range(3)`.

The swept values come from the command line and from `hydra.sweeper.params` of the chosen files (`sweeps=losses`); the command line
wins. `load.compose` then composes and checks each run, like any single run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlx.config.again import starts_from_a_run
from rlx.config.composition import compose_tree
from rlx.config.errors import ConfigError
from rlx.config.overrides import line_of, parse, read_request
from rlx.config.roots import TRAIN, Root
from rlx.config.sources import make_loader
from rlx.config.tree import secret_keys, show

LONGEST = 120  # maximum characters of a folder's name
OF_THE_SWEEP = ("run.name", "run.dir")  # these name the sweep; its runs are in its folder
REWARD = {  # a sweeper that minimises unless told otherwise -> what tells it to find the largest reward
    "optuna": ("hydra.sweeper.direction", "maximize"),
    "ax": ("hydra.sweeper.ax_config.experiment.minimize", "false"),
    "nevergrad": ("hydra.sweeper.optim.maximize", "true"),
}
NOT_PART = ("launcher", "slurm", "dry_run", "clean")  # keys that do not make it a different sweep


@dataclass(frozen=True)
class Line:
    """One run of a sweep."""

    name: str  # name of its folder: `loss=grpo,seed=1`
    swept: tuple[str, ...]  # the overrides in which it differs from the other runs
    argv: tuple[str, ...]  # the whole command line of the run


@dataclass(frozen=True)
class Sweep:
    """A command line with `-m`, expanded."""

    name: str  # name of its folder, unless the command line gives run.dir
    directory: str | None  # run.dir on the command line
    elements: tuple[Line, ...]
    sweeper: str | None  # a hydra sweeper other than `basic`; it proposes the runs itself, so `elements` is empty
    options: tuple[str, ...] = ()  # options of that sweeper: hydra.sweeper.n_trials=20
    params: tuple[str, ...] = ()  # the swept overrides, for that sweeper
    argv: tuple[str, ...] = ()  # the arguments that all runs share


def is_sweep(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether the command line or the environment asks for several runs: with `-m`, or with a file of the group sweeps."""
    if {"-m", "--multirun"} & set(argv):
        return True
    environ = os.environ if environ is None else environ
    lines = [part for part in argv if part.lstrip("+").startswith("sweeps=")]
    if lines:
        return lines[-1].partition("=")[2] != "null"
    return environ.get("RLX_SWEEPS", "null") != "null" and not starts_from_a_run(argv, environ, TRAIN)


def expand(argv: Sequence[str], environ: Mapping[str, str] | None = None, root: Root = TRAIN) -> Sweep:
    """The runs of a sweep. Raises ConfigError when the line cannot be parsed, sweeps nothing, or gives two runs the same name."""
    environ = os.environ if environ is None else environ
    argv = [part for part in argv if part not in ("-m", "--multirun")]
    hydra_lines = [p for p in argv if p.lstrip("+").startswith(("hydra/", "hydra.")) and not p.startswith("hydra.searchpath")]
    argv = [part for part in argv if part not in hydra_lines]
    request = read_request(argv, environ, root)
    named = {o.key_or_group: o.value() for o in request.overrides if o.key_or_group in OF_THE_SWEEP and not o.is_sweep_override()}
    options = [part for part in argv if part not in request.lines]  # --config-dir and similar
    static = [o for o in request.overrides if not o.is_sweep_override() and o.key_or_group not in OF_THE_SWEEP]
    shared = [*options, *map(line_of, static)]

    tree = compose_tree(shared, environ, root)
    of_file = dict(tree.hydra.get("sweeper") or {})
    params = parse([f"{key}={value}" for key, value in (of_file.pop("params", None) or {}).items()])
    chosen = {o.key_or_group for o in request.overrides}
    swept = [o for o in params if o.key_or_group not in chosen] + [o for o in request.overrides if o.is_sweep_override()]
    fixed = [line_of(o) for o in swept if not o.is_sweep_override()]  # a file may give a key only one value
    swept = [o for o in swept if o.is_sweep_override()]
    if hidden := [key for key in sorted(secret_keys(root.schema)) if any(_sets(o, key) for o in swept)]:
        raise ConfigError(
            f"{hidden[0]} is secret, but the directories of a sweep are named after the swept values. Give it only one value."
        )
    name = str(named.get("run.name") or _name(static, swept))
    directory = str(named["run.dir"]) if "run.dir" in named else None
    sweeper = next((line.partition("=")[2] for line in hydra_lines if line.startswith("hydra/sweeper=")), "basic")
    if sweeper != "basic":
        lines = [f"++hydra.sweeper.{key}={_written(value)}" for key, value in of_file.items()]
        hydra_lines = [*lines, *hydra_lines]  # the command line wins over the file
        if sweeper in REWARD:
            _require_direction(sweeper, of_file, hydra_lines)
        return Sweep(name, directory, (), sweeper, tuple(hydra_lines), tuple(map(line_of, swept)), (*shared, *fixed))
    if not swept:
        raise ConfigError(
            "-m starts several runs, but nothing here has several values.\nGive a key or a group several values (loss=grpo,gspo or "
            "seed=1,2,3), or choose a file of the group sweeps: sweeps=losses."
        )
    elements = tuple(Line(element_name(each), tuple(each), (*shared, *fixed, *each)) for each in _product(swept))
    seen: dict[str, Line] = {}
    for element in elements:
        if element.name in seen:
            raise ConfigError(
                f"two runs of the sweep have the same directory {element.name}: {' '.join(seen[element.name].swept)} and "
                f"{' '.join(element.swept)}.\nGive each value only once."
            )
        seen[element.name] = element
    return Sweep(name, directory, elements, None)


def _require_direction(sweeper: str, of_file: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Raise ConfigError if neither the chosen files nor the command line say what a sweeper does with the reward: it would minimise it."""
    key, value = REWARD[sweeper]
    in_file: Any = of_file
    for part in key.removeprefix("hydra.sweeper.").split("."):
        in_file = in_file.get(part) if isinstance(in_file, Mapping) else None
    if in_file is None and not any(line.lstrip("+").startswith(f"{key}=") for line in lines):
        raise ConfigError(
            f"hydra/sweeper={sweeper} looks for the smallest value unless it is told otherwise, and the value of a run is its reward.\n"
            f"  fix: {key}={value}"
        )


def _written(value: Any) -> str:
    """A value of a file, as hydra's grammar reads it on the command line."""
    if isinstance(value, str):
        escaped = value.replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {_written(inner)}" for name, inner in value.items()) + "}"
    return "[" + ",".join(map(_written, value)) + "]" if isinstance(value, list) else show(value)


def _sets(override: Override, key: str) -> bool:
    """Whether an override has values for `key`: it names the key, or a section with the key's last name in a value."""
    section = override.key_or_group
    return section == key or (key.startswith(f"{section}.") and re.search(rf"\b{key.rpartition('.')[2]}\b", line_of(override)) is not None)


def element_name(swept: Sequence[str]) -> str:
    """`loss=grpo,seed=1`: sorted by key, usable as a folder's name."""
    name = re.sub(r"[^\w.,=+@:\[\]-]+", "_", ",".join(sorted(line.lstrip("+") for line in swept)))
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - 9]}-{hashlib.sha256(','.join(sorted(swept)).encode()).hexdigest()[:8]}"
    return name


def _name(static: list[Override], swept: list[Override]) -> str:
    """`losses` for `sweeps=losses`, else the swept keys. A hash of all other overrides gives different sweeps different folders."""
    files = [str(o.value()) for o in static if o.key_or_group == "sweeps"]
    rest = sorted(line_of(o) for o in static if o.key_or_group != "sweeps" and o.key_or_group.split(".")[0] not in NOT_PART)
    keys = sorted(o.key_or_group for o in swept)
    base = "+".join(files) if files else "+".join(keys).replace("/", "_")
    rest += [] if files else sorted(line_of(o) for o in swept)
    return f"{base}-{hashlib.sha256(chr(0).join(rest).encode()).hexdigest()[:6]}" if rest else base


def _product(swept: list[Override]) -> list[list[str]]:
    try:
        parser = OverridesParser.create(config_loader=make_loader([]))  # choices like loss=glob(*) need the loader
        (elements,) = BasicSweeper.split_arguments(parser.parse_overrides([line_of(o) for o in swept]), None)
    except HydraException as error:
        raise ConfigError(f"the sweep cannot be expanded: {error}") from None
    return elements
