"""Copies the code when jobs are submitted, so that the checkout may change while they wait in the queue.

From a checkout, or its files without `.git`, it copies the package and the environments, including uncommitted and untracked files. From
an installed rlx it copies only the package.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rlx.runs.provenance import SOURCE, code_files, digest_of


def take_snapshot(folder: Path) -> Path:
    """Copy the code to `folder/code_<hash of its content>` unless that exists; return the copy's path."""
    files = code_files()
    copy = folder / f"code_{digest_of(files)}"
    if not copy.exists():
        making = copy.with_name(f".{copy.name}")
        shutil.rmtree(making, ignore_errors=True)
        for file in files:
            (making / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(SOURCE / file, making / file)
        making.rename(copy)
    return copy


def folders_of(copy: Path) -> list[str]:
    """The folders of the copy from which Python imports: its own, and that of each environment."""
    return [str(folder) for folder in (copy, *sorted((copy / "environments").glob("*/")))]


def environment(copy: Path) -> dict[str, str]:
    """Environment variables that make Python import the copy instead of an installed rlx or the working directory.

    PYTHONPATH starts with the copy and ends with the working directory, where Python still finds the user's own modules.
    """
    given, here = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path], os.getcwd()
    path = [*folders_of(copy), *given, *([] if here in given else [here])]  # the command line has put it there already
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
