"""An environment in processes of its own: the `Environment` that the orchestrator plays, with its workers behind it.

    play(task, members, attempt) → the worker with the least to do → asks the inference servers → its rollouts, with their tokens

The workers have the policy (`give`), so prompts are rendered, and answers read, where the environment runs. The pool bounds what an
environment can do to the run:

    a rollout blocks its worker beyond its time   the worker is ended; this rollout is a `timeout` that names the function
    a worker dies                                 the rollout that it computed at that moment failed (`worker_died`)
    a worker needs too much memory                it gets no new requests and is replaced when it has answered the others

In each case another worker takes its place, and all its other requests are played again under the same attempt number: the same seeds,
so the same tokens for the same weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.config.pythons import python_of
from rlx.config.schema_rollout import EnvConfig
from rlx.envs import wire
from rlx.envs.child import Child, measure_all
from rlx.envs.given import Given
from rlx.envs.growth import Growth
from rlx.envs.marks import Mark
from rlx.envs.rows import PackedRows, RowPacker
from rlx.envs.watch import Playing, Verdict, Worker, WorkerError, answer
from rlx.heartbeat import ABSENT
from rlx.inference.sampler import Sampler, Servers
from rlx.policy.base import Policy
from rlx.policy.spec import PolicySpec
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

LOOK = 0.2  # seconds between two looks at the workers
MEASURE = 2.0  # seconds between two measurements of the memory of the processes that the workers have started
WARN = 10.0  # seconds of one step after which the log names the function
CLOSING = 6.0  # seconds for a worker to close its environment at the end
FIRST_LOAD = 3600.0  # seconds to load the environment at the start: it may fetch its data
LOADING, LOADING_TIMES = 600.0, 3  # seconds for a replacement to load it, or so many times as long as the first load took
TRIES = 3  # replacements in a row that may end before they have loaded; then the run ends


class WorkerPool:
    """See `rlx.envs.base.Environment`. It has its policy (`give`) before the first `play`."""

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

        `most_workers`: see `rlx.envs.growth`. `logs`: folder of the log files; None keeps the output in memory. `memory_gb`: bound of one
        worker's resident memory, in GiB.
        """
        self.name = name
        self.policy: Policy | None = None  # the workers have it
        self.heard: Callable[[Collection[str], str | None], None] = lambda models, refusal: None  # of an endpoint: `Standing.hear`
        self.rows: Sequence[dict[str, Any]] = ()
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.scores_groups = False
        self.agents: Sequence[str] = ()
        self.replaced: Counter[str] = Counter()  # workers replaced since the pool began, by cause
        self.replayed = 0  # requests played again because their worker ended
        self._config, self._settings = config, settings
        self._logs, self._memory = logs, None if memory_gb is None else memory_gb * 2**30
        self._digest, self._loading = "", LOADING
        self._numbers, self._pack = itertools.count(1), RowPacker()
        self.given, self._growth = Given(), Growth(num_workers, max(num_workers, most_workers))
        self._waiting: list[Playing] = []  # requests for which no worker is ready
        self._broken: WorkerError | None = None
        self._failed_starts, self._closed = 0, False  # replacements in a row that ended before they had loaded
        self._watch: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._workers = [self._start(place) for place in range(num_workers)]

    # -- starting

    def _start(self, place: int) -> Worker:
        name, python = f"env_{self.name}_{place}", python_of(self._config.id, self._config.python)
        worker = Worker(Child(name, python, None if self._logs is None else self._logs / f"{name}.log"), place)
        with contextlib.suppress(ConnectionError):  # it is gone already, which its end tells
            worker.child.link.send_now(wire.Load(self.name, self._config, self._settings, send_rows=place == 0 and not self._digest))
        self.given.introduce(worker)
        return worker

    def give(self, policy: PolicySpec, sampler: Sampler | None) -> None:
        """Let the workers play with this policy, on the servers of `sampler` if it samples. Call it in the running loop."""
        self.given.policy = policy
        if sampler is not None:
            self.given.servers = sampler.servers
            sampler.listeners.append(self._tell)
        if self._watch is None:
            self._attach()
        for worker in self._workers:
            self.given.introduce(worker)

    def _tell(self, servers: Servers) -> None:
        for worker in self._workers:
            worker.child.link.send(wire.Serve(servers))

    def wait_loaded(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until every worker has loaded the environment. `tick` is called about twenty times a second.

        Raises WorkerError with the environment's own message if one cannot, or if FIRST_LOAD seconds have passed.
        """
        rows: list[bytes] = []
        began = time.monotonic()
        for worker in self._workers:
            while not worker.loaded:
                tick()
                gone = worker.child.process.poll() is not None  # a process that it forked may keep the link open
                messages = worker.child.link.receive(0.05)
                if not messages and time.monotonic() - began > FIRST_LOAD:
                    worker.too_slow(self._config.id, FIRST_LOAD)
                    worker.child.kill()
                if messages is None or (not messages and (gone or worker.verdict is not None)):
                    self._raise_not_loaded(worker)
                for message in messages or ():
                    if isinstance(message, wire.Rows):
                        rows += message.rows
                    elif isinstance(message, wire.LoadFailed):
                        worker.cannot_load(message.error)
                        log.error("%s", message.trace)
                    else:
                        assert isinstance(message, wire.Loaded), f"{message} before the environment was loaded"
                        self._loaded(worker, message)
                        if worker.place == 0:
                            self.rows, self.scores_groups = PackedRows(rows, message.columns), message.scores_groups
                            self.tools, self.agents = message.tools, message.agents

    def _raise_not_loaded(self, worker: Worker) -> None:
        error = worker.not_loaded(self.name, self._config.id, worker.child.process.wait())
        for each in self._workers:
            each.child.reap()
        raise error

    def _loaded(self, worker: Worker, message: wire.Loaded) -> None:
        """A worker has loaded. Raises WorkerError if it cannot be used."""
        worker.loaded, worker.alive, worker.child.sources = True, time.monotonic(), message.sources
        if self._digest and message.digest != self._digest:
            raise WorkerError(
                f"envs.{self.name}: {self._config.id} makes other examples in each process, so a worker cannot score another's; give it a "
                f"seed in envs.{self.name}.args, or play it in the orchestrator with envs.{self.name}.workers=0"
            )
        if not self._digest:
            self._loading = max(LOADING, LOADING_TIMES * message.seconds)
        self._digest = message.digest
        worker.child.measure()
        needs = worker.child.memory()
        if self._memory is not None and needs > self._memory:
            raise WorkerError(
                f"envs.{self.name}: its worker needs {needs / 2**30:.2f} GiB just after loading, more than "
                f"orchestrator.env_worker_memory_gb={self._memory / 2**30:g}; raise it"
            )

    def _attach(self) -> None:
        """Serve the workers in the running loop from now on."""
        for worker in self._workers:
            self._serve(worker)
        self._watch = asyncio.create_task(self._keep_watching())

    def _serve(self, worker: Worker) -> None:
        worker.child.link.attach(lambda message: self._handle(worker, message), lambda: None)
        asyncio.get_running_loop().add_reader(worker.child.pidfd, self._ended, worker)

    # -- playing

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """See `rlx.envs.base.Environment`. Raises WorkerError if the environment has no worker and cannot get one."""
        if self._broken is not None:
            raise self._broken
        playing = Playing(next(self._numbers), task, tuple(members), attempt, asyncio.get_running_loop().create_future())
        self._dispatch(playing)
        try:
            return await playing.answer
        except asyncio.CancelledError:
            self._give_up(playing)
            raise

    def _dispatch(self, playing: Playing) -> None:
        """Send a request to the worker with the least to do; keep it if none is ready."""
        ready = [worker for worker in self._workers if worker.loaded and not worker.retiring and worker.verdict is None]
        if not ready:
            self._waiting.append(playing)
            return
        assert self.given.policy is not None, "the environment has no policy; give it one before the first play"
        worker = min(ready, key=lambda worker: worker.load)
        task = playing.task
        if not worker.playing:
            worker.alive = time.monotonic()  # it had nothing to say
        worker.playing[playing.number] = playing
        playing.began, playing.before, playing.computed = time.monotonic(), worker.computed, 0.0
        asked = playing.number, task.example_id, task.index, self._pack(task), list(playing.members), playing.attempt
        worker.child.link.send(wire.Play(*asked))

    def _dispatch_waiting(self) -> None:
        """A worker is ready: send what waits for one."""
        waiting, self._waiting = self._waiting, []
        for playing in waiting:
            self._dispatch(playing)

    def _give_up(self, playing: Playing) -> None:
        if playing in self._waiting:
            self._waiting.remove(playing)
        for worker in self._workers:
            if worker.playing.pop(playing.number, None) is not None:
                worker.cancelled.add(playing.number)
                worker.child.link.send(wire.CancelPlay(playing.number))

    def _handle(self, worker: Worker, message: Any) -> None:
        """A message of a worker in the running loop."""
        worker.alive = time.monotonic()
        if isinstance(message, wire.Played | wire.PlayFailed):
            playing = worker.playing.pop(message.number, None)
            worker.cancelled.discard(message.number)
            if playing is not None:
                answer(playing, message)
            if worker.retiring and not worker.load:
                self._let_go(worker)
        elif isinstance(message, wire.Scores) and (playing := worker.playing.get(message.number)) is not None:
            playing.sampled[message.member] = message.trace
        elif isinstance(message, wire.Loaded):
            try:
                self._loaded(worker, message)
            except WorkerError as error:
                if not self._growth.refused(worker, self._workers):
                    self._break(error)
                    return
                log.warning("%s\nThe workers that there are go on", error)
                worker.retiring = True
                self._let_go(worker)
                return
            self._failed_starts = 0
            self._dispatch_waiting()
        elif isinstance(message, wire.LoadFailed) and worker.loaded:
            self._break(WorkerError(f"envs.{self.name}: {message.error}"))
        elif isinstance(message, wire.LoadFailed):
            worker.cannot_load(message.error)
        elif isinstance(message, wire.Outage | wire.Warned):
            self.given.hear(worker, message)
        elif isinstance(message, wire.Standing):
            self.heard(message.models, message.refusal)

    # -- watching

    async def _keep_watching(self) -> None:
        measured = time.monotonic()
        while True:
            slept = time.monotonic()
            await asyncio.sleep(LOOK)
            if (gap := (now := time.monotonic()) - slept) > ABSENT:
                for worker in self._workers:
                    worker.forgive(gap, now)
            if time.monotonic() - measured > MEASURE:
                await asyncio.to_thread(measure_all, [worker.child for worker in self._workers])
                measured = time.monotonic()
            if self._growth.due(self._workers, time.monotonic()):
                log.info("envs.%s: its rollouts wait for its workers, so it gets another one", self.name)
                self._add(1 + max(worker.place for worker in self._workers))
            for worker in [worker for worker in self._workers if worker.verdict is None]:
                if worker.loaded:
                    self._look(worker, time.monotonic())
                elif time.monotonic() - worker.began > self._loading:
                    self._soon(self._end(worker, worker.too_slow(self._config.id, self._loading)))

    def _look(self, worker: Worker, now: float) -> None:
        """End a worker that a rollout blocks beyond its time, that is silent, or that needs too much memory."""
        worker.look(now)
        timeout = self._settings.timeout
        allowed = timeout * (2 if self.scores_groups else 1)  # scoring a group may take as long again
        verdict = worker.overdue(timeout, allowed, now)
        if verdict is None and self._memory is not None:
            verdict = worker.too_large(self._memory)
        mark = worker.child.marks.step()
        if verdict is not None and verdict.cause == "retired":
            self._soon(self._warn(worker, verdict.mark, f"{verdict.text}, so it is replaced"))
            worker.retiring = True
            self.replaced["memory"] += 1
            self._add(worker.place)
            if not worker.load:
                self._let_go(worker)
        elif verdict is not None:
            worker.verdict = verdict
            self._soon(self._end(worker, verdict))
        elif mark is not None and now - mark.since > WARN and worker.warned != mark.since:
            worker.warned = mark.since
            self._soon(self._warn(worker, mark, f"{worker.child.name} has computed one step for over {WARN:g} s"))
        elif worker.silent:
            worker.pinged = now
            worker.child.link.send(wire.Ping())

    async def _warn(self, worker: Worker, mark: Mark | None, what: str) -> None:
        where = "" if mark is None else await worker.child.stack(mark)
        log.warning("envs.%s: %s%s", self.name, what, f"; at {where}" if where and worker.child.marks.step() == mark else "")

    async def _end(self, worker: Worker, verdict: Verdict) -> None:
        """End a worker when it has written its stacks, unless the rollout goes on meanwhile."""
        where = await worker.child.stack(verdict.mark)
        if verdict.cause == "timeout" and verdict.mark is not None and not verdict.mark.thread and worker in self._workers:
            mark = worker.child.marks.step()
            if mark is None or mark.since != verdict.mark.since:  # it went on after all
                worker.verdict = None
                self._dispatch_waiting()
                return
        worker.verdict = Verdict(verdict.cause, verdict.mark, f"{verdict.text}; at {where}" if where else verdict.text)
        worker.child.kill()

    def _soon(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # -- when a worker has ended

    def _ended(self, worker: Worker) -> None:
        """A worker's process is gone: fail what it was ended for, play the rest again, replace it."""
        asyncio.get_running_loop().remove_reader(worker.child.pidfd)
        worker.child.link.drain()  # answers that it sent before
        mark = worker.child.marks.step()
        said, code = worker.child.last_lines(), worker.child.process.wait()
        error = None if worker.loaded else worker.not_loaded(self.name, self._config.id, code)
        worker.child.reap()
        self.given.note_outage(worker, False)
        if worker in self._workers:
            self._workers.remove(worker)
        if self._closed:
            return
        verdict = worker.verdict or worker.death(mark, code)
        if verdict.cause != "retired":
            log.warning("envs.%s: %s", self.name, verdict.text if worker.loaded else error)
            if verdict.cause == "died" and said:
                log.warning("the end of its output:\n%s", said)
        if not worker.retiring and (worker.loaded or not self._growth.refused(worker, [*self._workers, worker])):
            self.replaced[verdict.cause] += 1
            self._failed_starts += not worker.loaded
            if error is not None and self._failed_starts >= TRIES:
                self._break(error)
            else:
                self._add(worker.place)
        self._settle(worker, verdict)

    def _settle(self, worker: Worker, verdict: Verdict) -> None:
        """Fail the request that ended its worker; play the others again."""
        for playing in worker.settle(verdict):
            if self._broken is None:
                self.replayed += 1
                self._dispatch(playing)
            elif not playing.answer.done():
                playing.answer.set_exception(self._broken)

    def _let_go(self, worker: Worker) -> None:
        """End a worker that has answered everything."""
        worker.child.link.finish()
        asyncio.get_running_loop().call_later(CLOSING, worker.child.kill)

    def _add(self, place: int) -> None:
        """Start a worker in this place. If the system refuses, no request can be answered."""
        try:
            other = self._start(place)
        except OSError as error:  # no memory, no process, no file left
            self._break(WorkerError(f"envs.{self.name}: no other worker can be started: {error}"))
            return
        self._workers.append(other)
        self._serve(other)

    def _break(self, error: WorkerError) -> None:
        """No worker can be had: every request fails with this error."""
        self._broken = error
        waiting, self._waiting = self._waiting, []
        for playing in [*waiting, *(playing for worker in self._workers for playing in worker.playing.values())]:
            if not playing.answer.done():
                playing.answer.set_exception(error)

    # -- the end

    async def close(self) -> None:
        """Let the environments release their resources, for at most CLOSING seconds, and end the workers. If it is cancelled, at once."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for worker in self._workers:
            if self._watch is not None:
                asyncio.get_running_loop().remove_reader(worker.child.pidfd)
            worker.child.link.finish()
        deadline = time.monotonic() + CLOSING
        try:
            while any(worker.child.process.poll() is None for worker in self._workers) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        finally:
            for worker in self._workers:
                worker.child.reap()
            self._workers = []

    @property
    def waiting(self) -> int:
        """Rollouts that wait until their worker has computed for others."""
        return sum(worker.waiting for worker in self._workers)

    @property
    def memory(self) -> int:
        """Resident bytes of the largest worker and of the processes that it has started."""
        return max((worker.child.memory() for worker in self._workers), default=0)
