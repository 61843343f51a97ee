"""Which objective and which advantage train each environment: the run's, or its own. Pure; reads the configuration only.

`envs.NAME.loss` and `envs.NAME.advantage` are complete nodes here: `rlx.config.per_env_loss` filled them in when the run was composed.
Equal nodes are one objective, whichever key they come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.config.schema import Config, TrainingRoot

Node = dict[str, Any]


def losses_of(cfg: TrainingRoot) -> dict[str, Node]:
    """Every objective that the configuration names, by its key: `loss`, and `envs.NAME.loss` of environments with their own."""
    return {"loss": cfg.loss} | _own(cfg, "loss")


def advantages_of(cfg: Config) -> dict[str, Node]:
    """Every advantage, alike."""
    return {"advantage": cfg.advantage} | _own(cfg, "advantage")


def _own(cfg: TrainingRoot, group: str) -> dict[str, Node]:
    nodes = {f"envs.{name}.{group}": getattr(env, group, None) for name, env in getattr(cfg, "envs", {}).items()}
    return {key: node for key, node in nodes.items() if node}


def loss_of(cfg: Config, env: str) -> Node:
    """The objective of an environment of the mix."""
    return cfg.envs[env].loss or cfg.loss


def advantage_of(cfg: Config, env: str) -> Node:
    """The advantage of an environment of the mix."""
    return cfg.envs[env].advantage or cfg.advantage


def trained_by(cfg: Config) -> list[tuple[Node, tuple[str, ...]]]:
    """The different objectives in use, each with its environments. The one of the first environment comes first.

    Without environments (a replay of a run's batches has some, a test may have none) it is the run's objective.
    """
    return _distinct([(loss_of(cfg, name), name) for name in cfg.envs]) or [(cfg.loss, ())]


def scored_by(cfg: Config) -> list[tuple[Node, tuple[str, ...]]]:
    """The different advantages in use, each with its environments, alike."""
    return _distinct([(advantage_of(cfg, name), name) for name in cfg.envs]) or [(cfg.advantage, ())]


def kl_of(loss: Node) -> Node:
    """The keys set in the `kl` of an objective; empty when it is not a section, which the check of targets reports."""
    kl = loss.get("kl")
    return kl if isinstance(kl, dict) else {}


def _distinct(nodes: list[tuple[Node, str]]) -> list[tuple[Node, tuple[str, ...]]]:
    firsts = [node for place, (node, _) in enumerate(nodes) if node not in [earlier for earlier, _ in nodes[:place]]]
    return [(node, tuple(name for other, name in nodes if other == node)) for node in firsts]
