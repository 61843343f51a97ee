"""The link between the orchestrator and a worker: a message that cannot be read costs its own request, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.envs.watch import Playing
from rlx.envs.watch import answer as answered
from rlx.envs.wire import FromWorker, Link, Loaded, LoadFailed, Message, Ping, Play, Played, PlayFailed, ToWorker
from rlx.trace import Node, Trace
from rlx.types import Rollout, Task


def played(number: int, metric: Any = 1.0) -> Played:
    rollout = Rollout(
        task=Task(env="e", example_id=0, index=0, row={}),
        member=0,
        trace=Trace(nodes=(Node(parent=-1, message={"role": "assistant"}, token_ids=np.arange(4, dtype=np.int32), sampled=True),)),
        prompt=[],
        completion=[],
        reward=0.0,
        rewards={},
        metrics={"seen": metric},
        status="ok",
        stop="done",
    )
    return Played(number, [[rollout]])


def exchange(kind: Any, sent: list[Message], want: int, want_back: int = 0) -> tuple[list[Any], list[Any]]:
    """Send the messages in one write to an end that reads `kind`. Returns what it was handed, and what it sent back on its own."""

    async def main() -> tuple[list[Any], list[Any]]:
        ours, theirs = socket.socketpair()
        here, there = Link(ours, FromWorker if kind is ToWorker else ToWorker), Link(theirs, kind)
        back: list[Any] = []
        got: list[Any] = []
        keep: Callable[[], None] = lambda: None  # noqa: E731
        here.attach(back.append, keep)
        there.attach(got.append, keep)
        for message in sent:
            here.send(message)
        async with asyncio.timeout(30):
            while len(got) < want or len(back) < want_back:
                await asyncio.sleep(0.001)
        here.close()
        there.close()
        return got, back

    return asyncio.run(main())


def test_a_rollout_arrives_with_its_tokens() -> None:
    ((got,), _) = exchange(FromWorker, [played(1)], 1)
    ((rollout,),) = got.rollouts
    (node,) = rollout.trace.nodes
    assert (node.token_ids.dtype, node.token_ids.tolist(), node.sampled) == (np.int32, [0, 1, 2, 3], True)
    assert (node.logprobs.dtype, node.logprobs.tolist()) == (np.float32, [])
    assert rollout.metrics == {"seen": 1.0}


def test_rollouts_that_the_orchestrator_cannot_read_are_answered_as_none_with_the_reason() -> None:
    got, _ = exchange(FromWorker, [played(1), played(2, "many"), played(3)], 3)
    assert [(each.number, len(each.rollouts)) for each in got] == [(1, 1), (2, 0), (3, 1)]
    assert "Expected `float`, got `str`" in got[1].error
    (failed,), _ = exchange(FromWorker, [PlayFailed(4, 5, "")], 1)  # type: ignore[arg-type]
    assert (failed.number, failed.rollouts) == (4, [])


def test_a_question_that_cannot_be_read_is_answered_to_who_asked() -> None:
    play = Play(8, "first", 0, b"", [0], 0)  # type: ignore[arg-type]
    got, back = exchange(ToWorker, [play, Ping()], 1, 1)
    assert isinstance(got[0], Ping)
    assert (back[0].number, back[0].rollouts) == (8, [])
    assert "the message Play" in back[0].error


def test_a_request_whose_rollouts_cannot_be_read_has_failed_rollouts_that_say_so() -> None:
    async def main() -> list[Rollout]:
        task = Task(env="e", example_id=0, index=0, row={})
        playing = Playing(1, task, (0, 1), 0, asyncio.get_running_loop().create_future())
        answered(playing, Played(1, [], "the message Played cannot be read"))
        return await playing.answer

    rollouts = asyncio.run(main())
    assert [(one.member, one.stop, one.error) for one in rollouts] == [
        (member, "environment_error", "the message Played cannot be read") for member in (0, 1)
    ]


@pytest.mark.parametrize("agents", [[5], "one"])
def test_facts_of_an_environment_that_cannot_be_read_are_a_failure_to_load(agents: Any) -> None:
    (failed,), _ = exchange(FromWorker, [Loaded(1, False, False, "", [], "", 0.0, agents)], 1)
    assert isinstance(failed, LoadFailed)
    assert "the message Loaded" in failed.error


def test_a_message_that_does_not_even_say_whose_it_is_ends_the_link() -> None:
    """So the worker ends and is replaced, and its requests are played again; otherwise they would wait for ever."""
    ours, theirs = socket.socketpair()
    link = Link(theirs, FromWorker)
    body = b"\x91" * 5000  # a list in a list, too deep to be read
    ours.sendall(len(body).to_bytes(4, "little") + body)
    assert link.receive(30.0) == []
    assert ours.recv(1) == b"", "the other end sees the end of the stream"
    ours.close()
    link.close()
