"""What the start of a run says of the time that its steps take."""

from __future__ import annotations

import pytest

from rlx.cli.train import run
from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.plan.forecast import notes_of


def test_a_run_with_long_steps_on_a_cpu_says_so_at_its_start() -> None:
    (note,) = notes_of(compose(["experiment=sums_smollm2", "hardware.cpu_threads=1", "seed=3"], {}).cfg)
    seconds = 6 * 0.1345e9 * 64 * 128 / 100e9  # 135 million parameters, 64 sequences of 128 tokens
    assert note.startswith(f"a step takes at most about {seconds:.0f} s to train and "), note
    assert note.endswith("with 1 thread a role, every sequence at full length and one turn a rollout; 60 steps (docs/models.md)")


def test_supervised_training_with_long_steps_says_so_too() -> None:
    arguments = ["model=smollm2_135m", "data=fake", "data.batch_size=32", "seq_len=512", "hardware.cpu_threads=2"]
    cfg = compose(arguments, {}, SFT).cfg
    (note,) = notes_of(cfg)
    seconds = 6 * 0.1345e9 * 32 * 512 / 200e9
    assert note == f"a step takes at most about {seconds:.0f} s to train, with 2 threads a role, every row full; 100 steps (docs/models.md)"
    assert notes_of(compose(["data=fake", "data.batch_size=8"], {}, SFT).cfg) == []


@pytest.mark.parametrize("arguments", [[], ["model=qwen3_8b", "env=math", "hardware=node8", "dry_run=true"]])
def test_short_steps_and_steps_on_gpus_are_not_announced(arguments: list[str]) -> None:
    assert notes_of(compose(arguments, {}).cfg) == []


@pytest.mark.slow
def test_the_start_of_a_run_shows_the_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:

    class Enough(Exception):
        pass

    def create(*_: object) -> None:
        raise Enough

    monkeypatch.setattr("rlx.cli.start.signal.signal", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("rlx.runs.claim.create", create)
    monkeypatch.setattr("rlx.preflight.chats.check_chats", lambda *_: None)
    monkeypatch.setattr("rlx.preflight.hub.check_cache", lambda *_: None)
    with pytest.raises(Enough):
        run(["experiment=sums_smollm2", "hardware=auto", "hardware.cpu_threads=1", "run.name=never"])  # many threads need no note
    assert "hardware=auto" in (said := capsys.readouterr().out)
    assert "a step takes at most about " in said
