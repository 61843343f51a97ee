"""The parts of `gpu.py` that bring state out of the trainer: weights to files, and checkpoints."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gpu_models import build, over_itself, rollouts, shape_of, trainer_of
from gpu_rows import Report
from torch.distributed.tensor import DTensor

from rlx.data.packing import pack
from rlx.train.checkpoint import Saver, TrainerProgress, load


def stand_in_for_xxhash() -> str:
    """Let the writing of versions run where xxhash is not installed. Returns a note for the rows: the stand-in is slower."""
    if find_spec("xxhash") is not None:
        return ""

    class Digest:
        def __init__(self) -> None:
            self._state = hashlib.blake2b(digest_size=8)
            self.update, self.hexdigest = self._state.update, self._state.hexdigest

    module: Any = ModuleType("xxhash")
    module.xxh3_64 = Digest
    module.xxh3_64_hexdigest = lambda data: hashlib.blake2b(data, digest_size=8).hexdigest()
    sys.modules["xxhash"] = module
    return ", blake2b instead of xxh3"


def write(report: Report) -> None:
    """A version as the trainer writes it: shards cast and gathered, pinned copies, files with checksums. The third of three is reported."""
    note = stand_in_for_xxhash()
    from rlx.paths import RunPaths
    from rlx.weights.files import ModelFiles
    from rlx.weights.publish import Publisher

    mesh = over_itself(report)
    for base in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        shape = shape_of(report, "0.6B")
        with report.attempt("write", f"{shape.name}, bfloat16, {base}"), tempfile.TemporaryDirectory(dir=base) as folder:
            built = build(shape.config(), report, mesh, master=torch.float32)
            size = 2 * sum(parameter.numel() for parameter in built.model.parameters())
            if (free := shutil.disk_usage(base).free) < 4 * size:
                raise RuntimeError(f"{base} has {free / 1e9:.1f} GB free; two versions, a copy and some room take {4 * size / 1e9:.1f}")
            paths = RunPaths(Path(folder))
            publisher = Publisher(built.model, mesh, paths, ModelFiles({}), torch.bfloat16)
            held, writing = 0.0, 0.0
            for version in (1, 2, 3):  # the first allocates pinned memory, and the third overwrites a file
                began = time.perf_counter()
                publisher.gather(version)
                held = time.perf_counter() - began
                publisher.announce(version, keep_last=1)
                publisher.wait()
                writing = publisher.seconds
            began = time.perf_counter()
            shutil.copytree(paths.weights_of(3), paths.root / "copy")
            copy = time.perf_counter() - began
            publisher.close()
            where = f"{shape.name}, {size / 1e9:.3g} GB, {base}{note}"
            report.row("gather and copy to pinned memory", where, size / held / 1e9, "GB/s", peak_gib=report.peak())
            report.row("write with checksums", where, size / writing / 1e9, "GB/s")
            report.row("share that holds the trainer", where, held / (held + writing), "of the update", "<= 0.2")
            report.row("update / copy of the same bytes", where, (held + writing) / copy, "times", "<= 1.5")
            del built, publisher


def stager(report: Report) -> None:
    """A checkpoint that is copied on the stager's own stream and written beside the next steps: how long it holds the trainer, and whether
    what it holds is the state between the two steps."""
    shape, mesh = shape_of(report, "0.6B"), over_itself(report)
    length = 128 if report.small else 8192
    with report.attempt("stager", shape.name), tempfile.TemporaryDirectory(dir=_roomiest()) as folder:
        built = build(shape.config(min(shape.layers, 8)), report, mesh, master=torch.float32)
        trainer, source = trainer_of(built, report), rollouts(shape, 4, length)
        size = 4 * 3 * sum(parameter.numel() for parameter in built.trained)  # float32: values, and the optimizer's two moments
        if (free := shutil.disk_usage(folder).free) < 1.2 * size:
            raise RuntimeError(f"{folder} has {free / 1e9:.1f} GB free; a checkpoint takes {size / 1e9:.1f}")

        def step(number: int) -> float:
            batch = source.receive(number)
            mesh.synchronize()
            began = time.perf_counter()
            trainer.train_batch(pack(batch, rank=0, ranks=1, tokens=length))
            mesh.synchronize()
            return time.perf_counter() - began

        step(0)
        saver = Saver(trainer, lambda _: "", in_background=True)
        alone = min(step(number) for number in (1, 2, 3))
        before = [value.clone() for value in _own(built.model)]
        began = time.perf_counter()
        saving = saver.save(Path(folder) / "state", TrainerProgress(4, 4))
        saving.wait_copied()
        held = time.perf_counter() - began
        beside = step(4)
        saving.files()
        written = time.perf_counter() - began
        saver.close()
        changed = sum(int((value != old).sum()) for value, old in zip(_own(built.model), before, strict=True))
        load(Path(folder) / "state", trainer)
        other = sum(int((value != old).sum()) for value, old in zip(_own(built.model), before, strict=True))
        where = f"width of {shape.name}, {size / 1e9:.3g} GB of state"
        if not changed:
            raise RuntimeError("the step beside the writing changed no parameter, so the comparison shows nothing")
        report.row("values of the checkpoint that a step beside it changed", where, other, "values", "== 0", exact=True)
        report.row("the copy that holds the trainer", where, size / held / 1e9, "GB/s", peak_gib=report.peak())
        report.row("a step beside the writing / a step alone", where, beside / alone, "times")
        report.row("write", where, size / (written - held) / 1e9, "GB/s")
        del built, saver


def _own(model: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's part of each parameter. torch 2.11 cannot compare what is divided."""
    return [value.detach().to_local() if isinstance(value, DTensor) else value.detach() for value in model.parameters()]


def _roomiest() -> Path:
    """Memory, or the disk if that has more room."""
    return max((Path("/dev/shm"), Path(tempfile.gettempdir())), key=lambda base: shutil.disk_usage(base).free if base.is_dir() else 0)
