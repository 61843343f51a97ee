"""The keys that several commands share: of every command that starts processes, and of every command that plays environments.

`rlx train` (`schema.Config`), `rlx eval` (`schema_eval.EvalRoot`) and others derive from these classes, so a key has one name, one meaning
and one default in all of them. Code that loads environments, workers, chats or policies takes a `PlayRoot`; code that names, locks,
launches or reads run directories takes a `CommandConfig`.
"""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlx.config.keys import MISSING, key, section
from rlx.config.schema_launch import LauncherConfig, SlurmConfig
from rlx.config.schema_model import HardwareConfig, InferenceConfig, LoraConfig, ModelConfig, RunConfig, UpdateConfig
from rlx.config.schema_rollout import ChatConfig, EnvConfig, PlayConfig, SamplingConfig


@dataclass
class CommandConfig:
    """The keys of every command that has a run directory and starts processes. The derived values are those of a command without them."""

    may_change: ClassVar[tuple[str, ...]] = ()
    """Keys or sections that may change when a run of this command resumes in its directory, beside those of all (`rlx.runs.run_dir`)."""

    seed: int = key(0, "seed of sampling, order and initialisation", low=0, high=2**32 - 1)  # what every generator of numpy's accepts
    seq_len: int = key(MISSING, "longest training sample or conversation of a rollout (prompt plus completion), in tokens", low=2)
    dry_run: bool = key(False, "compose, check, plan and print; start nothing")
    clean: bool = key(False, "first delete an existing run directory of this name")
    resume: str | None = key(None, "`latest`: continue the run in its own directory")
    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    lora: LoraConfig = section(LoraConfig)
    hardware: HardwareConfig = section(HardwareConfig)
    launcher: LauncherConfig = section(LauncherConfig)
    slurm: SlurmConfig = section(SlurmConfig)

    @property
    def total_steps(self) -> int:
        """How many steps the command has, for `status.json`; 0: not known."""
        return 0

    @property
    def progress_source(self) -> str:
        """The source in `metrics.jsonl` whose records are the finished steps."""
        return "trainer"

    @property
    def has_checkpoints(self) -> bool:
        """Whether a resumed run goes back to a checkpoint. A command without checkpoints continues after its last record."""
        return True

    @property
    def trainer_ranks(self) -> int:
        """Trainer processes."""
        return 0

    @property
    def started_trainer_ranks(self) -> int:
        """Trainer processes that the command starts itself. On CUDA each has a GPU."""
        return self.trainer_ranks

    @property
    def started_servers(self) -> int:
        """Inference servers that the command starts itself."""
        return 0

    @property
    def reserved_servers(self) -> int:
        """Inference servers that have places in the layout: those that the command starts."""
        return self.started_servers

    @property
    def transfer(self) -> str | None:
        """How weights reach the servers without files: `nccl` or `ipc`; None: from files, or there are no servers."""
        return None

    @property
    def num_gpus(self) -> int:
        """GPUs that the layout needs, over all hosts; 0 on CPU."""
        if self.hardware.device == "cpu":
            return 0
        inference = self.reserved_servers * self.hardware.tensor_parallel
        return max(inference, self.started_trainer_ranks) if self.hardware.colocate else inference + self.started_trainer_ranks


@dataclass
class PlayRoot(CommandConfig):
    """The keys of every command that plays environments with a policy."""

    envs: dict[str, EnvConfig] = key({}, "the environments, by name")
    sampling: SamplingConfig = section(SamplingConfig)
    chat: ChatConfig = section(ChatConfig)
    orchestrator: PlayConfig = section(PlayConfig)
    inference: InferenceConfig = section(InferenceConfig)
    weight_broadcast: UpdateConfig = section(UpdateConfig)

    @property
    def generates_rollouts(self) -> bool:
        """Whether this run plays environments at all."""
        return True

    @property
    def keeps_thinking(self) -> bool:
        """Whether later turns of what is trained see all earlier reasoning."""
        return (self.chat.thinking or ("keep" if self.orchestrator.trajectory_strategy == "interleaved" else "template")) == "keep"

    @property
    def started_servers(self) -> int:
        return self.configured_servers

    @property
    def configured_servers(self) -> int:
        """Inference servers that a run which plays would start."""
        return 0 if self.inference.base_url else self.hardware.inference_replicas

    @property
    def concurrency(self) -> int:
        """The most rollouts in flight; at the start, if that follows the engines."""
        servers = len(self.inference.base_url) or self.hardware.inference_replicas
        return self.orchestrator.max_concurrent or servers * self.inference.max_num_seqs

    @property
    def adaptive_concurrency(self) -> bool:
        """Whether the number of rollouts in flight follows what the engines can use."""
        return self.orchestrator.max_concurrent is None

    @property
    def max_model_len(self) -> int:
        """Context of the inference engine, in tokens."""
        return self.inference.max_model_len or self.seq_len
