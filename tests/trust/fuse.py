"""A file system of the matrix's own, over /dev/fuse: it shows a directory and, on demand, stalls,
fails or returns wrong results.

:class:`Fuse` mounts it and runs its server, which is this file as a program: ``fuse.py <directory>
<mount point>``. The server reads its behaviour from standard input, a JSON object a line, and
confirms each with ``ok``; for every held request it prints ``stalled``. When its input ends it
exits, and the kernel aborts every waiting request, so nothing hangs afterwards. Nothing is cached,
so system calls return the server's results. Needs root.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = 1
DIRECT_IO = 1
_IN = struct.Struct("<IIQQIIII")
#: Names of requests by their number in the protocol.
NAMES = {
    1: "LOOKUP",
    3: "GETATTR",
    4: "SETATTR",
    9: "MKDIR",
    10: "UNLINK",
    11: "RMDIR",
    12: "RENAME",
    14: "OPEN",
}
NAMES |= {
    15: "READ",
    16: "WRITE",
    17: "STATFS",
    18: "RELEASE",
    20: "FSYNC",
    25: "FLUSH",
    26: "INIT",
    27: "OPENDIR",
}
NAMES |= {28: "READDIR", 29: "RELEASEDIR", 35: "CREATE", 45: "RENAME2"}
#: Requests without a reply: FORGET, INTERRUPT, DESTROY, BATCH_FORGET.
_SILENT = {2, 36, 38, 42}


class Fuse:
    """The mounted file system, seen from a test."""

    #: Its server, with the arguments after the two directories.
    program = __file__
    arguments: tuple[str, ...] = ()

    def __init__(self, shown: Path, mount_point: Path) -> None:
        self.mount_point = mount_point
        for place in (shown, mount_point):
            place.mkdir(exist_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, self.program, str(shown), str(mount_point), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "mounted":
            raise AssertionError("the FUSE server did not start")

    def behave(self, **manners: Any) -> None:
        """Its behaviour from now on; empty for normal: ``stall`` (names of requests without a reply
        for now), ``slow`` (seconds by name of the request), ``error`` (number of the error by
        name), ``lie`` (names: READ returns wrong bytes, WRITE stores zeros). Stalled requests get a
        reply if that is permitted again."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(manners) + "\n")
        self._server.stdin.flush()
        while (line := self._line()) != "ok":
            assert line == "stalled", f"the FUSE server said {line!r}"

    def await_stalled(self) -> None:
        """Waits until it holds a request."""
        assert self._line() == "stalled"

    def close(self) -> None:
        """Ends the connection and unmounts. Idempotent."""
        self._server.communicate()
        unmount(self.mount_point)

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()


def unmount(mount_point: Path) -> None:
    """Unmounts at once, even if it is in use or its server was killed; does nothing without a
    mount."""
    subprocess.run(["umount", "-l", str(mount_point)], check=False, capture_output=True)


class Server:
    """The other side of the device."""

    #: Bytes of the longest request.
    longest = 1 << 20

    def __init__(self, shown: Path, device: int) -> None:
        self.shown = shown
        self.device = device
        self.lock = threading.Condition()
        self.manners: dict[str, Any] = {}
        self.paths = {ROOT: ""}
        self.nodes = {"": ROOT}
        #: An open descriptor of a node, for files removed while open.
        self.open: dict[int, int] = {}

    def run(self) -> None:
        """Reads requests until the end; each gets a thread of its own, because it may stall."""
        while True:
            try:
                request = os.read(self.device, self.longest)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                continue  # interrupted, or withdrawn
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request: bytes) -> None:
        """Carries one request out."""
        _, number, unique, node, *_ = _IN.unpack_from(request)
        if number in _SILENT:
            return
        name, code, body = NAMES.get(number, ""), 0, b""
        try:
            self._manners(name)
            body = self._carry_out(name, node, request[_IN.size :])
        except OSError as error:
            code = -(error.errno or errno.EIO)
        try:
            os.write(self.device, struct.pack("<IiQ", 16 + len(body), code, unique) + body)
        except OSError:
            pass  # the caller was killed

    def _manners(self, name: str) -> None:
        with self.lock:
            while name in self.manners.get("stall", ()):
                say("stalled")
                self.lock.wait()
            code, seconds = (self.manners.get(manner, {}).get(name) for manner in ("error", "slow"))
        if seconds:
            threading.Event().wait(seconds)
        if code:
            raise OSError(code, name)

    def _carry_out(self, name: str, node: int, data: bytes) -> bytes:
        work: Callable[[int, bytes], bytes] | None = (
            getattr(self, f"do_{name.lower()}", None) if name else None
        )
        if work is None:
            raise OSError(errno.ENOSYS, name)
        return work(node, data)

    # Names
    # ----------------------------------------------------------------------------------------------

    def _path(self, node: int) -> Path:
        with self.lock:
            return self.shown / self.paths[node]

    def _child(self, node: int, name: bytes) -> str:
        with self.lock:
            return os.path.join(self.paths[node], os.fsdecode(name))

    def _node(self, relative: str) -> int:
        with self.lock:
            if relative not in self.nodes:
                self.nodes[relative] = len(self.paths) + 1
                self.paths[self.nodes[relative]] = relative
            return self.nodes[relative]

    def _attributes(self, path: Path | int) -> bytes:
        stat = os.fstat(path) if isinstance(path, int) else path.lstat()
        seconds = [
            divmod(ns, 1_000_000_000)
            for ns in (stat.st_atime_ns, stat.st_mtime_ns, stat.st_ctime_ns)
        ]
        return struct.pack(
            "<6Q10I",
            *(stat.st_ino, stat.st_size, stat.st_blocks, *(whole for whole, _ in seconds)),
            *(
                *(rest for _, rest in seconds),
                stat.st_mode,
                stat.st_nlink,
                stat.st_uid,
                stat.st_gid,
                0,
                4096,
                0,
            ),
        )

    def _entry(self, relative: str) -> bytes:
        attributes = self._attributes(self.shown / relative)
        return struct.pack("<QQQQII", self._node(relative), 0, 0, 0, 0, 0) + attributes

    # Requests
    # ----------------------------------------------------------------------------------------------

    def do_init(self, _node: int, _data: bytes) -> bytes:
        """Version 7.31, writes up to 128 KiB."""
        return struct.pack("<7I", 7, 31, 0, 0, 0, 128 << 10, 1) + bytes(36)

    def do_lookup(self, node: int, data: bytes) -> bytes:
        return self._entry(self._child(node, data.rstrip(b"\0")))

    def do_getattr(self, node: int, _data: bytes) -> bytes:
        path: Path | int = self._path(node)
        if isinstance(path, Path) and not os.path.lexists(path):
            path = self.open.get(node, path)
        return bytes(16) + self._attributes(path)

    def do_setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, nsec, _, mode = struct.unpack_from(
            "<IIQQQQQQIIII", data
        )
        path = self._path(node)
        if valid & 8:
            os.truncate(path, size)
        if valid & 1:
            path.chmod(mode & 0o7777)
        if valid & 32:
            os.utime(path, ns=(path.lstat().st_atime_ns, mtime * 1_000_000_000 + nsec))
        return self.do_getattr(node, b"")

    def do_mkdir(self, node: int, data: bytes) -> bytes:
        relative = self._child(node, data[8:].rstrip(b"\0"))
        (self.shown / relative).mkdir(struct.unpack_from("<I", data)[0] & 0o7777)
        return self._entry(relative)

    def do_unlink(self, node: int, data: bytes) -> bytes:
        relative = self._child(node, data.rstrip(b"\0"))
        (self.shown / relative).unlink()
        with self.lock:
            self.nodes.pop(relative, None)  # a new file of this name is another node
        return b""

    def do_rmdir(self, node: int, data: bytes) -> bytes:
        (self.shown / self._child(node, data.rstrip(b"\0"))).rmdir()
        return b""

    def do_rename(self, node: int, data: bytes, skip: int = 8) -> bytes:
        old, new = data[skip:].split(b"\0")[:2]
        source, target = self._child(node, old), self._child(struct.unpack_from("<Q", data)[0], new)
        (self.shown / source).rename(self.shown / target)
        with self.lock:
            self.nodes.pop(target, None)
            moved = self.nodes.pop(source, None)
            if moved is not None:
                self.nodes[target], self.paths[moved] = moved, target
        return b""

    def do_rename2(self, node: int, data: bytes) -> bytes:
        return self.do_rename(node, data, 16)

    def do_create(self, node: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", data)
        relative = self._child(node, data[16:].rstrip(b"\0"))
        handle = os.open(self.shown / relative, (flags & ~os.O_DIRECT) | os.O_CREAT, mode & 0o7777)
        entry = self._entry(relative)
        self.open[self._node(relative)] = handle
        return entry + struct.pack("<QII", handle, DIRECT_IO, 0)

    def do_open(self, node: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0] & (os.O_ACCMODE | os.O_NOFOLLOW)
        return struct.pack("<QII", os.open(self._path(node), flags), DIRECT_IO, 0)

    def do_read(self, _node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        found = os.pread(handle, size, offset)
        if "READ" in self.manners.get("lie", ()):
            found = bytes(byte ^ 0x40 for byte in found)
        return found

    def do_write(self, _node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        given = data[40 : 40 + size]
        if "WRITE" in self.manners.get("lie", ()):
            given = bytes(size)
        return struct.pack("<II", os.pwrite(handle, given, offset), 0)

    def do_release(self, node: int, data: bytes) -> bytes:
        self.open.pop(node, None)
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    def do_flush(self, _node: int, _data: bytes) -> bytes:
        return b""

    do_fsync = do_releasedir = do_flush

    def do_opendir(self, _node: int, _data: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def do_readdir(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        out = b""
        for place, entry in enumerate(
            sorted(os.scandir(self._path(node)), key=lambda entry: entry.name)
        ):
            name = os.fsencode(entry.name)
            record = (
                struct.pack(
                    "<QQII", entry.inode(), place + 1, len(name), 4 if entry.is_dir() else 8
                )
                + name
            )
            record += bytes(-len(record) % 8)
            if place >= offset:
                if len(out) + len(record) > size:
                    break
                out += record
        return out

    def do_statfs(self, _node: int, _data: bytes) -> bytes:
        found = os.statvfs(self.shown)
        numbers = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I", *numbers, found.f_bsize, 255, found.f_frsize, 0) + bytes(24)


def say(word: str) -> None:
    """One line, whole."""
    os.write(1, f"{word}\n".encode())


def main(kind: Callable[[Path, int], Server] = Server) -> None:
    """Mounts and serves until standard input ends."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"ucm-trust", os.fsencode(sys.argv[2]), b"fuse", 6, options) != 0:
        raise OSError(ctypes.get_errno(), "mount of FUSE")
    server = kind(Path(sys.argv[1]), device)
    threading.Thread(target=server.run, daemon=True).start()
    say("mounted")
    for line in sys.stdin:
        with server.lock:
            server.manners = json.loads(line)
            server.lock.notify_all()
        say("ok")


if __name__ == "__main__":
    main()
