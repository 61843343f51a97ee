"""The processes of `rlx synthesize`: those of any command that plays, or only its own role if it plays nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.plan.eval import plan_playing
from rlx.plan.specs import Specs
from rlx.types import ProcessSpec

ROLE = "synthesizer"


def plan_synthesis(cfg: SynthesizeRoot, specs: Specs) -> Iterator[ProcessSpec]:
    """The processes of a synthesis, in start order. Raises ConfigError if the layout needs more GPUs than the hosts have."""
    if cfg.play:
        yield from plan_playing(cfg, specs, ROLE)
    else:
        yield specs.one(ROLE)
