"""The typed configuration tree: every key, its type, its default and what it means.

Plain dataclasses whose only behaviour is derived properties. Imports no torch, hydra or omegaconf, so that every room can import it.
`conf/` holds the values, `checks/` the rules between keys; `load.py` composes. `schema_rollout.py` holds the keys of
rollouts, `schema_trainer.py` those of the trainer's processes, `schema_launch.py` those for starting and watching a run.
`docs/configuration.md` is generated from all of them. `loss`, `advantage` and `optim` are open `_target_` nodes: their keys are the
keyword arguments of the target, plus the shared keys in `LossTerms` and `OptimTerms`.
"""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rlx.config.keys import MISSING, key, section
from rlx.config.objectives import kl_of, losses_of
from rlx.config.row_budget import default_row
from rlx.config.schema_base import CommandConfig, PlayRoot
from rlx.config.schema_launch import LauncherConfig, LoggerConfig, ProfileConfig, SlurmConfig, TensorboardConfig, WandbConfig
from rlx.config.schema_model import (
    HardwareConfig,
    InferenceConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    UpdateConfig,
    WarmStartConfig,
    WeightBroadcastConfig,
)
from rlx.config.schema_rollout import (
    BufferConfig,
    DifficultyFilter,
    EnvConfig,
    EnvSampling,
    EvalConfig,
    EvalEnvConfig,
    EvalSampling,
    OrchestratorConfig,
    PlayConfig,
    RewardConfig,
    SamplingConfig,
    ScoredEnvConfig,
    TrainedEnvConfig,
)
from rlx.config.schema_sft import DataConfig, DataSetConfig, LossMaskConfig, ValConfig
from rlx.config.schema_teacher import TeacherConfig
from rlx.config.schema_trainer import AcConfig, CkptConfig, KlTerms, LossTerms, OptimTerms, RefConfig, SchedulerConfig, TrainerConfig
from rlx.config.trainer_ranks import ranks_left

__all__ = [
    "MISSING",
    "AcConfig",
    "BufferConfig",
    "CkptConfig",
    "CommandConfig",
    "DataConfig",
    "DataSetConfig",
    "DifficultyFilter",
    "EnvConfig",
    "EnvSampling",
    "EvalConfig",
    "EvalEnvConfig",
    "EvalSampling",
    "EvaluatedRun",
    "HardwareConfig",
    "InferenceConfig",
    "KlTerms",
    "LauncherConfig",
    "LoggerConfig",
    "LoraConfig",
    "LossMaskConfig",
    "LossTerms",
    "ModelConfig",
    "OptimTerms",
    "OrchestratorConfig",
    "PlayConfig",
    "PlayRoot",
    "RefConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "ScoredEnvConfig",
    "SlurmConfig",
    "TeacherConfig",
    "TensorboardConfig",
    "TrainedEnvConfig",
    "TrainerConfig",
    "UpdateConfig",
    "ValConfig",
    "WandbConfig",
    "WarmStartConfig",
    "WeightBroadcastConfig",
]


@dataclass
class TrainingRoot(CommandConfig):
    """The keys of every command that trains. The trainer role takes one; what differs between them are the properties."""

    max_steps: int = key(MISSING, "number of training steps", low=1)
    resume: str | None = key(
        None, "resume from a checkpoint: `latest` or a step of this run; or fork another run, given by its path, which stays unchanged"
    )
    loss: dict[str, Any] = key({}, "the objective: `_target_`, its own arguments, and the keys of every loss", terms=LossTerms)
    ref: RefConfig = section(RefConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    optim: dict[str, Any] = key({}, "the optimizer: `_target_`, its own arguments, and the keys of every optimizer", terms=OptimTerms)
    scheduler: SchedulerConfig = section(SchedulerConfig)
    ckpt: CkptConfig = section(CkptConfig)
    logger: LoggerConfig = section(LoggerConfig)
    profile: ProfileConfig = section(ProfileConfig)
    bench: bool = key(
        False,
        "measure speed, share of the hardware's peak (MFU), parts of a step and memory: of the trainer alone, on random tokens, or of what "
        "`bench_role` names. No checkpoints, no evaluations; `rlx sft` needs data=fake with it",
    )

    @property
    def bench_target(self) -> str | None:
        """What a benchmark measures: `trainer`, `rl` or `inference`; None: this is no benchmark."""
        return "trainer" if self.bench else None

    @property
    def total_steps(self) -> int:
        return self.max_steps

    @property
    def versions_kept(self) -> int:
        """How many of the newest versions stay on the disk, besides those of checkpoints."""
        return 1

    @property
    def samples_per_update(self) -> int:
        """The most rollouts or rows of one optimizer step. Every command that trains has its own."""
        raise NotImplementedError(f"{type(self).__name__} must say how many samples an optimizer step has")

    @property
    def objectives(self) -> dict[str, dict[str, Any]]:
        """Every objective that the configuration names, by its key."""
        return losses_of(self)

    @property
    def longest_answer(self) -> int:
        """The most trained tokens of a turn: L_max of `loss.aggregate=fixed_length`."""
        return self.seq_len

    @property
    def memory_folder(self) -> Path | None:
        """The folder in memory for versions that need not last; None: every version is written to the disk."""
        return None

    def keeps_weights(self, version: int) -> bool:
        """Whether a version must outlast the run's processes, besides those of checkpoints: it is the last one, say."""
        return version == self.max_steps and self.bench_target != "trainer"

    def publishes(self, version: int) -> bool:
        """Whether a version is published in `weights/`, besides those of checkpoints."""
        return self.keeps_weights(version)

    def validates(self, version: int) -> bool:
        """Whether a version's loss is measured on validation rows."""
        return False

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one packed row."""
        return self.trainer.micro_batch_tokens or default_row(self)

    @property
    def uses_reference(self) -> bool:
        """Whether the trainer loads a reference model."""
        return self.ref.name is not None or any(kl_of(node).get("beta") for node in self.objectives.values())

    @property
    def fsdp_single_rank(self) -> bool:
        """Whether even a single trainer process shards, to cast its parameters layer by layer or move them."""
        return self.mixed_precision or (self.trainer.fsdp_cpu_offload and self.hardware.device == "cuda")

    @property
    def mixed_precision(self) -> bool:
        """Whether the trainer computes in another dtype than its parameters'. Adapters are cast where they multiply."""
        return self.model.dtype != self.trainer.optimization_dtype and not self.lora.enabled

    @property
    def reshards(self) -> bool:
        """Whether each layer's parameters are gathered for its forward alone, and again for its backward."""
        auto = self.trainer_ranks > 1 or self.hardware.device == "cuda"
        return auto if self.trainer.reshard_after_forward == "auto" else self.trainer.reshard_after_forward is True

    @property
    def num_updates(self) -> int:
        """Optimizer steps per training step."""
        return self.trainer.num_minibatches * self.trainer.num_iterations

    @property
    def data_ranks(self) -> int:
        """Trainer processes, or groups of them, that train on different rows at the same time."""
        return self.trainer_ranks // self.trainer.ranks_of_a_row

    @property
    def is_shared_trainer(self) -> bool:
        """Whether this is a shared trainer: it trains runs that other commands start, and plays nothing itself."""
        return self.trainer.max_concurrent_runs is not None

    @property
    def uses_shared_trainer(self) -> bool:
        """Whether a shared trainer trains this run, so that it starts no trainer itself."""
        return self.trainer.shared_trainer_dir is not None

    @property
    def started_trainer_ranks(self) -> int:
        return 0 if self.uses_shared_trainer or self.bench_target == "inference" else self.trainer_ranks

    @property
    def trainer_ranks(self) -> int:
        """Trainer processes: `hardware.trainer_processes`, or what the layout leaves places for; 1 for those of a shared trainer."""
        if self.uses_shared_trainer:
            return 1
        hardware = self.hardware
        if hardware.trainer_processes is not None:
            return hardware.trainer_processes
        return ranks_left(
            cuda=hardware.device == "cuda",
            nodes=hardware.nodes,
            gpus_per_node=hardware.gpus_per_node,
            servers=self.reserved_servers,
            gpus_per_server=hardware.tensor_parallel,
            shared=hardware.colocate,
        )


@dataclass
class EvaluatedRun(TrainingRoot, PlayRoot):
    """The keys of a command that trains, and evaluates policy versions meanwhile on servers of its own."""

    eval: EvalConfig = section(EvalConfig)

    def keeps_weights(self, version: int) -> bool:
        """Also one that is evaluated: a run that was killed meanwhile evaluates it when it resumes."""
        return super().keeps_weights(version) or (self.generates_rollouts and self.eval.is_due(version, self.max_steps))


@dataclass
class Config(EvaluatedRun):
    """The keys of `rlx train`."""

    max_async_level: int = key(1, "how many policy versions old a token may be when it is trained on; 0 is on-policy", low=0)
    bench_role: str = key(
        "trainer",
        "bench=true: what is measured. `trainer`: the trainer alone, on random tokens; `rl`: the whole run, with its servers, environments "
        "and new weights; `inference`: the servers alone, on random prompts, `batch_size` a step, as many in flight as the run has",
        choices=("trainer", "rl", "inference"),
    )
    bench_length: str = key(
        "fixed",
        "bench=true: every rollout has `seq_len` tokens (`fixed`), or up to that (`variable`). With bench_role=rl: every completion has "
        "its `max_tokens` (`fixed`), or ends where the policy ends it (`variable`)",
        choices=("fixed", "variable"),
    )
    replay: str | None = key(None, "train on the recorded batches of another run, given by its directory; no inference, no environments")
    envs: dict[str, TrainedEnvConfig] = key({}, "the environments of the mix, by name")  # type: ignore[assignment]
    advantage: dict[str, Any] = key({}, "the advantage: `_target_` and its arguments")
    teacher: TeacherConfig = section(TeacherConfig)
    reward: RewardConfig = section(RewardConfig)
    orchestrator: OrchestratorConfig = section(OrchestratorConfig)
    weight_broadcast: WeightBroadcastConfig = section(WeightBroadcastConfig)

    @property
    def bench_target(self) -> str | None:
        return self.bench_role if self.bench else None

    @property
    def progress_source(self) -> str:
        return "inference" if self.bench_target == "inference" else super().progress_source

    @property
    def generates_rollouts(self) -> bool:
        return self.replay is None and self.bench_target in (None, "rl") and not self.is_shared_trainer

    @property
    def transfer(self) -> str | None:
        return self.weight_broadcast.type if self.generates_rollouts and self.weight_broadcast.type != "filesystem" else None

    @property
    def has_checkpoints(self) -> bool:
        return not self.is_shared_trainer  # its runs have theirs

    @property
    def started_servers(self) -> int:
        return self.configured_servers if self.generates_rollouts or self.bench_target == "inference" else 0

    @property
    def reserved_servers(self) -> int:
        """Also those that a benchmark of the trainer, or a replay, does not start, unless `hardware.trainer_processes` is set: its trainer
        is that of the run.
        """
        like_the_run = self.hardware.trainer_processes is None and not self.is_shared_trainer
        return self.configured_servers if like_the_run else self.started_servers

    @property
    def versions_kept(self) -> int:
        """Servers may still be reading the version that is max_async_level + 1 behind the newest."""
        return max(self.weight_broadcast.keep_last, self.max_async_level + 2)

    @property
    def memory_folder(self) -> Path | None:
        folder = self.weight_broadcast.folder
        return None if folder is None or not self.generates_rollouts or self.transfer is not None else Path(folder)

    def publishes(self, version: int) -> bool:
        """Servers read every version, unless they get it without files. A replay has no servers."""
        return (self.generates_rollouts and self.transfer is None) or super().publishes(version)

    @property
    def samples_per_update(self) -> int:
        return -(-self.orchestrator.batch_size // self.trainer.num_minibatches)

    @property
    def longest_answer(self) -> int:
        return self.sampling.max_tokens

    @property
    def num_groups(self) -> int:
        """Prompts per training step."""
        return max(1, round(self.orchestrator.batch_size / self.mean_group_size))

    def group_size(self, env: str) -> int:
        """Rollouts per prompt of an environment. A benchmark on random tokens has no environments, and one size."""
        own = self.envs[env].rollouts_per_example if self.bench_target in (None, "rl") else None
        return own or self.orchestrator.rollouts_per_example

    @property
    def mean_group_size(self) -> float:
        """Rollouts per prompt, mean over the mix."""
        total = sum(env.weight for env in self.envs.values())
        if total <= 0:
            return self.orchestrator.rollouts_per_example
        return sum(env.weight * self.group_size(name) for name, env in self.envs.items()) / total


@dataclass
class SftRoot(EvaluatedRun):
    """The keys of `rlx sft`."""

    data: DataConfig = section(DataConfig)
    val: ValConfig = section(ValConfig)

    @property
    def generates_rollouts(self) -> bool:
        return self.eval.interval is not None and not self.bench

    @property
    def started_servers(self) -> int:
        return self.configured_servers if self.generates_rollouts else 0

    @property
    def adaptive_concurrency(self) -> bool:
        return False  # its evaluations have the servers to themselves, one at a time

    @property
    def samples_per_update(self) -> int:
        return self.data.batch_size

    def validates(self, version: int) -> bool:
        if self.val.name is None or self.bench:
            return False
        return self.val.eval_on_start if version == 0 else version % self.val.interval == 0 or version == self.max_steps


def split_terms(node: dict[str, Any], terms: type) -> tuple[Any, dict[str, Any]]:
    """Split an open node into its shared keys, as an instance of `terms`, and the rest with `_target_`.

    Raises TypeError when a shared key without a default is missing.
    """
    sections: dict[str, Any] = {f.name: f.default_factory for f in fields(terms) if is_dataclass(f.default_factory)}
    shared = {f.name for f in fields(terms)}
    own = {k: sections[k](**v) if k in sections else v for k, v in node.items() if k in shared}
    return terms(**own), {k: v for k, v in node.items() if k not in shared}
