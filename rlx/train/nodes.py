"""A trial construction of the open nodes of a configuration (`loss`, `advantage`, `optim`), before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

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
            with _without_compiler():
                instantiate(node, **({"params": [torch.nn.Parameter(torch.zeros(1))]} if name == "optim" else {}))
        except Exception as error:
            problems.append(f"{node['_target_']} cannot build `{name}`: {type(error).__name__}: {error}\n  fix: change {name}.*")
    if problems:
        raise ConfigError(problems)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Leave out the compiler of torch. The constructor of every optimizer imports it, to be left alone by it, which takes two seconds."""
    plain = {name: inspect.unwrap(getattr(torch.optim.Optimizer, name)) for name in ("__init__", "add_param_group")}
    with patch.multiple(torch.optim.Optimizer, **plain):
        yield
