"""A trial of the open nodes (`loss`, `advantage`, `optim`) before anything starts: all are built, a user's own called once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlx.config.errors import ConfigError
from rlx.config.schema import CommandConfig, split_terms
from rlx.config.signatures import READABLE
from rlx.config.targets import all_nodes_of, instantiate
from rlx.train.trial import problem_of_advantage, problem_of_loss


def check_built(cfg: CommandConfig) -> None:
    """Build every open node once, as the roles will, and call a loss or an advantage of the user's own on made-up numbers.

    Raises ConfigError with the nodes and their targets' errors.
    """
    problems = []
    for name, (whole, terms) in all_nodes_of(cfg).items():
        node = dict(whole) if terms is None else split_terms(dict(whole), terms)[1]
        try:
            with _without_compiler():
                built = instantiate(node, **({"params": [torch.nn.Parameter(torch.zeros(1))]} if name == "optim" else {}))
        except Exception as error:
            problems.append(f"{node['_target_']} cannot build `{name}`: {type(error).__name__}: {error}\n  fix: change {name}.*")
            continue
        kind = name.rpartition(".")[2]
        if kind in ("loss", "advantage") and node["_target_"].partition(".")[0] not in READABLE:  # what ships is tested
            wrong = problem_of_loss(built) if kind == "loss" else problem_of_advantage(built, getattr(cfg, "envs", ()))
            if wrong is not None:
                problems.append(f"{node['_target_']} ({name}) fails on made-up numbers:\n  {wrong}")
    if problems:
        raise ConfigError(problems)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Leave out the compiler of torch. The constructor of every optimizer imports it, to be left alone by it, which takes two seconds."""
    own = {name: getattr(torch.optim.Optimizer, name) for name in ("__init__", "add_param_group")}
    for name, function in own.items():
        setattr(torch.optim.Optimizer, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(torch.optim.Optimizer, name, function)
