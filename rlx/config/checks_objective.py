"""The rules between the objective, its advantage, its reference model and how tokens are sampled, one function a rule.

Knows no module of an objective: what it asks for it recognises by the last part of a `_target_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlx.config.rules import Show, rule, target_name
from rlx.config.schema import Config

GROUP_RELATIVE = ("group_norm", "group_mean", "batch_norm", "leave_one_out", "opo", "max_rl")  # advantages that are 0 in a group of 1
NO_RATIO = ("reinforce", "sft")  # objectives that use no importance ratio
AGAINST_ENGINE = ("aipo", "masked_is", "opd")  # objectives whose weight is against the engine, whatever loss.proximal is
OWN_SIGN = ("opd", "sft")  # objectives that push by something else than the reward's advantage

_ABOVE_0: tuple[Callable[[float], bool], str] = (lambda x: x > 0, "above 0")
_AT_LEAST_0: tuple[Callable[[float], bool], str] = (lambda x: x >= 0, "at least 0")
RANGES = {  # of the shipped objectives' and advantages' own keys; NaN is in none
    "eps_low": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "decay": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    **dict.fromkeys(
        ("eps_high", "cap", "delta", "token_high", "token_max", "mean_high", "d_low", "d_high", "tau_pos", "tau_neg", "eps"), _ABOVE_0
    ),
    **dict.fromkeys(("token_low", "mean_low", "kl_tau", "ddof"), _AT_LEAST_0),
}


@rule("orchestrator.rollouts_per_example", "advantage")
def group_of_one(cfg: Config, of: Show) -> Iterator[str]:
    name = target_name(cfg.advantage)
    if cfg.orchestrator.rollouts_per_example == 1 and name in GROUP_RELATIVE:
        yield (
            f"the advantage {name} compares the rollouts of a group, and is always 0 in a group of one: "
            f"{of('orchestrator.rollouts_per_example')}.\nUse at least 2 rollouts, or advantage=none."
        )


@rule("sampling", "loss")
def truncated_sampling(cfg: Config, of: Show) -> Iterator[str]:
    s = cfg.sampling
    # min_tokens forbids the end-of-sequence token, and the engine's log-probabilities are of what is left.
    is_cut = {"top_p": s.top_p < 1, "top_k": s.top_k > 0, "min_p": s.min_p > 0, "min_tokens": s.min_tokens > 0}
    cut = [key for key, cuts in is_cut.items() if cuts]
    name = target_name(cfg.loss)
    # A correction is a ratio against the engine, whatever the objective does.
    if cut and not s.allow_biased_ratio and (name not in NO_RATIO or cfg.loss.get("correction", "none") != "none"):
        keys = ", ".join(of(f"sampling.{key}") for key in cut)
        yield (
            f"truncated sampling biases the importance ratio of {name or 'the objective'}: {keys}.\n"
            "The engine samples from a cut distribution, the trainer scores with the whole one. Turn it off "
            "(top_p=1, top_k=-1, min_p=0, min_tokens=0), or accept the bias with sampling.allow_biased_ratio=true."
        )


@rule("loss")
def correction_without_recompute(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.loss.get("correction", "none") != "none" and cfg.loss.get("proximal", "inference") == "inference":
        yield (
            f"there is nothing to correct where the ratios are against the engine already: {of('loss.correction')} with "
            "loss.proximal=inference.\nSet loss.proximal=recompute, or leave loss.correction=none."
        )


@rule("loss")
def corrected_twice(cfg: Config, of: Show) -> Iterator[str]:
    name = target_name(cfg.loss)
    if name in AGAINST_ENGINE and cfg.loss.get("correction", "none") in ("tis", "seq_tis"):
        yield (
            f"the weight of {name} is against the engine already, and a second one would count the mismatch twice: "
            f"{of('loss.correction')}.\nSet loss.correction=none; `mis` or `seq_mis`, which only leave tokens out, are possible."
        )


@rule("loss")
def dual_clip_by_the_rewards_sign(cfg: Config, of: Show) -> Iterator[str]:
    name = target_name(cfg.loss)
    if cfg.loss.get("dual_clip") is None:
        return
    kl_tau = cfg.loss.get("kl_tau", 0)
    if name in OWN_SIGN or (name == "masked_is" and isinstance(kl_tau, int | float) and kl_tau > 0):
        and_key = f" with {of('loss.kl_tau')}" if name == "masked_is" else ""
        yield (
            f"dual clip holds what has a negative advantage, and {name}{and_key} does not go by the sign of the reward's advantage: "
            f"{of('loss.dual_clip')}.\nLeave loss.dual_clip null{', or loss.kl_tau=0' if and_key else ''}."
        )


@rule("advantage", "reward")
def negative_rewards(cfg: Config, of: Show) -> Iterator[str]:
    shaped = {"soft_overlong": cfg.reward.soft_overlong, "length_penalty": cfg.reward.length_penalty > 0}
    if target_name(cfg.advantage) == "max_rl" and any(shaped.values()):
        off = {"soft_overlong": "false", "length_penalty": "0"}
        on = [key for key in shaped if shaped[key]]
        yield (
            f"the advantage max_rl divides by the mean reward, which must not be negative, and shaped rewards are: "
            f"advantage._target_={cfg.advantage['_target_']} with {' and '.join(of(f'reward.{key}') for key in on)}.\n"
            f"Set {' '.join(f'reward.{key}={off[key]}' for key in on)}, or take advantage=group_norm."
        )


@rule("loss", "advantage")
def own_keys_in_range(cfg: Config, of: Show) -> Iterator[str]:
    for group, node in (("loss", cfg.loss), ("advantage", cfg.advantage)):
        if not str(node.get("_target_", "")).startswith("rlx."):
            continue  # somebody else's key of this name may mean something else
        for key, value in node.items():
            if key in RANGES and isinstance(value, int | float):
                holds, words = RANGES[key]
                if not holds(value):
                    yield f"`{group}.{key}` must be {words}: {of(f'{group}.{key}')}."


@rule("advantage", "orchestrator.rollouts_per_example", "orchestrator.batch_size")
def degrees_of_freedom(cfg: Config, of: Show) -> Iterator[str]:
    if target_name(cfg.advantage) not in ("group_norm", "batch_norm") or not isinstance(cfg.advantage.get("ddof"), int):
        return
    key = "orchestrator.rollouts_per_example" if target_name(cfg.advantage) == "group_norm" else "orchestrator.batch_size"
    size = cfg.orchestrator.rollouts_per_example if target_name(cfg.advantage) == "group_norm" else cfg.orchestrator.batch_size
    if size > 1 and cfg.advantage["ddof"] >= size:
        yield (
            f"the std of {size} rewards divides by {size} - ddof, which must be above 0: {of('advantage.ddof')}, {of(key)}.\n"
            "Set advantage.ddof=1, or 0 for the population's."
        )


@rule("loss", "ref")
def reference(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.kl_terms.get("target_kl") is not None and not cfg.kl_terms.get("beta"):
        yield f"a KL weight of 0 stays 0 whatever it is multiplied by: {of('loss.kl.target_kl')}. Give it a start: loss.kl.beta=0.01."
    if target_name(cfg.loss) == "opd" and cfg.ref.name is None:
        yield "loss=opd learns from a teacher, and none is named. Set ref.name to a model with the policy's vocabulary."
    if cfg.ref.name is not None and cfg.ref.sync_interval is not None:
        yield (
            f"a teacher does not follow the policy: {of('ref.name')} with {of('ref.sync_interval')}. "
            "Leave one of them null; without ref.name the reference is the initial policy."
        )
    if cfg.ref.sync_interval is not None and not cfg.uses_reference:
        yield f"there is no reference model that could follow the policy: {of('ref.sync_interval')}. Set loss.kl.beta above 0."


@rule("orchestrator.difficulty_filter")
def filter_keeps_something(cfg: Config, of: Show) -> Iterator[str]:
    low, high = cfg.orchestrator.difficulty_filter.min_reward, cfg.orchestrator.difficulty_filter.max_reward
    if low is not None and high is not None and low > high:
        keys = f"{of('orchestrator.difficulty_filter.min_reward')} > {of('orchestrator.difficulty_filter.max_reward')}"
        yield f"the filter leaves out every group: {keys}. Lower the first or raise the second."


@rule("reward", "sampling.max_tokens", "envs")
def overlong_cache(cfg: Config, of: Show) -> Iterator[str]:
    longest = min((env.sampling.max_tokens or cfg.sampling.max_tokens for env in cfg.envs.values()), default=cfg.sampling.max_tokens)
    if cfg.reward.overlong_cache is not None and cfg.reward.overlong_cache > longest:
        yield (
            f"every rollout would be punished for its length: {of('reward.overlong_cache')} is above the most new tokens of a turn, "
            f"{longest}. Lower it, or leave it null."
        )
