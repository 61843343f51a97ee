"""Boxes: where the programs and commands of a rollout run, away from the host's files, from its network and from each other.

    box = await open_box(kind, config); result = await box.run(["sh", "-c", "make test"], {}, timeout=60); await box.close()

A box is one process that holds namespaces (bubblewrap) or a container (podman, docker); commands enter it. It lives as long as a pipe to
this process: however this process ends, the kernel ends all that is in the box, and its files, which are in memory, are gone with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.agents.cgroups import Group
from rlx.agents.processes import Kept, end, exit_code, give, output, release
from rlx.config.schema_rollout import BoxConfig
from rlx.descendants import kill_all
from rlx.paths import cache_root, write_text

TOKEN = "BOX_OF_RLX"  # the variable by which the processes of a box without isolation are found
HOME = "/box"  # the folder of a box, and its programs' home
PORT = 4000  # of the gateway in a box without network
WRITABLE = ("/dev/shm", "/tmp", "/tests", "/logs")  # beside HOME; Harbor's tasks expect the last two
START = 60.0  # seconds to start a box
LINGERING = 0.5  # seconds to read what a command has said when it has ended and something that it started holds its pipes
HOST_ETC = ("alternatives", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "ld.so.cache", "localtime")
MASKED = tuple(f"/proc/{name}" for name in ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi"))
"""Of the kernel's, what its user could write where this machine's root makes the box."""
QUIET = """
for _ in 1 2 3 4 5 6 7 8 9 10; do
  for path in /proc/[0-9]*; do case ${path#/proc/} in 1|2|$$) ;; *) kill -9 ${path#/proc/};; esac; done
done
"""
LISTEN = (
    "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[2]))); s.listen(128); "
    "socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b'1'], [s.fileno()])"
)
NUMBERS = itertools.count()
ACCOUNTS = {"passwd": f"box:x:1000:1000:box:{HOME}:/bin/sh\n", "group": "box:x:1000:\n"}  # programs look themselves up


class BoxError(RuntimeError):
    """A box that cannot be started or used."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left."""

    code: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    late: bool = False  # it ran out of time and was ended


class Box:
    """A folder of this machine, without isolation. Subclasses isolate."""

    def __init__(self, config: BoxConfig, image: str | None) -> None:
        self.config, self.image, self.number = config, image, next(NUMBERS)
        self.home = self.workdir = HOME  # its own folder, and where commands run
        self.group = Group()
        self._running: set[asyncio.subprocess.Process] = set()
        self._token = secrets.token_hex(8)

    async def start(self) -> None:
        """Make it. Raises BoxError."""
        self.home = self.workdir = tempfile.mkdtemp(prefix=f"rlx-box-{os.getpid()}-")
        os.mkdir(f"{self.home}/tmp")
        self.group = Group.make(self.number, self.config)

    def command(self, argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """The command of this machine that runs a command in the box."""
        return ["env", "-i", f"--chdir={self.workdir}", *(f"{name}={value}" for name, value in variables.items()), *argv]

    async def listening(self, port: int = PORT) -> socket.socket | None:
        """A socket at a port of the box's own network; None: the box has this machine's."""
        return None

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command: nothing of this process but its language."""
        path = f"{Path(sys.executable).parent}:" if self.home != HOME else ""
        own = {"HOME": self.home, "TMPDIR": f"{self.home}/tmp", "PATH": f"{path}/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        return {**own, "LANG": "C.UTF-8", **({TOKEN: self._token} if self.home != HOME else {}), **more}

    async def run(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        given: bytes = b"",
        until: asyncio.Event | None = None,
        grace: float = 0.0,
    ) -> Result:
        """Run a command in the box's folder. `given`: its standard input. It is ended after `timeout`, or `grace` after `until` is set.

        Without control groups it gets the bounds for itself alone.
        """
        command = [*self.bounds(), *self.command(argv, self.variables(variables or {}))]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._running.add(process)
        assert process.stdin is not None
        out, err = Kept(), Kept()
        reading = [asyncio.create_task(out.read(process.stdout)), asyncio.create_task(err.read(process.stderr))]
        giving = asyncio.create_task(give(process.stdin, given))
        try:
            ending = asyncio.ensure_future(exit_code(process))
            asked = asyncio.ensure_future((until or asyncio.Event()).wait())
            await asyncio.wait({ending, asked}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not ending.done():
                await asyncio.wait({ending}, timeout=grace)
            asked.cancel()
            if late := not ending.done():
                end(process)
            code = await ending
            await asyncio.wait(reading, timeout=LINGERING)  # what it has left behind may hold the pipes
            return Result(code, out.text(), err.text(), late)
        finally:
            end(process)
            for task in (*reading, giving):
                task.cancel()
            release(process)
            self._running.discard(process)

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files below the box's folder. Raises BoxError."""
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            script = 'rm -rf -- "$1"; mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
            result = await self.run(["sh", "-c", script, "sh", name], given=data, timeout=START)
            if result.code:
                raise BoxError(f"the file {name} cannot be written in the box: {result.stderr.strip()[-300:]}")

    async def read(self, name: str) -> str | None:
        """The text of a file, at most MOST_OUTPUT bytes; None: there is none."""
        result = await self.run(["cat", "--", name], timeout=START)
        return None if result.code else result.stdout

    async def quiet(self) -> None:
        """End all that runs in it, so that nothing of a program's is left when its work is scored."""
        await asyncio.to_thread(kill_all, (), self._token, variable=TOKEN)

    async def close(self) -> None:
        """End everything in it, and remove it."""
        for process in self._running:
            end(process)
        await asyncio.to_thread(kill_all, (), self._token, variable=TOKEN)  # those that have left their groups
        await asyncio.to_thread(shutil.rmtree, self.home, True)
        self.group.remove()

    def bounds(self) -> list[str]:
        """What stands before a command, so that it keeps to the limits."""
        limits, has = self.config, self.group.bounds
        bounds = ["--core=0", *([f"--fsize={int(limits.disk_gb * 2**30)}"] if type(self) is Box else [])]
        bounds += [f"--nproc={limits.processes}"] if limits.processes and "pids" not in has and type(self) is not Box else []
        bounds += [f"--as={int(limits.memory_gb * 2**30)}"] if limits.memory_gb and "memory" not in has else []
        return ["sh", "-c", f'{self.group.enter()}exec "$@"', "sh", "prlimit", *bounds]


class Held(Box, ABC):
    """A box that one process holds, whose standard input is its life."""

    own_network = True

    async def start(self) -> None:
        self.group = Group.make(self.number, self.config)
        pipe = asyncio.subprocess.PIPE
        status, theirs = os.pipe()
        command = ["sh", "-c", f'{self.group.enter()}exec "$@"', "sh", *self.starting(theirs)]
        try:
            self._holder = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(theirs,), start_new_session=True
            )
            os.close(theirs)
            theirs = -1
            assert self._holder.stdout is not None
            async with asyncio.timeout(START):
                line = await self._holder.stdout.readline()
            if not line:
                raise BoxError(await self._words())
            self.pid = await self.first(os.read(status, 4096) if isinstance(self, Bubblewrap) else b"")
            self._own = self.group.processes()
        except TimeoutError:
            raise BoxError(f"the box did not start within {START:g} s") from None
        except OSError as error:
            raise BoxError(f"the box cannot start: {error}") from error
        finally:
            os.close(status)
            if theirs >= 0:
                os.close(theirs)

    async def _words(self) -> str:
        assert self._holder.stderr is not None
        said = (await self._holder.stderr.read()).decode(errors="replace").strip()
        return f"the box cannot start: {said[-500:] or f'exit code {await self._holder.wait()}'}"

    @abstractmethod
    def starting(self, status: int) -> list[str]:
        """The command that makes it. `status`: a file descriptor for what it says of itself."""

    @abstractmethod
    async def first(self, said: bytes) -> int:
        """The process id, on this machine, of its first process."""

    async def listening(self, port: int = PORT) -> socket.socket | None:
        if not self.own_network:
            return None
        ours, theirs = socket.socketpair()
        with ours, theirs:
            script = [sys.executable, "-I", "-S", "-c", LISTEN, str(theirs.fileno()), str(port)]
            enter = ["nsenter", f"--target={self.pid}", *self.user(), "--net", "--preserve-credentials", "--", *script]
            helper = await asyncio.create_subprocess_exec(*enter, pass_fds=(theirs.fileno(),), stderr=asyncio.subprocess.PIPE)
            _, said = await helper.communicate()
            if helper.returncode:
                raise BoxError(f"the gateway cannot listen in the box: {said.decode(errors='replace').strip()[-300:]}")
            _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=fd)

    def user(self) -> list[str]:
        """The option of nsenter for the box's user namespace, if it has one of its own."""
        own = os.readlink(f"/proc/{self.pid}/ns/user") != os.readlink("/proc/self/ns/user")
        return ["--user"] if own else []

    async def close(self) -> None:
        for process in self._running:
            end(process)
        holder = getattr(self, "_holder", None)
        if holder is not None:
            end(holder)
            await exit_code(holder)
            release(holder)
        await self.remove()
        for _ in range(50):  # the kernel ends its processes a moment later
            self.group.remove()
            if not any(folder.exists() for folder in self.group.folders):
                break
            await asyncio.sleep(0.02)

    async def quiet(self) -> None:
        if not self.group.folders:
            await self.run(["sh", "-c", QUIET], timeout=START)
        for _ in range(200):
            if not (left := self.group.processes() - self._own):
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
        raise BoxError("what runs in the box cannot be ended")

    async def remove(self) -> None:
        """Remove what its process does not take with it."""


class Bubblewrap(Held):
    """Namespaces made by bubblewrap. Its user is nobody that this machine knows, and has no capability."""

    @property
    def own_network(self) -> bool:  # type: ignore[override]
        """Whether it has one, with its own loopback."""
        return not self.config.network

    def starting(self, status: int) -> list[str]:
        size = str(int(self.config.disk_gb * 2**30))
        sized = ["--size", size] if "--size" in _bwrap_help() else []
        argv = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "box", "--die-with-parent"]
        argv += ["--new-session", "--cap-drop", "ALL", "--clearenv", "--info-fd", str(status)]
        argv += ["--share-net"] if self.config.network else []
        argv += ["--disable-userns"] if "--disable-userns" in _bwrap_help() else []
        argv += _root(Path(self.image)) if self.image else _host_root(self.config.network)
        argv += ["--proc", "/proc", *(part for name in MASKED for part in ("--ro-bind-try", name, name))]
        argv += ["--dev", "/dev", *(part for name in WRITABLE for part in (*sized, "--tmpfs", name))]
        for folder in self.config.folders:
            argv += ["--ro-bind", folder, folder]
        argv += [*sized, "--tmpfs", HOME, "--dir", f"{HOME}/tmp", "--chdir", HOME]
        return [*argv, "--remount-ro", "/dev", "--remount-ro", "/", "--", "sh", "-c", "echo ready; read -r _"]

    async def first(self, said: bytes) -> int:
        return int(json.loads(said)["child-pid"])

    def command(self, argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        enter = ["nsenter", f"--target={self.pid}", "--user", "--mount", "--net", "--pid", "--ipc", "--uts", "--root"]
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', self.workdir, *argv]
        own = [f"{name}={value}" for name, value in variables.items()]
        return [*enter, "--preserve-credentials", "--", "env", "-i", *own, *inside]


class Container(Held):
    """A container of podman or docker."""

    engine = "podman"

    @property
    def name(self) -> str:
        """The container's name."""
        return f"rlx-{os.getpid()}-{self.number}"

    def starting(self, status: int) -> list[str]:
        if self.image is None:
            raise BoxError("the task has no image, and box.image is not set")
        limits = self.config
        argv = [self.engine, "run", "--rm", "--interactive", "--name", self.name, "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        argv += ["--http-proxy=false"] if self.engine == "podman" else []  # it would pass this process's on
        argv += [] if limits.network else ["--network=none"]
        argv += [f"--cpus={limits.cpus}"] if limits.cpus else []
        argv += [f"--memory={int(limits.memory_gb * 2**30)}"] if limits.memory_gb else []
        argv += [f"--pids-limit={limits.processes}"] if limits.processes else []
        for folder in limits.folders:
            argv += ["--volume", f"{folder}:{folder}:ro"]
        argv += ["--tmpfs", f"{HOME}:rw,exec,mode=1777,size={int(limits.disk_gb * 2**30)}", "--workdir", HOME, "--entrypoint", ""]
        return [*argv, self.image, "sh", "-c", f"mkdir -p {HOME}/tmp; echo ready; read -r _"]

    async def first(self, said: bytes) -> int:
        code, out = await output([self.engine, "inspect", "--format", "{{.State.Pid}}", self.name])
        if code:
            raise BoxError(out)
        return int(out)

    def command(self, argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        own = [part for name, value in variables.items() if name != "PATH" for part in ("--env", f"{name}={value}")]
        return [self.engine, "exec", "--interactive", "--workdir", self.workdir, *own, self.name, *argv]

    def bounds(self) -> list[str]:
        return ["env"]  # the engine has them

    async def quiet(self) -> None:
        await output([self.engine, "exec", self.name, "sh", "-c", "kill -9 -1"])  # but its first process, and this one

    async def run(self, *arguments: Any, **named: Any) -> Result:
        result = await super().run(*arguments, **named)
        if result.late:  # the engine's client alone has ended
            await self.quiet()
        return result

    async def remove(self) -> None:
        await output([self.engine, "rm", "--force", *(["--time", "0"] if self.engine == "podman" else []), self.name])


class Docker(Container):
    engine = "docker"


KINDS: dict[str, type[Box]] = {"none": Box, "bwrap": Bubblewrap, "podman": Container, "docker": Docker}


async def open_box(kind: str, config: BoxConfig, image: str | None = None) -> Box:
    """A box of a kind that `rlx.agents.images.choose` has found, from an image that `prepared` has made. Raises BoxError."""
    box = KINDS[kind](config, image)
    try:
        await box.start()
    except BaseException:
        await box.close()
        raise
    return box


def sweep() -> None:
    """Remove the folders of boxes without isolation whose worker was killed."""
    for folder in Path(tempfile.gettempdir()).glob("rlx-box-*-*"):
        if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
            shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _bwrap_help() -> str:
    return os.popen("bwrap --help 2>&1").read()


def _host_root(network: bool) -> list[str]:
    """This machine's programs, without its data."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64", "lib32", "sbin"):
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    for name in (*HOST_ETC, *(("resolv.conf", "hosts", "nsswitch.conf") if network else ())):
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name, text in ACCOUNTS.items():
        file = cache_root() / "box" / name
        if not file.exists():
            write_text(file, text)
        argv += ["--ro-bind", str(file), f"/etc/{name}"]
    return argv


def _root(folder: Path) -> list[str]:
    """A root file system that a folder holds."""
    argv = []
    for path in sorted(folder.iterdir()):
        if path.name in ("proc", "dev", "sys", "tmp", HOME[1:]):
            continue
        argv += ["--symlink", os.readlink(path), f"/{path.name}"] if path.is_symlink() else ["--ro-bind", str(path), f"/{path.name}"]
    return argv
