"""The rules for the objective, the advantage, the optimizer, the reference model, and sampling for them.

No rule names an objective or an advantage: the rules read what these declare in their own files (`rlx.config.declared`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlx.config.declared import OPTIM_RANGES, RANGES
from rlx.config.rules import Show, declared, rule, target_name
from rlx.config.sampling import biases
from rlx.config.schema import Config
from rlx.config.signatures import declared_by


@rule("loss", "advantage", "optim")
def targets_named(cfg: Config, of: Show) -> Iterator[str]:
    for name in ("loss", "advantage", "optim"):
        target = getattr(cfg, name).get("_target_")
        if not isinstance(target, str) or "." not in target:
            shown = of(f"{name}._target_") if target is not None else "null"
            yield f"`{name}._target_` must be the dotted path of a function or class: {shown}. Choose a preset: {name}=NAME."


@rule("orchestrator.rollouts_per_example", "envs", "advantage")
def group_of_one(cfg: Config, of: Show) -> Iterator[str]:
    name, run = target_name(cfg.advantage), "orchestrator.rollouts_per_example"
    if not declared(cfg.advantage).compares_group:
        return
    sizes = {f"envs.{env}.rollouts_per_example": one.rollouts_per_example for env, one in cfg.envs.items()}
    if not sizes or None in sizes.values():
        sizes[run] = cfg.orchestrator.rollouts_per_example
    for key, size in sizes.items():
        if size == 1:
            yield (
                f"the advantage {name} compares the rollouts of a group, so it is always 0 in a group of one: "
                f"{of(key)}.\nSet {key} to at least 2, or use advantage=none."
            )


def weighs_tokens(cfg: Config) -> bool:
    """Whether the objective weighs tokens by a ratio against the engine, so that the engine must sample from the policy's distribution."""
    # A correction is a ratio against the engine, whether or not the objective uses one.
    return declared(cfg.loss).uses_ratio or cfg.loss.get("correction", "none") != "none"


def needs_exact_sampling(cfg: Config, env: Mapping[str, Any]) -> bool:
    """Whether tokens of a request that truncates or penalises may not be trained. `env`: the sampling parameters of its environment."""
    accepted = cfg.sampling.allow_biased_ratio or biases(env)
    return not accepted and (weighs_tokens(cfg) or declared_by(str(cfg.loss.get("_target_", ""))) is None)


@rule("sampling", "envs", "loss")
def truncated_sampling(cfg: Config, of: Show) -> Iterator[str]:
    s = cfg.sampling
    sections: dict[str, Any] = {"sampling": s} | {f"envs.{name}.sampling": env.sampling for name, env in cfg.envs.items()}
    cut = [f"{place}.{key}" for place, own in sections.items() for key in biases({k: v for k, v in vars(own).items() if v is not None})]
    name = target_name(cfg.loss)
    if cut and not s.allow_biased_ratio and weighs_tokens(cfg):
        keys = ", ".join(of(key) for key in cut)
        yield (
            f"truncated sampling biases the importance ratio of {name or 'the objective'}: {keys}.\n"
            "The engine samples from a truncated distribution, but the trainer scores with the full one. Turn truncation off "
            "(top_p=1, top_k=-1, min_p=0, min_tokens=0), or accept the bias with sampling.allow_biased_ratio=true."
        )


@rule("loss")
def correction_without_recompute(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.loss.get("correction", "none") != "none" and cfg.loss.get("proximal", "inference") == "inference":
        yield (
            f"there is nothing to correct, because the ratios already use the engine's log-probabilities: {of('loss.correction')} with "
            f"{of('loss.proximal')}.\nSet loss.proximal=recompute or loss.correction=none."
        )


@rule("loss")
def corrected_twice(cfg: Config, of: Show) -> Iterator[str]:
    name = target_name(cfg.loss)
    if declared(cfg.loss).against_engine and cfg.loss.get("correction", "none") in ("tis", "seq_tis"):
        yield (
            f"{name} already weighs tokens by their ratio to the engine, so a second weight would count the mismatch twice: "
            f"{of('loss.correction')}.\nSet loss.correction=none, or `mis` or `seq_mis`, which only drop tokens."
        )


@rule("loss")
def correction_by_token_of_a_sequence(cfg: Config, of: Show) -> Iterator[str]:
    correction = cfg.loss.get("correction", "none")
    if declared(cfg.loss).by_sequence and correction in ("tis", "mis"):
        yield (
            f"all tokens of a rollout share one weight in {target_name(cfg.loss)}, so a correction cannot weigh or drop single tokens: "
            f"{of('loss.correction')}.\nSet loss.correction=seq_{correction}, which works per rollout, or use an objective with "
            "a loss per token, such as loss=gspo_token."
        )


@rule("loss")
def dual_clip_by_the_rewards_sign(cfg: Config, of: Show) -> Iterator[str]:
    name = target_name(cfg.loss)
    if cfg.loss.get("dual_clip") is None:
        return
    own_sign = declared(cfg.loss).own_sign
    key = own_sign if isinstance(own_sign, str) else None
    value = cfg.loss.get(key, 0) if key else 0
    if own_sign is True or (isinstance(value, int | float) and value > 0):
        and_key = f" with {of(f'loss.{key}')}" if key else ""
        yield (
            f"dual clip limits the loss where the advantage is negative, but {name}{and_key} does not follow the sign of the reward's "
            f"advantage: {of('loss.dual_clip')}.\nSet loss.dual_clip=null{f', or loss.{key}=0' if key else ''}."
        )


@rule("advantage", "reward")
def negative_rewards(cfg: Config, of: Show) -> Iterator[str]:
    shaped = {"soft_overlong": cfg.reward.soft_overlong, "length_penalty": cfg.reward.length_penalty > 0}
    if declared(cfg.advantage).rewards_from_0 and any(shaped.values()):
        off = {"soft_overlong": "false", "length_penalty": "0"}
        on = [key for key in shaped if shaped[key]]
        yield (
            f"the advantage {target_name(cfg.advantage)} needs rewards of at least 0, but reward shaping makes some negative: "
            f"{of('advantage._target_')} with {' and '.join(of(f'reward.{key}') for key in on)}.\n"
            f"Set {' '.join(f'reward.{key}={off[key]}' for key in on)}, or use advantage=group_norm."
        )


@rule("loss", "advantage")
def own_keys_in_range(cfg: Config, of: Show) -> Iterator[str]:
    for group, node in (("loss", cfg.loss), ("advantage", cfg.advantage)):
        for key, words in declared(node).ranges.items():
            if isinstance(value := node.get(key), int | float) and not RANGES[words](value):
                yield f"`{group}.{key}` must be {words}: {of(f'{group}.{key}')}."


@rule("optim")
def optimizer_in_range(cfg: Config, of: Show) -> Iterator[str]:
    for key, words in OPTIM_RANGES.items():
        value = cfg.optim.get(key)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int | float) and not RANGES[words](each):
                yield f"`optim.{key}` must be {words}: {of(f'optim.{key}')}."
                break


@rule("advantage", "orchestrator.rollouts_per_example", "orchestrator.batch_size", "envs")
def degrees_of_freedom(cfg: Config, of: Show) -> Iterator[str]:
    over = declared(cfg.advantage).std_over
    if over is None or not isinstance(cfg.advantage.get("ddof"), int):
        return
    key, size = "orchestrator.batch_size", cfg.orchestrator.batch_size
    if over == "group":
        smallest = min(cfg.envs, key=cfg.group_size, default="")
        own = bool(smallest) and cfg.envs[smallest].rollouts_per_example is not None
        key = f"envs.{smallest}.rollouts_per_example" if own else "orchestrator.rollouts_per_example"
        size = cfg.group_size(smallest) if smallest else cfg.orchestrator.rollouts_per_example
    if size > 1 and cfg.advantage["ddof"] >= size:
        yield (
            f"the std of {size} rewards divides by {size} - ddof, which must be above 0: {of('advantage.ddof')}, {of(key)}.\n"
            "Set advantage.ddof=1, or 0 for the population's standard deviation."
        )


@rule("loss", "ref")
def reference(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.kl_terms.get("target_kl") is not None and not cfg.kl_terms.get("beta"):
        keys = f"{of('loss.kl.target_kl')} with {of('loss.kl.beta')}"
        yield f"a KL target needs a KL weight to start from: {keys}. Set loss.kl.beta=0.01 or so."
    if declared(cfg.loss).needs_teacher and cfg.ref.name is None:
        name = target_name(cfg.loss)
        yield f"the objective {name} learns from a teacher, but ref.name is null. Set ref.name to a model with the policy's vocabulary."
    if cfg.ref.name is not None and cfg.ref.sync_interval is not None:
        yield (
            f"a teacher does not follow the policy: {of('ref.name')} with {of('ref.sync_interval')}. "
            "Set one of them to null; without ref.name the reference is the initial policy."
        )
    if cfg.ref.sync_interval is not None and not cfg.uses_reference:
        yield f"no reference model is loaded that could follow the policy: {of('ref.sync_interval')}. Set loss.kl.beta above 0."
