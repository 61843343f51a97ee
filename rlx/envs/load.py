"""Loads the environments of a run and the chat format of its model.

verifiers is imported inside the function, because the import takes seconds.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

from rlx.config.checks.objective import needs_exact_sampling
from rlx.config.evaluated import environments
from rlx.config.schema import Config
from rlx.envs.base import Environment, Local, sampling_of
from rlx.envs.kinds import loader_of
from rlx.heartbeat import WAITING_FOR_MODEL, AtWork
from rlx.paths import RunPaths
from rlx.policy.chat import Chat, load_chat
from rlx.policy.templates import refusal, tokenizer_of
from rlx.policy.tokens import Generator, TokenPolicy
from rlx.waiting import wait_for


def load_environments(config: Config, beat: Callable[[str], None]) -> dict[str, Local]:
    """The environments of the mix and of evaluations by name. Call it on the main thread. They can be played after `give_policy`."""
    beat("importing verifiers")
    envs: dict[str, Local] = {}
    for name, env in environments(config).items():
        beat(f"loading environment {name}")
        timeout, concurrency = config.orchestrator.rollout_timeout, config.concurrency
        envs[name] = loader_of(env.id)(name, env, sampling_of(config, env), timeout, concurrency)
    return envs


def give_policy(envs: Mapping[str, Local], config: Config, chat: Chat, generator: Generator) -> None:
    """Give the environments the run's policy, which samples with `generator`."""
    label, configs = uuid.uuid4().hex[:6] + "-", environments(config)
    for name, env in envs.items():
        env.policy = TokenPolicy(
            generator=generator,
            chat=chat,
            context_length=min(config.seq_len, config.max_model_len) if name in config.envs else config.max_model_len,
            seed=config.seed,
            sampling=sampling_of(config, configs[name]),
            exact=needs_exact_sampling(config, sampling_of(config, configs[name])),
            label=label,
        )


def check_chat(envs: Mapping[str, Environment], config: Config, chat: Chat) -> None:
    """Raise ValueError if the model's chat format loses the tools of an environment, the model's calls, or their results."""
    if text := refusal(config.model.name, chat, {name: env.tools for name, env in envs.items()}):
        raise ValueError(text)


def load_tokenizer(config: Config, paths: RunPaths, beat: Callable[[str], None]) -> Chat:
    """The chat format of the initial model. Waits until that model exists."""
    wait_for(
        paths.initial_model.exists,
        f"the initial model ({paths.initial_model})",
        config.inference.startup_timeout,
        tick=lambda: beat(WAITING_FOR_MODEL),
        excused=AtWork(paths, "prepare"),
    )
    tokenizer = tokenizer_of(paths.initial_model.read_text().strip(), config.model)
    return load_chat(tokenizer, config.model, keeps_tokens=config.orchestrator.trajectory_strategy == "interleaved")
