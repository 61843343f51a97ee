"""The rules between the objective, its advantage, its reference model and how tokens are sampled, one function a rule.

Knows no module of an objective: what it asks for it recognises by the last part of a `_target_`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.rules import Show, rule, target_name
from rlx.config.schema import Config

GROUP_RELATIVE = ("group_norm", "group_mean", "batch_norm", "leave_one_out", "opo", "max_rl")  # advantages that are 0 in a group of 1
NO_RATIO = ("reinforce", "sft")  # objectives that use no importance ratio


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
    if cut and not s.allow_biased_ratio and name not in NO_RATIO:
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
    longest = min([cfg.sampling.max_tokens, *(env.sampling.max_tokens or cfg.sampling.max_tokens for env in cfg.envs.values())])
    if cfg.reward.overlong_cache is not None and cfg.reward.overlong_cache > longest:
        yield (
            f"every rollout would be punished for its length: {of('reward.overlong_cache')} is above the most new tokens of a turn, "
            f"{longest}. Lower it, or leave it null."
        )
