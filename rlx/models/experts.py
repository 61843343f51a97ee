"""Expert parallelism: each rank of an expert group keeps an equal part of every layer's experts, and tokens travel to the ranks of theirs.

transformers names the experts of each family (`base_model_ep_plan`) and exchanges tokens: one all-to-all sends each token to the ranks of
its experts, another brings the results back, also for gradients. Ranks may have different numbers of tokens, and none for some expert.

The experts' parameters are DTensors over the expert group, which FSDP then also shards over the other ranks. A rank's experts see the
tokens of the whole group, so the sum over those other ranks counts each token once.
"""

from __future__ import annotations

import re
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from rlx.models.backbone import backbone

EXCHANGE = "all_to_all"
EXPERTS = "ep_dispatch_experts"  # the style of a module of experts in transformers' plans


def split_experts(hf: Any, mesh: DeviceMesh, alone: DeviceMesh, *, dense: bool = False) -> None:
    """Divide the experts of a model on the meta device, in place, over the ranks of `mesh`, this rank's expert group.

    `alone` is a mesh of this rank only: no other rank has the same tokens. `dense`: a model without a plan for experts stays as it is.
    Raises ValueError if transformers has no plan for the family, or if the experts are not divisible.
    """
    base, size = backbone(hf), mesh.size()
    plan = getattr(hf.config.get_text_config(), "base_model_ep_plan", None) or {}
    # Parameters first: dividing them sets a module's number of local experts, which the exchange reads when it is installed.
    names = [*dict(base.named_parameters()), *dict(base.named_modules())]
    styles = {name: style for name in names if (style := plan.get(re.sub(r"\.\d+(?=\.)", ".*", name)))}
    experts = [base.get_submodule(name) for name, style in styles.items() if style == EXPERTS]
    if not experts and dense:
        return
    if not experts:
        raise ValueError(f"trainer.ep={size}: transformers has no plan that divides experts of {type(hf).__name__}; set trainer.ep=1")
    for module in experts:
        if module.num_experts % size:
            raise ValueError(
                f"trainer.ep={size} does not divide the {module.num_experts} experts of {type(hf).__name__}; set it to a divisor"
            )
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:  # before 5.20: the plan by patterns, and one way to exchange
        from transformers.distributed.tensor_parallel import apply_expert_parallelism

        apply_expert_parallelism(base, mesh, alone, plan)
    else:
        apply_expert_parallelism(base, mesh, alone, styles, EXCHANGE)
