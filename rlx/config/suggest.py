"""Which key the user probably meant by one that does not exist."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.config.nested import RENAMED, SYNONYMS
from rlx.config.validate import Origins, closest, leaves, types_of

ALIASES = {  # the name that other frameworks have for it → key; a synonym's last part counts, too
    **{name.rpartition(".")[2]: key for name, key in SYNONYMS.items() if name not in RENAMED and not name.startswith("monitors.")},
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.max_norm",
    "weight_decay": "optim.weight_decay",
    "beta": "loss.kl.beta",
    "kl_coef": "loss.kl.beta",
}


def near_keys(cls: type, key: str, of_nodes: Iterable[str] = ()) -> list[str]:
    """The keys that the user probably meant by the unknown `key`: what others call so, of the same name, or spelt alike.

    `of_nodes`: the keys that open nodes have, such as `optim.lr`, which the schema does not list.
    """
    known, last = [*of_nodes, *leaves(cls)], key.rpartition(".")[2]
    alias = [ALIASES[last]] if ALIASES.get(last, "").partition(".")[0] in types_of(cls) else []
    same = [each for each in known if each.rpartition(".")[2] == last]
    return [each for each in dict.fromkeys([*alias, *same, *closest(key, known)]) if each != key][:3]


def suggest(cls: type, key: str, origins: Origins | None = None) -> str:
    """A hint for the unknown `key`: similar keys, or the keys of its section. `origins` know the keys of the chosen open nodes."""
    set_in_files = [each for each in origins.of_key if each not in origins.typed] if origins else []  # a typed one may be wrong itself
    if near := near_keys(cls, key, [each for each in set_in_files if each.partition(".")[0] in ("optim", "loss", "advantage")]):
        return "Did you mean " + " or ".join(f"`{found}`" for found in near) + "?"
    section = key.rpartition(".")[0]
    inside = [leaf.removeprefix(f"{section}.") for leaf in leaves(cls) if leaf.startswith(f"{section}.") or not section]
    return f"{section or 'The configuration'} has the keys {', '.join(sorted({leaf.partition('.')[0] for leaf in inside}))}."
