"""Runs a command on the host, for a process inside a container: `python -m rlx.runs.host_commands NAMES WORD…`. Standard library only.

Inside the container of a SLURM job there is no SLURM. The job's script, which runs on the host, reads the paths of folders from the pipe
`asked` in the folder `RLX_OUTSIDE`. Each of these folders has the command (`words`) and variables for it (`variables`), as texts that end
with a zero byte, and pipes for its output and exit code: `out`, `err` (absent: errors go to `out`), `code`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

FOLDER = "RLX_OUTSIDE"  # environment variable: the folder above; not set outside of a container
PID = "pid"  # file there: the process id of the supervisor, which gets the script's signals
TOLD = "told"  # file there: the names of the signals that the script got, one a line
DEAF = 'trap "" INT TERM; exec "$@"'  # SLURM signals all processes of a step, this one too, which must see its command end


def outside(words: Sequence[str], variables: Iterable[str] = ()) -> list[str]:
    """The command that runs `words` on the host: these words, if this process is not in a container.

    `variables`: names of variables of the new process that the command gets; all others are those of the job's script.
    """
    if FOLDER not in os.environ:
        return list(words)
    return ["sh", "-c", DEAF, "outside", sys.executable, "-m", __name__, ",".join(variables), *words]


def is_inside() -> bool:
    """Whether this process is in a container of a job. There, SIGTERM concerns a step only; the job's arrives as SIGINT."""
    return FOLDER in os.environ


def begin() -> list[str]:
    """Let the script pass its signals on to this process. Returns the names of the signals that it received before."""
    if FOLDER not in os.environ:
        return []
    folder = Path(os.environ[FOLDER])
    making = folder / f".{PID}"
    making.write_text(f"{os.getpid()}\n")
    making.rename(folder / PID)
    told = folder / TOLD  # the script writes this file before it looks for the other, so no signal is lost
    return told.read_text().split() if told.exists() else []


def main(names: str, *words: str) -> int:
    """Run the command; return its exit code."""
    root = os.environ[FOLDER]
    folder = Path(tempfile.mkdtemp(dir=root, prefix="command."))
    given = [f"{name}={os.environ[name]}" for name in names.split(",") if name in os.environ]
    (folder / "words").write_bytes(_zero_ended(words))
    (folder / "variables").write_bytes(_zero_ended(given))
    streams = {"out": 1} if os.path.sameopenfile(1, 2) else {"out": 1, "err": 2}
    for name in (*streams, "code"):
        os.mkfifo(folder / name)
    with open(f"{root}/asked", "w", encoding="utf-8") as asked:
        asked.write(f"{folder}\n")  # in one piece, because it is shorter than a pipe's buffer
    copies = [threading.Thread(target=_copy, args=(folder / name, number)) for name, number in streams.items()]
    for each in copies:
        each.start()
    for each in copies:
        each.join()
    code = int((folder / "code").read_text())
    shutil.rmtree(folder, ignore_errors=True)
    return code


def _zero_ended(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def _copy(source: Path, target: int) -> None:
    with open(source, "rb", buffering=0) as opened:
        while block := opened.read(1 << 16):
            with contextlib.suppress(OSError):  # a full disk takes the output, not the command
                while block:
                    block = block[os.write(target, block) :]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
