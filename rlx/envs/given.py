"""What the workers of a pool play with: the policy and the servers that it asks, as the workers are told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlx.envs.watch import Worker
from rlx.envs.wire import Give, Outage, Serve, Warned
from rlx.inference.sampler import Servers
from rlx.policy.spec import PolicySpec

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Given:
    """The policy of a pool's workers, and the time in which no server takes their requests."""

    policy: PolicySpec | None = None  # None: they have none yet
    servers: Callable[[], Servers] | None = None  # those that it samples on; None: an endpoint plays
    _out: set[Worker] = field(default_factory=set)  # workers for which no server takes requests
    _warned: set[str] = field(default_factory=set)  # warnings so far
    _since: float = 0.0  # monotonic seconds since when there is one
    _ended: float = 0.0  # seconds of earlier such times

    def introduce(self, worker: Worker) -> None:
        """Send a worker its policy, if there is one. What it gets before it has loaded waits in its socket."""
        if self.policy is not None:
            worker.child.link.send(Give(self.policy))
        if self.servers is not None:
            worker.child.link.send(Serve(self.servers()))

    def hear(self, worker: Worker, message: Outage | Warned) -> None:
        """What a worker says of its requests. A warning is logged once, however many workers say it."""
        if isinstance(message, Outage):
            self.note_outage(worker, message.begins)
        elif message.text not in self._warned:
            self._warned.add(message.text)
            log.warning("%s", message.text)

    def note_outage(self, worker: Worker, begins: bool) -> None:
        """No server takes a worker's requests, or one does again."""
        before, was_out = self.away, bool(self._out)
        if begins:
            self._since = self._since if self._out else time.monotonic()
            self._out.add(worker)
        else:
            self._out.discard(worker)
        self._ended = self._ended if self._out else before
        if begins and not was_out:
            log.warning("no inference server takes requests of %s; they wait (its log says why)", worker.child.name)
        elif was_out and not self._out:
            log.info("no request of %s waits for an inference server any more", worker.child.name)

    @property
    def away(self) -> float:
        """Seconds so far in which no server took the requests of a worker."""
        return self._ended + (time.monotonic() - self._since if self._out else 0.0)
