"""What an objective or an advantage says about itself, in its own file, so that the rules between keys need no list of names.

    @declares(uses_ratio=False, ranges={"leak": "at least 0"})
    def leaky(tokens: TokenBatch, *, leak: float = 0.25) -> TokenLoss: ...

The values are literals: of a target that ships with rlx they are read from its source (`rlx.config.signatures`), which spares a wrong
configuration the seconds of importing torch. Any other target's are read once its module is imported, at the end of checking.
What is not declared has the default. The standard library alone, so that every room can import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])
ATTRIBUTE = "__rlx_declared__"

RANGES: dict[str, Callable[[float], bool]] = {  # NaN is in none
    "above 0": lambda x: x > 0,
    "at least 0": lambda x: x >= 0,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
}


OPTIM_RANGES = {  # of keys that torch's optimizers share; they declare nothing themselves
    "lr": "at least 0",
    "weight_decay": "at least 0",
    "eps": "at least 0",
    "momentum": "at least 0",
    "betas": "at least 0 and below 1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Facts that rules between configuration keys ask for. Raises ValueError for a value that cannot be."""

    # of an objective
    uses_ratio: bool = True  # weighs tokens by an importance ratio, which truncated sampling biases
    against_engine: bool = False  # its weight is against the engine, whatever loss.proximal is
    own_sign: bool | str = False  # does not go by the sign of the reward's advantage; a key's name: where that key is above 0
    by_sequence: bool = False  # all tokens of a rollout carry one weight, their sequence's, so a correction must go by rollout, too
    sequence_bounds: tuple[str, str] | None = None  # own keys: how far below and above 1 the mean ratio of a sequence may be
    needs_teacher: bool = False  # learns from the model ref.name
    # of an advantage
    compares_group: bool = False  # compares the rollouts of a group, so it is always 0 in a group of one
    rewards_from_0: bool = False  # rewards must not be negative
    std_over: str | None = None  # `group` or `batch`: divides by a standard deviation with `ddof` degrees of freedom taken off
    # of both
    ranges: Mapping[str, str] = field(default_factory=dict)  # own key -> one of RANGES

    def __post_init__(self) -> None:
        for key, words in self.ranges.items():
            if words not in RANGES:
                raise ValueError(f"the range of {key} is declared as `{words}`; it must be one of: {', '.join(RANGES)}")
        if self.std_over not in (None, "group", "batch"):
            raise ValueError(f"std_over is declared as `{self.std_over}`; it must be group or batch")


def declares(**facts: Any) -> Callable[[Target], Target]:
    """Say something about the function or class below; the fields of `Declared` by name."""
    try:
        declared = Declared(**facts)
    except TypeError as error:
        raise TypeError(f"{error}; what can be declared: {', '.join(Declared.__slots__)}") from None

    def mark(target: Target) -> Target:
        setattr(target, ATTRIBUTE, declared)
        return target

    return mark
