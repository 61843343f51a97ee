"""Loading an environment in this process, as a worker and a role without workers do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.config.schema import EnvConfig
from rlx.envs.kinds import load_one
from rlx.envs.wire import Settings
from rlx.runs.provenance import snapshot_environment


def test_a_script_that_an_environment_starts_in_a_job_imports_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "solution.py").write_text("answer = 42\n")
    (tmp_path / "score.py").write_text("import solution; print(solution.answer)\n")

    def load_environment(*_: object) -> str:
        return subprocess.run([sys.executable, tmp_path / "score.py"], capture_output=True, text=True, check=False).stdout

    monkeypatch.setattr("rlx.envs.kinds.kind_of", lambda _: "v1")
    monkeypatch.setitem(sys.modules, "rlx.envs.verifiers_v1", SimpleNamespace(load_environment=load_environment))
    for name, value in snapshot_environment(tmp_path / "code").items():
        monkeypatch.setenv(name, value)
    assert load_one("e", EnvConfig(id="stand_in"), Settings({})) == "42\n"
