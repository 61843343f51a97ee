"""How processes of rlx begin and end."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlx.invocation import SOURCE, short_name, started_as
from rlx.paths import RunPaths
from rlx.policy.base import PolicyError
from rlx.process import importing
from rlx.rollout.role import end
from rlx.runs.status import Cause, Status, read_status

ENDS = """
import atexit, logging, os, sys, threading, time
from rlx.process import end_at_once
atexit.register(os.abort)
threading.Thread(target=time.sleep, args=(600,)).start()
logging.basicConfig(stream=sys.stdout)
def main():
    print("the last line")
    {body}
end_at_once(main)
"""


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("return 0", 0, ""),
        ("return 75", 75, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('the reason')", 1, "the reason"),
        ("raise ValueError('the reason')", 1, "ValueError: the reason"),
    ],
)
def test_neither_a_thread_nor_the_end_of_the_interpreter_changes_how_a_role_ends(body: str, code: int, last: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS.format(body=body)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (code, "the last line\n")
    assert done.stderr.rstrip().rpartition("\n")[2] == last
    assert ("Traceback" in done.stderr) == ("raise" in body)


TRAINERS = """
import atexit, os, runpy, sys
import rlx.train.role
atexit.register(os.abort)
rlx.train.role.begin = lambda *rest: sys.exit(75)
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("role", ["rlx.roles.trainer", "rlx.roles.shared_trainer"])
def test_a_trainer_ends_before_the_interpreter_shuts_down(role: str) -> None:
    done = subprocess.run([sys.executable, "-c", TRAINERS, role], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 75, done.stderr


PROBE = "import atexit, os, sys; atexit.register(os.abort); from rlx.parallel.probe import _rank; _rank(0, 1, 'gloo', sys.argv[1])"


def test_a_rank_of_the_probe_of_gpus_ends_before_the_interpreter_shuts_down(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float((tmp_path / "seconds").read_text()) > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounts a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_the_end_of_a_run_is_written_even_where_nothing_else_can_be(small_disk: Path) -> None:
    paths = RunPaths(small_disk)
    status = Status(state="running", max_steps=9)
    status.write(paths)
    with (small_disk / "full").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    with pytest.raises(OSError, match="No space left"):
        status.write(paths)
    lines = tuple(f"a line of the log, number {number}" for number in range(500))
    status.finish("failed", Cause(role="trainer", replica=0, returncode=1, reason="exit code 1", log="x", last_lines=lines))
    status.write(paths)
    found = read_status(paths)
    assert (found.state, found.exit_code, found.cause.reason) == ("failed", 1, "exit code 1")


FAULTS = """
import resource, sys
import numpy as np
from rlx.process import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        arrays = [np.ones(5_000_000, np.float64) for _ in range(3)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def test_a_process_that_keeps_freed_memory_gets_no_new_pages_for_the_same_arrays() -> None:
    plain, keeping = (
        int(subprocess.run([sys.executable, "-c", FAULTS, way], check=True, capture_output=True, text=True).stdout)
        for way in ("plain", "keep")
    )
    assert keeping < plain / 20, (plain, keeping)


RETURNED = """
import resource, sys
import numpy as np
from rlx.process import freed_memory_returned, keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def left():
    '''MB that stay resident after arrays of 2 MB were freed, behind which small ones lie.'''
    resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6
    before = resident()
    large = [(np.ones(250_000), np.ones(100)) for _ in range(100)]
    kept = [small for _, small in large]
    del large
    return resident() - before
@freed_memory_returned()
def within():
    return left()
print(within(), left(), within())
"""


@pytest.mark.parametrize("way", ["plain", "keep"])
def test_freed_memory_is_returned_while_it_is_asked_for_and_kept_again_afterwards(way: str) -> None:
    found = subprocess.run([sys.executable, "-c", RETURNED, way], check=True, capture_output=True, text=True).stdout
    first, between, again = map(float, found.split())
    assert first < 20, found
    assert again < 20, found
    assert between > 150, found


def test_no_garbage_collection_runs_during_a_large_import_and_later_ones_leave_out_what_was_imported():
    gc.unfreeze()
    with importing():
        assert not gc.isenabled()
        kept = [[number] for number in range(10_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_what_it_was_also_after_an_import_that_fails(enabled: bool):
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], int]:
    """Ends a role, but for the process. Returns the exit code."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(sys, "argv", ["role", "--run-dir", "/the/run"])

    def run(main: Callable[[], int]) -> int:
        with pytest.raises(SystemExit) as caught:
            end(main, "synthesizer", plain=(PolicyError,))
        return int(caught.value.code or 0)

    return run


def raising(error: Exception) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code", "said", "logged"),
    [
        (lambda: 75, 75, "", False),
        (raising(ValueError("the rows are empty")), 1, "ValueError: the rows are empty\n", True),
        (raising(PolicyError("the endpoint refuses the key")), 1, "the endpoint refuses the key\n", False),  # its message says it all
    ],
)
def test_a_role_ends_with_a_code_and_the_last_line_says_why(ended, capsys, caplog, main, code: int, said: str, logged: bool):
    assert ended(main) == code
    assert capsys.readouterr().err == said
    assert [(record.name, record.exc_info is not None) for record in caplog.records] == [("rlx.synthesizer", True)] * logged


def test_a_full_disk_is_one_line_that_names_the_file(ended, capsys, tmp_path: Path):
    file = tmp_path / "finished.jsonl"
    assert ended(raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)))) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert str(file) in said
    assert said.count("\n") == 1


def test_the_program_is_named_as_briefly_as_it_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    programs = {}
    for name in (".venv/bin/python", ".venv/bin/rlx", "elsewhere/python3.11"):
        programs[name] = tmp_path / name
        programs[name].parent.mkdir(parents=True, exist_ok=True)
        programs[name].write_text("#!/bin/sh\n")
        programs[name].chmod(0o755)
    python, rlx = str(programs[".venv/bin/python"]), str(programs[".venv/bin/rlx"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert started_as(python, "train.py") == ".venv/bin/python train.py"
    assert started_as(python, rlx) == ".venv/bin/rlx train"
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    assert started_as(python, "train.py") == "python train.py"
    assert started_as(python, "/there/rlx/cli/__main__.py") == "python -m rlx.cli train"
    assert started_as(python, rlx) == "rlx train"


def test_a_suggested_command_imports_the_rlx_that_runs(tmp_path, monkeypatch):
    """With -m, Python searches the working directory first, which may be another checkout. A script finds what lies beside it."""
    monkeypatch.setenv("PATH", "/nowhere")
    there = f"PYTHONPATH={SOURCE} {sys.executable} -P -m rlx.cli view"
    monkeypatch.chdir(SOURCE)
    assert started_as(sys.executable, "train.py", "view") == f"{short_name(sys.executable)} -m rlx.cli view"
    monkeypatch.chdir(tmp_path)
    assert started_as(sys.executable, f"{SOURCE}/train.py", "view") == there
    assert started_as(sys.executable, f"{SOURCE}/rlx/cli/__main__.py", "view") == f"{sys.executable} -m rlx.cli view"
    (tmp_path / "rlx").mkdir()
    (tmp_path / "rlx" / "__init__.py").write_text("raise SystemExit('another checkout')")
    assert started_as(sys.executable, f"{SOURCE}/rlx/cli/__main__.py", "view") == there
    done = subprocess.run(there.replace("view", "--help"), shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "another checkout" in subprocess.run([sys.executable, "-m", "rlx.cli"], capture_output=True, text=True, check=False).stderr
