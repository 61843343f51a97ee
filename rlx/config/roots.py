"""Configuration roots: the dataclass that a command is configured by, and the file in `conf/` that it begins with.

A root is made of the sections of `schema.py`, as many as its command needs. Composition, types, rules between keys, environment variables
and open nodes work on any root: a rule that reads a key the root has not got is skipped, and so are the values that a file of a group
(`model=tiny` sets `optim.lr`) or a variable (`RLX_MAX_STEPS`) holds for another command. What nobody has is an unknown key everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from rlx.config.schema import Config
from rlx.config.tree import type_at

T = TypeVar("T")


@dataclass(frozen=True)
class Root(Generic[T]):
    """What one command is configured by."""

    command: str  # `train` begins with conf/train.yaml
    schema: type[T]  # every key, with its type, default and meaning


TRAIN = Root("train", Config)
ROOTS: tuple[Root, ...] = (TRAIN,)  # a command that is added brings its root


def has_key(cls: type, key: str) -> bool:
    """Whether a schema has a dotted key, in its open nodes too."""
    try:
        type_at(cls, key)
    except KeyError:
        return False
    return True


def key_of(group: str) -> str:
    """The key that the options of a group set."""
    return "envs" if group == "env" else group


def elsewhere(cls: type, key: str) -> str | None:
    """The command that has the `key` which this schema lacks."""
    return next((root.command for root in ROOTS if root.schema is not cls and has_key(root.schema, key)), None)


def where_else(cls: type, key: str) -> str:
    """`It is a key of ...` for a key that another command has; else nothing."""
    command = elsewhere(cls, key)
    return f"It is a key of `rlx {command}`." if command else ""
