"""Where batches come from, and the scores that belong to them."""

from __future__ import annotations

import math
import queue
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_codec_records import same
from trainer_examples import make_samples, step_batch

from rlx.codec import CodecError
from rlx.data.packing import pack
from rlx.data.scores import Scored, read_scores, write_scores
from rlx.data.source import FakeSource, OrchestratorSource, RecordedSource, send, split
from rlx.heartbeat import EVALUATING, Heartbeat
from rlx.parallel.mesh import Mesh, RankLost, one_process
from rlx.paths import RunPaths
from rlx.polling import Preempted
from rlx.rollout.record import record_batch
from rlx.runs.tokens import tokens_of
from rlx.types import MicroBatch, StepBatch

ALONE = one_process("cpu")


def nothing() -> None:
    pass


def batch_of(step: int) -> StepBatch:
    samples = make_samples(seed=step)
    return step_batch(step, [samples[:8], samples[8:]])


# files


def test_the_source_waits_for_its_own_step_and_deletes_it_when_done(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    source = OrchestratorSource(paths, ALONE, timeout=10)
    send(paths, batch_of(4))
    ticks: list[float] = []
    later = threading.Timer(0.1, send, [paths, batch_of(3)])
    later.start()
    batch = source.receive(3, lambda: ticks.append(time.monotonic()))
    later.join()
    assert same(batch, batch_of(3))
    assert batch.mini_batches[0][0].advantages.flags.writeable, "torch must be able to use the arrays without a copy"
    assert ticks, "the heartbeat was not called while waiting"
    assert sorted(p.name for p in paths.batches.iterdir()) == ["step_000003.batch", "step_000004.batch"]
    source.done(3)
    source.done(3)
    assert [p.name for p in paths.batches.iterdir()] == ["step_000004.batch"]


def test_an_evaluation_that_training_waits_for_does_not_count_against_the_batch(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    Heartbeat(paths, "orchestrator").beat(f"{EVALUATING} version 3, rollouts 1/9")
    later = threading.Timer(0.3, send, [paths, batch_of(0)])
    later.start()
    assert same(OrchestratorSource(paths, ALONE, timeout=0.05).receive(0, nothing), batch_of(0))
    later.join()


def test_a_damaged_batch_says_which_file_it_is(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    send(paths, batch_of(0))
    file = paths.batch_of(0)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CodecError, match=r"step_000000\.batch: the checksum of these \d+ bytes is wrong: they were cut short"):
        OrchestratorSource(paths, ALONE, timeout=1).receive(0, nothing)


def test_a_recorded_batch_is_the_one_that_was_sent(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    record_batch(paths.recorded_of(2), batch_of(2))
    source = RecordedSource(paths, ALONE)
    for _ in range(2):  # a recording stays
        assert same(source.receive(2, nothing), batch_of(2))
        source.done(2)
    with pytest.raises(FileNotFoundError, match=r"step_000001\.batch\.zst"):
        source.receive(1, nothing)
    content = bytearray(paths.recorded_of(2).read_bytes())
    content[len(content) // 2] ^= 8
    paths.recorded_of(2).write_bytes(content)
    with pytest.raises(ValueError, match=r"step_000002\.batch\.zst"):
        source.receive(2, nothing)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
def test_a_recording_can_be_split_into_other_mini_batches_of_whole_groups(tmp_path: Path, parts: int) -> None:
    paths, samples = RunPaths(tmp_path), make_samples(groups=4)
    recorded = split(step_batch(0, [samples]), 2)
    record_batch(paths.recorded_of(0), recorded)
    batch = RecordedSource(paths, ALONE, parts).receive(0, nothing)
    assert len(batch.mini_batches) == parts
    assert same([s for mini_batch in batch.mini_batches for s in mini_batch], samples)
    groups = [sorted({s.group for s in mini_batch}) for mini_batch in batch.mini_batches]
    assert groups == [part.tolist() for part in np.array_split(np.arange(4), parts)]
    if parts == 2:
        assert same(batch, recorded)


# several ranks


@dataclass
class Rank:
    """One of two ranks, run as a thread: a mesh that broadcasts through queues."""

    first: bool
    line: queue.Queue[bytes]
    world_size: int = 2
    timeout: float = math.inf

    def broadcast_bytes(self, content: bytes | bytearray | None = None) -> bytes | bytearray:
        if self.first:
            assert content is not None
            self.line.put(bytes(content))
            return content
        assert content is None
        return bytearray(self.line.get(timeout=120))

    def any(self, flag: bool) -> bool:
        if self.first:
            self.line.put(b"yes" if flag else b"no")
            return flag
        return flag or self.line.get(timeout=120) == b"yes"

    read = Mesh.read  # type: ignore[assignment]


def on_two_ranks(receive: Any) -> list[Any]:
    """The result or exception of `receive(rank)` on both ranks."""
    line: queue.Queue[bytes] = queue.Queue()
    found: list[Any] = [None, None]

    def run(number: int) -> None:
        try:
            found[number] = receive(Rank(number == 0, line))
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return found


def test_rank_0_alone_reads_and_the_others_get_its_bytes(tmp_path: Path) -> None:
    paths, nowhere = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "not" / "here")
    send(paths, batch_of(0))
    record_batch(paths.recorded_of(0), batch_of(0))
    for make in (lambda where, rank: OrchestratorSource(where, rank, timeout=60), RecordedSource):
        found = on_two_ranks(lambda rank, make=make: make(paths if rank.first else nowhere, rank).receive(0, nothing))
        assert [same(one, batch_of(0)) for one in found] == [True, True]
        assert found[1].mini_batches[0][0].token_ids.flags.writeable


def test_a_run_that_gives_way_while_rank_0_waits_gives_way_on_every_rank(tmp_path: Path) -> None:
    def leave() -> None:
        raise Preempted

    def receive(rank: Any) -> StepBatch:
        return OrchestratorSource(RunPaths(tmp_path), rank, timeout=60).receive(0, leave if rank.first else pytest.fail)

    assert [type(one) for one in on_two_ranks(receive)] == [Preempted, Preempted]


def test_a_batch_that_rank_0_cannot_read_is_an_error_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.parallel.mesh.RANK_LOST_SECONDS", 0.0)
    paths = RunPaths(tmp_path)
    paths.batch_of(0).mkdir(parents=True)
    found = on_two_ranks(lambda rank: OrchestratorSource(paths, rank, timeout=60).receive(0, lambda: None))
    assert [type(one) for one in found] == [IsADirectoryError, RankLost]


# without files


def test_a_fake_source_has_the_lengths_that_were_asked_for_and_follows_its_seed() -> None:
    fixed: dict[str, Any] = {"groups": 3, "members": 2, "prompt_tokens": (4, 4), "completion_tokens": (6, 6), "vocab_size": 9}
    source = FakeSource(**fixed)
    (samples,) = source.receive(5).mini_batches
    assert [(s.group, s.member) for s in samples] == [(g, m) for g in range(3) for m in range(2)]
    for s in samples:
        assert s.loss_mask.tolist() == [False] * 4 + [True] * 6
        assert s.versions.tolist() == [-1] * 4 + [5] * 6
        assert s.token_ids.max() < 9
        assert len(set(s.advantages[s.loss_mask])) == 1
    assert same(samples[0].token_ids[:4], samples[1].token_ids[:4]), "the rollouts of a group share one prompt"
    assert not same(samples[0].token_ids[4:], samples[1].token_ids[4:])
    assert same(FakeSource(**fixed).receive(5), source.receive(5))
    assert not same(FakeSource(**fixed, seed=1).receive(5), source.receive(5))
    varied = FakeSource(**fixed | {"completion_tokens": (1, 50)}).receive(0).mini_batches[0]
    lengths = {int(s.loss_mask.sum()) for s in varied}
    assert len(lengths) > 2
    assert lengths <= set(range(1, 51))


RANKS, TOKENS = 2, 60


def batch() -> StepBatch:
    samples = make_samples(groups=5, members=3)
    untrained = replace(samples[4], loss_mask=np.zeros_like(samples[4].loss_mask))
    return step_batch(3, [[*samples[:4], untrained, *samples[5:9]], samples[9:]])


def as_if_trained(row: MicroBatch) -> Scored:
    """A model that is 0.25 nat less certain than the engine, and whose entropy is a hundredth of the token's id."""
    mask = row.loss_mask
    return row, (row.inference_logp[mask] - 0.25).astype(np.float32), (row.labels[mask] / 100).astype(np.float32)


def write(paths: RunPaths, rank: int) -> None:
    whole = batch()
    rows = [row for part in pack(whole, rank=rank, ranks=RANKS, tokens=TOKENS).mini_batches for row in part.micro_batches]
    write_scores(paths, whole, [as_if_trained(row) for row in rows], rank)


def test_scores_of_all_ranks_find_their_tokens(tmp_path: Path):
    paths = RunPaths(tmp_path)
    record_batch(paths.recorded_of(3), batch())
    for rank in range(RANKS):
        write(paths, rank)
    samples = [sample for part in batch().mini_batches for sample in part]
    covered = np.concatenate([one.samples for one in read_scores(paths, 3)])
    assert sorted(covered) == [i for i, sample in enumerate(samples) if sample.loss_mask.any()]
    for sample in samples:
        for tokens in tokens_of(tmp_path, 3, sample.group, sample.member):
            if not tokens.sample.loss_mask.any():
                assert tokens.entropy is None
                continue
            assert tokens.mismatch is not None
            assert tokens.entropy[tokens.sample.loss_mask] == pytest.approx(
                tokens.sample.token_ids[tokens.sample.loss_mask] / 100, rel=1e-3
            )
            assert tokens.mismatch[tokens.sample.loss_mask] == pytest.approx(-0.25, rel=1e-3)
            assert np.isnan(tokens.entropy[~tokens.sample.loss_mask]).all()


def test_samples_of_a_rank_without_a_file_have_no_scores(tmp_path: Path):
    paths = RunPaths(tmp_path)
    record_batch(paths.recorded_of(3), batch())
    write(paths, 1)
    samples = [sample for part in batch().mini_batches for sample in part]
    (one,) = read_scores(paths, 3)
    there = {(samples[i].group, samples[i].member) for i in one.samples}
    assert {(s.group, s.member) for s in samples if tokens_of(tmp_path, 3, s.group, s.member)[0].entropy is not None} == there
    paths.scores_of(3, 1).write_bytes(b"cut")
    with pytest.raises(match="is damaged"):
        tokens_of(tmp_path, 3, samples[0].group, samples[0].member)
