"""The rules for training data: environments, batches and their filters, lengths, sampling, shaped rewards."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rlx.config.rules import Show, rule
from rlx.config.schema import Config
from rlx.config.signatures import OWN_KINDS, is_installed, module_of

# environments


@rule("envs", "launcher")
def environments(cfg: Config, of: Show) -> Iterator[str]:
    if not cfg.envs:
        if not cfg.needs_envs:
            return
        yield "there is no environment. Choose one or more: env=reverse_text, env=[sums,reverse_text], or env.id=MODULE for your own."
    elif sum(env.weight for env in cfg.envs.values()) <= 0:
        weights = ", ".join(of(f"envs.{name}.weight") for name in cfg.envs)
        yield f"no environment has a weight above 0: {weights}. Give at least one a weight above 0."
    for name, env in cfg.envs.items():
        yield from module_problems(f"envs.{name}.id", env.id, cfg.launcher.check_envs and env.python is None, of)


def module_problems(key: str, env_id: str, installed: bool, of: Show) -> Iterator[str]:
    """Whether a key names an environment. `installed`: it must be installed here."""
    module = module_of(env_id)
    if module not in OWN_KINDS and not module.isidentifier():
        yield f"{of(key)} is not the name of a Python module. Write the name of an installed environment, or owner/name."
    elif installed and not is_installed(module):
        yield (
            f"the environment {of(key)} is not installed: there is no module {module}.\n"
            f"Install it with rlx env install FOLDER|PACKAGE, or into this Python ({sys.executable})."
        )


# batches


@rule("orchestrator.batch_size", "orchestrator.rollouts_per_example", "envs")
def whole_groups(cfg: Config, of: Show) -> Iterator[str]:
    size, group = cfg.orchestrator.batch_size, cfg.orchestrator.rollouts_per_example
    own = [name for name, env in cfg.envs.items() if env.weight > 0 and env.rollouts_per_example not in (None, group)]
    if own:
        mean, groups = cfg.mean_group_size, cfg.num_groups
        if abs(groups * mean - size) >= 0.5:
            keys = ", ".join(of(f"envs.{name}.rollouts_per_example") for name in own)
            below = int(size / mean)
            fixes = " or ".join(f"{round(number * mean)}" for number in (below, below + 1) if number)
            yield (
                f"a batch must hold whole groups, {mean:.4g} rollouts each on average: {of('orchestrator.batch_size')}, with "
                f"{of('orchestrator.rollouts_per_example')}, {keys} and the weights of the mix.\nUse orchestrator.batch_size={fixes}."
            )
    elif size % group:
        below = size // group * group
        fixes = f"{below} or {below + group}" if below else f"{group}"
        yield (
            f"a batch must hold whole groups: {of('orchestrator.batch_size')} is not a multiple of "
            f"{of('orchestrator.rollouts_per_example')}.\nUse orchestrator.batch_size={fixes}."
        )


@rule("orchestrator.min_group", "orchestrator.rollouts_per_example", "envs")
def survivors(cfg: Config, of: Show) -> Iterator[str]:
    for name in cfg.envs:
        own, size = cfg.envs[name].rollouts_per_example is not None, cfg.group_size(name)
        if cfg.orchestrator.min_group > max(size, 2):  # a group of one needs no second rollout
            key = f"envs.{name}.rollouts_per_example" if own else "orchestrator.rollouts_per_example"
            yield f"a group of {of(key)} rollouts never has {of('orchestrator.min_group')} with a score. Lower orchestrator.min_group."
            return


@rule("trainer.num_minibatches", "orchestrator.batch_size", "orchestrator.rollouts_per_example", "envs")
def minibatches(cfg: Config, of: Show) -> Iterator[str]:
    groups = cfg.num_groups
    if cfg.orchestrator.batch_size >= cfg.orchestrator.rollouts_per_example and groups < cfg.trainer.num_minibatches:
        yield (
            f"a batch of {groups} group{'s' * (groups > 1)} cannot be split into more minibatches than groups: "
            f"{of('trainer.num_minibatches')}, {of('orchestrator.batch_size')}, {of('orchestrator.rollouts_per_example')}.\n"
            f"Use trainer.num_minibatches={groups} or fewer."
        )


@rule("orchestrator.difficulty_filter")
def filter_keeps_something(cfg: Config, of: Show) -> Iterator[str]:
    low, high = cfg.orchestrator.difficulty_filter.min_reward, cfg.orchestrator.difficulty_filter.max_reward
    if low is not None and high is not None and low > high:
        keys = f"{of('orchestrator.difficulty_filter.min_reward')} > {of('orchestrator.difficulty_filter.max_reward')}"
        yield f"the difficulty filter drops every group: {keys}. Lower the first or raise the second."


@rule("orchestrator.difficulty_filter", "orchestrator.buffer", "envs")
def rewards_of_several_agents(cfg: Config, of: Show) -> Iterator[str]:
    keys = [f"orchestrator.difficulty_filter.{name}" for name in ("min_reward", "max_reward", "min_reward_variance")]
    keys += ["orchestrator.buffer.easy_threshold", "orchestrator.buffer.hard_threshold"]
    filters, buffer = cfg.orchestrator.difficulty_filter, cfg.orchestrator.buffer
    used = [key for key in keys if getattr(filters if "filter" in key else buffer, key.rpartition(".")[2]) is not None]
    for name, env in cfg.envs.items():
        if env.agents_per_group == "all" and used:
            yield (
                f"a group of envs.{name} has the rewards of several agents, whose mean says nothing: {of(f'envs.{name}.agents_per_group')} "
                f"with {' and '.join(map(of, used))}.\nUse orchestrator.difficulty_filter.zero_advantage=true, or train one agent a group."
            )


@rule("orchestrator.buffer")
def pools(cfg: Config, of: Show) -> Iterator[str]:
    buffer = cfg.orchestrator.buffer
    low, high = buffer.hard_threshold, buffer.easy_threshold
    if low is not None and high is not None and low >= high:
        keys = f"{of('orchestrator.buffer.hard_threshold')} >= {of('orchestrator.buffer.easy_threshold')}"
        yield f"an example would be both easy and hard: {keys}. Lower the first or raise the second."
    for name, threshold, fraction in (("easy", high, buffer.easy_fraction), ("hard", low, buffer.hard_fraction)):
        if fraction > 0 and threshold is None:
            yield (
                f"there is no {name} pool to draw from: {of(f'orchestrator.buffer.{name}_fraction')} without a threshold.\n"
                f"Set orchestrator.buffer.{name}_threshold to a mean reward, or the fraction to 0."
            )
    if buffer.easy_fraction + buffer.hard_fraction > 1:
        keys = f"{of('orchestrator.buffer.easy_fraction')} + {of('orchestrator.buffer.hard_fraction')}"
        yield f"the shares of the pools add up to more than 1: {keys}. Lower one of them."


# lengths


@rule("sampling.max_tokens", "seq_len")
def room_for_prompt(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.plays and cfg.sampling.max_tokens >= cfg.seq_len:
        yield (
            f"a completion leaves no room for its prompt: {of('sampling.max_tokens')} >= {of('seq_len')}.\n"
            "seq_len counts prompt and completion. Lower sampling.max_tokens or raise seq_len."
        )


@rule("envs", "seq_len")
def room_for_prompt_of_env(cfg: Config, of: Show) -> Iterator[str]:
    for name, env in cfg.envs.items():
        if env.sampling.max_tokens is not None and env.sampling.max_tokens >= cfg.seq_len:
            yield (
                f"a completion leaves no room for its prompt: {of(f'envs.{name}.sampling.max_tokens')} >= {of('seq_len')}.\n"
                f"seq_len counts prompt and completion. Lower envs.{name}.sampling.max_tokens or raise seq_len."
            )


@rule("sampling.min_tokens", "sampling.max_tokens", "envs")
def fewest_tokens(cfg: Config, of: Show) -> Iterator[str]:
    for name, env in cfg.envs.items():
        fewest, most = env.sampling.min_tokens, env.sampling.max_tokens
        low, high = ("sampling.min_tokens", cfg.sampling.min_tokens), ("sampling.max_tokens", cfg.sampling.max_tokens)
        if fewest is not None:
            low = (f"envs.{name}.sampling.min_tokens", fewest)
        if most is not None:
            high = (f"envs.{name}.sampling.max_tokens", most)
        if low[1] > high[1] and (fewest, most) != (None, None):
            yield (
                f"the minimum number of new tokens is above the maximum: {of(low[0])} > {of(high[0])}.\n"
                "Lower the first or raise the second."
            )
    if cfg.sampling.min_tokens > cfg.sampling.max_tokens:
        yield (
            f"the minimum number of new tokens is above the maximum: {of('sampling.min_tokens')} > {of('sampling.max_tokens')}.\n"
            "Lower the first or raise the second."
        )


@rule("trainer.micro_batch_tokens", "seq_len")
def row_holds_sample(cfg: Config, of: Show) -> Iterator[str]:
    tokens = cfg.trainer.micro_batch_tokens
    if tokens is not None and tokens < cfg.seq_len:
        yield (
            f"the longest sample does not fit into a packed row: {of('trainer.micro_batch_tokens')} < {of('seq_len')}.\n"
            f"Use trainer.micro_batch_tokens={cfg.seq_len} or more, or null to let rlx choose."
        )


@rule("reward", "sampling.max_tokens", "envs")
def overlong_cache(cfg: Config, of: Show) -> Iterator[str]:
    bounds = {
        ("sampling.max_tokens" if env.sampling.max_tokens is None else f"envs.{name}.sampling.max_tokens"): (
            env.sampling.max_tokens or cfg.sampling.max_tokens
        )
        for name, env in cfg.envs.items()
    } or {"sampling.max_tokens": cfg.sampling.max_tokens}
    key = min(bounds, key=lambda each: bounds[each])
    if cfg.reward.overlong_cache is not None and cfg.reward.overlong_cache > bounds[key]:
        yield (
            f"every rollout would get a length penalty: {of('reward.overlong_cache')} is above the maximum number of new tokens in a turn, "
            f"{of(key)}. Lower it, or set it to null."
        )


# sampling


@rule("sampling.top_k", "envs")
def top_k(cfg: Config, of: Show) -> Iterator[str]:
    values = {"sampling.top_k": cfg.sampling.top_k} | {f"envs.{name}.sampling.top_k": env.sampling.top_k for name, env in cfg.envs.items()}
    for key, value in values.items():
        if value == 0:
            yield f"`{key}` must be -1 (all tokens) or at least 1: {of(key)}."
