"""What becomes data of a synthesis whose weights changed: nothing that others than the latest have sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from test_rollout_runner import outcome

from rlx.config.load import compose
from rlx.config.roots import SYNTHESIZE
from rlx.paths import RunPaths
from rlx.rollout.eval_results import Outcome
from rlx.rollout.sft_export import NothingKept, export


def finished(paths: RunPaths, *rollouts: tuple[int, int, str | None, int]) -> None:
    """Writes rollouts: place, number, weights, version."""
    said = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    nodes = [{"parent": n - 1, "message": said[n], "sampled": bool(n)} for n in (0, 1)]
    paths.finished.parent.mkdir(parents=True, exist_ok=True)

    def record(place: int, number: int, weights: str | None, version: int) -> Outcome:
        facts = {"env": "sums", "weights": weights, "version": version, "nodes": nodes}
        return msgspec.structs.replace(outcome(place, number), **facts)

    paths.finished.write_bytes(b"".join(msgspec.json.encode(record(*one)) + b"\n" for one in rollouts))


def test_the_choice_is_made_from_what_the_latest_weights_have_sampled(tmp_path: Path) -> None:
    cfg = compose(["env=sums", "num_examples=2", "rollouts_per_example=2", "duplicates=keep", "dry_run=true"], {}, SYNTHESIZE).cfg
    paths = RunPaths(tmp_path)
    for last, played in ((("b", 28), 2), (("a", 28), 3), ((None, 28), 2), (("a", 3), 1)):
        finished(paths, (0, 0, "a", 28), (0, 1, "a", 28), (2, 0, "a", 28), (1, 0, "b", 28), (1, 1, *last))
        assert export(cfg, paths)["rollouts"] == {"played": played, "kept": played, "dropped": {}}, last
    with pytest.raises(NothingKept, match=r"no rollout is kept: of 1, 1 reward too low; their rewards are 1 to 1\.\n  fix: choose again"):
        export(replace(cfg, min_reward=2.0), paths)
