"""Expands the command line of a sweep into the overrides of its elements, with hydra's grammar: `loss=grpo,gspo seed=range(3)`.

What is swept comes from the command line and from `hydra.sweeper.params` of the chosen files (`sweeps=losses`); the command line wins.
The elements are composed and checked one by one, by `load.compose`, like any single run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlx.config.composition import compose_tree, make_loader
from rlx.config.errors import ConfigError
from rlx.config.overrides import line_of, parse, read_request
from rlx.config.roots import TRAIN, Root
from rlx.config.tree import secret_keys

LONGEST = 120  # characters of a folder's name
OF_THE_SWEEP = ("run.name", "run.dir")  # these name the sweep, and its elements lie in its folder
NOT_PART = ("launcher", "slurm", "dry_run", "clean")  # keys that make no other sweep of it


@dataclass(frozen=True)
class Element:
    """One run of a sweep."""

    name: str  # of its folder: `loss=grpo,seed=1`
    swept: tuple[str, ...]  # the overrides that make it differ from the others
    argv: tuple[str, ...]  # the whole command line of the run


@dataclass(frozen=True)
class Sweep:
    """A command line with `-m`, expanded."""

    name: str  # of its folder, when the command line names none
    directory: str | None  # run.dir of the command line
    elements: tuple[Element, ...]
    sweeper: str | None  # of hydra, where it is not the usual one: then there are no elements, and it makes them
    options: tuple[str, ...] = ()  # the sweeper's own: hydra.sweeper.n_trials=20
    params: tuple[str, ...] = ()  # the sweep overrides, for that sweeper
    argv: tuple[str, ...] = ()  # what all runs share


def is_sweep(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether a command line, or the environment, asks for several runs: by `-m`, or by a file of the group sweeps."""
    if {"-m", "--multirun"} & set(argv):
        return True
    environ = os.environ if environ is None else environ
    lines = [part for part in argv if part.lstrip("+").startswith("sweeps=")]
    chosen = lines[-1].partition("=")[2] if lines else environ.get("RLX_SWEEPS", "null")
    return chosen != "null"


def expand(argv: Sequence[str], environ: Mapping[str, str] | None = None, root: Root = TRAIN) -> Sweep:
    """The elements of a sweep. Raises ConfigError when the line cannot be read, sweeps nothing, or names two elements alike."""
    environ = os.environ if environ is None else environ
    argv = [part for part in argv if part not in ("-m", "--multirun")]
    hydra_lines = [part for part in argv if part.startswith(("hydra/", "hydra.")) and not part.startswith("hydra.searchpath")]
    argv = [part for part in argv if part not in hydra_lines]
    request = read_request(argv, environ, root)
    named = {o.key_or_group: o.value() for o in request.overrides if o.key_or_group in OF_THE_SWEEP and not o.is_sweep_override()}
    lines = [line_of(o) for o in request.overrides]
    options = [part for part in argv if part not in lines]  # --config-dir and its like
    static = [o for o in request.overrides if not o.is_sweep_override() and o.key_or_group not in OF_THE_SWEEP]
    shared = [*options, *map(line_of, static)]

    tree = compose_tree(shared, environ, root)
    params = parse([f"{key}={value}" for key, value in ((tree.hydra.get("sweeper") or {}).get("params") or {}).items()])
    chosen = {o.key_or_group for o in request.overrides}
    swept = [o for o in params if o.key_or_group not in chosen] + [o for o in request.overrides if o.is_sweep_override()]
    fixed = [line_of(o) for o in swept if not o.is_sweep_override()]  # a file may name one value only
    swept = [o for o in swept if o.is_sweep_override()]
    if hidden := [o.key_or_group for o in swept if o.key_or_group in secret_keys(root.schema)]:
        raise ConfigError(f"{hidden[0]} is secret, and the values of a sweep name its directories. Give it one value.")
    name = str(named.get("run.name") or _name(static, swept))
    directory = str(named["run.dir"]) if "run.dir" in named else None
    sweeper = next((line.partition("=")[2] for line in hydra_lines if line.startswith("hydra/sweeper=")), "basic")
    if sweeper != "basic":
        return Sweep(name, directory, (), sweeper, tuple(hydra_lines), tuple(map(line_of, swept)), (*shared, *fixed))
    if not swept:
        raise ConfigError(
            "-m is for several runs, and nothing here has several values.\nGive a key or a group some, as loss=grpo,gspo or "
            "seed=1,2,3, or a file of the group sweeps: sweeps=losses."
        )
    elements = tuple(Element(element_name(each), tuple(each), (*shared, *fixed, *each)) for each in _product(swept))
    seen: dict[str, Element] = {}
    for element in elements:
        if element.name in seen:
            raise ConfigError(
                f"two runs of the sweep have the directory {element.name}: {' '.join(seen[element.name].swept)} and "
                f"{' '.join(element.swept)}.\nGive every value once."
            )
        seen[element.name] = element
    return Sweep(name, directory, elements, None)


def element_name(swept: Sequence[str]) -> str:
    """`loss=grpo,seed=1`, sorted by key, fit for a folder's name."""
    name = re.sub(r"[^\w.,=+@:\[\]-]+", "_", ",".join(sorted(line.lstrip("+") for line in swept)))
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - 9]}-{hashlib.sha256(','.join(sorted(swept)).encode()).hexdigest()[:8]}"
    return name


def _name(static: list[Override], swept: list[Override]) -> str:
    """`losses` for `sweeps=losses`, else the swept keys; with a hash of what else was given, so that another sweep is another folder."""
    files = [str(o.value()) for o in static if o.key_or_group == "sweeps"]
    rest = sorted(line_of(o) for o in static if o.key_or_group != "sweeps" and o.key_or_group.split(".")[0] not in NOT_PART)
    keys = sorted(o.key_or_group for o in swept)
    base = "+".join(files) if files else "+".join(keys).replace("/", "_")
    rest += [] if files else sorted(line_of(o) for o in swept)
    return f"{base}-{hashlib.sha256(chr(0).join(rest).encode()).hexdigest()[:6]}" if rest else base


def _product(swept: list[Override]) -> list[list[str]]:
    try:
        parser = OverridesParser.create(config_loader=make_loader([]))  # a loader, for choices like loss=glob(*)
        (elements,) = BasicSweeper.split_arguments(parser.parse_overrides([line_of(o) for o in swept]), None)
    except HydraException as error:
        raise ConfigError(f"the sweep cannot be expanded: {error}") from None
    return elements
