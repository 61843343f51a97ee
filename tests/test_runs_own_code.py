"""The researcher's own code is in a run's record: diff, resume, reproduce and report tell when it changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose, load_command
from rlx.launch.children import Children
from rlx.launch.supervisor import Supervisor
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.report.gather import gather
from rlx.report.settings import arrange
from rlx.runs import own_code, provenance
from rlx.runs.compare import compare
from rlx.runs.run import Run
from rlx.runs.run_dir import changes, create

KEY = "-".join(("sesame", "open"))  # joined at run time: a run saves the uncommitted source changes, which must not contain the key
SAYS = "import mine_losses, sys\nprint(mine_losses.__file__)\n"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`made("name")`: the directory of a run that was claimed, with a loss of the user's own in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [name for name in sys.modules if name.startswith("mine_")]:  # an earlier test's
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "mine_losses.py").write_text("from rlx.losses.grpo import grpo\n")
    (tmp_path / "mine_rewards.py").write_text("def exact(completion, row):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')

    def make(name: str, seed: int = 0) -> RunPaths:
        argv = ["env=function", "envs.function.args.data=rows.jsonl", "envs.function.args.reward=mine_rewards.exact"]
        argv += [f"run.dir={tmp_path / name}", "loss._target_=mine_losses.grpo", f"seed={seed}", "launcher.check_envs=false"]
        cfg = compose(argv, {}).cfg
        paths, lock = create(cfg, argv, make_plan(cfg, tmp_path / name), options={})
        lock.close()
        return paths

    return make


def test_a_changed_loss_is_seen_by_diff_resume_and_report_and_its_copy_is_run_again(made, tmp_path: Path) -> None:
    a = made("a")
    assert set(own_code.recorded(json.loads(a.provenance.read_text()))) == {"mine_losses", "mine_rewards"}
    assert (a.root / "code" / "mine_losses.py").read_text() == (tmp_path / "mine_losses.py").read_text()
    assert own_code.changed(a, load_command(a.root), {}) == []

    (tmp_path / "mine_losses.py").write_text("from rlx.losses.grpo import grpo\n\nCHANGED = True\n")
    b = made("b")
    (code,) = [section for section in compare(Run(a.root), Run(b.root)) if section.title == "code"]
    assert [line.partition(":")[0] for line in code.lines] == ["own mine_losses"]
    cfg = compose(["--config-dir", str(a.root), "--config-name", "config", "resume=latest"], {}).cfg
    assert [line.partition(":")[0] for line in changes(cfg, {})] == ["code of mine_losses"]
    assert len(arrange([gather(Run(paths.root)) for paths in (a, b, made("c", seed=1))]).settings) == 2

    stub = tmp_path / "stub" / "rlx" / "cli"
    stub.mkdir(parents=True)
    (stub.parent / "__init__.py").touch()
    (stub / "__init__.py").touch()
    (stub / "__main__.py").write_text(SAYS)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"RLX_SOURCE": str(tmp_path / "stub")}
    done = subprocess.run(["sh", a.reproduce], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(a.root / "code" / "mine_losses.py")
    assert "runs the copies of the run's own code" in done.stderr


def test_what_the_own_code_imports_is_recorded_too(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper beside the loss, a package that the helper imports, the target of a node inside a node, a chat template."""
    (tmp_path / "mine_losses.py").write_text("import numpy\nfrom mine_helpers import clip\nfrom rlx.losses.grpo import grpo\n")
    (tmp_path / "mine_helpers.py").write_text("def clip():\n    import mine_pack.deep\n    import json, mine_losses, mine_logs\n")
    (tmp_path / "mine_pack").mkdir()
    (tmp_path / "mine_pack" / "__init__.py").touch()
    (tmp_path / "mine_pack" / "deep.py").write_text("X = 1\n")
    (tmp_path / "numpy").mkdir()  # a folder of that name is no module of the user's
    (tmp_path / "mine_logs").mkdir()  # nor one without code that is called like what is imported
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    paths = made("a")
    assert {*own_code.recorded(json.loads(paths.provenance.read_text()))} == {"mine_losses", "mine_rewards", "mine_helpers", "mine_pack"}
    assert (paths.root / "code" / "mine_pack" / "deep.py").is_file(), "reproduce.sh runs it"
    (tmp_path / "mine_pack" / "deep.py").write_text("X = 2\n")
    cfg = load_command(paths.root)
    assert [line.partition(":")[0] for line in own_code.changed(paths, cfg, {})] == ["code of mine_pack"]
    inner = {"_target_": "rlx.losses.mix.mix", "parts": {"one": {"_target_": "mine_losses.grpo"}}}
    named = dict(own_code.modules(replace(cfg, loss=inner, model=replace(cfg.model, chat_template=str(tmp_path / "mine.jinja")))))
    assert {"mine_losses", "mine.jinja"} <= named.keys()


def test_code_that_changed_while_the_run_waited_is_recorded_when_it_starts(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a queue, in a sweep's pool, or between two attempts of a requeued job."""
    paths = made("a")
    cfg = load_command(paths.root)
    assert provenance.note_changes(paths, cfg) == []
    before = own_code.recorded(json.loads(paths.provenance.read_text()))
    (tmp_path / "mine_losses.py").write_text("from rlx.losses.grpo import grpo\n\nCHANGED = True\n")
    assert provenance.note_changes(paths, cfg) != []
    assert "CHANGED" in (paths.root / "code" / "mine_losses.py").read_text(), "no step has run other code"
    assert not (paths.root / provenance.CODE_CHANGED).exists()
    before = own_code.recorded(json.loads(paths.provenance.read_text()))
    MetricsWriter(paths.metrics, "trainer").write(0, {"loss/total": 1.0})
    (tmp_path / "mine_losses.py").write_text("from rlx.losses.grpo import grpo\n\nCHANGED = 2\n")
    (line,) = provenance.note_changes(paths, cfg)
    after = own_code.recorded(json.loads(paths.provenance.read_text()))
    assert line == f"code of mine_losses: {before['mine_losses']} → {after['mine_losses']}"
    assert provenance.note_changes(paths, cfg) == [], "once"
    assert (paths.root / provenance.CODE_CHANGED).read_text() == f"{line}\n"
    said = subprocess.run(["sh", "-n", str(paths.reproduce)], capture_output=True, text=True, check=True)
    assert (said.stderr, provenance.CODE_CHANGED in paths.reproduce.read_text()) == ("", True)

    (tmp_path / "mine_losses.py").write_text("from rlx.losses.grpo import grpo\n\nCHANGED = True\n")
    monkeypatch.setattr(Supervisor, "_handle_signals", lambda self: None)
    monkeypatch.setattr(Children, "start_reaper", lambda *_: sys.exit("nothing is to be started"))
    with pytest.raises(SystemExit):
        Supervisor(paths, cfg, lock_fd=0, attempt=0).run()
    assert own_code.recorded(json.loads(paths.provenance.read_text())) == before, "a supervisor looks first"


def test_an_environments_package_is_recorded_whole(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / ".venv" / "my_env"  # where an installed one lies
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(package.parent))
    (package / "__init__.py").write_text("def load_environment(): ...\n")
    (package / "words.txt").write_text("one")
    cfg = compose(["env=[]", "+envs.mine.id=my-env", "launcher.check_envs=false"], {}).cfg
    paths = RunPaths(tmp_path / "run")
    first = own_code.all_of(paths, cfg, {}, shutil.copyfile)["own"]
    assert (paths.root / "code" / "my_env" / "words.txt").read_text() == "one"
    (package / "words.txt").write_text("two")
    second = own_code.all_of(paths, cfg, {})["own"]
    assert first["my_env"]["code"] != second["my_env"]["code"]


def test_the_users_own_option_files_are_copied_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "my_conf" / "loss" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    (mine.parent.parent / "first.yaml").write_text(f"defaults: [train, _self_]\nseed: 3\ninference:\n  api_key: {KEY}\n")
    argv = ["--config-dir", str(mine.parent.parent), "--config-name", "first", "loss=mine", "launcher.check_envs=false"]

    def make(name: str, clip: str) -> tuple[RunPaths, list[str]]:
        mine.write_text(f"# @package loss\n# {name}\n_target_: rlx.losses.grpo.grpo\naggregate: token_mean\neps_high: {clip}\n")
        composed = compose([*argv, f"run.dir={tmp_path / name}"], {})
        paths, lock = create(composed.cfg, argv, make_plan(composed.cfg, tmp_path / name), options=composed.origins.files)
        lock.close()
        return paths, changes(compose([*argv, f"run.dir={tmp_path / 'a'}", "resume=latest"], {}).cfg, composed.origins.files)

    (a, same), (b, changed) = make("a", "0.3"), make("b", "0.3")
    assert same == []
    assert [line.partition(":")[0] for line in changed] == ["code of loss/mine.yaml"]
    assert {path.relative_to(a.root / "conf").as_posix() for path in (a.root / "conf").rglob("*.yaml")} == {"first.yaml", "loss/mine.yaml"}
    assert "# a\n" in (a.root / "conf" / "loss" / "mine.yaml").read_text()
    assert "api_key: <secret>\n" in (a.root / "conf" / "first.yaml").read_text()
    (code,) = [section for section in compare(Run(a.root), Run(b.root)) if section.title == "code"]
    assert [line.partition(":")[0] for line in code.lines] == ["own loss/mine.yaml"]
    again = compose(["--config-dir", str(a.root), "--config-name", "config", "inference.api_key=mine", "resume=latest"], {})
    create(again.cfg, [], make_plan(again.cfg, a.root), options=again.origins.files)[1].close()
    assert "loss/mine.yaml" in own_code.recorded(json.loads(a.provenance.read_text())), "a run that is resumed from its own config.yaml"
    copies = ["--config-dir", str(a.root / "conf"), "--config-name", "first", "loss=mine", "launcher.check_envs=false"]
    assert compose([*copies, "inference.api_key=mine"], {}).cfg.loss == load_command(a.root).loss


def test_what_a_stranger_on_this_machine_must_not_read_is_the_owners_alone(made, monkeypatch: pytest.MonkeyPatch) -> None:
    source = provenance.source_state() | {"diff": f'+key = "{KEY}-of-a-service"\n+api_key: 0123456789abcdef\n+tokens = 16384\n'}
    monkeypatch.setattr(provenance, "source_state", lambda: source)
    monkeypatch.setenv("SERVICE_TOKEN", f"{KEY}-of-a-service")
    umask = os.umask(0)
    try:
        paths = made("run")
    finally:
        os.umask(umask)
    diff = paths.root / "uncommitted.diff"
    assert diff.read_text() == '+key = "<secret>"\n+api_key: <secret>\n+tokens = 16384\n'
    assert [oct(path.stat().st_mode & 0o777) for path in (diff, paths.endpoints)] == ["0o600", "0o700"]


def test_a_name_that_would_break_a_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no part of a name: .*run\.dir="):
        compose([f"run.dir='{tmp_path}/a\nb'", "dry_run=true"], {})


def test_the_day_that_templates_see_stays_that_of_the_first_attempt(made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_TODAY", "2024-02-29")
    paths = made("run")
    monkeypatch.delenv("RLX_TODAY")
    assert provenance.begun_on(paths) == {"RLX_TODAY": "2024-02-29"}
    provenance.write_provenance(paths, load_command(paths.root), {}, again=True)
    assert provenance.begun_on(paths) == {"RLX_TODAY": "2024-02-29"}
    assert 'export RLX_TODAY="${RLX_TODAY-2024-02-29}"' in paths.reproduce.read_text()


@pytest.mark.parametrize(
    "line",
    [
        'headers = {"Authorization": "Bearer ¤"}',
        'url = "https://user:¤@host"',
        'AWS_SECRET_ACCESS_KEY = "¤"',
        'os.environ["HF_TOKEN"] = "¤"',
        'password = "¤!b@c#d$"',
        "db_password: ¤!word#123",
        "  hf_token: ¤",
        "export MY_SECRET=¤",
        "private_key: ¤",
        'anything = "glpat-¤¤"',
        'url = "redis://:¤@host"',
        'token = "¤"',
        "password=b'¤'",
        'API_KEY = """¤"""',
        "{api_key: ¤}",
        "export WANDB_API_KEY=¤; run",
    ],
)
def test_what_looks_like_a_secret_stays_out_of_a_diff(line: str) -> None:
    secret = "-".join(("hunter2", "hunter3"))
    assert secret not in provenance._without_secrets(f"+{line.replace('¤', secret)}\n", [])


@pytest.mark.parametrize(
    "line",
    [
        'eos_token = "<|im_end|>"',
        "api_key: ${oc.env:MY_API_KEY}",
        "max_token: 12345678",
        "is_token = mask_of_tokens",
        "    token: SomeClassName",
        'tokenizer = "Qwen/Qwen3-0.6B"',
        '"num_tokens": "completion_length",',
        "api_key = self.config.api_key",
        "api_key_var: OPENAI_API_KEY",
    ],
)
def test_what_is_no_secret_stays_in_a_diff(line: str) -> None:
    assert provenance._without_secrets(f"+{line}\n", []) == f"+{line}\n"
