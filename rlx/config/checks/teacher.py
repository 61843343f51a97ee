"""The rules for teachers: what an objective that distils may learn from, and under which distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlx.config.objectives import kl_of, loss_of, trained_by
from rlx.config.rules import Rule, Show, check_of, declared, problem, table, table_each
from rlx.config.schema import Config
from rlx.config.schema_teacher import FIELDS
from rlx.config.tree import Problem


def taught(cfg: Config) -> list[str]:
    """The environments whose rollouts the endpoint's teacher scores."""
    needs = {name: declared(loss_of(cfg, name)) for name in cfg.envs if cfg.teacher.base_url}
    return [name for name, facts in needs.items() if facts.needs_teacher and not facts.demonstrated]


def shown(cfg: Config) -> list[str]:
    """The environments whose rollouts the policy itself scores, with a demonstration in its prompt."""
    return [name for name in cfg.envs if declared(loss_of(cfg, name)).demonstrated]


def played(cfg: Config) -> list[str]:
    """The environments that the endpoint's teacher plays."""
    return [name for name, env in cfg.envs.items() if env.played_by == "teacher"]


@dataclass(frozen=True, slots=True)
class Pupil:
    """One environment, and the key of its objective."""

    cfg: Config
    name: str
    loss: str

    @property
    def is_cross_entropy(self) -> bool:
        node = loss_of(self.cfg, self.name)
        return declared(node).kind == "ce" and not declared(node).uses_ratio and bool(node.get("ce_coef"))


PLAYED: list[Rule[Pupil]] = [
    Rule(
        "envs.{s.name}.played_by teacher.base_url teacher.model",
        lambda s: not s.cfg.teacher.base_url or s.cfg.teacher.model is None,
        "the teacher who plays needs an address and the name of its model there",
        "teacher.base_url=[http://host:port] teacher.model=NAME",
    ),
    Rule(
        "envs.{s.name}.played_by {s.loss}._target_ {s.loss}.ce_coef",
        lambda s: not s.is_cross_entropy,
        "the teacher samples these tokens, so no ratio or advantage of the policy applies to them",
        "cross-entropy: envs.{s.name}.loss=sft envs.{s.name}.loss.ce_coef=1",
    ),
]
table_each(
    Config, lambda cfg: [Pupil(cfg, name, "loss" if not cfg.envs[name].loss else f"envs.{name}.loss") for name in played(cfg)], PLAYED
)

TEACHERS: list[Rule[Config]] = [
    Rule(
        "teacher.base_url inference.base_url",
        lambda c: {urlsplit(url).netloc for url in c.teacher.base_url} & {urlsplit(url).netloc for url in c.inference.base_url},
        "the teacher would be the policy itself",
        "other servers; or loss=sdft teacher.demonstration=COLUMN, where the policy teaches itself",
    ),
    Rule(
        "teacher.base_url",
        lambda c: c.teacher.base_url and not taught(c) and not played(c),
        "no objective in use learns from the teacher",
        "loss=opd, envs.NAME.loss=opd, or envs.NAME.played_by=teacher; or leave it out",
    ),
    Rule(
        "ref.name teacher.base_url",
        lambda c: taught(c) and c.ref.name is not None,
        "the objective would have two teachers",
        "leave one",
    ),
    Rule(
        "ref.name model.name",
        lambda c: c.ref.name == c.model.name and not c.model.prepared and all(_only_distils(loss) for loss, _ in trained_by(c)),
        "the teacher would be the initial policy itself",
        "another model with the policy's vocabulary",
    ),
    Rule(
        "ref.name",
        lambda c: c.ref.name is not None and c.envs and {*shown(c)} == {*c.envs} and not _reads_reference(c),
        "the policy teaches itself, so nothing would read what the second model says",
        "ref.name=null; or loss=opd, which learns from that model; or loss.kl.beta above 0",
    ),
    Rule(
        "teacher.demonstration",
        lambda c: c.teacher.demonstration is not None and not shown(c),
        "no objective in use reads a demonstration",
        "loss=sdft, or envs.NAME.loss=sdft; or leave it out",
    ),
    Rule(
        "teacher.demonstration",
        lambda c: c.teacher.demonstration is None and shown(c),
        "the policy would be its own teacher and read the same as before",
        "the column of the rows that holds a demonstration: teacher.demonstration=answer",
    ),
    Rule(
        "teacher.template",
        lambda c: shown(c) and not all(part in c.teacher.template for part in FIELDS),
        "the teacher must read the prompt and the demonstration",
        "a text with {{prompt}} and {{demonstration}}",
    ),
    Rule(
        "inference.max_model_len seq_len",
        lambda c: shown(c) and c.max_model_len <= c.seq_len,
        "a sample of seq_len tokens leaves no room for a demonstration",
        "inference.max_model_len = seq_len + the longest demonstration + teacher.template",
    ),
]
table(Config, TEACHERS)


def _only_distils(loss: dict) -> bool:
    return declared(loss).needs_teacher and not declared(loss).demonstrated and not loss.get("ce_coef")


def _reads_reference(cfg: Config) -> bool:
    return any(kl_of(loss_of(cfg, name)).get("beta") for name in cfg.envs)


@check_of(Config)
def teachers_temperature(cfg: Config, of: Show) -> Iterator[Problem]:
    for name in [*taught(cfg), *shown(cfg)]:
        own = cfg.envs[name].sampling.temperature
        if (cfg.sampling.temperature if own is None else own) != 1:
            key = "sampling.temperature" if own is None else f"envs.{name}.sampling.temperature"
            why = "the teacher reports log-probabilities at temperature 1, and the policy's are at the one that sampled: no KL"
            yield problem(why, [key], f"{key}=1; or ref.name, which the trainer scores at the same temperature", of)
