"""Files that another host makes on a shared file system with long-lived caches and without locks: when they are seen, who has the lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from main_job import read_metrics
from ports import free_ports
from slow_files import ABSENT

from rlx.plan.process_spec import read_plan

SERVER = Path(__file__).with_name("slow_files.py")
# A mount namespace is a host's view of its files: what follows the five words of its file system is its command.
HOST = """\
mount --make-rprivate /
hostname "$1"
shift
"$1" "$2" "$3" "$4" "$5" &
until grep -q "$4 fuse" /proc/mounts; do sleep 0.05; done
shift 5
"$@"
code=$?
kill $!
exit $code
"""
SEES = """
import os, sys
from pathlib import Path
from rlx.cli.pod import _read
from rlx.lock import FileLock
from rlx.metrics import read_metrics
from rlx.paths import RunPaths, arrived, listed
from rlx.shared.membership import JoinResponse, respond, response_of
from rlx.weights.subscribe import Subscriber
here, elsewhere = map(Path, sys.argv[1:])
for name in ("endpoint.json", "status.json"):
    assert not listed(here / name) and not (here / name).exists()
    (elsewhere / name).write_text("{}")
assert not (here / "endpoint.json").exists(), "this file system is not late"
assert listed(here / "endpoint.json"), "a listing of the folder is never from the cache of absent names"
assert arrived(here / "endpoint.json") is None, "listed, but not to be opened yet"
(elsewhere / "model.txt").write_text("name")
assert arrived(here / "model.txt") == b"name"
RunPaths(elsewhere / "run").make_folders()
found = Subscriber(RunPaths(here / "run"))
assert found.latest() is found.at(1) is None and not found.on_disk(1)
folder = RunPaths(elsewhere / "run").weights_of(1)
folder.mkdir()
(folder / "COMPLETE").write_text("{}")
assert found.on_disk(1) and found.latest() == found.at(1), "versions are asked for before they are there"
assert not list(read_metrics(here / "run" / "metrics.jsonl"))
(elsewhere / "run" / "metrics.jsonl").write_text('{"step": 0, "source": "trainer"}\\n')
((first, _),) = read_metrics(here / "run" / "metrics.jsonl")
assert first["step"] == 0, "the first step of another host"
assert _read(here / "end") is None
(elsewhere / "end").write_text("75")
assert _read(here / "end") == "75", "the end of a pod's run"
assert response_of(RunPaths(here / "run")) is None
RunPaths(elsewhere / "run").membership.mkdir()
respond(RunPaths(elsewhere / "run"), "token", "in")
assert response_of(RunPaths(here / "run")) == JoinResponse("token", "in"), "a shared trainer's answer"
lock, other = FileLock(here / "run.lock"), FileLock(here / "run.lock")
assert lock.exclusive() and not other.exclusive(), "processes of one host keep apart"
"""


def host(name: str, shared: Path, mount: Path) -> list[str]:
    """The words that begin a command on a host which sees `shared` through a mount of its own. Its processes are seen by no other host."""
    trial = ["unshare", "--mount", "--uts", "true"]
    if os.geteuid() or not os.path.exists("/dev/fuse") or subprocess.run(trial, check=False, capture_output=True).returncode:
        reason = "nobody may mount a FUSE file system in a namespace of its own here, as root could elsewhere: /dev/fuse, unshare --mount"
        (pytest.fail if os.environ.get("RLX_REQUIRE_NAMESPACES") else pytest.skip)(reason)
    words = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", HOST, "host", name]
    return [*words, sys.executable, str(SERVER), str(shared), str(mount), "0.001"]


def test_a_file_of_another_host_is_seen_before_its_absence_is_forgotten_and_a_lock_needs_no_locks_of_the_file_system(
    tmp_path: Path,
) -> None:
    shared, mount = tmp_path / "shared", tmp_path / "mount"
    shared.mkdir()
    mount.mkdir()
    words = [*host("node0", shared, mount), sys.executable, "-c", SEES, str(mount), str(shared)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_on_three_hosts_trains_on_such_a_file_system(tmp_path: Path, model_cache: Path) -> None:
    shared, mount = tmp_path / "shared", tmp_path / "mount"
    shared.mkdir()
    mount.mkdir()
    ports = free_ports(3)
    pod = ["-m", "rlx.cli", "pod", "--job", "mine", "--nodes", "3", "--volume", str(mount)]
    pod += ["--hosts", ",".join(f"127.0.0.1:{port}" for port in ports)]
    started = []
    for index in range(3):
        own = tmp_path / f"tmp{index}"
        own.mkdir()
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "RLX_CACHE": str(model_cache), "TMPDIR": str(own)}
        environment |= {"JOB_COMPLETION_INDEX": str(index), "JOB_UID": "7"}
        words = [*host(f"node{index}", shared, mount), sys.executable, *pod, "train", "hardware=cpu_3nodes", "max_steps=4"]
        with (tmp_path / f"host{index}.log").open("wb") as log:
            started.append(
                subprocess.Popen([*words, "orchestrator.batch_size=32"], env=environment, cwd=shared, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        code = started[0].wait(800)
        assert code == 0, (tmp_path / "host0.log").read_text()[-5000:]
        assert [each.wait(120) for each in started[1:]] == [0, 0]
    finally:
        for each in started:
            each.kill()
    run = shared / "mine"
    assert {spec.node for spec in read_plan(run / "plan.yaml") if spec.role != "prepare"} == {0, 1, 2}
    trained = [record for record in read_metrics(run) if record["source"] == "trainer"]
    assert [record["step"] for record in trained] == [0, 1, 2, 3]
    # Whoever asks for a file before it exists is told for `ABSENT` seconds that it does not: one such wait would be in a step.
    assert max(record["time/step"] for record in trained[1:]) < ABSENT - 20, trained
    waits = [record["time/wait_weights"] for record in read_metrics(run) if record["source"] == "orchestrator"]
    assert max(waits) < ABSENT - 20, waits
