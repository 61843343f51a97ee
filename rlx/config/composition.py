"""Composes one plain tree from `conf/`, the user's own directories, environment variables and the command line.

Order, weakest first: the schema's defaults, the group options and values of `train.yaml`, `RLX_…` variables, the experiment or
the user's file, the command line. Hydra's defaults list says which files count, and in which order; they are merged here as plain values,
which also tells where each came from (`Origins`). `validate.py` then finds wrong types, wrong ranges and unknown keys, all in one pass.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from rlx.config.environment import PREFIX, Variable, read_variables
from rlx.config.errors import ConfigError
from rlx.config.from_run import Inherited, of_name
from rlx.config.gpus import choose_layout
from rlx.config.nested import flatten, merge, nested, renamed, section_at, use_own_names, with_own_names
from rlx.config.overrides import LATE, CommandLine, Groups, chooses_one, line_of, one_each, parse, read_request, read_variable, value_of
from rlx.config.per_env_loss import KEY, NODES, Preset, as_node, fill_in, spell_out
from rlx.config.roots import ROOTS, TRAIN, Root, key_of
from rlx.config.run_config import ConfigSource, escaped, is_fork, source_of
from rlx.config.schema import MISSING
from rlx.config.search_path import file_at, is_shipped, label, make_loader
from rlx.config.validate import Origins, Problem, optional_sections
from rlx.config.yaml_files import read

SCHEMA = "rlx_schema"  # every key with its default; first in the defaults list
INHERITED = "rlx_inherited"  # what another run or a named endpoint gives (`Root.inherits`); before the variables in the defaults list
VARIABLES = "rlx_variables"  # what environment variables set; before the experiment in the defaults list
CHOSEN = "rlx_chosen"  # lists every group without an option: a run that starts from another's configuration, the node of an environment
GROUPS = ("hardware", "launcher", "slurm", "env", "data", "advantage", "loss", "optim", "model", "logger", "experiment", "sweeps")
"""The groups of which such a run may choose another option, in the order of `train.yaml`: its section comes from there."""


@dataclass(frozen=True)
class Layer:
    """Values from one place."""

    values: dict[str, Any]  # nested like the configuration; not to be changed
    origin: str  # its name in messages; empty for the schema's defaults
    of_file: bool = True
    of_group: bool = False
    shipped: bool = False
    typed: bool = False  # by the user, in a variable


@dataclass(frozen=True)
class Files:
    """What the chosen options give, in its order, before the command line sets keys."""

    layers: list[Layer]
    choices: dict[str, str]  # group -> option; several options are joined with "+"
    swept: dict[str, Any]  # `hydra.sweeper.params` of the files: what a sweep varies
    own: dict[str, Path]  # the user's own files
    renamed: list[str]  # messages about keys that these give by an older name


Kept = dict[tuple[Any, ...], Files]
"""The files of compositions by all that chose them: the runs of a sweep share most."""


@dataclass
class Tree:
    """A composed configuration before types and rules are checked."""

    data: dict[str, Any]
    origins: Origins
    choices: dict[str, str]  # group -> option; several options are joined with "+"
    overrides: list[str]  # from the command line, as written
    notes: list[str]  # messages for the user
    problems: list[Problem]
    swept: dict[str, Any]  # `hydra.sweeper.params` of the files: what a sweep varies
    chosen: list[str]  # groups that the command line or a variable chooses


def compose_tree(argv: list[str], environ: Mapping[str, str], root: Root = TRAIN, kept: Kept | None = None) -> Tree:
    """Compose the tree that a command line of the root's command describes.

    `kept`: filled with what is shared with other compositions, as long as no file changes.
    Raises ConfigError when no tree can be composed. All other problems are listed in the result.
    """
    request = read_request(argv, environ, root)
    source = source_of(request, root)
    compose = functools.partial(_compose, request, source, environ, root, {} if kept is None else kept)
    tree = compose()
    resume, origin = tree.data.get("resume"), tree.origins.find("resume")
    if source is None and request.config_name == root.command and is_fork(resume) and origin != "command line":
        # The rest would be rlx's defaults, not the source's configuration.
        raise ConfigError(f"resume={resume} ({origin}) makes a fork, which is named on the command line.\n  fix: add resume={resume}")
    layout = _layout_of_cluster(tree)
    found = [] if source is not None else root.inherits(tree.data, tree.chosen) or of_name(tree.data, tree.chosen)
    refused = {group: why for each in found for group, why in each.refuses.items() if group in tree.chosen}
    if refused:
        raise ConfigError([f"{group}={tree.choices.get(group)} has no effect: {why}.\nRemove it." for group, why in refused.items()])
    return compose(found, layout) if found or layout else tree


def _layout_of_cluster(tree: Tree) -> tuple[str, str] | None:
    """The layout that hardware=auto chooses for a cluster, and why; None where it goes by this machine.

    Raises ConfigError if nothing is known of the cluster's nodes.
    """
    if tree.choices.get("hardware") != "auto" or tree.data["launcher"]["name"] != "slurm":
        return None
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


def _compose(
    request: CommandLine,
    source: ConfigSource | None,
    environ: Mapping[str, str],
    root: Root,
    kept: Kept,
    inherited: Sequence[Inherited] = (),
    layout: tuple[str, str] | None = None,
) -> Tree:
    """`layout`: what `hardware=auto` chooses, and why; None: what fits this machine."""
    layout = layout or choose_layout()
    loader = make_loader([directory for _, directory in request.directories], layout[0])
    groups = Groups(loader, root)
    of_others = {each.command for each in ROOTS if each is not root}
    if source is None and (request.config_name in of_others or file_at(loader, request.config_name) is None):
        raise ConfigError(f"there is no configuration file {request.config_name}.yaml (--config-name) for `rlx {root.command}`.")
    variables, problems = read_variables(environ, groups.names, root.schema)
    notes = [each.note for each in inherited if each.note]
    if source is not None:
        notes += [f"{v.name} has no effect: {source.file} is a run's configuration, which has every value" for v in variables]
        variables = []
    overrides = list(request.overrides)
    chosen = [o.key_or_group for o in overrides if groups.is_choice(o)] + [v.key for v in variables if v.is_group]
    if any(o.key_or_group == "env.id" for o in overrides) and "env" not in chosen:
        overrides += parse(["env=custom"])
        chosen.append("env")
    overrides += parse([f"{group}={option}" for each in inherited for group, option in each.groups.items() if group not in chosen])
    if problems := problems + groups.problems(overrides, variables):
        raise ConfigError(problems)
    given = {o.key_or_group for o in overrides}
    overrides += parse(f"{v.key}={v.text}" for v in variables if v.is_group and v.key in LATE and v.key not in given)
    lines = [groups.line(o) for o in overrides if groups.is_choice(o)]

    key = (root.command, request.config_name, layout, request.directories, repr(variables), repr(inherited), source is None, *lines)
    if key not in kept:
        stored = _store(root, variables, inherited)
        kept[key] = _files(loader, request.config_name if source is None else CHOSEN, lines, groups, stored)
    files = kept[key]
    if several := {group: option.split("+") for group, option in files.choices.items() if "+" in option and chooses_one(group)}:
        raise ConfigError(
            [f"a configuration has one {group}, not {' and '.join(each)}. {one_each(group)}" for group, each in several.items()]
        )

    layers = files.layers
    if source is not None:
        of_groups = {key_of(group) for group in (*files.choices, *chosen)}
        rest = {name: escaped(value) for name, value in source.data.items() if name not in of_groups}
        layers = [Layer(rest, label(source.file)), *layers]
    data: dict[str, Any] = {}
    origins = Origins(files=dict(files.own))
    for layer in layers:
        merge(data, layer.values)
        keys = list(flatten(layer.values)) if layer.origin else []
        origins.note(keys, layer.origin, layer.of_group, layer.shipped, layer.typed)
        origins.in_files.update(keys if layer.of_file else ())
    values = [o for o in overrides if not groups.is_choice(o)]
    spell_out(data)
    _set_values(data, values, origins)
    fill_in(data, origins, lambda group, option, at: _preset(loader, groups, origins, group, option, at))
    problems_found = _sections_off(root, origins, {o.key_or_group for o in values if isinstance(value_of(o), dict)})
    data = _resolve(data, origins, problems_found)
    notes += [f"hardware=auto: {layout[1]}"] if files.choices.get("hardware") == "auto" else []
    typed = [line.partition("=")[0].lstrip("+~") for line in request.lines]
    typed += [inner for o in values if isinstance(value_of(o), dict) for inner in flatten(value_of(o), o.key_or_group)]
    typed += [name.removeprefix(PREFIX).lower().replace("__", ".") for name in environ if name.startswith(PREFIX)]
    (only,) = data["envs"] if len(data.get("envs") or ()) == 1 else ("NAME",)
    notes += [*files.renamed, *renamed(re.sub(r"^env\.", f"envs.{only}.", key) for key in typed)]
    return Tree(data, origins, dict(files.choices), list(request.lines), notes, problems_found, files.swept, chosen)


def _store(root: Root, variables: Sequence[Variable], inherited: Sequence[Inherited]) -> dict[str, list[Layer]]:
    """Put what defaults lists name besides files where hydra finds it. Returns its values by name."""
    late = [v for v in variables if v.is_group and v.key not in LATE]
    nodes = {
        **{name: {} for name in (SCHEMA, root.schema_name, INHERITED)},
        VARIABLES: {"defaults": [{f"override /{v.key}": read_variable(v)} for v in late]},
        CHOSEN: {"defaults": [{f"optional {group}": None} for group in GROUPS]},
    }
    for name, node in nodes.items():
        ConfigStore.instance().store(name=name, node=node, package="_global_")
    schema = [Layer(dataclasses.asdict(root.schema()), "")]
    values = [(nested(*with_own_names(v.key, read_variable(v))), v.name) for v in variables if not v.is_group]
    set_by = [Layer(value, name, of_file=False, typed=True) for value, name in values]
    given = [Layer(escaped(each.values) if each.literal else each.values, each.origin) for each in inherited]
    return {SCHEMA: schema, root.schema_name: schema, VARIABLES: set_by, INHERITED: given, CHOSEN: []}


def _files(loader: ConfigLoader, name: str, lines: list[str], groups: Groups, stored: Mapping[str, list[Layer]]) -> Files:
    """The files that a primary file and choices of options lead to. `stored`: what is no file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hydra warns about a missing `_self_`; the file's own values then come last, as intended
            found: list[ResultDefault] = loader.compute_defaults_list(name, lines, RunMode.RUN).defaults
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        said = str(error).partition("\n\n")[0]
        group, _, option = str(getattr(error, "missing_cfg_file", None) or "").rpartition("/")
        wrong = list(groups.wrong(group, option, said)) if group in groups.names else []
        raise ConfigError(wrong or f"the configuration cannot be composed: {said}") from None
    layers: list[Layer] = []
    swept: dict[str, Any] = {}
    own: dict[str, Path] = {}
    old: list[str] = []
    for default in (each for each in found if each.config_path is not None):
        path = str(default.config_path)
        file = file_at(loader, path)
        if path in stored:
            layers += stored[path]
        elif file is not None:
            values = {name: value for name, value in read(file).items() if name != "defaults"}
            swept |= ((values.pop("hydra", None) or {}).get("sweeper") or {}).get("params") or {}
            values = nested(default.package or "", values)
            old += renamed(flatten(values))
            try:
                use_own_names(values)
            except ConfigError as error:
                raise ConfigError(f"{label(file)}: {error}") from None
            of_group = "/" in path
            own |= {} if is_shipped(file) else {f"{path}.yaml": file}
            layers.append(
                Layer(groups.of_command(values) if of_group else values, label(file), of_group=of_group, shipped=is_shipped(file))
            )
    return Files(layers, _find_choices(found, groups.names), swept, own, old)


def _find_choices(defaults: list[ResultDefault], groups: list[str]) -> dict[str, str]:
    """The chosen option of each group, from the defaults list.

    Options that a chosen file adds from its own group do not count, nor environments that are only evaluated (`env@eval.envs.NAME`).
    """
    chosen: dict[str, list[str]] = {}
    for default in defaults:
        group, _, option = (default.config_path or "").rpartition("/")
        is_added = group == (default.parent or "").rpartition("/")[0] and not default.is_self
        if group in groups and not is_added and not (default.package or "").startswith("eval."):
            chosen.setdefault(group, []).append(option)
    return {group: "+".join(dict.fromkeys(options)) for group, options in chosen.items()}


def _set_values(data: dict[str, Any], overrides: list[Override], origins: Origins) -> None:
    """Set the keys of the command line, in place; `env.KEY` is one of the only environment."""
    for o in overrides:
        key, value = o.key_or_group, value_of(o)
        if key.startswith("env."):
            names = list(data.get("envs") or ())
            key = f"envs.{names[0] if len(names) == 1 else '<name>'}.{key.removeprefix('env.')}"
            if len(names) != 1:
                raise ConfigError(f"`{line_of(o)}` needs one environment, but this run has {', '.join(names) or 'none'}.\nUse {key}=…")
        key, value = with_own_names(key, value)
        *above, last = key.split(".")
        if o.is_delete():
            if section_at(data, above).pop(last, o) is o:
                raise ConfigError(f"`{line_of(o)}` removes a key that is not there.")
        elif isinstance(value, dict):
            merge(data, nested(key, value))
        else:
            merge(data, nested(key, None))  # what is replaced may be a section
            merge(data, nested(key, as_node(value) if KEY.fullmatch(key) else value))
        origins.note(flatten(value, key), "command line", typed=True)


def _preset(loader: ConfigLoader, groups: Groups, origins: Origins, group: str, option: str, key: str) -> Preset:
    """The node of an objective or an advantage for the environment's node at `key`, and the advantage that its file chooses."""
    if problems := list(groups.wrong(group, option, f"{key}, {origins.find(key)}")):
        raise ConfigError(problems)
    files = _files(loader, CHOSEN, [f"{group}={option}"], groups, {CHOSEN: []})
    origins.files |= files.own
    node: dict[str, Any] = {}
    given = set(origins.of_key)
    for layer in files.layers:
        merge(node, layer.values)
        keys = [f"{key}.{inner}" for inner in flatten(layer.values.get(group) or {})]
        origins.note([each for each in keys if each not in given], layer.origin, layer.of_group, layer.shipped)
    if not node.keys() <= {*NODES}:
        raise ConfigError(
            f"{key}: {group}={option} sets more than an objective and its advantage, so it cannot serve one environment. "
            "Use a preset that does not, or set the objective for the whole run."
        )
    return node[group], files.choices.get("advantage")


def _sections_off(root: Root, origins: Origins, whole: set[str]) -> list[Problem]:
    """A problem for each section that is null, of which the command line or a variable sets a key: this must not turn the section on."""
    problems = []
    for section in (each for each in optional_sections(root.schema) if each not in whole):
        inside = [key for key in origins.of_key if key.startswith(f"{section}.")]
        if inside and not any(key in origins.in_files for key in inside):
            text = f"`{inside[0]}` ({origins.find(inside[0])}) is a key of {section}, but that section is null here."
            problems.append(Problem(f"{text} Choose an option that has it, or set it whole: '{section}={{…}}'.", (section,)))
    return problems


def _resolve(data: dict[str, Any], origins: Origins, problems: list[Problem]) -> dict[str, Any]:
    """The values without interpolations, with `???` for those that have none. Adds a problem for each of these with a cause of its own.

    OmegaConf gets only the sections that refer to others or are referred to, because it takes longer than all the rest.
    """
    references = {name: _references(value) for name, value in data.items()}
    asked = " ".join(references.values())
    needed = {name: value for name, value in data.items() if references[name] or name in asked or "${${" in asked}
    cfg = None
    while True:
        try:
            cfg = OmegaConf.create(needed) if cfg is None else cfg
            resolved: Any = OmegaConf.to_container(cfg, resolve=True)
            return data | resolved
        except OmegaConfBaseException as error:
            key, node = str(error.full_key), error.parent_node
            said = str(error).splitlines()[0].rpartition("while resolving interpolation: ")[2]
            text = f"`{key}` ({origins.find(key)}) cannot be resolved: {said} (as text, `${{` is `\\${{`)."
            text += "".join(f" {line}." for line in renamed(re.findall(r"Interpolation key '([^']+)'", said)))
            if cfg is None or node is None:
                raise ConfigError(text) from None
            if not isinstance(error, InterpolationToMissingValueError):  # the missing value is reported as its own problem
                problems.append(Problem(text, (key,)))
            node[error.key] = MISSING


def _references(value: Any) -> str:
    """The texts inside a value that refer to other values, as one text; empty if there are none."""
    if isinstance(value, dict | list):
        return " ".join(filter(None, map(_references, value.values() if isinstance(value, dict) else value)))
    return value if isinstance(value, str) and "${" in value else ""
