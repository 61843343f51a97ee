"""Whether a completed run has done all that a configuration asks for. A sweep that is started again skips such runs."""

from __future__ import annotations

import json

from rlx.config.schema import CommandConfig
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.metrics import read_metrics
from rlx.paths import RunPaths
from rlx.rollout.synthesized import METADATA
from rlx.runs.status import Status


def has_done(paths: RunPaths, status: Status | None, cfg: CommandConfig) -> bool:
    """Whether the run in a directory is completed and `cfg` asks for nothing more. `status`: the directory's.

    The number of steps tells it of a training run. An evaluation may be asked for other versions, and a synthesis for other rollouts or
    another choice; what they have done is in their own files, because a resume that has not begun yet has changed `config.yaml` already.
    """
    if status is None or status.state != "completed":
        return False
    if isinstance(cfg, EvalRoot):
        done = {record["step"] for record, _ in read_metrics(paths.metrics) if record["source"] == "eval"}
        return bool(done) and (cfg.weights_dir is None or done.issuperset(cfg.versions))  # servers of others have any one version
    if isinstance(cfg, SynthesizeRoot):
        return _written(paths, cfg) in (cfg.asked, cfg.asked | {"play": True})
    return status.max_steps >= cfg.total_steps


def _written(paths: RunPaths, cfg: SynthesizeRoot) -> object:
    """What was asked for when the data of a synthesis were written; None if that is not known."""
    try:
        return json.loads(paths.synthesized(cfg.format).with_name(METADATA).read_text()).get("asked")
    except (OSError, ValueError):
        return None
