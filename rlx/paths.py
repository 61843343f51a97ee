"""The layout of a run directory, and atomic writing of files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STEP = re.compile(r"step_(\d+)(?!\d)(?=\.|--|$)")
MEMBER = "run_"  # beginning of the names of the runs' directories in that of their shared trainer


class _At:
    """A fixed place in a run directory, as an attribute of `RunPaths`."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __get__(self, paths: RunPaths, _: type | None = None) -> Path:
        return paths.root / self.place


@dataclass(frozen=True)
class RunPaths:
    """The files and folders of one run directory."""

    root: Path

    config = _At("config.yaml")
    # The configuration's secret values, which are not in `config.yaml`. Only the run's owner can read the file.
    secrets = _At("secrets.yaml")
    overrides = _At("overrides.yaml")
    plan = _At("plan.yaml")
    provenance = _At("provenance.json")
    # Digests of the environments' examples, or of the data sets of `rlx sft`; with `begin`, the step at which these begin in a fork.
    data = _At("data.json")
    forked = _At("forked.json")  # what a fork must know of the run that it starts from (`rlx.checkpoints.forked`)
    reproduce = _At("reproduce.sh")
    status = _At("status.json")
    # The run's last SLURM job: `{"id": "12_3", "submitted": seconds, "output": file}`, and `progress` when a requeue last found new steps.
    job = _At("job.json")
    sbatch = _At("sbatch.sh")
    kubernetes = _At("kubernetes.json")  # the Kubernetes Job that the run belongs to: `{"job": name, "uid": …}`
    explained = _At("plan.txt")  # a dry run's explanation of the plan: processes, a step's arithmetic, memory
    report = _At("report.html")  # the page that `rlx report` makes, of this run or of the sweep in this directory
    lock = _At(".lock")
    metrics = _At("metrics.jsonl")
    # How far W&B and TensorBoard have been forwarded: `{service: {"forwarded": bytes of metrics.jsonl, "id": the run's id there}}`.
    tracking = _At("tracking.json")
    latest_logs = _At("logs/latest")
    endpoints = _At("endpoints")  # files in which processes publish their bound ports: `inference_0.json`
    offer = _At("endpoints/weights.json")  # the policy version that the trainer can send from its memory (`rlx.weights.transfer`)
    trained_initial = _At("endpoints/initial_model.json")  # the model that the trainer began with (`rlx.types.InitialModel`)
    preempt = _At("preempt")  # exists while the machine is about to be taken away: roles write a checkpoint and leave with exit code 75
    heartbeats = _At("heartbeats")
    stalls = _At("stalls")  # questions of the supervisor about what processes wait for, and their answers (`rlx.stack_dump`)
    batches = _At("batches")  # step batches that the orchestrator hands to the trainer
    recorded = _At("recorded")  # step batches that were trained on, kept for `replay=`
    replays = _At("replays")  # steps that were trained again under another objective (`rlx replay`)
    failures = _At("failures.json")  # what failed since the run's last start, by cause (`rlx.rollout.failures`); absent if nothing did
    rollouts = _At("rollouts")
    finished = _At("rollouts/finished.jsonl")  # every finished rollout of `rlx synthesize`, one a line (`rlx.rollout.eval_results.Outcome`)
    synthesized = _At("data/train.jsonl")  # the data that `rlx synthesize` writes; its `metadata.json` is in the same folder
    updates = _At("updates.jsonl")  # when the servers got each policy version: `{"version", "began", "seconds"}`, `began` as Unix time
    profile = _At("profile")  # traces of torch's profiler (`profile.steps`)
    timeline = _At("timeline.json.gz")  # of all roles (`rlx report`)
    evaluations = _At("eval")  # results of evaluations, in verifiers' layout
    progress = _At("progress.json")  # how far a command that plays has come (`Scored.progress`), rewritten twice a second
    weights = _At("weights")
    checkpoints = _At("checkpoints")
    start = _At("start.json")  # the checkpoint that this attempt starts from, written by the launcher; absent if it starts from version 0
    # The trainer's answer to `preempt`, after its checkpoint: `{"step": completed steps}`. The orchestrator leaves when it exists.
    preempted = _At("preempted.json")
    # The trainer's chosen kernels: `{"logprob": backend, "layers": Liger's layer kernels, or why none}`, and `warning` if the objective's
    # bounds were measured to be too tight.
    kernels = _At("kernels.json")
    # How a run and its shared trainer find each other (`rlx.shared.membership`).
    membership = _At("membership")
    # The same model before its warm start, with which servers start meanwhile; deleted once they have version 0.
    untrained_model = _At("untrained_model")
    initial_model = _At("initial_model.txt")  # a file with the path or hub name of policy version 0, written when that version is ready

    def member(self, name: str) -> RunPaths:
        """The directory of a run in a shared trainer's: `run_NAME`."""
        return RunPaths(self.root / f"{MEMBER}{name}")

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt_{attempt}"

    def log(self, attempt: int, name: str) -> Path:
        return self.logs(attempt) / f"{name}.log"

    def stall_of(self, attempt: int, number: int) -> Path:
        """What was waited for when nothing moved, and the stacks of all processes (`rlx.launch.stall`)."""
        return self.logs(attempt) / f"stall_{number}.txt"

    def batch_of(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}.batch"

    def recorded_of(self, step: int) -> Path:
        return self.recorded / f"step_{step:06d}.batch.zst"

    def scores_of(self, step: int, rank: int) -> Path:
        """What a trainer rank computed for the tokens of a recorded batch (`rlx.data.scores`)."""
        return self.recorded / f"step_{step:06d}.scores_{rank}.zst"

    def replay_of(self, step: int, label: str) -> Path:
        """The results of one such step: `tokens.csv` and `summary.json`. `label` names the other objective."""
        return self.replays / f"step_{step}--{label}"

    def rollouts_of(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.jsonl.zst"

    def evaluation_of(self, name: str, model: str, version: int) -> Path:
        """The results of one environment at a policy version."""
        return self.evaluations / f"{name}--{model.replace('/', '--')}" / f"step_{version}"

    def weights_of(self, version: int) -> Path:
        """The Hugging Face folder of a policy version; complete when it contains `COMPLETE`."""
        return self.weights / f"step_{version}"

    def checkpoint_of(self, step: int) -> Path:
        """The state of trainer and orchestrator after `step` training steps; complete when it contains `COMPLETE`."""
        return self.checkpoints / f"step_{step}"

    def make_folders(self) -> None:
        """Create the folders in which a host looks for what others write, before any looks: a network file system may tell a host for a
        minute that a folder does not exist which it has asked for too early."""
        for folder in (self.weights, self.batches, self.checkpoints, self.heartbeats, self.stalls):
            folder.mkdir(parents=True, exist_ok=True)
        self.endpoints.mkdir(mode=0o700, exist_ok=True)  # it has the servers' secret

    def ask_to_give_way(self) -> None:
        """Create the file `preempt`. An existing file keeps its time, that of the first notice."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.preempt, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def step_of(path: Path) -> int | None:
    """12 for `step_000012.jsonl.zst`, `step_12` and `step_12--loss=gspo`; None for other names."""
    match = STEP.match(path.name)
    return int(match[1]) if match else None


def listed(path: Path) -> bool:
    """Whether a path exists, by listing its folder: a network file system may cache for a minute that a name does not exist.

    The same holds for the folder's own name: where the folder may appear later, use `listed_with_folder`.
    """
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return False


def listed_with_folder(path: Path) -> bool:
    """As `listed`, of a file whose folder may appear later, too. The folder above that one must be there."""
    return listed(path.parent) and listed(path)


def arrived(path: Path) -> bytes | None:
    """Content of a file that appears whole. None while there is none, and as long as this host still believes that there is none."""
    try:
        return path.read_bytes() if listed(path) else None
    except FileNotFoundError:  # a process of this host has looked for the name too early
        return None


COMPLETE = "COMPLETE"
"""Name of the marker file that is written last into a folder."""


def cache_root() -> Path:
    """Folder that keeps warm-started models between runs: `RLX_CACHE`, else `~/.cache/rlx`."""
    return Path(os.environ.get("RLX_CACHE") or Path.home() / ".cache" / "rlx")


@contextmanager
def atomic(path: Path, mode: int = 0o644, *, parents: bool = True) -> Iterator[Path]:
    """Yield a temporary file in the folder of `path`; rename it to `path`, with permissions `mode`, if the block succeeds.

    `parents`: make the folder if it is missing; otherwise that is a FileNotFoundError.
    """
    if parents:
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


def remove(path: Path) -> None:
    """Delete a file, or a folder with what it holds; of a link, which a user may have put there to move something away, the link alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file atomically, with permissions `mode`."""
    with atomic(path, mode) as temporary:
        temporary.write_text(text)
