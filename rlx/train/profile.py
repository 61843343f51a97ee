"""torch's profiler around chosen steps: `profile.steps=[10,12]` writes `profile/step_10_rank_0.json.gz`, for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.profiler import profile

from rlx.config.schema import TrainingRoot
from rlx.paths import RunPaths


@contextlib.contextmanager
def profiled(cfg: TrainingRoot, paths: RunPaths, step: int, rank: int) -> Iterator[None]:
    """Record the block's operators and kernels if the step is one of `profile.steps`, and write them. It costs time in that step."""
    if step not in cfg.profile.steps:
        yield
        return
    with profile(record_shapes=True) as recorded:
        yield
    paths.profile.mkdir(exist_ok=True)
    recorded.export_chrome_trace(str(paths.profile / f"step_{step}_rank_{rank}.json.gz"))
