"""Configuration roots: the dataclass that configures a command, and the file in `conf/` that the command starts from.

A root consists of those sections of `schema.py` that its command needs. Composition, types, rules between keys, environment variables
and open nodes work with any root. Rules are skipped if they read a key that the root lacks. Values for another command are skipped, too:
group files (`model=tiny` sets `optim.lr`) and variables (`RLX_MAX_STEPS`) may hold some. A key that no root has is an error everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from rlx.config.schema import Config
from rlx.config.tree import type_at

T = TypeVar("T")


@dataclass(frozen=True)
class Root(Generic[T]):
    """The configuration of one command."""

    command: str  # `train` starts from conf/train.yaml
    schema: type[T]  # every key, with its type, default and meaning


TRAIN = Root("train", Config)
ROOTS: tuple[Root, ...] = (TRAIN,)  # a new command adds its root here


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


def elsewhere(cls: type, key: str) -> str | None:
    """Another command whose schema has the `key`; None if there is none."""
    return next((root.command for root in ROOTS if root.schema is not cls and has_key(root.schema, key)), None)


def where_else(cls: type, key: str) -> str:
    """`It is a key of …` when another command has the key; else an empty string."""
    command = elsewhere(cls, key)
    return f"It is a key of `rlx {command}`." if command else ""
