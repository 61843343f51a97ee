"""Recognizes a sweep that has been started before, with the same command, files and code, and in which nothing is left to do.

Composing and checking 64 runs takes many seconds. What they would be compared with is what they gave before, so a repeated command needs
only the states of the runs. Everything else, a single failed run too, goes the whole way (`rlx.launch.sweep.find_states`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlx.config.overrides import read_request
from rlx.config.roots import Root
from rlx.config.shipped import BESIDE, conf_directory
from rlx.config.sweeps import Line
from rlx.launch.sweep import Element
from rlx.paths import RunPaths, write_text
from rlx.runs.jobs import ENDED, GONE, job_of, queue
from rlx.runs.provenance import code_digest
from rlx.runs.run import Run
from rlx.runs.status import FINAL, read_status

FILE = ".sweep.json"  # in the sweep's directory
SCHEMA = 1  # changes when the meaning of the file changes
VARIABLE = re.compile(r"oc\.env:\s*(\w+)")


@dataclass
class Known:
    """A run of such a sweep."""

    name: str
    paths: RunPaths
    state: str  # done | alive
    job: str | None


def digest(lines: Sequence[Line], root: Root) -> str:
    """A hash of all that the configurations of a sweep come from: command lines, files, variables, code, and the working directory."""
    found = hashlib.blake2b(digest_size=16)
    texts = [word for line in lines for word in (line.name, *line.argv)]
    folders = [conf_directory(), *(conf_directory().parent / name for name in BESIDE)]
    folders += [Path(folder) for _, folder in read_request(list(lines[0].argv), os.environ, root).directories]
    files = sorted(file for folder in folders for kind in ("*.yaml", "*.yml") for file in folder.rglob(kind))
    contents = [file.read_text(errors="replace") for file in files]
    variables = {name for name in os.environ if name.startswith("RLX_")} | {
        n for text in (*texts, *contents) for n in VARIABLE.findall(text)
    }
    given = [f"{name}={os.environ.get(name)}" for name in sorted(variables)]
    for text in (str(SCHEMA), root.command, os.getcwd(), str(code_digest()), *texts, *map(str, files), *contents, *given):
        found.update(text.encode(errors="surrogateescape") + b"\0")
    return found.hexdigest()


def remember(elements: Sequence[Element], directory: Path, made_from: str) -> None:
    """Note the runs of a sweep that was just started. `made_from`: their `digest`."""
    launcher = next(iter(elements)).cfg.launcher  # the same for all
    noted = {
        "made_from": made_from,
        "launcher": launcher.name,
        "waits": launcher.wait,
        "runs": {each.name: {"config": _hash(each.paths), "max_steps": each.cfg.total_steps} for each in elements},
    }
    write_text(directory / FILE, json.dumps(noted) + "\n")


def nothing_left(lines: Sequence[Line], directory: Path, made_from: str) -> tuple[str, list[Known]] | None:
    """The launcher and the runs of a sweep, if all of them are completed, queued or running.

    None if something is left to do, if a living run is to be waited for, or if that is not known.
    """
    try:
        noted = json.loads((directory / FILE).read_text())
    except (OSError, ValueError):
        return None
    if noted["made_from"] != made_from:
        return None
    jobs: Mapping[str, str] | None = None
    found = []
    for line in lines:
        paths, run = RunPaths(directory / line.name), noted["runs"][line.name]
        status, job = read_status(paths), job_of(paths)
        if status is None or _hash(paths) != run["config"]:
            return None
        if status.state == "completed" and status.max_steps >= run["max_steps"]:
            found.append(Known(line.name, paths, "done", None))
            continue
        if noted["waits"]:
            return None
        if job is not None and jobs is None:
            try:
                jobs = queue()
            except RuntimeError:
                return None
        lives = jobs is not None and job is not None and jobs.get(job, GONE) not in ENDED
        if not lives and (status.state in FINAL or not Run(paths).lives(status)):
            return None
        found.append(Known(line.name, paths, "alive", job))
    return noted["launcher"], found


def _hash(paths: RunPaths) -> str:
    try:
        return hashlib.blake2b(paths.config.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""
