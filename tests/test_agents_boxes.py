"""Boxes: what is in one stays in it, and nothing of it is left when it is closed or when its worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from sandboxes import ENGINES, NEEDS_BWRAP, image_of

from rlx.agents import cgroups
from rlx.agents.box import Box, BoxError, open_box, sweep
from rlx.agents.commands import MOST_OUTPUT
from rlx.agents.gateway import Gateway
from rlx.agents.images import choose, prepared
from rlx.config.schema_rollout import BoxConfig

pytestmark = [NEEDS_BWRAP, pytest.mark.slow, pytest.mark.anyio]
ISOLATED = ["bwrap", *ENGINES]
SMALL = {"disk_gb": 0.05, "memory_gb": 0.5, "processes": 40}


def inside(work: Callable[[Box], Awaitable[Any]], kind: str = "bwrap", **keys: Any) -> Any:
    async def run() -> Any:
        box = await open_box(kind, BoxConfig(**{**SMALL, **keys}), image_of(kind))
        try:
            return await work(box)
        finally:
            await box.close()

    return uvloop.run(run())  # as in a worker


def shell(script: str, timeout: float = 20, kind: str = "bwrap", **keys: Any) -> Any:
    return inside(lambda box: box.run(["sh", "-c", script], timeout=timeout), kind, **keys)


def left(marker: str) -> list[str]:
    """Processes with a marker in their command, control groups and folders of boxes of this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if marker in text and int(path.parent.name) != os.getpid():
            found.append(text)
    own = f"rlx-box-{os.getpid()}-"
    return found + [str(one) for tree in cgroups.trees().values() for one in tree.glob(f"{own}*")]


def test_a_box_shows_nothing_of_this_machine_but_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "secret").write_text("the run's key")
    monkeypatch.setenv("RLX_API_KEY", "the run's key")
    said = shell(f"env; ls / /home /root {tmp_path}; cat {tmp_path}/secret /etc/shadow; ls /proc | grep -c '^[0-9]'; id -u")
    assert "the run's key" not in said.stdout + said.stderr
    assert "RLX" not in said.stdout
    assert f"cannot access '{tmp_path}'" in said.stderr
    assert "/etc/shadow: No such file" in said.stderr
    lines = said.stdout.splitlines()
    assert int(lines[-2]) < 8, "it sees its own processes alone"
    assert lines[-1] == "1000"


def test_a_box_cannot_write_outside_its_folder():
    said = shell("echo x > /usr/x; echo x > /etc/x; echo x > /x; mount -t tmpfs x /mnt; touch ok; ls")
    assert said.stdout.split() == ["ok", "tmp"]
    assert said.stderr.count("Read-only file system") == 3


@pytest.mark.parametrize("kind", ISOLATED)
async def test_a_box_reaches_the_gateway_and_no_other_port_of_this_machine(kind: str):
    gateway, other = Gateway(), Gateway()
    await asyncio.gather(gateway.start(), other.start())
    box, without = await asyncio.gather(*(open_box(kind, BoxConfig(**SMALL), image_of(kind)) for _ in range(2)))
    box.reach(gateway.port)
    script = "import urllib.request, sys; print(urllib.request.urlopen(f'http://127.0.0.1:{sys.argv[1]}/v1/models', timeout=5).status)"
    ours, theirs = [await box.run(["python3", "-c", script, str(each.port)]) for each in (gateway, other)]
    assert "401" in ours.stderr, "the gateway answers: this is no session's key"
    assert "Connection refused" in theirs.stderr
    assert "Connection refused" in (await without.run(["python3", "-c", script, str(gateway.port)])).stderr
    await asyncio.gather(box.close(), without.close(), gateway.stop(), other.stop())


def test_a_box_that_reached_a_port_leaves_no_open_file():
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def boxes() -> list[int]:
        gateway, counts = Gateway(), []
        await gateway.start()
        for _ in range(4):
            box = await open_box("bwrap", BoxConfig(**SMALL))
            box.reach(gateway.port)
            await box.run(["true"])
            await box.close()
            await asyncio.sleep(0.1)
            counts.append(opened())
        await gateway.stop()
        return counts

    counts = uvloop.run(boxes())  # as in a worker; its servers are of another class
    assert counts[-1] == counts[0]


def test_a_box_that_ends_at_once_says_its_exit_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlx.agents.box.Bubblewrap.starting", lambda self: ["sh", "-c", "exit 7"])
    with pytest.raises(BoxError, match="cannot start: exit code 7"):
        asyncio.run(open_box("bwrap", BoxConfig(**SMALL)))


@pytest.mark.parametrize("kind", ISOLATED)
async def test_two_boxes_do_not_see_each_other(kind: str):
    one, other = await asyncio.gather(*(open_box(kind, BoxConfig(**SMALL), image_of(kind)) for _ in range(2)))
    await one.write({"mine.txt": "mine"})
    assert (await one.read("mine.txt"), await other.read("mine.txt")) == ("mine", None)
    await asyncio.gather(one.close(), other.close())


def test_much_output_is_cut_in_its_middle():
    said = shell("echo begin; yes | head -c 200000000; echo end")
    assert len(said.stdout) < MOST_OUTPUT + 100
    assert said.stdout.startswith("begin")
    assert said.stdout.endswith("end\n")
    assert "bytes left out" in said.stdout


@pytest.mark.parametrize("kind", ISOLATED)
def test_a_full_disk_is_the_boxs_own(kind: str):
    script = "for file in big /tmp/big /dev/shm/big; do dd if=/dev/zero of=$file bs=1M count=100; done; df -m /box | tail -1"
    said = shell(script, kind=kind)
    assert said.stderr.count("No space left on device") == 3
    assert said.stdout.split()[1] in ("51", "52")


@pytest.mark.skipif(os.getuid() == 0 and "pids" not in cgroups.trees(), reason="nothing bounds root's processes without control groups")
@pytest.mark.parametrize("kind", ISOLATED)
def test_a_fork_bomb_and_a_hungry_process_meet_their_bounds(kind: str):
    said = shell("bash -c 'f() { f | f & }; f' 2>&1 | head -c 300; sleep 1; echo still there", timeout=15, kind=kind)
    assert "still there" in said.stdout or "fork" in said.stdout + said.stderr
    assert shell("python3 -c 'bytearray(2 << 30)'", kind=kind).code != 0
    assert left("f | f") == []


@pytest.mark.parametrize("kind", ["none", *ISOLATED])
def test_what_ignores_its_end_is_gone_with_the_box(kind: str):
    marker = f"6{os.getpid()}"

    async def work(box: Box) -> Any:
        return await box.run(["sh", "-c", f"trap '' TERM INT HUP; sleep {marker} & sleep {marker}"], timeout=0.5)

    began = time.monotonic()
    said = inside(work, kind)
    assert (said.late, said.code) == (True, -signal.SIGKILL)
    assert time.monotonic() - began < 10
    assert left(marker) == []


@pytest.mark.parametrize("kind", ["none", *ISOLATED])
def test_a_process_that_leaves_its_group_ends_with_the_box(kind: str):
    marker = f"7{os.getpid()}"
    said = inside(lambda box: box.run(["sh", "-c", f"setsid -f sleep {marker}; echo begun"], timeout=20), kind)
    assert said.stdout == "begun\n"
    assert left(marker) == []


def test_nothing_is_left_of_the_boxes_of_a_killed_worker(tmp_path: Path):
    marker = f"8{os.getpid()}"
    worker = f"""
import asyncio
from rlx.agents.box import open_box
from rlx.agents.commands import MOST_OUTPUT
from rlx.config.schema_rollout import BoxConfig
async def main():
    box = await open_box("bwrap", BoxConfig())
    asyncio.ensure_future(box.run(["sh", "-c", "setsid -f sleep {marker}; echo x > /box/{marker}; sleep {marker}"]))
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert left(f"sleep {marker}") != []
        process.kill()
    deadline = time.monotonic() + 5
    while left(f"sleep {marker}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left(f"sleep {marker}") == []
    assert marker not in Path("/proc/mounts").read_text()
    groups = [process.pid]
    while groups and time.monotonic() < deadline:
        sweep()  # as the next worker does
        groups = [one for tree in cgroups.trees().values() for one in tree.glob(f"rlx-box-{process.pid}-*")]
    assert not groups


def test_an_image_of_bubblewrap_is_the_folder_of_a_root_file_system(tmp_path: Path):
    for name in ("bin", "lib", "lib64", "sbin"):
        (tmp_path / name).symlink_to(f"usr/{name}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.txt").write_text("of the image")
    folder = prepared("bwrap", str(tmp_path))

    async def run() -> str | None:
        box = await open_box("bwrap", BoxConfig(**SMALL, folders=["/usr"]), folder)
        try:
            return await box.read("/data/own.txt")
        finally:
            await box.close()

    assert asyncio.run(run()) == "of the image"


def test_images_of_an_engine_are_loaded_from_an_archive_built_from_a_folder_or_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = "#!/bin/sh\ncase $1 in image) exit 1;; load) echo 'Loaded image: localhost/mine:1';; pull) echo offline >&2; exit 125;; esac\n"
    (tmp_path / "podman").write_text(engine)
    (tmp_path / "podman").chmod(0o755)
    (tmp_path / "mine.tar").touch()
    (tmp_path / "Dockerfile").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert prepared("podman", str(tmp_path / "mine.tar")) == "localhost/mine:1"
    assert str(prepared("podman", str(tmp_path))).startswith("rlx-")
    with pytest.raises(ValueError, match=r"python:3 is not on this machine and cannot be pulled from its registry: .*offline"):
        prepared("podman", "python:3")


@pytest.mark.parametrize(
    ("kind", "image", "said"),
    [
        ("bwrap", "debian:12", "sandbox=bwrap makes no boxes of the image debian:12 .*: bwrap takes none or"),
        ("docker", None, "sandbox=docker makes no boxes of the image None"),
        ("docker", "debian:12", "sandbox=docker: is not installed"),
        ("apptainer", None, "sandbox=apptainer: "),
    ],
)
def test_a_sandbox_that_cannot_be_is_refused_with_what_to_do(kind: str, image: str | None, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlx.agents.images.problem_of", lambda kind: "is not installed" if kind in ("docker", "apptainer") else None)
    with pytest.raises(ValueError, match=said):
        choose(kind, image)


def test_a_box_that_cannot_start_says_why():
    with pytest.raises(BoxError, match="no-such-folder"):
        inside(lambda box: box.run(["true"]), folders=["/no-such-folder"])


def test_the_kernels_own_files_are_read_only_in_a_box():
    names = ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sysrq-trigger")
    said = shell("; ".join(f"echo x > /proc/{name}" for name in names) + "; ls /etc/ssl/private; cat /etc/passwd")
    assert said.stderr.count("cannot create /proc") == len(names)
    assert "cannot access '/etc/ssl/private'" in said.stderr
    assert said.stdout == "box:x:1000:1000:box:/box:/bin/sh\n", "not the accounts of this machine"


def test_a_file_of_a_test_takes_the_place_of_whatever_a_program_has_left_there():
    async def work(box: Box) -> Any:
        await box.run(["sh", "-c", "mkdir -p check.sh/deep; ln -s /etc/passwd link; mkfifo pipe"])
        await box.write({"check.sh": "a", "link": "b", "pipe": "c"})
        return [await box.read(name) for name in ("check.sh", "link", "pipe")]

    assert inside(work) == ["a", "b", "c"]
