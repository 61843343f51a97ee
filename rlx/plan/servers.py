"""What the plan says of the inference servers: vLLM's command line of each, and their memory. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from rlx.config.errors import ConfigError
from rlx.config.kv_cache import kv_cache_bytes
from rlx.config.memory import engine_memory, size
from rlx.config.schema import PlayRoot
from rlx.inference.arguments import command, environment
from rlx.inference.middleware import SECRET
from rlx.plan.environment import DEVICES
from rlx.plan.record import ProcessSpec


def command_lines(cfg: PlayRoot, plan: Sequence[ProcessSpec]) -> list[str]:
    """What starts each inference server; the same in another shell makes a server that a run can train (`inference.base_url`).

    Raises ConfigError if vLLM cannot serve the model so.
    """
    model = "<initial model>" if cfg.model.prepared or getattr(cfg, "weights_dir", None) else cfg.model.name
    lines = []
    for spec in (spec for spec in plan if spec.role == "inference"):
        try:
            words = command(cfg, model, cfg.listens_on, spec.ports["http"] or "<a free port>", spec.replica, spec.argv[0])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        variables = environment(cfg, {}) | ({DEVICES: ",".join(map(str, spec.gpus))} if spec.gpus else {})
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines.append(f"{spec.name}: {shown} {SECRET}=<secret> {shlex.join(words)}")
    return lines


def memory_of(cfg: PlayRoot, plan: Sequence[ProcessSpec], beside: float = 0.0) -> list[str]:
    """The servers' memory. `beside`: bytes of the trainer on a GPU that they share."""
    engine, cpu = engine_memory(cfg), cfg.hardware.device == "cpu"
    if not any(spec.role == "inference" for spec in plan):
        return [f"inference: elsewhere ({', '.join(cfg.inference.base_url)})"]
    each = f"weights {size(engine.weights)}, KV cache {size(engine.kv_token)} per token"
    full = f"{size(engine.kv_wanted)} would hold all concurrent sequences at full length; they need less if they share prompts"
    if cpu:
        budget = kv_cache_bytes(cfg)
        kept = f"  KV cache {size(budget)} (inference.kv_cache_gb): {budget / engine.kv_token:,.0f} tokens, "
        kept += f"{budget / engine.kv_token / cfg.seq_len:,.0f} sequences of full length; {full}"
        return [f"inference, each server: {each}", kept]
    share = cfg.inference.gpu_memory_utilization
    least = (engine.weights + engine.kv_longest) / share
    if cfg.hardware.shared and beside:
        least = max(least, beside / (1 - share)) if share < 1 else math.inf
    card = f"the card must have at least {size(least)}" if math.isfinite(least) else "no memory is left for the trainer"
    taken = f"  it takes {share:.0%} of the card (inference.gpu_memory_utilization): {card}; {full}"
    return [f"inference, each GPU: {each}", taken]
