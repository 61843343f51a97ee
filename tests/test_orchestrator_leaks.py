"""20,000 rollouts against a stand-in engine: the orchestrator and its environment worker keep nothing of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]
SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "orchestrator.py"


@pytest.mark.nightly
def test_memory_open_files_and_temporary_files_stay_flat_over_20000_rollouts(tmp_path: Path) -> None:
    """Compares the second fifth of the steps with the last one."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--batch", "512", "--steps", "40", "--concurrent", "256", "--tokens", "32"],
        env=os.environ | {"TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"},  # no other process makes files there
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    count = re.search(r"^(\d+) rollouts", done.stdout, re.MULTILINE)
    found = re.search(r"MiB: (-?\d+) bytes a rollout; open files (\d+) → (\d+); temporary files (\d+) → (\d+)", done.stdout)
    assert count is not None
    assert found is not None, done.stdout
    assert int(count[1]) >= 20_000
    growth, opened, open_now, temporary, temporary_now = map(int, found.groups())
    assert growth < 1024, done.stdout
    # 25 of its own and a connection for each of 256 requests, of which not all may have been in flight at once by the first count.
    assert open_now <= max(opened, 25 + 256) + 2, done.stdout
    assert temporary_now <= temporary, done.stdout
    worker = re.search(r"^env_reverse_text_0: memory .* MiB: (-?\d+) bytes a rollout; open files (\d+) → (\d+)$", done.stdout, re.MULTILINE)
    assert worker is not None, done.stdout
    growth, opened, open_now = map(int, worker.groups())
    assert growth < 1024, done.stdout
    assert abs(open_now - opened) <= 2, done.stdout
