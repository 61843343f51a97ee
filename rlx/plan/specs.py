"""Makes the `ProcessSpec`s of a plan: the command line and the environment that every process of a run has. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlx.config.schema import CommandConfig, PlayRoot
from rlx.plan.place import Place
from rlx.plan.record import ProcessSpec


@dataclass(frozen=True)
class Specs:
    """What the processes of one run have in common."""

    cfg: CommandConfig
    run_dir: Path
    python: str = sys.executable

    def one(
        self,
        role: str,
        node: int = 0,
        gpus: tuple[int, ...] = (),
        *,
        replica: int = 0,
        ports: dict | None = None,
        env: dict[str, str] | None = None,
        service: bool = False,
        module: str | None = None,
    ) -> ProcessSpec:
        """A process of `rlx/roles/<role>.py` on a host, with GPUs of that host.

        `module`: another file in `rlx/roles/` for this role.
        """
        hardware = self.cfg.hardware
        common = {
            "PYTHONUNBUFFERED": "1",
            "PYTHONUTF8": "1",  # whatever the locale of the host
            "PYTHONHASHSEED": str(self.cfg.seed % 2**32),
            "OMP_NUM_THREADS": str(hardware.cpu_threads),
            "MKL_NUM_THREADS": str(hardware.cpu_threads),
            "TOKENIZERS_PARALLELISM": "false",
            **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if hardware.device == "cuda" else {}),  # the order of nvidia-smi and SLURM
        }
        command = ("-m", f"rlx.roles.{module or role}", "--run-dir", str(self.run_dir))
        return ProcessSpec(
            role=role,
            replica=replica,
            node=node,
            gpus=gpus,
            ports=ports or {},
            env=common | (env or {}),
            argv=(self.python, *command, *(("--replica", str(replica)) if service else ())),
            service=service,
        )

    def servers(self, cfg: PlayRoot, places: Sequence[Place]) -> Iterator[ProcessSpec]:
        """The inference servers, and the processes that watch them."""
        for replica, (node, gpus) in enumerate(places):
            port = cfg.inference.port + replica if cfg.inference.port else 0
            yield self.one("inference", node, gpus, replica=replica, ports={"http": port}, service=True)
