"""What becomes of a run, from what is seen of it: a pure function, so that every case is a line of a table in its test.

    View (who ended how, which notices and files are there)  →  decide  →  Verdict (go on, or a final state, who is to blame)

Where more is on its way (the server whose death explains a failed request, SLURM's signal to us) the verdict is `settle`: look again
soon; `View.waited` says for how long that has been the answer.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.runs.status import describe_returncode
from rlx.waiting import LEFT

SIGTERM_SPREADS = 3.0  # seconds in which a signal to a whole SLURM job reaches all of it
SETTLE = 1.0  # seconds in which a service's own death explains the failure of a process that used it


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of the plan, as it is now."""

    name: str  # of the plan: "trainer", "inference_0"
    service: bool  # it is to serve until the run ends
    code: int | None = None  # return code, negative for the signal that killed it; None: it runs
    look: int = 0  # the look at which its end was first seen; of an earlier end the number is smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a verdict needs to know. The names of files are those of `rlx.paths`."""

    processes: tuple[Process, ...] = ()
    remote: bool = False  # the processes are steps of a SLURM job, which SLURM sends signals too
    begun: bool = True  # a step of this attempt has left a record
    sigterm: str | None = None  # we were sent SIGTERM or SIGINT, which means `interrupted` or `preempted`; None: we were not
    notice: bool = False  # we were sent SIGUSR2: the machine will be taken away
    asked: bool = False  # the file preempt is there, whoever made it
    told: bool = False  # the roles have been told to give way
    overdue: float | None = None  # seconds that they had for it, once those are over
    left: bool = False  # `preempted.json` is there: the trainer has given way
    comes_back: bool = False  # SLURM has requeued the job already, whatever becomes of this attempt
    gone: str | None = None  # a process without which the run must not go on, and which has ended: the launcher
    hung: tuple[str, str] | None = None  # name of a process that gives no sign of life, and the same in words
    waited: float = 0.0  # seconds for which the verdict has been `settle`


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the supervisor is to do."""

    state: str | None = None  # the run's final state; None: it goes on
    blamed: str | None = None  # of a failure: name of the process, or "launcher"
    returncode: int | None = None  # of that process; None: it was not seen to end
    reason: str = ""  # of a failure, in words
    say: str = ""  # a line for the log
    settle: bool = False  # look again in a moment, and decide then
    give_way: bool = False  # tell the roles that they have `preempt_grace` seconds for a checkpoint
    comes_back: bool = False  # note that the job has been requeued


GO_ON = Verdict()
SETTLING = Verdict(settle=True)


def is_fine(process: Process, view: View) -> bool:
    """Whether the end of this process is part of the plan, or of giving way."""
    if not view.told:
        return process.code == 0 and not process.service
    if process.service or view.left or view.comes_back:
        return True  # a checkpoint needs no servers, and once it is there it needs nobody
    return process.code in (0, LEFT) or (view.remote and process.code == -signal.SIGTERM)


def decide(view: View) -> Verdict:
    """The verdict on what is seen. Of several things that are true at once the first one below counts."""
    workers = [process for process in view.processes if not process.service]
    codes = [process.code for process in workers]
    all_done = bool(workers) and None not in codes

    if view.sigterm is not None:
        if view.sigterm != "preempted":
            return Verdict(state=view.sigterm)
        if all_done and not view.told:
            return Verdict(state="preempted")  # their node had failed, and `srun` called that 0
        return Verdict(give_way=not view.told, comes_back=True)
    if not view.told and view.notice:
        return Verdict(give_way=True)
    if not view.told and view.asked:
        # A step of a SLURM job makes the file on SIGTERM; where the job is cancelled, we are sent one too.
        if view.remote and view.waited < SIGTERM_SPREADS:
            return SETTLING
        return Verdict(give_way=True, say="the file preempt is there")
    if view.told and not view.begun:
        return Verdict(state="preempted", say="no step was begun yet: there is nothing to keep")
    if view.overdue is not None:
        still = ", ".join(process.name for process in view.processes if process.code is None)
        return Verdict(state="preempted", say=f"{still} did not leave in {view.overdue:g} s")
    if view.gone is not None:
        return Verdict(state="failed", blamed="launcher", reason=f"{view.gone} was killed or died")

    failed = [process for process in view.processes if process.code is not None and not is_fine(process, view)]
    if failed:
        return _on_failure(failed, view)
    if view.told and not set(codes) <= {None, 0, LEFT} and not view.left:
        return Verdict(state="preempted")  # without that role there will be no checkpoint
    if all_done:
        # torchrun's ranks leave with 0, and say by the file that they left.
        if view.left or LEFT in codes:
            return Verdict(state="preempted")
        # `srun` says 0 of a step whose node has failed, too; then SLURM ends the job.
        return SETTLING if view.remote and view.waited < SIGTERM_SPREADS else Verdict(state="completed")
    if view.hung is not None:
        return Verdict(state="failed", blamed=view.hung[0], reason=view.hung[1])
    return GO_ON


def _on_failure(failed: list[Process], view: View) -> Verdict:
    """The failure that explains the others: of those seen first, a signal before an exit code, and a service before the rest.

    A process whose server dies fails on the request in flight, sometimes before the server is gone: that is waited for.
    And SLURM sends SIGTERM to the steps, or refuses to launch them, before it sends it to us: then nobody is to blame.
    """
    if view.remote and view.waited < SIGTERM_SPREADS:
        return SETTLING
    at_first = [process for process in failed if process.look == min(each.look for each in failed)]
    first = min(at_first, key=lambda process: (process.code is None or process.code >= 0, not process.service))
    if first.code is not None and first.code > 0 and not first.service:
        dead = next((process for process in failed if process.service), None)
        if dead is None and view.waited < SETTLE + (SIGTERM_SPREADS if view.remote else 0.0):
            return SETTLING
        first = dead or first
    code = first.code
    assert code is not None
    if view.remote and all(process.code == -signal.SIGTERM for process in at_first):  # some do not take it for a notice
        names = ", ".join(process.name for process in at_first)
        return Verdict(give_way=True, say=f"SLURM sent {names} SIGTERM: it wants the machine back")
    return Verdict(state="failed", blamed=first.name, returncode=code, reason=describe_returncode(code, first.service))


def find_hung(started: Mapping[str, float], beats: Mapping[str, Mapping[str, Any]], now: float, timeout: float) -> tuple[str, str] | None:
    """The first process that has given no sign of life for `timeout` seconds, and that in words; None: all do.

    `started`: seconds since the epoch by name, of those that still run. `beats`: the heartbeats there are (`rlx.heartbeat`).
    """
    for name, since in started.items():
        beat = beats.get(name, {})
        silent = now - max(since, beat.get("time", 0.0))
        if silent > timeout:
            doing = f"; its last word was: {beat['phase']}" if beat and beat["time"] >= since else ""
            return name, f"gave no sign of life for {silent:.0f} s (launcher.heartbeat_timeout={timeout:g}){doing}"
    return None
