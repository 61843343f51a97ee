"""Composes one plain tree from `conf/`, the user's own directories, environment variables and the command line, with hydra.

Order, weakest first: the schema's defaults, the group options and values of `train.yaml`, `RLX_…` variables, the experiment or
the user's file, the command line. Hydra only merges plain values here. `tree.py` then finds wrong types, wrong ranges and unknown
keys, all in one pass; `Origins` tells it where each value came from.

Only hydra's composition is used: it writes nothing, configures no logging and does not change the working directory.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault, ResultDefault
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, InterpolationToMissingValueError, OmegaConfBaseException

from rlx.config import fork, written
from rlx.config.again import ambiguous, with_all_values, without_effect
from rlx.config.env_nodes import as_presets, fill_in
from rlx.config.environment import Variable, read_variables
from rlx.config.errors import ConfigError
from rlx.config.gpus import choose_layout
from rlx.config.inherited import Inherited
from rlx.config.overrides import LATE, Groups, expand_env_keys, line_of, parse, read_request, read_variable, value_of
from rlx.config.roots import ROOTS, TRAIN, Root, elsewhere, has_key, root_named
from rlx.config.saved import escaped
from rlx.config.schema import MISSING
from rlx.config.sources import SAVED, WRITTEN, Repository, copied, is_shipped, label, make_loader
from rlx.config.tree import Origins, Problem, merge, optional_sections, secret_keys, show, split_optional, type_at

SCHEMA = "rlx_schema"  # every key with its default; first in the defaults list
INHERITED = "rlx_inherited"  # what another run or a named endpoint gives (`Root.inherits`); before the variables in the defaults list
NO_SECTION = re.compile(r"node `([\w.]+)` is not a container")  # OmegaConf's words: a reference into a section that is null
SHELL_VARIABLE = re.compile(r"(?<!\\)\$\{([A-Z_][A-Z0-9_]*)\}")
VARIABLES = "rlx_variables"  # what environment variables set; before the experiment in the defaults list

Kept = dict[tuple[Any, ...], tuple[list[ResultDefault], DictConfig]]
"""Composed files by all that chose them, before the values of the command line are set: the runs of a sweep share most."""
OURS = (VARIABLES, INHERITED, *(each.schema_name for each in ROOTS))


@dataclass
class Tree:
    """A composed configuration before types and rules are checked."""

    data: dict[str, Any]
    origins: Origins
    choices: dict[str, str]  # group -> option; several options are joined with "+"
    overrides: list[str]  # from the command line, as written
    notes: list[str]  # messages for the user
    problems: list[Problem] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)  # keys without a value; the cause is in `problems`
    hydra: dict[str, Any] = field(default_factory=dict)  # the `hydra` node of the files: what a sweep varies
    may_inherit: bool = False  # the primary file lists `rlx_inherited`; a run's `config.yaml` does not, because it has all values
    file: str = ""  # the primary file
    texts: list[str] = field(default_factory=list)  # its keys with a text that may be meant as a number; in a run's file of before only
    chosen: list[str] = field(default_factory=list)  # groups that the command line or a variable chooses


def compose_tree(argv: list[str], environ: Mapping[str, str], root: Root = TRAIN, kept: Kept | None = None) -> Tree:
    """Compose the tree that a command line of the root's command describes.

    `kept`: filled with what is shared with other compositions, as long as no file changes.
    Raises ConfigError when no tree can be composed. All other problems are listed in the result.
    """
    kept = {} if kept is None else kept
    request = read_request(argv, environ, root)
    if request.config_name == root.command and (source := fork.source_of(request.overrides, root)) is not None:
        return fork.forked(source, request, argv, environ, root, lambda argv, environ: _compose(argv, environ, root, (), kept))
    tree = _compose(argv, environ, root, (), kept)
    layout = None
    if tree.choices.get("hardware") == "auto" and tree.data["launcher"]["name"] == "slurm":
        layout = _layout_of_cluster(tree)
        tree = _compose(argv, environ, root, (), kept, layout)
    found = root.inherits(tree.data, tree.chosen) if tree.may_inherit else ()
    if not found:
        return tree
    refused = [
        f"{group}={tree.choices.get(group)} has no effect: {why}.\nRemove it."
        for each in found
        for group, why in each.refuses.items()
        if group in tree.chosen
    ]
    if refused:
        raise ConfigError(refused)
    again = _compose(argv, environ, root, found, kept, layout)
    for each in found:
        again.notes += [*filter(None, [each.note]), *_differing(each, again)]
    return again


def _layout_of_cluster(tree: Tree) -> tuple[str, str]:
    """The layout that hardware=auto chooses for a cluster, and why. Raises ConfigError if nothing is known of its nodes."""
    named, gpus = tree.data["slurm"].get("layout"), tree.data["slurm"]["gpus_per_node"]
    if named is not None:
        return str(named), f"slurm.layout={named}"
    if gpus is None:
        raise ConfigError(
            f"hardware=auto does not know the nodes of the cluster: {tree.origins.show('slurm.gpus_per_node', gpus)}. "
            "The GPUs of this machine say nothing about them.\n"
            "Set slurm.gpus_per_node in the file of slurm=NAME (0: nodes without GPUs), or choose a layout, hardware=NAME."
        )
    return choose_layout(int(gpus) if str(gpus).isdecimal() else 0)  # else its type is wrong, which is reported with the rest


def _differing(inherited: Inherited, tree: Tree) -> Iterable[str]:
    """A note for every inherited value that the user has replaced."""
    for key in _flatten(inherited.values, "") if inherited.values else ():
        there: Any = inherited.values
        here: Any = tree.data
        for part in key.split("."):
            there, here = there[part], here.get(part) if isinstance(here, dict) else None
        if here != there and not key.startswith("envs.") and tree.origins.find(key) != inherited.origin:
            yield f"{tree.origins.show(key, here)}; {inherited.origin} has {show(there)}"


def _compose(
    argv: list[str],
    environ: Mapping[str, str],
    root: Root,
    inherited: Sequence[Inherited],
    kept: Kept,
    layout: tuple[str, str] | None = None,
) -> Tree:
    """`layout`: what `hardware=auto` chooses, and why; None: what fits this machine."""
    layout = layout or choose_layout()
    request = read_request(argv, environ, root)
    loader = make_loader([directory for _, directory in request.directories], layout[0])
    groups = Groups(loader.get_sources(), root)
    name = request.config_name
    of_others = {each.command for each in ROOTS if each.command != root.command}
    if name not in groups.options("") or name in of_others:
        known = [each for each in groups.options("") if each not in OURS and each not in of_others and not each.startswith("_")]
        raise ConfigError(f"there is no configuration file {name}.yaml (--config-name). Choices: {', '.join(known)}.")
    repository = Repository(loader.repository, root.schema, {SCHEMA, root.schema_name})
    primary = repository.load_config(name)
    _refuse_other_command(primary, name, root)
    variables, problems = read_variables(environ, groups.names, root.schema)
    variables, notes = with_all_values(primary, name, variables)
    overrides = as_presets(list(request.overrides))
    chosen = [o.key_or_group for o in overrides if groups.is_choice(o)] + [v.key for v in variables if v.is_group]
    chosen += ["env"] if any(o.key_or_group == "env.id" for o in overrides) else []
    overrides += parse([f"{group}={option}" for each in inherited for group, option in each.groups.items() if group not in chosen])
    problems += groups.problems(overrides, variables)
    if problems:
        raise ConfigError(problems)
    given = {o.key_or_group for o in overrides}
    overrides += parse([f"{v.key}={v.text}" for v in variables if v.is_group and v.key in LATE and v.key not in given])
    _store_nodes(root, variables, inherited)

    chosen_files = [f"{o.key_or_group}/{option}" for o in overrides if groups.is_choice(o) for option in _as_list(value_of(o))]
    if problems := _wrong_in_files(repository, groups, [name, *chosen_files]):
        raise ConfigError(problems)

    around = (root.command, name, layout[0], repr(request.directories), repr(variables), repr(inherited))

    def files_of(chosen: list[Override]) -> tuple[list[ResultDefault], DictConfig]:
        lines = groups.lines(chosen)
        # Only these have a say in the defaults list; all others set values afterwards.
        key = (*around, *(line_of(o) for o in lines if repository.group_exists(o.key_or_group) and not isinstance(value_of(o), dict)))
        if key not in kept:
            defaults = create_defaults_list(repository, name, lines, prepend_hydra=False, skip_missing=False).defaults
            kept[key] = defaults, loader._compose_config_from_defaults_list(defaults, repository)
        return kept[key][0], copied(kept[key][1])

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hydra warns about a missing `_self_`; the file's own values then come last, as intended
            overrides = expand_env_keys(overrides, lambda rest: _environments(files_of([o for o in rest if groups.is_choice(o)])[0]))
            values = [o for o in overrides if not groups.is_choice(o)]
            defaults, cfg = files_of(overrides)
            loader._apply_overrides_to_config(groups.lines(values), cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, groups)) from None
    sweep = cfg.pop("hydra", None)  # for sweeps only; not part of a run's configuration
    hydra = {str(name): value for name, value in _plain(sweep, resolve=False).items()} if isinstance(sweep, DictConfig) else {}
    ignored, variables = variables, [v for v in variables if not v.is_group]
    origins = _find_origins(repository, defaults, variables, values, inherited)
    off = _sections_off(root, variables, values, origins)
    fill_in(cfg, repository, groups, origins)
    resolved, unresolved_problems, unresolved = _resolve(cfg, origins)
    data = {str(key): value for key, value in resolved.items()}
    written.keep(root.schema, data, origins)
    _drop_of_other_commands(root, data, origins)
    if primary is not None and SAVED in primary.header and data.get("launcher", {}).get("name") != "kubernetes":
        data.pop("kubernetes", None)  # a section of earlier versions, in every run's file
    notes += without_effect(primary, name, ignored, data, origins, secret_keys(root.schema))
    may_inherit = any(default.config_path == INHERITED for default in defaults)
    choices = _find_choices(defaults, groups.names)
    notes += [f"hardware=auto: {layout[1]}"] if choices.get("hardware") == "auto" else []
    tree = Tree(data, origins, choices, list(request.lines), notes, off + unresolved_problems, unresolved, hydra, may_inherit)
    tree.chosen, tree.texts, tree.file = chosen, ambiguous(primary), label(primary, name) if primary else ""
    return tree


def _refuse_other_command(loaded: ConfigResult | None, name: str, root: Root) -> None:
    """Raise ConfigError if the primary file is a run's `config.yaml` of another command."""
    defaults = loaded.defaults_list if loaded is not None else None
    listed = [getattr(default, "path", None) for default in defaults or []]
    named = root_named(listed)
    is_a_runs = listed == [SCHEMA, "_self_"]  # a `config.yaml` of `rlx train`
    if loaded is not None and any(each in OURS for each in listed) and named is not root and (named is not TRAIN or is_a_runs):
        raise ConfigError(
            f"{label(loaded, name)} is the configuration of `rlx {named.command}`, not of `rlx {root.command}`.\n"
            f"Use rlx {named.command} with the same arguments."
        )


def _store_nodes(root: Root, variables: list[Variable], inherited: Sequence[Inherited]) -> None:
    """Put the schema, inherited values and the values of environment variables where defaults lists find them."""
    node: dict[str, Any] = {}
    for variable in variables:
        value = read_variable(variable)
        if variable.is_group:
            if variable.key not in LATE:
                node.setdefault("defaults", []).append({f"override /{variable.key}": value})
            continue
        section = node
        *above, last = variable.key.split(".")
        for part in above:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                outer = next(v for v in variables if variable.key.startswith(f"{v.key}."))
                raise ConfigError(
                    f"{outer.name}={outer.text} leaves no section in which {variable.name}={variable.text} could set a key. "
                    "Unset one of the two."
                )
        section[last] = value
    store = ConfigStore.instance()
    _store_schema(root)
    values: dict[str, Any] = {}
    for each in inherited:
        merge(values, escaped(each.values) if each.literal else each.values)
    store.store(name=INHERITED, node=values, package="_global_", provider="another run or a file of endpoints")
    store.store(name=VARIABLES, node=node, package="_global_", provider="environment variables")


@functools.lru_cache(maxsize=1)  # not more: the root of another command puts its own schema under the name `SCHEMA`
def _store_schema(root: Root) -> None:
    for schema in {SCHEMA, root.schema_name}:
        ConfigStore.instance().store(name=schema, node=dataclasses.asdict(root.schema()), package="_global_", provider="rlx")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _wrong_in_files(repository: CachingConfigRepository, groups: Groups, paths: list[str]) -> list[str]:
    """A problem for each option that a file's defaults list chooses but the group does not have."""
    problems: list[str] = []
    for path in paths:
        loaded = repository.load_config(path)
        assert loaded is not None  # unknown choices were refused before
        for default in loaded.defaults_list or []:
            group = default.group.strip("/") if isinstance(default, GroupDefault) and default.group else ""
            value = getattr(default, "value", None)
            if group in groups.names and value is not None and "${" not in str(value):
                problems += groups.wrong(group, list(value) if isinstance(value, ListConfig) else value, label(loaded, path))
    return problems


def _plain(cfg: DictConfig, resolve: bool) -> dict[Any, Any]:
    data = OmegaConf.to_container(cfg, resolve=resolve, throw_on_missing=False)
    assert isinstance(data, dict)
    return data


def _environments(defaults: list[ResultDefault]) -> list[str]:
    return [d.package.removeprefix("envs.") for d in defaults if d.package and d.package.startswith("envs.")]


def _find_choices(defaults: list[ResultDefault], groups: list[str]) -> dict[str, str]:
    """The chosen option of each group, from the defaults list.

    Options that a chosen file adds from its own group do not count, nor environments that are only evaluated (`env@eval.envs.NAME`).
    """
    chosen: dict[str, list[str]] = {}
    for default in defaults:
        group, _, option = (default.config_path or "").rpartition("/")
        parent = (default.parent or "").rpartition("/")[0]
        if (default.package or "").startswith("eval."):
            continue
        if group in groups and (group != parent or default.is_self) and option not in chosen.get(group, []):
            chosen.setdefault(group, []).append(option)
    return {group: "+".join(options) for group, options in chosen.items()}


def _drop_of_other_commands(root: Root, data: dict[str, Any], origins: Origins, prefix: str = "") -> None:
    """Remove the keys that group files set for other commands: `model=tiny` sets a learning rate for every command that uses the model."""
    for name in list(data):
        key = f"{prefix}{name}"
        if has_key(root.schema, key):
            if isinstance(data[name], dict) and is_dataclass(split_optional(type_at(root.schema, key))[0]):
                _drop_of_other_commands(root, data[name], origins, f"{key}.")
        elif elsewhere(root.schema, key) is not None:
            set_by = [known for known in origins.of_key if known == key or known.startswith(f"{key}.")]
            if set_by and all(known in origins.of_groups for known in set_by):
                del data[name]


def _find_origins(
    repository: CachingConfigRepository,
    defaults: list[ResultDefault],
    variables: list[Variable],
    values: list[Override],
    inherited: Sequence[Inherited],
) -> Origins:
    """Walk the defaults list in order and record what set each key last."""
    origins = Origins()
    for default in defaults:
        path = default.config_path
        if path == VARIABLES:
            for variable in variables:
                origins.note(_flatten(read_variable(variable), variable.key), variable.name, typed=True)
        elif path == INHERITED:
            for each in inherited:
                keys = list(_flatten(each.values, "")) if each.values else []
                origins.note(keys, each.origin)
                origins.in_files.update(keys)
        elif path is not None and path not in OURS:
            loaded = repository.load_config(path)
            assert loaded is not None  # the defaults list only holds files that were found
            keys = list(_flatten(OmegaConf.to_container(loaded.config, resolve=False), default.package or ""))
            origins.note(keys, label(loaded, path), of_group="/" in path, shipped=is_shipped(loaded))
            origins.in_files.update(keys)
            written.note(origins, loaded.header.get(WRITTEN), default.package or "")
    for override in values:
        origins.note(_flatten(value_of(override), override.key_or_group), "command line", typed=True)
    return origins


def _sections_off(root: Root, variables: list[Variable], values: list[Override], origins: Origins) -> list[Problem]:
    """A problem for each override or variable that sets a key of a section that is null: this must not turn the section on."""
    problems = []
    set_keys = [(o.key_or_group, line_of(o).lstrip("+")) for o in values] + [(v.key, f"{v.name}={v.text}") for v in variables]
    whole = {o.key_or_group for o in values if isinstance(value_of(o), dict)}
    for section in (each for each in optional_sections(root.schema) if each not in whole):
        for key, line in set_keys:
            if key.startswith(section + ".") and not any(known.startswith(section + ".") for known in origins.in_files):
                group = section.partition(".")[0]
                needed = [f.name for f in dataclasses.fields(split_optional(type_at(root.schema, section))[0]) if f.default is MISSING]
                hint = f"The chosen {group} has no such section; remove the setting."
                if group == "logger":
                    hint = f"Turn it on with {section.replace('.', '=')}."
                elif group == "slurm":
                    hint = f"Set it whole: '{section}={{{', '.join(f'{name}: …' for name in needed)}}}', or in the file of slurm=NAME."
                problems.append(Problem(f"`{line}` sets a key of {section}, but that section is null here. {hint}", (section,)))
    return problems


def _flatten(value: Any, prefix: str) -> Iterable[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix


def _resolve(cfg: DictConfig, origins: Origins) -> tuple[dict[Any, Any], list[Problem], list[str]]:
    """The values without interpolations, with `???` for those that have none; one problem per cause; all keys without a value."""
    problems: list[Problem] = []
    keys: list[str] = []
    without: dict[str, list[str]] = {}  # a section that is null: the keys that take their values from it
    while True:
        try:
            values = _plain(cfg, resolve=True)
            for section, inside in without.items():
                said = f"{origins.show(section, OmegaConf.select(cfg, section))}, but values are taken from there: {', '.join(inside)}."
                problems.append(Problem(f"{said}\nSet these, too, or leave {section} as it was.", (section, *inside)))
            return values, problems, keys
        except (InterpolationResolutionError, InterpolationKeyError) as error:
            key = error.full_key
            if not key:
                raise
            inner, node = error.child_node, error.parent_node  # the key's own text cannot be looked up: `slurm.setup[0]`, a name with dots
            assert inner is not None
            assert node is not None
            text = inner._value()
            absent = NO_SECTION.search(str(error))
            near = f"{key.rpartition('.')[0]}." if str(text).startswith("${.") else ""
            section = f"{near}{absent[1]}" if absent else ""
            if absent and str(text).startswith((f"${{{absent[1]}.", f"${{.{absent[1]}.")) and OmegaConf.select(cfg, section) is None:
                without.setdefault(section, []).append(key)
            elif not isinstance(error, InterpolationToMissingValueError):  # the missing value is reported as its own problem
                cause = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
                hint = " Set it, or give a default: ${oc.env:NAME,VALUE}." if "oc.env:" in str(text) else ""
                if shell := SHELL_VARIABLE.search(str(text)):
                    hint = f" Write a variable of the shell as ${shell[1]} or \\${{{shell[1]}}}."
                problems.append(Problem(f"`{key}` cannot be resolved: {origins.show(key, text)}.\n{cause}.{hint}", (key,)))
            keys.append(key)
            node[error.key] = MISSING


def _explain(error: Exception, groups: Groups) -> str:
    """Hydra's message with its cause, but without its search path."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith(("Config search path", "Available options", "See https")):
            lines = lines[:number]
            break
    if error.__cause__ is not None:
        lines += [line for line in str(error.__cause__).splitlines() if line.strip()][:2]
    for group in groups.names:
        if any(f"'{group}/" in line for line in lines):
            lines.append(f"Choices of {group}: {', '.join(groups.options(group))}.")
    return "the configuration cannot be composed: " + "\n".join(lines)
