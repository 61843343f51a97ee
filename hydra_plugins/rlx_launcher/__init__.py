"""The launcher for hydra's sweepers: they propose runs, rlx launches them and returns each run's final reward.

It is here because hydra loads plugins only from `hydra_plugins`. `rlx/cli/sweep.py` runs each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from rlx.cli import sweep as runs
from rlx.cli.commands import TRAIN
from rlx.config.errors import ConfigError
from rlx.config.sweeps import Line, element_name
from rlx.runs.history import final_reward


class RlxLauncher(Launcher):
    """Hydra creates it from the node `hydra.launcher`, which `rlx.cli.sweeper` sets."""

    def __init__(self, name: str, directory: str, argv: Sequence[str]) -> None:
        """`name` and `directory`: of the sweep. `argv`: the arguments that all its runs share."""
        self.name, self.directory, self.argv = name, Path(directory), tuple(argv)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch to its end and return each run's final reward. A run that is not completed returns a RuntimeError."""
        proposed = [Line(element_name(each), tuple(each), (*self.argv, *each)) for each in job_overrides]
        lines = list({line.name: line for line in proposed}.values())  # equal proposals run once
        if len(lines) < len({line.swept for line in proposed}):
            names = sorted({line.name for line in proposed if any(line.name == o.name and line.swept != o.swept for o in proposed)})
            raise ConfigError(
                f"the sweeper proposed different runs with the same directory: {', '.join(names)}.\n  fix: let it propose other values"
            )
        elements = runs.checked(lines, self.directory, TRAIN)
        if any(element.cfg.dry_run for element in elements):
            raise ConfigError(
                "dry_run=true does not work with hydra's sweepers: their proposals depend on the rewards of earlier runs.\n"
                "  fix: dry_run=true for one run, without hydra/sweeper="
            )
        runs.start(elements, self.name, self.directory, wait=True)
        of = {element.name: element for element in elements}
        returns = []
        for line in proposed:
            element = of[line.name]
            state, answer = runs.state_of(element), JobReturn(overrides=list(line.swept), working_dir=str(element.paths.root))
            completed = state == "completed"
            answer.status = JobStatus.COMPLETED if completed else JobStatus.FAILED
            answer.return_value = final_reward(element.paths) if completed else RuntimeError(f"{element.paths.root}: {state}")
            returns.append(answer)
        return returns
