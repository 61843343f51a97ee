"""Loads the environments of a run, here or in workers, and the chat format of its model, for the process that plays them.

A run whose environments all have workers never imports verifiers here.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rlx.config.checks.objective import needs_exact_sampling, self_distilled
from rlx.config.eval_envs import rollout_envs
from rlx.config.schema import Config, EnvConfig, PlayRoot
from rlx.envs.base import Environment, Local, sampling_of, settings_of
from rlx.envs.kinds import load_one
from rlx.envs.pool import WorkerPool
from rlx.heartbeat import WAITING_FOR_MODEL, wait_for_model
from rlx.paths import RunPaths
from rlx.policy.base import PolicyError
from rlx.policy.chat import Chat, load_chat
from rlx.policy.spec import EndpointSpec, PolicySpec, policy_of, spec_of
from rlx.policy.teacher_prompt import Demonstrated
from rlx.policy.templates import ends_of, refusal, tokenizer_of
from rlx.policy.tokens import Generator
from rlx.process import importing, pretend_missing


def workers_of(config: PlayRoot, env: EnvConfig) -> tuple[int, int]:
    """How many processes play an environment at first, and how many at most; 0: the orchestrator plays it itself."""
    asked = config.orchestrator.env_workers if env.workers is None else env.workers
    most = len(os.sched_getaffinity(0)) // (2 * len(rollout_envs(config)))  # together half of the cores, as others run here, too
    return (1, max(1, most)) if asked is None else (asked, asked)


def load_environments(config: PlayRoot, beat: Callable[[str], None], logs: Path | None = None) -> dict[str, Local]:
    """The environments of the mix and of evaluations by name. Call it on the main thread. They can be played after `give_policy`.

    Workers start first, and load while this process does other work; `wait_loaded` waits for them. `logs`: folder of their log files.
    """
    bound, configs = config.orchestrator.env_worker_memory_gb, rollout_envs(config)
    envs: dict[str, Local] = {}
    for name, env in configs.items():
        least, most = workers_of(config, env)
        if least:
            envs[name] = WorkerPool(name, env, settings_of(config, env), least, most_workers=most, logs=logs, memory_gb=bound)
    for name, env in configs.items():
        if name not in envs:
            beat(f"loading environment {name}")
            envs[name] = load_one(name, env, settings_of(config, env))
    return {name: envs[name] for name in configs}


def wait_loaded(envs: Mapping[str, Local], beat: Callable[[str], None]) -> None:
    """Wait until all workers have loaded their environments. Raises RuntimeError with an environment's own message if one cannot."""
    for name, env in envs.items():
        if isinstance(env, WorkerPool):
            phase = f"loading environment {name}"
            env.wait_loaded(lambda phase=phase: beat(phase))  # type: ignore[misc]


def give_policy(envs: Mapping[str, Local], config: PlayRoot, chat: Chat, generator: Generator) -> None:
    """Give the environments the run's policy, which samples with `generator`. Raises the ValueError of `demonstrated`."""
    label, configs = uuid.uuid4().hex[:6] + "-", rollout_envs(config)
    for name, env in envs.items():
        own = config if isinstance(config, Config) and name in config.envs else None  # it trains
        sampling = sampling_of(config, configs[name])
        spec = PolicySpec(
            seed=config.seed,
            sampling=sampling,
            context_length=config.max_model_len if own is None else min(own.seq_len, own.max_model_len),
            exact=own is not None and needs_exact_sampling(own, name, sampling),
            learn=sorted(own.envs[name].observation_ce_weights) if own is not None else [],
            demonstrated=demonstrated(own, name, env.rows) if own is not None else None,
            label=label,
            endpoints=teachers_of(own) if own is not None and own.envs[name].sampled_by == "teacher" else [],
            turn_timeout=configs[name].turn_timeout,
            deadline=0.9 * settings_of(config, configs[name]).timeout if own is not None and configs[name].on_timeout == "score" else None,
        )
        let_play(env, spec, chat if own is not None or config.chat.thinking is not None else chat.plain, generator)


def let_play(env: Local, spec: PolicySpec, chat: Chat | None, generator: Any) -> None:
    """Give an environment its policy, here or in its workers, which sample with a `Sampler`. `chat`, `generator`: None for an endpoint."""
    if isinstance(env, WorkerPool):
        spec.chat = None if chat is None else spec_of(chat)
        env.give(spec, generator)
    else:
        env.policy = policy_of(spec, chat, generator)


def demonstrated(config: Config, name: str, rows: Sequence[Mapping[str, Any]]) -> Demonstrated | None:
    """How a demonstration enters the teacher's prompts of an environment. Raises ValueError if the first of its `rows` has none."""
    if name not in self_distilled(config):
        return None
    assert config.teacher.demonstration is not None
    how = Demonstrated(config.teacher.demonstration, config.teacher.template)
    if len(rows):
        try:
            how.of(rows[0])
        except PolicyError as error:
            raise ValueError(
                f"envs.{name}: in its first example, {error}. Name a column that holds a text or messages: teacher.demonstration=COLUMN"
            ) from error
    return how


def teachers_of(config: Config) -> list[EndpointSpec]:
    """The teacher that plays an environment, at all its addresses."""
    t = config.teacher
    addresses = [url.rstrip("/").removesuffix("/v1") for url in t.base_url]
    retries = 4 if len(addresses) == 1 else 1  # the next attempt at a rollout asks another address
    return [EndpointSpec(f"{one}/v1", t.api_key or "none", str(t.model), timeout=t.timeout, max_retries=retries) for one in addresses]


def check_chat(envs: Mapping[str, Environment], config: PlayRoot, chat: Chat) -> None:
    """Raise ValueError if the model's chat format loses the tools of an environment, the model's calls, or their results."""
    if text := refusal(config.model.name, chat, {name: env.tools for name, env in envs.items()}):
        raise ValueError(text)


def load_tokenizer(config: PlayRoot, paths: RunPaths, beat: Callable[[str], None]) -> Chat:
    """The chat format of the initial model. Waits until that model exists."""
    source = wait_for_model(paths, config.inference.startup_timeout, lambda: beat(WAITING_FOR_MODEL))
    keeps_tokens = config.keeps_thinking or config.orchestrator.trajectory_strategy == "interleaved"
    # An environment in this process, or the code that came with a tokenizer, may use torch through transformers.
    others = config.model.trust_remote_code or not all(workers_of(config, env)[0] for env in rollout_envs(config).values())
    with importing(), nullcontext() if others else pretend_missing("torch"):
        tokenizer = tokenizer_of(source, config.model)
    return load_chat(tokenizer, config.model, keeps_tokens=keeps_tokens, ends=ends_of(source), keeps_thinking=config.keeps_thinking)
