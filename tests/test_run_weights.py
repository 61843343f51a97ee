"""Whole runs whose weights reach the servers without files: the same as over files."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from main_job import MainJob

from rlx.paths import COMPLETE

pytestmark = [pytest.mark.slow]
ON_POLICY = ("max_async_level=0", "orchestrator.batch_size=64", "model.dtype=float32")
GLOO = "weight_broadcast.type=gloo"


def test_over_gloo_a_run_is_the_same_as_over_files_bit_for_bit(start: Callable[..., MainJob]) -> None:
    keys = (*ON_POLICY, "max_steps=4", "ckpt.interval=null")
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
    assert log.count("compared 100.0 % of the served weights") == 4, log[-3000:]
