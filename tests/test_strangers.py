"""A run directory of somebody else: looking at it imports nothing of theirs, and what it would execute is left out or refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard
from given_away import give_away

from rlx.cli import main
from rlx.config.errors import ConfigError, may_read
from rlx.config.load import compose, load_command, to_yaml
from rlx.config.roots import EVAL
from rlx.config.strangers import executing
from rlx.metrics import MetricsWriter
from rlx.paths import COMPLETE, RunPaths
from rlx.runs.replay_setup import other_objective
from rlx.runs.status import Status

EVIL = "from pathlib import Path\nfrom rlx.losses.grpo import grpo\nPath(__file__).with_name('executed').touch()\n"


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Their run, in a folder that has the module of its loss, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text(EVIL)
    argv = ["model=qwen3_0_6b", "env=math", "model.trust_remote_code=true", f"envs.math.python={sys.executable}", "envs.math.workers=1"]
    argv += ["envs.math.harness.command=[evil]", "envs.math.sandbox=none"]
    paths = RunPaths(tmp_path / "theirs")
    paths.root.mkdir()
    text = to_yaml(compose([*argv, "launcher.check_envs=false", "dry_run=true"], {}).cfg).replace("rlx.losses.grpo.grpo", "evil.grpo")
    paths.config.write_text(text)
    status = Status(state="running")
    status.finish("completed")
    status.write(paths)
    MetricsWriter(paths.metrics, "trainer").write(0, {"loss/total": 1.0})
    (paths.weights_of(1)).mkdir(parents=True)
    (paths.weights_of(1) / COMPLETE).touch()
    return paths.root


@pytest.mark.parametrize(
    "command", ["watch theirs", "diff theirs copy", "report theirs", "runs .", "show theirs", "replay theirs --step 0"]
)
def test_a_command_that_looks_imports_nothing(theirs: Path, command: str) -> None:
    shutil.copytree(theirs, "copy")
    main(command.split())
    assert load_command(theirs).loss["_target_"] == "evil.grpo"
    assert not Path("executed").exists()
    assert "evil" not in sys.modules


def test_an_evaluation_of_another_users_weights_takes_over_nothing_that_executes(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["dry_run=true", "launcher.check_envs=false", "weights_dir=theirs", "eval_base=false"]
    assert compose(argv, {}, EVAL).cfg.model.trust_remote_code, "it is the caller's own"
    give_away(theirs / "config.yaml", monkeypatch)
    composed = compose(argv, {}, EVAL)
    assert (composed.cfg.model.trust_remote_code, composed.cfg.envs["math"].python) == (False, None)
    assert (composed.cfg.envs["math"].harness.command, composed.cfg.envs["math"].sandbox) == ([], "auto")
    assert any("of another user, because it makes code run: model.trust_remote_code=true, envs.math.python=" in n for n in composed.notes)
    assert compose([*argv, "model.trust_remote_code=true"], {}, EVAL).cfg.model.trust_remote_code


def test_a_step_of_another_users_run_is_not_replayed_with_its_own_loss(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (theirs / "config.yaml").read_text().replace("setup: []", "setup: [module load cuda]")
    (theirs / "config.yaml").write_text(text)
    give_away(theirs / "config.yaml", monkeypatch)
    run = SimpleNamespace(root=theirs, config=load_command(theirs))
    with pytest.raises(ConfigError, match=r"execute code here: model(?!.*slurm).*loss\._target_=evil\.grpo\.\n  fix: read that code"):
        other_objective(run, ["loss=gspo"])
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("node", "wrong"),
    [
        ({"_target_": "torch.optim.AdamW", "lr": 0.1}, None),
        ({"_target_": "torch.hub.load", "repo_or_dir": "theirs/code"}, "optim._target_"),
        ({"_target_": "torch.optim.AdamW", "lr": {"_target_": "evil.rate"}}, "optim.lr._target_"),
    ],
)
def test_targets_that_may_do_anything_are_known_wherever_they_are_in_a_node(node: dict[str, Any], wrong: str | None) -> None:
    assert [".".join(key) for key, _ in executing({"optim": node})] == ([wrong] if wrong else [])


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"envs": {"mine": {"id": "rlx.envs.function", "args": {"reward": "evil.score"}}}}, "envs.mine.args.reward"),
        ({"envs": {"mine": {"id": "evil-env"}}}, "envs.mine.id"),
        ({"eval": {"envs": {"mine": {"id": "owner/evil@1.0"}}}}, "eval.envs.mine.id"),
        ({"slurm": {"setup": ["bash evil.sh"]}}, "slurm.setup"),
        ({"slurm": {"prefix": ["./evil.sh"]}}, "slurm.prefix"),
        ({"envs": {"math": {"id": "rlx_math"}}, "slurm": {"setup": [], "prefix": [], "container": None}}, None),
    ],
)
def test_environments_and_jobs_that_run_what_is_not_rlxs_are_known(data: dict[str, Any], key: str | None) -> None:
    assert [".".join(place) for place, _ in executing(data)] == ([key] if key else [])


def test_a_fork_of_another_users_run_takes_over_no_lines_of_its_jobs(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (theirs / "config.yaml").read_text().replace("evil.grpo", "rlx.losses.grpo.grpo").replace("setup: []", "setup: [bash evil.sh]")
    (theirs / "config.yaml").write_text(text)
    give_away(theirs / "config.yaml", monkeypatch)
    with pytest.raises(ConfigError, match=r"another user, whose configuration executes code: .*slurm\.setup=\[bash evil\.sh\]"):
        compose(["resume=theirs", "run.name=fork", "dry_run=true"], {})


def test_a_configuration_that_hydra_would_read_otherwise_is_not_composed_again(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (theirs / "config.yaml").read_text().replace("evil.grpo", "rlx.losses.grpo.grpo")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    (theirs / "config.yaml").write_text("\n".join(lines).replace("  - _self_", "  - _self_\n  - loss/evil", 1))
    (theirs / "loss").mkdir()
    (theirs / "loss" / "evil.yaml").write_text("_target_: evil.grpo\n")
    give_away(theirs / "config.yaml", monkeypatch)
    monkeypatch.setattr("rlx.runs.replay_setup.executing", lambda tree: [])  # what it was checked for is another test
    _, other, _ = other_objective(SimpleNamespace(root=theirs, config=load_command(theirs)), ["loss.eps_high=0.3"])
    assert other.loss["_target_"] == "rlx.losses.grpo.grpo"
    assert not Path("executed").exists()


@pytest.mark.parametrize("kind", ["a line without end", "a value nested without end", "the same after NaN"])
@pytest.mark.parametrize("command", ["show theirs", "report theirs"])
def test_rollouts_that_would_fill_the_memory_or_the_stack_are_refused(
    theirs: Path, kind: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlx.rollout.lines.MAX_LINE_BYTES", 1 << 20)
    reward = b"NaN" if kind == "the same after NaN" else b"1.0"
    nested = b'{"env":"math","reward":' + reward + b',"prompt":' + b"[" * 100_000 + b"]" * 100_000
    content = b"a" * (1 << 24) if kind == "a line without end" else nested
    file = theirs / "rollouts" / "step_000000.jsonl.zst"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(zstandard.ZstdCompressor().compress(content + b"}\n"))
    main(command.split())
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    text = out + err + (theirs / "report.html").read_text() if command.startswith("report") else out + err
    assert any(words in text for words in ("is no rollout", "no rollout is that long", "nested too deeply"))


def pipe(file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(8 << 30)


def deep(file: Path) -> None:
    file.write_text('{"step":0,"source":"trainer","time":1,"value":' + "[" * 100_000 + "]" * 100_000 + "}\n")


def strange(file: Path) -> None:
    file.write_text('{"state":"completed","updated":"x","source":["trainer"],"step":0}\n[1]\n')


LOOK = f"""import resource, sys
from rlx.cli import main
resource.setrlimit(resource.RLIMIT_AS, ({8 << 30},) * 2)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((make, name) for make in (pipe, endless, huge, deep) for name in ("status.json", "metrics.jsonl")),
        *((make, "config.yaml") for make in (endless, deep)),
        *((pipe, name) for name in ("rollouts/step_000000.jsonl.zst", "heartbeats/trainer.json", "failures.json", "updates.jsonl")),
        *((pipe, name) for name in ("kernels.json", "logs/trainer.log")),
        (strange, "status.json"),
        (strange, "metrics.jsonl"),
    ],
)
def test_a_file_that_has_no_end_or_is_nested_without_end_holds_up_no_command_that_looks(theirs: Path, make: Any, name: str) -> None:
    make(theirs / name)
    for command in ("report theirs", "runs .", "watch theirs"):
        done = subprocess.run([sys.executable, "-c", LOOK, *command.split()], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in (0, 1, 2)
        assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("name", "read"), [("step_000012.jsonl.zst", True), ("metrics.jsonl", True), ("provenance.json", False)])
def test_only_what_is_read_whole_has_a_bound(tmp_path: Path, name: str, read: bool) -> None:
    """Rollouts of a step with their tokens may well have hundreds of MiB."""
    with (tmp_path / name).open("wb") as file:
        file.truncate(200 << 20)
    with nullcontext() if read else pytest.raises(ConfigError, match="more than 64 MiB"), may_read(tmp_path / name):
        pass
