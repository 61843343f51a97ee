"""What is refused before a run of a shared trainer starts, and how the two find each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose, to_yaml
from rlx.paths import RunPaths
from rlx.runs import members
from rlx.runs.run import find
from rlx.runs.run_dir import create, resolve_run_dir
from rlx.runs.status import Status
from rlx.shared.membership import EvictedError, LivenessLock, TrainerClient, is_present, pending_requests, respond, response_of

HOST = ("trainer.max_concurrent_runs=2", "lora.rank=8")


def configured(*overrides: str):
    composed = compose(["hardware=cpu", *overrides], environ={})
    return resolve_run_dir(composed.cfg, composed.label)


@pytest.fixture
def host(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "host")
    paths.root.mkdir()
    paths.config.write_text(to_yaml(configured(*HOST, f"run.dir={paths.root}")))
    return paths


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.max_concurrent_runs=2"], "the runs of a shared trainer train adapters"),
        ([*HOST, "trainer.compile=true"], "neither divides nor compiles"),
        ([*HOST, "launcher=slurm"], "shared trainers and their runs start on one machine only"),
        (["trainer.shared_trainer_dir=x", *HOST], "a run cannot be a shared trainer and be trained by one"),
        (
            ["trainer.shared_trainer_dir=x", "lora.rank=8", "ref.name=y"],
            "the reference of the runs of a shared trainer is its model without adapters",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(overrides: list[str], said: str):
    with pytest.raises(ConfigError, match="(?s)" + said):
        configured(*overrides)


def test_a_run_gets_a_directory_in_its_trainers_and_must_fit_it(host: RunPaths, monkeypatch: pytest.MonkeyPatch):
    own = (f"trainer.shared_trainer_dir={host.root}", "run.name=a")
    cfg = configured(*own, "lora.rank=8")
    assert (cfg.run.name, cfg.run.dir) == ("a", str(host.root / "run_a"))
    assert configured(f"trainer.shared_trainer_dir={host.root}", f"run.dir={host.root}/run_b", "lora.rank=8").run.name == "b"
    with pytest.raises(ConfigError, match=r"lora.rank is 4 in this run and 8 in the shared trainer"):
        create(configured(*own, "lora.rank=4"), [], [])
    with pytest.raises(ConfigError, match="the shared trainer is not alive"):
        create(cfg, [], [])
    monkeypatch.setattr(members, "START_SECONDS", 0.05)
    Status(state="starting").write(host)
    with pytest.raises(ConfigError, match=r"or still loads its model \(its logs: .*host/logs/latest"):
        create(cfg, [], [])
    with pytest.raises(ConfigError, match="there is no shared trainer"):
        create(configured(f"trainer.shared_trainer_dir={host.root.parent}/other", "run.name=a", "lora.rank=8"), [], [])
    with pytest.raises(ConfigError, match="is not the directory of a run of the shared trainer"):
        configured(f"trainer.shared_trainer_dir={host.root}", f"run.dir={host.root.parent}/run_a", "lora.rank=8")
    with pytest.raises(ConfigError, match="needs a name"):
        configured(f"trainer.shared_trainer_dir={host.root}", "lora.rank=8")
    (host.root / "run_a").mkdir()
    with pytest.raises(ConfigError, match=r"clean=true would delete the runs of the shared trainer in .*: run_a"):
        create(configured(*HOST, f"run.dir={host.root}", "clean=true"), [], [])


def test_the_runs_of_a_shared_trainer_are_found_with_it(host: RunPaths):
    for paths in (host, host.member("a"), host.member("b")):
        paths.root.mkdir(exist_ok=True)
        Status().write(paths)
    (host.root / "logs").mkdir()
    assert [run.root.name for run in find(host.root.parent)] == ["host", "run_a", "run_b"]


def test_a_run_and_its_trainer_see_each_others_end_and_answers_are_for_one_attempt(host: RunPaths):
    paths = host.member("a")
    paths.root.mkdir()
    (host.root / "run_a.out").touch()  # not a run
    assert not is_present(host)
    presence = LivenessLock(host)
    assert is_present(host)
    member = TrainerClient(paths, host.root)
    ((found, token),) = pending_requests(host)
    assert (found.root, token) == (paths.root, member.token)
    assert is_present(paths)
    assert not member.check(), "no answer yet"
    respond(paths, "of another attempt", "out", "it was")
    assert not member.check()
    respond(paths, token, "in")
    assert member.check()
    respond(paths, token, "out", "the loss is nan")
    with pytest.raises(EvictedError, match="does not train this run: the loss is nan"):
        member.check()
    respond(paths, token, "in")
    os.close(presence.fd)
    with pytest.raises(EvictedError, match="has ended"):
        member.check()
    respond(paths, token, "done")
    assert member.check(), "the trainer may end after the run's last step"
    os.close(member.presence.fd)
    assert not is_present(paths)
    found = response_of(paths)
    assert found.state == "done"
