"""Keys that do not apply in the chosen kind of run, although they are keys of the command: supervised training, a teacher that plays.

A new kind of run is a table here, a new key a line in it. A key may keep the value in `IDLE_AT`, or else its default: that value says
what happens anyway. `tests/test_config_idle.py` moves every key of `loss` and compares what it changes with these tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlx.config.checks.teacher import played
from rlx.config.objectives import advantages_of, loss_of, losses_of
from rlx.config.rules import Show, declared, rule, target_name
from rlx.config.schema import Config, LossTerms, SftRoot, TrainerConfig
from rlx.config.tree import show

NO_RATIO = "no policy sampled these rows, so no token has a ratio"
ONE_UPDATE = "a batch of rows is one optimizer step"
NOT_SHARED = "a shared trainer trains the runs of `rlx train`"

OF_ROWS: dict[str, tuple[str, str]] = {  # key of `rlx sft` -> (why it does not apply, what else to do)
    "loss.ce_coef": ("the objective itself is the cross-entropy of the rows, and no token has a weight for another", ""),
    "loss.proximal": (NO_RATIO, ""),
    "loss.correction": (NO_RATIO, ""),
    "loss.correction_cap": (NO_RATIO, ""),
    "loss.dual_clip": (NO_RATIO, ""),
    "loss.mask_overlong": ("no length limit cut these rows off", "; rows that are too long follow data.overflow"),
    "trainer.num_minibatches": (ONE_UPDATE, "; a smaller data.batch_size gives more steps"),
    "trainer.num_iterations": (ONE_UPDATE, "; more steps (max_steps) give more passes over the rows"),
    "trainer.max_concurrent_runs": (NOT_SHARED, ""),
    "trainer.shared": (NOT_SHARED, ""),
    "trainer.wait_for_others": (NOT_SHARED, ""),
    "trainer.idle_timeout": (NOT_SHARED, ""),
}

NOT_SAMPLED = "the policy did not sample the teacher's tokens, and they belong to cross-entropy alone"
OF_A_TEACHERS_TOKENS: dict[str, tuple[str, str]] = {  # key of an objective all of whose environments a teacher plays -> the same
    "aggregate": ("cross-entropy on a teacher's tokens is their mean over the batch", ""),
    "max_length": ("cross-entropy on a teacher's tokens is their mean over the batch", ""),
    **dict.fromkeys(
        ("proximal", "correction", "correction_cap", "dual_clip", "entropy_coef", "kl.beta", "kl.estimator", "kl.target_kl", "kl.gain"),
        (NOT_SAMPLED, ""),
    ),
}
IDLE_AT = {"aggregate": "token_mean"}  # keys without a default


@rule("data", "loss", "trainer")
def keys_of_rows(cfg: SftRoot, of: Show) -> Iterator[str]:
    for key, (why, more) in OF_ROWS.items():
        section, _, name = key.partition(".")
        value, off = (cfg.loss, LossTerms) if section == "loss" else (vars(cfg.trainer), TrainerConfig)
        yield from _idle(value, name, off, f"{section}.{name}", "in `rlx sft`", why, more, of)


@rule("loss", "envs", "advantage", "orchestrator.difficulty_filter", "ref.name", "teacher")
def keys_of_a_playing_teacher(cfg: Config, of: Show) -> Iterator[str]:
    taught = set(played(cfg))
    if not taught:
        return
    for place, loss in losses_of(cfg).items():
        envs = _users(cfg, place)
        if not envs or not taught.issuperset(envs) or declared(loss).kind != "ce":  # `played_by_the_teacher` refuses another kind
            continue
        for name, (why, more) in OF_A_TEACHERS_TOKENS.items():
            yield from _idle(loss, name, LossTerms, f"{place}.{name}", f"where the teacher plays ({_named(envs)})", why, more, of)
    for place, advantage in advantages_of(cfg).items():
        envs = _users(cfg, place)
        read = cfg.orchestrator.difficulty_filter.zero_advantage  # by the filter, the one reader that is left
        learned = all(declared(loss_of(cfg, name)).kind == "ce" for name in envs)
        if envs and taught.issuperset(envs) and learned and not read and not declared(advantage).is_reward:
            yield (
                f"{of(f'{place}._target_')} does not apply where the teacher plays ({_named(envs)}): a teacher's tokens have no advantage, "
                f"so {target_name(advantage)} would be computed for nothing.\nSet {place}=none."
            )
    if taught.issuperset(cfg.envs) and cfg.ref.name is not None:
        yield (
            f"{of('ref.name')} does not apply where the teacher plays all environments: {NOT_SAMPLED}, so nothing is compared with "
            "a second model.\nSet ref.name=null."
        )


def _users(cfg: Config, place: str) -> list[str]:
    """The environments whose objective or advantage is the node at `loss`, `envs.NAME.loss`, and so on."""
    section, _, group = place.rpartition(".")
    return [section.removeprefix("envs.")] if section else [name for name, env in cfg.envs.items() if not getattr(env, group)]


def _named(envs: list[str]) -> str:
    return ", ".join(f"envs.{name}" for name in envs)


def _idle(node: Mapping[str, Any], name: str, cls: Any, key: str, where: str, why: str, more: str, of: Show) -> Iterator[str]:
    """A problem if the key `name` of a node is set to something that nothing reads. `cls`: the schema, which has its default."""
    value: Any = node
    *sections, last = name.split(".")
    for each in sections:
        value, cls = value.get(each) or {}, cls.__dataclass_fields__[each].default_factory
    off = IDLE_AT.get(name, cls.__dataclass_fields__[last].default)
    if isinstance(value, Mapping) and value.get(last, off) != off:
        yield f"{of(key)} does not apply {where}: {why}.\nLeave it out, or set {key}={show(off)}{more}."
