"""Compares the Triton backend, interpreted on the CPU, with the naive twin in float64. TRITON_INTERPRET=1 must be set from the start.

Prints one JSON line: for every case its name and the largest difference of values and gradients, relative to the largest true entry
where that is above 1.
"""

from __future__ import annotations

import json

import torch

from rlx.kernels.logprob import logprob
from rlx.kernels.reference import logprob_reference

CASES = [  # n, d, v, tile, softcap, bias, entropy gradient, frozen head
    (7, 5, 37, (3, 16), None, False, True, False),
    (1, 3, 5, None, None, True, False, False),
    (5, 8, 130, (5, 65), 30.0, True, True, False),
    (5, 8, 131, (2, 66), 30.0, True, False, True),
    (3, 4, 2500, (3, 2499), None, False, True, False),  # a tile wider than one block of columns
    (3, 4, 2500, (2, 2100), None, False, False, True),
    (4, 6, 50, (4, 33), None, False, True, True),
]


def compare(n: int, d: int, v: int, tile, softcap, with_bias: bool, with_entropy: bool, frozen: bool, *, device: str = "cpu") -> float:
    """The largest difference of a case, whose tensors are on `device`."""
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
    print(json.dumps([[str(case), compare(*case)] for case in CASES]))


if __name__ == "__main__":
    main()
