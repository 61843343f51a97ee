"""The configuration keys of rollouts: sampling, environments, rewards, filters and the orchestrator. `schema.py` has the others."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.config.keys import MISSING, key, section

AS_IN_ENVS = "null: as in `envs` with this name"


@dataclass
class SamplingConfig:
    max_tokens: int = key(MISSING, "maximum number of new tokens in one turn", low=1)
    temperature: float = key(1.0, "sampling temperature; the trainer scores tokens at the same temperature", above=0)
    top_p: float = key(1.0, "nucleus sampling; below 1 it biases the importance ratio: the trainer uses the full softmax", above=0, high=1)
    top_k: int = key(-1, "sample only from the k most likely tokens; -1 keeps the whole vocabulary", low=-1)
    min_p: float = key(0.0, "drop tokens below this share of the largest probability; 0 keeps the whole vocabulary", low=0, high=1)
    min_tokens: int = key(0, "minimum number of new tokens in one turn", low=0)
    allow_biased_ratio: bool = key(False, "allow truncated sampling with objectives that use importance ratios")


@dataclass
class EnvSampling:
    """Sampling parameters of one environment; None takes the run's value."""

    max_tokens: int | None = key(None, "maximum number of new tokens in one turn; null: `sampling.max_tokens`", low=1)
    temperature: float | None = key(None, "sampling temperature; null: `sampling.temperature`", above=0)
    top_p: float | None = key(None, "nucleus sampling; null: `sampling.top_p`", above=0, high=1)
    top_k: int | None = key(None, "sample only from the k most likely tokens; null: `sampling.top_k`", low=-1)
    min_p: float | None = key(None, "drop tokens below this share of the largest probability; null: `sampling.min_p`", low=0, high=1)
    min_tokens: int | None = key(None, "minimum number of new tokens in one turn; null: `sampling.min_tokens`", low=0)


@dataclass
class BoxConfig:
    """What a sandbox holds, and what it may use. Only environments whose agents run in one read it."""

    image: str | None = key(
        None,
        "its file system: an image's name, an archive of one or a folder with a Dockerfile (podman, docker), the folder of a root "
        "file system (bwrap); null: this machine's /usr (bwrap). A column `image` of a task comes before it",
    )
    folders: list[str] = key([], "folders of this machine that it can read at the same path, as programs and data sets")
    network: bool = key(False, "whether it reaches the network; without it reaches the gateway alone")
    cpus: float | None = key(None, "processors that it may use together; null: no bound", above=0)
    memory_gb: float | None = key(
        4.0, "GiB for all its processes and files together; without control groups, for each process; null: no bound", above=0
    )
    processes: int | None = key(512, "processes and threads at a time; null: no bound", low=1)
    disk_gb: float = key(
        1.0,
        "GiB of files in each folder that it can write (/box, /tmp, /tests, /logs, /dev/shm), which are in memory; a container can also "
        "write in the folders of its image, on the engine's disk, without a bound",
        above=0,
    )


@dataclass
class HarnessConfig:
    """The program that plays an environment of programs, or a v1 taskset."""

    command: list[str] = key(
        [],
        "the program and its arguments; {prompt}, {base_url}, {key}, {python} (that of the environment) and columns of the task are filled "
        "in, and the box can read the files that it names; empty: no program, the model has a shell in the box",
    )
    variables: dict[str, str] = key({}, "environment variables of the program, besides those that name the gateway")
    install: list[str] = key(
        [], "a command that fills the folder {folder} once on this machine; each box can read it at the same path, as `command` names it"
    )
    timeout: float | None = key(None, "seconds for the program; what it has done by then is scored; null: the rollout's time", above=0)
    max_turns: int | None = key(None, "completions of the model in a rollout; null: no bound", low=1)
    max_tokens: int | None = key(None, "sampled tokens of all completions in a rollout; null: no bound", low=1)


@dataclass
class EnvConfig:
    id: str = key(MISSING, "verifiers environment: module name or `owner/name`")
    args: dict[str, Any] = key({}, "arguments of its `load_environment`; of a v1 taskset: verifiers' `env` block without `taskset.id`")
    agents: list[str] = key([], "agents of a v1 taskset that train, one in each group, in turn; empty: all that the environment trains")
    agents_per_group: str = key(
        "one",
        "of a v1 taskset with several agents: `one` trains one agent of each episode, in turn by group; `all` trains every run of all of "
        "them, each compared with the runs of the same agent in the same task (solvers of one proposed problem; proposers of one topic)",
        choices=("one", "all"),
    )
    num_tasks: int | None = key(None, "use only the first examples; null: all, or 1000 of an endless v1 taskset", low=1)
    split: str = key("train", "which data set of the environment to use", choices=("train", "eval"))
    weight: float = key(1.0, "weight of this environment in the mix: its share of the prompts, relative to the others", low=0)
    rollouts_per_example: int | None = key(None, "rollouts per prompt; null: `orchestrator.rollouts_per_example`", low=1)
    curriculum: str | None = key(
        None,
        "column by which the examples are ordered in the first epoch, smallest value first (`info.level` reads inside `info`; "
        "`-column`: largest first); later epochs are shuffled; null: all are shuffled",
    )
    rollout_timeout: float | None = key(None, "seconds for one rollout; null: `orchestrator.rollout_timeout`", above=0)
    turn_timeout: float | None = key(None, "seconds for one completion of the policy, after which the rollout has run out of time", above=0)
    on_reward_error: str = key(
        "fail",
        "what a reward function that raises means: `fail`: the rollout has no reward, so it has failed and is run again; `zero`: the "
        "function scores 0 (of a v1 taskset: the rollout), and the rollout is trained on",
        choices=("fail", "zero"),
    )
    on_timeout: str = key(
        "drop",
        "what a rollout that ran out of time is worth in training: `drop`: nothing, so only those that were in time are compared, and slow "
        "ways of solving the task are not punished; `zero`: what was sampled has the reward 0, which punishes slowness, the machine's too; "
        "`score`: after 90 % of `rollout_timeout` the policy samples no more, and the environment scores what there is by then",
        choices=("drop", "zero", "score"),
    )
    workers: int | None = key(None, "processes that run this environment; null: `orchestrator.env_workers`", low=0)
    python: str | None = key(
        None,
        "the Python that its workers use, a path or a name of `rlx env list`; null: the one that `rlx env install` has made for it",
    )
    sandbox: str = key(
        "auto",
        "where the agents' programs and commands run: `bwrap` (bubblewrap: no daemon, no root), `podman`, `docker`, `apptainer` (v1 "
        "tasksets); `none`: on this machine without isolation; `auto`: what is there, never without isolation and never what costs money",
        choices=("auto", "bwrap", "podman", "docker", "apptainer", "none"),
    )
    box: BoxConfig = section(BoxConfig)
    harness: HarnessConfig = section(HarnessConfig)
    sampling: EnvSampling = section(EnvSampling)


@dataclass
class TrainedEnvConfig(EnvConfig):
    """One environment of the mix: an environment, and how its rollouts are trained."""

    loss: dict[str, Any] = key(
        {},
        "its own objective: the name of a `loss` preset, or keys of the run's `loss` that differ; `preset` names one alongside other keys; "
        "empty: the run's",
    )
    sampled_by: str = key(
        "policy",
        "which model samples: the policy, or the model at `teacher.base_url`, whose completions the policy then learns by cross-entropy",
        choices=("policy", "teacher"),
    )
    observation_ce_weights: dict[str, float] = key(
        {},
        "cross-entropy on what this environment writes between turns: weight by the role of its messages, `tool`, `user` or `system`; "
        "needs `ce_coef` in its loss",
    )
    loss_weights: dict[str, float] = key(
        {},
        "factor of what the policy samples here in a loss: `policy`, the objective's own; `ref_kl`, the KL term, and the own loss of an "
        "objective that distils. 0: these tokens do not belong to it and are not counted; not named: 1",
    )
    advantage: dict[str, Any] = key(
        {}, "its own advantage, given like `loss`; empty: the one that its own `loss` preset chooses, or the run's"
    )


@dataclass
class EvalSampling(EnvSampling):
    """Sampling parameters of evaluations; None takes the environment's value in training."""

    temperature: float | None = key(None, "sampling temperature; 0 is greedy; null: as in training", low=0)


ONE_SCORED = "of a v1 taskset with several agents: one run of each episode is scored, of the `agents` in turn; `all` is for training"


@dataclass
class ScoredEnvConfig(EnvConfig):
    """One environment of `rlx eval`."""

    agents_per_group: str = key("one", ONE_SCORED, choices=("one",))
    split: str = key("eval", "which data set of the environment to use", choices=("train", "eval"))
    num_examples: int | None = key(None, "how many of its first examples to evaluate on; null: the evaluation's `num_examples`", low=1)
    rollouts_per_example: int | None = key(None, "rollouts of each example; null: the evaluation's `rollouts_per_example`", low=1)
    sampling: EvalSampling = section(EvalSampling)


@dataclass
class EvalEnvConfig(ScoredEnvConfig):
    """One environment of an evaluation beside training. Without an `id` it is that of the same name in `envs`, with what is set here.

    Null always means not set, so that a value set here counts also if it is the default of `envs`.
    """

    id: str | None = key(None, "verifiers environment: module name or `owner/name`; null: that of `envs` with this name")  # type: ignore[assignment]
    args: dict[str, Any] = key({}, "arguments of its `load_environment` that differ from those of `envs` with this name")
    agents: list[str] | None = key(None, f"agents of a v1 taskset that are evaluated, in turn; empty: all that it trains; {AS_IN_ENVS}")  # type: ignore[assignment]
    agents_per_group: str | None = key(None, ONE_SCORED, choices=("one",))  # type: ignore[assignment]
    weight: float | None = key(None, "has no effect: all environments are evaluated in full", low=0)  # type: ignore[assignment]
    on_reward_error: str | None = key(  # type: ignore[assignment]
        None,
        f"what a reward function that raises means: `fail`: the rollout has failed and is run again; `zero`: it scores 0; {AS_IN_ENVS}",
        choices=("fail", "zero"),
    )
    sandbox: str | None = key(  # type: ignore[assignment]
        None,
        f"where the agents' programs and commands run; {AS_IN_ENVS}",
        choices=("auto", "bwrap", "podman", "docker", "apptainer", "none"),
    )


@dataclass
class EvalTerms:
    """What `rlx eval` and the evaluations beside training have in common."""

    num_examples: int | None = key(128, "how many of the first examples of an environment to evaluate on; null: all", low=1)
    rollouts_per_example: int = key(1, "rollouts of each example: n of avg@n, and the largest k of pass@k", low=1)
    eval_base: bool = key(True, "also evaluate version 0, the initial model")
    pass_threshold: float = key(0.5, "a rollout passes, for pass@k, if its reward is at least this")


@dataclass
class EvalConfig(EvalTerms):
    """Evaluations beside training, each at one policy version. `rlx.config.eval_envs` says what is evaluated."""

    interval: int | None = key(
        None, "evaluate every policy version that is a multiple of this, and the last one; null: no evaluation", low=1
    )
    envs: dict[str, EvalEnvConfig] = key(
        {},
        "the environments to evaluate on, by name; null: as in `envs` with this name. Empty: all of `envs`, on their evaluation data",
    )
    sampling: EvalSampling = section(EvalSampling)
    capacity_fraction: float = key(
        0.25,
        "rollouts of an evaluation in flight, as a share of what the servers decode together (`inference.max_num_seqs` each); more while "
        "training leaves them idle",
        above=0,
        high=1,
    )

    pins: bool | None = key(
        None,
        "updates of the servers wait for an evaluation, so that it samples with one version; false: they go on, and later tokens are of "
        "newer versions, which its record names; null: true where results depend on it (`max_async_level=0`, `ckpt.keep_best`)",
    )

    def is_due(self, version: int, last: int) -> bool:
        """Whether a policy version is evaluated: 0 with `eval_base`, multiples of `interval`, and the `last` version."""
        if self.interval is None:
            return False
        return self.eval_base if version == 0 else version % self.interval == 0 or version == last


@dataclass
class RewardConfig:
    """How rewards are changed before advantages are computed. Reported rewards stay the environment's.

    The length of a rollout is that of its longest turn, because max_tokens limits a turn.
    """

    soft_overlong: bool = key(
        False, "add 0 up to max_tokens - overlong_cache tokens of the longest turn, then linearly less, down to -1 at max_tokens"
    )
    overlong_cache: int | None = key(
        None, "tokens over which that falls to -1; null: a fifth of max_tokens, as DAPO's 4096 of 20480", low=1
    )
    length_penalty: float = key(
        0.0,
        "c: subtract c · tokens of the longest turn / max_tokens · share of the group's rollouts with a reward above 0; 0 is off",
        low=0,
    )


@dataclass
class DifficultyFilter:
    """Which groups are dropped before training. Drops are counted by rule; dropped groups are replaced until the batch is full."""

    min_reward: float | None = key(None, "drop groups whose mean reward is below this; null is off")
    max_reward: float | None = key(None, "drop groups whose mean reward is above this; null is off")
    min_reward_variance: float | None = key(None, "drop groups whose reward variance is below this; null is off", low=0)
    zero_advantage: bool = key(False, "drop groups whose advantages are all 0")
    max_rounds: int = key(
        10, "most groups replaced per environment and batch, in multiples of its groups in a batch; then the batch stays smaller", low=1
    )

    @property
    def rules(self) -> list[str]:
        """The keys of the rules that are on."""
        return [
            rule
            for rule in ("min_reward", "max_reward", "min_reward_variance", "zero_advantage")
            if getattr(self, rule) not in (None, False)
        ]


@dataclass
class BufferConfig:
    """Pools of each environment's examples. An example is in the pool that the mean reward of its latest group says."""

    easy_threshold: float | None = key(None, "an example whose group has at least this mean reward is easy; null: there is no easy pool")
    hard_threshold: float | None = key(None, "an example whose group has at most this mean reward is hard; null: there is no hard pool")
    easy_fraction: float = key(0.0, "share of an environment's prompts drawn from its easy pool; the others are normal", low=0, high=1)
    hard_fraction: float = key(0.0, "share of an environment's prompts drawn from its hard pool", low=0, high=1)


@dataclass
class ChatConfig:
    """What the model sees of a conversation. How its samples are merged is `orchestrator.trajectory_strategy`."""

    thinking: str | None = key(
        None,
        "what a later turn sees of the model's own earlier reasoning: `keep`: all of it, token for token, if the package `renderers` knows "
        "the model; `template`: what the chat template shows, as servers of others do; null: `keep` where interleaved turns are trained, "
        "otherwise `template`",
        choices=("keep", "template"),
    )


@dataclass
class PlayConfig:
    """How rollouts are played. In training the rest of this section decides what becomes of them (`OrchestratorConfig`)."""

    max_concurrent: int | None = key(
        None,
        "maximum number of rollouts in flight; null: `inference.max_num_seqs` for each server, and from then on as many as the "
        "engines' cache use, queue and preemptions allow; 32 at an endpoint",
        low=1,
    )
    rollout_timeout: float = key(600.0, "seconds for one rollout; after that it counts as `timeout` and is replaced", above=0)
    env_workers: int | None = key(
        None,
        "processes for each environment of the mix; a rollout that blocks or kills one ends nothing but itself. null: one, and more "
        "while rollouts wait for it, all together up to half of the cores. 0: environments run in the orchestrator, where their code "
        "can block it",
        low=0,
    )
    env_worker_memory_gb: float | None = key(
        None,
        "GiB of memory, with that of the processes that it has started, above which a worker is replaced: when it "
        "has finished its rollouts, at 1.5 times at once; null: no bound",
        above=0,
    )
    max_retries: int = key(
        3,
        "retries of a failed rollout (a timeout is not retried)",
        low=0,
    )
    max_error_rate: float = key(
        0.5,
        "share of an environment's latest rollouts that may fail before the run ends; those in flight count as successes, and so does "
        "what lacks to 64, or to 16 as long as none has succeeded. With `on_reward_error=zero` 64 in a row whose reward function raised "
        "end it. 1: any number",
        above=0,
        high=1,
    )
    trajectory_strategy: str = key(
        "interleaved",
        "`interleaved`: turns that extend each other become one sample; `branching`: one sample per turn",
        choices=("interleaved", "branching"),
    )


@dataclass
class OrchestratorConfig(PlayConfig):
    batch_size: int = key(
        MISSING, "rollouts per step, a whole number of groups; the mean over steps, if environments have groups of different sizes", low=1
    )
    rollouts_per_example: int = key(MISSING, "rollouts per prompt: the group size G", low=1)
    min_group: int = key(
        2, "rollouts of a group that must have a score: those that failed or timed out cost themselves, and the others are the group", low=1
    )
    difficulty_filter: DifficultyFilter = section(DifficultyFilter)
    buffer: BufferConfig = section(BufferConfig)
    oversampling_factor: float = key(
        1.0, "groups requested per batch, in multiples of the batch, so that replacing dropped groups needs no second round", low=1
    )
    save_rollouts: bool = key(True, "write `rollouts/step_N.jsonl.zst`")
    record_tokens: bool = key(
        False, "their lines also have `trace`: every message with its tokens, log-probabilities and versions, to be checked from outside"
    )
    save_batches: bool = key(
        True, "keep the batches that are trained on, and the trainer's entropy of every token, in `recorded/`, for `replay=` and `rlx view`"
    )
