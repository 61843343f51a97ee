"""`bench=true`: what each `bench_role` plans, what is refused, and the numbers and the table that a run's records give."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_configs import config
from main_job import ROOT

from rlx.cli.bench import rows_of
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.memory import trainer_memory
from rlx.envs.base import sampling_of
from rlx.inference.replica import ServerState, memory_of
from rlx.inference.wire import InferenceError, ServerUnreachable, TakenServer
from rlx.metrics import METRICS, read_metrics
from rlx.paths import RunPaths
from rlx.plan.explain import explain
from rlx.plan.make import make_plan
from rlx.runs.bench_summary import SPEEDS, STAGES, measured

RL, INFERENCE = ({"bench": True, "bench_role": role} for role in ("rl", "inference"))


@pytest.mark.parametrize(("keys", "says"), [
    (("bench_role=rl",), "nothing would be measured: bench_role=rl"),
    (("bench=true", "bench_role=rl", "eval.interval=2"), "a benchmark evaluates nothing"),
    (("bench=true", "bench_role=inference", "seq_len=64", "sampling.max_tokens=64"), "leaves no room for its random prompt"),
    (("bench=true", "bench_role=servers"), "bench_role"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(keys: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as found:
        compose(list(keys), {})
    assert says in " ".join(str(found.value).split())


def test_each_role_has_its_processes() -> None:
    def roles(**keys: Any) -> list[str]:
        return [spec.role for spec in make_plan(config("cpu", **keys), Path("/run"))]

    assert roles(bench=True) == ["trainer"]
    assert roles(**RL) == ["inference", "orchestrator", "trainer"]
    assert roles(**INFERENCE) == ["inference", "load_generator"]
    for keys in (RL, INFERENCE):
        cfg = config("cpu", **keys)
        text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
        assert ("trainer, each process" in text) == (keys is RL)


def test_servers_alone_leave_no_gpu_to_a_trainer() -> None:
    cfg = config("gpu2", **INFERENCE, hardware={"inference_replicas": 2})
    assert [spec.gpus for spec in make_plan(cfg, Path("/run")) if spec.role == "inference"] == [(0,), (1,)]
    assert cfg.num_gpus == 2


def test_answers_of_the_whole_loop_have_a_fixed_length_unless_told_otherwise() -> None:
    def fewest(**keys: Any) -> int:
        cfg = config("cpu", **keys)
        return sampling_of(cfg, cfg.envs["math"])["min_tokens"]

    assert fewest(**RL) == 6144
    assert fewest(**RL, bench_length="variable") == fewest() == 0
    assert not config("cpu", bench=True).publishes(10)
    assert config("cpu", **RL).publishes(10)


def records(steps: int) -> dict[str, dict[int, dict[str, Any]]]:
    """A step lasts longer the earlier it is. The trainer's last record has no partner: the run was ended."""
    trainer = {
        step: {
            "time/step": 10.0 - step, "perf/tokens_per_second": 100.0 * step, "time/wait_batch": 1.0, "time/forward_backward": 1.5,
            "time/optimizer": 0.5, "perf/tflops": 2.0, "perf/mfu": 0.4, "perf/mfu_causal": 0.3, "perf/compute_frac": 0.5,
            "off_policy/lag_mean": 1.0, "perf/peak_memory_gb": 2.0 + step, "perf/peak_memory_rank": 0.0,
        }
        for step in range(steps + 1)
    }  # fmt: skip
    orchestrator = {
        step: {
            "time/step": 8.0, "time/wait_rollouts": 2.0, "time/update_weights": 0.04, "perf/inference_tokens_per_second": 50.0,
            "perf/rollouts_per_second": 5.0, "length/completion_mean": 10.0, "perf/peak_memory_gb": 0.5, "perf/env_worker_memory_gb": 0.25,
        }
        for step in range(steps)
    }  # fmt: skip
    inference = {
        step: {
            "time/step": 2.0, "perf/kv_cache_usage": 0.5, "perf/running": 4.0, "perf/waiting": 1.0, "perf/preemptions": float(step),
            "perf/peak_memory_gb": 60.0, "perf/device_memory_gb": 80.0, "perf/inference_tokens_per_second": 70.0,
            "perf/prompt_tokens_per_second": 30.0, "perf/rollouts_per_second": 7.0, "perf/in_flight": 16.0, "time/rollout_mean": 3.0,
            "time/first_token": 0.125, "perf/tflops": 3.0,
        }
        for step in range(steps)
    }  # fmt: skip
    return {"trainer": trainer, "orchestrator": orchestrator, "inference": inference}


def words_of(found: dict[str, Any]) -> dict[str, str]:
    """The rows of the table by their labels."""
    return {label: " ".join(text.split()) for label, text in (re.split(r"  +", line.strip(), maxsplit=1) for line in rows_of(found))}


def test_the_whole_loop_in_numbers_and_as_a_table() -> None:
    cfg = config("gpu2", **RL)
    found = measured(cfg, records(6))
    assert (found["steps"], found["warmup"]) == (3, 3)
    assert found["seconds"]["trainer"]["step"] == 6.0
    assert (found["trained_tokens_per_second"], found["sampled_tokens_per_second"], found["preemptions"]) == (400.0, 50.0, 5.0)
    assert (found["mfu"], found["mfu_of_step"], found["tokens"]) == (0.4, 0.2, 800.0)
    assert found["memory"]["trainer"] == {"peak_gb": 8.0, "estimated_gb": trainer_memory(cfg).device / 2**30, "rank": 0}
    assert found["memory"]["inference"] == {"peak_gb": 60.0, "estimated_gb": pytest.approx(80 * cfg.inference.gpu_memory_utilization)}
    assert found["memory"]["environment worker"] == {"peak_gb": 0.25}
    rows = words_of(found)
    assert rows["wait for batch"] == "1 s 17%"
    assert rows["update servers"] == "40 ms 0%"
    assert rows["completions"] == "10 tokens"
    assert rows["MFU"] == "40.0%; 30.0% with causal attention"
    assert rows["trainer's memory"].startswith("8.0 GiB at the peak; the plan estimates ")
    json.dumps(found)


def test_servers_alone_in_numbers_and_as_a_table() -> None:
    found = measured(config("cpu", **INFERENCE), {"inference": records(4)["inference"]})
    assert (found["steps"], found["sampled_tokens_per_second"], found["first_token_seconds"]) == (1, 70.0, 0.125)
    assert "mfu" not in found, "a CPU has no known peak"
    assert found["memory"]["inference"]["estimated_gb"] > 0
    rows = words_of(found)
    assert rows["first token"] == "0.125 s alongside the load"
    assert rows["sampled"] == "70 tokens/s, 7 requests/s, 16 in flight"
    assert rows["TFLOP/s"] == "3 each device"
    assert rows["KV cache"] == "50% in use, 4 decoded, 1 queued, 3 preempted in the run"


def test_a_run_without_a_complete_step_has_no_numbers() -> None:
    with pytest.raises(ValueError, match="no step has a record of trainer and orchestrator"):
        measured(config("cpu", **RL), {"trainer": records(1)["trainer"]})


def test_every_metric_that_is_read_exists() -> None:
    read = {name for sources in SPEEDS.values() for names in sources.values() for name in names}
    assert read | {name for parts in STAGES.values() for name in parts} <= set(METRICS)


def test_operations_of_a_forward_are_those_counted_by_hand() -> None:
    from rlx.roles.load_generator import compute_of
    from rlx.train.flops import Flops

    flops = Flops(matrices=6 * 100.0, backward=4 * 100.0, attention=12.0 * 8, windows=(None, None))
    lengths, h100 = [3, 5], "NVIDIA H100 80GB HBM3"
    found = compute_of(flops, lengths, 2.0, [h100] * 2)
    by_hand = (2 * 100 * (3 + 5) + 2 * (4 * 8) * (3 * 3 + 5 * 5)) / 2.0 / 2  # 2·N a token; 4·d a pair and layer; 2 s, 2 devices
    assert found["perf/tflops"] == pytest.approx(by_hand / 1e12)
    assert found["perf/mfu"] == pytest.approx(by_hand / 989e12)
    causal = (2 * 100 * 8 + (4 * 8) * 34) / 2.0 / 2
    assert found["perf/mfu_causal"] == pytest.approx(causal / 989e12)
    assert memory_of([state_of(h100, 80)] * 2) == {"perf/peak_memory_gb": 1.0, "perf/device_memory_gb": 80.0}


def state_of(device: str = "", memory_gb: int = 0) -> ServerState:
    return ServerState("0@run", "model", 64, devices=({"device": device, "peak_memory": 1 << 30, "memory": memory_gb << 30},))


class Loaded:
    """Servers under the load. `error`: their state cannot be asked for."""

    def __init__(self, error: InferenceError | None = None) -> None:
        self.error = error
        self.now = self.most = 0
        self.asked: list[tuple[int, ...]] = []

    async def stats(self) -> dict[str, float]:
        if self.error:
            raise self.error
        names = ("kv_cache_usage", "running", "waiting", "preemptions", "answered", "servers")
        return {f"perf/{name}": 1.0 for name in names}

    async def states(self) -> list[ServerState]:
        if self.error:
            raise self.error
        return [state_of()]

    async def generate(self, prompt: list[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Any:
        load = request_id.startswith("load")
        self.now += load
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= load
        if load:
            self.asked.append((len(prompt), sampling["min_tokens"], sampling["max_tokens"], affinity))
        return SimpleNamespace(completion_ids=[0] * sampling["max_tokens"])


async def load(root: Path, servers: Any, steps: int, **orchestrator: int) -> None:
    from rlx.roles.load_generator import LoadGenerator
    from rlx.train.flops import Flops

    sizes = {"batch_size": 8, "rollouts_per_example": 4, **orchestrator}
    cfg = config("cpu", **INFERENCE, max_steps=steps, seq_len=24, sampling={"max_tokens": 8}, orchestrator=sizes)
    beat: Any = SimpleNamespace(progress=0, beat=lambda phase, step: None)
    await LoadGenerator(cfg, RunPaths(root), servers, servers, Flops(6.0, 4.0, 0.0, (None,)), beat).run()


async def test_the_load_keeps_its_number_of_requests_in_flight_and_records_every_step(tmp_path: Path) -> None:
    servers = Loaded()
    await load(tmp_path, servers, 3, max_concurrent=5)
    assert servers.most == 5
    assert sorted(servers.asked) == sorted((16, 8, 8, group) for group in range(6) for _ in range(4))
    found = [record for record, _ in read_metrics(RunPaths(tmp_path).metrics)]
    assert [(record["source"], record["step"]) for record in found] == [("inference", step) for step in range(3)]
    for record in found:
        assert record["perf/inference_tokens_per_second"] == pytest.approx(8 * 8 / record["time/step"])
        assert record["perf/prompt_tokens_per_second"] == pytest.approx(8 * 16 / record["time/step"])
    assert found[0]["time/first_token"] > 0
    names = {name for record in found for name in record} - {"step", "source", "time"}
    assert names <= set(METRICS)


@pytest.mark.parametrize("error", [ServerUnreachable("it starts again"), TakenServer("another run has it")])
async def test_a_server_that_starts_again_does_not_end_the_load_but_one_of_another_run_does(tmp_path: Path, error: InferenceError) -> None:
    with nullcontext() if isinstance(error, ServerUnreachable) else pytest.raises(TakenServer):
        await load(tmp_path, Loaded(error), 2)
    assert len(list(read_metrics(RunPaths(tmp_path).metrics))) == (2 if isinstance(error, ServerUnreachable) else 0)


def benchmark(root: Path, role: str, *keys: str) -> tuple[dict[str, Any], str]:
    """`bench.json` and what the command printed."""
    keys = ("bench=true", f"bench_role={role}", f"run.dir={root}/run", "model.warm_start.steps=1", *keys)
    command = [sys.executable, str(ROOT / "train.py"), *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((root / "run").glob("checkpoints/step_*"))
    found = json.loads((root / "run" / "bench.json").read_text())
    assert found["role"] == role
    return found, done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_real_benchmark_of_the_trainer_has_speed_stages_and_memory(tmp_path: Path) -> None:
    found, said = benchmark(tmp_path, "trainer", "max_steps=6", "orchestrator.batch_size=32", "seq_len=32", "sampling.max_tokens=12")
    assert (found["steps"], found["warmup"], found["ranks"]) == (3, 3, 1)
    assert found["tokens"] == pytest.approx(32 * 32)
    stages = found["seconds"]["trainer"]
    assert stages["step"] >= stages["forward and backward"] > stages["optimizer"] > 0
    assert "gather weights" not in stages
    weights = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384) + 105 * 128
    of_token = 6 * weights + 12 * 4 * 128 * 32
    assert found["tflops"] * 1e12 == pytest.approx(of_token * found["tokens_per_second"], rel=1e-6)
    assert "mfu" not in found, "a CPU has no known peak"
    memory = found["memory"]["trainer"]
    assert memory["peak_gb"] > memory["estimated_gb"] > 0, "the estimate is without Python and its libraries"
    for words in ("tokens/s", "TFLOP/s", "forward and backward", "optimizer", "the plan estimates", "bench.json"):
        assert words in said
    assert "warm start" not in said, "the speed on random tokens does not depend on what the model knows"
    assert not list((tmp_path / "run").glob("weights/step_*"))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("role", ["rl", "inference"])
def test_a_real_benchmark_with_servers_writes_its_numbers(tmp_path: Path, role: str) -> None:
    found, _ = benchmark(tmp_path, role, "max_steps=4", "orchestrator.batch_size=32")
    assert (found["steps"], found["warmup"]) == (1, 3)
    assert found["sampled_tokens_per_second"] > 0
    assert found["memory"]["inference"]["peak_gb"] > 0.1
    assert found["tflops"] > 0
    if role == "rl":
        assert found["tokens_per_rollout"] == 12, "sampling.max_tokens of the default run"
        assert list((tmp_path / "run").glob("weights/step_4"))
