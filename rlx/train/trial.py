"""A trial of the open nodes (`loss`, `advantage`, `optim`) before anything starts: all are built, and a researcher's own loss or advantage
is called once on made-up numbers.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlx.advantages.base import GroupScores
from rlx.config.errors import ConfigError
from rlx.config.instantiate import all_nodes_of, instantiate
from rlx.config.schema import CommandConfig, split_terms
from rlx.config.signatures import READABLE
from rlx.losses.tokens import TokenBatch, TokenLoss

GROUP, TOKENS = 4, 3  # rollouts, and tokens of each
NOT_THEIRS = (Path(__file__).parents[1], Path(torch.__file__).parent, Path(np.__file__).parent)


def problem_of_loss(function: Callable[[TokenBatch], TokenLoss], reference: bool = True, teacher: bool = True) -> str | None:
    """What is wrong with an objective, with its file and line; None if nothing is.

    It sees 4 rollouts of 3 tokens, with every optional field that the run has. `reference`, `teacher`: whether it has these models.
    """
    draw = torch.Generator().manual_seed(0)
    count = GROUP * TOKENS

    def values(scale: float = 0.1) -> torch.Tensor:
        noise = scale * torch.randn(count, generator=draw, dtype=torch.float64)
        return torch.where(torch.arange(count) < TOKENS, 0.0, noise)  # the first rollout is exactly on policy

    lag = torch.tensor([1.0, 1.0, 1.0, 100.0], dtype=torch.float64).repeat_interleave(TOKENS)  # the last rollout is far from the policy
    logp, entropy = ((-1 + values()).requires_grad_(), (1 + values()).requires_grad_())
    lengths = torch.full((GROUP,), TOKENS)
    tokens = TokenBatch(
        logp=logp,
        old_logp=logp.detach() + lag * values(0.01),
        inference_logp=logp.detach() + lag * values(0.01),
        entropy=entropy,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64).repeat_interleave(TOKENS),
        rollout_ids=torch.arange(GROUP).repeat_interleave(TOKENS),
        rollout_lengths=lengths,
        ref_logp=logp.detach() + values() if reference else None,
        teacher_logp=logp.detach() + values() if teacher else None,
        group_lengths=torch.full((GROUP,), count),
        on_policy=torch.ones(GROUP, dtype=torch.bool),
    )
    try:
        found = function(tokens)
        fault = _fault(found, tokens)
    except (Exception, SystemExit) as error:
        return _raised(function, error)
    return _wrong(function, fault) if fault else None


def _fault(found: TokenLoss, tokens: TokenBatch) -> str:
    """What is wrong with an objective's result; empty if nothing is."""
    if not isinstance(found, TokenLoss):
        return f"it returned {_about(found)}, not a rlx.losses.tokens.TokenLoss: return TokenLoss(loss=…)"
    if found.unit not in ("token", "sequence"):
        return f'its unit is {found.unit!r}; it must be "token" or "sequence"'
    wanted, per = (GROUP, "rollout") if found.unit == "sequence" else (GROUP * TOKENS, "token")
    if tuple(getattr(found.loss, "shape", ())) != (wanted,):
        return f"its loss is {_about(found.loss)}; it must have one value per {per}, here [{wanted}]. rlx aggregates it"
    if not torch.isfinite(found.loss).all():
        return "its loss is not finite for ordinary numbers: ratios near 1, advantages between -1 and 1"
    if changed := [each.name for each in fields(tokens) if getattr(getattr(tokens, each.name), "_version", 0)]:
        return f"it changes tokens.{changed[0]} in place, which other objectives and the metrics read"
    whole = found.loss.sum() if found.penalty is None else found.loss.sum() + found.penalty.sum()
    inputs = (tokens.logp, tokens.entropy)
    gradients = torch.autograd.grad(whole, inputs, allow_unused=True, retain_graph=True) if whole.requires_grad else ()
    if not all(each is None or each.isfinite().all() for each in gradients):
        return "its gradient is not finite for ordinary numbers, among them tokens that are exactly on policy: ratio 1, log-ratio 0"
    if not any(each is not None and each.any() for each in gradients):
        return "its loss has no gradient, so nothing would be trained: it must depend on tokens.logp, not detached"
    return ""


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
        if not isinstance(found, Sequence) or len(found) != len(names):
            return _wrong(function, f"it returned {_about(found)}; it must return one array per group, here {len(names)}")
        for each in found:
            if np.shape(each) != (GROUP,):
                return _wrong(function, f"a group's advantages are {_about(each)}; they must have one value per rollout, here [{GROUP}]")
            if not np.isfinite(np.asarray(each, dtype=np.float64)).all():
                return _wrong(function, "its advantages are not finite for ordinary rewards: 1, 0, 0 and 0.5")
    except (Exception, SystemExit) as error:
        return _raised(function, error)
    return None


def problem_of_optimizer(made: Any, matrix: torch.nn.Parameter) -> str | None:
    """What is wrong with an optimizer that was built for a matrix. It makes one step."""
    if not isinstance(made, torch.optim.Optimizer):
        what = "a function" if isinstance(made, functools.partial) else _about(made)
        return _wrong(made, f"it is {what}; it must be a class of torch.optim.Optimizer, which rlx calls with the parameters")
    matrix.grad = torch.ones_like(matrix)
    try:
        made.step()
    except (Exception, SystemExit) as error:
        return _raised(made, error)
    return None


def _about(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}" + ("" if shape is None else f" of shape {list(shape)}")


def _raised(function: Any, error: BaseException) -> str:
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
    problems, matrix = [], torch.nn.Parameter(torch.zeros(4, 4))
    for name, (whole, terms) in all_nodes_of(cfg).items():
        node = dict(whole) if terms is None else split_terms(dict(whole), terms)[1]
        try:
            with _without_compiler():
                built = instantiate(node, **({"params": [matrix]} if name == "optim" else {}))
        except (Exception, SystemExit) as error:
            problems.append(f"{node['_target_']} cannot build `{name}`: {type(error).__name__}: {error}\n  fix: change {name}.*")
            continue
        if node["_target_"].partition(".")[0] in READABLE:  # what ships is tested
            continue
        kind, teacher = name.rpartition(".")[2], getattr(cfg, "teacher", None)
        if kind == "loss":
            scored = teacher is None or bool(teacher.base_url or teacher.demonstration or getattr(cfg, "replay", None))
            wrong = problem_of_loss(built, getattr(cfg, "uses_reference", True), scored)
        else:
            wrong = problem_of_optimizer(built, matrix) if kind == "optim" else problem_of_advantage(built, getattr(cfg, "envs", ()))
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
