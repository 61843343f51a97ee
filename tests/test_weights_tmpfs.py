"""Versions that only the servers need lie in memory: the same for every reader, lost without harm, and deleted by whoever comes last."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from trainer_examples import make_model

from rlx.cli.role import TRAINER
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.memory import published_bytes, versions_in_memory
from rlx.config.roots import EVAL
from rlx.config.schema import Config
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.preflight import doctor
from rlx.preflight.needs import needed_memory
from rlx.runs.weights import resolve
from rlx.weights import files, tmpfs
from rlx.weights.files import ModelFiles, WeightsError, verify
from rlx.weights.publish import Publisher, PublishFailed
from rlx.weights.subscribe import Subscriber

GIB = 2**30


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def publisher(tmp_path: Path, shm: Path) -> Publisher:
    paths = RunPaths(tmp_path / "mine")
    tmpfs.make(paths.weights, shm, 0)
    return Publisher(
        PolicyModel(make_model()), one_process("cpu"), paths, ModelFiles({"config.json": b"{}"}), torch.float32, in_memory=True
    )


def publish(publisher: Publisher, version: int, *, lasts: bool = False, keep_last: int = 2, protect: tuple[int, ...] = ()) -> Path:
    """Publish weights that are all `version`."""
    with torch.no_grad():
        for _, tensor in publisher.model.named_weights():
            tensor.fill_(version)
    publisher.gather(version, lasts=lasts)
    publisher.announce(version, keep_last=keep_last, protect=protect)
    publisher.wait()
    return publisher.paths.weights_of(version)


def in_memory(shm: Path) -> list[str]:
    (own,) = shm.iterdir()
    return sorted(path.name for path in own.iterdir())


def test_versions_that_last_are_on_the_disk_and_all_are_found_in_the_run_directory(publisher: Publisher, shm: Path) -> None:
    paths, subscriber = publisher.paths, Subscriber(publisher.paths)
    for version in range(1, 6):
        folder = publish(publisher, version, lasts=version == 2, protect=(2,))
        assert folder.is_symlink() == (version != 2)
        assert verify(folder)["version"] == version
        assert all((tensor == version).all() for tensor in load_file(folder / "model.safetensors").values())
        assert (found := subscriber.latest()) is not None
        assert found == subscriber.at(version)
        assert Path(found.where) == folder.resolve(), "a server reads it where it is, however its name changes meanwhile"
    assert files.versions(paths.weights) == [2, 4, 5]
    assert in_memory(shm) == ["step_4", "step_5"]
    (own,) = shm.iterdir()
    assert own.name.startswith("rlx-mine-")
    assert own.stat().st_mode & 0o777 == 0o700
    publisher.close()
    tmpfs.clear(paths.weights)
    assert [path.name for path in paths.weights.iterdir()] == ["step_2"]
    assert list(shm.iterdir()) == []


def test_a_version_in_memory_goes_to_the_disk_when_a_checkpoint_of_it_is_made_and_its_readers_go_on(publisher: Publisher) -> None:
    broadcast, paths = publisher, publisher.paths
    folder = publish(publisher, 3)
    before, reader = verify(folder), folder.readlink()
    publisher.gather(3, lasts=False)  # also where it is still being written
    publisher.announce(3)
    broadcast.leave_on_disk(3)
    assert files.is_persistent(paths, 3)
    assert not folder.is_symlink()
    assert verify(folder) == verify(reader) == before
    number = folder.stat().st_ino
    broadcast.leave_on_disk(3)
    assert folder.stat().st_ino == number, "what is on the disk is not written again"


def test_what_was_in_memory_is_no_version_after_a_restart_of_the_machine(publisher: Publisher, shm: Path) -> None:
    paths, subscriber = publisher.paths, Subscriber(publisher.paths)
    publish(publisher, 1, lasts=True)
    folder = publish(publisher, 2)
    (own,) = shm.iterdir()
    shutil.rmtree(own)
    assert files.versions(paths.weights) == [1]
    assert subscriber.at(2) is None
    assert (found := subscriber.latest()) is not None
    assert found.version == 1
    with pytest.raises(WeightsError, match="no file COMPLETE"):
        verify(folder)
    asked = compose([f"weights_dir={paths.weights}", "steps=[2]", "env=sums"], root=EVAL, environ={}).cfg
    with pytest.raises(ConfigError, match=r"no complete step_2; it has 1"):
        resolve(asked)
    tmpfs.clear(paths.weights)
    again = tmpfs.make(paths.weights, shm, 0)
    assert [path.name for path in paths.weights.glob("step_*")] == ["step_1"]
    assert list(shm.iterdir()) == [again]


def test_a_version_that_cannot_be_written_leaves_nothing_and_names_the_folder(
    publisher: Publisher, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (own,) = shm.iterdir()
    monkeypatch.setattr(files, "_digest", full)
    publisher.gather(1, lasts=False)
    with pytest.raises(
        PublishFailed, match=rf"version 1 .* to {own}: OSError: \[Errno 28\] No space left on device\n  fix: free some space"
    ) as failed:
        publisher.wait()
    assert failed.value.filename == str(own)
    assert [path.name for path in publisher.paths.weights.iterdir()] == [tmpfs.RECORD]
    assert in_memory(shm) == []


@pytest.mark.parametrize(("symlinks", "left"), [(True, []), (False, ["step_1"])])
def test_a_copy_of_the_run_directory_deletes_its_links_and_not_what_they_lead_to(
    publisher: Publisher, shm: Path, symlinks: bool, left: list[str]
) -> None:
    """A copy that follows the links has the versions themselves."""
    publish(publisher, 1)
    mine, copy = publisher.paths, RunPaths(publisher.paths.root.with_name("copy"))
    shutil.copytree(mine.root, copy.root, symlinks=symlinks)
    tmpfs.clear(copy.weights)
    assert [path.name for path in copy.weights.iterdir()] == left
    assert verify(mine.weights_of(1))["version"] == 1
    tmpfs.make(copy.weights, shm, 0)
    assert len(list(shm.iterdir())) == 2, "no two runs share a folder"


def test_what_an_attempt_before_one_on_another_host_has_left_is_deleted(tmp_path: Path, shm: Path) -> None:
    """The attempt on the other host has removed the link to it."""
    mine, other = tmp_path / "a" / "mine" / "weights", tmp_path / "b" / "mine" / "weights"
    of_other = tmpfs.make(other, shm, 0)
    (tmpfs.make(mine, shm, 0) / "step_1").mkdir()
    (mine / tmpfs.RECORD).unlink()
    (mine / "latest").symlink_to("step_12")
    found = tmpfs.make(mine, shm, 0)
    assert list(found.iterdir()) == []
    assert sorted(shm.iterdir()) == sorted([of_other, found])
    tmpfs.clear(mine)
    assert (mine / "latest").is_symlink(), "the user's own"
    assert list(shm.iterdir()) == [of_other]


@pytest.mark.parametrize("done", ["link", "folder"])
def test_an_attempt_that_was_killed_while_it_made_its_folder_leaves_it_to_the_next(tmp_path: Path, shm: Path, done: str) -> None:
    weights = tmp_path / "mine" / "weights"
    own = tmpfs.make(weights, shm, 0)
    if done == "link":
        own.rmdir()
    tmpfs.clear(weights)
    assert list(shm.iterdir()) == list(weights.iterdir()) == []
    found = tmpfs.make(weights, shm, 0)
    assert list(shm.iterdir()) == [found]
    tmpfs.clear(weights)
    tmpfs.clear(weights)
    assert list(shm.iterdir()) == list(weights.iterdir()) == []


def test_the_trainer_fails_at_once_if_its_versions_do_not_fit(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmpfs.shutil, "disk_usage", lambda _: SimpleNamespace(total=2 * GIB, free=1 * GIB))
    with pytest.raises(OSError, match=r"the versions of weight_broadcast\.folder take 2\.0 GiB") as failed:
        tmpfs.make(tmp_path / "weights", shm, 2 * GIB)
    assert str(shm) in str(failed.value)
    assert list(shm.iterdir()) == []


def test_the_versions_that_a_folder_in_memory_holds_are_counted(shm: Path) -> None:
    cfg = compose([f"weight_broadcast.folder={shm}"], environ={}).cfg
    assert cfg.memory_folder == shm
    assert versions_in_memory(cfg) == 4 * published_bytes(cfg) > 0
    assert versions_in_memory(compose([], environ={}).cfg) == 0


def test_rlx_doctor_asks_for_room_and_counts_it_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def examined(*more: str) -> Config:
        return compose(["model=qwen3_8b", "env=math", *more, "dry_run=true"], environ={}).cfg

    large, without = examined("hardware=node8", "weight_broadcast.folder=/dev/shm"), examined("hardware=node8")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=32 * GIB, free=32 * GIB))
    state, found, remedy = doctor.shared_memory(large)
    assert state == "failed"
    assert "61.0 GiB for weights" in found
    assert remedy.endswith("or weight_broadcast.folder=null")
    assert doctor.shared_memory(without)[0] == "ok"
    assert needed_memory(large) - needed_memory(without) == versions_in_memory(large)


def test_a_role_that_is_started_by_hand_has_nobody_who_deletes_what_it_leaves(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight_broadcast\.folder=/dev/shm needs `rlx train`, which deletes what is left there"):
        TRAINER.run([f"run.dir={tmp_path / 'mine'}", "weight_broadcast.folder=/dev/shm", "dry_run=true"])
    assert list(tmp_path.iterdir()) == []


def test_versions_last_that_are_evaluated_or_the_last_one() -> None:
    cfg = compose(["max_steps=14", "eval.interval=4", "weight_broadcast.folder=/dev/shm", "dry_run=true"], environ={}).cfg
    assert [version for version in range(15) if cfg.keeps_weights(version)] == [0, 4, 8, 12, 14]
    assert all(cfg.publishes(version) for version in range(15)), "servers need every version"
