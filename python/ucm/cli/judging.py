"""Reading records of a live root and judging them: past the page cache where that can be, at a bounded rate.

A refused record is read a second time, through a fresh open, before anything is said of it. A record that is gone by
then was removed by somebody who may do so, and is no error.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from ucm.cli.checksum import Checksum
from ucm.cli.manifest import Manifest
from ucm.cli.roots import Found, Root
from ucm.reasons import MissReason
from ucm.store.record import PAGE, Expect, Header, Refused, parse_header, verify

#: Bytes of the first read: nearly every record whole, and longer than every header.
FIRST = 8 << 20
#: The file system refuses direct I/O.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Verdict:
    """What a record is: ``good``, ``newer``, ``bad``, ``unreadable`` or ``removed``; why, in words; its header."""

    state: str
    reason: str = ""
    found: str = ""
    header: Header | None = None
    inode: int = 0


class Pace:
    """Holds a stream of bytes to a rate (bytes per second, ``None``: no bound); at most a second is made up for."""

    def __init__(
        self,
        rate: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free = clock()

    def spend(self, count: int) -> None:
        """Waits until ``count`` more bytes may be read."""
        if self._rate is None:
            return
        now = self._clock()
        self._free = max(self._free, now - 1.0)
        if self._free > now:
            self._sleep(self._free - now)
        self._free += count / self._rate


class Reader:
    """Reads files of a root into one buffer, with direct I/O where the file system has it."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._buffer = mmap.mmap(-1, FIRST)
        #: Whether reads went past the page cache; ``None`` before the first.
        self.direct: bool | None = None
        #: Bytes read so far.
        self.bytes = 0

    def read(self, found: Found, most: int | None = None) -> tuple[bytes, os.stat_result]:
        """The file's first ``most`` bytes, or all, and what it is; raises :class:`OSError`."""
        try:
            answer = self._read(found, most, os.O_DIRECT)
            self.direct = self.direct is not False
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self.direct = False
            return self._read(found, most, 0)
        return answer

    def _read(self, found: Found, most: int | None, how: int) -> tuple[bytes, os.stat_result]:
        with self._root.directory(*found.directory) as here:
            if here is None:
                raise FileNotFoundError(errno.ENOENT, "its directory is gone", found.path)
            fd = os.open(found.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how, dir_fd=here)
        try:
            about = os.fstat(fd)
            want = about.st_size if most is None else min(most, about.st_size)
            room = -(-want // PAGE) * PAGE
            if room > len(self._buffer):
                self._buffer = mmap.mmap(-1, room)
            at = 0
            with memoryview(self._buffer) as view:
                while at < want:
                    count = os.preadv(fd, [view[at:room]], at)
                    at += count
                    if count == 0 or (how and at % PAGE):  # the end of the file; direct reads begin at pages only
                        break
                self.bytes += min(at, want)
                return bytes(view[: min(at, want)]), about
        finally:
            os.close(fd)


class Judge:
    """Judges the records of one root by the second reader."""

    def __init__(self, root: Root, checksum: Checksum, pace: Pace) -> None:
        self.reader = Reader(root)
        self._checksum = checksum
        self._pace = pace

    def judge(self, found: Found, manifest: Manifest) -> Verdict:
        """The verdict on a record, after a second look if the first was bad."""
        verdict = self._once(found, manifest)
        return self._once(found, manifest) if verdict.state in ("bad", "unreadable") else verdict

    def _once(self, found: Found, manifest: Manifest) -> Verdict:
        self._pace.spend(found.size)
        inode, header = 0, None
        try:
            data, about = self.reader.read(found, FIRST)
            inode = about.st_ino
            # A file that was swapped for a huge one is not read further than its header says.
            header = parse_header(data, self._checksum.of)
            if about.st_size > len(data):
                data, about = self.reader.read(found, header.record_len + PAGE)
                inode = about.st_ino
            expect = Expect(
                bytes.fromhex(found.name[:32]), bytes.fromhex(found.namespace), shape=manifest.shapes.get(header.part)
            )
            return Verdict("good", header=verify(data, expect, self._checksum.of), inode=inode)
        except (FileNotFoundError, NotADirectoryError):
            return Verdict("removed")
        except OSError as error:
            return Verdict("unreadable", "io_error", error.strerror or str(error), inode=inode)
        except Refused as refused:
            state = "newer" if refused.reason is MissReason.NEWER_VERSION else "bad"
            return Verdict(state, str(refused.reason), refused.found, header, inode)
