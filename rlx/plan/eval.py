"""The processes of the commands that only play: `rlx eval`.

prepare (a model that rlx makes) · inference × replicas (unless servers or an endpoint already run) · the command's own role
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.schema_eval import EvalRoot, PlayWithModel
from rlx.plan.place import place_servers
from rlx.plan.specs import Specs
from rlx.types import ProcessSpec


def plan_playing(cfg: PlayWithModel, specs: Specs, role: str) -> Iterator[ProcessSpec]:
    """The processes that play with a model, in start order. `role`: the one that plays; it runs on the first host.

    Raises ConfigError if the layout needs more GPUs than the hosts have.
    """
    places = place_servers(cfg)
    if cfg.model.prepared and cfg.weights_dir is None:
        yield specs.one("prepare", *((places[0][0], places[0][1][:1]) if places else (0, ())))
    yield from specs.servers(cfg, places)
    yield specs.one(role)


def plan_eval(cfg: EvalRoot, specs: Specs) -> Iterator[ProcessSpec]:
    """The processes of an evaluation."""
    return plan_playing(cfg, specs, "evaluator")
