"""What a person sees: text of models, environments and strangers steers no terminal, and no locale ends a command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.cli.tmux import _text, session_of
from rlx.config.load import compose, to_yaml
from rlx.heartbeat import Heartbeat
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.runs.run import Run
from rlx.runs.status import Cause, Status
from rlx.terminal import shown

EVIL = "\x1b]0;owned\x07\x1b[2J\r\u202egnp.\x9b31m\u2028step 9/9"
LATIN = "en_US.ISO-8859-1"


def steers(text: str) -> list[str]:
    return sorted({c for c in text if ord(c) < 32 and c not in "\n\t"} | ({*"\x7f\x9b\r\u202e\u2028"} & {*text}))


def test_what_steers_a_terminal_is_shown_and_not_obeyed() -> None:
    assert steers(EVIL)
    assert steers(shown(EVIL)) == []
    assert shown("[red]α ≤ β\ttab\nline") == "[red]α ≤ β\ttab\nline"
    assert shown("half \ud800").encode() == "half �".encode()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run whose every text is hostile."""
    monkeypatch.chdir(tmp_path)
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.config.write_text(to_yaml(compose(["dry_run=true"], {}).cfg))
    log = paths.log(0, "trainer")
    log.parent.mkdir(parents=True)
    log.write_text(f"{EVIL}\n")
    status = Status(attempt=0)
    cause = Cause(role="trainer", replica=0, returncode=1, reason=EVIL, log="logs/attempt_0/trainer.log", last_lines=(EVIL,))
    status.finish("failed", cause)
    status.write(paths)
    Heartbeat(paths, "trainer").beat(EVIL)
    MetricsWriter(paths.metrics, "trainer").write(0, {f"loss/{EVIL}": 1.0})
    shutil.copytree(paths.root, tmp_path / "other")
    for folder, commit in ((paths.root, "a"), (tmp_path / "other", EVIL)):
        record = {"rlx": "0", "source": {"commit": commit, "diff": None}, "python": {"version": "3"}, "packages": {EVIL: commit}}
        (folder / "provenance.json").write_text(json.dumps(record))
    return paths


@pytest.mark.parametrize("command", ["watch run", "runs .", "diff run other", "show run", "train no[red]such\x1b[2Jkey=1", "\x1b[2J"])
def test_no_command_prints_what_steers_a_terminal(run: RunPaths, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(command.split())
    out, err = capsys.readouterr()
    assert out + err
    assert steers(out + err) == []


def test_tmux_executes_nothing_in_a_name(tmp_path: Path) -> None:
    assert _text("#(touch x)\x1b") == "##(touch x)␛"
    assert "#" not in session_of(Run(tmp_path / "#(touch x)"))


CHARMAP = Path("/usr/share/i18n/charmaps/ISO-8859-1.gz")  # of Debian's package locales, which not every machine has


@pytest.mark.skipif(shutil.which("localedef") is None or not CHARMAP.exists(), reason="no Latin-1 locale can be made here")
@pytest.mark.parametrize("command", [["train.py"], ["-m", "rlx.cli", "train"]])
def test_a_locale_that_is_not_utf8_changes_nothing(tmp_path: Path, command: list[str]) -> None:
    subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", tmp_path / LATIN], check=True)
    root = Path(__file__).resolve().parents[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONUTF8", "PYTHONIOENCODING")}
    environment |= {"LOCPATH": str(tmp_path), "LC_ALL": LATIN, "PYTHONPATH": str(root)}
    keys = ["dry_run=true", "env=math", "model=qwen3_0_6b", "run.dir=läufe", "launcher.check_envs=false"]
    script = [str(root / command[0])] if command[0].endswith(".py") else command
    done = subprocess.run([sys.executable, *script, *keys], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "prompts × " in done.stdout.decode()
    assert (tmp_path / "läufe" / "config.yaml").exists()
    assert Run(tmp_path / "läufe").config is not None


@pytest.mark.parametrize("coding", ["ascii", "latin-1:strict"])
def test_output_never_raises(tmp_path: Path, coding: str) -> None:
    """Whatever encoding the output has been given; a character that it lacks is shown by its number."""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONIOENCODING": coding, "PYTHONPATH": str(root)}
    keys = ["dry_run=true", "env=sums", "run.dir='✓ läufe'", "launcher.check_envs=false"]
    command = [sys.executable, "-m", "rlx.cli", "train", *keys]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode("latin-1")
    assert b"\\u2713 l" in done.stdout
    assert Run(tmp_path / "✓ läufe").config is not None
