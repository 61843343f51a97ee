"""A trial construction of the open nodes of a configuration (`loss`, `advantage`, `optim`), before anything starts."""

from __future__ import annotations

import torch

from rlx.config.errors import ConfigError
from rlx.config.schema import CommandConfig, split_terms
from rlx.config.targets import all_nodes_of, instantiate


def check_built(cfg: CommandConfig) -> None:
    """Build every open node once, as the roles will. A constructor that refuses a value then fails before anything has started.

    Raises ConfigError with the nodes and their targets' errors.
    """
    problems = []
    for name, (whole, terms) in all_nodes_of(cfg).items():
        node = dict(whole) if terms is None else split_terms(dict(whole), terms)[1]
        try:
            instantiate(node, **({"params": [torch.nn.Parameter(torch.zeros(1))]} if name == "optim" else {}))
        except Exception as error:
            problems.append(f"{node['_target_']} cannot build `{name}`: {type(error).__name__}: {error}\n  fix: change {name}.*")
    if problems:
        raise ConfigError(problems)
