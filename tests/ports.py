"""Ports for processes that open them later."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

LOWEST = 20_000  # above those of the SLURM that tests start


def free_ports(number: int) -> list[int]:
    """Different ports of this machine that nobody has and that the kernel gives nobody who asks for any."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert end > LOWEST + 1000, f"no ports between {LOWEST} and those that the kernel gives away, from {end}"
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < number:
            place = stack.enter_context(socket.socket())
            try:
                place.bind(("0.0.0.0", random.SystemRandom().randrange(LOWEST, end)))
            except OSError:
                continue
            found.append(place.getsockname()[1])
    return found
