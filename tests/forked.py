"""Ranks of a test as forks of pytest's process, because importing takes longer than such a test."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import multiprocessing


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Run `work(rank, *args)` in a process for each rank. Raises what one of them raised.

    Threads do not survive a fork. A process group of an earlier test that were collected in the fork would wait for its thread for ever,
    so garbage is collected here, and the forks leave alone whatever else was made before them.
    """
    gc.collect()
    gc.freeze()
    multiprocessing.start_processes(work, args, nprocs=ranks, start_method="fork")
