"""The trainer: waits for the batch of each step, trains on it, publishes the new policy version.

    batch n (made by versions ≥ n − max_async_level)  →  optimizer steps from version n  →  metrics of step n  →  weights/step_{n+1}

Beside that: a checkpoint of version n where one is due, and before the run gives way to a preemption.

Started as `python -m rlx.roles.trainer --run-dir D` for one rank, under `python -m torch.distributed.run` for several on one host,
and once for each rank, with RANK and WORLD_SIZE, for several hosts.
Ends with 0 after `max_steps` steps, with 75 when it left for a preemption (under torchrun with 0); any other end is an error.
Knows files, not the orchestrator or the servers.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rlx.config.load import load_run
from rlx.config.schema import Config
from rlx.heartbeat import Heartbeat
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths, write_text
from rlx.process import die_with_parent, say_full_disk, set_cpu_threads, sigterm_is_a_notice
from rlx.types import StepBatch
from rlx.waiting import Preempted, wait_for

log = logging.getLogger("rlx.trainer")

INITIAL_MODEL_TIMEOUT = 3600.0  # seconds for the initial model: a warm start, or a download
LEFT = 75  # exit code when the run gave way to a preemption
COLLECTIVE_MARGIN = 600.0  # seconds by which collectives outwait the batch, so that the wait itself is what times out


class Trainer:
    """One rank's objects, built from the run's configuration."""

    def __init__(self, cfg: Config, paths: RunPaths, rank: int, local_rank: int, world_size: int) -> None:
        import torch

        from rlx.checkpoints.folders import TRAINER, read_start
        from rlx.checkpoints.trainer import Checkpoints
        from rlx.data.source import OrchestratorSource, RecordedSource, Source
        from rlx.models.load import DTYPES
        from rlx.parallel.mesh import join, one_process
        from rlx.parallel.rendezvous import meet
        from rlx.train.build import build
        from rlx.weights.hub import fetch
        from rlx.weights.publish import Publisher

        self.cfg, self.paths, self.rank, self.world_size = cfg, paths, rank, world_size
        alone = world_size > 1 and "MASTER_ADDR" not in os.environ  # not under torchrun: ranks on several hosts, each a process of the plan
        self.heartbeat = Heartbeat(paths, f"trainer_{rank}" if rank else "trainer") if rank == 0 or alone else None
        device = torch.device("cuda", local_rank) if cfg.hardware.device == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.manual_seed(cfg.seed)
        mixed = cfg.model.dtype != cfg.trainer.optimization_dtype or (cfg.trainer.fsdp_cpu_offload and device.type == "cuda")
        if world_size > 1 or mixed:
            timeout = max(cfg.trainer.batch_timeout, INITIAL_MODEL_TIMEOUT) + COLLECTIVE_MARGIN
            store = None
            if alone:
                self.beat("waiting for the other ranks")
                store = meet(paths, rank, world_size, timeout=INITIAL_MODEL_TIMEOUT, tick=self.beat_on)
            self.mesh = join(device, rank=rank, world_size=world_size, timeout=timeout, store=store, alive=self.while_waiting)
        else:
            self.mesh = one_process(device)

        self.beat("waiting for the initial model")
        path = paths.initial_model
        tick = self.beat_on if world_size > 1 else self.tick  # several ranks can only leave together
        wait_for(path.exists, f"the initial model ({path})", INITIAL_MODEL_TIMEOUT, poll=0.05, tick=tick)
        source = path.read_text().strip()
        for name in filter(None, (source, cfg.ref.name)):
            fetch(name, self.heartbeat)  # every rank, before any of them waits for another: it may take longer than they wait
        self.step_trainer = build(cfg, source, self.mesh, self.beat)
        self.model, self.reference = self.step_trainer.model, self.step_trainer.reference
        # For the run's summary: `auto` chose it, and nobody reads this role's log.
        self.summary = {"logprob": self.model.logprob_backend, "layers": self.model.liger}
        if rank == 0:
            write_text(paths.kernels, json.dumps(self.summary) + "\n")
        self.device = device
        self.source: Source = (
            OrchestratorSource(paths, self.mesh, cfg.trainer.batch_timeout)
            if cfg.replay is None
            else RecordedSource(RunPaths(Path(cfg.replay)), self.mesh, cfg.trainer.num_minibatches)
        )
        self.metrics = MetricsWriter(paths.metrics, "trainer") if rank == 0 else None
        self.publisher = Publisher.of(
            self.model, self.mesh, paths, source=source, dtype=DTYPES[cfg.model.dtype], trust_remote_code=cfg.model.trust_remote_code
        )
        facts = {"ranks": world_size, "model": cfg.model.name}
        self.checkpoints = Checkpoints(
            paths, cfg.ckpt, self.step_trainer, last=cfg.max_steps, facts=facts, with_orchestrator=cfg.replay is None, tick=self.beat_on
        )
        self.first_step = 0
        self.updated = False  # whether the step that is being trained has changed the weights already
        self.step_trainer.before_micro_batch = self.between_micro_batches
        if (start := read_start(paths)) is not None:
            self.beat(f"reading checkpoint {start.step}")
            self.resume(start.checkpoint / TRAINER, start.step)

    def resume(self, folder: Path, step: int) -> None:
        """Take the state of a checkpoint, and see that its policy version is there for the servers."""
        from rlx.train.checkpoint import load

        progress = load(folder, self.step_trainer)
        assert progress.step == step, f"{folder} is the state after {progress.step} steps, not {step}"
        self.first_step = step
        self.publisher.ensure(step)
        log.info("going on after %d steps, from %s", step, folder)

    def run(self) -> int:
        """Train up to `max_steps` steps, from version n to version `max_steps`; returns the exit code."""
        for step in range(self.first_step, self.cfg.max_steps):
            started = time.perf_counter()
            try:
                batch = self.receive(step)
                waited = time.perf_counter() - started
                self.checkpoints.wait_copied()
                values = self.train(batch)
            except Preempted:
                return self.give_way(step)
            values["time/wait_batch"] = waited
            self.publish(step, values, started)
            self.keep(step + 1)
        self.publisher.close()
        self.checkpoints.close()
        self.beat("done")
        return 0

    def keep(self, step: int) -> None:
        """A checkpoint of the state after `step` steps where one is due; complete an earlier one that was written meanwhile."""
        self.checkpoints.prepare()
        if self.checkpoints.due(step):
            self.beat(f"writing checkpoint {step}", step)
            self.publisher.wait()
            self.checkpoints.save(step)
        self.checkpoints.finish(wait=False)

    # -- preemption

    def give_way(self, step: int) -> int:
        """The machine will be taken away: keep the state after `step` steps, say so, leave."""
        self.step_trainer.give_up()
        self.publisher.close()
        if step > self.first_step:
            self.beat(f"writing checkpoint {step} before leaving", step)
            self.checkpoints.save(step)
        self.checkpoints.close()
        log.info("preempted after %d steps", step)
        if self.rank == 0:
            write_text(self.paths.preempted, json.dumps({"step": step}) + "\n")
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else LEFT  # torchrun takes any other code for a failure

    def between_micro_batches(self) -> None:
        """Still alive. Raises Preempted when the notice is older than `launcher.grace` and nothing of the step is applied."""
        self.beat_on()
        if self.updated:
            return
        late = self.paths.preempt.exists() and time.time() - self.paths.preempt.stat().st_mtime > self.cfg.launcher.grace
        if self.mesh.any(late):
            log.info("this step is given up: the run was told to give way more than launcher.grace=%g s ago", self.cfg.launcher.grace)
            raise Preempted

    # -- one step

    def receive(self, step: int) -> StepBatch:
        """The batch of this step, the same on every rank. Raises Preempted, on all ranks, when the run is to give way."""
        self.beat(f"waiting for batch {step}", step)
        if self.mesh.any(self.mesh.first and self.paths.preempt.exists()):
            raise Preempted
        batch = self.source.receive(step, self.tick)
        self.source.done(step)
        return batch

    def train(self, step_batch: StepBatch) -> dict[str, float]:
        """The optimizer steps of a batch; the step's metrics. Raises Preempted, on all ranks, when it is given up."""
        from rlx.data.packing import pack

        ranks, tokens = self.mesh.num_data_ranks, self.cfg.micro_batch_tokens
        batch = pack(step_batch, rank=self.mesh.data_rank, ranks=ranks, tokens=tokens)
        self.updated = False
        self.beat(f"training step {batch.step}", batch.step)

        def starts(update: int, of: int) -> None:
            self.updated = update > 0
            self.beat(f"training step {batch.step}, optimizer step {update + 1} of {of}", batch.step)

        iterations = self.cfg.trainer.num_iterations
        values = self.step_trainer.train_batch(batch, iterations=iterations, starts=starts)
        if self.reference is not None and self.reference.after_step(batch.step, self.model):
            log.info("step %d: the reference took up the policy with weight %g", batch.step, self.reference.alpha)
        if self.rank == 0 and self.step_trainer.warning is not None and "warning" not in self.summary:
            self.summary["warning"] = self.step_trainer.warning
            log.warning("step %d: %s", batch.step, self.step_trainer.warning)
            write_text(self.paths.kernels, json.dumps(self.summary) + "\n")
        seconds = values["time/forward_backward"] + values["time/optimizer"]
        return values | {"perf/tokens_per_second": iterations * batch.num_tokens / seconds, "perf/peak_memory_gb": self.peak_memory()}

    def publish(self, step: int, values: dict[str, float], started: float) -> None:
        """Gather version n+1, write the metrics of step n, then let the version appear; delete versions nobody needs.

        The orchestrator goes on when it sees the version, so the order of lines in `metrics.jsonl` is always the same.
        """
        version = step + 1
        # Nobody serves the versions of a replay: what is asked for is kept.
        wanted = self.cfg.replay is None or version == self.cfg.max_steps or self.checkpoints.due(version)
        began = time.perf_counter()
        if wanted:
            self.beat(f"gathering version {version}", step)
            self.publisher.gather(version)
        if self.metrics is None:
            return
        ended = time.perf_counter()
        share = (values["time/forward_backward"] + values["time/optimizer"]) / (ended - started)
        times = {"time/broadcast": ended - began, "time/write_weights": self.publisher.seconds, "time/step": ended - started}
        self.metrics.write(step, values | times | {"perf/compute_frac": share})
        if wanted:
            # Servers may still be reading the version that is max_async_level + 1 behind this one.
            keep_last = max(self.cfg.weight_broadcast.keep_last, self.cfg.max_async_level + 2)
            self.publisher.announce(version, keep_last=keep_last, protect=self.checkpoints.protected())
        log.info("step %d: loss %.4f, gradient norm %.3f, version %d", step, values["loss/total"], values["optim/grad_norm"], version)

    def peak_memory(self) -> float:
        """Largest memory of the device since the last call, GiB; 0 on CPU."""
        import torch

        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def beat(self, phase: str, step: int | None = None) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat(phase, step)

    def beat_on(self) -> None:
        """While waiting: still alive, still the same phase. Raises what writing a version beside it raised."""
        self.publisher.check()
        if self.heartbeat is not None:
            self.heartbeat.beat(self.heartbeat.phase)

    def while_waiting(self) -> AbstractContextManager[None]:
        """Says that this rank lives while it waits for rank 0."""
        return self.heartbeat.during(self.heartbeat.phase) if self.heartbeat is not None else nullcontext()

    def tick(self) -> None:
        """While waiting where it can be left: raises Preempted when the run is to give way."""
        self.beat_on()
        if self.paths.preempt.exists():
            raise Preempted


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m rlx.roles.trainer", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    paths = RunPaths(parser.parse_args().run_dir)

    def stop(number: int, _: object) -> None:
        if number == signal.SIGTERM and sigterm_is_a_notice():
            paths.ask_to_give_way()
        else:
            os._exit(128 + number)  # nothing to tidy: files appear whole or not at all

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    cfg = load_run(paths.root)
    rank, local_rank, world_size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s trainer %(message)s", stream=sys.stdout)
    set_cpu_threads(cfg.hardware.cpu_threads)
    if world_size != cfg.trainer_ranks:
        raise ValueError(
            f"hardware.trainer_processes gives {cfg.trainer_ranks} ranks and {world_size} processes were started; start as many"
        )

    import torch

    set_cpu_threads(cfg.hardware.cpu_threads)  # torch is loaded now
    if cfg.hardware.device == "cpu":
        torch.use_deterministic_algorithms(True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  a debugging aid that costs time
    try:
        trainer = Trainer(cfg, paths, rank, local_rank, world_size)
    except Preempted:  # before there was anything to keep
        return LEFT
    code = trainer.run()
    trainer.mesh.close()
    return code


if __name__ == "__main__":
    sys.exit(say_full_disk(main))
