"""What the plan says of the inference servers: vLLM's command line of each, and their memory. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from rlx.config.errors import ConfigError
from rlx.config.kv_cache import kv_cache_bytes
from rlx.config.memory import engine_memory, size
from rlx.config.schema import PlayRoot
from rlx.config.schema_model import InferenceConfig
from rlx.inference.arguments import command, environment
from rlx.inference.middleware import SECRET
from rlx.plan.environment import DEVICES
from rlx.plan.record import ProcessSpec

ALONE = InferenceConfig().gpu_memory_utilization  # of an engine that shares its card with nobody


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
    engine = engine_memory(cfg)
    cpu = cfg.hardware.device == "cpu"
    if not any(spec.role == "inference" for spec in plan):
        return [f"inference: elsewhere ({', '.join(cfg.inference.base_url)})"]
    lines = [
        f"inference, each {'server' if cpu else 'GPU'}: weights {size(engine.weights)}, keys and values {size(engine.kv_token)} per token"
    ]
    if cpu:
        budget = kv_cache_bytes(cfg)
        tokens, sequences = budget / engine.kv_token, budget / (engine.kv_token * cfg.seq_len)
        lines.append(
            f"  key-value cache {size(budget)} (inference.kv_cache_gb): {tokens:,.0f} tokens, {sequences:,.0f} sequences of full length"
        )
    else:
        share = cfg.inference.gpu_memory_utilization
        least = (engine.weights + engine.kv_longest) / share
        lines.append(
            f"  it takes {share:.0%} of the card (inference.gpu_memory_utilization); the weights and one sequence must fit into that"
        )
        if cfg.hardware.shared and not cfg.own_ranks and share < ALONE:
            lines.append(f"  no trainer shares the card here: inference.gpu_memory_utilization={ALONE} lets the engine use it")
        if cfg.hardware.shared and beside:
            least = max(least, beside / (1 - share)) if share < 1 else math.inf
            lines.append("  the trainer has the rest of the same card")
        lines.append(
            f"  so the card must have at least {size(least)}" if math.isfinite(least) else "  so no memory is left for the trainer"
        )
    lines.append(
        f"  {size(engine.kv_wanted)} of cache would hold all concurrent sequences at full length; they need less if they share prompts"
    )
    return lines
