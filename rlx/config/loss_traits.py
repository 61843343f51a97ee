"""Facts that an objective or an advantage declares about itself, in its own file. So the rules between keys need no list of names.

    @declares(uses_ratio=False, ranges={"leak": "at least 0"})
    def leaky(tokens: TokenBatch, *, leak: float = 0.25) -> TokenLoss: ...

The values must be literals. For targets that ship with rlx they are read from the source (`rlx.config.signatures`): importing torch
takes seconds, and a wrong configuration is reported without it. For other targets they are read once the module is imported, at the
end of checking. Undeclared facts have their default. Uses only the standard library, so that every room can import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])
ATTRIBUTE = "__rlx_declared__"

RANGES: dict[str, Callable[[float], bool]] = {  # no range contains NaN
    "above 0": lambda x: x > 0,
    "at least 0": lambda x: x >= 0,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
}


OPTIM_RANGES = {  # of keys that torch's optimizers share; torch declares no ranges
    "lr": "at least 0",
    "weight_decay": "at least 0",
    "eps": "at least 0",
    "momentum": "at least 0",
    "betas": "at least 0 and below 1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Facts that the rules between configuration keys use. Raises ValueError for an unknown range, `kind` or `std_over`."""

    # of an objective
    uses_ratio: bool = True  # weighs tokens by an importance ratio, which truncated sampling biases
    against_engine: bool = False  # its ratio compares with the engine's log-probabilities, whatever loss.proximal is
    own_sign: bool | str = False  # ignores the sign of the reward's advantage; the name of a key: only where that key is above 0
    by_sequence: bool = False  # all tokens of a rollout share one weight, so a correction must be per rollout, too
    token_local: bool = False  # a token's loss reads no other token, so samples of a rollout may be in different micro-batches
    sequence_bounds: tuple[str, str] | None = None  # its keys for how far below and above 1 the mean ratio of a sequence may be
    needs_teacher: bool = False  # learns from the model ref.name, or from the endpoint of the section `teacher`
    demonstrated: bool = False  # the teacher is the policy itself, which reads a demonstration (`teacher.demonstration`) in its prompt
    kind: str = "policy"  # `policy`, `ce` (cross-entropy) or `ref_kl` (distils): objectives of one kind share the counts they divide by
    # of an advantage
    compares_group: bool = False  # compares the rollouts of a group, so it is always 0 in a group of one
    is_reward: bool = False  # it is the reward itself: what an objective gets that needs no advantage
    rewards_from_0: bool = False  # rewards must not be negative
    std_over: str | None = None  # `group` or `batch`: divides by a standard deviation over it, with `ddof` degrees of freedom subtracted
    # of both
    ranges: Mapping[str, str] = field(default_factory=dict)  # own key -> one of RANGES

    def __post_init__(self) -> None:
        for key, words in self.ranges.items():
            if words not in RANGES:
                raise ValueError(f"the range of {key} is declared as `{words}`; it must be one of: {', '.join(RANGES)}")
        if self.kind not in ("policy", "ce", "ref_kl") or self.std_over not in (None, "group", "batch"):
            raise ValueError(
                f"kind is `{self.kind}`; it must be policy, ce or ref_kl; std_over is `{self.std_over}`; it must be group or batch"
            )


def declared_in(target: Callable[..., Any]) -> Declared:
    """What a function declares, also behind `functools.partial`."""
    return getattr(getattr(target, "func", target), ATTRIBUTE, Declared())


def declares(**facts: Any) -> Callable[[Target], Target]:
    """Declare facts about the function or class below, by the field names of `Declared`."""

    def mark(target: Target) -> Target:
        setattr(target, ATTRIBUTE, Declared(**facts))
        return target

    return mark
