"""Compares the Triton backend, interpreted on the CPU, with the naive twin in float64. TRITON_INTERPRET=1 must be set before the start.

Prints one JSON line: for every case its name and the largest difference of values and gradients, relative to the largest true entry if
that is above 1. For logits with a common offset the difference is divided by 300, because float32 logits of that size are coarser.
"""

from __future__ import annotations

import json

import torch

from rlx.kernels.logprob import logprob
from rlx.kernels.reference import logprob_reference
from rlx.kernels.toolchain import launch

CASES = [  # n, d, v, tile, softcap, bias, entropy gradient, frozen head
    (7, 5, 37, (3, 16), None, False, True, False),
    (1, 3, 5, None, None, True, False, False),
    (5, 8, 130, (5, 65), 30.0, True, True, False),
    (5, 8, 131, (2, 66), 30.0, True, False, True),
    (3, 4, 2500, (3, 2499), None, False, True, False),  # a tile wider than one block of columns
    (3, 4, 2500, (2, 2100), None, False, False, True),
    (4, 6, 50, (4, 33), None, False, True, True),
]
OFFSET = -1000.0  # float32 numbers of that size are 6e-5 apart


def compare_with_offset(backend: str, frozen: bool = False) -> float:
    """The relative error of float32 gradients if all logits share a large offset."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(5, 8, generator=generator), 0.1 * torch.randn(300, 8, generator=generator)
    hidden[:, 0], head[:, 0] = 1.0, OFFSET
    labels = torch.randint(0, 300, (5,), generator=generator)
    weights = torch.randn(2, 5, generator=generator)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        learned = [hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(not frozen)]
        keys: dict = {} if dtype == torch.float64 else {"backend": backend, "tile": (3, 128)}
        function = logprob_reference if dtype == torch.float64 or backend == "reference" else logprob
        logp, entropy = function(*learned, labels, torch.ones(5, dtype=dtype), **({} if function is logprob_reference else keys))
        loss = (weights[0].to(dtype) * logp).sum()
        if not frozen:
            loss = loss + (weights[1].to(dtype) * entropy).sum()
        gradients.append(torch.autograd.grad(loss, learned[: 1 if frozen else 2]))
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True))


def compare(n: int, d: int, v: int, tile, softcap, with_bias: bool, with_entropy: bool, frozen: bool, *, device: str = "cpu") -> float:
    """The largest difference in a case. Its tensors are on `device`."""
    torch.set_default_device(device)
    generator = torch.Generator(device).manual_seed(v)
    hidden, head, bias = (torch.randn(*shape, generator=generator) for shape in ((n, d), (v, d), (v,)))
    labels = torch.randint(0, v, (n,), generator=generator)
    temperature = torch.rand(n, generator=generator) + 0.5
    weights = torch.randn(2, n, generator=generator)
    results = []
    for function, dtype, keys in ((logprob, torch.float32, {"backend": "triton", "tile": tile}), (logprob_reference, torch.float64, {})):
        learned = [tensor.to(dtype).requires_grad_(i == 0 or not frozen) for i, tensor in enumerate((hidden, head, bias))]
        logp, entropy = function(
            *learned[:2], labels, temperature.to(dtype), bias=learned[2] if with_bias else None, softcap=softcap, scale=1.3, **keys
        )
        loss = (weights[0].to(dtype) * logp).sum()
        if with_entropy:
            loss = loss + (weights[1].to(dtype) * entropy).sum()
        wanted = learned[: 1 if frozen else 3 if with_bias else 2]
        results.append([logp.detach(), entropy.detach(), *torch.autograd.grad(loss, wanted)])
    return max(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(*results, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    launch("cpu")  # as every role does at its start
    results = [[str(case), compare(*case)] for case in CASES]
    results += [[f"offset, frozen={frozen}", compare_with_offset("triton", frozen) / 300] for frozen in (False, True)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
