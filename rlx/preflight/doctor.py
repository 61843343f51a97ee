"""What may stop a run on this machine, found before one starts: limits, disks, memory, packages, GPUs, compiler, network.

Each check is a function of an `Examined` that returns a `Finding`: what is there, whether it is enough for the configuration, and what
to do if not. `rlx.preflight.doctor_services` has the checks of what runs elsewhere (SLURM, hub, W&B). Nothing here changes the machine;
the files that a disk is measured with are deleted.
"""

from __future__ import annotations

import fcntl
import locale
import math
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlx.config import limits
from rlx.config.evaluated import environments
from rlx.config.kv_cache import kv_cache_bytes
from rlx.config.memory import engine_memory, size, trained_parameters, trainer_memory, versions_in_memory
from rlx.config.mounts import file_system
from rlx.config.rows import BYTES
from rlx.config.schema import CommandConfig, Config, PlayRoot, SftRoot, TrainingRoot
from rlx.kernels.toolchain import missing_part
from rlx.paths import cache_root

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
WRITTEN = 64 * 2**20  # bytes that a disk is measured with
SLOW = 100 * 2**20  # bytes a second: a disk that writes less delays every version of a model
FEW_FILES = 512  # open files that a role needs beside its rollouts: libraries, sockets, log and data files
SHARED_MEMORY = 2**30  # bytes in /dev/shm that NCCL, torch and vLLM use between the processes of a host
PROCESS = 2**30  # bytes of host memory that a role takes for its libraries
SKEW = 2.0  # seconds by which the clock of a file server may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str  # of the check: `open files`
    state: str  # ok | warning (a run starts, but may suffer) | failed (a run of this configuration fails) | skipped
    found: str  # what is there
    remedy: str = ""  # one line; empty if nothing is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What is examined: a configuration, on this machine."""

    cfg: CommandConfig
    run_dir: Path  # where the run would be; need not exist
    here: bool = True  # its processes run on this machine, so GPUs and memory count; False: on a login node, say
    offline: bool = False  # do not try to reach the network


Check = Callable[[Examined], Finding]


def examine(examined: Examined, checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """The findings, one after the other. A check that breaks is itself a finding: the rest is still examined."""
    for name, check in checks:
        try:
            yield check(examined)
        except Exception as error:
            yield Finding(name=name, state=WARNING, found=f"could not be checked: {type(error).__name__}: {error}")


def python(examined: Examined) -> Finding:
    found = f"{platform.python_version()}, {sys.executable}, on {socket.gethostname()}, Linux {platform.release()}"
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        return Finding(name="python", state=FAILED, found=found, remedy="use Python 3.11, 3.12 or 3.13: make install PYTHON=python3.12")
    return Finding(name="python", state=OK, found=found)


# limits


def open_files(examined: Examined) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FEW_FILES + (examined.cfg.concurrency if isinstance(examined.cfg, PlayRoot) else 0)
    most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    found = f"{soft:,} (at most {most}); {need:,} are enough for the rollouts in flight"
    if soft == resource.RLIM_INFINITY or soft >= need:
        return Finding(name="open files", state=OK, found=found)
    if hard == resource.RLIM_INFINITY or hard >= need:
        return Finding(name="open files", state=WARNING, found=found, remedy=f"ulimit -n {max(need, 65536 if hard > 65536 else hard)}")
    remedy = f"raise the hard limit to {need} (`nofile` in /etc/security/limits.conf), or lower orchestrator.max_concurrent"
    return Finding(name="open files", state=FAILED, found=found, remedy=remedy)


def processes(examined: Examined) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft != resource.RLIM_INFINITY and soft < 4096:
        return Finding(name="processes", state=WARNING, found=f"{found}, threads included", remedy="ulimit -u 65536")
    return Finding(name="processes", state=OK, found=found)


# disks


def run_disk(examined: Examined) -> Finding:
    """The disk of the run directory: space for versions and checkpoints, locks, and how fast it writes."""
    folder = existing(examined.run_dir)
    need, version = needed_disk(examined.cfg)
    return _disk("run directory", folder, need, version, "choose another place: run.dir=PATH")


def cache_disk(examined: Examined) -> Finding:
    folder = existing(cache_root())
    if folder.stat().st_dev == existing(examined.run_dir).stat().st_dev and os.access(folder, os.W_OK):
        return Finding(name="cache", state=OK, found=f"{folder}: the disk of the run directory")
    return _disk("cache", folder, 2**30, 0, "choose another place: export RLX_CACHE=PATH")


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def needed_disk(cfg: CommandConfig) -> tuple[int, int]:
    """Bytes that a run's versions and checkpoints take at most, and those of one version; 0: no version is written here step by step."""
    if not isinstance(cfg, TrainingRoot):
        return 2**30, 0
    memory, checkpoints = trainer_memory(cfg), most_checkpoints(cfg)
    weights = trained_parameters(cfg) * BYTES[cfg.trainer.optimization_dtype]  # of adapters alone, where the model is frozen
    states = weights + memory.optimizer * cfg.trainer_ranks / cfg.trainer.dp_replicate
    each = cfg.publishes(1) and cfg.memory_folder is None  # else only the versions of checkpoints are files here, and the last
    # A checkpoint's version stays with it. One more than is kept is there while it is written.
    evaluated = isinstance(cfg, SftRoot) and cfg.plays  # then a version may be there until its evaluation has read it
    versions = min(cfg.max_steps, checkpoints + (cfg.versions_kept + 1 if each or evaluated else 1))
    return int(memory.published * versions + states * checkpoints + 2**28), int(memory.published) if each else 0


def most_checkpoints(cfg: TrainingRoot) -> int:
    """The most checkpoints that are on the disk at a time, with the one that is being written."""
    ckpt, last = cfg.ckpt, cfg.max_steps
    if ckpt.interval is None or cfg.bench:
        return 1  # of a preemption
    all_of_them = -(-last // ckpt.interval)  # one is written at the end in any case
    if ckpt.keep_last is None:
        return all_of_them
    newest = min(ckpt.keep_last + 1, all_of_them)
    older = (all_of_them - newest) * ckpt.interval  # the step of the last one before these
    for_ever = 0 if ckpt.keep_interval is None else older // math.lcm(ckpt.interval, ckpt.keep_interval)
    return min(all_of_them, newest + for_ever + (ckpt.keep_best is not None))


def _disk(name: str, folder: Path, need: int, version: int, elsewhere: str) -> Finding:
    free, kind = shutil.disk_usage(folder).free, file_system(folder)
    where = f"{folder} ({kind})"
    try:
        speed, small = measure(folder)
    except PermissionError:
        return Finding(name=name, state=FAILED, found=f"{where} may not be written", remedy=elsewhere)
    except OSError as error:
        return Finding(name=name, state=FAILED, found=f"{where}: {error.strerror}; {size(free)} free", remedy=elsewhere)
    found = f"{where}: {size(free)} free, writes {size(speed)}/s, a small file in {1000 * small:.1f} ms"
    if free < need:
        return Finding(name=name, state=FAILED, found=f"{found}; {size(need)} are needed", remedy=f"free some space, or {elsewhere}")
    if (wrong := _no_locks(folder)) is not None:
        remedy = f"{elsewhere}, on a file system with flock: two commands could use one run directory at a time"
        return Finding(name=name, state=WARNING, found=f"{found}; {wrong}", remedy=remedy)
    if version and version / speed > 10 and speed < SLOW:
        slow = f"{found}; a version of the model ({size(version)}) takes {version / speed:.0f} s"
        return Finding(name=name, state=WARNING, found=slow, remedy=f"{elsewhere}, on a faster disk, or train adapters (lora.rank=16)")
    return Finding(name=name, state=OK, found=found)


def measure(folder: Path) -> tuple[float, float]:
    """Bytes a second that reach the disk, and seconds to write and rename a small file. Raises OSError if the folder cannot be written."""
    block = os.urandom(2**20)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".rlx-doctor-") as inside:
        began = time.perf_counter()
        with open(f"{inside}/large", "wb", buffering=0) as file:
            for _ in range(WRITTEN // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        speed = WRITTEN / (time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(10):
            with open(f"{inside}/new", "w") as small:
                small.write("{}")
            os.replace(f"{inside}/new", f"{inside}/small")
        return speed, (time.perf_counter() - began) / 10


def _no_locks(folder: Path) -> str | None:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".rlx-doctor-") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"flock fails: {error.strerror}"
    return None


def shared_memory(examined: Examined) -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding(name="/dev/shm", state=WARNING, found=f"{error.strerror}", remedy="mount a tmpfs there: vLLM and NCCL need it")
    found, cfg = f"{size(usage.total)}, {size(usage.free)} free", examined.cfg
    folder = cfg.memory_folder if isinstance(cfg, Config) else None
    versions = versions_in_memory(cfg) if isinstance(cfg, Config) and folder is not None and folder.is_relative_to("/dev/shm") else 0.0
    if usage.free >= SHARED_MEMORY + versions:
        return Finding(name="/dev/shm", state=OK, found=found)
    if versions and usage.free >= SHARED_MEMORY:
        found += f"; versions of the weights take {size(versions)} there, and other libraries {size(SHARED_MEMORY)}"
        remedy = f"mount -o remount,size={math.ceil((SHARED_MEMORY + versions) / 2**30)}G /dev/shm, or weight_broadcast.folder=null"
        return Finding(name="/dev/shm", state=FAILED if examined.here else WARNING, found=found, remedy=remedy)
    several = examined.here and (examined.cfg.num_gpus > 1 or examined.cfg.hardware.tensor_parallel > 1)
    remedy = "docker run --shm-size=8g, or an emptyDir of medium Memory there on Kubernetes; outside: mount -o remount,size=8G /dev/shm"
    return Finding(name="/dev/shm", state=FAILED if several else WARNING, found=found, remedy=remedy)


# memory and processors


def memory(examined: Examined) -> Finding:
    have, of = host_memory()
    need = needed_memory(examined.cfg)
    found = f"{size(have)} {of}; the roles of hardware={examined.cfg.hardware.name} need about {size(need)} on a host"
    if not examined.here:
        return _elsewhere("memory", f"{size(have)} {of}")
    if need > have:
        remedy = "a smaller model, seq_len, batch or inference.kv_cache_gb; or more memory (slurm.memory_gb, the container's limit)"
        return Finding(name="memory", state=FAILED, found=found, remedy=remedy)
    return Finding(name="memory", state=OK, found=found)


def host_memory() -> tuple[int, str]:
    """Bytes that the processes here may use, and whose limit that is."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    limit = limits.memory()
    return (limit, "for this container or job") if limit is not None and limit < total else (total, "on this machine")


def needed_memory(cfg: CommandConfig) -> float:
    """Bytes of host memory that the roles on one host take, about."""
    hosts, cuda = cfg.hardware.nodes, cfg.hardware.device == "cuda"
    need = 2.0 * PROCESS  # orchestrator and supervisor
    if isinstance(cfg, PlayRoot):
        engine = PROCESS + (0.0 if cuda else engine_memory(cfg).weights + kv_cache_bytes(cfg))
        need += engine * cfg.num_servers / hosts
    if isinstance(cfg, TrainingRoot) and cfg.own_ranks:
        trainer = trainer_memory(cfg)
        need += (PROCESS + trainer.host) * cfg.own_ranks / hosts + trainer.published / (1 if cfg.lora.on else hosts)
        need += versions_in_memory(cfg)
    return need


def cores(examined: Examined) -> Finding:
    """Each role may have as many threads as there are cores, because those of a role that waits do not spin. More are too many.

    On the other hand each server and each trainer process needs a core: the ranks of one trainer compute at the same time.
    """
    have, cfg = limits.cores(), examined.cfg
    threads = cfg.hardware.cpu_threads
    busy = math.ceil((cfg.num_servers + cfg.own_ranks) / cfg.hardware.nodes)
    if not examined.here:
        return _elsewhere("processors", f"{have}")
    found = f"{have}; servers and trainer processes on a host: {busy}, hardware.cpu_threads={threads}"
    remedies = [f"hardware.cpu_threads={have}: more threads than processors wait for each other"] if threads > have else []
    if busy > have:
        remedies.append("more processors (slurm.cpus_per_node, the container's limit), or fewer processes: they wait for each other")
    return Finding(name="processors", state=WARNING if remedies else OK, found=found, remedy="; ".join(remedies))


def _elsewhere(name: str, found: str) -> Finding:
    return Finding(name=name, state=SKIPPED, found=f"{found} here; the run is elsewhere: rlx doctor --node")


# the rest of the machine


def compiler(examined: Examined) -> Finding:
    """What Triton needs on CUDA, and torch.compile everywhere."""
    missing = missing_part()
    if missing is None:
        which = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        return Finding(name="C compiler", state=OK, found=f"{which}, with Python's headers")
    what, _, remedy = missing.partition("; ")
    if examined.cfg.hardware.device == "cpu" or not examined.here:
        return Finding(name="C compiler", state=SKIPPED, found=f"{what.replace('it needs', 'on a GPU, Triton needs')}: not used on a CPU")
    return Finding(name="C compiler", state=FAILED, found=what, remedy=remedy)


def loopback(examined: Examined) -> Finding:
    """Whether processes reach each other: over loopback, and if the layout has several hosts, by this host's name."""
    name, cfg = socket.gethostname(), examined.cfg
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5) as client:
            server.settimeout(5)
            other, _ = server.accept()
            with other:
                other.sendall(b"rlx")
                assert client.recv(3) == b"rlx"
    except OSError as error:
        remedy = "let processes of this host connect to 127.0.0.1: a firewall, or `ip link set lo up` in a container"
        return Finding(name="ports", state=FAILED, found=f"loopback fails: {error}", remedy=remedy)
    taken = [port for port in wanted_ports(cfg) if not _is_free(port)] if examined.here else []
    if taken:
        found = f"inference.port: {', '.join(map(str, taken))} in use"
        return Finding(name="ports", state=FAILED, found=found, remedy="inference.port=0, which takes free ports")
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if cfg.hardware.nodes > 1 and examined.here and (not address or address.startswith("127.")):
        found = f"other hosts cannot reach {name}: it is {address or 'no address'} here"
        remedy = f"give {name} its address in DNS or /etc/hosts; and name the interface: export GLOO_SOCKET_IFNAME=… NCCL_SOCKET_IFNAME=…"
        return Finding(name="ports", state=WARNING, found=found, remedy=remedy)
    return Finding(name="ports", state=OK, found=f"loopback works, free ports can be bound; {name} is {address or 'not in DNS'}")


def wanted_ports(cfg: CommandConfig) -> list[int]:
    """Ports that the configuration names."""
    if not isinstance(cfg, PlayRoot) or not cfg.inference.port:
        return []
    return list(range(cfg.inference.port, cfg.inference.port + cfg.num_servers))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def language(examined: Examined) -> Finding:
    encodings = {locale.getpreferredencoding(False).lower(), (sys.stdout.encoding or "").lower(), sys.getfilesystemencoding().lower()}
    found = f"{os.environ.get('LC_ALL') or os.environ.get('LANG') or 'not set'}, {', '.join(sorted(encodings - {''}))}"
    if encodings - {"utf-8", "utf8", ""}:
        return Finding(name="locale", state=WARNING, found=found, remedy="export LC_ALL=C.UTF-8: names and texts that are not ASCII fail")
    return Finding(name="locale", state=OK, found=found)


def clock(examined: Examined) -> Finding:
    """Whether the clock is set, and whether the file server of the run directory has the same."""
    with tempfile.NamedTemporaryFile(dir=existing(examined.run_dir), prefix=".rlx-doctor-") as file:
        skew = os.fstat(file.fileno()).st_mtime - time.time()
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, {abs(skew):.1f} s from that of the run directory's disk"
    if time.time() < Path(__file__).stat().st_mtime - 86400:
        return Finding(name="clock", state=WARNING, found=f"{found}; older than rlx's own files", remedy="set the clock: timedatectl")
    if abs(skew) > SKEW:
        remedy = "synchronise this host and the file server (chrony, NTP): ages of files and runs are wrong"
        return Finding(name="clock", state=WARNING, found=found, remedy=remedy)
    return Finding(name="clock", state=OK, found=found)


def sandboxes(examined: Examined) -> Finding:
    """Which boxes for agents this machine can make, and what bounds them."""
    from rlx.agents.cgroups import trees
    from rlx.agents.images import MISSING, TESTS, choose, problem_of

    bounds = ", ".join(sorted(trees())) or "none, so memory is bounded for each process alone"
    able = {kind: problem_of(kind) for kind in TESTS}
    found = f"{', '.join(kind for kind, problem in able.items() if problem is None) or 'none'}; control groups: {bounds}"
    for name, env in environments(examined.cfg).items():
        if env.id == "rlx.envs.program" or env.sandbox not in ("auto", "none"):
            try:
                choose(env.sandbox, env.box.image)
            except ValueError as error:
                return Finding(name="sandboxes", state=FAILED, found=found, remedy=f"envs.{name}: {error}")
    usable = any(problem is None for problem in able.values())
    remedy = "" if usable else MISSING["bwrap"]
    return Finding(name="sandboxes", state=OK if usable else SKIPPED, found=found, remedy=remedy)


MACHINE: tuple[tuple[str, Check], ...] = (
    ("python", python),
    ("open files", open_files),
    ("processes", processes),
    ("run directory", run_disk),
    ("cache", cache_disk),
    ("/dev/shm", shared_memory),
    ("memory", memory),
    ("processors", cores),
    ("C compiler", compiler),
    ("ports", loopback),
    ("sandboxes", sandboxes),
    ("locale", language),
    ("clock", clock),
)
