"""Which completed runs of a repeated sweep are skipped: those that have done what is asked for now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_rollout_runner import outcome

from rlx.config.load import compose
from rlx.config.roots import EVAL, SYNTHESIZE
from rlx.config.schema import RunConfig
from rlx.config.schema_base import CommandConfig
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.launch import sweep
from rlx.launch.sweep import Element
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.rollout.sft_export import export
from rlx.runs.run_dir import create
from rlx.runs.status import Status


def completed(cfg: Any) -> RunPaths:
    """The directory of a run of this configuration, which has completed without doing anything yet."""
    paths, lock = create(cfg, [], [])
    lock.close()
    status = Status(max_steps=cfg.total_steps)
    status.finish("completed")
    status.write(paths)
    return paths


def evaluation(root: Path, **changes: Any) -> EvalRoot:
    cfg, weights = compose(["env=sums", "model=tiny"], {}, EVAL).cfg, root.parent / "trained"
    for version in range(1, 7):
        (weights / f"step_{version}").mkdir(parents=True, exist_ok=True)
        (weights / f"step_{version}" / "COMPLETE").touch()
    return replace(cfg, weights_dir=str(weights), eval_base=False, run=RunConfig(name=root.name, dir=str(root)), **changes)


def synthesis(root: Path, **changes: Any) -> SynthesizeRoot:
    cfg = compose(["env=sums", "model=tiny", "num_examples=2", "rollouts_per_example=1"], {}, SYNTHESIZE).cfg
    return replace(cfg, run=RunConfig(name=root.name, dir=str(root)), **changes)


def synthesized(root: Path, **changes: Any) -> SynthesizeRoot:
    """A synthesis that has completed: the keys with which it wrote its data."""
    cfg = synthesis(root, **changes)
    paths = completed(cfg)
    one, said = outcome(0, 0), [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    one.env, one.nodes = "sums", [{"parent": n - 1, "message": said[n], "sampled": bool(n)} for n in (0, 1)]
    paths.finished.parent.mkdir(exist_ok=True)
    paths.finished.write_bytes(msgspec.json.encode(one) + b"\n")
    export(cfg, paths)
    return cfg


def state_of(cfg: CommandConfig) -> str:
    """The state that a repeated sweep finds of a run."""
    found = Element("run", cfg, [], [])
    sweep.find_states([found])
    return found.state


def starts(cfg: CommandConfig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a run of the pool, in its directory, starts anything."""
    started: list[Path] = []
    monkeypatch.setattr(sweep, "launch", lambda paths, *_: started.append(paths.root) or 0)
    sweep.release(sweep.make_directories([Element("run", cfg, [], [], state="again")]))
    assert sweep.run_element(str(cfg.run.dir)) == 0
    return bool(started)


@pytest.mark.parametrize(
    ("steps", "state"), [([1, 2], "done"), ([2], "done"), ([3, 4], "again"), ([5], "again"), ([1, 2, 3], "again"), ([4, 5, 6], "again")]
)
def test_an_evaluation_is_done_if_the_versions_asked_for_have_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int], state: str
) -> None:
    paths = completed(evaluation(tmp_path / "run", steps=[1, 2]))
    metrics = MetricsWriter(paths.metrics, "eval")
    for version in (1, 2):
        metrics.write(version, {})
    cfg = evaluation(tmp_path / "run", steps=steps)
    assert state_of(cfg) == state
    assert starts(cfg, monkeypatch) == (state == "again")


def test_an_evaluation_of_anothers_servers_is_done_with_the_version_that_they_had(tmp_path: Path) -> None:
    cfg = replace(evaluation(tmp_path / "run"), weights_dir=None)
    paths = completed(cfg)
    assert state_of(cfg) == "again"
    MetricsWriter(paths.metrics, "eval").write(7, {})
    assert state_of(cfg) == "done"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "done"),
        ({"num_examples": 3}, "again"),
        ({"rollouts_per_example": 2}, "again"),
        ({"min_reward": 0.5}, "again"),
        ({"play": False}, "done"),
    ],
)
def test_a_synthesis_is_done_if_its_data_are_those_of_the_same_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], state: str
) -> None:
    synthesized(tmp_path / "run")
    cfg = synthesis(tmp_path / "run", **changes)
    assert state_of(cfg) == state
    assert starts(cfg, monkeypatch) == (state == "again")
    assert state_of(cfg) == state, "a resume that was prepared and has not begun is no work done"


def test_a_synthesis_that_only_chose_again_has_not_played_what_is_asked_for(tmp_path: Path) -> None:
    cfg = synthesized(tmp_path / "run")
    export(replace(cfg, num_examples=3, play=False), RunPaths(tmp_path / "run"))
    assert state_of(replace(cfg, num_examples=3)) == "again"
    assert state_of(replace(cfg, num_examples=3, play=False)) == "done"
