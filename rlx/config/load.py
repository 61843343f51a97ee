"""How to get a configuration: `compose` from a command line, `load_run` from a run directory, `instantiate` for open nodes.

`compose` returns a checked configuration or raises one ConfigError that lists every problem found. It checks the arguments of open
nodes last, once everything else is right. Only `compose` imports hydra. Only `instantiate` and targets of the user's own import torch.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import yaml

from rlx.config.checks import check
from rlx.config.errors import ConfigError, may_parse
from rlx.config.near import REMOVED, suggest
from rlx.config.notes import notes_of
from rlx.config.pythons import python_for, shipped
from rlx.config.roots import EVAL, SYNTHESIZE, TRAIN, Root, root_named, root_of, where_else
from rlx.config.rules import Check, target_name
from rlx.config.saved import text_of
from rlx.config.schema import CommandConfig, Config, PlayRoot, TrainingRoot
from rlx.config.secret import FILE, hidden
from rlx.config.signatures import READABLE, module_of
from rlx.config.targets import all_nodes_of, check_targets, instantiate
from rlx.config.tree import Builder, Origins

if TYPE_CHECKING:
    from rlx.config.composition import Kept, Tree

T = TypeVar("T")

__all__ = ["Composed", "checked", "compose", "instantiate", "load_run", "to_yaml"]

NOT_SET = {"agents": [], "agents_per_group": "one", "reward_raises": "fail", "weight": 1.0}
"""What an entry of `eval.envs` that sets none of these keys has in the file of an older version; now it has null."""


@dataclass(frozen=True)
class Composed(Generic[T]):
    """A configuration that passed every check."""

    cfg: T
    overrides: list[str]  # from the command line, as written
    choices: dict[str, str]  # group -> option; several are joined with "+"; empty when a resolved file was loaded
    notes: list[str]  # for the user: what `auto` chose
    origins: Origins = field(default_factory=Origins)

    @property
    def yaml(self) -> str:
        """The resolved configuration, loadable again as a primary configuration."""
        return to_yaml(self.cfg)

    @property
    def label(self) -> str:
        """`reverse_text-tiny-grpo`: environments, model and objective, usable as a file name."""
        cfg, parts = self.cfg, []
        if envs := getattr(cfg, "envs", None):
            parts.append("+".join(envs))
        if model := getattr(cfg, "model", None):
            parts.append(self.choices.get("model") or Path(model.name).name)
        if loss := getattr(cfg, "loss", None):
            parts.append(self.choices.get("loss") or target_name(loss))
        return "-".join(parts)


@overload
def compose(
    argv: Sequence[str] = ..., environ: Mapping[str, str] | None = ..., *, without: Collection[Check] = ...
) -> Composed[Config]: ...
@overload
def compose(argv: Sequence[str], environ: Mapping[str, str] | None, root: Root[T], kept: Kept | None = ...) -> Composed[T]: ...
def compose(
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    root: Root = TRAIN,
    kept: Kept | None = None,
    without: Collection[Check] = (),
) -> Composed:
    """Compose and check the configuration that a command line of the root's command describes.

    `argv`: overrides (`loss=gspo`, `optim.lr=1e-6`) and hydra's `--config-dir`, `--config-name`, `--config-path`.
    `environ`: the environment variables; default `os.environ`. `kept`: a dictionary that compositions share while no file changes.
    `without`: rules that do not apply to what is started. Raises ConfigError that lists all problems.
    """
    from rlx.config.composition import compose_tree

    return checked(compose_tree(list(argv), os.environ if environ is None else environ, root, kept), root, without)


def checked(tree: Tree, root: Root = TRAIN, without: Collection[Check] = ()) -> Composed:
    """Check a composed tree: types and unknown keys, then the rules between keys, then the targets of open nodes.

    The last check imports targets of the user's own. The rules then run again, because they use what these targets declare.
    """
    builder = Builder(root.schema, tree.origins, hint=lambda key: where_else(root.schema, key) or suggest(root.schema, key, tree.origins))
    cfg = builder.build(root.schema, tree.data)
    notes = [*tree.notes, *use_own_pythons(cfg)]
    reported = [f"{key}." for problem in tree.problems for key in problem.keys]
    builder.missing = [  # without those of which the cause is reported already
        (key, doc) for key, doc in builder.missing if key not in tree.unresolved and not key.startswith(tuple(reported))
    ]
    problems = tree.problems + [problem for problem in builder.problems if not set(tree.unresolved) & set(problem.keys)]
    unknown = tuple(tree.unresolved)
    problems += check(cfg, tree.origins, tuple(key for problem in problems for key in problem.keys) + unknown, without)
    problems = problems or check_targets(cfg, tree.origins)
    targets = [] if problems else [node["_target_"] for node, _ in all_nodes_of(cfg).values()]
    if any(target.partition(".")[0] not in READABLE for target in targets):
        problems = check(cfg, tree.origins, unknown, without)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    notes += [*_still_text(cfg, tree), *notes_of(cfg, tree.origins)]
    return Composed(cfg, tree.overrides, tree.choices, notes, tree.origins)


def use_own_pythons(cfg: Any) -> list[str]:
    """Give each environment the Python that was installed for it, unless the configuration names one. Returns a note for each.

    It is part of the saved configuration: a run that is continued or repeated plays in the same one.
    """
    sections = {"envs": getattr(cfg, "envs", None), "eval.envs": getattr(getattr(cfg, "eval", None), "envs", None)}
    notes = []
    for section, entries in sections.items():
        for name, env in entries.items() if isinstance(entries, dict) else ():
            found = python_for(env.id) if isinstance(env.id, str) and env.python is None and not shipped(module_of(env.id)) else None
            if found is not None and cfg.slurm.container is None:
                env.python = found.folder.name
                notes.append(f"{section}.{name} plays in the Python that was installed for it: {found.folder}")
    return notes


def _still_text(cfg: Any, tree: Tree) -> list[str]:
    """A note with the keys of a run's file of an older version that hold text such as 1e-5, and are no numbers."""

    def value_of(key: str) -> Any:
        value = cfg
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        return value

    kept = [key for key in tree.texts if any(isinstance(each, str) for each in _listed(value_of(key)))]
    text = f"{tree.file} is a run's configuration, where 1e-5, without a point, is text: {', '.join(kept)}. Write 1.0e-5"
    return [text] if kept else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@overload
def load_run(run_dir: str | os.PathLike[str], *, secrets: bool = ...) -> Config: ...
@overload
def load_run(run_dir: str | os.PathLike[str], root: Root[T], *, secrets: bool = ...) -> T: ...
def load_run(run_dir: str | os.PathLike[str], root: Root = TRAIN, *, secrets: bool = True) -> Any:
    """The configuration of a run, from `config.yaml` in its directory. Only types are checked: the rules were, when the run was made.

    `secrets`: whether to read the run's secrets, which only its owner can. Without them `<secret>` stands for each, which is enough
    to look at a run. Raises ConfigError when the file does not exist, is not a configuration of this version, or lacks a secret.
    """
    path, data = _read(run_dir)
    its = root_named(data.pop("defaults", None))
    if its is not root and its.schema is not root.schema:
        raise ConfigError(f"{run_dir} is a directory of `rlx {its.command}`, not of `rlx {root.command}`.\n  fix: use rlx {its.command}")
    return _build(path, data, root, secrets)


def load_command(run_dir: str | os.PathLike[str], *, secrets: bool = True) -> CommandConfig:
    """Like `load_run`, for a directory of any command: its `config.yaml` says which one."""
    path, data = _read(run_dir)
    return _build(path, data, root_named(data.pop("defaults", None)), secrets)


def load_play(run_dir: str | os.PathLike[str]) -> PlayRoot:
    """Like `load_command`, for a command that plays environments. Raises ConfigError for any other."""
    cfg = load_command(run_dir)
    if not isinstance(cfg, PlayRoot):
        raise ConfigError(f"{run_dir} is a directory of `rlx {root_of(cfg).command}`, which plays no environments.")
    return cfg


def load_training(run_dir: str | os.PathLike[str]) -> TrainingRoot:
    """Like `load_command`, for a command that trains. Raises ConfigError for any other."""
    cfg = load_command(run_dir)
    if not isinstance(cfg, TrainingRoot):
        raise ConfigError(f"{run_dir} is a directory of `rlx {root_of(cfg).command}`, which trains nothing.")
    return cfg


def _read(run_dir: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: {run_dir} is no run directory.")
    with may_parse(path):
        data = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no configuration: a run's config.yaml is a mapping of keys to values.")
    _rename(data)
    # Modules that it names may lie here. PYTHONPATH cannot say so where another rlx does, too: it would come before an installed one.
    if sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return path, data


def _rename(data: dict[str, Any]) -> None:
    """Give the values of a run of an older version the names that their keys have now."""
    slurm = data.get("slurm")
    if isinstance(slurm, dict) and isinstance(words := slurm.get("container"), list):
        data["slurm"] = slurm | {"prefix": words, "container": None}
    if data.pop("kubernetes", None) is not None and data.get("launcher", {}).get("name") == "kubernetes":  # its pods ran `rlx pod`
        data["launcher"]["name"] = "local"
    for section, _, name in (key.partition(".") for key in REMOVED):
        if isinstance(values := data.get(section), dict):
            values.pop(name, None)
            if values.get("type") == "gloo":  # a way of weights that there was
                values["type"] = "filesystem"
    evaluation = data.get("eval")
    for entry in (evaluation.get("envs") or {}).values() if isinstance(evaluation, dict) else ():
        if NOT_SET.items() <= entry.items():
            entry.update(dict.fromkeys(NOT_SET))
        if entry.get("agents_per_group") == "all":  # it scored one run of each episode, whatever this said
            entry["agents_per_group"] = None
    if root_named(data.get("defaults")) in (EVAL, SYNTHESIZE):
        for entry in (data.get("envs") or {}).values():
            entry["agents_per_group"] = "one"


def _build(path: Path, data: dict[str, Any], root: Root, secrets: bool) -> Any:
    if secrets:
        _fill_secrets(data, path.with_name(FILE))
    builder = Builder(root.schema, hint=partial(suggest, root.schema))
    cfg = builder.build(root.schema, data)
    if not secrets:
        builder.missing = [(key, doc) for key, doc in builder.missing if key not in builder.origins.secret]
    if builder.problems:
        raise ConfigError([f"{path}: {problem.text}" for problem in builder.problems])
    return cfg


def _fill_secrets(data: dict[str, Any], file: Path) -> None:
    """Replace `<secret>` in a run's configuration by the values in `file`, if it exists."""
    if not file.exists():
        return
    for key, value in yaml.safe_load(file.read_text()).items():
        *above, last = key.split(".")
        section = data
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value


def to_yaml(cfg: Any) -> str:
    """A configuration as the text of a `config.yaml`, with `<secret>` in place of its secrets."""
    root = root_of(cfg)
    return text_of(dataclasses.asdict(hidden(cfg)), root.command, root.schema_name)
