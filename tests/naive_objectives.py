"""Every objective once more, as naive as it can be written: Python loops over rollouts and tokens, float64 numbers, no vectors.

Independent of `rlx.losses` on purpose: written from the formulas, it shares no line with what it tests. Autograd of these loops gives
the gradients to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class NaiveRollout:
    """The trainable tokens of one rollout; `logp` and `entropy` are scalars with gradient, the rest are floats."""

    logp: list[Tensor]
    old: list[float]
    inf: list[float]
    ref: list[float]
    adv: list[float]
    entropy: list[Tensor]
    on_policy: bool = False


def value(x: Tensor | float) -> float:
    """Stop-gradient."""
    return float(x.detach()) if isinstance(x, Tensor) else float(x)


def exp(x):
    """Of a log-ratio clamped to ±20; outside, a constant."""
    if value(x) > 20:
        return math.exp(20)
    if value(x) < -20:
        return math.exp(-20)
    return torch.exp(x) if isinstance(x, Tensor) else math.exp(x)


def clip(x, low, high):
    if value(x) < low:
        return low
    return high if value(x) > high else x


def smaller(a, b):
    return a if value(a) <= value(b) else b


def reinforce(r: NaiveRollout) -> list:
    return [-a * lp for lp, a in zip(r.logp, r.adv, strict=True)]


def sft(r: NaiveRollout) -> list:
    return [-lp for lp in r.logp]


def grpo(r: NaiveRollout, low: float = 0.2, high: float = 0.2) -> list:
    loss = []
    for lp, old, a in zip(r.logp, r.old, r.adv, strict=True):
        ratio = exp(lp - old)
        loss.append(-1 * smaller(ratio * a, clip(ratio, 1 - low, 1 + high) * a))
    return loss


def gspo(r: NaiveRollout, low: float = 3e-4, high: float = 4e-4) -> list:
    if not r.logp:
        return []
    ratio = exp(sum(lp - old for lp, old in zip(r.logp, r.old, strict=True)) / len(r.logp))
    a = r.adv[0]  # outcome credit: the same for every token
    return [-1 * smaller(ratio * a, clip(ratio, 1 - low, 1 + high) * a)] * len(r.logp)


def gspo_token(r: NaiveRollout, low: float = 3e-4, high: float = 4e-4) -> list:
    if not r.logp:
        return []
    sequence = exp(sum(value(lp) - old for lp, old in zip(r.logp, r.old, strict=True)) / len(r.logp))
    loss = []
    for lp, a in zip(r.logp, r.adv, strict=True):
        ratio = sequence * torch.exp(lp - value(lp))
        loss.append(-1 * smaller(ratio * a, clip(ratio, 1 - low, 1 + high) * a))
    return loss


def rloo(r: NaiveRollout, cap: float = 10.0) -> list:
    weight = 1.0 if r.on_policy else min(exp(sum(value(lp) - old for lp, old in zip(r.logp, r.old, strict=True))), cap)
    return [-weight * a * lp for lp, a in zip(r.logp, r.adv, strict=True)]


def opo(r: NaiveRollout, cap: float = 10.0) -> list:
    return [-min(exp(value(lp) - old), cap) * a * lp for lp, old, a in zip(r.logp, r.old, r.adv, strict=True)]


def cispo(r: NaiveRollout, low: float = 1.0, high: float = 4.0) -> list:
    return [-clip(exp(value(lp) - old), 1 - low, 1 + high) * a * lp for lp, old, a in zip(r.logp, r.old, r.adv, strict=True)]


def aipo(r: NaiveRollout, delta: float = 8.0) -> list:
    return [-min(exp(value(lp) - inf), delta) * a * lp for lp, inf, a in zip(r.logp, r.inf, r.adv, strict=True)]


def masked_is(r: NaiveRollout, kl_tau: float = 0.0) -> list:
    if not r.logp:
        return []
    logs = [value(lp) - old for lp, old in zip(r.logp, r.old, strict=True)]
    mean = exp(sum(logs) / len(logs))
    spoilt = mean < 0.1 or mean > 10 or any(exp(x) > 100 for x in logs)
    loss = []
    for lp, inf, a, x in zip(r.logp, r.inf, r.adv, logs, strict=True):
        if spoilt or exp(x) < 0.125 or exp(x) > 8:
            loss.append(0.0 * lp)
        else:
            loss.append(-exp(value(lp) - inf) * (a - kl_tau * min(max(x, -20), 20)) * lp)
    return loss


def dppo(r: NaiveRollout, low: float = 0.2, high: float = 0.2, kl_tau: float = 1e-3) -> list:
    loss = []
    for lp, old, inf, a in zip(r.logp, r.old, r.inf, r.adv, strict=True):
        moved = math.exp(value(lp)) - math.exp(inf)
        left_out = (a > 0 and moved > high) or (a < 0 and moved < -low)
        loss.append((0.0 if left_out else -exp(lp - old) * a) + kl_tau * (lp - inf) ** 2)
    return loss


def squared(r: NaiveRollout, kl_tau: float) -> list:
    """The penalty of dppo, for where it is added behind something else."""
    return [kl_tau * (lp - inf) ** 2 for lp, inf in zip(r.logp, r.inf, strict=True)]


def sapo(r: NaiveRollout, pos: float = 1.0, neg: float = 1.05) -> list:
    loss = []
    for lp, old, a in zip(r.logp, r.old, r.adv, strict=True):
        tau = pos if a > 0 else neg
        ratio = exp(lp - old)
        gate = 1 / (1 + torch.exp(-torch.as_tensor(tau * (ratio - 1), dtype=torch.float64)))
        loss.append(-gate * 4 / tau * a)
    return loss


def opd(r: NaiveRollout, delta: float = 8.0) -> list:
    loss = []
    for lp, inf, ref in zip(r.logp, r.inf, r.ref, strict=True):
        loss.append(-min(exp(value(lp) - inf), delta) * (ref - value(lp)) * lp)
    return loss


def kl(name: str, lp: Tensor, ref: float) -> Tensor:
    d = ref - lp
    if name == "k1":
        return -d
    if name == "k2":
        return d * d / 2
    if value(d) > 20:  # constant from there on
        return math.exp(20) - 21 + 0 * d
    return torch.exp(d) - 1 - d


def corrected(loss: list, r: NaiveRollout, kind: str, cap: float) -> list:
    ratios = [exp(old - inf) for old, inf in zip(r.old, r.inf, strict=True)]
    if kind.startswith("seq_"):
        ratios = [exp(sum(old - inf for old, inf in zip(r.old, r.inf, strict=True)))] * len(loss)
    if kind.endswith("tis"):
        return [min(ratio, cap) * x for ratio, x in zip(ratios, loss, strict=True)]
    if kind.endswith("mis"):
        return [x if 1 / cap <= ratio <= cap else 0.0 * value(x) for ratio, x in zip(ratios, loss, strict=True)]
    return loss


def aggregate(name: str, losses: Sequence[list], n_tok: int, n_seq: int, max_length: int, in_group: Sequence[int], n_groups: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for loss, group in zip(losses, in_group, strict=True):
        for x in loss:
            scale = {
                "token_mean": n_tok,
                "seq_mean": n_seq * len(loss),
                "seq_sum": n_seq,
                "fixed_length": n_seq * max_length,
                "group_token_mean": n_groups * group,
            }[name]
            total = total + x / scale
    return total
