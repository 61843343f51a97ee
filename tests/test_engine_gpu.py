"""Updates in flight of vLLM's engine on a GPU, over files: every token has the log-probability that its version gives.

What differs from a CPU: vLLM's second model runner, asynchronous scheduling and CUDA graphs. The reference is Hugging Face's forward on the
CPU. Nothing here needs the network. RLX_TEST_DEVICE=cpu tries this file without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from inference_server import KINDS, Run
from test_engine_flight import check_flight

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
DEVICE = os.environ.get("RLX_TEST_DEVICE", "cuda")
SHARE = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30} if DEVICE == "cuda" else {}


@pytest.fixture(params=["tied", "untied", "experts", "adapters"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, **KINDS[request.param], vllm=SHARE, device=DEVICE)
    run.start()
    try:
        run.ready()
        yield run
    finally:
        run.stop()


def test_every_token_in_flight_on_this_device_has_the_log_probability_of_its_version(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(check_flight(run))
