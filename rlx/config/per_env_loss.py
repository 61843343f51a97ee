"""Fills in the objectives and advantages of single environments: `envs.math.loss=gspo` becomes the whole node of the preset `gspo`.

    envs.math.loss=gspo                       the preset; also the advantage that it chooses, for this environment only
    envs.math.loss={preset: gspo, eps_high: 0.1}, or envs.math.loss=gspo envs.math.loss.eps_high=0.1
    envs.math.loss.ce_coef=0.1                the run's own loss with this difference

The result is explicit in the run's `config.yaml`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from rlx.config.nested import merge
from rlx.config.validate import Origins

NODES = ("loss", "advantage")
KEY = re.compile(r"envs\.[^.]+\.(loss|advantage)")

Preset = tuple[dict[str, Any], str | None]
"""A preset's node, and the advantage that its file chooses."""


def as_node(given: Any) -> Any:
    """`gspo` as `{preset: gspo}`, so that keys inside can be set."""
    return {"preset": given} if isinstance(given, str) else given


def spell_out(data: dict[str, Any]) -> None:
    """Write presets as nodes, in place, so that the command line can set keys inside."""
    for _, env in _envs(data):
        env.update({group: as_node(env[group]) for group in NODES if group in env})


def fill_in(data: dict[str, Any], origins: Origins, preset_of: Callable[[str, str, str], Preset]) -> None:
    """Replace the nodes of every environment in place. `preset_of(group, option, key)` finds the preset for the node at `key`."""
    for name, env in _envs(data):
        chosen: str | None = None  # the advantage that the loss preset chooses
        for group in NODES:
            given, key = env.get(group), f"envs.{name}.{group}"
            if group == "advantage" and not given and chosen is not None:
                given = {"preset": chosen}
                origins.note([key], f"the advantage of envs.{name}.loss", of_group=True, shipped=True)
            if not isinstance(given, dict) or not given or "_target_" in given:
                continue  # empty, a whole node as in a run's own config.yaml, or of a wrong type, which the check of types reports
            given = dict(given)
            if (option := given.pop("preset", None)) is not None:
                node, advantage = preset_of(group, str(option), key)
                chosen = advantage if group == "loss" else None
            else:
                node = copy.deepcopy(data[group])
            merge(node, given)
            env[group] = node


def _envs(data: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    envs = data.get("envs")
    return [(name, env) for name, env in envs.items() if isinstance(env, dict)] if isinstance(envs, dict) else []
