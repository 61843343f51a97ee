"""The main job end to end on the real stack: vLLM, verifiers environments, trainer, launched as a user launches it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from main_job import reproducible_lines

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow]
SHORT = ("orchestrator.batch_size=64", "max_steps=4")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_default_run_learns_and_leaves_a_complete_run_directory(start):
    job = start("run")
    job.until_step(1)
    assert job.listens_on() == {"127.0.0.1"}, "nobody else reaches a run on one host"
    assert job.wait() == 0, job.text()
    rewards = [r["reward/mean"] for r in job.metrics("orchestrator")]
    assert len(rewards) == 100
    assert mean(rewards[:3]) < 0.6
    assert mean(rewards[-5:]) >= 0.9
    assert max(r["off_policy/lag_max"] for r in job.metrics("trainer")) == 1
    # Every token is one version old, so this measures the policy change of a training step: about 1e-3 in the mean, while a single
    # step may be ten to fifty times that. `test_run_resume.py` has both agree.
    mismatches = sorted(r["mismatch/kl"] for r in job.metrics("trainer"))
    assert mean(mismatches) < 5e-3
    assert mismatches[94] < 2e-2, "of 100 steps"
    written = {p.name for p in job.run_dir.iterdir()}
    assert written >= {"config.yaml", "overrides.yaml", "plan.yaml", "provenance.json", "reproduce.sh", "status.json", "metrics.jsonl"}
    assert (job.run_dir / "weights" / "step_100" / "COMPLETE").exists()
    assert (job.run_dir / "logs" / "latest" / "trainer.log").exists()
    status = job.status()
    assert (status["state"], status["step"], status["exit_code"], status["cause"]) == ("completed", 100, 0, None)
    rollout = job.rollouts(10)[0]
    assert rollout.keys() >= {
        "env", "example_id", "group", "prompt", "completion", "reward", "rewards", "advantage", "versions", "num_tokens", "stop", "error"
    }  # fmt: skip
    assert len(job.rollouts(10)) == 128
    assert "kernels   log-probabilities by torch · Liger's layer kernels off: its kernels need CUDA, but this is cpu" in job.text()
    job.wait_until_nothing_is_left()
    policy_51_is_trained_again_from_checkpoint_50(job.run_dir)


def policy_51_is_trained_again_from_checkpoint_50(run_dir: Path) -> None:
    """`rlx replay` finds the recorded numbers of a step whose weights are gone."""
    assert not (run_dir / "weights" / "step_51").exists()
    command = [sys.executable, "-m", "rlx.cli", "replay", str(run_dir), "--step", "51", "loss=gspo", "--out", str(run_dir / "compared")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    found = json.loads((run_dir / "compared" / "summary.json").read_text())
    assert (found["steps_trained_again"], len(found["checks"])) == (1, 4)
    assert all(check["here"] == pytest.approx(check["recorded"], rel=1e-9) for check in found["checks"])


def reproduce(run_dir: Path, model_cache: Path) -> Path:
    """Run the script of a run again, beside it."""
    again = run_dir.with_name("again")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "RLX_CACHE": str(model_cache), "RLX_NEW_DIR": str(again)}
    done = subprocess.run(["sh", run_dir / "reproduce.sh"], check=False, timeout=600, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return again


@pytest.mark.nightly
def test_the_script_of_a_run_with_replaced_groups_several_passes_and_a_reference_repeats_it_bit_for_bit(start, model_cache):
    overrides = ("max_async_level=0", *SHORT, "loss=dapo", "loss.proximal=recompute", "loss.correction=tis", "loss.kl.beta=0.01")
    job = start("run", *overrides, "trainer.num_minibatches=2", "trainer.num_iterations=2", "ref.sync_interval=2")
    assert job.wait() == 0, job.text()
    assert reproducible_lines(reproduce(job.run_dir, model_cache)) == job.reproducible_lines()
    played, trained = job.metrics("orchestrator"), job.metrics("trainer")
    assert sum(record["filter/min_reward_variance"] for record in played) > 0
    for record in played:
        assert (record["batch/groups"], record["batch/zero_advantage_frac"]) == (8, 0)
    for record in trained:
        assert record["policy/ratio_max"] - record["policy/ratio_min"] > 1e-3, "ratios move away from 1 within the step"
        assert record["ref/kl"] > 0


@pytest.mark.nightly
def test_two_runs_side_by_side_do_not_meet_and_two_trainer_processes_train_like_one(start):
    one, other = jobs = [start(name, "max_async_level=0", *SHORT, f"seed={seed}") for seed, name in enumerate(("one", "other"))]
    codes = [job.wait() for job in jobs]
    assert codes == [0, 0], "\n".join(job.text() for job in jobs)
    assert all(len(job.metrics("trainer")) == 4 for job in jobs)
    assert one.reproducible_lines() != other.reproducible_lines(), "equal runs on the policy have equal lines; these have other seeds"
    two = start("two", "max_async_level=0", "orchestrator.batch_size=64", "max_steps=3", "hardware.trainer_processes=2")
    assert two.wait() == 0, two.text()
    for a, b in zip(one.metrics("trainer")[:3], two.metrics("trainer"), strict=True):
        assert b["optim/grad_norm"] == pytest.approx(a["optim/grad_norm"], rel=1e-3)
        assert b["loss/total"] == pytest.approx(a["loss/total"], rel=1e-3, abs=1e-5)
    # The first step starts from the same weights, so it is equal up to the order of sums.
    assert two.metrics("trainer")[0]["optim/grad_norm"] == pytest.approx(one.metrics("trainer")[0]["optim/grad_norm"], rel=1e-5)


@pytest.mark.nightly
def test_environments_of_others_train_together_by_their_ids(start, tmp_path):
    site = tmp_path / "site"  # a separate folder, so the test does not change this environment
    package = tmp_path / "package"
    shutil.copytree(ROOT / "tests" / "packages" / "rlx_test_envs", package, ignore=shutil.ignore_patterns("__pycache__"))
    install = [Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--no-deps", "--target", site, package]
    subprocess.run(install, check=True)
    names = ["single", "multi", "tool", "gym"]
    envs = [f"+envs.{name}.id=rlx-test-{name}" for name in names]
    job = start(
        "run",
        "env=[]",
        *envs,
        "max_steps=3",
        "model.warm_start.steps=10",  # for each environment; enough to learn when to stop, and nothing here needs more
        "model.warm_start.batch_size=16",
        "orchestrator.batch_size=64",
        "seq_len=256",
        env={"PYTHONPATH": str(site)},
    )
    assert job.wait() == 0, job.text()
    records = job.metrics("orchestrator")
    for name in names:
        assert any(f"reward/{name}/mean" in record for record in records), name
    multi = [rollout for step in range(3) for rollout in job.rollouts(step) if rollout["env"] == "multi"]
    assert any(len(rollout["completion"]) > 1 for rollout in multi)


@pytest.mark.long
def test_an_installed_package_finds_its_configuration(tmp_path):
    """A wheel in its own environment runs `rlx train dry_run=true` from an empty directory."""
    uv = Path(sys.executable).parent / "uv"
    source = tmp_path / "source"  # a copy: the wheel would include old files in build/; in __pycache__ other tests write meanwhile
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "outputs", "build", "*.egg-info", "__pycache__"))
    subprocess.run(
        [uv, "build", "--wheel", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", tmp_path / "dist", source],
        check=True,
        cwd=tmp_path,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel], check=True)
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    # The dependencies come from this environment, but not its editable rlx: Python ignores .pth files in a folder added by a .pth file.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = subprocess.run(
        [python, "-c", "import rlx; print(rlx.__file__)"], cwd=empty, check=True, capture_output=True, text=True, env=env
    )
    assert str(site) in where.stdout
    done = subprocess.run(
        [tmp_path / "env" / "bin" / "rlx", "train", "env=[sums,reverse_text]", "dry_run=true"],
        cwd=empty, check=False, capture_output=True, text=True, env=env, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prepare" in done.stdout
    swept = subprocess.run(
        [tmp_path / "env" / "bin" / "rlx", "train", "sweeps=seeds", "launcher=slurm", "slurm=dev", "hardware=cpu", "dry_run=true"],
        cwd=empty, check=False, capture_output=True, text=True, env=env, timeout=600,
    )  # fmt: skip
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "5 runs in" in swept.stdout
    assert "#SBATCH --partition=debug" in swept.stdout
