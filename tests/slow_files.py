"""A file system that is late, as a network's may be: a folder, seen through FUSE with long-lived caches. Needs root and /dev/fuse.

    python slow_files.py FOLDER MOUNT [DELAY]

Each mount has caches of its own, so two mounts of one folder are two hosts: a name that was looked up and did not exist stays absent for
`ABSENT` seconds, and size and times of a file stay as they were for `ATTRIBUTES` seconds, whatever the other host does. Locks are refused.
Every request takes `DELAY` seconds. Serves until it is unmounted. Speaks the kernel's protocol itself, with the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ABSENT, ATTRIBUTES = 120, 3  # seconds
ROOT = 1  # the node of the folder itself
LARGEST = 1 << 17  # bytes of a read or write
INIT, FORGET, FORGET_ALL, INTERRUPT, DESTROY = 26, 2, 42, 36, 38
LOCKS = (31, 32, 33)
SENT_LOCKS = 1 << 1 | 1 << 10  # flags of INIT: the kernel asks here for POSIX and BSD locks
BIG_WRITES, ATOMIC_TRUNCATION = 1 << 5, 1 << 3


@dataclass
class Node:
    """A file or folder that the kernel knows by a number. The descriptor keeps it, whatever the other host does to its name."""

    fd: int
    key: tuple[int, int]  # device and inode
    known: int = 0  # how often the kernel was told of it and has not forgotten it

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"


class Mount:
    """One host's view of a folder."""

    def __init__(self, folder: str, target: str, delay: float = 0.0) -> None:
        self.target, self.delay = target, delay
        self.nodes = {ROOT: self.opened(folder, None)}
        self.numbers: dict[tuple[int, int], int] = {self.nodes[ROOT].key: ROOT}
        self.change = threading.Lock()  # of the nodes
        self.listings: dict[int, bytes] = {}
        self.numbering = itertools.count(ROOT + 1)
        self.fd = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"late", os.fsencode(target), b"fuse.late", 0, options):
            raise OSError(ctypes.get_errno(), "mount", target)
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 5: self.readlink, 6: self.symlink, 8: self.mknod, 9: self.mkdir,
            10: self.unlink, 11: self.rmdir, 12: self.rename, 13: self.link, 14: self.open, 15: self.read, 16: self.write, 17: self.statfs,
            18: self.release, 20: self.fsync, 25: lambda *_: b"", 27: self.opendir, 28: self.readdir, 29: self.releasedir,
            30: lambda *_: b"", 35: self.create, 45: self.rename2,
        }  # fmt: skip

    def serve(self) -> None:
        with ThreadPoolExecutor(16) as pool:
            while True:
                try:
                    request = os.read(self.fd, LARGEST + 4096)
                except OSError as error:
                    if error.errno == errno.ENODEV:  # unmounted
                        return
                    if error.errno in (errno.EINTR, errno.ENOENT):
                        continue
                    raise
                pool.submit(self.answer, request)

    def answer(self, request: bytes) -> None:
        _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
        if opcode == FORGET:
            self.forget(node, struct.unpack_from("<Q", request, 40)[0])
        elif opcode == FORGET_ALL:
            for number in range(struct.unpack_from("<I", request, 40)[0]):
                self.forget(*struct.unpack_from("<2Q", request, 48 + 16 * number))
        if opcode in (FORGET, FORGET_ALL, INTERRUPT, DESTROY):
            return
        code, body = 0, b""
        try:
            if opcode == INIT:
                _, minor, ahead, _ = struct.unpack_from("<4I", request, 40)
                flags = SENT_LOCKS | BIG_WRITES | ATOMIC_TRUNCATION
                body = struct.pack("<4I2H2I2HI7I", 7, min(minor, 31), ahead, flags, 16, 12, LARGEST, 1, 0, 0, 0, *[0] * 7)
            elif opcode in LOCKS:
                code = errno.ENOSYS
            elif opcode in self.answers:
                time.sleep(self.delay)
                body = self.answers[opcode](node, request[40:])
            else:
                code = errno.ENOSYS
        except OSError as error:
            code = error.errno or errno.EIO
        except Exception as error:  # else the kernel waits for ever
            print(f"{opcode}: {error!r}", file=sys.stderr, flush=True)
            code = errno.EIO
        with contextlib.suppress(OSError):  # a request that was interrupted
            os.write(self.fd, struct.pack("<IiQ", 16 + len(body), -code, unique) + body)

    # names and nodes

    def opened(self, name: str | bytes, parent: int | None) -> Node:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        found = os.fstat(fd)
        return Node(fd, (found.st_dev, found.st_ino))

    def at(self, node: int) -> int:
        return self.nodes[node].fd

    def entry(self, parent: int, name: bytes) -> bytes:
        new = self.opened(name, self.at(parent))
        with self.change:
            number = self.numbers.get(new.key)
            if number is None:
                number = self.numbers[new.key] = next(self.numbering)
                self.nodes[number] = new
            else:
                os.close(new.fd)
            self.nodes[number].known += 1
        return struct.pack("<4Q2I", number, 0, ATTRIBUTES, ATTRIBUTES, 0, 0) + attributes(os.fstat(self.at(number)))

    def forget(self, number: int, times: int) -> None:
        with self.change:
            node = self.nodes[number]
            node.known -= times
            if node.known <= 0 and number != ROOT:
                del self.nodes[number], self.numbers[node.key]
                os.close(node.fd)

    def lookup(self, node: int, body: bytes) -> bytes:
        try:
            return self.entry(node, body.split(b"\0")[0])
        except FileNotFoundError:
            return struct.pack("<4Q2I", 0, 0, ABSENT, 0, 0, 0) + bytes(88)

    # attributes

    def getattr(self, node: int, body: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<2IQ", body)
        return self._attributes(os.fstat(handle if flags & 1 else self.at(node)))

    def _attributes(self, found: os.stat_result) -> bytes:
        return struct.pack("<Q2I", ATTRIBUTES, 0, 0) + attributes(found)

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atimens, mtimens, _, mode, _, uid, gid, _ = struct.unpack_from("<2I6Q8I", body)
        at: int | str = handle if valid & 64 else self.nodes[node].path
        if valid & 1:
            os.chmod(at, stat.S_IMODE(mode))
        if valid & 6:
            os.chown(at, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(at, size)
        if valid & (16 | 32):
            before, now = os.stat(at), time.time_ns()
            times = [now if valid & 128 else atime * 10**9 + atimens, now if valid & 256 else mtime * 10**9 + mtimens]
            os.utime(at, ns=(times[0] if valid & 16 else before.st_atime_ns, times[1] if valid & 32 else before.st_mtime_ns))
        return self._attributes(os.fstat(handle if valid & 64 else self.at(node)))

    def statfs(self, node: int, body: bytes) -> bytes:
        found = os.statvfs(self.nodes[ROOT].path)
        sizes = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q10I", *sizes, found.f_bsize, 255, found.f_frsize, 0, *[0] * 6)

    # folders and names

    def readlink(self, node: int, body: bytes) -> bytes:
        return os.readlink(b"", dir_fd=self.at(node))

    def symlink(self, node: int, body: bytes) -> bytes:
        name, target, _ = body.split(b"\0", 2)
        os.symlink(target, name, dir_fd=self.at(node))
        return self.entry(node, name)

    def mknod(self, node: int, body: bytes) -> bytes:
        mode, device, umask, _ = struct.unpack_from("<4I", body)
        name = body[16:].split(b"\0")[0]
        os.mknod(name, mode & ~umask, device, dir_fd=self.at(node))
        return self.entry(node, name)

    def mkdir(self, node: int, body: bytes) -> bytes:
        mode, umask = struct.unpack_from("<2I", body)
        name = body[8:].split(b"\0")[0]
        os.mkdir(name, mode & ~umask, dir_fd=self.at(node))
        return self.entry(node, name)

    def unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(body.split(b"\0")[0], dir_fd=self.at(node))
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(body.split(b"\0")[0], dir_fd=self.at(node))
        return b""

    def rename(self, node: int, body: bytes) -> bytes:
        return self._rename(node, struct.unpack_from("<Q", body)[0], body[8:])

    def rename2(self, node: int, body: bytes) -> bytes:
        target, flags = struct.unpack_from("<QI", body)
        if flags:
            raise OSError(errno.EINVAL, "flags of rename")
        return self._rename(node, target, body[16:])

    def _rename(self, node: int, target: int, names: bytes) -> bytes:
        old, new, _ = names.split(b"\0", 2)
        os.rename(old, new, src_dir_fd=self.at(node), dst_dir_fd=self.at(target))
        return b""

    def link(self, node: int, body: bytes) -> bytes:
        name = body[8:].split(b"\0")[0]
        os.link(self.nodes[struct.unpack_from("<Q", body)[0]].path, name, dst_dir_fd=self.at(node), follow_symlinks=True)
        return self.entry(node, name)

    def opendir(self, node: int, body: bytes) -> bytes:
        listing = b""
        for name in [".", "..", *os.listdir(self.nodes[node].path)]:
            raw = os.fsencode(name)
            size = 24 + (len(raw) + 7) // 8 * 8
            listing += struct.pack("<QQII", 1, len(listing) + size, len(raw), 0) + raw.ljust(size - 24, b"\0")
        handle = next(self.numbering)
        self.listings[handle] = listing
        return struct.pack("<Q2I", handle, 0, 0)

    def readdir(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<2QI", body)
        listing, end = self.listings[handle], offset
        while end < len(listing):
            following = struct.unpack_from("<QQ", listing, end)[1]
            if following - offset > size:
                break
            end = following
        return listing[offset:end]

    def releasedir(self, node: int, body: bytes) -> bytes:
        self.listings.pop(struct.unpack_from("<Q", body)[0], None)
        return b""

    # files

    def open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_APPEND | os.O_NOFOLLOW)  # the kernel sends the place of each write
        if flags & os.O_ACCMODE == os.O_WRONLY:
            flags = flags & ~os.O_ACCMODE | os.O_RDWR  # it reads what surrounds a write
        return struct.pack("<Q2I", os.open(self.nodes[node].path, flags & ~(os.O_CREAT | os.O_EXCL)), 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode, umask = struct.unpack_from("<3I", body)
        name = body[16:].split(b"\0")[0]
        flags = flags & ~(os.O_ACCMODE | os.O_APPEND) | os.O_RDWR
        handle = os.open(name, flags | os.O_CREAT, mode & ~umask, dir_fd=self.at(node))
        return self.entry(node, name) + struct.pack("<Q2I", handle, 0, 0)

    def read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<2QI", body)
        return os.pread(handle, size, offset)

    def write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<2QI", body)
        return struct.pack("<2I", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""


def attributes(found: os.stat_result) -> bytes:
    """`struct fuse_attr`."""
    times = [value // 10**9 for value in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
    parts = [value % 10**9 for value in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
    rest = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev, found.st_blksize, 0)
    return struct.pack("<6Q10I", found.st_ino, found.st_size, found.st_blocks, *times, *parts, *rest)


if __name__ == "__main__":
    os.umask(0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Mount(sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0).serve()
