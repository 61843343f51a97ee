"""A loss or an advantage of the user's own that cannot train is refused before anything starts, with its file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlx.cli import main

CODE = """\
from rlx.losses.tokens import TokenLoss


def scalar(tokens):
    return TokenLoss(loss=(tokens.logp * tokens.advantages).sum())


def bare(tokens):
    return -tokens.logp * tokens.advantages


def not_finite(tokens):
    return TokenLoss(loss=tokens.logp.sqrt())


def detached(tokens):
    return TokenLoss(loss=-tokens.logp.detach() * tokens.advantages)


def misspelt(tokens):
    return TokenLoss(loss=-tokens.log_prob * tokens.advantages)


def good(tokens):
    return TokenLoss(loss=-tokens.logp * tokens.advantages)


def by_sequence(tokens):
    return TokenLoss(loss=-tokens.rollout_mean(tokens.ratio() * tokens.advantages), unit="sequence")


def means(groups):
    return [rewards.mean() for rewards in groups.rewards]


def own_mean(groups):
    return [rewards - rewards.mean() for rewards in groups.rewards]
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`said("loss", "scalar")`: exit code and output of a dry run with that function of `own_trial.py`."""
    (tmp_path / "own_trial.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_trial", raising=False)

    def run(group: str, name: str) -> tuple[int, str]:
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_text(f"_target_: own_trial.{name}\n" + "aggregate: token_mean\n" * (group == "loss"))
        code = main(["train", f"--config-dir={tmp_path}", f"{group}={name}", "dry_run=true", "launcher.check_envs=false"])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.mark.parametrize(
    ("group", "name", "line", "words"),
    [
        ("loss", "scalar", 4, "its loss is Tensor of shape []; it must have one value per token, here [12]"),
        ("loss", "bare", 8, "it returned Tensor of shape [12], not a rlx.losses.tokens.TokenLoss"),
        ("loss", "not_finite", 12, "its loss is not finite for ordinary numbers"),
        ("loss", "detached", 16, "its loss has no gradient, so nothing would be trained"),
        ("loss", "misspelt", 21, "AttributeError: 'TokenBatch' object has no attribute 'log_prob'"),
        ("advantage", "means", 32, "a group's advantages are float64 of shape []; they must have one value per rollout, here [4]"),
    ],
)
def test_what_cannot_train_is_refused_in_its_authors_words(said, tmp_path: Path, group: str, name: str, line: int, words: str) -> None:
    code, text = said(group, name)
    assert code == 2
    assert f"own_trial.{name} ({group}) fails on made-up numbers:\n  {tmp_path / 'own_trial.py'}, line {line}" in text
    assert words in text
    assert "Traceback" not in text


@pytest.mark.parametrize(("group", "name"), [("loss", "good"), ("loss", "by_sequence"), ("advantage", "own_mean")])
def test_what_can_train_is_planned(said, group: str, name: str) -> None:
    code, text = said(group, name)
    assert code == 0, text
