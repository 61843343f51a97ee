"""Checks what a run has recorded: its batches against its rollouts, and against the turns that were sampled, where these are known.

Of rlx it uses the decoder of batches and the names of files, and nothing that makes samples or advantages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import zstandard

from rlx import codec
from rlx.paths import RunPaths
from rlx.rollout.record import read_rollouts
from rlx.trace import Turn
from rlx.types import StepBatch, TrainingSample

Trained = tuple[tuple[int, ...], float, int, float]  # the tokens up to and with a trained one, its log-probability, version, temperature
Which = tuple[int, int]  # group and member of a rollout


def recorded_samples(run_dir: Path, step: int) -> list[TrainingSample]:
    """The samples of a recorded batch."""
    packed = RunPaths(run_dir).recorded_of(step).read_bytes()
    batch = codec.decode(bytearray(zstandard.ZstdDecompressor().stream_reader(packed).read()), StepBatch)
    assert batch.step == step
    return [sample for part in batch.mini_batches for sample in part]


def check_recorded(
    run_dir: Path,
    steps: int,
    baseline: Callable[[np.ndarray], np.ndarray],
    turns: Sequence[Turn] | Mapping[Which, Sequence[Turn]] | None = None,
) -> tuple[int, int]:
    """Check the first `steps` steps of a run. Returns the numbers of trained tokens and of groups.

    Every token of a trained rollout is trained once, in a context of its own, with a log-probability and a version of the rollout's.
    `baseline`: advantages [G] of a group's rewards [G]. Each rollout has that advantage in its record and on each of its tokens.
    `turns`: all that were sampled; then what was trained is exactly that: token, context, log-probability, version and temperature.
    If they are given by rollout, each rollout trains exactly its own.
    """
    trained: dict[Which, Counter[Trained]] = {}
    num_groups = 0
    for step in range(steps):
        tokens: defaultdict[Which, list[Trained]] = defaultdict(list)
        weights: defaultdict[Which, set[float]] = defaultdict(set)
        for sample in recorded_samples(run_dir, step):
            on, which = sample.loss_mask, (sample.group, sample.member)
            assert not on[0], "the first token has no context"
            assert not sample.advantages[~on].any()
            assert not sample.inference_logprobs[~on].any()
            weights[which] |= set(sample.advantages[on].tolist())
            for place in np.flatnonzero(on).tolist():
                context = tuple(sample.token_ids[: place + 1].tolist())
                numbers = (sample.inference_logprobs[place], sample.versions[place], sample.temperature[place])
                tokens[which].append((context, *(one.item() for one in numbers)))  # type: ignore[arg-type]
        groups: defaultdict[int, list[dict]] = defaultdict(list)
        for line in read_rollouts(RunPaths(run_dir).rollouts_of(step)):
            if line["advantage"] is not None:
                groups[line["group"]].append(line)
        num_groups += len(groups)
        for group, lines in groups.items():
            parts = defaultdict(list)
            for line in lines:
                parts[line["compared"]].append(line)
            for part in parts.values():
                expected = baseline(np.array([line["reward"] for line in part], np.float64))
                np.testing.assert_allclose([line["advantage"] for line in part], expected, rtol=1e-5, atol=1e-6, err_msg=f"group {group}")
            for line in lines:
                which = (group, line["member"])
                own = tokens.pop(which, [])
                assert len(own) == line["num_tokens"], (step, which)
                assert len({context for context, *_ in own}) == len(own), f"{which}: a token is trained twice"
                assert {version for _, _, version, _ in own} == set(line["versions"]), which
                assert all(-np.inf < logprob <= 0 for _, logprob, _, _ in own), which
                assert weights[which] <= {float(np.float32(line["advantage"]))}, which
                trained[which] = Counter(own)
        assert not tokens, f"step {step} trains on rollouts that it has no record of: {sorted(tokens)}"
    everything = sum(trained.values(), Counter[Trained]())
    if isinstance(turns, Mapping):
        assert trained.keys() == turns.keys()
        for which, its_turns in turns.items():
            assert trained[which] == sampled(its_turns), which
    elif turns is not None:
        assert everything == sampled(turns)
    return everything.total(), num_groups


def sampled(turns: Sequence[Turn]) -> Counter[Trained]:
    """Every token of the turns, as it must be trained."""
    found: Counter[Trained] = Counter()
    for turn in turns:
        known = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
        for number, (logprob, version) in enumerate(zip(turn.logprobs.tolist(), turn.versions.tolist(), strict=True)):
            found[tuple(known[: len(turn.prompt_ids) + number + 1]), logprob, version, float(np.float32(turn.temperature))] += 1
    return found


def normalised(rewards: np.ndarray) -> np.ndarray:
    """(R − mean) / (sample standard deviation + 1e-6), the run's default; 0 if all rewards are equal."""
    own = rewards - rewards.sum() / len(rewards)
    return own / ((own @ own / (len(own) - 1)) ** 0.5 + 1e-6)
