"""A file system with the semantics of an NFS client, over /dev/fuse: each mount is the client of
one host.

The kernel of the test machines has no NFS. The effects of NFS on programs are produced here, on a
directory as the export, by the kernel's own caches and by this server, one for each mount:

* *Handles.* A file is identified by its handle on the export (``name_to_handle_at``), not by its
  path: a file removed by another client is ``ESTALE``, and a replaced one is the old file until the
  next lookup of the name.
* *Caches.* Present and missing names, attributes and listings are cached for ``ac`` seconds,
  independent of other clients. An open reads the attributes again, and keeps cached pages only if
  the file is unchanged for this client (close-to-open).
* *Write-behind.* Written bytes, and their errors, reach the export when the file is closed or
  synced, or when there are many.
* *Replays.* A call is executed, its reply is lost, and the client sends it again: the result is
  that of the second call.
* *Silly renames.* A name that is removed, or replaced, while this client has the file open becomes
  ``.nfs...`` until the file is closed.
* No ``renameat2`` with flags, no ``fallocate``; hard links.

Behaviours are those of ``fuse.py``, and ``replay``: the share of calls, between 0 and 1, with a
lost reply. Run as ``nfs.py <export> <mount point> <ac>``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuse import NAMES, ROOT, Fuse, Server, main

KEEP_CACHE = 2
#: Most bytes of a file that wait for its close.
BEHIND = 4 << 20
#: Calls for which a repetition is not harmless.
REPLAYED = ("UNLINK", "RENAME", "LINK", "MKDIR", "RMDIR")
NAMES[13] = "LINK"
_AT_EMPTY_PATH = 0x1000
_NOTIFY_INVAL_INODE = 2
_libc = ctypes.CDLL(None, use_errno=True)


class NfsClient(Fuse):
    """A mount of the export on one host."""

    program = __file__

    def __init__(self, export: Path, mount_point: Path, ac: float = 0.5) -> None:
        self.arguments = (str(ac),)
        super().__init__(export, mount_point)


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_ubyte * 128))


def handle_of(directory: int, name: str) -> bytes:
    """The handle of a name in an open directory, or of that directory itself."""
    handle, mount = _Handle(128), ctypes.c_int()
    flags = 0 if name else _AT_EMPTY_PATH
    if (
        _libc.name_to_handle_at(
            directory, os.fsencode(name), ctypes.byref(handle), ctypes.byref(mount), flags
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), name)
    return struct.pack("<Ii", handle.bytes, handle.type) + bytes(handle.data[: handle.bytes])


@dataclass
class Node:
    """A file or directory known to this client."""

    handle: bytes
    opened: int = 0
    #: Written bytes that wait for the close, with their offset.
    behind: list[tuple[int, bytes]] = field(default_factory=list)
    #: Time and length of the file at this client's last open or close.
    seen: tuple[int, int] | None = None
    #: Its location after a removal while open: handle of the directory, and name.
    silly: tuple[bytes, str] | None = None
    #: For a directory: the time of the listing, its own time then, and the names.
    listed: tuple[float, int, list[tuple[str, int, bool]]] | None = None


class NfsServer(Server):
    """One client, on the other side of the device."""

    longest = (1 << 20) + (64 << 10)

    def __init__(self, shown: Path, device: int) -> None:
        super().__init__(shown, device)
        self.ac = float(sys.argv[3])
        self.mount = os.open(shown, os.O_RDONLY | os.O_DIRECTORY)
        root = handle_of(self.mount, "")
        self.known: dict[int, Node] = {ROOT: Node(root)}
        self.numbers: dict[bytes, int] = {root: ROOT}
        self.serial = 0
        self.state = threading.RLock()

    def do_init(self, _node: int, _data: bytes) -> bytes:
        """Version 7.31; a MiB in a call, as a mount has it (``rsize``, ``wsize``), and several
        calls at once."""
        flags = 1 | 1 << 5 | 1 << 18 | 1 << 22  # ASYNC_READ, BIG_WRITES, PARALLEL_DIROPS, MAX_PAGES
        return struct.pack("<4I2H2I2H", 7, 31, 1 << 20, flags, 64, 48, 1 << 20, 1, 256, 0) + bytes(
            32
        )

    # Files by their handles
    # ----------------------------------------------------------------------------------

    @contextmanager
    def opened(self, handle: bytes, flags: int) -> Iterator[int]:
        """The file of a handle; ``ESTALE`` if it was removed."""
        length, kind = struct.unpack_from("<Ii", handle)
        made = _Handle(length, kind, (ctypes.c_ubyte * 128)(*handle[8:]))
        fd = _libc.open_by_handle_at(self.mount, ctypes.byref(made), flags | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "open_by_handle_at")
        try:
            yield fd
        finally:
            os.close(fd)

    def directory(self, node: int) -> Any:
        """An open directory."""
        return self.opened(self.known[node].handle, os.O_RDONLY | os.O_DIRECTORY)

    def number(self, handle: bytes) -> int:
        """The kernel's number of a handle."""
        with self.state:
            if handle not in self.numbers:
                self.numbers[handle] = len(self.known) + 1
                self.known[self.numbers[handle]] = Node(handle)
            return self.numbers[handle]

    def changed(self, node: int) -> None:
        """Records this client's own change of a directory."""
        self.known[node].listed = None

    def _carry_out(self, name: str, node: int, data: bytes) -> bytes:
        answer = super()._carry_out(name, node, data)
        share = self.manners.get("replay", 0)
        if name in REPLAYED and random.random() < share:
            answer = super()._carry_out(name, node, data)
        return answer

    # Attributes
    # ----------------------------------------------------------------------------------------------

    def _seconds(self) -> tuple[int, int]:
        return int(self.ac), int(self.ac % 1 * 1e9)

    def attributes_of(self, node: int) -> bytes:
        """The attributes of a file on the export, with this client's pending writes."""
        known = self.known[node]
        with self.opened(known.handle, os.O_PATH) as fd:
            packed = bytearray(self._attributes(fd))
        with self.state:
            end = max((at + len(data) for at, data in known.behind), default=0)
        size = struct.unpack_from("<Q", packed, 8)[0]
        struct.pack_into("<Q", packed, 8, max(size, end))
        return bytes(packed)

    def entry_of(self, handle: bytes) -> bytes:
        """The reply to the kernel about a name, with its lifetime."""
        node, (seconds, ns) = self.number(handle), self._seconds()
        return struct.pack("<QQQQII", node, 0, seconds, seconds, ns, ns) + self.attributes_of(node)

    def do_lookup(self, node: int, data: bytes) -> bytes:
        name = os.fsdecode(data.rstrip(b"\0"))
        with self.directory(node) as here:
            try:
                handle = handle_of(here, name)
            except FileNotFoundError:
                # A real client looks up again: the reply to a failed call has the directory's new
                # time.
                seconds, ns = (0, 0) if self.manners.get("replay") else self._seconds()
                # known not to be there
                return struct.pack("<QQQQII", 0, 0, seconds, 0, ns, 0) + bytes(88)
        return self.entry_of(handle)

    def do_getattr(self, node: int, _data: bytes) -> bytes:
        seconds, ns = self._seconds()
        return struct.pack("<QII", seconds, ns, 0) + self.attributes_of(node)

    def do_setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, nsec, _, mode = struct.unpack_from(
            "<IIQQQQQQIIII", data
        )
        self.written(node)
        with self.opened(self.known[node].handle, os.O_PATH) as fd:
            path = f"/proc/self/fd/{fd}"
            if valid & 8:
                os.truncate(path, size)
            if valid & 1:
                os.chmod(path, mode & 0o7777)
            if valid & 32:
                now = valid & 256
                at = time.time_ns() if now else mtime * 1_000_000_000 + nsec
                os.utime(path, ns=(os.stat(path).st_atime_ns, at))
        return self.do_getattr(node, b"")

    # Names
    # ----------------------------------------------------------------------------------------------

    def do_mkdir(self, node: int, data: bytes) -> bytes:
        name = os.fsdecode(data[8:].rstrip(b"\0"))
        with self.directory(node) as here:
            os.mkdir(name, struct.unpack_from("<I", data)[0] & 0o7777, dir_fd=here)
            self.changed(node)
            return self.entry_of(handle_of(here, name))

    def hide(self, here: int, parent: int, name: str) -> bool:
        """Renames a file that this client has open instead of removing it; true if it was open."""
        with self.state:
            try:
                node = self.known[self.numbers[handle_of(here, name)]]
            except (FileNotFoundError, KeyError):
                return False
            if not node.opened:
                return False
            self.serial += 1
            hidden = f".nfs{os.getpid():016x}{self.serial:08x}"
            os.rename(name, hidden, src_dir_fd=here, dst_dir_fd=here)
            node.silly = (self.known[parent].handle, hidden)
            return True

    def do_unlink(self, node: int, data: bytes) -> bytes:
        name = os.fsdecode(data.rstrip(b"\0"))
        with self.directory(node) as here:
            if not self.hide(here, node, name):
                os.unlink(name, dir_fd=here)
        self.changed(node)
        return b""

    def do_rmdir(self, node: int, data: bytes) -> bytes:
        with self.directory(node) as here:
            os.rmdir(os.fsdecode(data.rstrip(b"\0")), dir_fd=here)
        self.changed(node)
        return b""

    def do_rename(self, node: int, data: bytes, skip: int = 8) -> bytes:
        old, new = (os.fsdecode(name) for name in data[skip:].split(b"\0")[:2])
        target = struct.unpack_from("<Q", data)[0]
        with self.directory(node) as here, self.directory(target) as there:
            os.stat(old, dir_fd=here, follow_symlinks=False)
            self.hide(there, target, new)
            os.rename(old, new, src_dir_fd=here, dst_dir_fd=there)
        self.changed(node)
        self.changed(target)
        return b""

    def do_rename2(self, node: int, data: bytes) -> bytes:
        raise OSError(errno.ENOSYS, "RENAME2")

    def do_link(self, node: int, data: bytes) -> bytes:
        source, name = struct.unpack_from("<Q", data)[0], os.fsdecode(data[8:].rstrip(b"\0"))
        self.written(source)
        handle = self.known[source].handle
        with self.opened(handle, os.O_PATH) as fd, self.directory(node) as here:
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=here, follow_symlinks=True)
        self.changed(node)
        return self.entry_of(handle)

    # Open files
    # ----------------------------------------------------------------------------------------------

    def do_create(self, node: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", data)
        name = os.fsdecode(data[16:].rstrip(b"\0"))
        with self.directory(node) as here:
            os.close(os.open(name, (flags & ~os.O_DIRECT) | os.O_CREAT, mode & 0o7777, dir_fd=here))
            handle = handle_of(here, name)
        self.changed(node)
        entry, number = self.entry_of(handle), self.number(handle)
        with self.state:
            self.known[number].opened += 1
        return entry + struct.pack("<QII", number, 0, 0)

    def do_open(self, node: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0] & (os.O_ACCMODE | os.O_NOFOLLOW | os.O_TRUNC)
        known = self.known[node]
        with self.opened(known.handle, flags) as fd:
            stat = os.fstat(fd)
        now = (stat.st_mtime_ns, stat.st_size)
        with self.state:
            known.opened += 1
            same, known.seen = known.seen == now, now
        # Its attributes are read again; possibly old pages are dropped.
        notice = struct.pack("<IiQQqq", 40, _NOTIFY_INVAL_INODE, 0, node, -1, 0)
        try:
            os.write(self.device, notice)
        except OSError:
            pass  # the kernel knows nothing of it
        return struct.pack("<QII", node, KEEP_CACHE if same else 0, 0)

    def do_read(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        known = self.known[node]
        with self.opened(known.handle, os.O_RDONLY) as fd:
            found = bytearray(os.pread(fd, size, offset))
        with self.state:
            for at, piece in known.behind:
                first, last = max(at, offset), min(at + len(piece), offset + size)
                if first < last:
                    found.extend(bytes(max(0, last - offset - len(found))))
                    found[first - offset : last - offset] = piece[first - at : last - at]
        return bytes(found)

    def do_write(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        known = self.known[node]
        with self.state:
            known.behind.append((offset, data[40 : 40 + size]))
            much = sum(len(piece) for _, piece in known.behind) >= BEHIND
        if much:
            self.written(node)
        return struct.pack("<II", size, 0)

    def written(self, node: int) -> None:
        """Pending writes go to the export."""
        known = self.known[node]
        with self.state:
            behind, known.behind = known.behind, []
        if not behind:
            return
        with self.opened(known.handle, os.O_WRONLY) as fd:
            for at, piece in behind:
                os.pwrite(fd, piece, at)
            stat = os.fstat(fd)
        known.seen = (stat.st_mtime_ns, stat.st_size)

    def do_flush(self, node: int, _data: bytes) -> bytes:
        self.written(node)
        return b""

    def do_fsync(self, node: int, _data: bytes) -> bytes:
        self.written(node)
        with self.opened(self.known[node].handle, os.O_RDONLY) as fd:
            os.fsync(fd)
        return b""

    def do_release(self, node: int, _data: bytes) -> bytes:
        known = self.known[node]
        with self.state:
            known.opened -= 1
            over = known.silly if not known.opened else None
            if over:
                known.silly = None
        if over:
            with self.opened(over[0], os.O_RDONLY | os.O_DIRECTORY) as here:
                os.unlink(over[1], dir_fd=here)
        return b""

    # Directories
    # ---------------------------------------------------------------------------------------------

    def do_opendir(self, node: int, _data: bytes) -> bytes:
        known = self.known[node]
        listed = known.listed
        if listed is None or time.monotonic() - listed[0] >= self.ac:
            with self.directory(node) as here:
                changed = os.fstat(here).st_mtime_ns
                names = listed[2] if listed and listed[1] == changed else None
                if names is None:
                    found = sorted(os.scandir(here), key=lambda entry: entry.name)
                    names = [
                        (entry.name, entry.inode(), entry.is_dir(follow_symlinks=False))
                        for entry in found
                    ]
                known.listed = (time.monotonic(), changed, names)
        return struct.pack("<QII", 0, 0, 0)

    def do_readdir(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        listed, out = self.known[node].listed, b""
        for place, (text, inode, is_dir) in enumerate(listed[2] if listed else ()):
            name = os.fsencode(text)
            record = struct.pack("<QQII", inode, place + 1, len(name), 4 if is_dir else 8) + name
            record += bytes(-len(record) % 8)
            if place >= offset:
                if len(out) + len(record) > size:
                    break
                out += record
        return out

    do_releasedir = Server.do_flush


if __name__ == "__main__":
    main(NfsServer)
