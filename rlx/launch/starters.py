"""Command lines that start a process of the plan: as a process group on this machine, as a step of a SLURM job, or in another pod.

The supervisor always starts, watches and stops a local child process. With `Starter` the child is the role itself; with
`SrunStarter` it is the `srun` that runs the role; with `AgentStarter` a child that an agent in the role's pod serves.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.launch.container import KEPT, RoleContainer
from rlx.plan.environment import DEVICES, OF_A_GROUP, environment_of, inherited
from rlx.plan.process_spec import ProcessSpec
from rlx.process import HOST, SUPERVISOR
from rlx.runs.host_commands import outside
from rlx.runs.jobs import ask, restarts_of

PROBE = 30  # seconds that a host has to start a step
LEAVE = 2  # seconds that `srun` has to give such a step up
TRIAL = "probe"  # the name of these steps
QUIET: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
NOT_FOR_STEPS = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_DISTRIBUTION"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET"),
)
"""Variables of the job that `srun` would read as options of the step."""


class Starter:
    """Starts processes on this machine: the child is the role. What differs elsewhere is overridden."""

    remote = False  # the role may run on another host, so the child's pid is not the role's

    def host(self, spec: ProcessSpec) -> str:
        """Name of the host on which a process runs."""
        return socket.gethostname()

    def command(self, spec: ProcessSpec, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """`(argv, environment)` of the child process that the supervisor starts. `environment`: the variables that it may inherit."""
        return list(spec.argv), {**environment_of(spec, environment), SUPERVISOR: str(os.getpid())}

    def returncode(self, code: int) -> int:
        """The role's return code, negative for the signal that killed it. Elsewhere the child returns 128 + the signal, like a shell."""
        return 128 - code if self.remote and code > 128 else code

    def terminate(self) -> bool:
        """Ask all processes to stop. Returns False if the supervisor must send SIGTERM to its children itself."""
        return False

    def kill(self, names: Sequence[str]) -> None:
        """SIGKILL the processes with these names, if a signal to the child is not enough."""

    def meaning_of_sigterm(self) -> str:
        """The run's state after a SIGTERM to the supervisor: `interrupted` or `preempted`."""
        return "interrupted"

    def lost_hosts(self) -> list[str]:
        """The hosts that do not answer. Asked when a process has failed."""
        return []


class SrunStarter(Starter):
    """Starts steps of the supervisor's SLURM job. Their output comes through `srun`, so each log file has one writer."""

    remote = True

    def __init__(
        self,
        job_id: str,
        hosts: Sequence[str],
        gpus_per_node: int = 0,
        prefix: Sequence[str] = (),
        container: RoleContainer | None = None,
        restarts: int = 0,
    ) -> None:
        """`job_id`: `12`, or `12_5` for an array task. Not `SLURM_JOB_ID`: for the last task that is `12`, which names the whole array.

        `hosts`: the job's nodes in order. `prefix`: words before every command, such as `numactl --localalloc`. `restarts`: how often the
        job had been requeued when this attempt began."""
        self.job_id, self.hosts, self.gpus_per_node, self.prefix = job_id, tuple(hosts), gpus_per_node, tuple(prefix)
        self.container, self.restarts = container, restarts
        self.started: set[str] = set()  # names of the steps

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
        self.started.add(spec.name)
        given = inherited(environment) | spec.env
        kept = {name: value for name, value in given.items() if name not in (*NOT_FOR_STEPS, SUPERVISOR)} | {HOST: self.host(spec)}
        command = [*self.prefix, *spec.argv]
        if self.container is None:
            return [*step, *self._choose_gpus(spec), *command], kept
        # The host's variables are those of the job's script. Of this process's own, the step gets what the supervisor adds to them.
        again = {name: kept[name] for name in (*KEPT, *spec.env) if name in kept}
        dropped = [word for name in (*NOT_FOR_STEPS, *OF_A_GROUP) for word in ("-u", name)]
        words = ["env", *dropped, *step, *self.container.options, *self._choose_gpus(spec), *self.container.around(command, again)]
        return outside(words, [name for name, value in kept.items() if os.environ.get(name) != value]), kept

    def lost_hosts(self, among: Sequence[str] | None = None) -> list[str]:
        """The hosts, other than this one, on which no step can be started. Asks all at once. `among`: asks these alone."""
        others = [
            host for host in (self.hosts if among is None else among) if host != os.environ.get("SLURMD_NODENAME", socket.gethostname())
        ]
        dropped = [word for name in NOT_FOR_STEPS for word in ("-u", name)]
        step = ["env", *dropped, "timeout", f"--kill-after={LEAVE}", str(PROBE), "srun", "--overlap", "--nodes=1", "--ntasks=1"]
        step += [f"--job-name={TRIAL}", "--cpu-bind=none", "--mem=0", "--input=none"]
        probes = [subprocess.Popen(outside([*step, f"--nodelist={host}", "true"]), **QUIET) for host in others]
        silent = [host for host, probe in zip(others, probes, strict=True) if probe.wait() != 0]
        if silent:  # else the step would start when the host answers again
            self.kill([TRIAL])
        return silent

    def meaning_of_sigterm(self) -> str:
        return "preempted" if restarts_of(self.job_id) > self.restarts else "interrupted"

    def _choose_gpus(self, spec: ProcessSpec) -> tuple[str, ...]:
        """Limit the role to the GPUs that the plan gives it, out of the job's GPUs in SLURM's CUDA_VISIBLE_DEVICES.

        SLURM sets that variable on the step's host, so a shell there reads it.
        """
        if not spec.gpus:
            return ("env", f"{DEVICES}=")
        all_of_them = ",".join(map(str, range(self.gpus_per_node)))
        fields = ",".join(str(gpu + 1) for gpu in spec.gpus)
        whole = "-s " if self.gpus_per_node > 1 else ""  # else `cut` takes the only GPU of a step that sees one for any
        script = f'{DEVICES}=$(echo "${{{DEVICES}:-{all_of_them}}}" | cut {whole}-d, -f{fields}) exec "$@"'
        return ("sh", "-c", script, spec.name)

    def terminate(self) -> bool:
        """Ask the controller to signal the steps: a signal to `srun` would have its step killed without grace time.

        Sends SIGINT, because SLURM itself sends SIGTERM to steps as a notice (`rlx.process.sigterm_is_a_notice`).
        """
        try:
            if self.container is not None:  # the supervisor is a step too
                return self._signal("INT", self.started)
            return ask("scancel", "--signal=INT", self.job_id).returncode == 0
        except RuntimeError:
            return False

    def kill(self, names: Sequence[str]) -> None:
        """Have the controller kill the steps, because killing `srun` does not kill its step."""
        try:
            self._signal("KILL", names)
        except RuntimeError as error:  # the steps end with the job
            print(f"could not kill the steps: {error}", flush=True)

    def _signal(self, signal: str, names: Collection[str]) -> bool:
        """Signal the steps with these names. Returns whether SLURM did; raises RuntimeError if it does not answer."""
        listed = ask("squeue", "--noheader", "--steps", f"--jobs={self.job_id}", "--format=%i %j").stdout
        steps = [step for step, _, name in (line.partition(" ") for line in listed.splitlines()) if name.strip() in names]
        return bool(steps) and ask("scancel", f"--signal={signal}", *steps).returncode == 0

    def __repr__(self) -> str:
        return f"steps of job {self.job_id} on {', '.join(self.hosts)}" + (f" in {self.container.cfg.image}" if self.container else "")


class AgentStarter(Starter):
    """Starts processes on the hosts of a run, through the agent on each (`rlx.launch.agents`)."""

    remote = True

    def __init__(self, hosts: Sequence[tuple[str, int]], token: Path, run_dir: Path) -> None:
        """`hosts`: name and port of each host's agent, in the plan's order. `token`: the file with the run's token."""
        self.hosts, self.token, self.run_dir = tuple(hosts), token, run_dir

    def host(self, spec: ProcessSpec) -> str:
        return self.hosts[spec.node][0]

    def command(self, spec: ProcessSpec, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        start = {"name": spec.name, "argv": list(spec.argv), "gpus": list(spec.gpus), "env": spec.env | {HOST: self.host(spec)}}
        order = {"at": self.hosts[spec.node], "token": str(self.token), "run": str(self.run_dir), "start": start}
        return [sys.executable, "-m", "rlx.launch.agents", json.dumps(order)], inherited(environment) | {SUPERVISOR: str(os.getpid())}

    def meaning_of_sigterm(self) -> str:
        return "preempted"  # the pod is evicted, drained or deleted: it does not say which
