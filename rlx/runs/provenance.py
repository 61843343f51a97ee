"""Where a run came from: commit, uncommitted changes, packages, machine, command; and the script that runs it again.

Knows git, `/proc` and the installed packages. Nothing here may stop a run: what cannot be found out is recorded as null.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rlx
from rlx.config.schema import Config
from rlx.config.secret import hide_lines, secrets_of
from rlx.paths import RunPaths, write_text

SOURCE = Path(rlx.__file__).resolve().parents[1]  # the checkout, or the site-packages folder of an installed copy
DIFF = "uncommitted.diff"
SECRET = ("KEY", "TOKEN", "SECRET")  # in the name of an environment variable whose value is not written down


def write_provenance(paths: RunPaths, cfg: Config, *, again: bool = False) -> None:
    """Write `provenance.json`, the uncommitted changes beside it, and `reproduce.sh`.

    `again`: of a later attempt. Its facts are added to those of the first, under `later_attempts`.
    """
    source = source_state()
    diff = DIFF
    earlier = json.loads(paths.provenance.read_text()) if again else {}
    if again:
        diff = f"uncommitted_{len(earlier.get('later_attempts', [])) + 1}.diff"
    if source["diff"]:
        write_text(paths.root / diff, source["diff"])
    record: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": hide_lines(sys.argv, cfg),
        "cwd": os.getcwd(),
        "user": os.environ.get("USER"),
        "rlx": rlx.__version__,
        "source": {**source, "diff": diff if source["diff"] else None},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": packages(),
        "machine": machine(gpus=cfg.hardware.device != "cpu"),
        "seeds": {"run": cfg.seed} | ({"warm_start": cfg.model.warm_start.seed} if cfg.model.warm_start else {}),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if (name.startswith("RLX_") or name == "CUDA_VISIBLE_DEVICES") and not any(word in name for word in SECRET)
        },
    }
    if again:
        record = {**earlier, "later_attempts": [*earlier.get("later_attempts", []), record]}
    write_text(paths.provenance, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if again:
        return
    write_text(paths.reproduce, reproduce_script(source["commit"], list(secrets_of(cfg))))
    paths.reproduce.chmod(0o755)


@functools.cache
def packages() -> dict[str, str]:
    """Installed packages and their versions; read once, since a sweep asks for each of its runs."""
    return dict(sorted((d.name, d.version) for d in importlib.metadata.distributions()))


def source_state() -> dict[str, Any]:
    """The commit the code was at, the uncommitted changes to tracked files, and the names of untracked ones; null outside a checkout."""
    # An installed copy may lie inside somebody's checkout (`.venv/`): only one that tracks this code counts.
    if git("ls-files", "--error-unmatch", "rlx/__init__.py") is None:
        return {"folder": str(SOURCE), "commit": None, "diff": None, "untracked": None}
    untracked = git("ls-files", "--others", "--exclude-standard") or ""
    commit = (git("rev-parse", "HEAD") or "").strip() or None
    return {"folder": str(SOURCE), "commit": commit, "diff": git("diff", "HEAD"), "untracked": untracked.splitlines()}


def code_change(paths: RunPaths) -> str | None:
    """How the code differs from what it was when the run was made, in words; None when it does not, or nobody can tell."""
    provenance = json.loads(paths.provenance.read_text())
    recorded = [provenance, *provenance.get("later_attempts", [])][-1]["source"]
    now = source_state()
    if recorded["commit"] is None or now["commit"] is None:
        return None
    if now["commit"] != recorded["commit"]:
        return f"the code was at commit {recorded['commit'][:12]} when the run was submitted and is at {now['commit'][:12]} now"
    before = (paths.root / recorded["diff"]).read_text() if recorded["diff"] else ""
    if (now["diff"] or "") != before:
        return f"the uncommitted changes to the code are not those of the submission ({recorded['diff'] or 'there were none'})"
    return None


def machine(*, gpus: bool) -> dict[str, Any]:
    """Host, system, processors, memory in GiB, and the GPUs when asked for."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": models[0] if models else platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory, 1),
    }
    if gpus and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        found["gpus"] = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    return found


def reproduce_script(commit: str | None, secrets: Sequence[str] = ()) -> str:
    """`reproduce.sh`: the saved configuration, again, in a new directory.

    The variables RLX_NEW_DIR, RLX_SOURCE and PYTHON name that directory, another checkout, another interpreter.
    `secrets`: keys whose values are not in the saved configuration; each must be given again.
    """
    given = "".join(f"\n# Secret, so not saved with it: add {key}=VALUE, or {key}=null where it is not needed." for key in secrets)
    return f"""#!/bin/sh
# Runs the configuration of this directory again, in a new directory:  ./reproduce.sh [key=value ...]{given}
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=${{RLX_SOURCE:-{shlex.quote(str(SOURCE))}}}
python=${{PYTHON:-{shlex.quote(sys.executable)}}}
recorded={commit or "none"}
now=$(git -C "$source" rev-parse HEAD 2>/dev/null || echo none)
if [ "$now" != "$recorded" ]; then
    echo "reproduce: the run was made by commit $recorded, but $source is at $now" >&2
fi
if [ -f "$here/{DIFF}" ]; then
    echo "reproduce: the run was made with uncommitted changes, kept in $here/{DIFF}" >&2
fi
new=${{RLX_NEW_DIR:-$here-again-$(date +%Y%m%d-%H%M%S)}}
# for Hydra, in whose quotes a quote takes a backslash
quoted=$(printf %s "$new" | sed "s/'/\\\\\\\\'/g")
cd {shlex.quote(os.getcwd())} 2>/dev/null || echo "reproduce: the folder the run was started in is gone; starting here" >&2
PYTHONPATH="$source${{PYTHONPATH:+:$PYTHONPATH}}" exec "$python" -m rlx.cli train \\
    --config-dir "$here" --config-name config run.name=null "run.dir='$quoted'" clean=false dry_run=false "$@"
"""


def git(*arguments: str) -> str | None:
    """What git says in the source folder; None when it is not a checkout or git is not there."""
    if shutil.which("git") is None:
        return None
    result = subprocess.run(["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, errors="replace", check=False)
    return result.stdout if result.returncode == 0 else None
