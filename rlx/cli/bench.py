"""The lines of a benchmark's summary (`bench=true`), from its `bench.json` (`rlx.runs.bench_summary`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from rlx.config.memory import size
from rlx.plan.explain import table
from rlx.terminal import duration

ROWS = (  # a row whose numbers a benchmark does not have is left out
    ("tokens/s", "{tokens_per_second:,.0f}, {tokens:,.0f} tokens a step"),
    ("trained", "{trained_tokens_per_second:,.0f} tokens/s while it computes, {tokens:,.0f} tokens a step"),
    ("sampled", "{sampled_tokens_per_second:,.0f} tokens/s, {rollouts_per_second:.4g} requests/s, {in_flight:.0f} in flight"),
    ("completions", "{tokens_per_rollout:,.0f} tokens"),
    ("prompts", "{prompt_tokens_per_second:,.0f} tokens/s, cached ones included"),
    ("first token", "{first_token_seconds:.3g} s alongside the load"),
    ("request", "{request_seconds:.3g} s"),
    ("KV cache", "{kv_cache_usage:.0%} in use, {running:.4g} decoded, {waiting:.4g} queued, {preemptions:.0f} preempted in the run"),
    ("lag", "{lag:.3g} versions"),
    ("MFU", "{mfu:.1%}; {mfu_causal:.1%} with causal attention"),
    ("  of the step", "{mfu_of_step:.1%}; {mfu_causal_of_step:.1%}, waiting included"),
    ("TFLOP/s", "{tflops:.3g} each device"),
)


def rows_of(found: Mapping[str, Any]) -> list[str]:
    """The table of a `bench.json`: speeds, the stages of a step, the memory of each role."""
    rows = []
    for label, text in ROWS:
        with contextlib.suppress(KeyError):
            rows.append([label, text.format_map(found)])
    for source, seconds in found["seconds"].items():
        medians = f", the median of {found['steps']} steps after the first {found['warmup']}"
        rows.append([f"{source}'s step", duration(seconds["step"]) + medians])
        stages = [(name, value) for name, value in seconds.items() if name != "step"]
        rows += [[f"  {name}", f"{duration(value)}  {value / seconds['step']:.0%}"] for name, value in stages]
    for role, memory in found["memory"].items():
        estimate = f"; the plan estimates {size(memory['estimated_gb'] * 2**30)}" if "estimated_gb" in memory else ""
        rows.append([f"{role}'s memory", f"{size(memory['peak_gb'] * 2**30)} at the peak{estimate}"])
    return table(["", ""], rows)[1:]
