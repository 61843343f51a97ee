"""Which boxes this machine can make, and the file systems that they get: chosen and prepared once, before the first rollout."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlx.paths import cache_root

PULL = 3600.0  # seconds for a command that fetches or builds
ENGINES = ("podman", "docker")
KINDS = ("bwrap", *ENGINES)
BWRAP = "bwrap --unshare-all --unshare-user --uid 1000 --gid 1000 --die-with-parent --ro-bind / / --proc /proc --dev /dev true"
TESTS = {"bwrap": BWRAP, "podman": "podman info", "docker": "docker info", "apptainer": "apptainer --version"}
MISSING = {
    "bwrap": "install bubblewrap (apt-get install bubblewrap), and nsenter and prlimit of util-linux",
    "podman": "install podman",
    "docker": "install docker, and start its daemon",
    "apptainer": "install apptainer",
}


@functools.cache
def problem_of(kind: str) -> str | None:
    """Why this machine cannot make boxes of a kind, in the words of the program that makes them; None: it can."""
    if kind == "none":
        return None
    needed = ("bwrap", "nsenter", "prlimit") if kind == "bwrap" else (kind,)
    if lacking := [name for name in needed if shutil.which(name) is None]:
        return f"{', '.join(lacking)} is not installed"
    tried = subprocess.run(shlex.split(TESTS[kind]), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    return (tried.stderr.strip() or tried.stdout.strip() or "it fails").splitlines()[-1] if tried.returncode else None


def choose(kind: str, image: str | None) -> str:
    """The kind of box for `envs.NAME.sandbox`. Raises ValueError with what to do if there is none."""
    named = image is not None and (not os.path.isdir(image) or os.path.exists(f"{image}/Dockerfile"))
    fits = ENGINES if named else ("bwrap",) if image is None else KINDS
    if kind in KINDS and kind not in fits:
        raise ValueError(
            f"sandbox={kind} makes no boxes of the image {image} (box.image, or the task's): bwrap takes none or the folder of a root file "
            "system; podman and docker take a name, an archive or a folder with a Dockerfile"
        )
    wanted: Sequence[str] = fits if kind == "auto" else (kind,)
    found = next((each for each in wanted if problem_of(each) is None), None)
    if found is None:
        why = "; ".join(f"sandbox={each}: {problem_of(each)}" for each in wanted)
        raise ValueError(f"{why}; {MISSING[wanted[0]]}; rlx doctor says what this machine can do; without isolation: sandbox=none")
    return found


def prepared(kind: str, image: str | None) -> str | None:
    """What `open_box` makes boxes from: pulled or built, once. Raises ValueError."""
    if image is None or kind == "none":
        return None
    path = Path(image)
    if kind == "bwrap":  # `choose` has seen the folder of a root file system
        return str(path.resolve())
    if path.is_dir():  # the engine knows what of it has changed
        name = f"rlx-{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
        _call([kind, "build", "--tag", name, str(path)], f"the image of {path} cannot be built")
        return name
    if path.is_file():  # `podman save`, `docker save`
        return _call([kind, "load", "--input", image], f"the archive {image} holds no image").split()[-1]
    if subprocess.run([kind, "image", "inspect", image], capture_output=True, timeout=PULL).returncode:
        _call([kind, "pull", image], f"the image {image} is not on this machine and cannot be pulled from its registry")
    return image


def installed(command: Sequence[str]) -> str:
    """The folder that a program's `install` command has filled. It runs once on this machine, with the network. Raises ValueError."""
    folder = cache_root() / "programs" / hashlib.blake2b("\0".join(command).encode(), digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several workers begin at the same time
        if not (folder / ".ready").exists():
            _call([part.replace("{folder}", str(folder)) for part in command], "harness.install has failed", folder)
            (folder / ".ready").touch()
    return str(folder)


def _call(command: Sequence[str], what: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PULL, stdin=subprocess.DEVNULL, cwd=cwd)
    if done.returncode:
        raise ValueError(f"{what}: {' '.join(command)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
