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
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.agents import cgroups
from rlx.agents.commands import OUT, Result, run
from rlx.config.schema_rollout import BoxConfig
from rlx.paths import cache_root, write_text
from rlx.process_tree import kill_all

TOKEN = "BOX_OF_RLX"  # the variable by which the processes of a box without isolation are found
HOME = "/box"  # the folder of a box, and its programs' home
WRITABLE = ("/dev/shm", "/tmp", "/tests", "/logs")  # beside HOME; Harbor's tasks expect the last two
START_SECONDS = 60.0  # seconds to start a box
ROOT = ("usr", "bin", "lib", "lib64", "lib32", "sbin")  # of this machine, in a box without an image
ETC = ("alternatives", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "ld.so.cache", "localtime")
ETC_OF_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf")
MASKED = tuple(f"/proc/{name}" for name in ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi"))
"""Of the kernel's, what its user could write where this machine's root makes the box."""
HOLD = f"mkdir -p {HOME}/tmp; echo ready >&2; "
"""What the first process of a box begins with. It lives until its input ends, and nothing in the box can kill it."""
REAP = "while ! cat > /dev/null; do :; done"  # a shell that waits for a program reaps what others leave
QUIET = """
was=$(echo /proc/[0-9]*)
kill -9 -1
for path in $was; do
  case $path in /proc/1|/proc/$$) continue;; esac
  while read -r said 2>/dev/null < $path/stat; do case ${said##*) } in [ZX]*) break;; *) sleep 0.01;; esac; done
done
"""
"""Ends all processes of a box but the first, and waits until they have ended."""
LISTEN = (
    "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[2]))); s.listen(128); "
    "socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b'1'], [s.fileno()])"
)
NUMBERS = itertools.count()
ACCOUNTS = {"passwd": f"box:x:1000:1000:box:{HOME}:/bin/sh\n", "group": "box:x:1000:\n"}  # programs look themselves up


class BoxError(RuntimeError):
    """A box that cannot be started or used."""


class Box:
    """A folder of this machine, without isolation. Subclasses isolate."""

    def __init__(self, kind: str, config: BoxConfig, image: str | None) -> None:
        self.kind, self.config, self.image = kind, config, image
        self.name = f"rlx-box-{os.getpid()}-{next(NUMBERS)}"
        self.home = self.workdir = HOME  # its own folder, and where commands run
        self.path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        self.group = cgroups.ControlGroup(self.name, config)
        self._token = secrets.token_hex(8)
        self._ports: dict[int, asyncio.Task[asyncio.Server | None]] = {}  # of this machine, that it reaches

    async def start(self) -> None:
        """Make it. Raises BoxError."""
        self.home = self.workdir = tempfile.mkdtemp(prefix=f"{self.name}-")
        self.path = f"{Path(sys.executable).parent}:{self.path}"
        os.mkdir(f"{self.home}/tmp")

    def command(self, argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """The command of this machine that runs a command in the box."""
        return ["env", "-i", f"--chdir={self.workdir}", *_assigned({**variables, TOKEN: self._token}), *argv]

    def bounds(self) -> list[str]:
        """What stands before a command, so that it keeps to the limits: those of each process for what the control groups do not bound."""
        limits, has = self.config, self.group.bounds
        memory = [f"--as={int(limits.memory_gb * 2**30)}"] if limits.memory_gb and "memory" not in has else []
        number = [f"--nproc={limits.processes}"] if limits.processes and "pids" not in has else []
        files = [f"--fsize={int(limits.disk_gb * 2**30)}"]
        own = number if self.home == HOME else files  # without isolation its user has other processes, and its files no other bound
        return [*self.group.enter(), "prlimit", "--core=0", *memory, *own]

    def reach(self, port: int) -> None:
        """Let what runs in it from now on reach a port of this machine at the same port of its own network, if it has one."""
        if port not in self._ports:
            self._ports[port] = asyncio.ensure_future(self._forwarded(port))

    async def _forwarded(self, port: int) -> asyncio.Server | None:
        sock = await self.listening(port)
        return None if sock is None else await asyncio.start_server(functools.partial(_joined, port), sock=sock)

    async def listening(self, port: int) -> socket.socket | None:
        """A socket at a port of the box's own network; None: the box has this machine's."""
        return None

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command: nothing of this process but its language."""
        return {"HOME": self.home, "TMPDIR": f"{self.home}/tmp", "PATH": self.path, "LANG": "C.UTF-8", **more}

    async def entered(self, argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """The command of this machine that runs a command in the box's folder. Without control groups it has the bounds for itself."""
        await asyncio.shield(asyncio.gather(*self._ports.values()))  # a command that is given up leaves them to the next
        return [*self.bounds(), *self.command(argv, self.variables(variables))]

    async def run(self, argv: Sequence[str], variables: Mapping[str, str] | None = None, **how: Any) -> Result:
        """Run a command in the box's folder. `how`: of `rlx.agents.commands.run`."""
        return await run(await self.entered(argv, variables or {}), **how)

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files below the box's folder. Raises BoxError."""
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            script = 'rm -rf -- "$1"; mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
            result = await self.run(["sh", "-c", script, "sh", name], given=data, timeout=START_SECONDS)
            if result.code:
                raise BoxError(f"the file {name} cannot be written in the box: {result.stderr.strip()[-300:]}")

    async def read(self, name: str) -> str | None:
        """The text of a file, at most MOST_OUTPUT bytes; None: there is none."""
        result = await self.run(["cat", "--", name], timeout=START_SECONDS)
        return None if result.code else result.stdout

    async def quiet(self) -> None:
        """End all that runs in it, so that nothing of a program's is left when its work is scored. Raises BoxError."""
        if await asyncio.to_thread(kill_all, (), self._token, variable=TOKEN):
            raise BoxError("what runs in the box cannot be ended")

    async def close(self) -> None:
        """End everything in it, and remove it."""
        for server in await asyncio.gather(*self._ports.values(), return_exceptions=True):
            if server is not None and not isinstance(server, BaseException):  # uvloop's is no asyncio.Server
                server.close()
        await self.end()
        await self.group.remove()

    async def end(self) -> None:
        """End everything in it."""
        await asyncio.to_thread(kill_all, (), self._token, variable=TOKEN)
        if self.home != HOME:
            await asyncio.to_thread(shutil.rmtree, self.home, True)


class Held(Box):
    """A box that one process holds, whose standard input is its life."""

    starting: Callable[[], list[str]]  # the command that makes it
    first: Callable[[Any], Coroutine[Any, Any, int]]  # the process id, on this machine, of its first process, from what `starting` prints
    holder: Process | None = None
    pid = 0  # on this machine, of its first process

    async def start(self) -> None:
        try:
            argv = [*self.group.enter(), *self.starting()]
            self.holder = await asyncio.create_subprocess_exec(
                *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, cwd=tempfile.gettempdir()
            )
            async with asyncio.timeout(START_SECONDS):
                await self.holder.stderr.readuntil(b"ready\n")  # type: ignore[union-attr]
                self.pid = await self.first(self.holder.stdout)
        except TimeoutError as error:
            raise BoxError(f"the box cannot start: it was not ready after {START_SECONDS:g} s") from error
        except (OSError, asyncio.LimitOverrunError) as error:
            raise BoxError(f"the box cannot start: {error}") from error
        except asyncio.IncompleteReadError as error:  # it has ended
            said = error.partial.decode(errors="replace").strip()[-500:]
            raise BoxError(f"the box cannot start: {said or f'exit code {await self.holder.wait()}'}") from error  # type: ignore[union-attr]

    async def listening(self, port: int) -> socket.socket | None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            own = os.readlink(f"/proc/{self.pid}/ns/user") != os.readlink("/proc/self/ns/user")
            enter = ["nsenter", f"--target={self.pid}", *(["--user"] if own else []), "--net", "--preserve-credentials", "--"]
            script = [sys.executable, "-I", "-S", "-c", LISTEN, str(theirs.fileno()), str(port)]
            result = await run([*enter, *script], pass_fds=(theirs.fileno(),), timeout=START_SECONDS)
            if result.code:
                raise BoxError(f"the gateway cannot listen in the box: {result.stderr.strip()[-300:]}")
            _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=fd)

    async def quiet(self) -> None:
        # without the box's bounds: what it has left running may have used them up
        result = await run(self.command(["sh", "-c", QUIET], self.variables({})), timeout=START_SECONDS)
        if result.code:
            raise BoxError(f"what runs in the box cannot be ended: {result.stderr.strip()[-300:] or f'exit code {result.code}'}")

    async def end(self) -> None:
        if self.holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.holder.pid, signal.SIGKILL)
            self.holder._transport.close()  # type: ignore[attr-defined] # else it waits for whoever holds the pipes
            await self.holder.wait()


class Bubblewrap(Held):
    """Namespaces made by bubblewrap. Its user is nobody that this machine knows, and has no capability."""

    def starting(self) -> list[str]:
        sized = ["--size", str(int(self.config.disk_gb * 2**30))] if "--size" in _bwrap_help() else []
        argv = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "box", "--die-with-parent"]
        argv += ["--new-session", "--cap-drop", "ALL", "--clearenv", "--as-pid-1", "--info-fd", str(OUT)]
        argv += ["--share-net"] if self.config.network else []
        argv += ["--disable-userns"] if "--disable-userns" in _bwrap_help() else []
        if self.image:
            argv += _root(Path(self.image), os.listdir(self.image))
        else:
            argv += [*_root(Path("/"), ROOT), *_etc(self.config.network)]
        argv += ["--proc", "/proc", *(part for name in MASKED for part in ("--ro-bind-try", name, name))]
        argv += ["--dev", "/dev", *(part for name in (*WRITABLE, HOME) for part in (*sized, "--tmpfs", name))]
        argv += [part for folder in self.config.folders for part in ("--ro-bind", folder, folder)]
        return [*argv, "--chdir", HOME, "--remount-ro", "/dev", "--remount-ro", "/", "--", "sh", "-c", HOLD + REAP]

    async def first(self, said: Any) -> int:
        return int(json.loads(await said.readuntil(b"}"))["child-pid"])

    def command(self, argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        enter = ["nsenter", f"--target={self.pid}", "--user", "--mount", "--net", "--pid", "--ipc", "--uts", "--root"]
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', self.workdir, *argv]
        return [*enter, "--preserve-credentials", "--", "env", "-i", *_assigned(variables), *inside]

    async def listening(self, port: int) -> socket.socket | None:
        return None if self.config.network else await super().listening(port)


class Container(Held):
    """A container of podman or docker."""

    def starting(self) -> list[str]:
        if self.image is None:
            raise BoxError("the task has no image, and box.image is not set")
        limits = self.config
        argv = [self.kind, "run", "--rm", "--interactive", "--name", self.name, "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        argv += ["--http-proxy=false"] if self.kind == "podman" else []  # it would pass this process's on
        argv += [] if limits.network else ["--network=none"]
        argv += [f"--cpus={limits.cpus}"] if limits.cpus else []
        argv += [f"--memory={int(limits.memory_gb * 2**30)}"] if limits.memory_gb else []
        argv += [f"--pids-limit={limits.processes}"] if limits.processes else []
        argv += [f"--volume={folder}:{folder}:ro" for folder in limits.folders]
        size = int(limits.disk_gb * 2**30)
        argv += [f"--tmpfs={name}:rw,exec,mode=1777,size={size}" for name in (*WRITABLE, HOME)]  # the rest of the image is on its own disk
        return [*argv, "--workdir", HOME, "--entrypoint", "", self.image, "sh", "-c", HOLD + "read -r _"]

    async def first(self, said: Any) -> int:
        result = await run([self.kind, "inspect", "--format", "{{.State.Pid}}", self.name], timeout=START_SECONDS)
        if result.code:
            raise BoxError(result.stderr.strip())
        return int(result.stdout)

    def command(self, argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        own = [part for name, value in variables.items() if name != "PATH" for part in ("--env", f"{name}={value}")]
        return [self.kind, "exec", "--interactive", "--workdir", self.workdir, *own, self.name, *argv]

    def bounds(self) -> list[str]:
        return []  # the engine has them

    async def run(self, argv: Sequence[str], variables: Mapping[str, str] | None = None, **how: Any) -> Result:
        result = await super().run(argv, variables, **how)
        if result.late:  # the engine's client alone has ended
            await self.quiet()
        return result

    async def end(self) -> None:
        await super().end()
        await run([self.kind, "rm", "--force", *(["--time", "0"] if self.kind == "podman" else []), self.name], timeout=START_SECONDS)


KINDS: dict[str, type[Box]] = {"none": Box, "bwrap": Bubblewrap, "podman": Container, "docker": Container}


async def open_box(kind: str, config: BoxConfig, image: str | None = None) -> Box:
    """A box of a kind that `rlx.agents.images.choose` has found, from an image that `prepared` has made. Raises BoxError."""
    box = KINDS[kind](kind, config, image)
    try:
        await box.start()
    except BaseException:
        await box.close()
        raise
    return box


def sweep() -> None:
    """Remove what boxes of killed workers left: the folders of those without isolation, and control groups."""
    for place in (Path(tempfile.gettempdir()), *cgroups.trees().values()):
        for folder in place.glob("rlx-box-*-*"):
            if not Path("/proc", folder.name.split("-")[2]).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _assigned(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]


async def _joined(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve a connection by a port of this machine."""
    with contextlib.suppress(OSError), contextlib.closing(writer):
        there, here = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copied(reader, here), _copied(there, writer))


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError), contextlib.closing(writer):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()


@functools.cache
def _bwrap_help() -> str:
    return os.popen("bwrap --help 2>&1").read()


def _root(folder: Path, names: Iterable[str]) -> list[str]:
    """The root file system of a box: entries of a folder, read-only."""
    argv = []
    for path in (folder / name for name in sorted(names) if name not in ("proc", "dev", "sys", "tmp", HOME[1:])):
        argv += ["--symlink", os.readlink(path), f"/{path.name}"] if path.is_symlink() else ["--ro-bind-try", str(path), f"/{path.name}"]
    return argv


def _etc(network: bool) -> list[str]:
    """Of this machine's settings what programs need, and the box's own accounts."""
    argv = [part for name in (*ETC, *(ETC_OF_NETWORK if network else ())) for part in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
    for name, text in ACCOUNTS.items():
        file = cache_root() / "box" / name
        if not file.exists():
            write_text(file, text)
        argv += ["--ro-bind", str(file), f"/etc/{name}"]
    return argv
