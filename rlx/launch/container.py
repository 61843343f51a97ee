"""The container in which a job's processes run: options of `srun` (Pyxis), or a command around the process's own (Apptainer).

    the job's script, on the host        answers what is asked from inside (`rlx.runs.host_commands`)
      └ srun … the supervisor            in the container, asks for the steps
      └ srun … every role                in the container

The host needs SLURM, bash and the runtime, but no Python.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.k8s_volume import in_image_folder
from rlx.config.schema import CommandConfig
from rlx.config.schema_launch import ContainerConfig
from rlx.paths import cache_root
from rlx.runs.host_commands import FOLDER
from rlx.runs.provenance import SOURCE

MOUNTS = "RLX_MOUNTS"  # environment variable of a job: what is mounted, separated by commas
OUTSIDE = f"${FOLDER}:${FOLDER}"  # the mount that only the supervisor's container has; the script fills it in
KEPT = (
    *("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "TRITON_CACHE_DIR"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE"),
)
"""Variables that an image may set too: they are set again inside."""
STEP = "supervisor"  # name of the supervisor's step


@dataclass(frozen=True)
class RoleContainer:
    """One container of a job, as a command line."""

    cfg: ContainerConfig
    mounts: tuple[str, ...]  # SOURCE:TARGET or SOURCE:TARGET:ro
    workdir: str
    gpus: bool

    @classmethod
    def of(cls, cfg: CommandConfig, mounts: Sequence[str], workdir: str | None = None) -> RoleContainer | None:
        """The container of a command's configuration; None if it has none. `workdir`: where the command was given."""
        its = cfg.slurm.container
        if its is None:
            return None
        return cls(its, tuple(mounts), its.workdir or workdir or os.getcwd(), cfg.hardware.device == "cuda")

    @property
    def options(self) -> list[str]:
        """The options of `srun`."""
        if self.cfg.runtime != "pyxis":
            return []
        return [
            f"--container-image={self.cfg.image}",
            f"--container-mounts={','.join(self.mounts)}",
            f"--container-workdir={self.workdir}",
            "--container-mount-home" if self.cfg.home else "--no-container-mount-home",
            "--no-container-entrypoint",  # an image's own greeting would be in every log
            *self.cfg.options,
        ]

    def around(self, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """A command of the container as a word list for the host. `variables`: those which are set again inside."""
        inside = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
        if self.cfg.runtime == "pyxis":
            return inside
        return [
            self.cfg.runtime,
            "exec",
            *(["--nv"] if self.gpus else []),
            *([] if self.cfg.home else ["--no-home"]),
            *(word for mount in self.mounts for word in ("--bind", mount)),
            "--pwd",
            self.workdir,
            *self.cfg.options,
            self.cfg.image,
            *inside,
        ]


def mounts_of(cfg: CommandConfig, base: Path, code: Path | None) -> list[str]:
    """What every process of a run or sweep has mounted. `base`: its directory; `code`: the snapshot that it runs, which is in it.

    Raises ConfigError for a path that no runtime can mount.
    """
    assert cfg.slurm.container is not None
    given = [mount if ":" in mount else f"{mount}:{mount}" for mount in cfg.slurm.container.mounts]
    folders = [
        base,
        Path.cwd(),
        *([] if code is not None or SOURCE.name in ("site-packages", "dist-packages") else [SOURCE]),
        *caches_of(cfg),
        *named_folders({key: value for key, value in asdict(cfg).items() if key not in ("slurm", "launcher", "run")}),
    ]
    own: list[Path] = []
    whole = {Path("/"), *(folder for folder in folders if len(folder.parts) == 2 and in_image_folder(folder))}
    for folder in sorted({*folders} - whole, key=lambda each: (len(each.parts), str(each))):
        if bad := [char for char in ":,\n" if char in str(folder)]:
            raise ConfigError(
                f"{folder} cannot be mounted in a container: its name has {bad[0]!r}.\n  fix: rename it, or use another run.dir="
            )
        if not any(folder.is_relative_to(above) for above in own):
            own.append(folder)
    return [*(f"{folder}:{folder}" for folder in own), *given]


def named_folders(values: Any) -> Iterator[Path]:
    """The folders of all absolute paths in a configuration that exist: models, data, other runs.

    Not of a Python, nor in a system folder: these are the image's, and a mount would hide them.
    """
    if isinstance(values, dict):
        for name, value in values.items():
            yield from named_folders(value) if name != "python" else ()
    elif isinstance(values, list | tuple):
        for value in values:
            yield from named_folders(value)
    elif isinstance(values, str) and values.startswith(("/", "~")):
        try:
            path = Path(os.path.expanduser(values))
            folder = path if path.is_dir() else path.parent if path.exists() else None
        except OSError:  # a text that is too long for a path, say
            return
        if folder is not None and not in_image_folder(folder):
            yield folder


def caches_of(cfg: CommandConfig) -> list[Path]:
    """The caches that a command uses: the user's, rlx's, the hub's.

    The job's script makes them if they do not exist, because a runtime refuses to mount what is not there.
    """
    own = [os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")]
    of_the_hub = [cfg.slurm.hf_home] if cfg.slurm.hf_home else own
    found = [user_cache(), cache_root(), *(Path(os.path.expanduser(each)) for each in of_the_hub if each)]
    return [each.absolute() for each in found]


def user_cache() -> Path:
    """The folder of the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def home_variables(cfg: CommandConfig) -> dict[str, str]:
    """Variables that the processes in a container have because their home directory may be the image's own."""
    if cfg.slurm.container is None:
        return {}
    return {"PYTHONNOUSERSITE": "1", "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(user_cache() / "triton")}


BESIDE = r"""
# rlx runs in a container, without SLURM's commands. It asks this script for them: rlx/runs/host_commands.py.
rlx_answer() {
  local folder word words
  trap : TERM # SLURM signals the script's processes too; these must say how a command ended
  while :; do
    IFS= read -r folder || continue
    (
      trap : TERM
      words=()
      while IFS= read -r -d '' word; do words+=("$word"); done <"$folder/words"
      while IFS= read -r -d '' word; do export "$word"; done <"$folder/variables"
      if [ -e "$folder/err" ]; then
        "${words[@]}" </dev/null >"$folder/out" 2>"$folder/err"
      else
        "${words[@]}" </dev/null >"$folder/out" 2>&1
      fi
      echo $? >"$folder/code"
    ) &
  done
}
rlx_tell() {
  echo "$1" >>"$RLX_OUTSIDE/told"
  if [ -e "$RLX_OUTSIDE/pid" ]; then kill -s "$1" "$(cat "$RLX_OUTSIDE/pid")"; fi
}
rlx_supervise() {
  local step answers code
  export RLX_OUTSIDE
  RLX_OUTSIDE=$(mktemp -d "${TMPDIR:-/tmp}/rlx.XXXXXXXX")
  mkfifo "$RLX_OUTSIDE/asked"
  set +e
  set -m # a process group of its own, so that one signal ends the answers with all that they have started
  rlx_answer <>"$RLX_OUTSIDE/asked" &
  answers=$!
  set +m
  disown "$answers" # else bash reports that it was killed
  trap 'rlx_tell USR2' USR2
  trap 'rlx_tell INT' TERM # because SLURM sends SIGTERM to the supervisor's step too, as a notice
  @step@ "$@" &
  step=$!
  while :; do
    wait "$step"
    code=$?
    kill -0 "$step" 2>/dev/null || break # else a signal ended the wait
  done
  kill -KILL -- "-$answers"
  rm -rf "$RLX_OUTSIDE"
  exit "$code"
}
"""
"""The part of the script that starts the supervisor in its container and answers it. `@step@`: the words before its command."""


def on_all_hosts(command: Sequence[str], nodes: int, not_for_steps: Sequence[str]) -> str:
    """A line of the script that runs a command once on each host of the job. A cache may be on a disk that each host has for itself."""
    return shlex.join(command if nodes == 1 else ["env", *_step("caches", nodes, not_for_steps), *command])


def _step(name: str, nodes: int, not_for_steps: Sequence[str]) -> list[str]:
    """The words of `env` and `srun` for a step with one task on each of `nodes` hosts."""
    dropped = [word for variable in not_for_steps for word in ("-u", variable)]  # srun would read them as options of the step
    size = [f"--nodes={nodes}", f"--ntasks={nodes}", *(["--ntasks-per-node=1"] if nodes > 1 else [])]
    return [*dropped, "srun", "--overlap", *size, f"--job-name={name}", "--cpu-bind=none", "--mem=0", "--input=none"]


def beside(container: RoleContainer, not_for_steps: Sequence[str]) -> str:
    """`BESIDE` for a container, with its mounts."""
    its = RoleContainer(container.cfg, (*container.mounts, OUTSIDE), container.workdir, container.gpus)
    words = [*_step(STEP, 1, not_for_steps), "--nodelist=${SLURMD_NODENAME:-$HOSTNAME}", "--unbuffered", "--export=ALL"]
    words += [*its.options, *its.around([], dict.fromkeys(KEPT, ""))]
    shown = ["env", *(_for_shell(word) for word in words)]
    lines = [f"export {MOUNTS}={shlex.quote(','.join(container.mounts))}", BESIDE.strip().replace("@step@", " ".join(shown))]
    return "\n".join(lines)


def _for_shell(word: str) -> str:
    """A word as bash reads it. The variables in `OUTSIDE`, of the node's name and of `KEPT` stay variables."""
    name = word.partition("=")[0]
    if name in KEPT:
        return f'${{{name}+"{name}=${name}"}}'
    if word.startswith("--nodelist="):
        return f'"{word}"'
    start, found, end = word.partition(OUTSIDE)
    return f'{shlex.quote(start) if start else ""}"{OUTSIDE}"{shlex.quote(end) if end else ""}' if found else shlex.quote(word)
