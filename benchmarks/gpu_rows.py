"""The rows that the parts of `gpu.py` print, and how they measure. A row has a number or an error, never both and never neither."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LIBRARIES = ("torch", "triton", "transformers", "liger-kernel", "vllm")


@functools.cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def device_name() -> str:
    import torch

    if not torch.cuda.is_available():
        return "CPU"
    return f"{torch.cuda.get_device_name()} ({torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda})"


def reaches(number: float, goal: str) -> bool:
    """Whether a number reaches a goal: `>= 600`, `<= 1.2`, `== 0` or `0.75 to 1.33`."""
    operator, _, bound = goal.partition(" ")
    if operator in (">=", "<=", "=="):
        return {">=": number >= float(bound), "<=": number <= float(bound), "==": number == float(bound)}[operator]
    low, _, high = goal.partition(" to ")
    return float(low) <= number <= float(high)


def finished(
    part: str,
    what: str = "",
    shape: str = "",
    *,
    number: float | None = None,
    unit: str = "",
    goal: str | None = None,
    judged: bool = True,
    seconds: float = 0.0,
    peak_gib: float | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """A row. `judged`: whether its number may meet the goal, or miss it."""
    assert (number is None) != (error is None), (number, error)
    met = reaches(number, goal) if number is not None and goal is not None and judged else None
    row: dict[str, Any] = {"part": part, "what": what, "shape": shape, "number": number, "unit": unit, "goal": goal, "met": met}
    row |= {"seconds": round(seconds, 3), "peak_gib": peak_gib, "versions": versions(), "device": device_name()}
    return row if error is None else row | {"error": error}


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float  # median
    peak_gib: float | None  # None on CPU


class Report:
    """Prints the rows of one part."""

    def __init__(self, part: str, *, small: bool) -> None:
        import torch

        self.part, self.small = part, small
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32  # a CPU multiplies 16-bit matrices slowly
        self._began = time.monotonic()
        if not self.cuda:
            torch.set_num_threads(1)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def row(self, what: str, shape: str, number: float, unit: str, goal: str | None = None, *, exact: bool = False, **more: Any) -> None:
        """Print a row. The goal of an `exact` number holds at small sizes, too."""
        self._print(finished(self.part, what, shape, number=number, unit=unit, goal=goal, judged=exact or not self.small, **more))

    def error(self, what: str, shape: str, error: str) -> None:
        """Print a row that has no number."""
        self._print(finished(self.part, what, shape, error=error))

    @contextlib.contextmanager
    def attempt(self, what: str, shape: str) -> Iterator[None]:
        """A failure within becomes a row with its error, and the part goes on. Memory is free before and after."""
        self.clear()
        try:
            yield
        except Exception as error:  # of any library, and lack of memory
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:250]}"
            error.__traceback__ = None  # its frames hold tensors
            del error
            self.error(what, shape, text)
        finally:
            self.clear()

    def clear(self) -> None:
        import torch

        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def measure(self, work: Callable[[], Any], repeats: int = 5, warm: int = 1) -> Measured:
        """The median of some repetitions, after some that are not counted."""
        import torch

        seconds = []
        for number in range(warm + repeats):
            if self.cuda:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                start.record()
                work()
                end.record()
                torch.cuda.synchronize()
                took = start.elapsed_time(end) / 1e3
            else:
                began = time.perf_counter()
                work()
                took = time.perf_counter() - began
            if number >= warm:
                seconds.append(took)
        return Measured(statistics.median(seconds), self.peak())

    def peak(self) -> float | None:
        """Peak of memory on the device since `clear`, GiB."""
        import torch

        return torch.cuda.max_memory_allocated() / 2**30 if self.cuda else None

    def _print(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        row["seconds"], self._began = round(now - self._began, 3), now
        print(json.dumps(row), flush=True)
