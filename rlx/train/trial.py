"""A trial of the open nodes (`loss`, `advantage`, `optim`) before anything starts: all are built, and a researcher's own loss or advantage
is called once on made-up numbers.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlx.advantages.base import GroupScores
from rlx.config.errors import ConfigError
from rlx.config.schema import CommandConfig, split_terms
from rlx.config.signatures import READABLE
from rlx.config.targets import all_nodes_of, instantiate
from rlx.losses.tokens import TokenBatch, TokenLoss

GROUP, TOKENS = 4, 3  # rollouts, and tokens of each
NOT_THEIRS = (Path(__file__).parents[1], Path(torch.__file__).parent, Path(np.__file__).parent)


def problem_of_loss(function: Callable[[TokenBatch], TokenLoss]) -> str | None:
    """What is wrong with an objective, with its file and line; None if nothing is.

    It sees 4 rollouts of 3 tokens, with every optional field.
    """
    draw = torch.Generator().manual_seed(0)
    count = GROUP * TOKENS

    def values(scale: float = 0.1) -> torch.Tensor:
        return scale * torch.randn(count, generator=draw, dtype=torch.float64)

    logp, entropy = ((-1 + values()).requires_grad_(), (1 + values()).requires_grad_())
    lengths = torch.full((GROUP,), TOKENS)
    tokens = TokenBatch(
        logp=logp,
        old_logp=logp.detach() + values(0.01),
        inference_logp=logp.detach() + values(0.01),
        entropy=entropy,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64).repeat_interleave(TOKENS),
        rollout_ids=torch.arange(GROUP).repeat_interleave(TOKENS),
        rollout_lengths=lengths,
        ref_logp=logp.detach() + values(),
        teacher_logp=logp.detach() + values(),
        group_lengths=torch.full((GROUP,), count),
        on_policy=torch.ones(GROUP, dtype=torch.bool),
    )
    try:
        found = function(tokens)
    except Exception as error:
        return _raised(function, error)
    if not isinstance(found, TokenLoss):
        return _wrong(function, f"it returned {_about(found)}, not a rlx.losses.tokens.TokenLoss: return TokenLoss(loss=…)")
    wanted, per = (GROUP, "rollout") if found.unit == "sequence" else (count, "token")
    if tuple(getattr(found.loss, "shape", ())) != (wanted,):
        return _wrong(function, f"its loss is {_about(found.loss)}; it must have one value per {per}, here [{wanted}]. rlx aggregates it")
    if not torch.isfinite(found.loss).all():
        return _wrong(function, "its loss is not finite for ordinary numbers: ratios near 1, advantages between -1 and 1")
    if not found.loss.requires_grad:
        return _wrong(function, "its loss has no gradient, so nothing would be trained: it must depend on tokens.logp, not detached")
    return None


def problem_of_advantage(function: Callable[[GroupScores], Any], envs: Iterable[str]) -> str | None:
    """What is wrong with an advantage, alike. It sees a group of 4 rollouts of each environment."""
    names = list(envs) or ["environment"]
    groups = GroupScores(
        rewards=[np.array([1.0, 0.0, 0.0, 0.5])] * len(names),
        lengths=[np.array([3, 5, 2, 4])] * len(names),
        longest_turns=[np.array([3, 5, 2, 4])] * len(names),
        envs=names,
    )
    try:
        found = function(groups)
    except Exception as error:
        return _raised(function, error)
    if not isinstance(found, Sequence) or len(found) != len(names):
        return _wrong(function, f"it returned {_about(found)}; it must return one array per group, here {len(names)}")
    for each in found:
        if np.shape(each) != (GROUP,):
            return _wrong(function, f"a group's advantages are {_about(each)}; they must have one value per rollout, here [{GROUP}]")
        if not np.isfinite(each).all():
            return _wrong(function, "its advantages are not finite for ordinary rewards: 1, 0, 0 and 0.5")
    return None


def _about(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}" + ("" if shape is None else f" of shape {list(shape)}")


def _raised(function: Any, error: Exception) -> str:
    """An error in its author's words, at the innermost line of the author's own."""
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not any(Path(frame.filename).is_relative_to(p) for p in NOT_THEIRS)
    ]
    where = f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else _place(function)
    return f"{where}\n  {type(error).__name__}: {error}"


def _wrong(function: Any, what: str) -> str:
    return f"{_place(function)}\n  {what}"


def _place(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        return f"{inspect.getsourcefile(code)}, line {inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return repr(code)


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
