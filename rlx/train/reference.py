"""The model that a KL term or a distillation compares with: the frozen initial policy, or a teacher.

It scores the same micro-batches as the policy and is sharded like it. If adapters are trained, the initial policy is no second model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rlx.models.lora import without_adapters
from rlx.models.policy import PolicyModel


class Reference:
    """A frozen model. With a sync interval it follows the policy every so many steps."""

    def __init__(
        self, model: PolicyModel, *, sync_interval: int | None = None, alpha: float = 1.0, teacher: bool = False, adapters: bool = True
    ) -> None:
        """`sync_interval` is in steps (None: never). `alpha` is the policy's weight in the mix; 1 copies the policy.

        `teacher` marks a model given by ref.name, not the initial policy. `adapters=False`: `model` is the policy itself, and the reference
        is what it computes without its adapters.
        """
        self.model, self.sync_interval, self.alpha, self.teacher, self.adapters = model, sync_interval, alpha, teacher, adapters
        if adapters:
            model.requires_grad_(False)

    def scoring(self) -> AbstractContextManager[None]:
        """To be entered around every forward of `model` as the reference."""
        return nullcontext() if self.adapters else without_adapters(self.model)

    def check_vocabulary(self, policy: PolicyModel) -> None:
        """Raise ValueError if this model lacks some of the policy's token ids."""
        own, wanted = (len(m.hf.get_input_embeddings().weight) for m in (self.model, policy))
        if own < wanted:
            raise ValueError(f"the reference model (ref.name) has {own} token ids, but the policy has {wanted}; it must have all of them")

    @torch.no_grad()
    def after_step(self, step: int, policy: PolicyModel) -> bool:
        """After step `step` (0, 1, …): θ_ref ← α·θ + (1 − α)·θ_ref, every `sync_interval` steps (arXiv 2404.09656). True if it moved."""
        if self.sync_interval is None or (step + 1) % self.sync_interval:
            return False
        for own, new in zip(self.model.parameters(), policy.parameters(), strict=True):
            _local(own).lerp_(_local(new).to(own.dtype), self.alpha)
        return True


def check_tokenizers(policy: str, reference: str, *, trust_remote_code: bool = False) -> None:
    """Raise ValueError unless every token of the policy has the same id in the reference, so that both give it a probability.

    `policy`, `reference`: folders or hub names. A reference may have more tokens, and may split texts in another way: it only scores ids.
    """
    from transformers import AutoTokenizer

    try:
        own, there = (AutoTokenizer.from_pretrained(n, trust_remote_code=trust_remote_code).get_vocab() for n in (policy, reference))
    except Exception as error:  # a file that is missing, or the code that came with a tokenizer
        raise ValueError(
            f"the tokenizers of the policy {policy} and of ref.name={reference} cannot be compared, so their probabilities may be of "
            f"different tokens: {type(error).__name__}: {error}"
        ) from error
    if differing := [token for token, number in own.items() if there.get(token) != number]:
        first = min(differing, key=own.__getitem__)
        is_there = f"{there[first]} there" if first in there else "no token there"
        raise ValueError(
            f"the reference model ref.name={reference} has another tokenizer than the policy {policy}, so a KL would compare the "
            f"probabilities of different tokens: {len(differing)} of {len(own)} tokens differ, and {first!r} is {own[first]} here and "
            f"{is_there}. Set ref.name to a model with the policy's vocabulary; a teacher with another one can play "
            "(envs.NAME.sampled_by=teacher)"
        )


def _local(parameter: Tensor) -> Tensor:
    """This rank's shard. Both models are sharded alike."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
