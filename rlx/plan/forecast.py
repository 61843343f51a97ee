"""How long a step takes on a CPU, at most about: from the operations of the matrix products.

Pure: turns a configuration into numbers and text. It does not know the machine, so it may be off by a factor of 3.
"""

from __future__ import annotations

from rlx.config.memory import adapter_parameters
from rlx.config.schema import CommandConfig, Config, SftRoot, TrainingRoot

TRAINING, SAMPLING = 100e9, 25e9
"""Floating-point operations per second of one CPU thread in float32, measured with SmolLM2-135M on a server's cores. Others differ by a
factor of 3."""
LONG = 10.0  # seconds: a longer step is announced at the start of a run


def notes_of(cfg: CommandConfig) -> list[str]:
    """What the start of a run says of its time: nothing on CUDA, and nothing if its steps are short."""
    if not isinstance(cfg, (Config, SftRoot)) or cfg.hardware.device != "cpu" or cfg.hosts or sum(_seconds(cfg).values()) < LONG:
        return []
    return [f"a step takes {time_on_cpu(cfg)}; {cfg.max_steps:,} steps (docs/models.md)"]


def time_on_cpu(cfg: Config | SftRoot) -> str:
    """What a step of full length costs, without evaluations."""
    parts = " and ".join(f"{_duration(seconds)} to {what}" for what, seconds in _seconds(cfg).items())
    threads = cfg.hardware.cpu_threads
    full = "every row full" if isinstance(cfg, SftRoot) else "every sequence at full length and one turn a rollout"
    return f"at most about {parts}, with {threads} thread{'s' * (threads > 1)} a role, {full}"


def _seconds(cfg: Config | SftRoot) -> dict[str, float]:
    """Seconds that a step trains and samples, of what it does."""
    if isinstance(cfg, SftRoot):
        return {"train": _training(cfg, cfg.data.batch_size * cfg.seq_len)}
    found, threads, rollouts = {}, cfg.hardware.cpu_threads, cfg.orchestrator.batch_size
    alone = cfg.measured == "inference"  # the servers
    if not (cfg.trained_elsewhere or alone):
        found["train"] = _training(cfg, rollouts * cfg.seq_len)
    own = [env for env in cfg.envs.values() if env.played_by != "teacher"]
    if cfg.num_servers and (alone or own):  # otherwise our servers sample nothing
        bounds = [] if alone else [env.sampling.max_tokens or cfg.sampling.max_tokens for env in own]
        sampled = rollouts * max(bounds, default=cfg.sampling.max_tokens)
        found["sample"] = 2 * cfg.model.num_parameters * sampled / (SAMPLING * threads * cfg.num_servers)
    return found


def _training(cfg: TrainingRoot, tokens: int) -> float:
    """Seconds to train a batch of so many tokens."""
    weights, adapters = cfg.model.num_parameters, adapter_parameters(cfg)
    forward, backward = 2 * (weights + adapters), 2 * weights + 4 * adapters if adapters else 4 * weights
    recomputes = any(node.get("proximal") == "recompute" for node in cfg.objectives.values())
    before = (cfg.num_updates > 1 and recomputes) + cfg.uses_reference  # forwards before the first optimizer step
    operations = before * forward + cfg.trainer.num_iterations * (forward + backward)
    return operations * tokens / (TRAINING * cfg.trainer_ranks * cfg.hardware.cpu_threads)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min" if seconds >= 120 else f"{seconds:,.0f} s" if seconds >= 1 else "1 s"
