"""Runs Hydra's sweepers (Optuna, Ax, your own): the sweeper proposes runs, rlx launches them and returns their final rewards.

    rlx train -m hydra/sweeper=optuna hydra.sweeper.n_trials=20 hydra.sweeper.direction=maximize optim.lr=tag(log,interval(1e-4,1e-2))

The launcher that the sweeper gets is in `hydra_plugins/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf, open_dict

from rlx.config.errors import ConfigError
from rlx.config.search_path import make_sweep_loader
from rlx.config.sweeps import Sweep


def optimise(sweep: Sweep, directory: Path) -> int:
    """Run the sweeper `hydra/sweeper=NAME` to its end; return 0, or 1 if it stopped because of a failed run."""
    plugins = Plugins.instance()
    node = {"_target_": "hydra_plugins.rlx_launcher.RlxLauncher", "name": sweep.name, "directory": str(directory), "argv": list(sweep.argv)}
    ConfigStore.instance().store(group="hydra/launcher", name="rlx", node=node, provider="rlx")
    loader = make_sweep_loader(
        [part for option, part in zip(sweep.argv, sweep.argv[1:], strict=False) if option in ("--config-dir", "-cd")]
    )
    try:
        lines = [*sweep.options, "hydra/launcher=rlx", f"hydra.sweep.dir='{directory}'"]
        config = loader.load_configuration(config_name=None, overrides=lines, run_mode=RunMode.MULTIRUN)
    except HydraException as error:
        raise ConfigError(f"hydra/sweeper={sweep.sweeper}: {str(error).splitlines()[0]}\n  fix: install the sweeper's package") from None
    with open_dict(config):
        config.hydra.mode = RunMode.MULTIRUN
        OmegaConf.set_readonly(config, False)
    context = HydraContext(config_loader=loader, callbacks=None)  # type: ignore[arg-type] # callbacks are hydra's launchers' alone
    chosen = plugins.instantiate_sweeper(config=config, hydra_context=context, task_function=_not_called)
    try:
        chosen.sweep(arguments=list(sweep.params))
    except RuntimeError as error:  # sweepers raise the error that a failed run returned
        print(f"rlx: the sweep stopped: {error}")
        return 1
    return 0


def _not_called(cfg: Any) -> None:
    raise AssertionError("rlx's launcher starts processes, not functions")
