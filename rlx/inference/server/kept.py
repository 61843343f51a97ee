"""Layers of vLLM's CPU engine whose weights stay readable after they were packed.

vLLM packs a layer's weight and drops the original. What is served could then not be compared with what was trained, and a new version
would take a slow path (40 ms for a tiny model). Here the original is kept, new values are copied into it, and it is packed again.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_weights() -> None:
    """Have the CPU layers that are made in this process, and in those forked from it, keep the weights that they pack."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    pack = UnquantizedLinearMethod.process_weights_after_loading

    def pack_and_keep(method: UnquantizedLinearMethod, layer: Any) -> None:
        weight = layer.weight
        pack(method, layer)
        if len(weight) and not len(layer.weight):
            layer.__dict__["rlx_weight"] = weight  # in `__dict__`, so that it is not a parameter of the module

    UnquantizedLinearMethod.process_weights_after_loading = pack_and_keep  # type: ignore[method-assign, assignment]


def kept_weights(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Parameter]:
    """Layers whose weight was packed, with the original weight. Empty if any layer of the model uses another quantization method."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    methods = {type(getattr(layer, "quant_method", None)) for layer in model.modules()}
    if methods - {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}:
        return {}
    return {layer: layer.__dict__["rlx_weight"] for layer in model.modules() if "rlx_weight" in layer.__dict__}


def check_head(model: torch.nn.Module) -> None:
    """Raise ValueError if the packed copy that a CPU head multiplies with has other values than its weight.

    A product with a vector of one 1 gives a column exactly. An update of a tied head that forgets the copy would go unnoticed else: the
    weight is the embedding's, and that was updated.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    head: Any = getattr(model, "lm_head", None)
    if not isinstance(getattr(head, "quant_method", None), UnquantizedEmbeddingMethod):
        return
    weight = head.weight
    column = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    column[0, 0] = 1
    found = head.quant_method.apply(head, column)[0].to(weight.dtype)
    finite = found.isfinite()  # 0 * inf is not
    if not torch.equal(found[finite], weight[:, 0][finite]):
        raise ValueError("the served weights are not those that were trained: the head multiplies with other values than its weight has")
