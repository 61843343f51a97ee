"""Two hosts on one machine: network namespaces, which share the file system and one wire, as two machines do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
WIRE = "wire0"  # the name of each host's interface
NETWORK = 0x40000000  # CLONE_NEWNET, <sched.h>


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """For each host the words that begin a command there. Skips the test where nobody may make them."""
    trial = "unshare --net ip link add name wire0 type veth peer name wire1"
    if os.geteuid() or subprocess.run(["sh", "-c", trial], check=False, capture_output=True).returncode:
        reason = f"nobody may make network namespaces with a wire here, as root could elsewhere: {trial}"
        (pytest.fail if os.environ.get("RLX_REQUIRE_NAMESPACES") else pytest.skip)(reason)
    here = os.readlink("/proc/self/ns/net")
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in ADDRESSES]
    try:
        for holder in holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == here:
                time.sleep(0.01)
        one, two = (str(holder.pid) for holder in holders)
        command("ip", "link", "add", "name", WIRE, "netns", one, "type", "veth", "peer", "name", WIRE, "netns", two)
        inside = [["nsenter", "--target", str(holder.pid), "--net"] for holder in holders]
        for words, address in zip(inside, ADDRESSES, strict=True):
            command(*words, "ip", "address", "add", f"{address}/24", "dev", WIRE)
            command(*words, "ip", "link", "set", WIRE, "up")
            command(*words, "ip", "link", "set", "lo", "up")
        yield inside
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


@contextmanager
def inside(host: list[str]) -> Iterator[None]:
    """This thread, and what it starts, is on a host of `two_hosts`."""
    pid = host[host.index("--target") + 1]
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as here:
        try:
            with open(f"/proc/{pid}/ns/net") as there:
                assert libc.setns(there.fileno(), NETWORK) == 0, os.strerror(ctypes.get_errno())
            yield
        finally:
            assert libc.setns(here.fileno(), NETWORK) == 0, os.strerror(ctypes.get_errno())
