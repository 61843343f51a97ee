"""The layout of a run directory, and atomic writing of files."""

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
        """The configuration's secret values, which are not in `config.yaml`. Only the run's owner can read the file."""
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
        """Digests of the environments' examples, or of the data sets of `rlx sft`."""
        return self.root / "data.json"

    @property
    def reproduce(self) -> Path:
        return self.root / "reproduce.sh"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def job(self) -> Path:
        """The run's last SLURM job: `{"id": "12_3", "submitted": seconds}`."""
        return self.root / "job.json"

    @property
    def sbatch(self) -> Path:
        return self.root / "sbatch.sh"

    @property
    def explained(self) -> Path:
        """A dry run's explanation of the plan: processes, a step's arithmetic, memory."""
        return self.root / "plan.txt"

    @property
    def report(self) -> Path:
        """The page that `rlx report` makes, of this run or of the sweep in this directory."""
        return self.root / "report.html"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tracking(self) -> Path:
        """How far W&B and TensorBoard have been forwarded: `{service: {"forwarded": bytes of metrics.jsonl, "id": the run's id there}}`."""
        return self.root / "tracking.json"

    @property
    def latest_logs(self) -> Path:
        return self.root / "logs" / "latest"

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt_{attempt}"

    def log(self, attempt: int, name: str) -> Path:
        return self.logs(attempt) / f"{name}.log"

    def stall_of(self, attempt: int, number: int) -> Path:
        """What was waited for when nothing moved, and the stacks of all processes (`rlx.launch.stall`)."""
        return self.logs(attempt) / f"stall_{number}.txt"

    @property
    def endpoints(self) -> Path:
        """Files in which processes publish their bound ports: `inference_0.json`."""
        return self.root / "endpoints"

    @property
    def preempt(self) -> Path:
        """Exists while the machine is about to be taken away: roles write a checkpoint and leave with exit code 75."""
        return self.root / "preempt"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeats"

    @property
    def stalls(self) -> Path:
        """Questions of the supervisor about what processes wait for, and their answers (`rlx.stacks`)."""
        return self.root / "stalls"

    @property
    def batches(self) -> Path:
        """Step batches that the orchestrator hands to the trainer."""
        return self.root / "batches"

    def batch_of(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}.batch"

    @property
    def recorded(self) -> Path:
        """Step batches that were trained on, kept for `replay=`."""
        return self.root / "recorded"

    def recorded_of(self, step: int) -> Path:
        return self.recorded / f"step_{step:06d}.batch.zst"

    def scores_of(self, step: int, rank: int) -> Path:
        """What a trainer rank computed for the tokens of a recorded batch (`rlx.data.scores`)."""
        return self.recorded / f"step_{step:06d}.scores_{rank}.zst"

    @property
    def replays(self) -> Path:
        """Steps that were trained again under another objective (`rlx replay`)."""
        return self.root / "replays"

    def replay_of(self, step: int, label: str) -> Path:
        """The results of one such step: `tokens.csv` and `summary.json`. `label` names the other objective."""
        return self.replays / f"step_{step}--{label}"

    @property
    def failures(self) -> Path:
        """What failed since the run's last start, by cause (`rlx.rollout.failures`); absent if nothing did."""
        return self.root / "failures.json"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    def rollouts_of(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.jsonl.zst"

    @property
    def finished(self) -> Path:
        """Every finished rollout of `rlx synthesize`, one a line (`rlx.rollout.selection.Candidate`)."""
        return self.rollouts / "finished.jsonl"

    def synthesized(self, kind: str) -> Path:
        """The data that `rlx synthesize` writes, as `parquet` or `jsonl`; its `metadata.json` is beside it."""
        return self.root / "data" / f"train.{kind}"

    @property
    def evaluations(self) -> Path:
        """Results of evaluations, in verifiers' layout."""
        return self.root / "eval"

    def evaluation_of(self, name: str, model: str, version: int) -> Path:
        """The results of one environment at a policy version."""
        return self.evaluations / f"{name}--{model.replace('/', '--')}" / f"step_{version}"

    @property
    def progress(self) -> Path:
        """How far a command that plays has come (`Scored.progress`), rewritten twice a second."""
        return self.root / "progress.json"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def weights_of(self, version: int) -> Path:
        """The Hugging Face folder of a policy version; complete when it contains `COMPLETE`."""
        return self.weights / f"step_{version}"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint_of(self, step: int) -> Path:
        """The state of trainer and orchestrator after `step` training steps; complete when it contains `COMPLETE`."""
        return self.checkpoints / f"step_{step}"

    @property
    def start(self) -> Path:
        """The checkpoint that this attempt starts from, written by the launcher; absent if it starts from version 0."""
        return self.root / "start.json"

    def ask_to_give_way(self) -> None:
        """Create the file `preempt`. An existing file keeps its time, that of the first notice."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.preempt, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    @property
    def preempted(self) -> Path:
        """The trainer's answer to `preempt`, after its checkpoint: `{"step": completed steps}`. The orchestrator leaves when it exists."""
        return self.root / "preempted.json"

    @property
    def kernels(self) -> Path:
        """The trainer's chosen kernels: `{"logprob": backend, "layers": Liger's layer kernels, or why none}`,
        and `warning` if the objective's bounds were measured to be too tight."""
        return self.root / "kernels.json"

    @property
    def initial_model(self) -> Path:
        """A file with the path or hub name of policy version 0, written when that version is ready."""
        return self.root / "initial_model.txt"


def listed(path: Path) -> bool:
    """Whether a path exists, by listing its folder: a network file system may cache for a minute that a name does not exist."""
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return False


COMPLETE = "COMPLETE"
"""Name of the marker file that is written last into a folder."""


def cache_root() -> Path:
    """Folder that keeps warm-started models between runs: `RLX_CACHE`, else `~/.cache/rlx`."""
    return Path(os.environ.get("RLX_CACHE") or Path.home() / ".cache" / "rlx")


@contextmanager
def atomic(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary file in the folder of `path`; rename it to `path`, with permissions `mode`, if the block succeeds."""
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
    """Write a file atomically, with permissions `mode`."""
    with atomic(path, mode) as temporary:
        temporary.write_text(text)
