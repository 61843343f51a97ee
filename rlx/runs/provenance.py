"""Records where a run came from (commit, uncommitted changes, packages, machine, command) and writes the script that repeats it.

Nothing here may stop a run: unknown facts are recorded as null.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rlx
from rlx.config.eval_envs import environments
from rlx.config.keys import HIDDEN
from rlx.config.pythons import at as python_at
from rlx.config.pythons import python_of
from rlx.config.roots import root_of
from rlx.config.schema import CommandConfig
from rlx.config.secret import redact, redact_lines, secrets_of
from rlx.invocation import SOURCE
from rlx.paths import RunPaths, write_text
from rlx.process import TODAY, today
from rlx.runs import own_code

CODE_CHANGED = "code_changed.txt"  # a line for each module of the user's own that was another one in a later attempt
PARTS = ("rlx", "environments")  # the folders there whose code runs
DIFF = "uncommitted.diff"
CODE = ("*.py", "*.yaml", "*.yml", "*.toml", "*.cfg", "*.ini", "*.sh", "*.jinja", "*.tpl", "Makefile", "Dockerfile")
"""The files whose uncommitted changes are kept. Notebooks, data and notes are nobody's record."""
LIKE_A_SECRET = re.compile(
    r"""(?imx) (\b\w{0,40}(?:api_?key|access_?key|private_?key|secret|passw(?:or)?d|passphrase|credentials?|token)
        ["']?\]?[ \t]{0,9}[:=][ \t]{0,9}[bru]?["']{1,3}) (?![$<\[{]) [^"'\s{}]{8,} (?=["'])
    | (\b\w{0,40}(?:api_?key|access_?key|private_?key|passw(?:or)?d)[ \t]{0,9}[:=][ \t]{0,9})
        (?=\S*\d) [\w./+!@#%&*~-]{8,} (?=[ \t]{0,9}(?:[\#,;}&]|$))  # in YAML or a shell
    | (^[ \t+-]{0,80}(?:export[ \t]{1,9})?\w{0,40}(?:secret|token)(?:[ \t]{0,9}:[ \t]{0,9}|=))
        (?!\d{1,40}$) (?=\S*\d) [\w./+-]{8,} (?=[ \t]{0,9}(?:[\#,;}&]|$))  # alike
    | (\bBearer[ \t]{1,9}) (?![$<{]) [^\s"'{}]{8,} | (://[^\s/:@"'{}]{0,80}:) (?![$<{]) [^\s"'/@{}]+ (?=@)  # in a header, in an address
    | () \b(?:hf_|sk-|sk_live_|ghp_|github_pat_|glpat-|xox[bp]-|AKIA|AIza|eyJ[\w-]{8,}\.)[\w.-]{16,}  # by its prefix
    | () -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----[^-]{1,9999}"""
)
LEAST = 8  # characters of a secret that is looked for in text
SECRET = ("KEY", "TOKEN", "SECRET", "PASSW")  # environment variables with one of these in their name are not recorded


def write_provenance(paths: RunPaths, cfg: CommandConfig, options: Mapping[str, Path], *, again: bool = False) -> None:
    """Write `provenance.json`, the uncommitted changes beside it, and `reproduce.sh`.

    `options`: the user's own option files. `again`: this is a later attempt; its facts are appended under `later_attempts`.
    """
    source = source_state()
    api_key_var = getattr(getattr(cfg, "client", None), "api_key_var", None)
    # A variable may set a whole section, RLX_INFERENCE={api_key: …}, also one that this command does not have, or that was overridden.
    secrets = [str(secret) for secret in secrets_of(cfg).values()]
    diff = DIFF
    earlier = json.loads(paths.provenance.read_text()) if again else {}
    if again:
        diff = f"uncommitted_{len(earlier.get('later_attempts', [])) + 1}.diff"
    if source["diff"]:
        write_text(paths.root / diff, _without_secrets(source["diff"], secrets), 0o600)

    def copy_option(file: Path, to: Path) -> None:
        write_text(to, _without_secrets(file.read_text(encoding="utf-8"), secrets), 0o600)

    own = own_code.all_of(paths, cfg, options, None if again and paths.metrics.is_file() else copy_option)  # no step has run other code
    if again and not options:  # resumed from its own `config.yaml`, which has their values
        own["options"] = own_code.newest(earlier).get("options", {})
    record: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": redact_lines(sys.argv, cfg),
        "today": today().date().isoformat(),  # what templates see, in every attempt
        "cwd": os.getcwd(),
        "user": os.environ.get("USER"),
        "rlx": rlx.__version__,
        "source": {**source, "diff": diff if source["diff"] else None},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        **own,
        "packages": packages(),
        "pythons": pythons(paths, cfg),
        "machine": machine(gpus=cfg.hardware.device != "cpu"),
        "seeds": {"run": cfg.seed} | ({"warm_start": cfg.model.warm_start.seed} if cfg.model.warm_start else {}),
        "environment": {
            name: HIDDEN if any(secret in value for secret in secrets) else redact(f"{name}={value}").removeprefix(f"{name}=")
            for name, value in sorted(os.environ.items())
            if name != api_key_var
            and (name.startswith("RLX_") or name == "CUDA_VISIBLE_DEVICES")
            and not any(word in name for word in SECRET)
        },
    }
    if again:
        record = {**earlier, "later_attempts": [*earlier.get("later_attempts", []), record]}
    write_text(paths.provenance, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if again:
        return
    write_text(paths.reproduce, reproduce_script(root_of(cfg).command, source["commit"], list(secrets_of(cfg)), record["today"]))
    paths.reproduce.chmod(0o755)


def note_changes(paths: RunPaths, cfg: CommandConfig) -> list[str]:
    """Record the own code again if it has changed while the run waited, in a queue or between two attempts. Returns what has changed."""
    changed: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        if changed := own_code.changed(paths, cfg, {}):
            write_provenance(paths, cfg, {}, again=True)
            keep_changes(paths, changed)
    return changed


def keep_changes(paths: RunPaths, changed: Sequence[str]) -> None:
    """Keep for `reproduce.sh` that steps have run other code than that of the copies."""
    if changed and paths.metrics.is_file():
        with (paths.root / CODE_CHANGED).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in changed)


def begun_on(paths: RunPaths) -> dict[str, str]:
    """The variable by which a run's processes know the day on which it began (`rlx.process.today`); earlier versions have none."""
    record = json.loads(paths.provenance.read_text()) if paths.provenance.is_file() else {}
    return {TODAY: record["today"]} if record.get("today") else {}


def pythons(paths: RunPaths, cfg: CommandConfig) -> dict[str, Any]:
    """The environments with a Python of their own, by name: its path, and the file in the run directory with what is installed in it.

    `rlx env install` has locked these packages; of another Python only the path is known.
    """
    found: dict[str, Any] = {}
    for name, env in environments(cfg).items():
        if (program := python_of(env.id, env.python)) is None:
            continue
        own, file = python_at(program), paths.root / "environments" / f"{Path(program).parent.parent.name}.txt"
        if own is not None:
            file.parent.mkdir(exist_ok=True)
            write_text(file, own.lock)
        found[name] = {"python": program, "lock": None if own is None else str(file.relative_to(paths.root))}
    return found


def _without_secrets(text: str, secrets: Sequence[str]) -> str:
    """The text with `<secret>` for the run's secrets, for values of variables that hold one, and for what is assigned to such a name."""
    known = [value for name, value in os.environ.items() if any(word in name.upper() for word in SECRET) and len(value) >= LEAST]
    for value in sorted({*known, *secrets}, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return LIKE_A_SECRET.sub(lambda found: f"{''.join(filter(None, found.groups()))}{HIDDEN}", text)


@functools.cache
def packages() -> dict[str, str]:
    """Installed packages and their versions. Cached, because a sweep asks once per run."""
    return dict(sorted((d.name, d.version) for d in importlib.metadata.distributions()))


@functools.cache
def source_state() -> dict[str, Any]:
    """A digest of the code that runs, its commit, the uncommitted changes to tracked files, and the names of untracked files.

    `None` for all but the digest outside a checkout; the digest is `None` if a file cannot be read. Cached, because a
    sweep asks once per run.
    """
    # An installed copy may lie inside an unrelated checkout (`.venv/`), so the checkout must track this code.
    if git("ls-files", "--error-unmatch", "rlx/__init__.py") is None:
        return {"folder": str(SOURCE), "code": code_digest(), "commit": None, "diff": None, "untracked": None}
    untracked = git("ls-files", "--others", "--exclude-standard") or ""
    return {
        "folder": str(SOURCE),
        "code": code_digest(),
        "commit": (git("rev-parse", "HEAD") or "").strip() or None,
        "diff": git("diff", "HEAD", "--", *CODE),
        "untracked": untracked.splitlines(),
    }


def code_files(*, data: bool = True) -> list[Path]:
    """The files of the code that runs, relative to `SOURCE`: of an installed copy the package, else also the environments.

    `data=False`: of the files that git does not track, only `*.py`; data sets and an editor's files lie there too.
    """
    others: Iterable[Path]
    if git("ls-files", "--error-unmatch", "rlx/__init__.py") is not None:
        tracked, others = _listed("--cached"), _listed("--others", "--exclude-standard")
    else:
        parts = PARTS[:1] if SOURCE.name in ("site-packages", "dist-packages") else PARTS
        tracked, others = [], (path.relative_to(SOURCE) for part in parts for path in (SOURCE / part).rglob("*"))
    found = {*tracked, *(path for path in others if (data or path.suffix == ".py") and "__pycache__" not in path.parts)}
    return sorted(path for path in found if (SOURCE / path).is_file())


def _listed(*which: str) -> list[Path]:
    return [Path(name) for name in (git("ls-files", "-z", *which, "--", *PARTS) or "").split("\0") if name]


def code_digest() -> str | None:
    """A hash of the code's names and contents, without untracked files other than `*.py`; `None` if a file cannot be read."""
    try:
        return own_code.digest_of(SOURCE, [SOURCE / file for file in code_files(data=False)])
    except OSError:  # also of a file that was deleted meanwhile
        return None


@functools.cache
def machine(*, gpus: bool) -> dict[str, Any]:
    """Host, operating system, processors, memory in GiB and, on request, the GPUs. Cached, because a sweep asks once per run."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
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


def reproduce_script(command: str, commit: str | None, secrets: Sequence[str] = (), day: str = "") -> str:
    """The text of `reproduce.sh`, which runs the saved configuration again in a new directory.

    The variables RLX_NEW_DIR, RLX_SOURCE and PYTHON select that directory, another checkout and another interpreter.
    `secrets`: keys whose values are not in the saved configuration; the user must give them again. `day`: the one that templates saw.
    """
    given = "".join(f"\n# A secret value, so it is not saved: add {key}=VALUE, or {key}=null if it is not needed." for key in secrets)
    return f"""#!/bin/sh
# Runs the configuration of this directory again, in a new directory:  ./reproduce.sh [key=value ...]{given}
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
source=${{RLX_SOURCE:-{shlex.quote(str(SOURCE))}}}
python=${{PYTHON:-{shlex.quote(sys.executable)}}}
new=${{RLX_NEW_DIR:-$here-again-$(date +%Y%m%d-%H%M%S)}}
# Paths that are given are meant from here, not from the run's working directory.
case $source in /*) ;; *) source=$PWD/$source ;; esac
case $new in /*) ;; *) new=$PWD/$new ;; esac
case $python in /*) ;; */*) python=$PWD/$python ;; esac
recorded={commit or "none"}
now=$(git -C "$source" rev-parse HEAD 2>/dev/null || echo none)
if [ "$now" != "$recorded" ]; then
    echo "reproduce: the run used commit $recorded, but $source is at $now" >&2
fi
if [ -d "$here/{own_code.FOLDER}" ]; then
    echo "reproduce: runs the copies of the run's own code in $here/{own_code.FOLDER}" >&2
fi
if [ -f "$here/{CODE_CHANGED}" ]; then
    echo "reproduce: own code changed while the run went on ($here/{CODE_CHANGED}); the copies are those of its beginning" >&2
fi
if [ -f "$here/{DIFF}" ]; then
    echo "reproduce: the run used uncommitted changes, saved in $here/{DIFF}" >&2
fi
# Hydra needs a backslash before a quote inside quotes.
quoted=$(printf %s "$new" | sed "s/'/\\\\\\\\'/g")
cd {shlex.quote(os.getcwd())} 2>/dev/null || echo "reproduce: the run's working directory is gone; starting here" >&2
# With -m, Python searches the working directory first, and that may be another checkout. rlx itself adds that folder, last.
export PYTHONPATH="$source:$here/{own_code.FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1
export {TODAY}="${{{TODAY}-{day}}}"
exec "$python" -m rlx.cli {command} \\
    --config-dir "$here" --config-name config run.name=null "run.dir='$quoted'" clean=false dry_run=false "$@"
"""


def git(*arguments: str) -> str | None:
    """git's output for a command in the source folder; `None` if the command fails, for example outside a checkout or without git."""
    if shutil.which("git") is None:
        return None
    result = subprocess.run(["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, errors="replace", check=False)
    return result.stdout if result.returncode == 0 else None


def take_snapshot(folder: Path) -> Path:
    """Copy the code to `folder/code_<hash of its content>` unless that exists; return the copy's path.

    Jobs run it, so the checkout may change while they wait in the queue. It has uncommitted and untracked files, too; of an installed rlx
    only the package.
    """
    files = code_files()
    copy = folder / f"code_{own_code.digest_of(SOURCE, [SOURCE / file for file in files])}"
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


def snapshot_environment(copy: Path) -> dict[str, str]:
    """Environment variables that make Python import the copy instead of an installed rlx or the working directory.

    PYTHONPATH starts with the copy and ends with the working directory, where Python still finds the user's own modules.
    """
    given, here = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path], os.getcwd()
    path = [*folders_of(copy), *given, *([] if here in given else [here])]  # the command line has put it there already
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
