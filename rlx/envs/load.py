"""Loads the environments of a run, here or in workers, and the chat format of its model.

`load_one` loads one environment in this process; a worker calls it too. The rest belongs to the orchestrator. verifiers is imported inside
the function, because the import takes seconds: a run whose environments all have workers never imports it here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.config.evaluated import played
from rlx.config.schema import Config, EnvConfig, PlayRoot
from rlx.config.signatures import OWN_KINDS
from rlx.envs.base import Environment, Local, sampling_of
from rlx.envs.local import LocalEnvironment
from rlx.envs.wire import Settings
from rlx.process import hidden, importing

if TYPE_CHECKING:
    from rlx.paths import RunPaths
    from rlx.policy.chat import Chat
    from rlx.policy.spec import EndpointSpec, PolicySpec
    from rlx.policy.teacher_prompt import Demonstrated
    from rlx.policy.tokens import Generator


def load_one(name: str, config: EnvConfig, settings: Settings) -> LocalEnvironment:
    """Load `config.id` in this process as the environment `name`. Call it on the main thread.

    Imports verifiers, unless it is one of rlx's own kinds. Raises ValueError or RuntimeError with a sentence for people, or what the
    environment's own `load_environment` raises.
    """
    from rlx.envs.kinds import kind_of

    # A job that runs a snapshot sets it for `python -m rlx…`. A script that the environment starts must find the modules beside it.
    os.environ.pop("PYTHONSAFEPATH", None)
    load: Callable[..., LocalEnvironment]
    with importing():
        kind = kind_of(config.id)
        if config.id in OWN_KINDS:
            load = importlib.import_module(config.id).load
        elif kind == "v1":
            from rlx.envs.verifiers_v1 import load_environment as load
        else:
            from rlx.envs.verifiers_v0 import load_environment as load
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return load(name, config, settings.sampling, settings.timeout, settings.concurrency)
    finally:
        for number, handler in handlers.items():  # verifiers installs its own
            signal.signal(number, handler)


def workers_of(config: PlayRoot, env: EnvConfig) -> tuple[int, int]:
    """How many processes play an environment at first, and how many at most; 0: the orchestrator plays it itself."""
    asked = config.orchestrator.env_workers if env.workers is None else env.workers
    most = len(os.sched_getaffinity(0)) // (2 * len(played(config)))  # together half of the cores, as others run here, too
    return (1, max(1, most)) if asked is None else (asked, asked)


def settings_of(config: PlayRoot, env: EnvConfig) -> Settings:
    """What the environment needs to know of the run."""
    timeout = config.orchestrator.rollout_timeout if env.rollout_timeout is None else env.rollout_timeout
    return Settings(sampling_of(config, env), timeout, config.concurrency, env.on_timeout == "zero")


def load_environments(config: PlayRoot, beat: Callable[[str], None], logs: Path | None = None) -> dict[str, Local]:
    """The environments of the mix and of evaluations by name. Call it on the main thread. They can be played after `give_policy`.

    Workers start first, and load while this process does other work; `wait_loaded` waits for them. `logs`: folder of their log files.
    """
    from rlx.envs.pool import WorkerPool

    bound, configs = config.orchestrator.env_worker_memory_gb, played(config)
    pools: dict[str, Local] = {
        name: WorkerPool(name, env, settings_of(config, env), least, most_workers=most, logs=logs, memory_gb=bound)
        for name, env in configs.items()
        for least, most in [workers_of(config, env)]
        if least > 0
    }
    envs: dict[str, Local] = {}
    for name, env in configs.items():
        if name not in pools:
            beat(f"loading environment {name}")
        envs[name] = pools[name] if name in pools else load_one(name, env, settings_of(config, env))
    return envs


def wait_loaded(envs: Mapping[str, Local], beat: Callable[[str], None]) -> None:
    """Wait until all workers have loaded their environments. Raises RuntimeError with an environment's own message if one cannot."""
    from rlx.envs.pool import WorkerPool

    for name, env in envs.items():
        if isinstance(env, WorkerPool):
            phase = f"loading environment {name}"
            env.wait_loaded(lambda phase=phase: beat(phase))  # type: ignore[misc]


def give_policy(envs: Mapping[str, Local], config: PlayRoot, chat: Chat, generator: Generator) -> None:
    """Give the environments the run's policy, which samples with `generator`. Raises the ValueError of `demonstrated`."""
    from rlx.config.checks.objective import needs_exact_sampling
    from rlx.policy.spec import PolicySpec

    label, configs = uuid.uuid4().hex[:6] + "-", played(config)
    for name, env in envs.items():
        own = config if isinstance(config, Config) and name in config.envs else None  # it trains
        sampling = sampling_of(config, configs[name])
        spec = PolicySpec(
            seed=config.seed,
            sampling=sampling,
            context_length=config.max_model_len if own is None else min(own.seq_len, own.max_model_len),
            exact=own is not None and needs_exact_sampling(own, name, sampling),
            learn=sorted(own.envs[name].learn) if own is not None else [],
            demonstrated=demonstrated(own, name, env.rows) if own is not None else None,
            label=label,
            endpoints=teachers_of(own) if own is not None and own.envs[name].played_by == "teacher" else [],
            turn_timeout=configs[name].turn_timeout,
            deadline=0.9 * settings_of(config, configs[name]).timeout if own is not None and configs[name].on_timeout == "score" else None,
        )
        let_play(env, spec, chat if own is not None or config.chat.thinking is not None else chat.plain, generator)


def let_play(env: Local, spec: PolicySpec, chat: Chat | None, generator: Any) -> None:
    """Give an environment its policy, here or in its workers, which sample with a `Sampler`. `chat`, `generator`: None for an endpoint."""
    from rlx.envs.pool import WorkerPool
    from rlx.policy.spec import policy_of, spec_of

    if isinstance(env, WorkerPool):
        spec.chat = None if chat is None else spec_of(chat)
        env.give(spec, generator)
    else:
        env.policy = policy_of(spec, chat, generator)


def demonstrated(config: Config, name: str, rows: Sequence[Mapping[str, Any]]) -> Demonstrated | None:
    """How a demonstration enters the teacher's prompts of an environment. Raises ValueError if the first of its `rows` has none."""
    from rlx.config.checks.objective import shown
    from rlx.policy.base import PolicyError
    from rlx.policy.teacher_prompt import Demonstrated

    if name not in shown(config):
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
    from rlx.policy.spec import EndpointSpec

    t = config.teacher
    addresses = [url.rstrip("/").removesuffix("/v1") for url in t.base_url]
    retries = 4 if len(addresses) == 1 else 1  # the next attempt at a rollout asks another address
    return [EndpointSpec(f"{one}/v1", t.api_key or "none", str(t.model), timeout=t.timeout, max_retries=retries) for one in addresses]


def check_chat(envs: Mapping[str, Environment], config: PlayRoot, chat: Chat) -> None:
    """Raise ValueError if the model's chat format loses the tools of an environment, the model's calls, or their results."""
    from rlx.policy.templates import refusal

    if text := refusal(config.model.name, chat, {name: env.tools for name, env in envs.items()}):
        raise ValueError(text)


def load_tokenizer(config: PlayRoot, paths: RunPaths, beat: Callable[[str], None]) -> Chat:
    """The chat format of the initial model. Waits until that model exists."""
    from rlx.heartbeat import WAITING_FOR_MODEL, wait_for_model
    from rlx.policy.chat import load_chat
    from rlx.policy.templates import ends_of, tokenizer_of

    source = wait_for_model(paths, config.inference.startup_timeout, lambda: beat(WAITING_FOR_MODEL))
    keeps_tokens = config.keeps_thinking or config.orchestrator.trajectory_strategy == "interleaved"
    # An environment in this process, or the code that came with a tokenizer, may use torch through transformers.
    others = config.model.trust_remote_code or not all(workers_of(config, env)[0] for env in played(config).values())
    with importing(), nullcontext() if others else hidden("torch"):
        tokenizer = tokenizer_of(source, config.model)
    return load_chat(tokenizer, config.model, keeps_tokens=keeps_tokens, ends=ends_of(source), keeps_thinking=config.keeps_thinking)
