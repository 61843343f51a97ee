"""The way to a configuration: `compose` from a command line, `load_run` from a run directory, `instantiate` for open nodes.

`compose` answers with a checked configuration or with one ConfigError that lists every problem found. The arguments of open nodes
are checked last, when all else is well. hydra is imported by `compose` alone, torch by `instantiate` (and for targets of your own).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rlx.config.checks import check
from rlx.config.errors import ConfigError
from rlx.config.rules import target_name
from rlx.config.schema import Config
from rlx.config.signatures import READABLE
from rlx.config.targets import check_targets, instantiate
from rlx.config.tree import Builder, Origins

if TYPE_CHECKING:
    from rlx.config.composition import Tree

__all__ = ["Composed", "compose", "finish", "instantiate", "load_run", "to_yaml"]

HEADER = """\
# The whole configuration of a run, every value resolved.
# Start another run of it: python train.py --config-dir DIRECTORY_OF_THIS_FILE --config-name config run.dir=…
defaults:
  - rlx_schema
  - _self_
"""


@dataclass(frozen=True)
class Composed:
    """A configuration that passed every check."""

    cfg: Config
    overrides: list[str]  # the command line's, as written
    choices: dict[str, str]  # group -> option; several are joined with "+"; empty where a resolved file was loaded
    notes: list[str]  # for the user: what `auto` chose
    origins: Origins = field(default_factory=Origins)

    @property
    def yaml(self) -> str:
        """The resolved configuration, loadable again as a primary configuration."""
        return to_yaml(self.cfg)

    @property
    def label(self) -> str:
        """`reverse_text-tiny-grpo`: environments, model and objective, fit for a file name."""
        model = self.choices.get("model") or Path(self.cfg.model.name).name
        loss = self.choices.get("loss") or target_name(self.cfg.loss)
        return "-".join(("+".join(self.cfg.envs), model, loss))


def compose(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Composed:
    """Compose and check the configuration that a command line asks for.

    `argv`: overrides (`loss=gspo`, `optim.lr=1e-6`) and hydra's `--config-dir`, `--config-name`, `--config-path`.
    `environ`: where `RLX_…` variables are read from; default the process's. Raises ConfigError with all problems.
    """
    from rlx.config.composition import compose_tree

    return finish(compose_tree(list(argv), os.environ if environ is None else environ))


def finish(tree: Tree) -> Composed:
    """Check a composed tree: types and unknown keys, then the rules between keys, then the targets of open nodes.

    Targets of the user's own are imported by the last; then the rules are asked again, for what those declare about themselves.
    """
    builder = Builder(Config, tree.origins)
    cfg = builder.build(Config, tree.data)
    problems = tree.problems + [problem for problem in builder.problems if not set(tree.unresolved) & set(problem.keys)]
    problems += check(cfg, tree.origins, tuple(key for problem in problems for key in problem.keys) + tuple(tree.unresolved))
    problems = problems or check_targets(cfg, tree.origins)
    if not problems and any(node["_target_"].partition(".")[0] not in READABLE for node in (cfg.loss, cfg.advantage)):
        problems = check(cfg, tree.origins)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return Composed(cfg, tree.overrides, tree.choices, tree.notes, tree.origins)


def load_run(run_dir: str | os.PathLike[str]) -> Config:
    """The configuration of a run, from `config.yaml` in its directory. It was checked when the run was made; types are checked again.

    Raises ConfigError when the file is absent or no configuration of this version.
    """
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: {run_dir} is no run directory.")
    data = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no configuration.")
    data.pop("defaults", None)
    builder = Builder(Config)
    cfg = builder.build(Config, data)
    if builder.problems:
        raise ConfigError([f"{path}: {problem.text}" for problem in builder.problems])
    return cfg


def to_yaml(cfg: Config) -> str:
    """A configuration as the text of a `config.yaml`."""
    return HEADER + yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False, allow_unicode=True, width=1000)
