"""Decides what happens to a run, from what the supervisor sees. A pure function, so each case is one line of a table in its test.

    View (exit codes, signals, files)  →  decide  →  Verdict (continue, or a final state and the process to blame)

The verdict is `settle` while more information may arrive: the death of the server that explains a failed request, or SLURM's signal to
the supervisor. The supervisor then looks again soon; `View.waited` is how long the verdict has been `settle`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlx.heartbeat import SERVING
from rlx.polling import LEFT
from rlx.runs.status import describe_returncode

SIGTERM_SPREADS = 3.0  # seconds that a signal to a whole SLURM job needs to reach all its processes
SETTLE = 1.0  # seconds to wait for the death of a service after a process that uses it has failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The current state of one process of the plan."""

    name: str  # from the plan: "trainer", "inference_0"
    service: bool  # it must serve until the run ends
    code: int | None = None  # return code, negative for the signal that killed it; None: it is running
    look: int = 0  # number of the look that first saw its exit; smaller means earlier
    spare: int = 0  # how often it may be started again; 0 also if it has not served since its last start, or runs and does not hang


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All inputs of a verdict. `rlx.paths` defines the files."""

    processes: tuple[Process, ...] = ()
    remote: bool = False  # the processes are steps of a SLURM job, and SLURM may signal them too
    begun: bool = True  # this attempt has written a metric record
    sigterm: str | None = None  # the supervisor got SIGTERM or SIGINT, which means `interrupted` or `preempted`; None: it got neither
    notice: bool = False  # the supervisor got SIGUSR2: the machine will be taken away
    asked: bool = False  # the file `preempt` exists
    told: bool = False  # the roles were told to write a checkpoint and leave
    overdue: float | None = None  # the `preempt_grace` seconds that the roles had, once these have passed; None before
    left: bool = False  # `preempted.json` exists: the trainer has written its checkpoint and left
    comes_back: bool = False  # SLURM has already requeued the job, however this attempt ends
    gone: str | None = None  # name of a watched process (the launcher) that has ended
    hung: tuple[str, str] | None = None  # name of a process without recent heartbeats, and the reason as text
    waited: float = 0.0  # seconds for which the verdict has been `settle`


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the supervisor must do."""

    state: str | None = None  # the run's final state; None: the run continues
    blamed: str | None = None  # name of the process that caused the failure, or "launcher"
    returncode: int | None = None  # of the blamed process; None: it has not exited
    reason: str = ""  # why the run failed
    say: str = ""  # a line for the log
    settle: bool = False  # look again soon and decide then
    again: tuple[str, ...] = ()  # names of the services to start again
    kill: str | None = None  # name of a service that hangs, for `reason`; once it is dead, it is started again
    give_way: bool = False  # tell the roles that they have `preempt_grace` seconds for a checkpoint
    comes_back: bool = False  # record that the job has been requeued


GO_ON = Verdict()
SETTLING = Verdict(settle=True)


def is_fine(process: Process, view: View) -> bool:
    """Whether the exit of this process is expected: its work is done, or it left because of a preemption."""
    if not view.told:
        return process.code == 0 and not process.service
    if process.service or view.left or view.comes_back:
        return True  # writing a checkpoint needs no server, and after it no process is needed
    return process.code in (0, LEFT) or (view.remote and process.code == -signal.SIGTERM)


def may_start_again(process: Process, view: View) -> bool:
    """Whether a process that has ended may be started again.

    Only a service that has served, because one that cannot even start would fail again. Not if SLURM sent SIGTERM: then SLURM wants the
    machine back.
    """
    return process.spare > 0 and not (view.remote and process.code == -signal.SIGTERM)


def decide(view: View) -> Verdict:
    """The verdict on a view. If several cases apply, the first one below wins."""
    if view.sigterm == "interrupted" and view.begun and not view.remote:  # a user's: keep what was trained, as a preemption does
        if not view.told:
            return Verdict(give_way=True)
        found = decide(replace(view, sigterm=None))
        return replace(found, state="interrupted") if found.state == "preempted" else found
    workers = [process for process in view.processes if not process.service]
    codes = [process.code for process in workers]
    all_done = bool(workers) and None not in codes

    if view.sigterm is not None:
        if view.sigterm != "preempted":
            return Verdict(state=view.sigterm)
        if all_done and not view.told:
            return Verdict(state="preempted")  # their node failed, and `srun` returned 0
        return Verdict(give_way=not view.told, comes_back=True)
    if not view.told and view.notice:
        return Verdict(give_way=True)
    if not view.told and view.asked:
        # A SLURM step creates the file on SIGTERM. If the job was cancelled, the supervisor gets a SIGTERM too: wait for it.
        if view.remote and view.waited < SIGTERM_SPREADS:
            return SETTLING
        return Verdict(give_way=True, say="the file preempt exists")
    if view.told and not view.begun:
        return Verdict(state="preempted", say="no step has begun: there is no progress to save")
    if view.overdue is not None:
        still = ", ".join(process.name for process in view.processes if process.code is None)
        return Verdict(state="preempted", say=f"{still} did not leave in {view.overdue:g} s")
    if view.gone is not None:
        return Verdict(state="failed", blamed="launcher", reason=f"{view.gone} was killed or died")

    failed = [process for process in view.processes if process.code is not None and not is_fine(process, view)]
    if failed and not all_done and all(may_start_again(process, view) for process in failed):
        # SLURM signals the steps before it signals the supervisor; so wait for that signal.
        return SETTLING if view.remote and view.waited < SIGTERM_SPREADS else Verdict(again=tuple(process.name for process in failed))
    if failed:
        return _on_failure(failed, view)
    if view.told and not set(codes) <= {None, 0, LEFT} and not view.left:
        return Verdict(state="preempted")  # a worker failed, so no checkpoint will come
    if all_done:
        if LEFT in codes:
            return Verdict(state="preempted")
        # `srun` also returns 0 if the step's node has failed; SLURM then ends the job.
        return SETTLING if view.remote and view.waited < SIGTERM_SPREADS else Verdict(state="completed")
    if view.hung is not None:
        name, reason = view.hung
        if any(process.name == name and process.spare > 0 for process in view.processes):
            return Verdict(kill=name, reason=reason)
        return Verdict(state="failed", blamed=name, reason=reason)
    return GO_ON


def _on_failure(failed: list[Process], view: View) -> Verdict:
    """Blame the failure that explains the others: among those seen first, a signal before an exit code, and a service before the rest.

    The end of a process on another host comes late: one that was killed there counts as seen first whenever its end arrives.

    If a server dies, its client fails on the request in flight, sometimes before the server has exited; so wait for the server's exit.
    SLURM signals the steps, or refuses to launch them, before it signals the supervisor; so wait for that signal, which blames nobody.
    """
    if view.remote and view.waited < SIGTERM_SPREADS:
        return SETTLING
    earliest = min(process.look for process in failed)
    at_first = [process for process in failed if process.look == earliest or (view.remote and process.code == -signal.SIGKILL)]
    first = min(at_first, key=lambda process: (process.code is None or process.code >= 0, not process.service, process.look))
    if first.code is not None and first.code > 0 and not first.service:
        dead = next((process for process in failed if process.service), None)
        if dead is None and view.waited < SETTLE + (SIGTERM_SPREADS if view.remote else 0.0):
            return SETTLING
        first = dead or first
    code = first.code
    assert code is not None
    if view.remote and all(process.code == -signal.SIGTERM for process in at_first):  # some processes do not handle it as a notice
        names = ", ".join(process.name for process in at_first)
        return Verdict(give_way=True, say=f"SLURM sent {names} SIGTERM: it wants the machine back")
    return Verdict(state="failed", blamed=first.name, returncode=code, reason=describe_returncode(code, first.service))


def find_hung(
    silent: Mapping[str, float], beats: Mapping[str, Mapping[str, Any]], timeout: float, serving: float | None = None
) -> tuple[str, str] | None:
    """Name of the first process without a heartbeat for `timeout` seconds, and the reason as text; `None` if there is none.

    `silent`: name → seconds since its newest heartbeat, or since its start if it has sent none; of the running processes.
    `beats`: name → heartbeat (`rlx.heartbeat`). `serving`: the seconds for a server that serves, if they are fewer.
    """
    for name, seconds in silent.items():
        phase = beats[name]["phase"] if name in beats else None
        limits = {"launcher.heartbeat_timeout": timeout}
        if phase == SERVING and serving is not None:
            limits["inference.hung_timeout"] = serving
        limit, key = min((value, key) for key, value in limits.items())
        if seconds > limit:
            return name, f"sent no heartbeat for {seconds:.0f} s ({key}={limit:g})" + (f"; last reported phase: {phase}" if phase else "")
    return None
