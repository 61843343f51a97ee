"""What trainer and servers tell each other about weights is obeyed only if the run's own user has signed it."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlx.parallel.transfer import LOOPBACK, Announced, reach_store, serve_store
from rlx.paths import RunPaths
from rlx.weights.mailbox import ORDERS, Call, Client, Forged, Gone, Interrupted, Mailbox, Messages
from rlx.weights.offer import new_secret, read_secret

SECRET = b"of this attempt"


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(serve_store(20.0), Announced(["a"], ["float32"], [[2]]), SECRET)


class Asking(threading.Thread):
    """A server that asks. `client`: the trainer's for it. `error`: why the server gave up."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(daemon=True)
        self.call = Call(mailbox.where, 20.0, SECRET)
        self.error: Gone | None = None
        self.start()
        while not (callers := mailbox.calls()):
            time.sleep(0.001)
        self.client = Client(mailbox, callers, 20.0)

    def run(self) -> None:
        try:
            self.call.ask("a", 1, 1, 1)
        except Gone as error:
            self.error = error


def test_a_store_for_one_host_listens_at_no_other_address() -> None:
    store = serve_store(5.0)
    assert store.host == LOOPBACK
    addresses = {one.address for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET} - {LOOPBACK}
    for address in [*addresses, "127.0.0.2"]:
        with pytest.raises(OSError):  # noqa: PT011  (refused or unreachable)
            socket.create_connection((address, store.port), 2)


def test_the_secret_is_new_with_every_attempt_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"weights\.key, which the trainer writes"):
        read_secret(paths.offer_secret)
    first = new_secret(paths)
    assert read_secret(paths.offer_secret) == first != new_secret(paths)
    assert stat.S_IMODE(paths.offer_secret.stat().st_mode) == 0o600


def test_a_call_that_is_not_signed_and_one_that_is_repeated_are_ignored(mailbox: Mailbox) -> None:
    stranger = reach_store(mailbox.where, 20.0)
    caller = {"call": "x", "server": "a", "version": 1, "workers": 1, "together": 1}
    stranger.queue_push("calls", json.dumps(caller))
    Messages(stranger, b"a guess").push_of_many("calls", caller)
    assert mailbox.calls() == []
    Messages(stranger, SECRET).push_of_many("calls", caller)
    seen = stranger.queue_pop("calls")
    for _ in range(2):
        stranger.queue_push("calls", seen)
    assert [found.call for found in mailbox.calls()] == ["x"]


def test_a_server_obeys_no_order_of_a_stranger(mailbox: Mailbox) -> None:
    server = Asking(mailbox)
    order = {"order": "start_weight_update", "arguments": {}}
    reach_store(mailbox.where, 20.0).queue_push(f"{server.client.members[0].call}/orders", "0" * 64 + json.dumps(order))
    server.join(20)
    assert "not signed with the secret of this attempt" in str(server.error)


def test_a_message_cannot_be_repeated_or_moved_to_another_place(mailbox: Mailbox) -> None:
    store, ours = mailbox.store, Messages(mailbox.store, SECRET)
    ours.push("x/orders", {"order": "update_weights"})
    seen = store.queue_pop("x/orders")
    for queue in ("x/orders", "x/orders", "y/orders"):
        store.queue_push(queue, seen)
    theirs = Messages(store, SECRET)
    assert theirs.pop("x/orders") == {"order": "update_weights"}
    for queue in ("x/orders", "y/orders"):
        with pytest.raises(Forged):
            theirs.pop(queue)


def test_workers_are_told_nothing_but_the_four_orders_of_a_transfer(mailbox: Mailbox) -> None:
    server = Asking(mailbox)
    server.client.tell("load_policy", {"folder": "/anywhere"})
    server.join(20)
    assert server.error is None
    with pytest.raises(Interrupted, match="'load_policy', which is none of"):
        server.call.next()
    assert len(ORDERS) == 4


def test_an_answer_that_is_not_signed_breaks_the_transfer(mailbox: Mailbox) -> None:
    server = Asking(mailbox)
    reach_store(mailbox.where, 20.0).queue_push(f"{server.client.members[0].call}/done", json.dumps({"error": ""}))
    with pytest.raises(Forged):
        server.client.wait()


def test_a_server_with_the_secret_of_another_attempt_does_not_believe_the_trainer(mailbox: Mailbox) -> None:
    with pytest.raises(Gone, match="not signed with the secret of this attempt"):
        Call(mailbox.where, 20.0, b"of the attempt before")


def test_a_server_that_ends_does_not_wait_for_the_trainer_any_more(mailbox: Mailbox) -> None:
    server = Asking(mailbox)
    server.call.end()
    server.join(20)
    assert "this server ends" in str(server.error)


def test_a_server_waits_for_the_trainers_step_as_long_as_it_takes_but_not_for_an_order_within_a_transfer(mailbox: Mailbox) -> None:
    server = Asking(mailbox)
    server.call.timeout = 0.1
    server.join(0.3)
    assert server.is_alive()
    server.client.tell("start_weight_update")
    server.join(20)
    assert server.error is None
    assert server.call.next() == ("start_weight_update", {})
    with pytest.raises(Interrupted, match=r"said nothing for 0\.1 s"):
        server.call.next()
