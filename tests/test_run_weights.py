"""Whole runs and their weights: on several servers, in memory, of experts, and versions that are served wrongly or not at all."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from inference_server import make_model
from main_job import MainJob
from test_run_resume import checkpoints, kill_everything

from rlx.checkpoints.orchestrator import read_state
from rlx.paths import COMPLETE, RunPaths
from rlx.rollout.state import OrchestratorState
from rlx.weights.files import verify, versions

pytestmark = [pytest.mark.slow]
ON_POLICY = ("max_async_level=0", "orchestrator.batch_size=64", "model.dtype=float32")
IN_VLLM = """
import os
if "RLX_SECRET" in os.environ:
    import time
    from rlx.inference.extension import Policy
    load = Policy.rlx_load
"""


def compared(job: MainJob, attempt: int = 0) -> dict[str, list[tuple[int, str]]]:
    """By server: the versions whose weights were compared there in full, and the shares."""
    found: dict[str, list[tuple[int, str]]] = {}
    log = (job.run_dir / f"logs/attempt_{attempt}/orchestrator.log").read_text()
    for server, version, share in re.findall(r"inference server (\S+) serves (\d+)@\w{8}; ([\d.]+) % of its weights were compared", log):
        found.setdefault(server, []).append((int(version), share))
    return found


@pytest.mark.nightly
def test_two_servers_get_every_version_beside_training_and_evaluations_also_after_a_kill(start: Callable[..., MainJob]) -> None:
    keys = ("max_async_level=1", "orchestrator.batch_size=32", "model.dtype=float32", "max_steps=8", "ckpt.interval=2")
    more = ("hardware.inference_replicas=2", "weight_broadcast.verify_every=1")
    evaluated = ("eval.interval=4", "eval.num_examples=8", "eval.rollouts_per_example=2")
    killed = start("run", *keys, *more, *evaluated)
    killed.until(lambda: checkpoints(killed) and max(checkpoints(killed)) >= 4, "checkpoint 4")
    os.kill(killed.pids()["trainer"], signal.SIGSTOP)  # it must not end before all are found
    kill_everything(killed)
    resumed_at = max(checkpoints(killed))
    assert resumed_at < 8
    carried = read_state(RunPaths(killed.run_dir).checkpoint_of(resumed_at), OrchestratorState).collector.finished
    job = start("run", *keys, *more, *evaluated, "resume=latest")
    assert job.wait() == 0, job.text()
    trained = job.metrics("trainer")
    assert [record["step"] for record in trained] == list(range(8))
    on_policy = []
    for record in trained:
        step, mismatch = record["step"], record["mismatch/kl"]
        versions = {version for rollout in job.rollouts(step) for version in rollout["versions"]}
        assert versions <= {max(step - 1, 0), step}, (step, versions)
        if versions == {step}:
            on_policy.append(step)
            assert mismatch < 1e-6, "the servers have the trainer's weights"
        assert mismatch < 0.1, "of one step at most between sampling and training"
    # A group that the checkpoint has may be one version older than those that are played after it.
    assert ({0} if carried else {0, resumed_at}) <= set(on_policy)
    assert [record["step"] for record in job.metrics("eval")] == [0, 4, 8]
    for attempt, least in ((0, 0), (1, resumed_at)):
        servers = compared(job, attempt)
        assert len(servers) == 2
        for loaded in servers.values():
            assert {share for _, share in loaded} == {"100.0"}
            numbers = [version for version, _ in loaded if version]  # version 0: what each began with
            assert numbers == sorted(set(numbers)), "each version once, in order"
            assert min(numbers) >= least
            assert attempt == 0 or max(numbers) == 8, "the last version is evaluated on both"
    job.wait_until_nothing_is_left()


@pytest.mark.long
def test_a_run_trains_a_model_with_experts_on_what_its_server_sampled(start: Callable[..., MainJob], tmp_path: Path) -> None:
    make_model(tmp_path / "experts", tied=True, seed=0, experts=4)
    model = ("model=tiny_trained", f"model.name={tmp_path / 'experts'}", "model.num_experts=4")
    job = start("run", *ON_POLICY, *model, "max_steps=4", "weight_broadcast.verify_every=1")
    assert job.wait() == 0, job.text()
    assert [record["step"] for record in job.metrics("trainer")] == [0, 1, 2, 3]
    assert max(record["mismatch/kl"] for record in job.metrics("trainer")) < 1e-6
    assert list(compared(job).values()) == [[(version, "100.0") for version in (1, 2, 3, 4)]]


SHM = Path("/dev/shm")


def own_folder(job: MainJob) -> Path:
    """The run's folder in memory."""
    return (job.run_dir / "weights" / ".memory").readlink()


def where(job: MainJob) -> dict[int, bool]:
    """The versions of a run, and whether they are in memory."""
    paths = RunPaths(job.run_dir)
    return {version: paths.weights_of(version).is_symlink() for version in versions(paths.weights)}


@pytest.mark.nightly
def test_with_versions_in_memory_a_run_is_the_same_and_what_lasts_is_on_the_disk_also_after_a_kill(
    start: Callable[..., MainJob],
) -> None:
    keys = ("max_async_level=0", "orchestrator.batch_size=32", "max_steps=12", "ckpt.interval=5", "eval.interval=4", "eval.num_examples=8")
    more = (*keys, "eval.rollouts_per_example=2")
    disk = start("disk", *more)
    assert disk.wait() == 0, disk.text()

    killed = start("run", *more, f"weight_broadcast.folder={SHM}")
    killed.until(lambda: max(where(killed), default=0) >= 6, "version 6")
    os.kill(killed.pids()["trainer"], signal.SIGSTOP)  # it must not end before all are found
    own, there = own_folder(killed), where(killed)
    assert own.parent == SHM
    assert own.stat().st_mode & 0o777 == 0o700
    assert there[5] is False, "that of a checkpoint"
    assert {version for version, is_in_memory in there.items() if not is_in_memory} <= {4, 5, 8, 10, 12}, there
    newest = max(version for version, is_in_memory in there.items() if is_in_memory)
    assert verify(killed.run_dir / f"weights/step_{newest}")["version"] == newest
    kill_everything(killed)  # also the reaper
    assert own.is_dir()
    resumed_at = max(checkpoints(killed))

    job = start("run", *more, f"weight_broadcast.folder={SHM}", "resume=latest")
    job.until(lambda: max(where(job), default=0) > newest, "a version in memory")
    assert own_folder(job) == own
    assert job.wait() == 0, job.text()
    assert f"resuming after {resumed_at} steps" in job.text()
    assert not own.exists()
    assert job.reproducible_lines() == disk.reproducible_lines()
    assert where(job) == {5: False, 10: False, 12: False}
    assert {path.name for path in (job.run_dir / "weights").iterdir()} == {"step_5", "step_10", "step_12"}
    one, other = (json.loads((each.run_dir / "weights/step_12" / COMPLETE).read_text())["files"] for each in (job, disk))
    assert one == other
    job.wait_until_nothing_is_left()


SERVED_WRONGLY = f"""{IN_VLLM}
    def wrong(worker, folder, label):
        found = load(worker, folder, label)
        if label.startswith("3@"):
            worker.model_runner.get_model().model.norm.weight.data[3] += 1e-3
        return found

    Policy.rlx_load = wrong
"""


@pytest.mark.long
def test_a_version_that_is_served_wrongly_ends_the_run_before_a_rollout_of_it_is_trained(
    start: Callable[..., MainJob], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SERVED_WRONGLY)
    job = start("run", *ON_POLICY, "weight_broadcast.verify_every=1", "max_steps=8", env={"PYTHONPATH": str(tmp_path)})
    assert job.wait() == 1, job.text()
    where = r"1 numbers differ on 1 of 1 ranks, most in model\.norm\.weight"
    assert re.search(rf"serves other weights than version 3@\w{{8}}, which it has just loaded: {where}", job.text())
    trained = [record["step"] for record in job.metrics("trainer")]
    assert trained == [0, 1, 2], "version 3 is the one that was served wrongly"
    assert all(rollout["versions"] == [step] for step in trained for rollout in job.rollouts(step))
