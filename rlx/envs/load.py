"""The environments of a run's mix, and the chat format that they and the model meet in.

Knows the configuration and where the initial model is said. The library of environments is imported here, late, because it takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.config.schema import Config
from rlx.envs.base import Environment, sampling_of
from rlx.envs.chat import Chat, load_chat
from rlx.heartbeat import WAITING_FOR_MODEL, AtWork
from rlx.paths import RunPaths
from rlx.waiting import wait_for


def load_environments(config: Config, beat: Callable[[str], None]) -> dict[str, Environment]:
    """The environments of the mix by name, on the main thread."""
    beat("importing verifiers")
    from rlx.envs.verifiers_v0 import load_environment

    envs: dict[str, Environment] = {}
    for name, env in config.envs.items():
        beat(f"loading environment {name}")
        timeout, concurrency = config.orchestrator.rollout_timeout, config.orchestrator.max_concurrent
        envs[name] = load_environment(name, env, sampling_of(config, env), timeout, concurrency)
    return envs


def load_tokenizer(config: Config, paths: RunPaths, beat: Callable[[str], None]) -> Chat:
    """The chat format of the initial model, once there is one."""
    wait_for(
        paths.initial_model.exists,
        f"the initial model ({paths.initial_model})",
        config.inference.startup_timeout,
        tick=lambda: beat(WAITING_FOR_MODEL),
        excused=AtWork(paths, "prepare"),
    )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(paths.initial_model.read_text().strip(), trust_remote_code=config.model.trust_remote_code)
    return load_chat(tokenizer, config.model.name, keep_reasoning=config.orchestrator.trajectory_strategy == "interleaved")
