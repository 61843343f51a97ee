"""What a benchmark (`bench=true`) measures and what it leaves out, in words. Pure."""

from __future__ import annotations

from rlx.config.schema import Config, SftRoot

WARMUP = 3  # steps that are not counted, if there are more: they allocate and compile
TRAINED = "random tokens, {}; no servers, environments, weights or checkpoints"


def benchmark(cfg: Config | SftRoot) -> list[tuple[str, str]]:
    """Rows of name and text; empty if this is no benchmark."""
    if cfg.measured is None:
        return []
    variable = (cfg.data.length if isinstance(cfg, SftRoot) else cfg.bench_length) == "variable"
    steps = f"{cfg.max_steps:,}; medians over those after the first {WARMUP}, if there are more"
    if cfg.measured == "trainer":
        samples = f"samples of {'1 to ' if variable else ''}{cfg.seq_len:,} tokens"
        return [("measures", "the trainer alone"), ("input", TRAINED.format(samples)), ("steps", steps)]
    assert isinstance(cfg, Config)
    if cfg.measured == "rl":
        answers = "end where the policy ends them" if variable else "have max_tokens, whatever the policy samples"
        left_out = "checkpoints and evaluations are left out"
        return [
            ("measures", "the whole run"),
            ("answers", answers),
            ("steps", steps),
            ("weights", f"every version is published; {left_out}"),
        ]
    answer = cfg.sampling.max_tokens
    lengths = [f"{'1 to ' if variable else ''}{tokens:,}" for tokens in (cfg.seq_len - answer, answer)]
    requests = cfg.num_groups * cfg.orchestrator.rollouts_per_example
    return [
        ("measures", "the servers alone, with the initial model"),
        ("requests", f"{requests:,} a step, {cfg.orchestrator.rollouts_per_example} of each prompt, {cfg.load:,} in flight"),
        ("lengths", f"prompts of {lengths[0]} random tokens, answers of {lengths[1]}"),
        ("steps", steps),
    ]
