"""Whole runs whose weights reach the servers without files, or over files in memory: the same as over files, and whole after a kill."""

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
GLOO = "weight_broadcast.type=gloo"

STOPS_MIDWAY = """
import sys
if "rlx.roles.trainer" in sys.orig_argv:
    import time
    from pathlib import Path
    from rlx.parallel.transfer import Group
    send, here, go = Group.send, Path(__file__).with_name("here"), Path(__file__).with_name("go")
    sent = [0]

    def stops(group, announced, tensors):
        sent[0] += 1

        def stopping():
            for number, pair in enumerate(tensors):
                if number == 10 and sent[0] == 3 and not here.exists():
                    here.touch()
                    while not go.exists():
                        time.sleep(0.02)
                yield pair

        send(group, announced, stopping())

    Group.send = stops
"""


def stopped_midway(start: Callable[..., MainJob], folder: Path, *keys: str) -> MainJob:
    """A run in the middle of its third transfer, which goes on when the folder has the file `go`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STOPS_MIDWAY)
    job = start("run", *ON_POLICY, GLOO, *keys, env={"PYTHONPATH": str(folder)})
    job.until((folder / "here").exists, "transfer")
    return job


@pytest.mark.long
@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["dense", "experts"])
def test_over_gloo_a_run_is_the_same_as_over_files_bit_for_bit(start: Callable[..., MainJob], tmp_path: Path, experts: bool) -> None:
    keys: tuple[str, ...] = (*ON_POLICY, "max_steps=4", "ckpt.interval=null")
    if experts:
        make_model(tmp_path / "experts", tied=True, seed=0, experts=4)
        keys += ("model=tiny_trained", f"model.name={tmp_path / 'experts'}", "model.num_experts=4")
    jobs = [start("files", *keys), start("gloo", *keys, GLOO)]
    assert [job.wait() for job in jobs] == [0, 0], "".join(job.text() for job in jobs)
    files, gloo = jobs
    assert gloo.reproducible_lines() == files.reproducible_lines()
    sums = [json.loads((job.run_dir / "weights" / "step_4" / COMPLETE).read_text())["tensors"] for job in jobs]
    assert sums[0] == sums[1]
    assert [path.name for path in (gloo.run_dir / "weights").iterdir()] == ["step_4"], "no other version was written"
    assert sum(record["time/send_weights"] for record in gloo.metrics("trainer")) > 0
    assert {record["time/send_weights"] for record in files.metrics("trainer")} == {0.0}
    log = (gloo.run_dir / "logs/attempt_0/inference_0.log").read_text()
    share = "1.5" if experts else "100.0"  # vLLM packs the layers of such a model on CPU, and what is packed cannot be compared
    assert log.count(f"compared {share} % of the served weights") == 4, log[-3000:]


@pytest.mark.long
def test_a_server_that_is_killed_in_mid_transfer_comes_back_and_gets_the_version(start: Callable[..., MainJob], tmp_path: Path) -> None:
    job = stopped_midway(start, tmp_path / "hook", "max_steps=5")
    server = job.pids()["inference"]
    os.kill(server, signal.SIGKILL)
    (tmp_path / "hook" / "go").touch()
    assert job.wait() == 0, job.text()
    assert "restarted inference_0 1 ×" in job.text()
    trained = job.metrics("trainer")
    assert [record["step"] for record in trained] == list(range(5))
    assert max(record["mismatch/kl"] for record in trained) < 1e-6
    for step in range(5):
        assert {version for rollout in job.rollouts(step) for version in rollout["versions"]} == {step}
    job.wait_until_nothing_is_left()


@pytest.mark.nightly
def test_a_server_that_is_stopped_in_mid_transfer_is_killed_and_comes_back_and_gets_the_version(
    start: Callable[..., MainJob], tmp_path: Path
) -> None:
    job = stopped_midway(start, tmp_path / "hook", "max_steps=5", "inference.hung_timeout=20")
    os.kill(job.pids()["inference"], signal.SIGSTOP)
    (tmp_path / "hook" / "go").touch()
    assert job.wait() == 0, job.text()
    (restart,) = job.status()["restarts"]
    assert "(inference.hung_timeout=20)" in restart["reason"]
    trained = job.metrics("trainer")
    assert [record["step"] for record in trained] == list(range(5))
    assert max(record["mismatch/kl"] for record in trained) < 1e-6
    for step in range(5):
        assert {version for rollout in job.rollouts(step) for version in rollout["versions"]} == {step}
    job.wait_until_nothing_is_left()


HANGS = """
import sys
if "rlx.roles.inference" in sys.orig_argv and sys.orig_argv[-1] == "1":
    import time
    from rlx.inference.server.transfer import GlooEngine
    from rlx.inference.server.worker import PolicyWorker

    def third_time(method):
        seen = [0]

        def hangs(*args, **keys):
            seen[0] += 1
            if seen[0] == 3:
                time.sleep(3600)
            return method(*args, **keys)

        return hangs

    GlooEngine.receive_weights = third_time(GlooEngine.receive_weights)
    PolicyWorker.load_policy = third_time(PolicyWorker.load_policy)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["gloo", "filesystem"])
def test_a_server_whose_engine_hangs_in_an_update_is_left_out_and_the_run_goes_on_with_the_other(
    start: Callable[..., MainJob], tmp_path: Path, transport: str
) -> None:
    """It still sends heartbeats and answers the orchestrator."""
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    two = ("hardware.inference_replicas=2", "inference.kv_cache_gb=0.25")
    update = (f"weight_broadcast.type={transport}", "weight_broadcast.timeout=20")
    job = start("run", *ON_POLICY, *two, *update, "max_steps=6", env={"PYTHONPATH": str(tmp_path)})
    assert job.wait() == 0, job.text()
    log = (job.run_dir / "logs/attempt_0/orchestrator.log").read_text()
    assert re.search(r"version 3 is served without inference server http://\S+:", log), log[-3000:]
    trained = job.metrics("trainer")
    assert [record["step"] for record in trained] == list(range(6))
    assert max(record["mismatch/kl"] for record in trained) < 1e-6
    assert "restarted" not in job.text()
    job.wait_until_nothing_is_left()


@pytest.mark.long
def test_a_trainer_that_is_killed_in_mid_transfer_ends_the_run_as_its_cause(start: Callable[..., MainJob], tmp_path: Path) -> None:
    job = stopped_midway(start, tmp_path / "hook", "max_steps=5")
    os.kill(job.pids()["trainer"], signal.SIGKILL)
    assert job.wait(120) == 1, job.text()
    assert job.status()["cause"]["role"] == "trainer"
    job.wait_until_nothing_is_left()


@pytest.mark.long
def test_over_gloo_two_servers_get_every_version_beside_training_and_evaluations_also_after_a_kill(start: Callable[..., MainJob]) -> None:
    keys = ("max_async_level=1", "orchestrator.batch_size=32", "model.dtype=float32", "max_steps=8", "ckpt.interval=2", GLOO)
    more = ("hardware.inference_replicas=2", "eval.interval=4", "eval.num_examples=8", "eval.rollouts_per_example=2")
    killed = start("run", *keys, *more)
    killed.until(lambda: checkpoints(killed) and max(checkpoints(killed)) >= 4, "checkpoint 4")
    os.kill(killed.pids()["trainer"], signal.SIGSTOP)  # it must not end before all are found
    kill_everything(killed)
    resumed_at = max(checkpoints(killed))
    assert resumed_at < 8
    carried = read_state(RunPaths(killed.run_dir).checkpoint_of(resumed_at), OrchestratorState).collector.finished
    job = start("run", *keys, *more, "resume=latest")
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
    for server in (0, 1):
        served = set()
        for attempt in (0, 1):
            log = (job.run_dir / f"logs/attempt_{attempt}/inference_{server}.log").read_text()
            told = re.findall(r"version (\d+): ready after .*; compared ([\d.]+) % of the served weights", log)
            assert {share for _, share in told} == {"100.0"}, log[-3000:]
            numbers = [int(version) for version, _ in told]
            assert numbers == sorted(set(numbers)), "each version once, in order"
            assert attempt == 0 or min(numbers) >= resumed_at
            served |= set(numbers)
        assert len(served) >= 4
        assert 8 in served, "the last version is evaluated on both"
    job.wait_until_nothing_is_left()


SHM = Path("/dev/shm")


def own_folder(job: MainJob) -> Path:
    """The run's folder in memory. Its random name makes it the run's own."""
    return (job.run_dir / "weights" / ".memory").readlink()


def where(job: MainJob) -> dict[int, bool]:
    """The versions of a run, and whether they are in memory."""
    paths = RunPaths(job.run_dir)
    return {version: paths.weights_of(version).is_symlink() for version in versions(paths.weights)}


@pytest.mark.long
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
    job.until(lambda: not own.exists() and (job.run_dir / "weights" / ".memory").is_dir(), "another folder in memory")
    again = own_folder(job)
    assert job.wait() == 0, job.text()
    assert f"resuming after {resumed_at} steps" in job.text()
    assert not again.exists()
    assert not own.exists()
    assert job.reproducible_lines() == disk.reproducible_lines()
    assert where(job) == {5: False, 10: False, 12: False}
    assert {path.name for path in (job.run_dir / "weights").iterdir()} == {"step_5", "step_10", "step_12"}
    one, other = (json.loads((each.run_dir / "weights/step_12" / COMPLETE).read_text())["tensors"] for each in (job, disk))
    assert one == other
    job.wait_until_nothing_is_left()


@pytest.mark.long
def test_a_preempted_run_leaves_the_version_of_its_checkpoint_on_the_disk(start: Callable[..., MainJob]) -> None:
    job = start("run", "orchestrator.batch_size=32", "max_steps=10000", "ckpt.interval=null", f"weight_broadcast.folder={SHM}")
    job.until_step(2)
    own = own_folder(job)
    os.kill(job.status()["supervisor"]["pid"], signal.SIGUSR2)
    assert job.wait() == 75, job.text()
    job.wait_until_nothing_is_left()
    (step,) = checkpoints(job)
    assert not own.exists()
    assert where(job) == {step: False}
    assert verify(RunPaths(job.run_dir).weights_of(step))["version"] == step


SERVED_WRONGLY = """
import sys
if "rlx.roles.inference" in sys.orig_argv:
    from rlx.inference.server.worker import PolicyWorker
    attest, seen = PolicyWorker.attest_policy, [0]

    def wrong(worker, trained, *beside):
        seen[0] += 1
        if seen[0] == 3:
            worker.model_runner.get_model().model.norm.weight.data[3] += 1e-3
        return attest(worker, trained, *beside)

    PolicyWorker.attest_policy = wrong
"""


@pytest.mark.long
@pytest.mark.parametrize("transport", ["gloo", pytest.param("filesystem", marks=pytest.mark.nightly)])
def test_a_version_that_is_served_wrongly_ends_the_run_before_a_rollout_of_it_is_trained(
    start: Callable[..., MainJob], tmp_path: Path, transport: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SERVED_WRONGLY)
    job = start("run", *ON_POLICY, f"weight_broadcast.type={transport}", "max_steps=8", env={"PYTHONPATH": str(tmp_path)})
    assert job.wait() == 1, job.text()
    assert re.search(r"the served weights are not those that were trained: 1 of \d+ tensors differ: model\.norm\.weight", job.text())
    trained = [record["step"] for record in job.metrics("trainer")]
    assert trained == [0, 1, 2], "version 3 is the one that was served wrongly"
    assert all(rollout["versions"] == [step] for step in trained for rollout in job.rollouts(step))
