"""How the user started this program, for the commands that messages suggest: `python train.py`, `rlx sft`, or with paths where needed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]  # the checkout, or the site-packages folder of an installed copy


def program(command: str = "train") -> str:
    """The beginning of a line of the shell that starts a command of this very rlx from this directory."""
    return started_as(sys.executable, sys.argv[0], command)


def started_as(executable: str, script: str, command: str = "train") -> str:
    """`program` of a process with the interpreter `executable` that was started as `script` (its `sys.argv[0]`)."""
    if Path(script).suffix != ".py" and not script.startswith("-"):  # installed as a command; `-c`: Python was given its code
        return f"{short_name(script)} {command}"
    if Path(script).name == "train.py" and command == "train":
        return f"{short_name(executable)} {shlex.quote(script)}"
    here, installed = Path.cwd().resolve(), SOURCE.name in ("site-packages", "dist-packages")
    another = here != SOURCE and (here / "rlx" / "__init__.py").is_file()  # `-m` searches the working directory first
    found = installed or here == SOURCE or (Path(script).name == "__main__.py" and not another)
    path = "" if found else f"PYTHONPATH={shlex.quote(str(SOURCE))} "
    return f"{path}{short_name(executable)}{' -P' if another or not found else ''} -m rlx.cli {command}"


def short_name(program: str) -> str:
    """The shortest name that finds a program from here."""
    name, here = Path(program).name, os.getcwd() + os.sep
    for short in (name, "python"):
        if (found := shutil.which(short)) and os.path.abspath(found) == os.path.abspath(program):
            return short
    return shlex.quote(program.removeprefix(here))


def short(path: Path) -> str:
    """The path, from the current directory if it is below, for a shell."""
    return shlex.quote(str(path).removeprefix(os.getcwd() + os.sep))
