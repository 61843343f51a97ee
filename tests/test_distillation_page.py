"""The section of docs/distillation.md that does it all on a CPU: its commands run, the students' with a fifth of their steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlx.config.load import compose
from rlx.config.schema import WarmStartConfig
from rlx.metrics import read_metrics
from rlx.models import tiny

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "distillation.md"
TITLE = "## All three on a CPU"
STEPS = re.compile(r"(max_steps=|outputs/shown/weights/step_|eval\.interval=)(\d+)")


def commands(port: str = "8000") -> list[str]:
    """The section's commands, with a fifth of the students' steps and another port."""
    section = PAGE.read_text().partition(TITLE)[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    lines = [line.replace("8000", port) for block in blocks for line in block.splitlines()]
    return [line if "run.name=teacher" in line else STEPS.sub(lambda found: f"{found[1]}{int(found[2]) // 5}", line) for line in lines]


def test_the_section_has_a_teacher_its_server_and_three_ways_to_learn_from_one():
    said = " ".join(commands())
    assert "run.name=teacher max_steps=60" in said
    assert "run.name=scored loss=opd" in said
    assert "max_steps=12 " in said
    for part in ("vllm.entrypoints", "loss=opd", "sampled_by=teacher", "loss=sdft", "rlx sft", "rlx eval"):
        assert part in said


def test_self_distillation_composes_on_the_model_that_the_section_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.build_model(WarmStartConfig(), 256), tiny.build_tokenizer(256), tmp_path / "outputs" / "shown" / "weights" / "step_50")
    (argv,) = [shlex.split(line)[2:] for line in commands() if "loss=sdft" in line]
    cfg = compose(argv, {}).cfg
    assert cfg.teacher.template == "{prompt} is {demonstration}"


@pytest.fixture
def port() -> str:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.fixture
def servers() -> Iterator[list[subprocess.Popen[Any]]]:
    """Processes that are stopped at the end."""
    running: list[subprocess.Popen[Any]] = []
    yield running
    for process in running:
        process.terminate()
        process.wait(timeout=60)


def records(run: str, source: str) -> list[dict[str, Any]]:
    return [record for record, _ in read_metrics(Path("outputs") / run / "metrics.jsonl") if record["source"] == source]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_commands_of_the_section_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str, servers: list[subprocess.Popen[Any]]):
    for name in ("examples", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for line in commands(port):
        program, *argv = shlex.split(line)
        own = dict(environ)
        while "=" in program:
            name, _, value = program.partition("=")
            own[name], program, argv = value, argv[0], argv[1:]
        command = [sys.executable, *argv] if program == "python" else [sys.executable, "-m", "rlx.cli", *argv]
        if "vllm.entrypoints.launchers.api_server.entry" in argv:
            with Path("server.log").open("w") as log:
                servers.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
            ready(port, servers[-1])
            continue
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=1500, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    scored = [record["teacher/kl"] for record in records("scored", "trainer")]
    assert len(scored) == 12
    assert sum(scored[-4:]) / 4 < 0.6 * scored[0], "the student approaches the teacher that scores it"  # a step's varies by a factor of two
    taught = [record["ce/nll"] for record in records("taught", "trainer")]
    assert len(taught) == 8
    assert taught[-1] < 0.8 * taught[0]
    evaluated = {record["step"]: record["eval/reverse_text/avg@1"] for record in records("taught", "eval")}
    assert list(evaluated) == [0, 2, 4, 6, 8]
    assert evaluated[8] > evaluated[0], "what the teacher plays, the student learns"
    assert len(records("alone", "trainer")) == 10


def ready(port: str, server: subprocess.Popen[Any]) -> None:
    """Return when the server answers."""
    for _ in range(1200):
        assert server.poll() is None, Path("server.log").read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    raise AssertionError(Path("server.log").read_text()[-3000:])
