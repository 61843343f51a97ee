"""Tells servers of a new version: all of them at once, or one after the other (`weight_broadcast.in_turn`).

A server that does not answer delays an update only until another server has the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlx.inference.protocol import PAUSE, InferenceError, ServerUnreachable, WeightsGone
from rlx.inference.replica import Replica

Missing = list[tuple[Replica, InferenceError]]  # servers without the version, and why
Tell = Callable[[Replica, int], Awaitable[None]]  # (a server, how many are told at the same time)


@dataclass(frozen=True, slots=True)
class Manner:
    """How an update treats the requests in flight. The keys of `weight_broadcast` have these names."""

    drain_tokens: int = 0  # see `protocol.UpdateRequest`
    keep_kv: bool = False  # the same
    in_turn: bool = False  # one server after the other: meanwhile the others generate


AT_ONCE = Manner()


async def tell_all(servers: Sequence[Replica], tell: Tell, count_anew: Callable[[], None], others: bool = False) -> Missing:
    """Tell these servers concurrently. Once one has the version, those that do not answer or missed the trainer are left out: returned.

    `others`: a server that is not among these has the version, so all of these may be left out. Otherwise the first error is raised.
    `count_anew` is called while nothing is loaded for a good reason. Raises UpdateRefused, and InferenceError if a server fails.
    """
    telling = {asyncio.ensure_future(tell(server, len(servers))): server for server in servers}
    waiting, loaded = set(telling), others
    missing: Missing = []
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=PAUSE, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    task.result()
                    loaded = True
                except (ServerUnreachable, WeightsGone) as error:
                    missing.append((telling[task], error))
            missed = [error for _, error in missing if isinstance(error, WeightsGone)]
            if waiting and all(telling[task].asks for task in waiting):
                count_anew()
            if loaded or missed:
                for task in [task for task in waiting if telling[task].gone]:
                    waiting.discard(task)
                    task.cancel()
                    missing.append((telling[task], ServerUnreachable(f"{telling[task].endpoint.name} does not answer")))
        if not loaded:
            raise missed[0] if missed else missing[0][1]
        return missing
    finally:
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)


async def tell_in_turn(servers: Sequence[Replica], tell: Tell, count_anew: Callable[[], None]) -> Missing:
    """Tell one server after the other, those that answer first. Each has the whole time limit. Otherwise like `tell_all`."""
    left, missing = list(servers), Missing()
    while answering := [server for server in left if not server.gone]:
        left.remove(answering[0])
        count_anew()
        missing += await tell_all(answering[:1], tell, count_anew, others=True)
    if len(missing) + len(left) == len(servers):  # none has it: wait for any of them
        return await tell_all(servers, tell, count_anew)
    return missing + (await tell_all(left, tell, count_anew, others=True) if left else [])
