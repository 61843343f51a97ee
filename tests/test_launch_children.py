"""What the supervisor sees of its child processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_run import FOREVER, toy

from rlx.launch.children import Children
from rlx.launch.starters import Starter
from rlx.launch.verdict import Verdict, View, decide


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
