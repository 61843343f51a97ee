"""The rules for the objective, the advantage, the optimizer, and sampling for them.

No rule names an objective or an advantage: the rules read what these declare in their own files (`rlx.config.loss_traits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlx.config.loss_traits import OPTIM_RANGES, RANGES, Declared
from rlx.config.objectives import Node, advantage_of, advantages_of, kl_of, loss_of, losses_of, trained_by
from rlx.config.rules import Describe, Rule, check_of, declared, problem, table, table_each, target_name
from rlx.config.sampling import WITHOUT_BIAS, biases
from rlx.config.schema import Config, TrainingRoot
from rlx.config.schema_teacher import FIELDS
from rlx.config.signatures import declared_by
from rlx.config.validate import Problem

ROLES = ("user", "tool", "system")  # `rlx.policy.observation_mask`, which this floor may not import


def weighs_tokens(loss: Node) -> bool:
    """Whether an objective weighs tokens by a ratio against the engine, so that the engine must sample from the policy's distribution."""
    # A correction is a ratio against the engine, whether or not the objective uses one.
    return declared(loss).uses_ratio or loss.get("correction", "none") != "none"


def needs_exact_sampling(cfg: Config, name: str, sampling: Mapping[str, Any]) -> bool:
    """Whether tokens of a request that truncates or penalises may not be trained. `name`, `sampling`: its environment and parameters."""
    accepted, loss = cfg.sampling.allow_biased_ratio or biases(sampling), loss_of(cfg, name)
    return not accepted and (weighs_tokens(loss) or declared_by(str(loss.get("_target_", ""))) is None)


@check_of(Config)
def truncated_sampling(cfg: Config, of: Describe) -> Iterator[Problem]:
    for loss, envs in trained_by(cfg):
        sections: dict[str, Any] = {"sampling": cfg.sampling} | {f"envs.{name}.sampling": cfg.envs[name].sampling for name in envs}
        cut = [f"{place}.{key}" for place, own in sections.items() for key in biases(vars(own))]
        if cut and weighs_tokens(loss) and not cfg.sampling.allow_biased_ratio:
            why = f"truncated sampling biases the importance ratio of {target_name(loss)}, because the trainer scores with the full softmax"
            off = " ".join(f"{key}={WITHOUT_BIAS[key.rpartition('.')[2]]}" for key in cut)
            fix = f"turn truncation off, {off}, or sampling.allow_biased_ratio=true"
            yield problem(why, cut, fix, of)


@dataclass(frozen=True, slots=True)
class Chosen:
    """An objective or an advantage in use, by its key: `loss`, `envs.math.loss`."""

    cfg: Config
    key: str
    node: Node

    @property
    def facts(self) -> Declared:
        return declared(self.node)

    @property
    def name(self) -> str:
        return target_name(self.node)

    @property
    def correction(self) -> str:
        return self.node.get("correction", "none")

    @property
    def ddof(self) -> int:
        value = self.node.get("ddof")
        return value if isinstance(value, int) else 0  # what is no number, the check of targets reports

    @property
    def follows_no_sign(self) -> bool:
        """Whether it ignores the sign of the reward's advantage, as it is set."""
        own = self.facts.own_sign
        return own is True or (isinstance(own, str) and isinstance(value := self.node.get(own, 0), int | float) and value > 0)


table_each(
    Config,
    lambda cfg: [Chosen(cfg, key, node) for key, node in losses_of(cfg).items() if key == "loss" or node != cfg.loss],
    [
        Rule(
            "{s.key}.correction {s.key}.proximal",
            lambda s: s.correction != "none" and s.node.get("proximal", "inference") == "inference",
            "there is nothing to correct, because the ratios already use the engine's log-probabilities",
            "{s.key}.proximal=recompute or {s.key}.correction=none",
        ),
        Rule(
            "{s.key}.correction",
            lambda s: s.facts.against_engine and s.correction in ("tis", "seq_tis"),
            "{s.name} already weighs tokens by their ratio to the engine, so the mismatch would count twice",
            "{s.key}.correction=none, or mis or seq_mis, which only drop tokens",
        ),
        Rule(
            "{s.key}.correction",
            lambda s: s.facts.by_sequence and s.correction in ("tis", "mis"),
            "all tokens of a rollout share one weight in {s.name}, so a correction cannot weigh or drop single tokens",
            "{s.key}.correction=seq_{s.correction}, or an objective with a loss per token, such as {s.key}=gspo_token",
        ),
        Rule(
            "{s.key}.dual_clip",
            lambda s: s.node.get("dual_clip") is not None and s.follows_no_sign,
            "dual clip limits the loss where the advantage is negative, and {s.name} does not follow its sign as it is set",
            "{s.key}.dual_clip=null",
        ),
        Rule(
            "ref.name teacher.base_url",
            lambda s: s.facts.needs_teacher and not s.facts.demonstrated and s.cfg.ref.name is None and not s.cfg.teacher.base_url,
            "the objective {s.name} learns from a teacher, and there is none",
            "ref.name, a model with the policy's vocabulary that the trainer loads; or teacher.base_url, servers that have it",
        ),
        Rule(
            "{s.key}.kl.target_kl {s.key}.kl.beta",
            lambda s: kl_of(s.node).get("target_kl") is not None and not kl_of(s.node).get("beta"),
            "a KL target needs a KL weight to start from",
            "{s.key}.kl.beta=0.01 or so",
        ),
        Rule(
            "{s.key}.kl.target_kl",
            lambda s: kl_of(s.node).get("target_kl") is not None and len(trained_by(s.cfg)) > 1,
            "the KL is measured over all environments, so it cannot steer one of several objectives",
            "{s.key}.kl.target_kl=null, or one objective for all",
        ),
        Rule(
            "{s.key}.ce_coef",
            lambda s: s.node.get("ce_coef") and not any(e.observation_ce_weights or e.sampled_by == "teacher" for e in _users(s)),
            "there is nothing for cross-entropy to learn",
            "envs.NAME.observation_ce_weights.tool=1 (or user, system), or {s.key}.ce_coef=0",
        ),
    ],
)


def _users(s: Chosen) -> list[Any]:
    """The environments that train with an objective; a stand-in where none does."""
    return [env for name, env in s.cfg.envs.items() if loss_of(s.cfg, name) == s.node]


table_each(
    Config,
    lambda cfg: [Chosen(cfg, key, node) for key, node in advantages_of(cfg).items()],
    [
        Rule(
            "{s.key}._target_ reward.soft_overlong reward.length_penalty",
            lambda s: s.facts.rewards_from_0 and (s.cfg.reward.soft_overlong or s.cfg.reward.length_penalty > 0),
            "the advantage {s.name} needs rewards of at least 0, and reward shaping makes some negative",
            "reward.soft_overlong=false reward.length_penalty=0, or {s.key}=group_norm",
        ),
        Rule(
            "{s.key}.ddof orchestrator.batch_size",
            lambda s: s.facts.std_over == "batch" and 1 < s.cfg.orchestrator.batch_size <= s.ddof,
            "the std of a batch divides by its rollouts - ddof",
            "{s.key}.ddof=1, or 0",
        ),
    ],
)


@dataclass(frozen=True, slots=True)
class Trained:
    """One environment of the mix with its objective and advantage."""

    cfg: Config
    name: str

    @property
    def env(self) -> Any:
        return self.cfg.envs[self.name]

    @property
    def size(self) -> int:
        return self.cfg.group_size(self.name)

    @property
    def loss(self) -> Chosen:
        return Chosen(self.cfg, f"envs.{self.name}.loss" if self.env.loss else "loss", loss_of(self.cfg, self.name))

    @property
    def advantage(self) -> Chosen:
        return Chosen(self.cfg, f"envs.{self.name}.advantage" if self.env.advantage else "advantage", advantage_of(self.cfg, self.name))

    @property
    def group_key(self) -> str:
        own = self.env.rollouts_per_example is not None
        return f"envs.{self.name}.rollouts_per_example" if own else "orchestrator.rollouts_per_example"

    @property
    def weights(self) -> dict[str, float]:
        return {"policy": 1.0, "ref_kl": 1.0} | self.env.loss_weights

    @property
    def reads(self) -> set[str]:
        """The losses of its sampled tokens."""
        distils, kl = self.loss.facts.kind == "ref_kl", kl_of(self.loss.node).get("beta")
        return {"ref_kl"} if distils else {"policy", "ref_kl"} if kl else {"policy"}


table_each(
    Config,
    lambda cfg: [Trained(cfg, name) for name in cfg.envs],
    [
        Rule(
            "{s.group_key} orchestrator.min_group",
            lambda s: s.advantage.facts.compares_group and min(s.size, s.cfg.orchestrator.min_group) == 1,
            "the advantage {s.advantage.name} compares the rollouts of a group, so it is always 0 in a group of one",
            "at least 2 for both, or {s.advantage.key}=none",
        ),
        Rule(
            "{s.advantage.key}.ddof {s.group_key}",
            lambda s: s.advantage.facts.std_over == "group" and 1 < s.size <= s.advantage.ddof,
            "the std of a group divides by its rollouts - ddof",
            "{s.advantage.key}.ddof=1, or 0",
        ),
        Rule(
            "envs.{s.name}.observation_ce_weights",
            lambda s: not {*s.env.observation_ce_weights} <= {*ROLES} or min(s.env.observation_ce_weights.values(), default=1) <= 0,
            "roles of an environment's messages are user, tool and system, their weights above 0",
            "envs.{s.name}.observation_ce_weights.tool=1",
        ),
        Rule(
            "envs.{s.name}.observation_ce_weights {s.loss.key}.ce_coef",
            lambda s: s.env.observation_ce_weights and not s.loss.node.get("ce_coef"),
            "what envs.{s.name} says would not be learned, because cross-entropy is off",
            "{s.loss.key}.ce_coef=0.1 or so, or leave out `observation_ce_weights`",
        ),
        Rule(
            "envs.{s.name}.loss_weights {s.loss.key}._target_",
            lambda s: (
                not {*s.env.loss_weights} <= s.reads
                or min(s.weights.values()) < 0
                or (s.env.loss_weights and s.env.sampled_by == "teacher")
            ),
            "weights belong to losses of tokens that the policy samples here, and are at least 0",
            "`policy`; `ref_kl` with {s.loss.key}.kl.beta above 0; `ref_kl` alone for an objective that distils",
        ),
        Rule(
            "envs.{s.name}.loss_weights",
            lambda s: s.env.sampled_by != "teacher" and not any(s.weights[each] for each in s.reads) and not s.env.observation_ce_weights,
            "nothing of envs.{s.name} would be trained",
            "remove the weight of 0, or envs.{s.name}",
        ),
        Rule(
            "envs.{s.name}.loss_weights {s.loss.key}.aggregate",
            lambda s: s.weights["policy"] == 0 and len(s.reads) > 1 and s.loss.node.get("aggregate") == "group_token_mean",
            "this aggregate divides the KL term by the tokens of the policy's loss, and there are none",
            "another aggregate, or a small weight above 0",
        ),
        Rule(
            "envs.{s.name}.loss_weights {s.loss.key}.kl.target_kl",
            lambda s: kl_of(s.loss.node).get("target_kl") is not None and (s.weights["policy"] == 0 or s.weights["ref_kl"] != 1),
            "the KL is measured over all tokens of the policy's loss, each counting once, so it cannot steer a term over others",
            "{s.loss.key}.kl.target_kl=null, or remove the weight",
        ),
    ],
)


@check_of(TrainingRoot)
def own_keys_in_range(cfg: TrainingRoot, of: Describe) -> Iterator[Problem]:
    """An objective declares its ranges; torch declares none for its optimizers."""
    nodes = losses_of(cfg) | (advantages_of(cfg) if isinstance(cfg, Config) else {})
    ranges = [(f"{place}.{key}", node.get(key), words) for place, node in nodes.items() for key, words in declared(node).ranges.items()]
    ranges += [(f"optim.{key}", cfg.optim.get(key), words) for key, words in OPTIM_RANGES.items()]
    for key, value, words in ranges:
        if any(isinstance(each, int | float) and not RANGES[words](each) for each in (value if isinstance(value, list) else [value])):
            yield Problem(f"`{key}` must be {words}: {of(key)}.", (key,))


def scored_by_teacher(cfg: Config) -> list[str]:
    """The environments whose rollouts the endpoint's teacher scores."""
    needs = {name: declared(loss_of(cfg, name)) for name in cfg.envs if cfg.teacher.base_url}
    return [name for name, facts in needs.items() if facts.needs_teacher and not facts.demonstrated]


def self_distilled(cfg: Config) -> list[str]:
    """The environments whose rollouts the policy itself scores, with a demonstration in its prompt."""
    return [name for name in cfg.envs if declared(loss_of(cfg, name)).demonstrated]


def played_by_teacher(cfg: Config) -> list[str]:
    """The environments that the endpoint's teacher plays."""
    return [name for name, env in cfg.envs.items() if env.sampled_by == "teacher"]


table_each(
    Config,
    lambda cfg: [Trained(cfg, name) for name in played_by_teacher(cfg)],
    [
        Rule(
            "envs.{s.name}.sampled_by teacher.base_url teacher.model",
            lambda s: not s.cfg.teacher.base_url or s.cfg.teacher.model is None,
            "the teacher who plays needs an address and the name of its model there",
            "teacher.base_url=[http://host:port] teacher.model=NAME",
        ),
        Rule(
            "envs.{s.name}.sampled_by {s.loss.key}._target_ {s.loss.key}.ce_coef",
            lambda s: s.loss.facts.kind != "ce" or s.loss.facts.uses_ratio or not s.loss.node.get("ce_coef"),
            "the teacher samples these tokens, so no ratio or advantage of the policy applies to them",
            "cross-entropy: envs.{s.name}.loss=sft envs.{s.name}.loss.ce_coef=1",
        ),
    ],
)

table(
    Config,
    [
        Rule(
            "teacher.base_url inference.base_url",
            lambda c: {urlsplit(url).netloc for url in c.teacher.base_url} & {urlsplit(url).netloc for url in c.inference.base_url},
            "the teacher would be the policy itself",
            "other servers; or loss=sdft teacher.demonstration=COLUMN, where the policy teaches itself",
        ),
        Rule(
            "teacher.base_url",
            lambda c: c.teacher.base_url and not scored_by_teacher(c) and not played_by_teacher(c),
            "no objective in use learns from the teacher",
            "loss=opd, envs.NAME.loss=opd, or envs.NAME.sampled_by=teacher; or leave it out",
        ),
        Rule(
            "ref.name teacher.base_url",
            lambda c: scored_by_teacher(c) and c.ref.name is not None,
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
            lambda c: c.ref.name is not None and c.envs and {*self_distilled(c)} == {*c.envs} and not _reads_reference(c),
            "the policy teaches itself, so nothing would read what the second model says",
            "ref.name=null; or loss=opd, which learns from that model; or loss.kl.beta above 0",
        ),
        Rule(
            "teacher.demonstration",
            lambda c: c.teacher.demonstration is not None and not self_distilled(c),
            "no objective in use reads a demonstration",
            "loss=sdft, or envs.NAME.loss=sdft; or leave it out",
        ),
        Rule(
            "teacher.demonstration",
            lambda c: c.teacher.demonstration is None and self_distilled(c),
            "the policy would be its own teacher and read the same as before",
            "the column of the rows that holds a demonstration: teacher.demonstration=answer",
        ),
        Rule(
            "teacher.template",
            lambda c: self_distilled(c) and not all(part in c.teacher.template for part in FIELDS),
            "the teacher must read the prompt and the demonstration",
            "a text with {{prompt}} and {{demonstration}}",
        ),
        Rule(
            "inference.max_model_len seq_len",
            lambda c: self_distilled(c) and c.max_model_len <= c.seq_len,
            "a sample of seq_len tokens leaves no room for a demonstration",
            "inference.max_model_len = seq_len + the longest demonstration + teacher.template",
        ),
    ],
)


def _only_distils(loss: dict) -> bool:
    return declared(loss).needs_teacher and not declared(loss).demonstrated and not loss.get("ce_coef")


def _reads_reference(cfg: Config) -> bool:
    return any(kl_of(loss_of(cfg, name)).get("beta") for name in cfg.envs)


@check_of(Config)
def teachers_temperature(cfg: Config, of: Describe) -> Iterator[Problem]:
    for name in [*scored_by_teacher(cfg), *self_distilled(cfg)]:
        own = cfg.envs[name].sampling.temperature
        if (cfg.sampling.temperature if own is None else own) != 1:
            key = "sampling.temperature" if own is None else f"envs.{name}.sampling.temperature"
            why = "the teacher reports log-probabilities at temperature 1, and the policy's are at the one that sampled: no KL"
            yield problem(why, [key], f"{key}=1; or ref.name, which the trainer scores at the same temperature", of)
