"""Large files of deleted versions are overwritten by the next version, but never under a reader's eyes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from trainer_examples import make_model

from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.weights import files, spare
from rlx.weights.files import ModelFiles, verify
from rlx.weights.publish import Publisher
from rlx.weights.subscribe import Subscriber

FILE = "model.safetensors"
READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    seen = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
before = seen[:]
print(flush=True)
sys.stdin.readline()
print("the same" if seen[:] == before else "changed")
"""


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    monkeypatch.setattr(files, "ALONE", 0)  # so that small files are kept, too
    monkeypatch.setattr(spare, "LOCAL", {spare.file_system(tmp_path)})
    return Publisher(PolicyModel(make_model()), one_process("cpu"), RunPaths(tmp_path), ModelFiles({}), torch.float32)


def publish(publisher: Publisher, version: int) -> Path:
    """Publish weights that are all `version`, and delete all older versions."""
    with torch.no_grad():
        for _, tensor in publisher.model.named_weights():
            tensor.fill_(version)
    publisher.gather(version)
    publisher.announce(version, keep_last=1)
    publisher.wait()
    return publisher.paths.weights_of(version) / FILE


def test_the_file_of_a_deleted_version_becomes_that_of_the_next(publisher: Publisher) -> None:
    first, second = (publish(publisher, version).stat().st_ino for version in (1, 2))
    third = publish(publisher, 3)
    assert first != second
    assert third.stat().st_ino == first
    verify(third.parent)
    assert all((tensor == 3).all() for tensor in load_file(third).values())
    publisher.close()
    assert [path.name for path in publisher.paths.weights.iterdir()] == ["step_3"], "nothing is left of what is not used any more"


def test_another_process_that_prunes_leaves_the_spare_files_alone(publisher: Publisher) -> None:
    publish(publisher, 1)
    publish(publisher, 2)
    kept = publisher.paths.weights / spare.SPARE / FILE
    number = kept.stat().st_ino
    publisher.gather(3)
    publisher.announce(3)
    publisher.wait()
    assert not kept.exists(), "the version that was written has it"
    Subscriber(publisher.paths).prune(1, ())
    assert not kept.exists()
    assert (publisher.paths.weights_of(3) / FILE).stat().st_ino == number


def test_what_a_process_still_reads_is_not_overwritten(publisher: Publisher) -> None:
    first = publish(publisher, 1)
    reader = subprocess.Popen([sys.executable, "-c", READER, str(first)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdout is not None
    reader.stdout.readline()
    with safe_open(first, framework="pt") as mine:
        number = first.stat().st_ino
        publish(publisher, 2)
        publish(publisher, 3)
        assert number not in {path.stat().st_ino for path in publisher.paths.weights.rglob(FILE)}, "it is no copy on the disk any more"
        assert all((mine.get_tensor(name) == 1).all() for name in mine.keys())  # noqa: SIM118  (not a dict)
    told, _ = reader.communicate(b"\n")
    assert told == b"the same\n"


def test_a_shorter_version_has_nothing_of_the_longer_one(tmp_path: Path) -> None:
    from rlx.weights.saving import save

    save({"a": torch.ones(1000)}, tmp_path / "x")
    save({"a": torch.zeros(10)}, tmp_path / "x")
    assert files.header(tmp_path / "x")[0].keys() == {"a"}
    assert load_file(tmp_path / "x")["a"].tolist() == [0.0] * 10


def test_a_file_with_a_second_name_and_one_that_somebody_opened_are_in_use(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1")
    assert spare._unused(path)
    with path.open("rb"):
        assert not spare._unused(path)
    (tmp_path / "y").hardlink_to(path)
    assert not spare._unused(path)
    assert not spare._unused(tmp_path), "it cannot be opened for writing"


def test_somebody_who_opens_a_file_while_it_is_looked_at_does_not_end_the_process(tmp_path: Path) -> None:
    """The kernel tells the holder of a lease by a signal, whose default action would be to end the process."""
    (tmp_path / "x").write_bytes(b"1")
    program = """
import fcntl, os, sys
from pathlib import Path
from rlx.weights import spare
ask = fcntl.fcntl
def interrupted(file, what, value):
    ask(file, what, value)
    if what == fcntl.F_SETLEASE and value == fcntl.F_WRLCK:
        try:
            os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)
        except BlockingIOError:
            print("asked", flush=True)
spare.fcntl.fcntl = interrupted
spare._unused(Path(sys.argv[1]))
print("alive")
"""
    said = subprocess.run([sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, "asked\nalive\n"), said.stderr
