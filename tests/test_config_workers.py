"""The rules for environments in processes of their own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from rlx.config import pythons
from rlx.config.errors import ConfigError
from rlx.config.load import compose


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        compose(["env=reverse_text", *overrides])
    return str(raised.value)


def test_another_python_needs_a_worker() -> None:
    said = problems(f"envs.reverse_text.python={sys.executable}", "envs.reverse_text.workers=0")
    assert "envs.reverse_text has no workers" in said
    said = problems(f"envs.reverse_text.python={sys.executable}", "eval.interval=5", "eval.envs.reverse_text.workers=0")
    assert "eval.envs.reverse_text has no workers" in said


def test_another_python_must_be_a_program() -> None:
    assert "is no Python that can be run here" in problems("envs.reverse_text.python=/nowhere/bin/python")


def test_an_environment_of_another_python_need_not_be_installed_here() -> None:
    cfg = compose(["env=reverse_text", f"envs.reverse_text.python={sys.executable}", "envs.reverse_text.id=not-installed-here"]).cfg
    assert cfg.envs["reverse_text"].python == sys.executable


def test_an_environment_plays_in_the_python_that_was_installed_for_it_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_PYTHONS", str(tmp_path))
    for number, name in enumerate(("theirs-1", "theirs-2", "unfinished")):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
        if name != "unfinished":
            record = tmp_path / name / "rlx.json"
            record.write_text(json.dumps({"environments": [{"name": "their-env", "source": "/s", "version": "1"}]}))
            os.utime(record, (number, number))
    asked = ["env=custom", "envs.custom.id=owner/their_env@1", "model=smollm2_135m"]
    composed = compose(asked)
    newest = str(tmp_path / "theirs-2" / "bin" / "python")
    assert composed.cfg.envs["custom"].python == "theirs-2", "the name, which is the same on every machine"
    assert pythons.python_of("their-env", "theirs-2") == newest
    assert any("theirs-2" in note for note in composed.notes)
    assert compose([*asked, f"envs.custom.python={sys.executable}"]).cfg.envs["custom"].python == sys.executable
    assert compose(["env=reverse_text"]).cfg.envs["reverse_text"].python is None
    assert pythons.version_in(newest, "their-env") == "1"
    assert pythons.sources_of("their-env", newest) == Path("/s")
