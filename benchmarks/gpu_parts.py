"""The parts of `gpu.py` that need no model: the log-probability op, the kernels' tests, attention, and the head's precision."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rows import Report
from logprob import by, frozen, make_inputs, sixteen_bit
from torch import Tensor

from rlx.kernels.logprob import logprob
from rlx.kernels.reference import logprob_reference
from rlx.kernels.tiles import TILE_CUDA, _add_product, _product, _slices

ROOT = Path(__file__).resolve().parent.parent
OP = {False: (16_384, 4096, 131_072), True: (256, 32, 2000)}  # tokens, width, vocabulary; True: small
GROUPS, MEMBERS = 2, 4  # of the op's rollouts
TILES = {False: [(4096, 4096), (16_384, 4096), (4096, 8192), (8192, 8192), (16_384, 8192), (16_384, 2048)], True: [(128, 512)]}


def size(shape: tuple[int, int, int]) -> str:
    return "M={:,} H={:,} V={:,}".format(*shape)


def objectives() -> dict[str, Any]:
    """Every shipped objective, with the bonus for entropy that makes its gradient necessary."""
    import yaml

    from rlx.config.instantiate import instantiate
    from rlx.config.presets import conf_directory
    from rlx.config.schema import LossTerms, split_terms
    from rlx.losses.base import Objective

    found = {}
    for path in sorted((conf_directory() / "loss").glob("*.yaml")):
        preset = yaml.safe_load(path.read_text())
        node = {key: value for key, value in preset.get("loss", preset).items() if key != "defaults"}
        terms, own = split_terms(node, LossTerms)
        found[path.stem] = Objective(instantiate(own), replace(terms, entropy_coef=0.01), max_length=4096)
    return found


def tokens_of(logp: Tensor, entropy: Tensor, *, taught: bool) -> Any:
    """Rollouts of equal lengths in groups, as a step has them. `taught`: with log-probabilities of a teacher."""
    from rlx.losses.tokens import TokenBatch

    n, rollouts, device = len(logp), GROUPS * MEMBERS, logp.device
    generator = torch.Generator(device).manual_seed(1)
    old = logp.detach()
    lengths = torch.full((rollouts,), n // rollouts, device=device)
    return TokenBatch(
        logp=logp,
        old_logp=old,
        inference_logp=old + 0.01 * torch.randn(n, generator=generator, device=device),
        entropy=entropy,
        advantages=torch.linspace(-1, 1, rollouts, device=device).repeat_interleave(n // rollouts),
        rollout_ids=torch.arange(rollouts, device=device).repeat_interleave(n // rollouts),
        rollout_lengths=lengths,
        group_lengths=lengths * MEMBERS,
        teacher_logp=old + 0.01 * torch.randn(n, generator=generator, device=device) if taught else None,
    )


def op(report: Report) -> None:
    """TFLOP/s count 8·M·H·V, the op's four products; with a frozen head 4·M·H·V."""
    tokens, width, vocabulary = shape = OP[report.small]
    inputs = make_inputs(tokens, width, vocabulary, report.dtype, report.device.type)

    def rate(name: str, work: Callable[[], Tensor], goal: str | None = ">= 600", products: int = 8, repeats: int = 3) -> None:
        def once() -> None:
            inputs[0].grad = inputs[1].grad = None
            work().backward()

        with report.attempt(name, size(shape)):
            found = report.measure(once, repeats)
            flops = products * tokens * width * vocabulary / found.seconds / 1e12
            report.row(name, size(shape), flops, "TFLOP/s", goal, peak_gib=found.peak_gib)

    for name, objective in objectives().items():

        def work(objective: Any = objective) -> Tensor:
            scored = tokens_of(*logprob(*inputs), taught="teacher_logprobs" in objective.streams)
            return objective(scored, tokens, GROUPS * MEMBERS, GROUPS)[0]

        rate(f"objective {name}", work)
    rate("frozen head, no entropy gradient (4·M·H·V)", lambda: frozen(logprob)(inputs), None, 4)
    rate("torch's row functions", lambda: by(logprob, backend="torch")(inputs), None)
    for tile in TILES[report.small]:  # tokens, vocabulary
        rate("tiles of {:,} x {:,}".format(*tile), lambda tile=tile: by(logprob, tile=tile)(inputs), None)
    with report.attempt("the four products alone", size(shape)):
        found = report.measure(lambda: products(*inputs[:2]), 3)
        report.row("the four products alone", size(shape), 8 * tokens * width * vocabulary / found.seconds / 1e12, "TFLOP/s")


@torch.no_grad()
def products(hidden: Tensor, head: Tensor) -> None:
    """What the op multiplies, tile by tile, and nothing else: the rate that it can reach at most."""
    columns, elements = TILE_CUDA
    total, gradient = torch.zeros_like(hidden, dtype=torch.float32), torch.zeros_like(head)
    dx = torch.randn(elements // columns, columns, device=head.device).to(head.dtype)
    for part in _slices(len(head), columns):
        d_w = torch.zeros_like(head[part], dtype=torch.float32)
        for block in _slices(len(hidden), elements // columns):
            for _ in range(2):  # forward, and again in backward
                x = _product(hidden[block], head[part].T)
            some = dx[: x.shape[0], : x.shape[1]]
            _add_product(total[block], some, head[part])
            _add_product(d_w, some.T, hidden[block])
        gradient[part] = d_w


# Test files, and the test that shows without a GPU that the part works.
TESTS = {"test_kernels_triton": "can_build", "test_models_flash": "is_a_piece", "test_models_liger": "put_into_one_model"}


def tests(report: Report) -> None:
    """The tests that are marked `gpu`; without a GPU one cheap test of each file."""
    for name, small in TESTS.items():
        which = ["-m", "gpu"] if report.cuda else ["-k", small]
        with report.attempt("failed tests", name), tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "found.xml"
            # Without the suite's fixtures, which serve runs with vLLM and import what this script does without.
            own = ["--noconftest", f"--junitxml={found}", "-p", "no:cacheprovider"]
            command = [sys.executable, "-m", "pytest", f"tests/{name}.py", *which, *own]
            env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no plugins of packages that are not needed
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            if not found.exists():
                raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "pytest printed nothing").splitlines()[-1])
            suite = next(ElementTree.parse(found).iter("testsuite"))
            total, failed, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
            if total == skipped:
                raise RuntimeError(f"no test ran: {next((node.get('message') for node in suite.iter('skipped')), 'none was chosen')}")
            names = [
                case.get("name") or ""
                for case in suite.iter("testcase")
                if case.find("failure") is not None or case.find("error") is not None
            ]
            which_failed = f"; {', '.join(names)}" if names else ""
            report.row("failed tests", f"{name}: {total - skipped} ran{which_failed}", failed + errors, "tests", "== 0", exact=True)


def attention(report: Report) -> None:
    """Forward and backward. TFLOP/s count 3.5 times the forward's two products, half of each for a causal model."""
    import numpy as np

    from rlx.models.attention import packed_attention
    from rlx.models.flash import LONG
    from rlx.models.layout import build_layout

    heads, key_heads, width = (32, 8, 128) if not report.small else (4, 2, 16)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads
    rows = [(2048, 8), (16_384, 1)] if not report.small else [(64, 4)]
    for length, samples in rows:
        total, where = length * samples, f"{samples} x {length:,}, {heads} heads, {key_heads} key heads, d={width}"
        generator = torch.Generator(report.device).manual_seed(0)
        q, k, v, gradient = (
            torch.randn(1, n, total, width, generator=generator, device=report.device).to(report.dtype)
            for n in (heads, key_heads, key_heads, heads)
        )
        bounds = np.arange(samples + 1) * length
        ids = np.random.default_rng(0).integers(0, 1000, total)  # different tokens, so that nothing is shared

        def packed(kind: Any, ids: Any = ids, bounds: Any = bounds, total: int = total) -> Callable[..., Tensor]:
            layout = build_layout(ids, bounds, np.ones(total, dtype=bool), kind, report.device)
            return lambda *qkv: packed_attention(module, *qkv, None, layout=layout)[0]

        def batched(x: Tensor, samples: int = samples, length: int = length) -> Tensor:
            return x[0].view(x.shape[1], samples, length, width).transpose(0, 1)

        def eager(q: Tensor, k: Tensor, v: Tensor, length: int = length) -> Tensor:
            q, k, v = batched(q), *(batched(x).repeat_interleave(heads // key_heads, 1) for x in (k, v))
            scores = (q @ k.transpose(-1, -2)) * width**-0.5
            hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            weights = scores.masked_fill(hidden, -torch.inf).float().softmax(-1).to(v.dtype)
            return (weights @ v).transpose(1, 2).reshape(1, -1, heads, width)

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(batched(q), batched(k), batched(v), is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(1, -1, heads, width)

        ways: dict[str, Callable[..., Tensor]] = {
            "varlen (rlx, FlashAttention)": packed("varlen"),
            "mixed (rlx, long samples by cuDNN)": packed("mixed"),
            "shared (rlx, sdpa)": packed("shared"),
            "sdpa on padded rows": sdpa,
            "eager on padded rows": eager,
        }
        checked = min(length, 2048)  # tokens of the first sample that are compared, with float32
        few = gradient.transpose(1, 2).reshape(1, total, heads, width).clone()
        few[:, checked:] = 0  # then nothing later counts
        exact = _first_rows(q, k, v, few[0, :checked])
        for name, way in ways.items():
            if name.startswith(("varlen", "mixed")) and not report.cuda:
                report.error(name, where, "FlashAttention with segment boundaries needs CUDA")
                continue
            if name.startswith("mixed") and length < LONG:
                continue
            if name.startswith("eager") and length > 4096:
                report.error(name, where, "left out: its scores alone would take 16 GiB or more")
                continue
            with report.attempt(name, where):
                own = [x.clone().requires_grad_() for x in (q, k, v)]

                def once(way: Any = way, own: Any = own, gradient: Tensor = gradient, total: int = total) -> None:
                    torch.autograd.backward(way(*own), gradient.transpose(1, 2).reshape(1, total, heads, width))

                out = way(*own).reshape(1, total, heads, width)
                gradients = torch.autograd.grad(out, own, few)
                found = [out.detach()[0, :checked], *(x[0, :, :checked].transpose(0, 1) for x in gradients)]
                errors = [float((one.float() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]
                del out, gradients, found
                timed = report.measure(once)
                flops = 3.5 * 4 * samples * length**2 * heads * width / 2
                report.row(name, where, flops / timed.seconds / 1e12, "TFLOP/s", peak_gib=timed.peak_gib)
                report.row(f"{name}: error of values and gradients", where, max(errors), "of the norm", "<= 0.02", exact=True)


def _first_rows(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """Plain attention in float32 of the first n tokens, which are of one sample: values and gradients of q, k, v; [n, heads, d] each."""
    n, groups = len(gradient), q.shape[1] // k.shape[1]
    own = [x[0, :, :n].float().requires_grad_() for x in (q, k, v)]
    queries, keys, values = own[0], own[1].repeat_interleave(groups, 0), own[2].repeat_interleave(groups, 0)
    scores = (queries @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    out = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)
    gradients = torch.autograd.grad(out, own, gradient.float())
    return [out.detach(), *(x.transpose(0, 1) for x in gradients)]


def head(report: Report) -> None:
    """Errors are those of log-probabilities against float64, on fewer tokens of the same 16-bit inputs."""
    tokens, width, vocabulary = shape = (4096, 4096, 131_072) if not report.small else (128, 32, 2000)
    half = make_inputs(tokens, width, vocabulary, torch.bfloat16, report.device.type)
    some = 256 if not report.small else 64
    with torch.no_grad():
        exact = logprob_reference(half[0][:some].double(), half[1].double(), half[2][:some], half[3][:some].double())[0]
    ways: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], torch.dtype]] = {
        "16-bit products, float32 logits (rlx)": (logprob, torch.bfloat16),
        "float32 products and logits (rlx)": (logprob, torch.float32),
        "16-bit logits, then float32": (sixteen_bit, torch.bfloat16),
    }
    for name, (function, dtype) in ways.items():
        with report.attempt(name, size(shape)):
            own = (*(tensor.detach().to(dtype).requires_grad_() for tensor in half[:2]), *half[2:])
            with torch.no_grad():
                found = function(own[0][:some], own[1], own[2][:some], own[3][:some])[0]
            error = float((found.double() - exact).abs().max())

            def once(own: Any = own, function: Any = function) -> None:
                own[0].grad = own[1].grad = None
                by(function)(own).backward()

            timed = report.measure(once, 3)
            report.row(name, size(shape), timed.seconds * 1e3, "ms", peak_gib=timed.peak_gib)
            goal = "<= 1e-4" if "rlx" in name else None
            report.row(f"{name}: largest error", size((some, width, vocabulary)), error, "nats", goal, exact=True)
