"""Turns a configuration into the list of a run's processes, each with role, replica, host, GPUs, ports, environment and command.

Pure: the same configuration gives the same plan on any machine. Each command has its own plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlx.config.schema import CommandConfig, Config, SftRoot
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.plan.eval import plan_eval
from rlx.plan.rl import plan_training
from rlx.plan.specs import Specs
from rlx.plan.synthesize import plan_synthesis
from rlx.types import ProcessSpec

PLANS: dict[type, Callable[[Any, Specs], Iterator[ProcessSpec]]] = {  # a new command adds its plan here
    Config: plan_training,
    SftRoot: plan_training,
    EvalRoot: plan_eval,
    SynthesizeRoot: plan_synthesis,
}


def make_plan(cfg: CommandConfig, run_dir: Path, python: str = sys.executable) -> list[ProcessSpec]:
    """The processes of a run, in start order. Hosts, and the GPUs of each host, are numbered from 0.

    Raises ConfigError if the layout needs more GPUs than the hosts have.
    """
    return list(PLANS[type(cfg)](cfg, Specs(cfg, run_dir, python)))
