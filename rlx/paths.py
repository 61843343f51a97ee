"""Every path that a run writes, and how a file appears whole or not at all.

Knows the layout of a run directory. Knows nothing of what the files hold.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files and folders of one run directory."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def secrets(self) -> Path:
        """The configuration's secret values, which `config.yaml` has not got; readable by the run's owner alone."""
        return self.root / "secrets.yaml"

    @property
    def overrides(self) -> Path:
        return self.root / "overrides.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.yaml"

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def data(self) -> Path:
        """Digests of the environments' examples."""
        return self.root / "data.json"

    @property
    def reproduce(self) -> Path:
        return self.root / "reproduce.sh"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def job(self) -> Path:
        """The SLURM job that the run was given to: `{"id": "12_3", "submitted": seconds}`."""
        return self.root / "job.json"

    @property
    def sbatch(self) -> Path:
        return self.root / "sbatch.sh"

    @property
    def explained(self) -> Path:
        """What a dry run said of the plan: processes, a step's arithmetic, memory."""
        return self.root / "plan.txt"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tracking(self) -> Path:
        """What W&B and TensorBoard have been told: `{service: {"forwarded": bytes of metrics.jsonl, "id": the run's name there}}`."""
        return self.root / "tracking.json"

    @property
    def latest_logs(self) -> Path:
        return self.root / "logs" / "latest"

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt_{attempt}"

    def log(self, attempt: int, name: str) -> Path:
        return self.logs(attempt) / f"{name}.log"

    @property
    def endpoints(self) -> Path:
        """Where a process that bound a port says so: `inference_0.json`."""
        return self.root / "endpoints"

    @property
    def preempt(self) -> Path:
        """Exists while the machine is about to be taken away: roles write a checkpoint and leave with exit code 75."""
        return self.root / "preempt"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeats"

    @property
    def batches(self) -> Path:
        """Step batches on their way from the orchestrator to the trainer."""
        return self.root / "batches"

    def batch_of(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}.batch"

    @property
    def recorded(self) -> Path:
        """Step batches that were trained on, kept for `replay=`."""
        return self.root / "recorded"

    def recorded_of(self, step: int) -> Path:
        return self.recorded / f"step_{step:06d}.batch.zst"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    def rollouts_of(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.jsonl.zst"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def weights_of(self, version: int) -> Path:
        """The Hugging Face folder of a policy version; complete when it holds `COMPLETE`."""
        return self.weights / f"step_{version}"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint_of(self, step: int) -> Path:
        """The state after `step` training steps, of trainer and orchestrator; complete when it holds `COMPLETE`."""
        return self.checkpoints / f"step_{step}"

    @property
    def start(self) -> Path:
        """Which checkpoint this attempt starts from, written by the launcher; absent when it starts from version 0."""
        return self.root / "start.json"

    def ask_to_give_way(self) -> None:
        """Make `preempt`. Where it is there already, its time stays that of the first notice."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.preempt, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    @property
    def preempted(self) -> Path:
        """The trainer's answer to `preempt`, after its checkpoint: `{"step": steps done}`. The orchestrator leaves when it is there."""
        return self.root / "preempted.json"

    @property
    def kernels(self) -> Path:
        """What the trainer computes with, as it was chosen: `{"logprob": backend, "layers": Liger's layer kernels, or why none}`,
        and `warning` where the objective's bounds were measured to be too tight."""
        return self.root / "kernels.json"

    @property
    def initial_model(self) -> Path:
        """A file that holds the path or hub name of policy version 0, written when it is ready."""
        return self.root / "initial_model.txt"


def listed(path: Path) -> bool:
    """Whether there is such a path, by listing its folder: who asks a network file system for an absent name by name may be answered from
    memory, for a minute."""
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return False


COMPLETE = "COMPLETE"
"""Name of the marker file that is written last into a folder of several files."""


def cache_root() -> Path:
    """Where warm-started models are kept between runs: `RLX_CACHE`, else `~/.cache/rlx`."""
    return Path(os.environ.get("RLX_CACHE") or Path.home() / ".cache" / "rlx")


@contextmanager
def atomic(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary file name in the folder of `path`; rename it to `path` when the block ends well, with permissions `mode`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a whole file atomically, with permissions `mode`."""
    with atomic(path, mode) as temporary:
        temporary.write_text(text)
