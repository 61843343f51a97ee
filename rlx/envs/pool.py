"""An environment in processes of its own: the `Environment` that the orchestrator plays, with its workers behind it.

    play(task, members, attempt) → the worker with the least to do → asks the inference servers → its rollouts, with their tokens

The workers have the policy (`give`), so prompts are rendered, and answers read, where the environment runs. The pool bounds what an
environment can do to the run. It looks at each worker a few times a second (`_attend`), and replaces one that

    computes one step for longer than a rollout may take, or is silent for as long    cause `timeout`
    has died                                                                          cause `died`
    needs too much memory                                                             cause `memory`

What was lost is played again under the same attempt number: the same seeds, so the same tokens for the same weights. If the stacks that
the worker wrote name one request, that one fails. Otherwise all that it had are suspects: they play in a worker of their own, at most half
as many at once, and half of those if it is ended too, until the one is alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.config.pythons import python_of
from rlx.config.schema_rollout import EnvConfig
from rlx.envs import wire
from rlx.envs.errors import in_one_line
from rlx.envs.worker_process import InFlight, Worker, how, read_dump
from rlx.heartbeat import ABSENT
from rlx.inference.sampler import Sampler, Servers
from rlx.policy.base import Policy
from rlx.policy.spec import PolicySpec
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25  # seconds between two looks at a worker
END_SECONDS = 2.0  # seconds beyond its time that a rollout may take to end by itself: two beats
HARD = 1.5  # times the memory bound at which a worker is ended at once
CLOSING = 6.0  # seconds for a worker to close its environment at the end
FIRST_LOAD = 3600.0  # seconds to load the environment at the start: it may fetch its data
LOADING, LOADING_TIMES = 600.0, 3  # seconds for a replacement to load it, or so many times as long as the first load took
TRIES = 3  # replacements in a row that may end before they have loaded; then the run ends
WAITING, PATIENCE = 0.1, 10.0  # the share of the rollouts in flight that must wait for workers, and seconds, until another one starts


class WorkerError(RuntimeError):
    """An environment has no working worker. The message has the environment's own words."""


class WorkerPool:
    """See `rlx.envs.base.Environment`. It has its policy (`give`) before the first `play`."""

    policy: Policy | None = None  # the workers have it
    rows: Sequence[dict[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    agents: Sequence[str] = ()
    scores_groups = False

    def __init__(
        self,
        name: str,
        config: EnvConfig,
        settings: wire.Settings,
        num_workers: int,
        *,
        most_workers: int = 0,
        logs: Path | None = None,
        memory_gb: float | None = None,
    ) -> None:
        """Start the workers. Call it on the main thread, and `wait_loaded` before anything else.

        `most_workers`: how many there may be when rollouts wait for them. `logs`: folder of the log files; None keeps the output in
        memory. `memory_gb`: bound of one worker's resident memory, in GiB.
        """
        self.name = name
        self.replaced: Counter[str] = Counter()  # workers replaced since the pool began, by cause
        self.replayed = 0  # requests played again because their worker ended
        self._config, self._settings, self._logs = config, settings, logs
        self._bound = float("inf") if memory_gb is None else memory_gb * 2**30
        self._digest, self._loading, self._failed_starts = "", FIRST_LOAD, 0
        self._least, self._most, self._calm = num_workers, max(num_workers, most_workers), time.monotonic()
        self._numbers = itertools.count(1)
        self._spec: PolicySpec | None = None
        self._servers: Callable[[], Servers] | None = None  # those that the policy samples on; None: an endpoint plays
        self._waiting: list[InFlight] = []  # requests for which no worker is ready
        self._deadly: set[int] = set()  # tasks of which a request has ended a worker: their retries play alone
        self._warned: set[str] = set()
        self._away = 0.0  # seconds in which no server took requests of workers that have ended
        self._broken: WorkerError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers = [self._start(place) for place in range(num_workers)]

    # -- starting

    def _start(self, place: int | None) -> Worker:
        name = f"env_{self.name}_{'suspects' if place is None else place}"
        load = wire.Load(self.name, self._config, self._settings, send_rows=place == 0 and not self._digest)
        python = python_of(self._config.id, self._config.python)
        worker = Worker(name, place, load, python, None if self._logs is None else self._logs / f"{name}.log")
        self._introduce(worker)
        return worker

    def _introduce(self, worker: Worker) -> None:
        if self._servers is not None:
            worker.link.send(wire.Serve(self._servers()))
        if self._spec is not None:
            worker.link.send(wire.Give(self._spec))

    def give(self, policy: PolicySpec, sampler: Sampler | None) -> None:
        """Let the workers play with this policy, on the servers of `sampler` if it samples. Call it in the running loop."""
        self._spec = policy
        if sampler is not None:
            self._servers = sampler.servers
            sampler.listeners.append(self._tell)
        for worker in self._workers:
            self._introduce(worker)
        if not self._tasks:
            self._begin()

    def _begin(self) -> None:
        """Look after the workers in the running loop from now on."""
        for worker in self._workers:
            self._soon(self._attend(worker))

    def _tell(self, servers: Servers) -> None:
        for worker in self._workers:
            worker.link.send(wire.Serve(servers))

    def wait_loaded(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until every worker has loaded the environment. `tick` is called about twenty times a second.

        Raises WorkerError with the environment's own message if one cannot, or if FIRST_LOAD seconds have passed.
        """

        async def wait() -> None:
            self._begin()
            while self._broken is None and not all(worker.loaded for worker in self._workers):
                tick()
                await asyncio.sleep(0.05)

        asyncio.run(wait())
        self._tasks.clear()  # they have ended with their loop
        if self._broken is not None:
            for worker in self._workers:
                worker.end()
            raise self._broken

    def _use(self, worker: Worker, message: wire.Loaded) -> None:
        """A worker has loaded: use it, or end it if it cannot be used."""
        if message.rows:
            self.rows = wire.PackedRows(message.rows, message.columns)
        if not self._digest:
            self.tools, self.agents, self.scores_groups = message.tools, message.agents, message.scores_groups
            self._digest = message.digest
            self._loading = max(LOADING, LOADING_TIMES * (time.monotonic() - worker.began))
        worker.measure()
        if message.digest != self._digest:
            self._refuse(
                worker,
                f"{self._config.id} makes other examples in each process, so a worker cannot score another's; give it a seed in "
                f"envs.{self.name}.args, or play it in the orchestrator with envs.{self.name}.workers=0",
                final=True,
            )
        elif worker.memory > self._bound:
            bound = f"orchestrator.env_worker_memory_gb={self._bound / 2**30:g}"
            self._refuse(worker, f"it needs {worker.memory / 2**30:.2f} GiB just after loading, more than {bound}; raise it", final=True)
        else:
            worker.loaded, worker.heard, worker.sources = True, time.monotonic(), message.sources
            self._failed_starts = 0
            self._dispatch_waiting()

    def _refuse(self, worker: Worker, error: str, final: bool = False) -> None:
        """`final`: another try would end the same, so an environment that needs this worker has none."""
        worker.error = error
        if final and worker.place is not None and worker.place < self._least:
            self._break(WorkerError(f"envs.{self.name}: {error}"))
        worker.process.kill()

    # -- playing

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """See `rlx.envs.base.Environment`. Raises WorkerError if the environment has no worker and cannot get one."""
        if self._broken is not None:
            raise self._broken
        playing = InFlight(next(self._numbers), task, tuple(members), attempt, asyncio.get_running_loop().create_future())
        playing.crowd = int(task.index in self._deadly)
        self._dispatch(playing)
        try:
            return await playing.answer
        except asyncio.CancelledError:
            if playing in self._waiting:
                self._waiting.remove(playing)
            for worker in self._workers:
                if playing.number in worker.playing:
                    worker.link.send(wire.CancelPlay(playing.number))
            raise

    def _dispatch(self, playing: InFlight) -> None:
        """Send a request to the worker with the least to do; keep it if none may have it now."""
        able = [one for one in self._workers if one.loaded and not one.retiring and (one.place is None) == bool(playing.crowd)]
        if playing.crowd:
            able = [one for one in able if len(one.playing) < min([playing.crowd, *(other.crowd for other in one.playing.values())])]
        if not able:
            self._waiting.append(playing)
            if playing.crowd and all(worker.place is not None for worker in self._workers):
                self._add(None)
            return
        worker, task = min(able, key=lambda one: len(one.playing)), playing.task
        worker.playing[playing.number] = playing
        asked = playing.number, task.example_id, task.index, wire.pack_row(task.row), list(playing.members), playing.attempt
        worker.link.send(wire.Play(*asked))

    def _dispatch_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for playing in sorted(waiting, key=lambda one: one.crowd):
            self._dispatch(playing)

    async def _hear(self, worker: Worker) -> None:
        async for message in worker.link.messages():
            playing = worker.playing.get(message.number)
            match message:
                case wire.Loaded():
                    self._use(worker, message)
                case wire.Failed(number=0):
                    log.error("%s", message.trace)
                    if worker.loaded:
                        self._break(WorkerError(f"envs.{self.name}: {message.error}"))
                    self._refuse(worker, message.error)
                case wire.Scores() if playing is not None and len(playing.members) == 1:
                    playing.sampled = message.trace
                case wire.Failed() | wire.Played() if playing is not None:
                    del worker.playing[message.number]
                    playing.settle(message)
                    if worker.place is None:
                        self._dispatch_waiting()

    # -- watching

    async def _attend(self, worker: Worker) -> None:
        """Hear a worker and look after it until its process has ended; then settle what it had."""
        self._soon(self._hear(worker))
        looked = time.monotonic()
        while worker.process.poll() is None:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(worker.measure)
            gap, looked = time.monotonic() - looked, time.monotonic()
            if gap > ABSENT:  # this process was stopped itself, and perhaps they with it
                worker.heard, worker.began = worker.heard + gap, worker.began + gap
            self._look(worker)
            self._grow()
        await asyncio.sleep(POLL_SECONDS)  # what it sent before is read
        self._ended(worker)

    def _look(self, worker: Worker) -> None:
        """End a worker that is stuck, that needs too much memory, or that nobody needs any more."""
        for text in worker.hear():
            if text not in self._warned:  # once, however many workers say it
                self._warned.add(text)
                log.warning("%s", text)
        timeout, used = self._settings.timeout, worker.memory
        says = f"its worker {worker.name} has {used / 2**30:.2f} GiB, env_worker_memory_gb is {self._bound / 2**30:g}"
        if worker.verdict is not None:
            pass
        elif not worker.loaded:
            if time.monotonic() - worker.began > self._loading:
                worker.verdict = "died", f"its worker has not loaded {self._config.id} within {self._loading:g} s"
                worker.process.kill()
        elif worker.stuck > timeout + END_SECONDS:
            self._end(worker, "timeout", f"no result after {timeout:g} s (rollout_timeout): it blocks its worker")
        elif used > HARD * self._bound:
            self._end(worker, "memory", says)
        elif used > self._bound and not worker.retiring:
            worker.retiring = True
            self.replaced["memory"] += 1
            log.warning("envs.%s: %s, so it is replaced", self.name, says)
            if worker.place is not None:
                self._add(worker.place)
        elif not worker.playing and (worker.retiring or (worker.place is None and not any(one.crowd for one in self._waiting))):
            worker.retiring, worker.verdict = True, ("retired", "")
            worker.link.finish()
            asyncio.get_running_loop().call_later(CLOSING, worker.process.kill)

    def _end(self, worker: Worker, cause: str, text: str) -> None:
        """End a worker when it has written its stacks."""

        async def end() -> None:
            await worker.dump(beats=worker.beat.stuck > self._settings.timeout)
            worker.process.kill()

        worker.verdict = cause, text
        self._soon(end())

    def _grow(self) -> None:
        """Start another worker if rollouts have waited long enough for those that there are."""
        own, now = [worker for worker in self._workers if worker.place is not None], time.monotonic()
        in_flight = sum(len(playing.members) for worker in own for playing in worker.playing.values())
        if len(own) >= self._most or not all(worker.loaded for worker in own) or self.waiting <= WAITING * in_flight:
            self._calm = now
        elif now - self._calm > PATIENCE:
            log.info("envs.%s: its rollouts wait for its workers, so it gets another one", self.name)
            self._add(1 + max(worker.place or 0 for worker in own))

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """A task has ended. If it raised, its worker is no longer looked after, so requests would wait for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(WorkerError(f"envs.{self.name}: its workers cannot be looked after: {in_one_line(error)}"))

    # -- when a worker has ended

    def _ended(self, worker: Worker) -> None:
        """A worker's process is gone: replace it, fail what ended it, play the rest again."""
        said, code = worker.last_lines(), worker.process.wait()
        cause, text = worker.verdict or ("died", f"{worker.name} (process {worker.process.pid}) died: {how(code)}")
        if worker.error and not worker.loaded:
            text = f"envs.{self.name} could not be loaded: {worker.error}"
        elif not worker.loaded:
            ended = worker.verdict[1] if worker.verdict else f"its worker ended before it had loaded {self._config.id}: {how(code)}"
            text = f"envs.{self.name}: {ended}\n{said}"
        worker.end()
        self._workers.remove(worker)
        self._away += worker.beat.away
        if cause == "retired" or (worker.retiring and not worker.playing):
            return
        log.warning("envs.%s: %s%s", self.name, text, f"\nthe end of its output:\n{said}" if worker.loaded and said else "")
        if worker.loaded or worker.place is None or worker.place < self._least:
            self.replaced[cause] += 1
            self._failed_starts += not worker.loaded
            if self._failed_starts >= (TRIES if self._digest else 1):
                self._break(WorkerError(text))
            elif worker.place is not None and not worker.retiring:
                self._add(worker.place)
        else:  # one too many, without which the others go on
            self._most = worker.place
        self._settle(worker, cause, text)
        self._dispatch_waiting()

    def _settle(self, worker: Worker, cause: str, text: str) -> None:
        """Fail the request that ended its worker, if it is known; let the others be played again."""
        numbers, where = read_dump(worker.stacks, worker.sources)
        lost = [playing for playing in worker.playing.values() if not playing.answer.done()]
        named = [playing for playing in lost if playing.number in numbers]
        suspects = named or lost
        for playing in suspects:
            playing.crowd, playing.sampled = max(1, len(suspects) // 2), playing.sampled if cause == "timeout" else None
        if len(suspects) == 1 and (named or worker.place is None):
            self._deadly.add(suspects[0].task.index)
            suspects[0].fail(cause, f"{text}; at {where}" if where else text)
        again = [playing for playing in lost if not playing.answer.done()]
        self.replayed += len(again)
        self._waiting += again

    def _add(self, place: int | None) -> None:
        """Start a worker in this place. If the system refuses, no request can be answered."""
        try:
            worker = self._start(place)
        except OSError as error:  # no memory, no process, no file left
            self._break(WorkerError(f"envs.{self.name}: no other worker can be started: {error}"))
            return
        self._workers.append(worker)
        self._soon(self._attend(worker))

    def _break(self, error: WorkerError) -> None:
        """No worker can be had: every request fails with this error."""
        self._broken = error
        for playing in [*self._waiting, *(playing for worker in self._workers for playing in worker.playing.values())]:
            if not playing.answer.done():
                playing.answer.set_exception(error)
        self._waiting = []

    # -- the end

    async def close(self) -> None:
        """Let the environments release their resources, for at most CLOSING seconds, and end the workers. If it is cancelled, at once."""
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            worker.link.finish()
        deadline = time.monotonic() + CLOSING
        try:
            while any(worker.process.poll() is None for worker in self._workers) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        finally:
            for worker in self._workers:
                worker.end()
            self._workers = []

    @property
    def waiting(self) -> int:
        """Rollouts that wait until their worker has computed for others."""
        return sum(worker.waiting for worker in self._workers)

    @property
    def away(self) -> float:
        """Seconds so far in which no server took the requests of a worker, of all workers in sum."""
        return self._away + sum(worker.beat.away for worker in self._workers)
