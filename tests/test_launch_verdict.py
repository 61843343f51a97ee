"""What the supervisor concludes from what it sees of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from toy_run import FOREVER, toy

from rlx.heartbeat import Ages, in_phase
from rlx.launch.children import Children
from rlx.launch.starters import Starter
from rlx.launch.verdict import GO_ON, SETTLING, Process, Verdict, View, decide, find_hung
from rlx.polling import LEFT

LATE = {"waited": 10.0}  # seconds; the verdict no longer waits for more information
COMPLETED = Verdict(state="completed")
PREEMPTED = Verdict(state="preempted")


def seen(
    trainer: int | None = None, orchestrator: int | None = None, inference: int | None = None, *, order: str = "", spare: int = 0
) -> View:
    """A run with these return codes. `order`: initials of the processes in order of exit; by default one look sees all exits.

    `spare`: how often the server may be started again."""

    def look(name: str, code: int | None) -> int:
        return 0 if code is None else 1 + (order.index(name[0]) if order else 0)

    return View(
        processes=(
            Process(name="inference_0", service=True, code=inference, look=look("inference", inference), spare=spare),
            Process(name="orchestrator", service=False, code=orchestrator, look=look("orchestrator", orchestrator)),
            Process(name="trainer", service=False, code=trainer, look=look("trainer", trainer)),
        )
    )


def failed(blamed: str, code: int | None, reason: str) -> Verdict:
    return Verdict(state="failed", blamed=blamed, returncode=code, reason=reason)


ONE = failed("trainer", 1, "exit code 1")
CRASH = "killed by SIGSEGV"
AGAIN = Verdict(again=("inference_0",))
KILLED = "killed by SIGKILL (by a user, or because memory ran out: see `dmesg`)"
WANTED_BACK = "SLURM sent inference_0 SIGTERM: it wants the machine back"
EARLY = "exited early with exit code 0; it must serve until the run ends"
NOTHING = "no step has begun: there is no progress to save"
CASES = [
    # the run continues
    ("all run", seen(), {}, GO_ON),
    ("one of two is done", seen(0), {}, GO_ON),
    ("told, and they write the checkpoint", seen(), {"told": True}, GO_ON),
    ("told, and one has left", seen(orchestrator=LEFT), {"told": True}, GO_ON),
    ("told, and the server has ended: a checkpoint needs none", seen(inference=1), {"told": True}, GO_ON),
    ("told, and requeued: any process may end", seen(inference=-9), {"told": True, "comes_back": True}, GO_ON),
    # the run ends
    ("all workers are done", seen(0, 0), {}, COMPLETED),
    ("steps of a job are done: did their node fail?", seen(0, 0), {"remote": True}, SETTLING),
    ("no: no signal came", seen(0, 0), {"remote": True, **LATE}, COMPLETED),
    ("yes: the job is requeued", seen(0, 0), {"remote": True, "waited": 1.0, "sigterm": "preempted"}, PREEMPTED),
    ("the launcher is gone", seen(), {"gone": "submitit"}, failed("launcher", None, "submitit was killed or died")),
    ("a process is silent", seen(), {"hung": ("trainer", "sent no heartbeat")}, failed("trainer", None, "sent no heartbeat")),
    ("a server that may start again hangs", seen(spare=1), {"hung": ("inference_0", "hangs")}, Verdict(kill="inference_0", reason="hangs")),
    ("hangs, and may not start again", seen(), {"hung": ("inference_0", "hangs")}, failed("inference_0", None, "hangs")),
    ("silent, but already done", seen(0, 0), {"hung": ("trainer", "sent no heartbeat")}, COMPLETED),
    # a failure, and who is blamed
    ("an exit code: did a server die?", seen(7), {}, SETTLING),
    ("no server died", seen(7), LATE, failed("trainer", 7, "exit code 7")),
    ("the server died after it", seen(inference=2, orchestrator=1, order="oi"), {}, failed("inference_0", 2, "exit code 2")),
    ("both in one look: the service first", seen(1, inference=1), {}, failed("inference_0", 1, "exit code 1")),
    ("both in one look: a signal before an exit code", seen(1, -11), {}, failed("orchestrator", -11, CRASH)),
    ("the first of two deaths", seen(3, 4, order="to"), LATE, failed("trainer", 3, "exit code 3")),
    ("a service exits with 0", seen(inference=0), {}, failed("inference_0", 0, EARLY)),
    ("a role leaves although nobody told it to", seen(LEFT), LATE, failed("trainer", LEFT, f"exit code {LEFT}")),
    ("told, but it fails", seen(1), {"told": True, **LATE}, ONE),
    ("told, and the stopped server is not to blame", seen(1, inference=0), {"told": True, **LATE}, ONE),
    # a server that has served starts again
    ("a server was killed", seen(inference=-9, spare=2), {}, AGAIN),
    ("its engine died", seen(inference=1, spare=1), {}, AGAIN),
    ("it left with 0", seen(inference=0, spare=1), {}, AGAIN),
    ("it was started again often enough, or never served", seen(inference=-9), {}, failed("inference_0", -9, KILLED)),
    ("another process failed, too", seen(1, inference=-9, spare=2), {}, failed("inference_0", -9, KILLED)),
    ("the orchestrator is done, the trainer is not", seen(None, 0, -9, spare=2), {}, AGAIN),
    ("a step's server: is SLURM stopping the job?", seen(inference=-9, spare=2), {"remote": True}, SETTLING),
    ("it is not", seen(inference=-9, spare=2), {"remote": True, **LATE}, AGAIN),
    ("SLURM's notice killed the server", seen(inference=-15, spare=2), {"remote": True, **LATE}, Verdict(give_way=True, say=WANTED_BACK)),
    ("a server killed by SIGTERM on this machine", seen(inference=-15, spare=2), {}, AGAIN),
    ("told to leave: no server is needed", seen(inference=-9, spare=2), {"told": True}, GO_ON),
    ("Ctrl-C, while a server is dead", seen(inference=-9, spare=2), {"sigterm": "interrupted"}, Verdict(give_way=True)),
    # in a SLURM job, SLURM may be the cause
    ("a step fails: is SLURM stopping the job?", seen(1), {"remote": True}, SETTLING),
    ("a step's server fails: the same question", seen(inference=-9), {"remote": True}, SETTLING),
    ("a step fails: did its server die?", seen(1), {"remote": True, "waited": 3.5}, SETTLING),
    ("SLURM is not stopping it", seen(1), {"remote": True, **LATE}, ONE),
    (
        "a step was killed, and word of it came after that of its peer",
        seen(1, -9, order="to"),
        {"remote": True, **LATE},
        failed("orchestrator", -9, KILLED),
    ),
    ("the same on this machine, where both are seen at once", seen(1, -9, order="to"), LATE, ONE),
    ("SLURM is stopping it: cancelled", seen(-15), {"remote": True, "waited": 1.0, "sigterm": "interrupted"}, Verdict(state="interrupted")),
    (
        "SLURM's notice killed a step",
        seen(-15),
        {"remote": True, **LATE},
        Verdict(give_way=True, say="SLURM sent trainer SIGTERM: it wants the machine back"),
    ),
    ("a local process is killed by SIGTERM", seen(-15), {}, failed("trainer", -15, "killed by SIGTERM")),
    # signals and files that ask the run to stop
    ("Ctrl-C", seen(), {"sigterm": "interrupted"}, Verdict(give_way=True)),
    ("Ctrl-C before the first step", seen(), {"sigterm": "interrupted", "begun": False}, Verdict(state="interrupted")),
    ("Ctrl-C, and the checkpoint is being written", seen(), {"sigterm": "interrupted", "told": True}, GO_ON),
    ("Ctrl-C, and all have left", seen(LEFT, LEFT), {"sigterm": "interrupted", "told": True}, Verdict(state="interrupted")),
    ("Ctrl-C, and the run had just ended", seen(0, 0), {"sigterm": "interrupted", "told": True}, COMPLETED),
    (
        "Ctrl-C, and no checkpoint in time",
        seen(),
        {"sigterm": "interrupted", "told": True, "overdue": 9.0},
        Verdict(state="interrupted", say="inference_0, orchestrator, trainer did not leave in 9 s"),
    ),
    ("SIGTERM because of a requeue", seen(), {"sigterm": "preempted"}, Verdict(give_way=True, comes_back=True)),
    ("the same, after the notice", seen(), {"sigterm": "preempted", "told": True}, Verdict(comes_back=True)),
    ("the notice", seen(), {"notice": True}, Verdict(give_way=True)),
    ("the notice, already passed on", seen(), {"notice": True, "told": True}, GO_ON),
    ("the file, made by hand", seen(), {"asked": True}, Verdict(give_way=True, say="the file preempt exists")),
    ("the file, made by a step on SIGTERM: does the supervisor get one?", seen(), {"asked": True, "remote": True}, SETTLING),
    ("it does not", seen(), {"asked": True, "remote": True, **LATE}, Verdict(give_way=True, say="the file preempt exists")),
    ("a role has left because of the file", seen(LEFT), {"asked": True}, Verdict(give_way=True, say="the file preempt exists")),
    # leaving because of a preemption
    ("no step yet", seen(), {"told": True, "begun": False}, Verdict(state="preempted", say=NOTHING)),
    ("too late", seen(0), {"told": True, "overdue": 9.0}, Verdict(state="preempted", say="inference_0, orchestrator did not leave in 9 s")),
    ("all have left", seen(LEFT, LEFT), {"told": True}, PREEMPTED),
    ("the trainer is done, and the last evaluation was given up", seen(0, LEFT), {"told": True}, PREEMPTED),
    ("the checkpoint is written: no process is needed", seen(LEFT, -9), {"told": True, "left": True}, PREEMPTED),
    ("told, but the run had just ended", seen(0, 0), {"told": True}, COMPLETED),
    ("a step was killed by the notice: no checkpoint will come", seen(-15), {"told": True, "remote": True}, PREEMPTED),
    ("a rank is lost, and the job comes back anyway", seen(-9), {"told": True, "comes_back": True}, PREEMPTED),
]  # fmt: skip


@pytest.mark.parametrize(("case", "view", "more", "verdict"), CASES, ids=[case[0] for case in CASES])
def test_every_case(case: str, view: View, more: dict, verdict: Verdict) -> None:
    assert decide(replace(view, **more)) == verdict


@pytest.mark.parametrize(
    ("silent", "beats", "said"),
    [
        (3.0, {"trainer": {"phase": "serving"}}, "for 3 s (inference.hung_timeout=2); last reported phase: serving"),
        (15.0, {}, "for 15 s (launcher.heartbeat_timeout=10)"),
        (3.0, {"trainer": {"phase": "loading"}}, None),
        (11.0, {"trainer": {"phase": "loading"}}, "for 11 s (launcher.heartbeat_timeout=10); last reported phase: loading"),
    ],
)
def test_silence(silent: float, beats: dict, said: str | None) -> None:
    hung = None if said is None else ("trainer", f"sent no heartbeat {said}")
    assert find_hung({"trainer": silent}, beats, timeout=10.0, serving=2.0) == hung


def test_heartbeats_have_the_age_that_our_own_clock_says_though_their_writers_clock_is_wrong() -> None:
    ages, beat = Ages(), {"time": 5e9, "since": 5e9 - 7.0}  # a clock that is decades ahead
    assert ages.look({"trainer": beat}, now=100.0) == {"trainer": 0.0}
    assert ages.look({"trainer": beat}, now=104.0) == {"trainer": 4.0}
    assert in_phase(beat, 4.0) == 11.0
    assert ages.look({"trainer": {**beat, "time": -3.0}}, now=105.0) == {"trainer": 0.0}


def test_time_in_which_the_looker_was_stopped_itself_makes_no_process_silent() -> None:
    ages, beat = Ages(), {"time": 1.0}
    ages.look({"inference_0": beat}, now=100.0)
    assert ages.look({"inference_0": beat}, now=103.0) == {"inference_0": 3.0}
    assert ages.look({"inference_0": beat}, now=5000.0) == {"inference_0": 3.0}, "the whole job was suspended"
    assert ages.look({"inference_0": beat}, now=5004.0) == {"inference_0": 7.0}
    assert [ages.since(started) for started in (101.0, 110.0, 5001.0)] == [6.0, 4.0, 3.0], "nor one that has not beaten yet"


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    children = Children(Starter(), "token")
    lock = os.open(tmp_path / "lock", os.O_CREAT)
    children.start_reaper(tmp_path, 1, lock)
    children.start(toy("inference", FOREVER, service=True), {}, tmp_path / "log")
    yield children
    children.stop(0, print)
    children.release_reaper()


def test_a_server_that_hangs_and_that_no_signal_ends_fails_the_run(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict() -> Verdict:
        hung = ("inference_0", "sent no heartbeat")
        return decide(View(processes=children.look(lambda _: 2, hung[0]), hung=hung))

    assert verdict() == Verdict(kill="inference_0", reason="sent no heartbeat")
    with monkeypatch.context() as patience:
        patience.setattr("rlx.launch.children.kill_all", lambda *_, **__: [])  # it waits in the kernel, for a disk or a GPU
        children.kill("inference_0", "sent no heartbeat")
    assert verdict() == Verdict(state="failed", blamed="inference_0", reason="sent no heartbeat")
    children.kill("inference_0", "sent no heartbeat")
    children.all[0].process.wait()
    assert verdict() == Verdict(again=("inference_0",)), "once it has ended, it may start again"
