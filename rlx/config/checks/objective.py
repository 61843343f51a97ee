"""The rules for the objective, the advantage, the optimizer, the reference model, and sampling for them.

No rule names an objective or an advantage: the rules read what these declare in their own files (`rlx.config.declared`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlx.config.declared import OPTIM_RANGES, RANGES
from rlx.config.objectives import Node, advantages_of, kl_of, loss_of, losses_of, scored_by, trained_by
from rlx.config.rules import OWN_LOSS, Show, declared, rule, target_name
from rlx.config.sampling import biases
from rlx.config.schema import Config, TrainingRoot
from rlx.config.signatures import declared_by

ROLES = ("user", "tool", "system")  # `rlx.policy.observation_mask`, which this floor may not import
LossRule = Callable[[Config, Show, str, Node], Iterator[str]]


def loss_rule(*more: str) -> Callable[[LossRule], LossRule]:
    """Register a rule for every objective: the run's, and those of single environments. It gets the objective's key and its node."""

    def register(function: LossRule) -> LossRule:
        @rule("loss", *more)
        def of_the_run(cfg: Config, of: Show) -> Iterator[str]:
            yield from function(cfg, of, "loss", cfg.loss)

        @rule("loss", "envs", OWN_LOSS, *more)
        def of_environments(cfg: Config, of: Show) -> Iterator[str]:
            for key, node in losses_of(cfg).items():
                if key != "loss" and node != cfg.loss:  # an equal one has the same problems
                    yield from function(cfg, of, key, node)

        return function

    return register


@rule("loss", "advantage", "optim")
def targets_named(cfg: Config, of: Show) -> Iterator[str]:
    for name in ("loss", "advantage", "optim"):
        target = getattr(cfg, name).get("_target_")
        if not isinstance(target, str) or "." not in target:
            shown = of(f"{name}._target_") if target is not None else "null"
            yield f"`{name}._target_` must be the dotted path of a function or class: {shown}. Choose a preset: {name}=NAME."


@rule("orchestrator.rollouts_per_example", "orchestrator.min_group", "envs", "advantage")
def group_of_one(cfg: Config, of: Show) -> Iterator[str]:
    run = "orchestrator.rollouts_per_example"
    for advantage, envs in scored_by(cfg):
        name = target_name(advantage)
        if not declared(advantage).compares_group:
            continue
        sizes = {f"envs.{env}.rollouts_per_example": cfg.envs[env].rollouts_per_example for env in envs}
        if not sizes or None in sizes.values():
            sizes[run] = cfg.orchestrator.rollouts_per_example
        sizes["orchestrator.min_group"] = cfg.orchestrator.min_group
        none = f"envs.{envs[0]}.advantage=none" if envs and cfg.envs[envs[0]].advantage else "advantage=none"
        for key, size in sizes.items():
            if size == 1:
                yield (
                    f"the advantage {name} compares the rollouts of a group, so it is always 0 in a group of one: "
                    f"{of(key)}.\nSet {key} to at least 2, or use {none}."
                )


def weighs_tokens(loss: Node) -> bool:
    """Whether an objective weighs tokens by a ratio against the engine, so that the engine must sample from the policy's distribution."""
    # A correction is a ratio against the engine, whether or not the objective uses one.
    return declared(loss).uses_ratio or loss.get("correction", "none") != "none"


def needs_exact_sampling(cfg: Config, name: str, sampling: Mapping[str, Any]) -> bool:
    """Whether tokens of a request that truncates or penalises may not be trained. `name`, `sampling`: its environment and parameters."""
    accepted, loss = cfg.sampling.allow_biased_ratio or biases(sampling), loss_of(cfg, name)
    return not accepted and (weighs_tokens(loss) or declared_by(str(loss.get("_target_", ""))) is None)


@rule("sampling", "envs", OWN_LOSS, "loss")
def truncated_sampling(cfg: Config, of: Show) -> Iterator[str]:
    s = cfg.sampling
    for loss, envs in trained_by(cfg):
        sections: dict[str, Any] = {"sampling": s} | {f"envs.{name}.sampling": cfg.envs[name].sampling for name in envs}
        cut = [f"{place}.{key}" for place, own in sections.items() for key in biases({k: v for k, v in vars(own).items() if v is not None})]
        name = target_name(loss)
        if not cut or s.allow_biased_ratio or not weighs_tokens(loss):
            continue
        keys = ", ".join(of(key) for key in cut)
        yield (
            f"truncated sampling biases the importance ratio of {name or 'the objective'}: {keys}.\n"
            "The engine samples from a truncated distribution, but the trainer scores with the full one. Turn truncation off "
            "(top_p=1, top_k=-1, min_p=0, min_tokens=0), or accept the bias with sampling.allow_biased_ratio=true."
        )


@loss_rule()
def correction_without_recompute(cfg: Config, of: Show, key: str, loss: Node) -> Iterator[str]:
    if loss.get("correction", "none") != "none" and loss.get("proximal", "inference") == "inference":
        yield (
            f"there is nothing to correct, because the ratios already use the engine's log-probabilities: {of(f'{key}.correction')} with "
            f"{of(f'{key}.proximal')}.\nSet {key}.proximal=recompute or {key}.correction=none."
        )


@loss_rule()
def corrected_twice(cfg: Config, of: Show, key: str, loss: Node) -> Iterator[str]:
    name = target_name(loss)
    if declared(loss).against_engine and loss.get("correction", "none") in ("tis", "seq_tis"):
        yield (
            f"{name} already weighs tokens by their ratio to the engine, so a second weight would count the mismatch twice: "
            f"{of(f'{key}.correction')}.\nSet {key}.correction=none, or `mis` or `seq_mis`, which only drop tokens."
        )


@loss_rule()
def correction_by_token_of_a_sequence(cfg: Config, of: Show, key: str, loss: Node) -> Iterator[str]:
    correction = loss.get("correction", "none")
    if declared(loss).by_sequence and correction in ("tis", "mis"):
        yield (
            f"all tokens of a rollout share one weight in {target_name(loss)}, so a correction cannot weigh or drop single tokens: "
            f"{of(f'{key}.correction')}.\nSet {key}.correction=seq_{correction}, which works per rollout, or use an objective with "
            f"a loss per token, such as {key}=gspo_token."
        )


@loss_rule()
def dual_clip_by_the_rewards_sign(cfg: Config, of: Show, key: str, loss: Node) -> Iterator[str]:
    name = target_name(loss)
    if loss.get("dual_clip") is None:
        return
    own_sign = declared(loss).own_sign
    own = own_sign if isinstance(own_sign, str) else None
    value = loss.get(own, 0) if own else 0
    if own_sign is True or (isinstance(value, int | float) and value > 0):
        and_key = f" with {of(f'{key}.{own}')}" if own else ""
        yield (
            f"dual clip limits the loss where the advantage is negative, but {name}{and_key} does not follow the sign of the reward's "
            f"advantage: {of(f'{key}.dual_clip')}.\nSet {key}.dual_clip=null{f', or {key}.{own}=0' if own else ''}."
        )


@rule("advantage", "reward", "envs")
def negative_rewards(cfg: Config, of: Show) -> Iterator[str]:
    shaped = {"soft_overlong": cfg.reward.soft_overlong, "length_penalty": cfg.reward.length_penalty > 0}
    for place, advantage in advantages_of(cfg).items():
        if not declared(advantage).rewards_from_0 or not any(shaped.values()):
            continue
        off = {"soft_overlong": "false", "length_penalty": "0"}
        on = [key for key in shaped if shaped[key]]
        yield (
            f"the advantage {target_name(advantage)} needs rewards of at least 0, but reward shaping makes some negative: "
            f"{of(f'{place}._target_')} with {' and '.join(of(f'reward.{key}') for key in on)}.\n"
            f"Set {' '.join(f'reward.{key}={off[key]}' for key in on)}, or use {place}=group_norm."
        )


@rule("loss", "advantage")
def own_keys_in_range(cfg: Config, of: Show) -> Iterator[str]:
    for group, node in (("loss", cfg.loss), ("advantage", cfg.advantage)):
        yield from _out_of_range(of, group, node)


@rule("envs", "loss", "advantage")
def own_keys_of_environments_in_range(cfg: Config, of: Show) -> Iterator[str]:
    for name, env in cfg.envs.items():
        yield from _out_of_range(of, f"envs.{name}.loss", env.loss)
        yield from _out_of_range(of, f"envs.{name}.advantage", env.advantage)


def _out_of_range(of: Show, group: str, node: Node) -> Iterator[str]:
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
    for advantage, envs in scored_by(cfg):
        over = declared(advantage).std_over
        if over is None or not isinstance(advantage.get("ddof"), int):
            continue
        own_key = f"envs.{envs[0]}.advantage" if envs and cfg.envs[envs[0]].advantage else "advantage"
        key, size = "orchestrator.batch_size", cfg.orchestrator.batch_size
        if over == "group":
            smallest = min(envs, key=cfg.group_size, default="")
            own = bool(smallest) and cfg.envs[smallest].rollouts_per_example is not None
            key = f"envs.{smallest}.rollouts_per_example" if own else "orchestrator.rollouts_per_example"
            size = cfg.group_size(smallest) if smallest else cfg.orchestrator.rollouts_per_example
        if size > 1 and advantage["ddof"] >= size:
            yield (
                f"the std of {size} rewards divides by {size} - ddof, which must be above 0: {of(f'{own_key}.ddof')}, {of(key)}.\n"
                f"Set {own_key}.ddof=1, or 0 for the population's standard deviation."
            )


@rule("envs", OWN_LOSS, "loss")
def learned_roles(cfg: Config, of: Show) -> Iterator[str]:
    for name, env in cfg.envs.items():
        key = f"envs.{name}.learn"
        for role, weight in env.learn.items():
            if role not in ROLES:
                yield f"there is no role {role}: {of(f'{key}.{role}')}. Roles of an environment's messages: {', '.join(ROLES)}."
            elif isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
                yield f"`{key}.{role}` must be a number above 0: {of(f'{key}.{role}')}. Remove the role to learn nothing of it."
        if env.learn and not loss_of(cfg, name).get("ce_coef"):
            place = f"envs.{name}.loss" if env.loss else "loss"
            yield (
                f"what envs.{name} answers would not be learned, because cross-entropy is off: {of(key)} with {of(f'{place}.ce_coef')}."
                f"\nSet {place}.ce_coef=0.1 or so, or remove {key}."
            )


@rule("envs", OWN_LOSS, "loss")
def weights_in_the_losses(cfg: Config, of: Show) -> Iterator[str]:
    for name, env in cfg.envs.items():
        key, loss, place = f"envs.{name}.loss_weights", loss_of(cfg, name), f"envs.{name}.loss" if env.loss else "loss"
        distils = declared(loss).kind == "ref_kl"
        read = {"policy": not distils, "ref_kl": distils or bool(kl_of(loss).get("beta"))}
        for which, weight in env.loss_weights.items():
            if which not in read:
                yield f"there is no loss {which}: {of(f'{key}.{which}')}. The losses of sampled tokens: {', '.join(read)}."
            elif isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
                yield f"`{key}.{which}` must be a number of at least 0: {of(f'{key}.{which}')}."
            elif env.played_by == "teacher":
                played_by = of(f"envs.{name}.played_by")
                yield f"a teacher's tokens belong to cross-entropy alone: {of(f'{key}.{which}')} with {played_by}. Remove it."
            elif not read[which]:
                use = (
                    "ref_kl, the factor of an objective that distils" if distils else f"{place}.kl.beta above 0, which turns the KL term on"
                )
                yield f"no loss of envs.{name} reads this weight: {of(f'{key}.{which}')} with {of(f'{place}._target_')}. Use {use}."
        own, kl = "ref_kl" if distils else "policy", kl_of(loss).get("beta") and env.loss_weights.get("ref_kl") != 0
        others = (not distils and kl) or (loss.get("ce_coef") and env.learn)
        if env.loss_weights.get(own) == 0 and not others and env.played_by != "teacher":
            yield f"nothing of envs.{name} would be trained: {of(f'{key}.{own}')}, and it has no other loss. Remove it, or envs.{name}."
        elif env.loss_weights.get(own) == 0 and not distils and kl and loss.get("aggregate") == "group_token_mean":
            yield (
                f"the KL term of envs.{name} would not be a mean: {of(f'{place}.aggregate')} divides by the tokens of the policy's loss, "
                f"and there are none with {of(f'{key}.{own}')}. Use another aggregate, or a small weight above 0."
            )


@rule("envs", OWN_LOSS, "loss")
def cross_entropy_on_nothing(cfg: Config, of: Show) -> Iterator[str]:
    for place, loss in losses_of(cfg).items():
        envs = [name for name in cfg.envs if loss_of(cfg, name) == loss]
        if loss.get("ce_coef") and envs and not any(cfg.envs[name].learn or cfg.envs[name].played_by == "teacher" for name in envs):
            yield (
                f"there is nothing for cross-entropy to learn: {of(f'{place}.ce_coef')}, but no environment with it has `learn`.\n"
                f"Say what: envs.{envs[0]}.learn.tool=1 (or user, system); or set {place}.ce_coef=0."
            )


@loss_rule("ref", "teacher")
def teacher_named(cfg: Config, of: Show, key: str, loss: Node) -> Iterator[str]:
    if declared(loss).needs_teacher and not declared(loss).demonstrated and cfg.ref.name is None and not cfg.teacher.base_url:
        yield (
            f"the objective {target_name(loss)} learns from a teacher, but there is none: {of('ref.name')}, {of('teacher.base_url')}.\n"
            "Set ref.name to a model with the policy's vocabulary, which the trainer loads; or teacher.base_url to servers that have it."
        )


@loss_rule()
def kl_target(cfg: Config, of: Show, key: str, loss: Node) -> Iterator[str]:
    if kl_of(loss).get("target_kl") is not None and not kl_of(loss).get("beta"):
        keys = f"{of(f'{key}.kl.target_kl')} with {of(f'{key}.kl.beta')}"
        yield f"a KL target needs a KL weight to start from: {keys}. Set {key}.kl.beta=0.01 or so."


@rule("loss", "envs", OWN_LOSS)
def kl_target_of_several(cfg: Config, of: Show) -> Iterator[str]:
    targets = [key for key, loss in losses_of(cfg).items() if kl_of(loss).get("target_kl") is not None]
    if targets and len(trained_by(cfg)) > 1:
        key = targets[0]
        yield (
            f"the KL is measured over all environments, so it cannot steer one of several objectives: {of(f'{key}.kl.target_kl')}.\n"
            f"Set {key}.kl.target_kl=null, or give all environments one objective."
        )


@rule("loss", "envs", OWN_LOSS)
def kl_target_of_some_tokens(cfg: Config, of: Show) -> Iterator[str]:
    for name, env in cfg.envs.items():
        place = f"envs.{name}.loss" if env.loss else "loss"
        if kl_of(loss_of(cfg, name)).get("target_kl") is None:
            continue
        weights = env.loss_weights
        for which in [
            which for which, other in (("policy", weights.get("policy") == 0), ("ref_kl", weights.get("ref_kl", 1) != 1)) if other
        ]:
            yield (
                f"the KL is measured over all tokens of the policy's loss, each counting once, so it cannot steer a term over others: "
                f"{of(f'{place}.kl.target_kl')} with {of(f'envs.{name}.loss_weights.{which}')}.\n"
                f"Set {place}.kl.target_kl=null, or remove the weight."
            )


@rule("loss", "ref", "envs")
def reference(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    if cfg.ref.name is not None and cfg.ref.sync_interval is not None:
        yield (
            f"a teacher does not follow the policy: {of('ref.name')} with {of('ref.sync_interval')}. "
            "Set one of them to null; without ref.name the reference is the initial policy."
        )
    if cfg.ref.sync_interval is not None and not cfg.uses_reference:
        yield f"no reference model is loaded that could follow the policy: {of('ref.sync_interval')}. Set loss.kl.beta above 0."
