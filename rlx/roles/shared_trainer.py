"""The shared trainer: trains the adapters of several runs on one model. Runs join and leave while it works (docs/lora.md).

    runs that ask in `run_*`  →  slots  →  those whose batch is complete: one common step  →  each run's metrics, version, checkpoint

A step takes the runs whose batch is complete and waits for no other, except for `trainer.batch_wait` seconds. A run that fails is put
out of its slot; the others go on. Rank 0 looks at the files and decides, and the other ranks do the same.

Start it as `rlx.roles.trainer`. The exit code is 0 after `trainer.idle_timeout` seconds without a run, and 75 after a preemption.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rlx.config.load import load_run
from rlx.config.schema import Config
from rlx.metrics import MetricsWriter, read_metrics
from rlx.parallel.rendezvous import Place
from rlx.paths import RunPaths, listed, write_text
from rlx.polling import LEFT, Pause, Preempted
from rlx.process import end_at_once
from rlx.shared.membership import LivenessLock, State, is_present, pending_requests, respond, response_of
from rlx.train.role import begin
from rlx.train.watch import Watch

log = logging.getLogger("rlx.trainer")
T = TypeVar("T")

POLL_SECONDS = 0.25  # seconds between two looks for runs that join or leave
IDLE = 60.0  # seconds after which rank 0 tells the others that there is nothing to do; their wait for it has a limit


class SharedTrainer:
    """One rank's objects."""

    def __init__(self, cfg: Config, paths: RunPaths, place: Place, watch: Watch) -> None:
        from rlx.parallel.mesh import build_mesh
        from rlx.shared.member import HostedRun
        from rlx.train.build import policy_of
        from rlx.train.flops import Meter
        from rlx.weights.hub import TIMEOUT, initial_model

        assert cfg.trainer.max_concurrent_runs is not None
        self.cfg, self.paths, self.watch, self.slots = cfg, paths, watch, cfg.trainer.max_concurrent_runs
        self.presence = LivenessLock(paths) if place.rank == 0 else None
        self.mesh = build_mesh(cfg, paths, place, timeout=TIMEOUT, tick=watch.heartbeat, alive=watch.waiting)
        self.model = policy_of(cfg, initial_model(cfg, paths, self.mesh, watch), self.mesh, watch.working)
        self.meter = Meter(self.model, self.mesh)
        self.members: dict[int, HostedRun] = {}
        self.seen: set[str] = set()  # tokens of all runs that have asked
        self.metrics = MetricsWriter(paths.metrics, "trainer") if self.mesh.first else None
        self.steps = max((record["step"] for record, _ in read_metrics(paths.metrics)), default=-1) + 1  # common ones, of all attempts
        self.since, self.looked = time.monotonic(), -POLL_SECONDS

    def run(self) -> int:
        """Train until nobody needs it. Returns the exit code."""
        while True:
            try:
                news = json.loads(self.mesh.read(lambda _: json.dumps(self.look()).encode()))
            except Preempted:
                return self.give_way()
            for slot, why in news.get("leave", ()):
                self.put_out(slot, why)
            for slot in news.get("done", ()):
                self.leave(slot, "done", "")
            for slot in news.get("preempted", ()):
                self.let_go(slot)
            for slot, folder, token in news.get("join", ()):
                self.admit(slot, RunPaths(Path(folder)), token)
            if slots := news.get("train"):
                self.train(slots)
            if "end" in news:
                log.info("no run for %g s (trainer.idle_timeout): the shared trainer ends", news["end"])
                self.watch.beat("done")
                return 0

    # -- what happens, on rank 0

    def look(self) -> dict[str, Any]:
        """Wait for something to do; empty after `IDLE` seconds without. Raises Preempted."""
        pause, first, began = Pause(0.002), None, time.monotonic()
        while True:
            self.watch.tick()
            if time.monotonic() - self.looked >= POLL_SECONDS:
                self.looked = time.monotonic()
                gone = [[slot, why] for slot, member in self.members.items() if (why := self.reason_to_leave(member))]
                left = {slot for slot, _ in gone}
                preempted = [slot for slot, member in self.members.items() if slot not in left and listed(member.paths.preempt)]
                left |= set(preempted)
                done = [slot for slot, member in self.members.items() if slot not in left and member.settled]
                found = {"leave": gone, "preempted": preempted, "done": done, "join": [] if left or done else list(self.joining())}
                if any(found.values()):
                    return found
            now, idle = time.monotonic(), self.cfg.trainer.idle_timeout
            ready = [slot for slot, member in self.members.items() if member.ready()]
            if ready:
                first = now if first is None else first
                if len(ready) == sum(not member.done for member in self.members.values()) or now - first >= self.cfg.trainer.batch_wait:
                    return {"train": ready}
            elif now - began >= IDLE:
                return {}
            if self.members:
                self.since = now
                self.watch.beat(f"waiting for batches of {self.names(self.members)}", self.steps)
            elif idle is not None and now - self.since > idle:
                return {"end": idle}
            else:
                self.watch.beat("waiting for runs", self.steps)
            time.sleep(pause.seconds())

    def reason_to_leave(self, member: Any) -> str | None:
        """Why a run must leave its slot; None: it stays."""
        try:
            if trouble := member.go_on():
                return trouble
            return None if member.settled else member.gone()
        except OSError as error:  # its files cannot be read: the other runs go on
            return _text(error)

    def joining(self) -> Iterator[tuple[int, str, str]]:
        """Slot, directory and token of runs that ask and can be admitted. The others get an answer."""
        free = [slot for slot in range(self.slots) if slot not in self.members]
        taken = {member.paths.root for member in self.members.values()}
        for paths, token in pending_requests(self.paths):
            if token in self.seen or paths.root in taken:
                continue
            try:
                before = response_of(paths)
                if not is_present(paths):
                    if before is not None and (before.token, before.state) == (token, "in"):  # of a trainer that was killed
                        respond(paths, token, "out", "its trainer has ended; start the run again, resume=latest")
                    continue
            except OSError as error:
                self.seen.add(token)
                log.warning("%s cannot join: %s", paths.root.name, _text(error))
                continue
            self.seen.add(token)
            if before is not None and before.token == token:
                if before.state == "in":
                    respond(paths, token, "out", "it was started again; go on with this run, resume=latest")
            elif free:
                yield free.pop(0), str(paths.root), token
            else:
                names = self.names(self.members)
                respond(
                    paths, token, "out", f"it trains {self.slots} runs (trainer.max_concurrent_runs): {names}. Wait until one has ended"
                )

    # -- what is done then, on every rank

    def admit(self, slot: int, paths: RunPaths, token: str) -> None:
        """Give a run a slot, if it can be loaded."""
        from rlx.shared.member import HostedRun

        with self.watch.working(f"loading {paths.root.name}"):
            member, why = self.tried(HostedRun, self.cfg, paths, token, slot, self.model, self.mesh, self.watch.heartbeat)
        if member is None:
            log.warning("%s is refused: %s", paths.root.name, why)
            self.say(paths, token, "out", why)
            self.since = time.monotonic()  # it was at work, and the run may come back, corrected
            return
        self.members[slot] = member
        member.trainer.before_micro_batch = self.watch.progressed
        self.say(paths, token, "in")
        log.info("%s joins in slot %d, after %d of %d steps", member.name, slot, member.step, member.cfg.max_steps)

    def train(self, slots: list[int]) -> None:
        """A common step of the runs in these slots, whose batches are complete."""
        from rlx.data.packing import check_samples, pack_together
        from rlx.train.step import train

        started, batches, tokens = time.perf_counter(), {}, self.cfg.micro_batch_tokens
        for slot in slots:
            batch, why = self.tried(self.members[slot].receive)
            if batch is not None:
                _, why = self.tried(check_samples, batch, tokens, self.members[slot].trainer.losses.streams)
            if batch is not None and not why:
                batches[slot] = batch
            else:
                self.put_out(slot, why)
        if not batches:
            return
        members = {slot: self.members[slot] for slot in batches}
        self.watch.beat(f"training a step of {self.names(members)}", self.steps)
        trainers = {slot: member.trainer for slot, member in members.items()}
        packed = pack_together(
            batches,
            rank=self.mesh.data_rank,
            ranks=self.mesh.num_data_ranks,
            tokens=tokens,
            loss_of={slot: trainer.losses.loss_of for slot, trainer in trainers.items()},
            cost=self.meter.flops.work,
            padded=self.model.padded,
        )
        iterations = {slot: member.cfg.trainer.num_iterations for slot, member in members.items()}
        began = time.perf_counter()
        outcomes = train(packed, trainers, iterations)
        seconds, trained = time.perf_counter() - began, [slot for slot, one in outcomes.items() if not isinstance(one, Exception)]
        common = self.meter.measure_common({slot: batches[slot] for slot in trained}, packed, iterations, seconds)
        for slot, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                self.put_out(slot, _text(outcome))
                continue
            with self.watch.working(f"publishing for {members[slot].name}", self.steps):
                _, why = self.tried(members[slot].after, outcome, common, started)
            if why:
                self.put_out(slot, why)
        if self.metrics is not None:
            self.metrics.write(self.steps, common | {"time/step": time.perf_counter() - started})
        self.steps += 1

    def let_go(self, slot: int) -> None:
        """A run is preempted: write its checkpoint, tell its processes, and free the slot."""
        member = self.members[slot]
        _, why = self.tried(member.save) if member.step > member.first else (None, "")
        if why:
            self.put_out(slot, why)
            return
        if self.leave(slot, "done", "") == "done" and self.mesh.first:  # its checkpoint is complete
            write_text(member.paths.preempted, json.dumps({"step": member.step}) + "\n")

    def put_out(self, slot: int, why: str) -> None:
        """End a run's membership, because it cannot be trained any more."""
        self.members[slot].hurried = True
        self.leave(slot, "out", why)

    def leave(self, slot: int, state: State, why: str) -> State:
        """Free a slot. What is being written for its run is finished first; if that fails, the run is put out. Returns its state."""
        member = self.members.pop(slot)
        _, trouble = self.tried(member.close)
        self.since = time.monotonic()
        if trouble and state == "done":
            state, why = "out", trouble
        log.log(
            logging.INFO if state == "done" else logging.WARNING, "%s leaves after %d steps%s", member.name, member.step, why and f": {why}"
        )
        self.say(member.paths, member.token, state, why)
        return state

    def say(self, paths: RunPaths, token: str, state: State, why: str = "") -> None:
        """Answer a run."""
        if self.mesh.first:
            respond(paths, token, state, why)

    def tried(self, action: Callable[..., T], *arguments: Any) -> tuple[T | None, str]:
        """(the action's result, "") or (None, why it failed on some rank)."""
        result, error = None, None
        try:
            result = action(*arguments)
        except Exception as raised:
            log.exception("a run's part of the work failed")
            error = raised
        if self.mesh.any(error is not None):
            return None, _text(error) if error is not None else "it failed on another rank of the shared trainer, whose log says why"
        return result, ""

    def give_way(self) -> int:
        """Handle a preemption of the trainer itself: save every run's state. Returns the exit code."""
        for slot in list(self.members):
            member = self.members[slot]
            _, why = self.tried(member.save) if member.step > member.first else (None, "")
            self.leave(slot, "out", why or "it was preempted; start it again, then go on with this run, resume=latest")
        if self.mesh.first:
            write_text(self.paths.preempted, json.dumps({"step": self.steps}) + "\n")
        return LEFT

    def names(self, slots: Any) -> str:
        return ", ".join(self.members[slot].name for slot in sorted(slots)) or "none"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> int:
    """One rank as a process. Returns its exit code."""
    cfg, paths, place = begin("rlx.roles.shared_trainer", __doc__, load_run)
    watch = Watch(paths, place.name, first=place.rank == 0, grace=cfg.launcher.grace)
    try:
        trainer = SharedTrainer(cfg, paths, place, watch)
    except Preempted:
        return LEFT
    code = trainer.run()
    trainer.mesh.close()
    return code


if __name__ == "__main__":
    end_at_once(main)
