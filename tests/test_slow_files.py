"""Files that another host makes on a shared file system with long-lived caches and without locks: when they are seen, who has the lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).with_name("slow_files.py")
# A mount namespace is a host's view of its files: what follows the five words of its file system is its command.
HOST = """\
mount --make-rprivate /
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
from rlx.launch.local import RunLock
from rlx.paths import listed
here, elsewhere = map(Path, sys.argv[1:])
for name in ("endpoint.json", "status.json"):
    assert not listed(here / name) and not (here / name).exists()
    (elsewhere / name).write_text("{}")
assert not (here / "endpoint.json").exists(), "this file system is not late"
assert listed(here / "endpoint.json"), "a listing of the folder is never from the cache of absent names"
lock, other = RunLock(here / "run.lock"), RunLock(here / "run.lock")
assert lock.exclusive() and not other.exclusive(), "processes of one host keep apart"
"""


def test_a_file_of_another_host_is_seen_before_its_absence_is_forgotten_and_a_lock_needs_no_locks_of_the_file_system(
    tmp_path: Path,
) -> None:
    trial = ["unshare", "--mount", "true"]
    if os.geteuid() or not os.path.exists("/dev/fuse") or subprocess.run(trial, check=False, capture_output=True).returncode:
        reason = "nobody may mount a FUSE file system in a namespace of its own here, as root could elsewhere: /dev/fuse, unshare --mount"
        (pytest.fail if os.environ.get("RLX_REQUIRE_NAMESPACES") else pytest.skip)(reason)
    shared, mount = tmp_path / "shared", tmp_path / "mount"
    shared.mkdir()
    mount.mkdir()
    files = [sys.executable, str(SERVER), str(shared), str(mount), "0.001"]
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", HOST, "host", *files]
    done = subprocess.run(
        [*words, sys.executable, "-c", SEES, str(mount), str(shared)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
