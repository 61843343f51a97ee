"""Run directories: who owns them, what they contain, and what is never deleted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from launch_configs import config

from rlx.config.errors import ConfigError
from rlx.config.load import compose, load_run
from rlx.config.schema import Config, RunConfig
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.config.secret import redact_lines
from rlx.heartbeat import Heartbeat
from rlx.lock import FileLock
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.polling import wait_for
from rlx.runs import run_dir
from rlx.runs.run_dir import create, join, looks_like_run, resolve_run_dir, write_description
from rlx.runs.status import Status

KEY = "-".join(("sesame", "open"))  # joined at run time: a run saves the uncommitted source changes, which must not contain the key


def settled(root: Path, **changes) -> Config:
    return replace(config("cpu"), run=RunConfig(name=root.name, dir=str(root)), **changes)


def make(cfg: Config) -> tuple[RunPaths, FileLock]:
    return create(cfg, ["seed=1", "loss=gspo"], make_plan(cfg, Path(str(cfg.run.dir))))


def finished(root: Path) -> RunPaths:
    """A run that has ended."""
    paths, lock = make(settled(root))
    Status(state="completed").write(paths)
    lock.close()
    return paths


def test_a_run_directory_holds_everything_that_is_needed_to_do_it_again(tmp_path: Path) -> None:
    paths, _ = make(settled(tmp_path / "a" / "run"))
    assert load_run(paths.root).run.name == "run"
    assert load_run(paths.root).seq_len == 8192
    assert yaml.safe_load(paths.overrides.read_text()) == ["seed=1", "loss=gspo"]
    provenance = json.loads(paths.provenance.read_text())
    assert provenance["seeds"] == {"run": 0}
    assert provenance["packages"]["torch"]
    assert provenance["machine"]["cpus"] == os.cpu_count()
    assert len(provenance["source"]["commit"]) == 40
    if provenance["source"]["diff"]:
        assert (paths.root / provenance["source"]["diff"]).read_text().startswith("diff --git")
    assert paths.initial_model.read_text() == "Qwen/Qwen3-8B\n"
    looked_into = {"weights", "batches", "checkpoints", "endpoints", "heartbeats", "stalls"}
    assert looked_into <= {path.name for path in paths.root.iterdir()}, "another host must not look for a folder before it is there"


def test_a_secret_is_in_one_file_of_the_run_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_API_KEY", KEY)
    monkeypatch.setenv("RLX_INFERENCE", f"{{api_key: {KEY}}}")
    given = [f"inference={{api_key: '{KEY}'}}", f"+inference.api_key='{KEY}'", f"inference.api_key={KEY}", "seed=3"]
    reference = "inference.api_key=${oc.env:RLX_API_KEY}"
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    cfg = resolve_run_dir(compose([*given, f"run.dir={tmp_path / 'run'}"], {}).cfg, "label")
    assert cfg.inference.api_key == KEY
    paths, lock = create(cfg, [*given, reference], make_plan(cfg, tmp_path / "run"))
    lock.close()
    holding = {path for path in paths.root.rglob("*") if path.is_file() and KEY in path.read_text()}
    assert holding == {paths.secrets}
    assert paths.secrets.stat().st_mode & 0o777 == 0o600
    assert load_run(paths.root) == cfg, "the roles have it"
    assert yaml.safe_load(paths.overrides.read_text())[-2:] == ["seed=3", reference], "a reference to a variable may stay"

    again = ["--config-dir", str(paths.root), "--config-name", "config"]
    assert "add inference.api_key=VALUE" in paths.reproduce.read_text()
    with pytest.raises(ConfigError, match=r"no value: inference.api_key; it is secret"):
        compose(again, {})
    resumed = compose([*again, "inference.api_key=other-key", "resume=latest"], {}).cfg
    paths, lock = create(resumed, [], make_plan(resumed, paths.root))
    assert load_run(paths.root).inference.api_key == "other-key", "a resumed run may have another key"
    paths.secrets.unlink()
    with pytest.raises(ConfigError, match=r"no value: inference.api_key; it is secret"):
        load_run(paths.root)
    assert load_run(paths.root, secrets=False).inference.api_key == "<secret>", "reading a run needs no key"
    lock.close()
    create(resumed, [], make_plan(resumed, paths.root))[1].close()
    assert load_run(paths.root).inference.api_key == "other-key", "a run whose file was deleted resumes with the given key"


def test_a_secret_in_a_variable_that_this_command_does_not_use_is_hidden_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_TEACHER", f"{{base_url: [http://teacher:8000], api_key: {KEY}}}")
    monkeypatch.setenv("RLX_INFERENCE", f"{{api_key: {KEY}, port: 7000}}")
    monkeypatch.setenv("RLX_SEED", "3")
    cfg = resolve_run_dir(compose(["inference.api_key=another-key", f"run.dir={tmp_path / 'run'}"], {}).cfg, "label")
    assert cfg.inference.api_key == "another-key"
    paths, lock = create(cfg, [], make_plan(cfg, tmp_path / "run"))
    lock.close()
    recorded = json.loads(paths.provenance.read_text())["environment"]
    assert KEY not in paths.provenance.read_text()
    assert recorded["RLX_SEED"] == "3"
    assert recorded["RLX_TEACHER"].startswith("{base_url: [http://teacher:8000], api_key")


@pytest.mark.parametrize("key", ["the-key", "another-key"])
def test_a_run_with_a_key_for_the_teachers_servers_resumes_in_place(tmp_path: Path, key: str) -> None:
    given = ["loss=opd", "teacher.base_url=[http://teacher:8000]", f"run.dir={tmp_path / 'run'}"]
    cfg = resolve_run_dir(compose([*given, "teacher.api_key=the-key"], {}).cfg, "label")
    create(cfg, [], make_plan(cfg, tmp_path / "run"))[1].close()
    again = compose([*given, f"teacher.api_key={key}", "resume=latest"], {}).cfg
    create(again, [], make_plan(again, tmp_path / "run"))[1].close()
    assert load_run(tmp_path / "run").teacher.api_key == key
    without = replace(again, teacher=replace(again.teacher, api_key=None))
    with pytest.raises(ConfigError, match=r"another configuration .*\n  teacher.api_key: ") as caught:
        create(without, [], make_plan(without, tmp_path / "run"))
    assert "-key" not in str(caught.value)


def test_a_secret_whose_text_is_escaped_is_hidden_with_all_that_follows() -> None:
    line = r"inference={api_key: 'one\'key', port: 1}"
    cfg = compose([line], {}).cfg
    assert cfg.inference.api_key == "one'key"
    assert redact_lines([line, "seed=1"], cfg) == ["inference={api_key: '<secret>", "seed=1"]


def test_a_run_without_secrets_has_no_file_for_them(tmp_path: Path) -> None:
    paths, _ = make(settled(tmp_path / "run"))
    assert not paths.secrets.exists()
    assert "api_key" not in paths.reproduce.read_text()


def test_a_role_with_another_key_for_the_servers_does_not_join_and_neither_is_shown(tmp_path: Path) -> None:
    cfg = settled(tmp_path / "run")
    join(replace(cfg, inference=replace(cfg.inference, api_key="one-key")), [], [])
    with pytest.raises(ConfigError, match=r"inference.api_key: a different value") as caught:
        join(replace(cfg, inference=replace(cfg.inference, api_key="two-key")), [], [])
    assert "-key" not in str(caught.value)


def test_a_warm_started_run_leaves_the_initial_model_to_prepare(tmp_path: Path) -> None:
    cfg = replace(config("cpu", model={"warm_start": {}}), run=RunConfig(name="r", dir=str(tmp_path / "r")))
    assert not make(cfg)[0].initial_model.exists()


def test_reproduce_runs_the_saved_configuration_in_a_new_directory_and_tells_of_another_commit(tmp_path: Path) -> None:
    paths, _ = make(settled(tmp_path / "run with blank"))
    stand_in = tmp_path / "python"  # a fake interpreter that prints its arguments
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(stand_in), "RLX_SOURCE": str(tmp_path), "RLX_NEW_DIR": str(tmp_path / "the user's")}
    result = subprocess.run(["sh", str(paths.reproduce), "seed=5"], env=environment, capture_output=True, text=True, check=True)
    words = result.stdout.splitlines()
    assert words[:7] == ["-m", "rlx.cli", "train", "--config-dir", str(paths.root), "--config-name", "config"]
    assert f"run.dir='{tmp_path}/the user\\'s'" in words
    assert words[-1] == "seed=5"
    assert "is at none" in result.stderr


def test_default_names_say_what_the_run_is_and_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = (resolve_run_dir(config("cpu"), "sums+reverse_text-tiny-gspo") for _ in range(2))
    assert str(one.run.name).startswith("sums+reverse_text-tiny-gspo-")
    assert one.run.dir == str(tmp_path / "outputs" / str(one.run.name))
    assert one.run.name != two.run.name


def test_run_dir_is_made_absolute_and_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = resolve_run_dir(replace(config("cpu"), run=RunConfig(dir="here/mine")), "label")
    assert (cfg.run.name, cfg.run.dir) == ("mine", str(tmp_path / "here" / "mine"))
    with pytest.raises(ConfigError, match=r"run\.name=a/b"):
        resolve_run_dir(replace(config("cpu"), run=RunConfig(name="a/b")), "label")


def test_an_existing_run_is_refused_and_clean_replaces_it(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    with pytest.raises(ConfigError, match="clean=true"):
        make(settled(tmp_path / "run"))
    (tmp_path / "run" / "weights" / "step_1").mkdir()
    make(settled(tmp_path / "run", clean=True))
    assert not (tmp_path / "run" / "weights" / "step_1").exists()
    assert not (tmp_path / "run" / "status.json").exists()
    assert load_run(tmp_path / "run").clean is False  # otherwise reproducing the run would delete files


@pytest.mark.parametrize("files", [["thesis.tex"], ["config.yaml"], ["status.json", "thesis.tex"], [".lock", "thesis.tex"]])
def test_clean_never_deletes_what_is_not_a_run(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("precious")
    for clean in (False, True):
        with pytest.raises(ConfigError, match="holds files that are not a run"):
            make(settled(tmp_path, clean=clean))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(files, "precious")


def test_a_run_that_lives_is_not_cleaned(tmp_path: Path) -> None:
    paths, lock = make(settled(tmp_path / "run"))
    Status(state="running").write(paths)
    with pytest.raises(ConfigError, match="alive"):
        make(settled(tmp_path / "run", clean=True))
    assert paths.status.exists()
    lock.close()
    make(settled(tmp_path / "run", clean=True))


def test_a_run_lives_as_long_as_a_process_that_inherited_its_lock(tmp_path: Path) -> None:
    paths, lock = make(settled(tmp_path / "run"))
    Status().write(paths)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fd,))
    lock.close()
    with pytest.raises(ConfigError, match="alive"):
        make(settled(tmp_path / "run", clean=True))
    child.communicate(b"\n")
    make(settled(tmp_path / "run", clean=True))


def test_of_two_runs_that_take_a_directory_at_once_one_is_refused(tmp_path: Path) -> None:
    outcomes: list[object] = []

    def take() -> None:
        try:
            outcomes.append(make(settled(tmp_path / "run")))
        except ConfigError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([outcome for outcome in outcomes if isinstance(outcome, tuple)]) == 1


def test_a_directory_that_cannot_be_written_is_a_problem_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        make(settled(tmp_path / "file" / "run"))
    with pytest.raises(ConfigError, match=r"run\.dir="):
        make(settled(Path("/proc/nowhere/run")))


def test_roles_of_one_configuration_share_a_directory_and_another_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    cfg = settled(root)
    paths, _ = join(cfg, [], make_plan(cfg, root))
    assert load_run(root).seq_len == 8192
    again, _ = join(replace(cfg, clean=True), [], make_plan(cfg, root))
    assert again == paths
    with pytest.raises(ConfigError, match="seq_len: 8192 ≠ 4096"):
        join(replace(cfg, seq_len=4096), [], make_plan(cfg, root))


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step_2", "weights/step_1"])
def test_a_role_joins_a_run_that_has_begun_only_while_another_of_its_roles_lives(tmp_path: Path, left: str) -> None:
    cfg = settled(tmp_path / "run")
    plan = make_plan(cfg, tmp_path / "run")
    paths, prepared = join(cfg, [], plan)
    prepared.close()  # like `rlx prepare`, which ends before the others start
    _, first = join(cfg, [], plan)
    (paths.root / left).mkdir(parents=True) if "/" in left else (paths.root / left).write_text("{}\n")
    if left.startswith("weights"):
        (paths.root / left / "COMPLETE").touch()
    _, restarted = join(cfg, [], plan)
    first.close()
    _, again = join(cfg, [], plan)
    for lock in (restarted, again):
        lock.close()
    refused: list[ConfigError] = []

    def start() -> None:
        with pytest.raises(ConfigError) as error:
            join(cfg, [], plan)
        refused.append(error.value)

    threads = [threading.Thread(target=start) for _ in range(3)]  # who is refused at the same time is no living role
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert f"{paths.root} holds a run whose roles have all ended" in str(refused[0])
    assert f" train --config-dir {paths.root} --config-name config resume=latest" in str(refused[0])


def test_a_role_joins_where_a_lock_of_another_host_is_not_seen_but_its_heartbeat_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre with `localflock` and NFS with `local_lock` keep locks to a host, and say nothing of it."""
    monkeypatch.setattr("rlx.heartbeat.INTERVAL", 0.05)
    monkeypatch.setattr("rlx.runs.rewind.INTERVAL", 0.2)
    cfg = settled(tmp_path / "run")
    plan = make_plan(cfg, tmp_path / "run")
    paths, lock = join(cfg, [], plan)
    lock.close()
    paths.metrics.write_text("{}\n")
    elsewhere, ended = Heartbeat(paths, "trainer"), threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            elsewhere.beat("training")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        wait_for(elsewhere.path.exists, "the first heartbeat", 60)
        _, joined = join(cfg, [], plan)
        joined.close()
    finally:
        ended.set()
        thread.join()
    with pytest.raises(ConfigError, match="whose roles have all ended"):
        join(cfg, [], plan)


def test_roles_that_start_at_once_make_one_directory(tmp_path: Path) -> None:
    cfg = settled(tmp_path / "run")
    outcomes: list[RunPaths] = []
    threads = [threading.Thread(target=lambda: outcomes.append(join(cfg, [], make_plan(cfg, tmp_path / "run"))[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4


def test_a_role_that_waits_in_vain_for_another_to_fill_the_directory_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "FILL", 0.1)
    cfg = settled(tmp_path / "run")
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    lock = FileLock(paths.lock)
    assert lock.exclusive()
    with pytest.raises(ConfigError, match=r"waited 0 s for the role that holds .*\n  fix: end that role"):
        join(cfg, [], make_plan(cfg, tmp_path / "run"))


def test_a_role_does_not_join_a_launched_run(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    cfg = settled(tmp_path / "run")
    with pytest.raises(ConfigError, match="rlx train"):
        join(cfg, [], make_plan(cfg, tmp_path / "run"))


def test_a_dry_run_leaves_its_plan_and_the_run_may_follow_it(tmp_path: Path) -> None:
    cfg = settled(tmp_path / "run", dry_run=True)
    write_description(cfg, [], make_plan(cfg, tmp_path / "run"), "#!/bin/sh", "what it means")
    paths = write_description(cfg, [], make_plan(cfg, tmp_path / "run"))
    assert load_run(paths.root).dry_run is False
    make(settled(tmp_path / "run", seed=3))
    assert write_description(cfg, [], make_plan(cfg, tmp_path / "run")) is None
    assert load_run(paths.root).seed == 3


@pytest.mark.parametrize("writes", ["write_start", "write_provenance", "write_plan"])
def test_a_directory_that_was_left_half_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    cfg = settled(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, writes, interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(cfg)
    assert not looks_like_run(RunPaths(tmp_path / "run"))
    paths, lock = make(replace(cfg, resume="latest"))
    assert looks_like_run(paths)
    assert load_run(paths.root).resume is None
    lock.close()
    with pytest.raises(ConfigError, match="already holds a run"):
        make(cfg)


def test_a_run_is_never_replayed_into_its_own_directory(tmp_path: Path) -> None:
    paths, lock = make(settled(tmp_path / "run"))
    lock.close()
    with pytest.raises(ConfigError, match="is also the directory of this run"):
        make(replace(settled(tmp_path / "run"), replay=str(paths.root), clean=True))
    assert paths.config.exists()


def test_resuming_says_which_of_the_runs_own_values_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = finished(tmp_path / "run")
    before = load_run(paths.root)
    again = replace(before, resume="latest")
    make(again)[1].close()
    assert "other values" not in capsys.readouterr().err
    longer = replace(again, max_steps=7, weight_broadcast=replace(again.weight_broadcast, keep_last=9))
    expected = [f"weight_broadcast.keep_last: {before.weight_broadcast.keep_last} → 9", f"max_steps: {before.max_steps} → 7"]
    assert run_dir.changes(longer) == expected, "of a dry run"
    make(longer)[1].close()
    said = capsys.readouterr().err
    assert f"resuming with other values than before: {', '.join(expected)}" in said
    assert f"--config-dir {paths.root} --config-name config resume=latest" in said


def test_resuming_a_run_that_does_not_exist_says_that_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(settled(tmp_path / "nope", resume="latest"))[1].close()
    assert f"there is no run in {tmp_path / 'nope'} yet: starting at step 0" in capsys.readouterr().err


def test_choosing_again_from_nothing_is_refused(tmp_path: Path) -> None:
    run = RunConfig(name="run", dir=str(tmp_path / "run"))
    for resume in (None, "latest"):
        with pytest.raises(ConfigError, match=r"play=false needs resume=latest of a synthesis that has played"):
            create(SynthesizeRoot(run=run, resume=resume, play=False), [], [])
    assert not (tmp_path / "run").exists()
