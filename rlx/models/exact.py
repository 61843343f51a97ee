"""Parameters and buffers that a family always keeps in float32, whatever the model computes in (`_keep_in_fp32_modules_strict`).

State spaces take exponentials of such parameters, and routers add some to their scores. transformers keeps them so when it reads a
checkpoint. A model that is built on the meta device has one dtype, and FSDP casts a whole unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlx.models.lora import PARAMETERS


def kept_exact(hf: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model that computes in `dtype` and keeps these in float32, by name. None if `dtype` is float32."""
    patterns = [re.compile(part.replace("*", ".*")) for part in hf._get_dtype_plan(dtype)]
    for named in (hf.named_parameters(), hf.named_buffers()) if patterns else ():
        for name, tensor in named:
            if tensor.is_floating_point() and not name.endswith(PARAMETERS) and any(pattern.search(name) for pattern in patterns):
                yield name, tensor


def keep_exact(hf: Any) -> None:
    """Give them float32 in a model of another dtype that has no values yet."""
    for name, tensor in list(kept_exact(hf, hf.dtype)):
        module, _, leaf = name.rpartition(".")
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = tensor.data.float()  # in place, so that tied ones stay tied
        else:
            setattr(hf.get_submodule(module), leaf, tensor.float())
