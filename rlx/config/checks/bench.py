"""The rules for benchmarks (`bench=true`): what is measured, and which keys would do nothing, or something else, beside it."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.rules import Show, rule
from rlx.config.schema import Config, EvaluatedRun


@rule("bench", "bench_role")
def bench_role_of_a_benchmark(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.bench_role != "trainer" and not cfg.bench:
        yield f"nothing would be measured: {of('bench_role')} with {of('bench')}. Set bench=true, or leave out bench_role."


@rule("bench", "eval.interval")
def bench_evaluates_nothing(cfg: EvaluatedRun, of: Show) -> Iterator[str]:
    if cfg.bench and cfg.eval.interval is not None:
        yield f"a benchmark evaluates nothing: {of('bench')} with {of('eval.interval')}. Remove one of the two."


@rule("replay", "bench", "bench_role")
def bench_or_replay(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.bench and cfg.replay is not None:
        tokens = {"trainer": "trains on random tokens", "rl": "plays its own rollouts", "inference": "trains nothing"}[cfg.bench_role]
        yield f"a benchmark {tokens}, a replay trains on recorded ones: {of('bench')} with {of('replay')}. Remove one of the two."


@rule("bench", "bench_role", "resume")
def bench_of_servers_begins_anew(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.measured == "inference" and cfg.resume is not None:
        yield f"servers alone are measured with the initial model: {of('bench_role')} with {of('resume')}. Leave out resume."


@rule("bench", "bench_role", "seq_len", "sampling.max_tokens")
def bench_leaves_room_for_prompts(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.measured == "inference" and cfg.sampling.max_tokens >= cfg.seq_len:
        yield (
            f"an answer leaves no room for its random prompt: {of('sampling.max_tokens')} >= {of('seq_len')}, with {of('bench_role')}.\n"
            "A prompt has seq_len - sampling.max_tokens tokens. Lower sampling.max_tokens or raise seq_len."
        )


@rule("bench", "bench_role", "bench_length", "sampling.min_tokens", "envs")
def bench_chooses_the_length(cfg: Config, of: Show) -> Iterator[str]:
    if not cfg.fixed_answers and cfg.measured != "inference":
        return
    keys = ["sampling.min_tokens"] if cfg.sampling.min_tokens else []
    keys += [f"envs.{name}.sampling.min_tokens" for name, env in cfg.envs.items() if env.sampling.min_tokens]
    for key in keys:
        yield (
            f"the benchmark says how long an answer is: {of(key)} with {of('bench_role')} and {of('bench_length')}.\n"
            f"Leave out {key}" + ("." if cfg.measured == "inference" else ", or set bench_length=variable.")
        )
