"""`rlx synthesize` on the real stack: one turn, several turns and tools; killed half-way and resumed; chosen again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from main_job import ROOT, MainJob
from test_run_resume import kill_everything

pytestmark = [pytest.mark.slow]
MIX = (
    *("env=[sums,tool_math,word_guess]", "seq_len=256", "envs.tool_math.args.level=1", "envs.tool_math.args.max_turns=3"),
    *("envs.tool_math.sampling.max_tokens=80", "envs.word_guess.args.alphabet=abc", "envs.word_guess.args.length=3"),
    *("model.warm_start.steps=40", "model.warm_start.batch_size=16", "model.warm_start.teacher_error=0.3"),
    *("num_examples=16", "rollouts_per_example=4", "duplicates=keep", "run.name=mine", "orchestrator.max_concurrent=4"),
)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


class Synthesis(MainJob):
    """One `rlx synthesize`."""

    def __init__(self, run_dir: Path, *overrides: str, env: dict[str, str]) -> None:
        self.run_dir, self.output, self.seen = run_dir, run_dir.with_suffix(".out"), {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlx.cli", "synthesize", f"run.dir={run_dir}", *overrides],
            cwd=run_dir.parent,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | env,
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def finished(self) -> list[str]:
        path = self.run_dir / "rollouts" / "finished.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def metadata(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "data" / "metadata.json").read_text())


@pytest.fixture
def synthesize(tmp_path: Path, model_cache: Path) -> Iterator[Callable[..., Synthesis]]:
    jobs: list[Synthesis] = []

    def begin(name: str, *overrides: str) -> Synthesis:
        jobs.append(Synthesis(tmp_path / name, *overrides, env={"RLX_CACHE": str(model_cache)}))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.destroy()


@pytest.mark.nightly
def test_a_killed_synthesis_writes_the_same_data_and_plays_nothing_twice(synthesize: Callable[..., Synthesis]):
    whole = synthesize("whole", *MIX)
    assert whole.wait() == 0, whole.text()
    rows = read_rows(whole.run_dir / "data" / "train.jsonl")
    assert len(whole.finished) == 3 * 16 * 4 == whole.metadata()["rollouts"]["played"]
    turns = {env: {len(row["completion"]) for row in rows if row["env"] == env} for env in ("sums", "tool_math", "word_guess")}
    assert turns["sums"] == {1}
    assert max(turns["tool_math"]) >= 3
    assert max(turns["word_guess"]) >= 3
    called = next(row for row in rows if row["env"] == "tool_math" and len(row["completion"]) >= 3)
    assert json.loads(called["tools"])[0]["function"]["name"] == "calc"
    assert [message["role"] for message in called["completion"][:2]] == ["assistant", "tool"]
    assert {row["policy_version"] for row in rows} == {0}

    killed = synthesize("killed", *MIX)
    killed.until(lambda: len(killed.finished) >= 60, "60 finished rollouts")
    kill_everything(killed)
    before = killed.finished[:-1]  # the kill may have cut the last line
    assert 59 <= len(before) < 192, "killed half-way"
    again = synthesize("killed", *MIX, "resume=latest")
    assert again.wait() == 0, again.text()
    assert again.finished[: len(before)] == before
    assert len({(one["env"], one["place"], one["rollout"]) for one in map(json.loads, again.finished)}) == len(again.finished) == 192
    one, other = ((job.run_dir / "data" / "train.jsonl").read_bytes() for job in (whole, again))
    assert one == other

    chosen = synthesize("killed", *MIX, "resume=latest", "play=false", "per_example=1", "select_by=best")
    assert chosen.wait() == 0, chosen.text()
    assert again.finished == chosen.finished
    assert "inference_0" not in chosen.text()
    kept = read_rows(chosen.run_dir / "data" / "train.jsonl")
    best: dict[tuple[str, int], float] = {}
    for one_row in rows:
        place = (one_row["env"], one_row["index"])
        best[place] = max(best.get(place, 0.0), one_row["reward"])
    assert {(row["env"], row["index"]): row["reward"] for row in kept} == best
    supervised_training_takes_the_file_as_it_is(chosen)


@pytest.mark.nightly
def test_an_interrupted_synthesis_says_how_to_go_on(synthesize: Callable[..., Synthesis]):
    run = synthesize("run", "env=reverse_text", "num_examples=2000", "orchestrator.max_concurrent=2")  # its model is made already
    run.until(lambda: run.finished, "a finished rollout")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert "resume=latest" in run.text()
    run.wait_until_nothing_is_left()


def supervised_training_takes_the_file_as_it_is(run: Synthesis) -> None:
    model = (run.run_dir / "initial_model.txt").read_text().strip()
    keys = ["model=tiny_trained", f"model.name={model}", "seq_len=256", "data.batch_size=16", "max_steps=3"]
    file, other = run.run_dir / "data" / "train.jsonl", run.run_dir.with_name("trained")
    trained = subprocess.run(
        [sys.executable, "-m", "rlx.cli", "sft", f"run.dir={other}", f"data.name={file}", *keys],
        cwd=run.run_dir.parent,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
