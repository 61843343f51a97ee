"""The numbers of a benchmark (`bench=true`), from the records of its run and the estimates of its configuration: `bench.json`.

Each number is the median over the steps, without the first ones, which allocate and compile. A metric that no record has is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.config.memory import engine_memory, kv_cache_bytes, trainer_memory
from rlx.config.schema import PlayRoot, TrainingRoot

Record = Mapping[str, Any]
Records = Mapping[str, Mapping[int, Record]]  # by source and step

WARMUP = 3  # steps that are not counted, if there are more: they allocate and compile
GATHERED = "time/broadcast"  # only the whole run publishes weights
BESIDE = "update servers"  # while rollouts are played, or, on policy, while they wait
STAGES: dict[str, dict[str, str]] = {  # what a step of each source consists of: metric -> name in the table
    "trainer": {
        "time/wait_batch": "wait for batch",
        "time/forward_backward": "forward and backward",
        "time/optimizer": "optimizer",
        GATHERED: "gather weights",
    },
    "orchestrator": {
        "time/wait_rollouts": "wait for rollouts",
        "time/wait_weights": "wait for weights",
        "time/teacher": "wait for the teacher",
        "time/update_weights": BESIDE,
    },
}
SPEEDS: dict[str, dict[str, dict[str, str]]] = {  # of a benchmark and a source: metric -> name in `bench.json`
    "trainer": {
        "trainer": {
            "perf/tokens_per_second": "tokens_per_second",
            "perf/tflops": "tflops",
            "perf/mfu": "mfu",
            "perf/mfu_causal": "mfu_causal",
        },
    },
    "rl": {
        "trainer": {
            "perf/tokens_per_second": "trained_tokens_per_second",
            "perf/tflops": "tflops",
            "perf/mfu": "mfu",
            "perf/mfu_causal": "mfu_causal",
            "perf/compute_frac": "trainer_compute_share",
            "perf/imbalance": "imbalance",
            "off_policy/lag_mean": "lag",
        },
        "orchestrator": {
            "perf/inference_tokens_per_second": "sampled_tokens_per_second",
            "perf/rollouts_per_second": "rollouts_per_second",
            "perf/in_flight": "in_flight",
            "length/completion_mean": "tokens_per_rollout",
        },
        "inference": {"perf/kv_cache_usage": "kv_cache_usage", "perf/running": "running", "perf/waiting": "waiting"},
    },
    "inference": {
        "inference": {
            "perf/inference_tokens_per_second": "sampled_tokens_per_second",
            "perf/prompt_tokens_per_second": "prompt_tokens_per_second",
            "perf/rollouts_per_second": "rollouts_per_second",
            "perf/tflops": "tflops",
            "perf/mfu": "mfu",
            "perf/mfu_causal": "mfu_causal",
            "perf/in_flight": "in_flight",
            "perf/kv_cache_usage": "kv_cache_usage",
            "perf/running": "running",
            "perf/waiting": "waiting",
            "time/rollout_mean": "request_seconds",
            "time/first_token": "first_token_seconds",
        },
    },
}


def measured(cfg: TrainingRoot, records: Records) -> dict[str, Any]:
    """The numbers of `bench.json`. Raises ValueError if no step is complete."""
    role = cfg.bench_target
    assert role is not None
    sources = ("trainer", "orchestrator") if role == "rl" else (cfg.progress_source,)
    steps = sorted(set.intersection(*(set(records.get(source, {})) for source in sources)))
    if not steps:
        raise ValueError(f"no step has a record of {' and '.join(sources)}; the run must complete one")
    counted = steps[WARMUP if len(steps) > WARMUP else 0 :]

    def median(source: str, name: str) -> float | None:
        found = [records[source][step] for step in counted if step in records.get(source, {})]
        values = [record[name] for record in found if name in record]
        return statistics.median(values) if values else None

    speeds = {label: median(source, name) for source, names in SPEEDS[role].items() for name, label in names.items()}
    found: dict[str, Any] = {
        "role": role,
        "model": cfg.model.name,
        "seq_len": cfg.seq_len,
        "steps": len(counted),
        "warmup": len(steps) - len(counted),
        **{label: value for label, value in speeds.items() if value is not None},
    }
    if role != "inference":
        found |= {"ranks": cfg.trainer_ranks, "row_tokens": cfg.micro_batch_tokens, "tokens": _tokens(records["trainer"], counted)}
    if role != "trainer":
        found |= {"servers": cfg.started_servers, "preemptions": _highest(records.get("inference", {}), "perf/preemptions")}
    for name in ("mfu", "mfu_causal"):
        if role == "rl" and name in found:  # of the whole step, in which the trainer also waits
            found[f"{name}_of_step"] = found[name] * found["trainer_compute_share"]
    found["seconds"] = {
        source: {"step": median(source, "time/step")}
        | {
            label: value
            for name, label in STAGES.get(source, {}).items()
            if (name != GATHERED or role == "rl") and (value := median(source, name)) is not None
        }
        for source in sources
    }
    return found | {"memory": _memory(cfg, role, records)}


def _tokens(records: Mapping[int, Record], counted: Sequence[int]) -> float:
    """Tokens that the trainer computes in a step."""
    steps = [records[step] for step in counted]
    return statistics.median(each["perf/tokens_per_second"] * (each["time/forward_backward"] + each["time/optimizer"]) for each in steps)


def _highest(records: Mapping[int, Record], name: str) -> float | None:
    return max((record[name] for record in records.values() if name in record), default=None)


def _memory(cfg: TrainingRoot, role: str, records: Records) -> dict[str, dict[str, float]]:
    """GiB at the peak of each role, and what the plan estimates where it does."""
    estimates = {"trainer": trainer_memory(cfg).device / 2**30 if role != "inference" else None}
    if role != "trainer" and isinstance(cfg, PlayRoot):
        estimates["inference"] = _of_server(cfg, _highest(records.get("inference", {}), "perf/device_memory_gb"))
    found: dict[str, dict[str, float]] = {}
    for source in ("trainer", "inference", "orchestrator"):
        peak, estimate = _highest(records.get(source, {}), "perf/peak_memory_gb"), estimates.get(source)
        if peak is not None:
            found[source] = {"peak_gb": peak} | ({"estimated_gb": estimate} if estimate is not None else {})
    if "trainer" in found:
        highest = max(records["trainer"].values(), key=lambda record: record["perf/peak_memory_gb"])
        found["trainer"]["rank"] = int(highest["perf/peak_memory_rank"])
    worker = _highest(records.get("orchestrator", {}), "perf/env_worker_memory_gb")
    return found | ({"environment worker": {"peak_gb": worker}} if worker is not None else {})


def _of_server(cfg: PlayRoot, card: float | None) -> float | None:
    """GiB that a server is to take: on CUDA its share of the card, on a CPU weights and cache, beside what Python and torch take."""
    if cfg.hardware.device == "cuda":
        return cfg.inference.gpu_memory_utilization * card if card is not None else None
    return (engine_memory(cfg).weights + kv_cache_bytes(cfg)) / 2**30
