"""Which key the user probably meant by one that does not exist."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from rlx.config.tree import Origins, closest, leaves, split_optional, types_of

ALIASES = {  # the name that other frameworks have for it -> key
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_norm",
    "beta": "loss.kl.beta",
    "kl_coef": "loss.kl.beta",
    "group_size": "orchestrator.rollouts_per_example",
}

REMOVED = {  # key of an earlier version -> what holds now
    "weight_broadcast.drain_tokens": "An update waits for no requests: they go on under the new version.",
    "weight_broadcast.keep_kv": "An update always computes the keys and values of running requests again.",
    "weight_broadcast.in_turn": "All servers are updated at the same time.",
    "orchestrator.max_reward_errors": "Use orchestrator.max_error_rate; 1 for any number.",
    "orchestrator.max_off_policy_steps": "Use max_async_level: no token is trained that is older than so many versions.",
    "max_off_policy_steps": "Use max_async_level: no token is trained that is older than so many versions.",
    "kubernetes": "Runs on Kubernetes start with the chart, helm install NAME charts/rlx (docs/kubernetes.md).",
    "hardware.data_parallel": "Use hardware.inference_replicas for more servers.",
    "hardware.data_parallel_local": "Use hardware.inference_replicas for more servers.",
}


def near_keys(cls: type, key: str, of_nodes: Iterable[str] = ()) -> list[str]:
    """The keys that the user probably meant by the unknown `key`, best first: in its section, elsewhere by its name, or spelt alike.

    `of_nodes`: the keys that open nodes have, such as `optim.lr`, which the schema does not list. Those of the same name come first.
    """
    last = key.rpartition(".")[2]
    alias = [ALIASES[last]] if last in ALIASES and ALIASES[last] != key and ALIASES[last].partition(".")[0] in types_of(cls) else []
    if first := [*alias, *(each for each in of_nodes if each.rpartition(".")[2] == last and each not in (key, *alias))]:
        return first[:3]
    prefix, section = deepest(cls, key)
    known = list(leaves(cls))
    name, _, rest = key.removeprefix(prefix).partition(".")
    near = [f"{prefix}{found}.{rest}" if rest else f"{prefix}{found}" for found in closest(name, list(types_of(section)))]
    if rest:
        near = [found for found in near if found in known]
    near += [leaf for leaf in known if leaf.rpartition(".")[2] == key.rpartition(".")[2] and leaf not in near]
    if not set(near) & set(known):  # nothing found but sections
        near = closest(key, [*near, *known])
    return near[:3]


def deepest(cls: type, key: str) -> tuple[str, type]:
    """The innermost section around `key` that the schema has: its prefix, such as `envs.math.sampling.`, and its dataclass."""
    kind: Any = cls
    prefix, walked, section = "", "", cls
    for part in key.split("."):
        if is_dataclass(kind):
            metadata = next((f.metadata for f in fields(kind) if f.name == part), None)
            kind = (metadata and metadata.get("terms")) or split_optional(types_of(typing.cast(type, kind)).get(part))[0]
        else:
            kind = typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None
        walked = f"{walked}{part}."
        if is_dataclass(kind):
            prefix, section = walked, typing.cast(type, kind)
    return prefix, section


def suggest(cls: type, key: str, origins: Origins | None = None) -> str:
    """A hint for the unknown `key`: similar keys, or the keys of its section. `origins` know the keys of the chosen open nodes."""
    if (gone := key if key in REMOVED else key.partition(".")[0]) in REMOVED:
        return REMOVED[gone]
    set_in_files = [each for each in origins.of_key if each not in origins.typed] if origins else []  # a typed one may be wrong itself
    of_nodes = [each for each in set_in_files if each.partition(".")[0] in ("optim", "loss", "advantage")]
    if near := near_keys(cls, key, of_nodes):
        return "Did you mean " + " or ".join(f"`{found}`" for found in near) + "?"
    prefix, section = deepest(cls, key)
    where = f"`{prefix[:-1]}`" if prefix else "The configuration"
    return f"{where} has the keys {', '.join(sorted(types_of(section)))}."
