"""Configuration roots: the dataclass that configures a command, and the file in `conf/` that the command starts from.

A root consists of those sections of `schema.py` that its command needs. Composition, types, rules between keys, environment variables
and open nodes work with any root. Rules are skipped if they read a key that the root lacks. Values for another command are skipped, too:
group files (`model=tiny` sets `optim.lr`) and variables (`RLX_MAX_STEPS`) may hold some. A key that no root has is an error everywhere.

A run's `config.yaml` names its root by the schema at the head of its defaults list (`Root.schema_name`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlx.config import from_run
from rlx.config.from_run import Inherited
from rlx.config.schema import CommandConfig, Config, SftRoot
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.config.validate import type_at

T = TypeVar("T")
PREFIX = "rlx_schema"


@dataclass(frozen=True)
class Root(Generic[T]):
    """The configuration of one command."""

    command: str  # `train` starts from conf/train.yaml
    schema: type[T]  # every key, with its type, default and meaning
    inherits: Callable[[Mapping[str, Any], Sequence[str]], Sequence[Inherited]] = field(default=lambda data, chosen: (), compare=False)
    """Values that other places give to a composed tree: the run whose weights are used, a named endpoint. They are weaker than variables,
    the user's file and the command line. Called with the tree and the groups that the user has chosen."""

    @property
    def schema_name(self) -> str:
        """Its name in the defaults list of a run's `config.yaml`: `rlx_schema` for `train`, `rlx_schema_eval` for `eval`."""
        return PREFIX if self.command == "train" else f"{PREFIX}_{self.command}"


TRAIN = Root("train", Config)
EVAL = Root("eval", EvalRoot, from_run.of_model)
SFT = Root("sft", SftRoot)
SYNTHESIZE = Root("synthesize", SynthesizeRoot, from_run.of_model)
ROOTS: tuple[Root, ...] = (TRAIN, SFT, EVAL, SYNTHESIZE)  # a new command adds its root here


def root_of(cfg: CommandConfig | type) -> Root:
    """The root of a configuration or of its class."""
    cls = cfg if isinstance(cfg, type) else type(cfg)
    return next(root for root in ROOTS if root.schema is cls)


def root_named(defaults: object) -> Root:
    """The root that the defaults list of a `config.yaml` names; `train` if it names none."""
    names = {root.schema_name: root for root in ROOTS}
    return next((names[each] for each in (defaults if isinstance(defaults, list) else ()) if each in names), TRAIN)


def has_key(cls: type, key: str) -> bool:
    """Whether a schema has a dotted key, also inside open nodes."""
    try:
        type_at(cls, key)
    except KeyError:
        return False
    return True


def key_of(group: str) -> str:
    """The key that the options of a group set."""
    return "envs" if group == "env" else group


def where_else(cls: type, key: str) -> str:
    """`It is a key of …` when another command has the key; else an empty string."""
    command = next((root.command for root in ROOTS if root.schema is not cls and has_key(root.schema, key)), None)
    return f"It is a key of `rlx {command}`." if command else ""
