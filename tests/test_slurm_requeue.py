"""Runs that lose their machine to SLURM: they come back with the same job and directory, and end like an undisturbed run.

At `max_async_level=0` on CPU a run's metrics are bitwise equal however often it was interrupted. The tests compare these metrics.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from main_job import reproducible_lines
from safetensors.torch import load_file
from slurm_job import EVAL, SFT, TRAIN, SlurmJob, slurm, train

from rlx.config.schema import WarmStartConfig
from rlx.models import tiny

pytestmark = [pytest.mark.slurm]
STEPS = 18  # the run must still be training when SLURM has carried out what a test asks for after step 4
SMALL = ("max_async_level=0", "orchestrator.batch_size=64", f"max_steps={STEPS}")
RUN = ("hardware=cpu_3nodes", *SMALL, "ckpt.interval=3", "launcher.preempt_grace=40")


@pytest.fixture
def submit(cluster: None, tmp_path: Path, model_cache: Path) -> Iterator[Callable[..., SlurmJob]]:
    jobs: list[SlurmJob] = []

    def begin(name: str, *overrides: str, command: Sequence[str] = TRAIN) -> SlurmJob:
        jobs.append(SlurmJob(tmp_path / name, model_cache, *overrides, command=command))
        return jobs[-1]

    yield begin
    for job in jobs:
        subprocess.run(["scancel", job.id], check=False)


@pytest.fixture(scope="module")
def undisturbed(cluster: None, tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> SlurmJob:
    """An undisturbed run over three nodes."""
    job = SlurmJob(tmp_path_factory.mktemp("runs") / "undisturbed", model_cache, *RUN)
    assert job.until_over() == "completed", job.text()
    return job


@pytest.mark.nightly
def test_a_run_over_three_nodes_ends_well_and_trains_as_on_one(undisturbed, tmp_path, model_cache):
    status = undisturbed.status()
    assert (status["exit_code"], status["step"], status["job"], undisturbed.state()) == (0, STEPS, undisturbed.id, "COMPLETED")
    hosts = {(p["role"], p["replica"]): p["host"] for p in status["processes"]}
    assert hosts == {
        ("prepare", 0): "node2", ("inference", 0): "node1", ("orchestrator", 0): "node2", ("trainer", 0): "node2", ("trainer", 1): "node3"
    }  # fmt: skip
    assert undisturbed.left() == []
    assert any(record.get("optim/grad_norm") for record in undisturbed.metrics())  # it learns; otherwise the comparison would prove nothing
    one = [*RUN, "hardware=cpu", "hardware.trainer_processes=2", f"run.dir={tmp_path / 'one'}"]
    done = train(*one, cwd=tmp_path, cache=model_cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert reproducible_lines(tmp_path / "one") == undisturbed.reproducible_lines()


def requeue(job: SlurmJob) -> None:
    slurm("scontrol", "requeue", job.id)


def signal_before_the_time_limit(job: SlurmJob) -> None:
    slurm("scancel", "--batch", "--signal=USR2", job.id)  # the signal of --signal=B:USR2@…


def preempt_without_a_signal_of_its_own(job: SlurmJob) -> None:
    slurm("scancel", "--signal=TERM", job.id)  # only to the steps, as at the start of a partition's GraceTime


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(requeue, marks=pytest.mark.long),
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (signal_before_the_time_limit, preempt_without_a_signal_of_its_own)),
    ],
)
def test_a_run_that_was_requeued_in_mid_run_ends_like_one_that_was_not(submit, undisturbed, disturb):
    job = submit("run", *RUN)
    job.until_step(4)
    disturb(job)
    job.until(lambda: (job.run_dir / "logs" / "attempt_1" / "trainer.log").exists(), "second attempt")
    assert job.until_over() == "completed", job.text()
    status = job.status()
    assert (status["attempt"], status["exit_code"], status["step"], status["job"]) == (1, 0, STEPS, job.id)
    assert job.state() == "COMPLETED"
    first = (job.run_dir / "logs" / "attempt_0" / "launcher.log").read_text()
    second = (job.run_dir / "logs" / "attempt_1" / "launcher.log").read_text()
    found = re.search(r"resuming after (\d+) steps", second)
    assert found, second
    if disturb is requeue:
        assert int(found[1]) >= 3  # the newest checkpoint; SLURM's KillWait may have allowed one more
    else:
        assert "back in the queue" in first
        assert int(found[1]) >= 5  # a checkpoint was written because of the preemption
    assert job.reproducible_lines() == undisturbed.reproducible_lines()


@pytest.mark.nightly
def test_an_evaluation_that_was_requeued_half_way_has_the_table_of_one_that_was_not(submit, tmp_path, model_cache):
    keys = ["env=reverse_text", "num_examples=128", "rollouts_per_example=8"]
    done = train(*keys, f"run.dir={tmp_path / 'whole'}", cwd=tmp_path, cache=model_cache, command=EVAL)
    assert done.returncode == 0, done.stdout + done.stderr
    job = submit("job", *keys, "orchestrator.max_concurrent=1", command=EVAL)
    played = job.run_dir / "eval" / "finished.jsonl"
    job.until(lambda: played.exists() and played.read_bytes().count(b"\n") >= 8, "8 rollouts")
    signal_before_the_time_limit(job)
    assert job.until_over() == "completed", job.text()
    assert (job.status()["attempt"], job.status()["job"], job.state(), job.left()) == (1, job.id, "COMPLETED", [])
    log = (job.run_dir / "logs" / "attempt_1" / "evaluator.log").read_text()
    before = int(re.search(r"version 0: (\d+) rollouts are done already", log)[1])
    assert 8 <= before < 128 * 8
    assert (job.run_dir / "summary.csv").read_text() == (tmp_path / "whole" / "summary.csv").read_text()


@pytest.mark.nightly
def test_supervised_training_over_three_nodes_that_was_requeued_has_the_weights_of_one_machine_that_was_left_alone(
    submit, tmp_path, model_cache
):
    steps = 60
    words = [f"{number * 7919 % 9973:05}" for number in range(256)]
    rows = [{"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]} for word in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.save(tiny.build_model(WarmStartConfig(hidden_size=32, num_hidden_layers=2), 128), tiny.build_tokenizer(128), tmp_path / "model")
    data = (f"data.name={tmp_path}/rows.jsonl", "data.batch_size=36", "seq_len=96", "trainer.micro_batch_tokens=128")
    run = ("hardware.trainer_processes=3", f"max_steps={steps}", "ckpt.interval=20", "launcher.preempt_grace=40")
    keys = ("model=tiny_trained", f"model.name={tmp_path}/model", *data, *run)
    done = train("hardware=cpu", f"run.dir={tmp_path / 'whole'}", *keys, cwd=tmp_path, cache=model_cache, command=SFT)
    assert done.returncode == 0, done.stdout + done.stderr

    job = submit("run", "hardware=cpu_3nodes", *keys, command=SFT)
    job.until_step(4)
    signal_before_the_time_limit(job)
    assert job.until_over() == "completed", job.text()
    status = job.status()
    assert (status["attempt"], status["step"], status["job"], job.state(), job.left()) == (1, steps, job.id, "COMPLETED", [])
    hosts = {(p["role"], p["replica"]): p["host"] for p in status["processes"]}
    assert hosts == {("trainer", 0): "node1", ("trainer", 1): "node2", ("trainer", 2): "node3"}
    log = (job.run_dir / "logs" / "attempt_1" / "launcher.log").read_text()
    assert 5 <= int(re.search(r"resuming after (\d+) steps", log)[1]) < steps, "from the checkpoint of the notice"
    assert job.reproducible_lines() == reproducible_lines(tmp_path / "whole")
    one, other = (sorted((tmp_path / each / "weights" / f"step_{steps}").glob("*.safetensors")) for each in ("whole", "run"))
    assert len(one) < len(other), "one rank of each host writes"
    first, second = ({name: tensor.tolist() for file in files for name, tensor in load_file(file).items()} for files in (one, other))
    assert first == second, "the same weights"
