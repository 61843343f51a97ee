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

from rlx.config.checks import check
from rlx.config.checks.sizes import use_own_sizes
from rlx.config.errors import ConfigError
from rlx.config.instantiate import all_nodes_of, check_targets, instantiate
from rlx.config.nested import merge, nested, use_own_names
from rlx.config.pythons import python_for, shipped
from rlx.config.roots import TRAIN, Root, root_named, root_of, where_else
from rlx.config.rules import Check, target_name
from rlx.config.run_config import FILE, text_of
from rlx.config.run_warnings import notes_of
from rlx.config.schema import CommandConfig, Config, PlayRoot, TrainingRoot
from rlx.config.secret import FILE as SECRETS
from rlx.config.secret import redacted
from rlx.config.signatures import READABLE, module_of
from rlx.config.suggest import suggest
from rlx.config.validate import Builder, Origins
from rlx.config.yaml_files import read

if TYPE_CHECKING:
    from rlx.config.composition import Kept, Tree

T = TypeVar("T")

__all__ = ["Composed", "checked", "compose", "instantiate", "load_run", "to_yaml"]


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
        envs, model, loss = (getattr(self.cfg, name, None) for name in ("envs", "model", "loss"))
        of_model = (self.choices.get("model") or Path(model.name).name) if model else ""
        of_loss = (self.choices.get("loss") or target_name(loss)) if loss else ""
        return "-".join(filter(None, ["+".join(envs or ()), of_model, of_loss]))


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
    notes = [
        *tree.notes,
        *use_own_pythons(cfg),
        *(use_own_sizes(cfg, tree.origins) if not builder.problems and not builder.missing else ()),
    ]
    reported = {key for problem in tree.problems for key in problem.keys}  # the cause of what is missing there
    builder.missing = [(key, doc) for key, doc in builder.missing if not any(f"{key}.".startswith(f"{each}.") for each in reported)]
    problems = tree.problems + builder.problems
    wrong = tuple(key for problem in problems for key in problem.keys)
    problems += check(cfg, tree.origins, wrong, without)
    problems = problems or check_targets(cfg, tree.origins)
    targets = [] if problems else [node["_target_"] for node, _ in all_nodes_of(cfg).values()]
    if any(target.partition(".")[0] not in READABLE for target in targets):
        problems = check(cfg, tree.origins, (), without)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return Composed(cfg, tree.overrides, tree.choices, [*notes, *notes_of(cfg, tree.origins)], tree.origins)


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


@overload
def load_run(run_dir: str | os.PathLike[str], *, secrets: bool = ...) -> Config: ...
@overload
def load_run(run_dir: str | os.PathLike[str], root: Root[T], *, secrets: bool = ...) -> T: ...
def load_run(run_dir: str | os.PathLike[str], root: Root = TRAIN, *, secrets: bool = True) -> Any:
    """The configuration of a run, from `config.yaml` in its directory. Only types are checked: the rules were, when the run was made.

    `secrets`: whether to read the run's secrets, which only its owner can. Without them `<secret>` stands for each, which is enough
    to look at a run. Raises ConfigError when the file does not exist, is not a configuration of this version, or lacks a secret.
    """
    return _load(run_dir, root.schema, secrets)


def load_command(run_dir: str | os.PathLike[str], *, secrets: bool = True) -> CommandConfig:
    """Like `load_run`, for a directory of any command: its `config.yaml` says which one."""
    return _load(run_dir, CommandConfig, secrets)


def load_play(run_dir: str | os.PathLike[str]) -> PlayRoot:
    """Like `load_command`, for a command that plays environments. Raises ConfigError for any other."""
    return _load(run_dir, PlayRoot, True)


def load_training(run_dir: str | os.PathLike[str]) -> TrainingRoot:
    """Like `load_command`, for a command that trains. Raises ConfigError for any other."""
    return _load(run_dir, TrainingRoot, True)


def _load(run_dir: str | os.PathLike[str], kind: type, secrets: bool) -> Any:
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: {run_dir} is no run directory.")
    data = read(path)
    root = root_named(data.pop("defaults", None))
    use_own_names(data)  # of a version in which a key had another name
    if not issubclass(root.schema, kind):
        raise ConfigError(f"{run_dir} is a directory of `rlx {root.command}`, not of this command.\n  fix: use rlx {root.command}")
    # Modules that it names may lie here. PYTHONPATH cannot say so where another rlx does, too: it would come before an installed one.
    if sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    private = path.with_name(SECRETS)
    for key, value in read(private).items() if secrets and private.exists() else ():
        merge(data, nested(key, value))
    builder = Builder(root.schema, hint=partial(suggest, root.schema))
    cfg = builder.build(root.schema, data)
    if not secrets:
        builder.missing = [(key, doc) for key, doc in builder.missing if key not in builder.origins.secret]
    if builder.problems:
        raise ConfigError([f"{path}: {problem.text}" for problem in builder.problems])
    return cfg


def to_yaml(cfg: Any) -> str:
    """A configuration as the text of a `config.yaml`, with `<secret>` in place of its secrets."""
    root = root_of(cfg)
    return text_of(dataclasses.asdict(redacted(cfg)), root.command, root.schema_name)
