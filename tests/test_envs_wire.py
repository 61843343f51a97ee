"""The link between the orchestrator and a worker: a message that cannot be read costs its own request, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np

from rlx.envs.wire import HEAD, FromWorker, Link, Loaded, Message, Played, ToWorker, frame
from rlx.envs.worker import WorkerServer
from rlx.envs.worker_process import InFlight
from rlx.trace import Node, Trace
from rlx.types import Rollout, Task

TASK = Task(env="e", example_id=0, index=0, row={})


def played(number: int, metric: Any = 1.0) -> Played:
    rollout = Rollout(
        task=TASK,
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


def exchange(*sent: Message) -> list[Any]:
    """Send messages from before a loop runs, and byte by byte. Returns what the other end was handed."""

    async def main() -> list[Any]:
        ours, theirs = socket.socketpair()
        here, there = Link(ours, ToWorker), Link(theirs, FromWorker)
        here.send(sent[0])
        listening = asyncio.create_task(anext(here.messages()))
        got = []
        async with asyncio.timeout(30):
            arriving = there.messages()
            got.append(await anext(arriving))
            for byte in b"".join(frame(message) for message in sent[1:]):
                here._writer.write(bytes([byte]))  # type: ignore[union-attr]
            got += [await anext(arriving) for _ in sent[1:]]
        listening.cancel()
        return got

    return asyncio.run(main())


def test_a_rollout_arrives_with_its_tokens_and_one_that_cannot_be_read_as_none_with_the_reason() -> None:
    first, second, third, failed = exchange(
        played(1),
        played(2, "many"),
        played(3),
        Loaded([], False, False, "", [], "", [5]),  # type: ignore[list-item]
    )
    ((rollout,),) = first.rollouts
    (node,) = rollout.trace.nodes
    assert (node.token_ids.dtype, node.token_ids.tolist(), node.sampled) == (np.int32, [0, 1, 2, 3], True)
    assert (node.logprobs.dtype, node.logprobs.tolist()) == (np.float32, [])
    assert rollout.metrics == {"seen": 1.0}
    assert (second.number, second.rollouts) == (2, [])
    assert "Expected `float`, got `str`" in second.error
    assert len(third.rollouts) == 1
    assert "Expected `str`, got `int`" in failed.error, "facts of an environment that cannot be read are a failure to load"


def test_a_request_whose_rollouts_cannot_be_read_has_failed_rollouts_that_say_so() -> None:
    async def main() -> list[Rollout]:
        playing = InFlight(1, TASK, (0, 1), 0, asyncio.get_running_loop().create_future())
        playing.settle(Played(1, error="it cannot be read"))
        return await playing.answer

    found = [(one.member, one.stop, one.error) for one in asyncio.run(main())]
    assert found == [(0, "environment_error", "it cannot be read"), (1, "group_failed", "another rollout of the group failed")]


def test_a_request_that_its_worker_cannot_read_has_failed_and_does_not_wait_for_ever() -> None:
    async def main() -> Any:
        ours, theirs = socket.socketpair()
        here, server = Link(ours, FromWorker), WorkerServer(theirs, None, False)
        serving = asyncio.create_task(server.serve())
        arriving = here.messages()
        listening = asyncio.create_task(anext(arriving))
        await asyncio.sleep(0)
        ours.send(HEAD.pack(3, 7) + b"???")
        try:
            return await asyncio.wait_for(listening, 30)
        finally:
            serving.cancel()
            await arriving.aclose()

    failed = asyncio.run(main())
    assert isinstance(failed, Played)
    assert (failed.number, "cannot be read" in failed.error) == (7, True)
