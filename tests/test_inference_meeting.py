"""How the parts of a server find each other, and what each learns of the other's end (`rlx/inference/server/parts.py`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlx.inference.server.parts import ADDRESS, PORT, Head, Meeting, Part, own_address, own_port
from rlx.waiting import WaitTimeout

JOIN = """
import sys, time
from pathlib import Path
from rlx.inference.server.parts import Part
part = Part.join(Path(sys.argv[1]), 1, "headless_0 on there", "token", 20, lambda: None)
print("joined", flush=True)
time.sleep(60)
"""


def eventually(found: list[str]) -> str:
    deadline = time.monotonic() + 20
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    made = Head(tmp_path / "data_parallel_0.json", "127.0.0.1", 2, "token")
    made.said = []  # type: ignore[attr-defined]
    made.lost = made.said.append  # type: ignore[attr-defined]
    yield made
    made.close("the test is over")


def join(head: Head, part: int = 1, token: str = "token", timeout: float = 20.0) -> tuple[Part, list[str]]:
    said: list[str] = []
    return Part.join(head._file, part, f"headless_{part - 1} on there", token, timeout, lambda: None, said.append), said


def test_parts_get_the_address_and_the_port_and_learn_when_the_server_serves(head: Head) -> None:
    (first, _), _ = join(head), head.serving()
    second, _ = join(head, 2)
    assert first.meeting == second.meeting == head.meeting
    deadline = time.monotonic() + 20
    while not (first.serving and second.serving):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert oct(head._file.stat().st_mode)[-3:] == "600"


def test_the_last_words_of_a_part_reach_the_head_and_those_of_the_head_its_parts(head: Head) -> None:
    part, _ = join(head)
    other, said = join(head, 2)
    part.leave("its engine process ended")
    assert eventually(head.said) == "a part of this server is gone, headless_0 on there: its engine process ended"  # type: ignore[attr-defined]
    head.close("it was told to stop")
    assert eventually(said) == "the head of this server is gone: it was told to stop"
    assert not head._file.exists()
    assert other.meeting.port


def test_a_part_has_joined_when_the_head_has_let_it_in(head: Head) -> None:
    with head._lock, pytest.raises(WaitTimeout):  # the head is busy
        join(head, timeout=0.3)
    other, _ = join(head, 2)
    assert head._lines[2]
    assert other.meeting == head.meeting
    assert eventually(head.said).endswith("headless_0 on there: it no longer waits for the head's answer")  # type: ignore[attr-defined]


def test_a_part_that_comes_while_the_head_ends_hears_why(head: Head) -> None:
    with closing(socket.create_connection((head.meeting.address, head.meeting.port))) as sock, sock.makefile("rb") as said:
        join(head, 2)  # the head accepts in turn, so it has accepted this connection, too
        head.close("it was told to stop")
        sock.sendall(json.dumps({"key": head.meeting.key, "part": 1, "name": "x"}).encode() + b"\n")
        assert json.loads(said.readline()) == {"why": "it was told to stop"}
        assert said.readline() == b""


def test_a_killed_part_is_noticed_at_once(head: Head) -> None:
    with subprocess.Popen([sys.executable, "-c", JOIN, str(head._file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"joined\n"
        os.kill(process.pid, signal.SIGKILL)
        assert "headless_0 on there: its connection closed: the process was killed" in eventually(head.said)  # type: ignore[attr-defined]


def test_strangers_and_second_parts_are_not_let_in_and_end_nothing(head: Head) -> None:
    join(head)
    for hello in ({"key": "other", "part": 2, "name": "x"}, {"key": head.meeting.key, "part": 3, "name": "x"}, [1], "x"):
        with closing(socket.create_connection((head.meeting.address, head.meeting.port))) as sock:
            sock.sendall(json.dumps(hello).encode() + b"\n")
            assert sock.recv(10) == b""
    _, said = join(head)
    assert eventually(said) == "the head of this server is gone: part 1 of this server is there already"
    assert not head.said  # type: ignore[attr-defined]


def test_a_part_waits_for_a_head_of_its_own_attempt_that_lives(head: Head, tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout, match=r"the head of this server \(.*data_parallel_0.json\)"):
        join(head, token="another attempt", timeout=0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        port = gone.getsockname()[1]
    stale = tmp_path / "stale.json"
    record = {name: getattr(head.meeting, name) for name in Meeting.__slots__} | {"port": port}
    stale.write_text(json.dumps(record))
    with pytest.raises(WaitTimeout):
        Part.join(stale, 1, "x", "token", 0.1, lambda: None)


def test_an_address_that_other_hosts_cannot_reach_is_refused_with_the_variable_that_sets_another() -> None:
    assert own_address(False, {}) == "127.0.0.1"
    assert own_address(True, {ADDRESS: "10.1.2.3"}) == "10.1.2.3"
    with pytest.raises(OSError, match=rf"other hosts cannot reach localhost: it is 127\.0\.0\.1 here; set {ADDRESS}"):
        own_address(True, {ADDRESS: "localhost"})
    with pytest.raises(OSError, match=rf"no\.such\.host\.invalid, .* has no address: .*; set {ADDRESS}"):
        own_address(True, {ADDRESS: "no.such.host.invalid"})


def test_a_port_that_is_none_is_refused_with_its_variable() -> None:
    assert (own_port({}), own_port({PORT: ""}), own_port({PORT: "13345"})) == (0, 0, 13345)
    for text in ("x", "-1", "65536"):
        with pytest.raises(OSError, match=rf"{PORT}={text} is no port"):
            own_port({PORT: text})


def test_the_head_takes_the_port_it_is_told(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(OSError, match="Address already in use"):
        Head(tmp_path / "one.json", "127.0.0.1", 1, "", taken.getsockname()[1])
    assert not (tmp_path / "one.json").exists()
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    made = Head(tmp_path / "two.json", "127.0.0.1", 1, "", port)
    assert made.meeting.rpc_port == port
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server(("127.0.0.1", port))
    made.let_port_go()  # while vLLM is imported and a model is made, it is kept
    socket.create_server(("127.0.0.1", port)).close()
    made.close("")
