"""How a process of the plan is started on its host: as a process group on this machine, or as a step of a SLURM job.

The supervisor starts, watches and stops what a `Starter` gives it, always a local child process: the role itself, or the `srun` that
stands for it. Knows the command lines; knows nothing of when a process is started and what its end means.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from rlx.plan.environment import DEVICES, environment_of, inherited
from rlx.process import HOST, SUPERVISOR
from rlx.runs.jobs import ask
from rlx.types import ProcessSpec

NOT_FOR_STEPS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_DISTRIBUTION")
"""Variables of the job that `srun` would take for options of the step."""


class Starter(Protocol):
    """What the supervisor must be told of the place where processes run."""

    remote: bool  # whether the child process stands for one that may run elsewhere, so that its pid is not the role's

    def host(self, spec: ProcessSpec) -> str:
        """Name of the host a process runs on."""

    def command(self, spec: ProcessSpec, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """`(argv, environment)` of the child process that the supervisor starts; `environment`: what there is here to inherit."""

    def returncode(self, code: int) -> int:
        """The role's return code from the child's: negative for the signal that killed it."""

    def terminate(self) -> bool:
        """Ask all processes to end; False where the supervisor is to send its children SIGTERM."""

    def kill(self, names: Sequence[str]) -> None:
        """SIGKILL for processes of these names, where a signal to the child is not enough."""


class LocalStarter:
    """Processes on this machine: the child is the role."""

    remote = False

    def host(self, spec: ProcessSpec) -> str:
        return socket.gethostname()

    def command(self, spec: ProcessSpec, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        return list(spec.argv), {**environment_of(spec, environment), SUPERVISOR: str(os.getpid())}

    def returncode(self, code: int) -> int:
        return code

    def terminate(self) -> bool:
        return False

    def kill(self, names: Sequence[str]) -> None:
        """The supervisor kills the process groups itself."""


class SrunStarter:
    """Steps of the SLURM job that the supervisor runs in; their output comes through `srun`, so each log file has one writer."""

    remote = True

    def __init__(self, job_id: str, hosts: Sequence[str], gpus_per_node: int = 0, prefix: Sequence[str] = ()) -> None:
        """`job_id`: as `12`, or `12_5` for one of an array: `SLURM_JOB_ID` of its last one is `12`, which names all of them.

        `hosts`: the job's nodes in order. `prefix`: what stands before every command, as `apptainer exec IMAGE`."""
        self.job_id, self.hosts, self.gpus_per_node, self.prefix = job_id, tuple(hosts), gpus_per_node, tuple(prefix)

    def host(self, spec: ProcessSpec) -> str:
        return self.hosts[spec.node]

    def command(self, spec: ProcessSpec, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        step = [
            "srun",
            "--overlap",  # roles share the job's processors, memory and GPUs
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={self.host(spec)}",
            f"--job-name={spec.name}",
            "--kill-on-bad-exit=1",
            "--cpu-bind=none",
            "--mem=0",
            "--input=none",
            "--unbuffered",
            "--export=ALL",
        ]
        given = inherited(environment) | spec.env
        kept = {name: value for name, value in given.items() if name not in (*NOT_FOR_STEPS, SUPERVISOR)}
        return [*step, *self._choose_gpus(spec), *self.prefix, *spec.argv], {**kept, HOST: self.host(spec)}

    def _choose_gpus(self, spec: ProcessSpec) -> tuple[str, ...]:
        """SLURM names the job's GPUs on the host in CUDA_VISIBLE_DEVICES; the role sees those of them that the plan gives it.

        That value is known on the host where the step runs, so a shell there reads it.
        """
        if not spec.gpus:
            return ("env", f"{DEVICES}=")
        all_of_them = ",".join(map(str, range(self.gpus_per_node)))
        fields = ",".join(str(gpu + 1) for gpu in spec.gpus)
        script = f'{DEVICES}=$(echo "${{{DEVICES}:-{all_of_them}}}" | cut -d, -f{fields}) exec "$@"'
        return ("sh", "-c", script, spec.name)

    def returncode(self, code: int) -> int:
        return 128 - code if code > 128 else code  # srun, like a shell, answers 128 + the signal

    def terminate(self) -> bool:
        """By the controller: `srun` does not pass a signal on, it has the step killed without giving it time.

        SIGINT, because SIGTERM is what SLURM itself sends to steps, as a notice (`rlx.process.sigterm_is_a_notice`).
        """
        try:
            return ask("scancel", "--signal=INT", self.job_id).returncode == 0
        except RuntimeError:
            return False

    def kill(self, names: Sequence[str]) -> None:
        """`srun` itself dies without its step, so the step is killed by the controller."""
        try:
            listed = ask("squeue", "--noheader", "--steps", f"--jobs={self.job_id}", "--format=%i %j").stdout
            steps = [step for step, _, name in (line.partition(" ") for line in listed.splitlines()) if name.strip() in names]
            if steps:
                ask("scancel", "--signal=KILL", *steps)
        except RuntimeError as error:  # they end with the job
            print(f"steps are not killed: {error}", flush=True)

    def __repr__(self) -> str:
        return f"steps of job {self.job_id} on {', '.join(self.hosts)}" + (f" in {shlex.join(self.prefix)}" if self.prefix else "")
