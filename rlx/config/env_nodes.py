"""Fills in the objectives and advantages of single environments: `envs.math.loss=gspo` becomes the whole node of the preset `gspo`.

    envs.math.loss=gspo                       the preset; also the advantage that it chooses, for this environment only
    envs.math.loss={preset: gspo, eps_high: 0.1}, or envs.math.loss=gspo envs.math.loss.eps_high=0.1
    envs.math.loss.ce_coef=0.1                the run's own loss with this difference

Hydra cannot do it: a loss preset overrides the advantage of the whole run. So presets are read here, and inserted before interpolations
are resolved. The result is explicit in the run's `config.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from rlx.config.errors import ConfigError
from rlx.config.overrides import Groups, parse, value_of
from rlx.config.sources import is_shipped, label
from rlx.config.tree import Origins, closest, show

NODES = ("advantage", "loss")
_KEY = re.compile(r"(envs\.[^.]+|env)\.(loss|advantage)")


def as_presets(overrides: list[Override]) -> list[Override]:
    """The overrides, with `envs.NAME.loss=gspo` as `envs.NAME.loss={preset: gspo}`, so that other overrides can set keys inside."""
    return [
        parse([f"{o.key_or_group}={{preset: {value_of(o)}}}"])[0] if _KEY.fullmatch(o.key_or_group) and isinstance(value_of(o), str) else o
        for o in overrides
    ]


def fill_in(cfg: DictConfig, repository: CachingConfigRepository, groups: Groups, origins: Origins) -> None:
    """Replace the nodes of every environment in place. Raises ConfigError for a preset that does not exist or cannot serve here."""
    envs = cfg.get("envs")
    problems: list[str] = []
    for name in list(envs) if isinstance(envs, DictConfig) else []:
        env = envs._get_node(name)
        if isinstance(env, DictConfig):
            _fill(cfg, env, f"envs.{name}", repository, groups, origins, problems)
    if problems:
        raise ConfigError(problems)


def _fill(
    cfg: DictConfig, env: DictConfig, key: str, repository: CachingConfigRepository, groups: Groups, origins: Origins, problems: list[str]
) -> None:
    chosen: str | None = None  # the advantage that the loss preset chooses
    for group in reversed(NODES):
        given = _plain(env._get_node(group)) if group in env else None
        own = f"{key}.{group}"
        if isinstance(given, str):
            given = {"preset": given}
        if group == "advantage" and not given and chosen is not None:
            given = {"preset": chosen}
            origins.note([own], f"the advantage of {key}.loss", of_group=True, shipped=True)
        if not isinstance(given, dict) or not given:
            continue  # empty, or of a wrong type, which the check of types reports
        if "preset" in given:
            preset = str(given["preset"])
            if preset not in groups.options(group):
                near = closest(preset, groups.options(group), 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                origin = origins.find(f"{own}.preset") or origins.find(own)
                problems.append(
                    f"there is no {group}={show(preset)}: {own}={show(preset)}" + (f" ({origin})" if origin else "") + f".{hint}\n"
                    f"Choices: {', '.join(groups.options(group))}."
                )
                continue
            node, advantage = _preset(f"{group}/{preset}", repository, own, origins)
            chosen = advantage if group == "loss" else chosen
            given = {
                name: value for name, value in given.items() if name != "preset" and _set_with(f"{own}.{name}", f"{own}.preset", origins)
            }
        elif "_target_" in given:
            continue  # a whole node already, as in a run's own config.yaml
        else:
            node = OmegaConf.to_container(cfg._get_node(group), resolve=False)  # type: ignore[assignment]
        with open_dict(env):
            env[group] = OmegaConf.merge(node, given)


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else None if node is None else node._value()


def _set_with(key: str, preset: str, origins: Origins) -> bool:
    """Whether a key was set by the source that chose the preset, or by a later one. An earlier source meant another preset."""
    order = list(origins.of_key)
    inside = [known for known in order if known == key or known.startswith(f"{key}.")]
    if preset not in origins.of_key or not inside:
        return True
    return any(origins.of_key[known] == origins.of_key[preset] or order.index(known) > order.index(preset) for known in inside)


def _preset(path: str, repository: CachingConfigRepository, own: str, origins: Origins) -> tuple[dict[str, Any], str | None]:
    """A preset's node, and the advantage that its file chooses. Raises ConfigError if its file builds on something else."""
    loaded = repository.load_config(path)
    assert loaded is not None, path
    node: dict[str, Any] = {}
    advantage: str | None = None
    before = True  # `_self_` comes last unless it is listed
    content: Any = OmegaConf.to_container(loaded.config, resolve=False)
    for default in loaded.defaults_list or []:
        if isinstance(default, ConfigDefault) and default.path == "_self_":
            node = _merged(node, content)
            before = False
        elif isinstance(default, ConfigDefault) and default.path is not None:
            inner, chosen = _preset(f"{path.rpartition('/')[0]}/{default.path}", repository, own, origins)
            node, advantage = _merged(node, inner), chosen or advantage
        elif isinstance(default, GroupDefault) and default.group is not None and default.group.strip("/") == "advantage":
            advantage = str(default.value)
        else:
            raise ConfigError(
                f"{own}: {label(loaded, path)} sets more than an objective and its advantage, so it cannot serve one environment. "
                "Use a preset that does not, or set the objective for the whole run."
            )
    if before:
        node = _merged(node, content)
    fresh = [f"{own}.{name}" for name in content if f"{own}.{name}" not in origins.of_key]
    origins.note(fresh, label(loaded, path), of_group=True, shipped=is_shipped(loaded))
    return node, advantage


def _merged(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[str, Any]:
    merged: Any = OmegaConf.to_container(OmegaConf.merge(a, b), resolve=False)
    return {str(name): value for name, value in merged.items()}
