"""Objectives that other libraries have too: value and gradient on padded batches against Liger's fused GRPO and TRL's trainer.

`public_examples.SHARED` lists differences in names; `docs/objectives.md` lists differences in computation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from public_examples import BETA, CAP, EXTRAS, LENGTHS, MAX_LENGTH, SHARED, make, takes

from rlx.config.schema import KlTerms, LossTerms
from rlx.kernels.logprob import logprob
from rlx.losses.base import Objective
from rlx.losses.cispo import cispo
from rlx.losses.grpo import grpo
from rlx.losses.gspo import gspo
from rlx.losses.sapo import sapo
from rlx.losses.tokens import TokenBatch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import demo  # noqa: E402  (a script, not a module of the package)

OURS = {
    "grpo": (grpo, "seq_mean"),
    "dr_grpo": (grpo, "fixed_length"),
    "dapo": (partial(grpo, eps_high=0.28), "token_mean"),
    "gspo": (gspo, "seq_mean"),
    "gspo_wide": (partial(gspo, eps_low=0.1, eps_high=0.15), "seq_mean"),
    "cispo": (cispo, "token_mean"),
    "cispo_tight": (partial(cispo, eps_high=0.1), "token_mean"),
    "sapo": (sapo, "seq_mean"),
}
UNREACHABLE = ("Failed to fetch", "error sending request", "dns error", "Connection refused", "timed out")  # uv, without an index
CASES = [(preset, extra) for preset in SHARED for extra in EXTRAS if takes(preset, extra)]
NAMES = ["+".join(filter(None, case)) for case in CASES]


def ours(preset: str, extra: str, logp: torch.Tensor) -> torch.Tensor:
    """Our loss on the shared example. `logp` [N] belongs to its trainable tokens."""
    function, aggregate = OURS[preset]
    terms = LossTerms(
        aggregate=aggregate,
        proximal="recompute",
        correction="tis" if extra == "tis" else "none",
        correction_cap=CAP,
        dual_clip=CAP if extra == "delta" else None,
        kl=KlTerms(beta=BETA if extra == "kl" else 0.0, estimator="k3"),
    )
    batch, lengths = make(logp.dtype), torch.tensor(LENGTHS)
    mask = batch["mask"]
    tokens = TokenBatch(
        logp=logp,
        old_logp=batch["old"][mask],
        inference_logp=batch["inference"][mask],
        entropy=torch.zeros_like(logp),
        advantages=batch["advantages"].repeat_interleave(lengths),
        rollout_ids=torch.arange(len(LENGTHS)).repeat_interleave(lengths),
        rollout_lengths=lengths,
        ref_logp=batch["ref"][mask],
    )
    return Objective(function, terms, max_length=MAX_LENGTH)(tokens, sum(LENGTHS), len(LENGTHS))[0]


@pytest.mark.parametrize(("preset", "extra"), CASES, ids=NAMES)
def test_liger_computes_the_same_loss_and_gradients_from_hidden_states(preset, extra):
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    loss_type, level, low, high = SHARED[preset]
    generator = torch.Generator().manual_seed(5)
    batch = make(torch.float64)
    rows, columns = batch["mask"].shape
    ids = torch.randint(0, 30, (rows, columns), generator=generator)
    inputs = torch.randn(rows, columns, 8, generator=generator, dtype=torch.float64), torch.randn(30, 8, generator=generator).double()
    found = []
    for liger_s in (False, True):
        hidden, head = (t.clone().requires_grad_() for t in inputs)
        if liger_s:
            fused = liger.LigerFusedLinearGRPOLoss(
                beta=BETA if extra == "kl" else 0.0,
                compiled=False,
                use_ref_model=extra == "kl",
                epsilon_low=low,
                epsilon_high=high,
                loss_type=loss_type,
                max_completion_length=MAX_LENGTH,
                importance_sampling_level=level,
                temperature=0.8,
                delta=CAP if extra == "delta" else None,
            )
            weight = (batch["old"] - batch["inference"]).exp().clamp(max=CAP) if extra == "tis" else None
            loss, _ = fused(
                hidden,
                head,
                ids,
                batch["mask"].double(),
                batch["advantages"],
                old_per_token_logps=batch["old"],
                ref_per_token_logps=batch["ref"] if extra == "kl" else None,
                vllm_is_ratio=weight,
            )
        else:
            temperature = torch.full((sum(LENGTHS),), 0.8, dtype=torch.float64)
            logp, _ = logprob(hidden[batch["mask"]], head, ids[batch["mask"]], temperature)
            loss = ours(preset, extra, logp)
        loss.backward()
        found.append((loss.detach(), hidden.grad, head.grad))
    assert found[0][1].abs().max() > 0
    for mine, theirs in zip(*found, strict=True):
        # Liger computes in float32, whatever the dtype of its inputs.
        torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-4, atol=1e-5 * float(mine.abs().max()))


@pytest.fixture(scope="module")
def trl_results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Results of TRL, run in its own environment, because its packages conflict with ours. `benchmarks/demo.py` creates it once."""
    try:
        python = demo.install_trl()
    except RuntimeError as error:
        if any(words in str(error) for words in UNREACHABLE):
            pytest.skip(f"the package index cannot be reached: {error}")
        raise
    out = tmp_path_factory.mktemp("trl") / "results.pt"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, HERE / "trl_worker.py", out], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1500)  # the first case may install TRL
@pytest.mark.parametrize(("preset", "extra"), CASES, ids=NAMES)
def test_trl_computes_the_same_loss_and_gradient(preset, extra, trl_results):
    mask = make()["mask"]
    logp = make()["logp"][mask].requires_grad_()
    loss = ours(preset, extra, logp)
    (gradient,) = torch.autograd.grad(loss, logp)
    theirs, their_gradient = trl_results[preset, extra]
    digits = 1e-6 if preset == "sapo" else 1e-9  # TRL stores sapo's temperatures in float32
    torch.testing.assert_close(loss.detach(), theirs, rtol=digits, atol=1e-12)
    torch.testing.assert_close(gradient, their_gradient[mask], rtol=digits, atol=1e-12)
    assert not their_gradient[~mask].any()
