"""What surrounds the trainer's loop in its process: command line, signals, log, threads."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rlx.config.schema import TrainingRoot
from rlx.parallel.rendezvous import Place
from rlx.paths import RunPaths
from rlx.process import die_with_parent, importing, keep_freed_memory, set_cpu_threads, sigterm_is_a_notice
from rlx.stack_dump import answer

C = TypeVar("C", bound=TrainingRoot)
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads both


def allocator_variables(cfg: TrainingRoot, present: Mapping[str, str]) -> dict[str, str]:
    """What torch's CUDA allocator needs to hear before torch is imported; nothing if the user has told it something.

    Rows differ in length from step to step, so blocks of fixed size leave gaps that nothing fits into. Segments that grow do not. Weights
    that servers map from this process (`weight_broadcast.type=ipc`) stay in ordinary segments.
    """
    if cfg.hardware.device != "cuda" or cfg.transfer == "ipc" or any(present.get(name) for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def begin(name: str, doc: str | None, read: Callable[[Path], C]) -> tuple[C, RunPaths, Place]:
    """Set up the process of one rank, whose command line is `python -m NAME --run-dir DIR`, and load torch.

    A signal to stop ends the process at once; a SIGTERM that announces a preemption is noted in the run directory.
    `read`: reads the configuration of the run directory. Raises ValueError if the number of ranks is not the configured one.
    """
    die_with_parent()
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=doc)
    parser.add_argument("--run-dir", type=Path, required=True)
    paths = RunPaths(parser.parse_args().run_dir)

    def stop(number: int, _: object) -> None:
        if number == signal.SIGTERM and sigterm_is_a_notice():
            paths.ask_to_give_way()
        else:
            os._exit(128 + number)  # nothing to clean up: files are written atomically

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    cfg = read(paths.root)
    place = Place.of(os.environ)
    answer(paths, place.name)
    logging.basicConfig(level="WARNING" if place.rank else "INFO", format="%(asctime)s trainer %(message)s", stream=sys.stdout)
    set_cpu_threads(cfg.hardware.cpu_threads)
    if place.world_size != cfg.trainer_ranks:
        raise ValueError(f"{place.world_size} trainer processes were started, but hardware.trainer_processes requires {cfg.trainer_ranks}")

    os.environ |= allocator_variables(cfg, os.environ)
    with importing():
        import torch

        import rlx.models.load  # noqa: F401
        import rlx.train.checkpoint  # noqa: F401  (with these come transformers and all large parts of torch)

    set_cpu_threads(cfg.hardware.cpu_threads)  # torch is loaded now
    if cfg.hardware.device == "cpu":
        keep_freed_memory()
        torch.use_deterministic_algorithms(True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  a debugging aid that costs time
    return cfg, paths, place
