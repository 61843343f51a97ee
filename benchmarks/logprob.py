"""Compares the log-probability op with the naive form and Liger: time and memory of forward and backward with an entropy gradient.

    python benchmarks/logprob.py [--device cpu|cuda] [--write]       (if rlx is not installed: with PYTHONPATH=. in front)

CPU: T=4096, H=512, V=151,936, float32, one thread, each variant in its own process, 5 minutes. Extra memory is the peak of the resident
set above the inputs; it includes the gradients of hidden (8 MiB) and head (297 MiB).
CUDA: T=16,384, H=1024, 2560, 4096, V=151,936, bfloat16, about 3 minutes. It measures each variant's error against float64 on a smaller
problem, then TFLOP/s and the peak of memory above inputs and gradients, then the tiles. TFLOP/s count 8·T·H·V for all variants; the naive
form computes 6 and a frozen head 4, as its row says. The backend `liger` refuses 16-bit tensors, because its entropy is bfloat16, but its
op is timed on CUDA anyway. Needs torch and triton; without Liger, its rows are omitted. `--write` appends to benchmarks/HISTORY.md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx.kernels.logprob import logprob
from rlx.kernels.reference import logprob_reference

VOCABULARY = 151_936
CPU_SHAPE = (4096, 512)
CUDA_SHAPES = [(16_384, 1024), (16_384, 2560), (16_384, 4096)]
ROW = 512  # tokens of a padded row, for Liger's GRPO
TILES = [(2048, 4096), (4096, 4096), (8192, 4096), (16_384, 4096), (8192, 8192), (16_384, 2048)]
RESULTS = Path(__file__).with_name("HISTORY.md")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype, device: str) -> Inputs:
    """(hidden [T, H], head [V, H], labels [T], temperature [T]); logits with a standard deviation of about 1.4."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device=device).to(dtype).requires_grad_()
    head = torch.empty(vocabulary, width, device=device).normal_(0, 1.4 * width**-0.5, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)
    return hidden, head, labels, torch.ones(tokens, device=device)


# Ways to compute. Each takes the inputs and returns a scalar whose backward is the work.


def by(function: Callable[..., tuple[Tensor, Tensor]], **keys: Any) -> Callable[[Inputs], Tensor]:
    """A loss with an advantage per token and an entropy bonus, as an objective would compute it."""

    def loss(inputs: Inputs) -> Tensor:
        logp, entropy = function(*inputs, **keys)
        advantages = torch.linspace(-1, 1, len(logp), device=logp.device)
        return (-(advantages * logp) - 0.01 * entropy).mean()

    return loss


def frozen(function: Callable[..., tuple[Tensor, Tensor]], **keys: Any) -> Callable[[Inputs], Tensor]:
    """A loss without a gradient for the head; entropy is only measured."""

    def loss(inputs: Inputs) -> Tensor:
        hidden, head, labels, temperature = inputs
        logp, _ = function(hidden, head.detach(), labels, temperature, **keys)
        return -(torch.linspace(-1, 1, len(logp), device=logp.device) * logp).mean()

    return loss


def liger_scaled(inputs: Inputs) -> Tensor:
    from rlx.kernels.liger import liger_logprob

    return by(liger_logprob, scale=1.0)(inputs)


def liger_grpo(inputs: Inputs) -> Tensor:
    """Liger's chunked GRPO on full rows, so padding costs it nothing. It has no entropy."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, head, labels, _ = inputs
    rows = len(labels) // ROW
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    padded = hidden.view(rows, ROW, -1)
    advantages = torch.linspace(-1, 1, rows, device=hidden.device)
    return loss(padded, head, labels.view(rows, ROW), torch.ones(rows, ROW, device=hidden.device), advantages)[0]


def sixteen_bit(hidden: Tensor, head: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The form of a short script: 16-bit logits cast to float32, then `log_softmax`."""
    log_probs = ((hidden @ head.T).float() / temperature[:, None]).log_softmax(-1)
    return log_probs.gather(1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


OURS = "rlx"
CPU_WAYS: dict[str, Callable[[Inputs], Tensor]] = {
    "naive": by(logprob_reference),
    OURS: by(logprob, backend="torch"),
    "Liger chunked GRPO (no entropy)": liger_grpo,
    "Liger scaled cross entropy": liger_scaled,
    "rlx, frozen head, no entropy gradient": frozen(logprob, backend="torch"),
}


# CPU


def cpu_main(repeats: int) -> Iterator[str]:
    """Yields the lines of the table."""
    tokens, width = CPU_SHAPE
    found: dict[str, list[dict[str, float]]] = {}
    ways = [name for name in CPU_WAYS if "Liger" not in name or find_spec("liger_kernel")]
    for _ in range(repeats):  # in turns, so that changes in the machine's load affect all variants
        for name in ways:
            command = [sys.executable, __file__, "--way", name]
            done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"{name}:\n{done.stderr}")
            found.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    best = {name: {key: min(value[key] for value in values) for key in values[0]} for name, values in found.items()}
    yield f"T={tokens}, H={width}, V={VOCABULARY:,}, float32, 1 thread; best of {repeats}, ways taking turns"
    yield ""
    yield "| way | wall s | CPU s | extra MiB | time / naive | memory / naive |"
    yield "| --- | --- | --- | --- | --- | --- |"
    naive = best["naive"]
    for name, value in best.items():
        ratio, memory = value["wall"] / naive["wall"], value["mib"] / naive["mib"]
        yield f"| {name} | {value['wall']:.1f} | {value['cpu']:.1f} | {value['mib']:,.0f} | {ratio:.2f} | {memory:.1%} |"


def cpu_way(name: str) -> None:
    """Run one forward and backward in this process. Prints wall seconds, CPU seconds and extra MiB as JSON."""
    torch.set_num_threads(1)
    way = CPU_WAYS[name]
    tokens, width = CPU_SHAPE
    warm = make_inputs(ROW, width, 2000, torch.float32, "cpu")
    way(warm).backward()  # starts threads and library handles; compiles Liger's chunk, with a dynamic vocabulary
    inputs = make_inputs(tokens, width, VOCABULARY, torch.float32, "cpu")
    if name.startswith("Liger chunked"):
        hidden, head, labels, temperature = inputs
        way((hidden[:ROW].detach().requires_grad_(), head, labels[:ROW], temperature[:ROW])).backward()  # compiles for this vocabulary
        head.grad = None
    del warm
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = memory_mib("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    way(inputs).backward()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps({"wall": wall, "cpu": cpu, "mib": memory_mib("VmHWM") - before}))


def memory_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}")


# CUDA


def cuda_ways() -> dict[str, Callable[[Inputs], Tensor]]:
    ways = {"naive, 16-bit logits": by(sixteen_bit), "torch tiles": by(logprob, backend="torch"), OURS: by(logprob, backend="triton")}
    if find_spec("liger_kernel"):
        ways["Liger scaled cross entropy (16-bit entropy)"] = liger_scaled
        ways["Liger chunked GRPO (no entropy)"] = liger_grpo
    ways["rlx, frozen head, no entropy gradient (computes 4·T·H·V)"] = frozen(logprob, backend="triton")
    return ways


def cuda_main(repeats: int) -> Iterator[str]:
    """Yields the lines of the tables."""
    yield from cuda_errors()
    yield ""
    yield f"V={VOCABULARY:,}, bfloat16, forward + backward, median of {repeats}"
    yield ""
    yield "| way | T | H | ms | TFLOP/s (8·T·H·V) | GiB above inputs and gradients |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for tokens, width in CUDA_SHAPES:
        for name, way in cuda_ways().items():
            yield f"| {name} | {tokens:,} | {width} | {cuda_time(way, tokens, width, repeats)} |"
    yield ""
    tokens, width = CUDA_SHAPES[-1]
    yield f"Tiles of rlx at T={tokens:,}, H={width}:"
    yield ""
    yield "| tokens × vocabulary | ms | TFLOP/s (8·T·H·V) | GiB above inputs and gradients |"
    yield "| --- | --- | --- | --- |"
    for tile in TILES:
        yield f"| {tile[0]:,} × {tile[1]:,} | {cuda_time(by(logprob, backend='triton', tile=tile), tokens, width, repeats)} |"


def cuda_time(way: Callable[[Inputs], Tensor], tokens: int, width: int, repeats: int) -> str:
    """`ms | TFLOP/s | GiB` of a variant, or its error."""
    inputs = make_inputs(tokens, width, VOCABULARY, torch.bfloat16, "cuda")
    milliseconds, extra = [], 0.0
    try:
        for _ in range(repeats + 1):
            for tensor in inputs[:2]:
                tensor.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            way(inputs).backward()
            end.record()
            torch.cuda.synchronize()
            milliseconds.append(start.elapsed_time(end))
            gradients = sum(t.grad.nbytes for t in inputs[:2] if t.grad is not None)
            extra = (torch.cuda.max_memory_allocated() - before - gradients) / 2**30
    except Exception as error:  # continue with the other variants
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]} | |"
    finally:
        del inputs
        torch.cuda.empty_cache()
    median = statistics.median(milliseconds[1:])  # the first compiles
    return f"{median:.1f} | {8 * tokens * width * VOCABULARY / median / 1e9:.0f} | {extra:.2f}"


def cuda_errors() -> Iterator[str]:
    """Each variant against float64 on the same bfloat16 inputs: T=512, H=1024, V=20,000."""
    yield "| way | largest error of logp | of entropy | relative error of dh | of dW |"
    yield "| --- | --- | --- | --- | --- |"
    hidden, head, labels, temperature = make_inputs(512, 1024, 20_000, torch.bfloat16, "cuda")
    temperature = torch.full_like(temperature, 0.7)
    weights = torch.linspace(-1, 1, 512, device="cuda")

    def run(function: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, **keys: Any) -> list[Tensor]:
        own = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, head)]
        logp, entropy = function(*own, labels, temperature.to(torch.promote_types(dtype, torch.float32)), **keys)
        gradients = torch.autograd.grad((weights * logp + 0.1 * entropy).sum(), own)
        return [t.detach().double() for t in (logp, entropy, *gradients)]

    for keys in ({}, {"softcap": 3.0, "scale": 1.5, "bias": True}):
        bias = torch.linspace(-1, 1, len(head), device="cuda", dtype=torch.bfloat16) if keys.pop("bias", False) else None
        exact = run(logprob_reference, torch.float64, bias=None if bias is None else bias.double(), **keys)
        for backend in ("torch", "triton", "liger") if find_spec("liger_kernel") and not keys else ("torch", "triton"):
            name = f"{backend}{', softcap, factor and bias' if keys else ''}"
            try:
                if backend == "liger":
                    from rlx.kernels.liger import liger_logprob

                    found = run(liger_logprob, torch.bfloat16, scale=1.0)
                else:
                    found = run(logprob, torch.bfloat16, backend=backend, bias=bias, **keys)
            except Exception as error:
                yield f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:80]} | | | |"
                continue
            values = [f"{float((a - b).abs().max()):.1e}" for a, b in zip(found[:2], exact[:2], strict=True)]
            values += [f"{float((a - b).norm() / b.norm()):.1e}" for a, b in zip(found[2:], exact[2:], strict=True)]
            yield f"| {name} | {' | '.join(values)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=None, help="default: 1 on CPU, 5 on CUDA")
    parser.add_argument("--write", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument("--note", default="", help="a sentence for the results, such as what else the machine did")
    parser.add_argument("--way", choices=CPU_WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        cpu_way(args.way)
        return
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    lines = [f"## {datetime.date.today()} The log-probability op: `python benchmarks/logprob.py --device {args.device}`", ""]
    lines += [f"{machine}, torch {torch.__version__}. {args.note}".strip(), ""]
    lines += cuda_main(args.repeats or 5) if args.device == "cuda" else cpu_main(args.repeats or 1)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.write:
        with RESULTS.open("a") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
