"""The rules for what is trained on: environments, batches and their filters, lengths, rows of data sets."""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlx.config.eval_envs import PREFIX, environments, evaluated, section_of
from rlx.config.pythons import program_of
from rlx.config.rules import Describe, Rule, check_of, declared, problem, table, table_each
from rlx.config.schema import Config, EnvConfig, EvaluatedRun, PlayRoot, SftRoot, TrainingRoot
from rlx.config.signatures import OWN_KINDS, is_installed, module_of
from rlx.config.validate import Problem

PARTS = ("messages", "conversations", "prompt", "completion", "tools", "tool_defs")  # of a row of supervised data

table(
    PlayRoot,
    [
        Rule(
            "sampling.max_tokens seq_len",
            lambda c: c.generates_rollouts and c.sampling.max_tokens >= c.seq_len,
            "a completion leaves no room for its prompt, because seq_len counts both",
            "a smaller sampling.max_tokens or a larger seq_len",
        ),
    ],
)


@dataclass(frozen=True, slots=True)
class Env:
    """One environment, at `envs.math` or `eval.envs.math`."""

    cfg: PlayRoot
    at: str
    env: EnvConfig

    @property
    def limit(self) -> int:
        """Tokens of a prompt and its completion: an evaluation's need not fit into a training sample."""
        return self.cfg.max_model_len if self.at.startswith("eval.") else self.cfg.seq_len


def is_complete(cfg: PlayRoot) -> bool:
    """Whether every evaluated environment is known; a rule of its own reports one that is not."""
    return not isinstance(cfg, EvaluatedRun) or all(entry.id is not None or name in cfg.envs for name, entry in cfg.eval.envs.items())


def _envs(cfg: PlayRoot) -> list[Env]:
    """Those that are trained on, and those of an evaluation beside training."""
    loaded = environments(cfg) if is_complete(cfg) else cfg.envs
    return [Env(cfg, f"envs.{name}" if name in cfg.envs else section_of(name), env) for name, env in loaded.items()]


table_each(
    PlayRoot,
    _envs,
    [
        Rule(
            "{s.at}.sampling.max_tokens seq_len inference.max_model_len",
            lambda s: (s.env.sampling.max_tokens or 0) >= s.limit,
            "{s.env.sampling.max_tokens} new tokens leave no room for the prompts of {s.at} in {s.limit}",
            "a smaller max_tokens, or a larger seq_len",
        ),
        Rule(
            "{s.at}.python {s.at}.workers orchestrator.env_workers",
            lambda s: s.env.python is not None and (s.cfg.orchestrator.env_workers if s.env.workers is None else s.env.workers) == 0,
            "another Python needs a process of its own, and {s.at} has no workers",
            "{s.at}.workers=1 or more, or remove `python`",
        ),
        Rule(
            "{s.at}.workers",
            lambda s: OWN_KINDS.get(s.env.id) == "gateway" and s.env.workers not in (0, 1),
            "the gateway of {s.at} listens at one port, so one process serves it",
            "{s.at}.workers=1",
        ),
        Rule(
            "{s.at}.python",
            lambda s: s.env.python is not None and s.cfg.launcher.name == "local" and not Path(program_of(s.env.python)).is_file(),
            "{s.env.python} is no Python that can be run here",
            "the path of one, such as /…/venv/bin/python; or rlx env install NAME",
        ),
    ],
)


@check_of(PlayRoot)
def named_environments(cfg: PlayRoot, of: Describe) -> Iterator[Problem]:
    if not cfg.envs and not isinstance(cfg, SftRoot):
        yield Problem(
            "there is no environment.\n  fix: env=reverse_text, env=[sums,reverse_text], or env.id=MODULE for your own", ("envs",)
        )
    if cfg.envs and sum(env.weight for env in cfg.envs.values()) <= 0:
        yield problem("no environment has a weight above 0", [f"envs.{name}.weight" for name in cfg.envs], "give one a weight", of)
    for name, env in cfg.envs.items():
        yield from module_problems(f"envs.{name}.id", env.id, cfg.launcher.check_envs and env.python is None, of)


def module_problems(key: str, env_id: str, installed: bool, of: Describe) -> Iterator[Problem]:
    """Whether a key names an environment. `installed`: it must be installed here."""
    module = module_of(env_id)
    if module not in OWN_KINDS and not module.isidentifier():
        yield problem("this is not the name of a Python module", [key], "the name of an installed environment, or owner/name", of)
    elif installed and not is_installed(module):
        fix = f"rlx env install FOLDER|PACKAGE, or install it into this Python ({sys.executable})"
        yield problem(f"the environment is not installed: there is no module {module}", [key], fix, of)


table(
    Config,
    [
        Rule(
            "sampling.max_tokens seq_len",
            lambda c: c.bench_target == "inference" and c.sampling.max_tokens >= c.seq_len,
            "a completion leaves no room for its random prompt",
            "a smaller sampling.max_tokens or a larger seq_len",
        ),
        Rule(
            "orchestrator.batch_size orchestrator.rollouts_per_example",
            lambda c: abs(c.num_groups * c.mean_group_size - c.orchestrator.batch_size) >= 0.5,
            "a batch must hold whole groups, of {s.mean_group_size:.4g} rollouts on average",
            "an orchestrator.batch_size that is a multiple of {s.mean_group_size:.4g}",
        ),
        Rule(
            "trainer.num_minibatches orchestrator.batch_size orchestrator.rollouts_per_example",
            lambda c: c.num_groups < c.trainer.num_minibatches,
            "a batch of {s.num_groups} groups cannot be split into more minibatches than groups",
            "trainer.num_minibatches={s.num_groups} or fewer",
        ),
        Rule(
            "orchestrator.difficulty_filter.min_reward orchestrator.difficulty_filter.max_reward",
            lambda c: _above(c.orchestrator.difficulty_filter.min_reward, c.orchestrator.difficulty_filter.max_reward),
            "the difficulty filter drops every group",
            "lower the first or raise the second",
        ),
        Rule(
            "orchestrator.buffer.hard_threshold orchestrator.buffer.easy_threshold",
            lambda c: _above(c.orchestrator.buffer.hard_threshold, c.orchestrator.buffer.easy_threshold),
            "an example would be both easy and hard",
            "lower the first or raise the second",
        ),
        Rule(
            "orchestrator.buffer.easy_fraction orchestrator.buffer.easy_threshold",
            lambda c: c.orchestrator.buffer.easy_fraction > 0 and c.orchestrator.buffer.easy_threshold is None,
            "there is no easy pool to draw from",
            "orchestrator.buffer.easy_threshold=0.9 or so",
        ),
        Rule(
            "orchestrator.buffer.hard_fraction orchestrator.buffer.hard_threshold",
            lambda c: c.orchestrator.buffer.hard_fraction > 0 and c.orchestrator.buffer.hard_threshold is None,
            "there is no hard pool to draw from",
            "orchestrator.buffer.hard_threshold=0.1 or so",
        ),
        Rule(
            "orchestrator.buffer.easy_fraction orchestrator.buffer.hard_fraction",
            lambda c: c.orchestrator.buffer.easy_fraction + c.orchestrator.buffer.hard_fraction > 1,
            "the shares of the pools add up to more than 1",
            "lower one of them",
        ),
        Rule(
            "reward.overlong_cache sampling.max_tokens",
            lambda c: c.reward.overlong_cache is not None and c.reward.overlong_cache > _shortest(c),
            "every rollout would get a length penalty",
            "a reward.overlong_cache below every maximum of new tokens; null: a fifth of it",
        ),
    ],
)


def _above(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low > high


def _shortest(cfg: Config) -> int:
    """The smallest maximum of new tokens of an environment."""
    return min((env.sampling.max_tokens or cfg.sampling.max_tokens for env in cfg.envs.values()), default=cfg.sampling.max_tokens)


def has_own_deadline(env: EnvConfig) -> bool:
    """Whether the policy answers an environment for a time only."""
    return env.turn_timeout is not None or env.on_timeout == "score"


table_each(
    Config,
    lambda cfg: [(cfg, name) for name in cfg.envs],
    [
        Rule(
            "envs.{s[1]}.sampled_by envs.{s[1]}.turn_timeout envs.{s[1]}.on_timeout",
            lambda s: s[0].envs[s[1]].sampled_by == "teacher" and has_own_deadline(s[0].envs[s[1]]),
            "the policy's deadlines do not hold for a teacher that plays envs.{s[1]}",
            "teacher.timeout, without envs.{s[1]}.turn_timeout, and envs.{s[1]}.on_timeout=drop or zero",
        ),
        Rule(
            "orchestrator.min_group orchestrator.rollouts_per_example envs.{s[1]}.rollouts_per_example",
            lambda s: s[0].orchestrator.min_group > max(s[0].group_size(s[1]), 2),
            "a group of envs.{s[1]} never has so many rollouts with a score",
            "a smaller orchestrator.min_group",
        ),
        Rule(
            "envs.{s[1]}.agents_per_group orchestrator.difficulty_filter.min_reward orchestrator.difficulty_filter.max_reward "
            "orchestrator.difficulty_filter.min_reward_variance orchestrator.buffer.easy_threshold orchestrator.buffer.hard_threshold",
            lambda s: s[0].envs[s[1]].agents_per_group == "all" and _reads_rewards(s[0]),
            "a group with the rewards of several agents has no mean reward to filter by",
            "orchestrator.difficulty_filter.zero_advantage=true in place of these keys (KEY=null), or envs.{s[1]}.agents_per_group=one",
        ),
    ],
)


def _reads_rewards(cfg: Config) -> bool:
    """Whether groups or examples are chosen by their mean reward or its variance."""
    buffer, filters = cfg.orchestrator.buffer, {*cfg.orchestrator.difficulty_filter.rules} - {"zero_advantage"}
    return bool(filters) or buffer.easy_threshold is not None or buffer.hard_threshold is not None


table(
    TrainingRoot,
    [
        Rule(
            "trainer.micro_batch_tokens seq_len",
            lambda c: c.trainer.micro_batch_tokens is not None and c.trainer.micro_batch_tokens < c.seq_len,
            "the longest sample does not fit into a packed row",
            "trainer.micro_batch_tokens={s.seq_len} or more, or null",
        ),
    ],
)

table(
    SftRoot,
    [
        Rule(
            "data.type data.name",
            lambda c: c.data.type != "fake" and not c.data.all_sets,
            "there is nothing to train on",
            "data.name=FILE (JSONL or Parquet), a folder, or a name on the hub; data=fake for random tokens",
        ),
        Rule(
            "data.type data.name",
            lambda c: c.data.type == "fake" and c.data.all_sets,
            "random tokens come from no data set",
            "remove one of the two",
        ),
        Rule(
            "data.name",
            lambda c: c.data.name is not None and "data" in c.data.sets,
            "this data set and data.sets.data would have one name",
            "rename the second: data.sets.NAME",
        ),
        Rule(
            "data.loss_mask.assistant",
            lambda c: not c.data.loss_mask.roles,
            "no message would be trained",
            "data.loss_mask.assistant=true",
        ),
        Rule(
            "bench data.type val.name",
            lambda c: c.bench and (c.data.type != "fake" or c.val.name is not None),
            "a benchmark trains on random tokens, and validates nothing",
            "data=fake val.name=null",
        ),
        Rule(
            "loss._target_",
            lambda c: declared(c.loss).uses_ratio,
            "this objective weighs tokens by a ratio against the policy that sampled them, and no policy sampled these rows",
            "loss=sft",
        ),
        Rule(
            "loss.correction loss.proximal loss.ce_coef",
            lambda c: (
                c.loss.get("correction", "none") != "none" or c.loss.get("proximal", "inference") != "inference" or c.loss.get("ce_coef")
            ),
            "no policy sampled these rows, so no token has a ratio, and the objective itself is their cross-entropy",
            "leave them out",
        ),
        Rule(
            "trainer.num_minibatches trainer.num_iterations",
            lambda c: c.trainer.num_minibatches * c.trainer.num_iterations > 1,
            "a batch of rows is one optimizer step",
            "a smaller data.batch_size, or more max_steps",
        ),
        Rule(
            "trainer.shared_trainer_dir trainer.max_concurrent_runs",
            lambda c: c.uses_shared_trainer or c.is_shared_trainer,
            "a shared trainer trains the runs of `rlx train`",
            "leave it out",
        ),
    ],
)


@check_of(SftRoot)
def length_of_the_run(cfg: SftRoot, of: Describe) -> Iterator[Problem]:
    """`data.epochs` decides `max_steps`."""
    if cfg.data.epochs is None:
        return
    if of.typed("max_steps"):
        yield problem("both say how long the run is", ["data.epochs", "max_steps"], "leave one out, or data.epochs=null", of)
    elif cfg.resume is not None and cfg.resume != "latest" and not cfg.resume.isdecimal():
        yield problem(
            "a fork goes on at its source's step, so it has no whole passes",
            ["data.epochs", "resume"],
            "data.epochs=null and max_steps",
            of,
        )


@check_of(SftRoot)
def columns(cfg: SftRoot, of: Describe) -> Iterator[Problem]:
    sets = {"data.columns": cfg.data.columns, **{f"data.sets.{key}.columns": each.columns for key, each in cfg.data.sets.items()}}
    for key, names in sets.items():
        if unknown := sorted(names.keys() - set(PARTS)):
            yield problem(f"a row has no part {', '.join(unknown)}", [key], f"parts are {', '.join(PARTS)}", of)
    if cfg.data.columns and cfg.data.name is None and cfg.val.name is None:
        yield problem("no data set has these columns", ["data.columns", "data.name"], "data.sets.NAME.columns", of)


@check_of(SftRoot)
def data_sets(cfg: SftRoot, of: Describe) -> Iterator[Problem]:
    names = {"data.name": cfg.data.name, "val.name": cfg.val.name} | {
        f"data.sets.{key}.name": each.name for key, each in cfg.data.sets.items()
    }
    for key, name in names.items():
        path = Path(name or "").expanduser()
        if name is not None and is_file_or_folder(name) and not path.exists() and not glob.glob(str(path), recursive=True):
            yield problem("the data set does not exist", [key], f"correct the path; the current directory is {Path.cwd()}", of)


def is_file_or_folder(name: str) -> bool:
    """Whether the name of a data set can only be a path, or a pattern of paths."""
    files = (".jsonl", ".ndjson", ".parquet")
    return glob.has_magic(name) or name.startswith(("/", "./", "../", "~")) or Path(name).suffix in files or name.count("/") > 1


FACTS = ("examples", "completion_mean")  # metrics of every evaluation, beside its scores

table(
    SftRoot,
    [
        Rule(
            "eval.interval",
            lambda c: c.eval.interval is not None and not c.envs and not c.eval.envs,
            "there is no environment to evaluate on",
            "env=reverse_text, or several: env=[sums,reverse_text]",
        ),
        Rule(
            "eval.interval",
            lambda c: c.eval.interval is None and c.envs,
            "supervised training plays no environment, and there is no evaluation",
            "eval.interval=50 or so, or leave out env=",
        ),
    ],
)


table(
    EvaluatedRun,
    [
        Rule(
            "ckpt.keep_best eval.interval ckpt.interval",
            lambda c: c.ckpt.keep_best and not (c.eval.interval and c.ckpt.interval and c.eval.interval % c.ckpt.interval == 0),
            "every evaluated version must have a checkpoint",
            "an eval.interval that is a multiple of ckpt.interval",
        ),
    ],
)


@check_of(EvaluatedRun)
def evaluated_environments(cfg: EvaluatedRun, of: Describe) -> Iterator[Problem]:
    for name, entry in cfg.eval.envs.items():
        if entry.id is not None:
            yield from module_problems(f"eval.envs.{name}.id", entry.id, cfg.launcher.check_envs and entry.python is None, of)
        elif name not in cfg.envs:
            yield problem(
                f"the run has no environment {name} to evaluate (it has {', '.join(cfg.envs) or 'none'})",
                [f"eval.envs.{name}.id"],
                f"eval.envs.{name}.id=MODULE, or env@eval.envs.{name}=OPTION, or correct the name",
                of,
            )
    for name in cfg.eval.envs or cfg.envs:
        if cfg.eval.interval is not None and PREFIX + name in cfg.envs:
            yield Problem(f"the evaluation of {name} and envs.{PREFIX}{name} would have one name.\n  fix: rename one", ("envs",))


@check_of(EvaluatedRun)
def best_checkpoint(cfg: EvaluatedRun, of: Describe) -> Iterator[Problem]:
    wanted = cfg.ckpt.keep_best
    if wanted is None or cfg.eval.interval is None or not is_complete(cfg):
        return
    known = {f"eval/{name}/{metric}" for name, env in evaluated(cfg).items() for metric in metrics_of(env.rollouts_per_example or 1)}
    own = re.fullmatch(r"eval/([^/]+)/(reward|metric)/.+", wanted)  # the environment's own names are not known yet
    if wanted not in known and not (own and own[1] in evaluated(cfg)):
        scores = ", ".join(sorted(each for each in known if each.rpartition("/")[2].startswith(("avg", "pass")) and each[-1].isdigit()))
        yield problem("this is no metric of an evaluation of which more is better", ["ckpt.keep_best"], f"one of {scores}", of)


def metrics_of(n: int) -> set[str]:
    """The metrics of which more is better that every evaluation with `n` rollouts of each example has, without `eval/<env>/`."""
    scores = [f"avg@{n}", *(f"pass@{2**i}" for i in range(n.bit_length()))]
    return {*FACTS, *(score + end for score in scores for end in ("", "_low", "_high"))}
