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
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rlx.config.overrides import read_request
from rlx.config.roots import Root, has_key, key_of
from rlx.config.shipped import BESIDE, conf_directory
from rlx.config.sweeps import Line
from rlx.launch.sweep import Element
from rlx.paths import RunPaths, write_text
from rlx.runs.jobs import ENDED, GONE, job_of, queue
from rlx.runs.provenance import code_digest
from rlx.runs.run import PATIENCE, Run
from rlx.runs.status import FINAL

FILE = ".sweep.json"  # in the sweep's directory
SCHEMA = 1  # changes when the meaning of the file changes
MOST = 20_000  # files and folders; more are no configuration
VARIABLE = re.compile(r"oc\.env:\s*(\w+)")


@dataclass
class Known:
    """A run of such a sweep."""

    name: str
    paths: RunPaths
    state: str  # done | alive
    job: str | None


def digest(lines: Sequence[Line], root: Root) -> str | None:
    """A hash of all that the configurations of a sweep come from: command lines, files, variables, code, and the working directory.

    None if that is not known: a file cannot be read, or too many may be meant.
    """
    code = code_digest()
    if code is None:
        return None
    found = hashlib.blake2b(digest_size=16)
    texts = [word for line in lines for word in (line.name, *line.argv)]
    conf = conf_directory()
    shipped = [*conf.glob("*.yaml"), *(folder for folder in conf.iterdir() if folder.is_dir()), *(conf.parent / name for name in BESIDE)]
    own = [Path(folder) for _, folder in read_request(list(lines[0].argv), os.environ, root).directories]
    try:
        contents = _contents(shipped, own, root, _groups_in(texts))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    variables = {name for name in os.environ if name.startswith("RLX_")} | {
        n for text in (*texts, *(each.decode(errors="replace") for each in contents.values())) for n in VARIABLE.findall(text)
    }
    given = [f"{name}={os.environ.get(name)}" for name in sorted(variables)]
    for text in (str(SCHEMA), root.command, os.getcwd(), code, *texts, *given):
        found.update(text.encode(errors="surrogateescape") + b"\0")
    for path in sorted(contents):
        found.update(os.fsencode(path) + b"\0" + hashlib.blake2b(contents[path], digest_size=16).digest())
    return found.hexdigest()


def _groups_in(argv: Sequence[str]) -> set[str]:
    """The first folders of the groups that overrides may choose: `model` of `+model/more@x=y`."""
    return {re.split(r"[/@.=]", word.lstrip("+~/"), maxsplit=1)[0] for word in argv}


def _contents(shipped: Sequence[Path], own: Sequence[Path], root: Root, named: set[str]) -> dict[Path, bytes]:
    """The files that composition may read: `shipped` whole, and of the user's `own` directories the top level and the folders of groups.

    A directory of the user's may be a whole project, so a folder counts as a group if it is called like a key, or `named`, or if the
    defaults list of a file names it. Raises OSError or ValueError if they cannot be told.
    """
    named = named | {name.removeprefix("RLX_").lower() for name in os.environ if name.startswith("RLX_")}
    files = _Files()
    for path in shipped:
        files.collect(path)
    folders = []
    for directory in own:
        for path in sorted(directory.iterdir()):
            if not path.is_dir() or path.name in BESIDE or has_key(root.schema, key_of(path.name)):
                files.collect(path)
            else:
                folders.append(path)
    listed: set[Path] = set()  # files whose defaults lists were read
    while new := files.found.keys() - listed:
        listed |= new
        named = named.union(*(_groups_of(files.found[file]) for file in new))
        for path in [path for path in folders if path.name in named]:
            folders.remove(path)
            files.collect(path)
    return files.found


@dataclass
class _Files:
    """Files of configuration with their contents."""

    found: dict[Path, bytes] = field(default_factory=dict)
    seen: int = 0  # names, also of other files

    def collect(self, path: Path, above: tuple[tuple[int, int], ...] = ()) -> None:
        """Read a file, or all files below a folder, as composition finds them: through links, and only regular ones called *.yaml.

        `above`: the folders around it, which a link may lead back to. Raises ValueError for more than `MOST` names.
        """
        self.seen += 1
        if self.seen > MOST:
            raise ValueError(f"more than {MOST} files")
        if path.is_dir():
            stat = path.stat()
            its = (stat.st_dev, stat.st_ino)
            if its not in above:
                for entry in os.scandir(path):
                    self.collect(Path(entry.path), (*above, its))
        elif path.suffix == ".yaml" and path.is_file():
            self.found[path] = path.read_bytes()


def _groups_of(content: bytes) -> set[str]:
    """The first folders of all that a file's defaults list names. Raises ValueError if that is not known before composing."""
    if b"defaults" not in content:
        return set()
    data = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    entries = data.get("defaults") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        return set()  # no defaults list: composition refuses it, or the file is of another program
    names = [str(name) for entry in entries for name in (entry if isinstance(entry, dict) else [entry])]
    found = {name.replace("optional ", "").replace("override ", "").strip().lstrip("/").partition("@")[0] for name in names}
    if unknown := [name for name in found if "${" in name or ".." in name]:
        raise ValueError(f"it is not known which file {unknown[0]} is")
    return {name.partition("/")[0] for name in found}


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
    runs = [Run(RunPaths(directory / line.name), PATIENCE) for line in lines]
    for line, each, status in zip(lines, runs, [each.status for each in runs], strict=True):  # all are looked at first: see `patience`
        run, paths = noted["runs"][line.name], each.paths
        job = job_of(paths)
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
        if not lives and (status.state in FINAL or not each.lives(status)):
            return None
        found.append(Known(line.name, paths, "alive", job))
    return noted["launcher"], found


def _hash(paths: RunPaths) -> str:
    try:
        return hashlib.blake2b(paths.config.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""
