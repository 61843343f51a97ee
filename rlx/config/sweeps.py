"""Expands the command line of a sweep into the overrides of its runs, with hydra's grammar: `loss=grpo,gspo seed=range(3)`.

The swept values come from the command line and from `hydra.sweeper.params` of the chosen files (`sweeps=losses`); the command line
wins. `load.compose` then composes and checks each run, like any single run.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from rlx.config.composition import compose_tree
from rlx.config.errors import ConfigError
from rlx.config.nested import own_name
from rlx.config.overrides import line_of, parse, read_request, value_of, with_benchmarks
from rlx.config.roots import TRAIN, Root
from rlx.config.run_config import source_of
from rlx.config.search_path import make_loader
from rlx.config.validate import secret_keys

MAX_NAME_CHARS = 120  # maximum characters of a folder's name
OF_THE_SWEEP = ("run.name", "run.dir")  # these name the sweep; its runs are in its folder
NOT_PART = ("launcher", "slurm", "dry_run", "clean")  # keys that do not make it a different sweep


@dataclass(frozen=True)
class SweepLine:
    """One run of a sweep."""

    name: str  # name of its folder: `loss=grpo,seed=1`
    swept: tuple[str, ...]  # the overrides in which it differs from the other runs
    argv: tuple[str, ...]  # the whole command line of the run


@dataclass(frozen=True)
class Sweep:
    """A command line with `-m`, expanded."""

    name: str  # name of its folder, unless the command line gives run.dir
    directory: str | None  # run.dir on the command line
    elements: tuple[SweepLine, ...]


def is_sweep(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether the command line or the environment asks for several runs: with `-m`, or with a file of the group sweeps."""
    if {"-m", "--multirun"} & set(argv):
        return True
    environ = os.environ if environ is None else environ
    lines = [part for part in argv if part.lstrip("+").startswith("sweeps=")]
    if lines or environ.get("RLX_SWEEPS", "null") == "null":
        return bool(lines) and lines[-1].partition("=")[2] != "null"
    return source_of(read_request(list(argv), environ, TRAIN), TRAIN) is None


def expand(argv: Sequence[str], environ: Mapping[str, str] | None = None, root: Root = TRAIN) -> Sweep:
    """The runs of a sweep. Raises ConfigError when the line cannot be parsed, sweeps nothing, or gives two runs the same name."""
    environ = os.environ if environ is None else environ
    argv = [part for part in argv if part not in ("-m", "--multirun")]
    argv = with_benchmarks(argv, environ, root)
    request = read_request(argv, environ, root)
    values = [o for o in request.overrides if not o.is_sweep_override()]
    named = {o.key_or_group: str(value_of(o)) for o in values if o.key_or_group in OF_THE_SWEEP}
    static = [o for o in values if o.key_or_group not in OF_THE_SWEEP]
    shared = [*(part for part in argv if part not in request.lines), *map(line_of, static)]  # with --config-dir and similar

    of_files = compose_tree(shared, environ, root).swept
    chosen = {o.key_or_group for o in request.overrides}
    params = parse(f"{key}={value}" for key, value in of_files.items() if own_name(key.lstrip("+")) not in chosen)
    shared += [line_of(o) for o in params if not o.is_sweep_override()]  # a file may give a key only one value
    swept = [o for o in (*params, *request.overrides) if o.is_sweep_override()]
    for key, o in itertools.product(secret_keys(root.schema), swept):
        if o.key_or_group == key or (key.startswith(f"{o.key_or_group}.") and key.rpartition(".")[2] in line_of(o)):
            raise ConfigError(f"{key} is secret, but the directories of a sweep are named after the swept values. Give it only one value.")
    if not swept:
        raise ConfigError(
            "-m starts several runs, but nothing here has several values.\nGive a key or a group several values (loss=grpo,gspo or "
            "seed=1,2,3), or choose a file of the group sweeps: sweeps=losses."
        )
    products = _product(swept, [folder for _, folder in request.directories])
    elements = tuple(SweepLine(element_name(each), each, (*shared, *each)) for each in products)
    names = [element.name for element in elements]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two runs of the sweep have the same directory {twice[0]}.\nGive each value only once.")
    return Sweep(named.get("run.name") or _name(static, swept), named.get("run.dir"), elements)


def element_name(swept: Sequence[str]) -> str:
    """`loss=grpo,seed=1`: sorted by key, usable as a folder's name."""
    name = re.sub(r"[^\w.,=+@:\[\]-]+", "_", ",".join(sorted(line.lstrip("+") for line in swept)))
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 9]}-{_digest(sorted(swept))[:8]}"


def _name(static: list[Override], swept: list[Override]) -> str:
    """`losses` for `sweeps=losses`, else the swept keys. A hash of all other overrides gives different sweeps different folders."""
    files = [str(o.value()) for o in static if o.key_or_group == "sweeps"]
    rest = sorted(line_of(o) for o in static if o.key_or_group != "sweeps" and o.key_or_group.split(".")[0] not in NOT_PART)
    rest += [] if files else sorted(line_of(o) for o in swept)
    base = "+".join(files or sorted(o.key_or_group for o in swept)).replace("/", "_")
    return f"{base}-{_digest(rest)[:6]}" if rest else base


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()


def _product(swept: list[Override], directories: list[str]) -> list[tuple[str, ...]]:
    parser = OverridesParser.create(config_loader=make_loader(directories))  # choices like loss=glob(*) need the loader
    overrides = parser.parse_overrides([line_of(o) for o in swept])
    if endless := [line_of(o) for o in overrides if not o.is_discrete_sweep()]:
        raise ConfigError(f"`{endless[0]}` has no list of values. Give several.")
    return list(itertools.product(*([f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in overrides)))
