"""Tells servers of a new version: all of them at once, or one after the other (`weight_broadcast.in_turn`).

A server that does not answer delays an update only until another server has the version; one that answers but does not load it, only until
the time limit (`Limit`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlx.inference.protocol import PAUSE, InferenceError, ServerUnreachable, WeightsGone
from rlx.inference.replica import Replica
from rlx.types import WeightVersion

AGAIN = 10.0  # seconds for other servers to answer once the version did not reach one, which must soon ask again

Missing = list[tuple[Replica, InferenceError]]  # servers without the version, and why
Tell = Callable[[Replica, int], Awaitable[None]]  # (a server, how many are told at the same time)


@dataclass(frozen=True, slots=True)
class Manner:
    """How an update treats the requests in flight. The keys of `weight_broadcast` have these names."""

    drain_tokens: int = 0  # see `protocol.UpdateRequest`
    keep_kv: bool = False  # the same
    in_turn: bool = False  # one server after the other: meanwhile the others generate


AT_ONCE = Manner()


class Limit:
    """How long servers have for one update."""

    def __init__(self, weights: WeightVersion, timeout: float) -> None:
        """`timeout`: `weight_broadcast.timeout`. A transfer from memory fails by itself `timeout` seconds after its last progress. It began
        after this clock, and the servers that it did not reach can ask again only if this clock has not ended the update before."""
        self.version, self.timeout = weights.version, timeout
        self.seconds = 2 * timeout if weights.kind == "memory" else timeout
        self.anew()

    def anew(self) -> None:
        """Begin anew: nothing was loaded so far for a good reason."""
        self.end = time.monotonic() + self.seconds

    def at_most(self, seconds: float) -> None:
        self.end = min(self.end, time.monotonic() + seconds)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def missed(self, servers: Sequence[Replica]) -> ServerUnreachable:
        """The error for servers that have not loaded the version in time."""
        names = ", ".join(sorted(server.endpoint.name for server in servers))
        limit = f"weight_broadcast.timeout={self.timeout:g}" + (", twice that from memory" if self.seconds > self.timeout else "")
        return ServerUnreachable(
            f"{names} took no version {self.version} in {self.seconds:g} s ({limit}): its engine hangs, or loading takes longer. "
            "See its log; if it was still loading, set a larger weight_broadcast.timeout"
        )


async def tell_all(servers: Sequence[Replica], tell: Tell, limit: Limit, others: bool = False, beside: Sequence[Replica] = ()) -> Missing:
    """Tell these servers concurrently. Once one has the version, those that do not answer or missed the trainer are left out: returned.
    So are those without an answer at the limit.

    `others`: a server that is not among these has the version, so all of these may be left out. Otherwise the first error is raised.
    `beside`: servers that are told as well and not waited for, whatever becomes of them.
    Raises UpdateRefused, and InferenceError if a server fails.
    """
    together = len(servers) + len(beside)
    telling = {asyncio.ensure_future(tell(server, together)): server for server in servers}
    telling_beside = [asyncio.ensure_future(tell(server, together)) for server in beside]
    waiting, loaded = set(telling), others
    missing: Missing = []
    late: list[Replica] = []
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
            if missed and not loaded:  # it may have half of the version, and then ends if it gets no other soon
                limit.at_most(min(AGAIN, limit.timeout / 4))
            elif any(telling[task].asks for task in waiting):  # the trainer's step takes as long as it takes
                limit.anew()
            if loaded or missed:
                for task in [task for task in waiting if telling[task].gone]:
                    waiting.discard(task)
                    task.cancel()
                    what = "answers, but loads no version: its engine hangs (see its log)" if telling[task].late else "does not answer"
                    missing.append((telling[task], ServerUnreachable(f"{telling[task].endpoint.name} {what}")))
            if waiting and limit.over:
                late = [telling[task] for task in waiting]
                missing += [(server, limit.missed([server])) for server in late]
                for server in late:
                    server.late = not server.asks
                break
        if not loaded:
            raise missed[0] if missed else limit.missed(late) if late else missing[0][1]
        return missing
    finally:
        for task in (*telling, *telling_beside):
            task.cancel()  # a server ends what it has begun
        await asyncio.gather(*telling, *telling_beside, return_exceptions=True)


async def tell_in_turn(servers: Sequence[Replica], tell: Tell, limit: Limit) -> Missing:
    """Tell one server after the other, those that answer first. Each has the whole time limit. Otherwise like `tell_all`."""
    left, missing = list(servers), Missing()
    while answering := [server for server in left if not server.gone]:
        left.remove(answering[0])
        limit.anew()
        missing += await tell_all(answering[:1], tell, limit, others=True)
    if len(missing) + len(left) == len(servers):  # none has it: wait for any of them
        return await tell_all(servers, tell, limit)
    return missing + (await tell_all(left, tell, limit, others=True) if left else [])
