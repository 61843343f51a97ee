"""What control groups allow, from files as Linux writes them: quotas of processor time and limits of memory, versions 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlx.config import limits
from rlx.config.load import compose

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the control groups of a process that may run on 64 processors."""
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "MOUNT", tmp_path / "fs")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))

    def make(lines: str, files: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(lines)
        for name, text in files.items():
            (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "fs" / name).write_text(text)

    return make


V1 = "12:memory:/{0}\n4:cpu,cpuacct:/{0}\n1:name=systemd:/{0}\n"


@pytest.mark.parametrize(
    ("lines", "files", "cores", "memory"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n", "memory.max": f"{8 * GIB}\n"}, 4, 8 * GIB),  # a container, version 2
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, 64, None),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2, None),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1, None),
        ("0::/system/job\n", {"system/job/cpu.max": "max 100000\n", "system/cpu.max": "800000 100000\n"}, 8, None),  # the parent's
        ("0::/host/path/of/pod\n", {"cpu.max": "400000 100000\n", "memory.max": f"{GIB}\n"}, 4, GIB),  # the host's path, seen from inside
        (
            V1.format("docker/abc"),  # version 1, outside of the container
            {
                "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
                "memory/docker/abc/memory.limit_in_bytes": f"{2 * GIB}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            3,
            2 * GIB,
        ),
        (
            V1.format("kubepods/pod1/c1"),  # version 1, inside
            {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "50000\n", "memory/memory.limit_in_bytes": f"{GIB}\n"},
            3,
            GIB,
        ),
        (V1.format(""), {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64, None),
        ("", {}, 64, None),
    ],
)
def test_the_smallest_limit_on_the_way_up_counts(groups, lines: str, files: dict[str, str], cores: int, memory: int | None) -> None:
    groups(lines, files)
    assert (limits.cores(), limits.memory()) == (cores, memory)


def test_a_kernel_without_control_groups_limits_nothing(groups) -> None:
    assert (limits.cores(), limits.memory()) == (64, None)


def test_a_preset_for_all_processors_takes_those_that_the_container_has(groups) -> None:
    groups("0::/\n", {"cpu.max": "400000 100000\n"})
    assert compose(["experiment=sums_smollm2"], {}).cfg.hardware.cpu_threads == 4
