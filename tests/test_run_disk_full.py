"""A disk that fills while a run writes its checkpoints, on the real stack."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from main_job import MainJob

from rlx.checkpoints import folders
from rlx.paths import RunPaths

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a small file system"),
]
MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # lazy: the run's console output may still be open


def fill(disk: Path, leave: int) -> None:
    """Take the disk's space but for `leave` bytes, in small pieces because the run takes some of it meanwhile."""
    with (disk / "full").open("wb", buffering=0) as full, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free) > leave:
            full.write(bytes(min(MIB, free - leave)))


@pytest.mark.nightly
def test_a_disk_that_fills_during_a_checkpoint_ends_the_run_with_the_last_good_one_intact(disk, model_cache):
    keys = ("orchestrator.batch_size=32", "ckpt.interval=3", "ckpt.keep_last=null")
    env = {"RLX_CACHE": str(model_cache)}
    run = MainJob(disk / "run", *keys, "max_steps=100000", env=env)
    paths = RunPaths(run.run_dir)
    try:
        run.until(lambda: folders.steps(paths), "first checkpoint")
        # A version's weights fit into the remaining space, a checkpoint of 10 MB does not.
        fill(disk, leave=8 * MIB)
        assert run.wait() == 1
        cause = run.status()["cause"]
        shown = run.text()[run.text().index(" failed: ") :]
        assert f"the disk of {run.run_dir} is full" in cause["reason"] or "No space left on device" in shown, run.text()
        good = folders.newest(paths, warn=pytest.fail)
        if cause["role"] == "trainer" and "checkpoint of step" in shown:
            assert f"the last complete checkpoint is {good.checkpoint}" in shown
        assert list(folders.being_written(paths)) == []
        run.wait_until_nothing_is_left()

        (disk / "full").unlink()
        run = MainJob(disk / "run", *keys, f"max_steps={good.step + 4}", "resume=latest", env=env)
        assert run.wait() == 0, run.text()
        assert f"resuming after {good.step} steps" in run.text()
        assert [r["step"] for r in run.metrics("trainer")] == list(range(good.step + 4))
    finally:
        run.destroy()
