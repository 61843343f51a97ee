"""What is known of an environment before a run, and the digests that say whether it still holds.

`rlx.envs.probe` finds it out, in a process of its own. This module imports none of what they need, so that a dry run
starts quickly.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

# of an environment's configuration, that loading it needs
FIELDS = ("id", "args", "split", "agents", "agents_per_group", "num_tasks", "on_reward_error", "sandbox", "box", "harness")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedItem:
    """An argument, a reward function, a tool or an agent."""

    name: str
    doc: str = ""
    type: str = ""  # of an argument
    default: str | None = None  # of an argument; None: it must be given
    weight: float | None = None  # of a reward function; 0: a metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What is known of one environment before the run."""

    kind: str = ""  # "classic" or "v1"
    type: str = ""  # names of its classes, such as `ToolEnv`
    doc: str = ""  # first paragraph of what its module says
    arguments: tuple[ProbedItem, ...] = ()
    examples: int = 0
    rewards: tuple[ProbedItem, ...] = ()
    tools: tuple[ProbedItem, ...] = ()
    agents: tuple[ProbedItem, ...] = ()  # of a v1 environment
    scores_groups: bool = False
    prompt: str = ""  # of the first example
    prompt_chars: int = 0  # characters of the shortest prompt among the first examples; 0: not known
    seconds: float = 0.0  # of loading, without the import of verifiers
    problem: str | None = None  # why it cannot be used, for people; what only loading shows is then not known
    fix: str = ""  # what to do about the problem

    def __str__(self) -> str:
        """`classic, 4,096 examples, tools add, subtract`"""
        names = ", ".join(tool.name for tool in self.tools)
        tools, compares = f", tools {names}" if names else "", ", rewards compare a group" * self.scores_groups
        return f"{self.kind}, {self.examples:,} example{'s' * (self.examples != 1)}{tools}{compares}"


def file_digest(path: str | Path) -> str:
    """Digest of a file's content; empty if it cannot be read."""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def packages_digest(folder: str | Path) -> str:
    """Digest of the names and versions of the packages that are installed in a folder."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info", ".egg-link", ".pth")))
    except OSError:
        return ""
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()
