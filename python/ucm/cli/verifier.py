"""Reading records of a live root and verifying them: past the page cache where that can be, at a
bounded rate.

A refused record is read a second time, through a fresh open, before anything is said of it. A
record that is gone by then was removed by somebody who may do so, and is no error.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ucm.cli.checksum import Checksum
from ucm.cli.manifest import Manifest
from ucm.cli.remote import AnyRoot, RemoteReader, RemoteRoot
from ucm.cli.roots import Found, Root
from ucm.reasons import MissReason
from ucm.store.cipher import Keys
from ucm.store.planes import Zstd, find_zstd
from ucm.store.record import (
    MAX_RECORD,
    PAGE,
    Crc,
    Expect,
    Header,
    Refused,
    lost_sides,
    parse_header,
    verify,
)
from ucm.store.segment import Entry, Footer, footer_length, parse_footer

#: Bytes of the first read: nearly every record whole, and longer than every header.
FIRST = 8 << 20
#: An entry of a segment that is longer than this is read as far as the header of its record says.
HEADER_FIRST = 1 << 20
#: The file system refuses direct I/O.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Verdict:
    """What a record is: ``good``, ``newer``, ``bad``, ``unreadable`` or ``removed``; why, in words;
    its header.

    ``damaged_sides``: side shards of a good one that are none, with what is wrong with each.
    """

    state: str
    reason: str = ""
    found: str = ""
    header: Header | None = None
    inode: int = 0
    damaged_sides: Mapping[str, str] = field(default_factory=dict)

    @property
    def looks_bad(self) -> bool:
        """Whether something is wrong, so that a second look is due."""
        return self.state in ("bad", "unreadable") or bool(self.damaged_sides)


class Pace:
    """Holds a stream of bytes to a rate (bytes per second, ``None``: no bound); at most a second is
    made up for."""

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

    def read(
        self, found: Found, most: int | None = None, start: int = 0
    ) -> tuple[bytes, os.stat_result]:
        """At most ``most`` bytes from ``start`` (a page) on, and what the file is; raises
        :class:`OSError`."""
        try:
            answer = self._read(found, most, start, os.O_DIRECT)
            self.direct = self.direct is not False
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self.direct = False
            return self._read(found, most, start, 0)
        return answer

    def _read(
        self, found: Found, most: int | None, start: int, how: int
    ) -> tuple[bytes, os.stat_result]:
        with self._root.directory(*found.directory) as here:
            if here is None:
                raise FileNotFoundError(errno.ENOENT, "its directory is gone", found.path)
            fd = os.open(
                found.name,
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how,
                dir_fd=here,
            )
        try:
            about = os.fstat(fd)
            there = max(0, about.st_size - start)
            want = there if most is None else min(most, there)
            room = -(-want // PAGE) * PAGE
            if room > len(self._buffer):
                self._buffer = mmap.mmap(-1, room)
            at = 0
            with memoryview(self._buffer) as view:
                while at < want:
                    count = os.preadv(fd, [view[at:room]], start + at)
                    at += count
                    # the end of the file; direct reads begin at pages only
                    if count == 0 or (how and at % PAGE):
                        break
                self.bytes += min(at, want)
                return bytes(view[: min(at, want)]), about
        finally:
            os.close(fd)


def reader_of(root: AnyRoot) -> Reader | RemoteReader:
    """What reads this root."""
    return RemoteReader(root) if isinstance(root, RemoteRoot) else Reader(root)


class RecordVerifier:
    """Verifies the records of one root by the second reader."""

    def __init__(
        self, root: AnyRoot, checksum: Checksum, pace: Pace, keys: Keys | None = None
    ) -> None:
        self.reader = reader_of(root)
        self._checksum = checksum
        self._pace = pace
        #: Decodes records of zstd; None: they are verified by the checksums of what is stored.
        self.zstd: Zstd | None = find_zstd()
        #: Decrypts records; None: encrypted ones are verified by the checksums of what is stored.
        self.keys = keys

    def verify(self, found: Found, manifest: Manifest) -> Verdict:
        """The verdict on a record, after a second look if the first was bad."""
        verdict = self._once(found, manifest)
        return self._once(found, manifest) if verdict.looks_bad else verdict

    def _once(self, found: Found, manifest: Manifest) -> Verdict:
        self._pace.spend(found.size)
        inode, header = 0, None
        try:
            data, about = self.reader.read(found, FIRST)
            inode = about.st_ino
            # A file that was swapped for a huge one is not read further than its header says.
            header = parse_header(data, self._checksum.of)
            if about.st_size > len(data):
                data, about = self.reader.read(found, most_to_read(header))
                inode = about.st_ino
            expect = Expect(
                bytes.fromhex(found.name[:32]),
                bytes.fromhex(found.namespace),
                shape=manifest.shapes.get(header.part),
            )
            return self._good(data, expect, inode)
        except (FileNotFoundError, NotADirectoryError):
            return Verdict("removed")
        except OSError as error:
            return Verdict("unreadable", "io_error", error.strerror or str(error), inode=inode)
        except Refused as refused:
            state = "newer" if refused.reason is MissReason.NEWER_VERSION else "bad"
            return Verdict(state, str(refused.reason), refused.found, header, inode)

    def _good(self, data: bytes, expect: Expect, inode: int = 0) -> Verdict:
        """The verdict on a record that is sound; raises :class:`~ucm.store.record.Refused` for
        another."""
        header = verify(data, expect, self._checksum.of, self.zstd, self.keys)
        lost = lost_sides(data, header, self._checksum.of).items()
        damaged = {name: why.found for name, why in lost if why.reason is not MissReason.ABSENT}
        return Verdict("good", header=header, inode=inode, damaged_sides=damaged)

    def footer(self, found: Found) -> Footer:
        """The footer of a segment, after a second look if the first was bad.

        Raises :class:`~ucm.store.record.Refused` or :class:`OSError`.
        """
        try:
            return read_footer(self.reader, found, self._checksum.of)
        except Refused:
            return read_footer(self.reader, found, self._checksum.of)

    def verify_entry(self, found: Found, entry: Entry, manifest: Manifest) -> Verdict:
        """The verdict on a record of a segment, after a second look if the first was bad."""
        verdict = self._entry_once(found, entry, manifest)
        return self._entry_once(found, entry, manifest) if verdict.looks_bad else verdict

    def _entry_once(self, found: Found, entry: Entry, manifest: Manifest) -> Verdict:
        header = None
        try:
            data = self._read_entry(found, entry.length, entry.offset)
            header = parse_header(data, self._checksum.of)
            namespace = bytes.fromhex(found.namespace)
            expect = Expect(entry.record_id, namespace, shape=manifest.shapes.get(header.part))
            return self._good(data, expect)
        except (FileNotFoundError, NotADirectoryError):
            return Verdict("removed")
        except OSError as error:
            return Verdict("unreadable", "io_error", error.strerror or str(error))
        except Refused as refused:
            state = "newer" if refused.reason is MissReason.NEWER_VERSION else "bad"
            return Verdict(state, str(refused.reason), refused.found, header)

    def _read_entry(self, found: Found, length: int, offset: int) -> bytes:
        """The record at a place; a long one as far as its header says, and a page more."""
        if length > HEADER_FIRST:
            data = self._read(found, HEADER_FIRST, offset)
            length = min(length, most_to_read(parse_header(data, self._checksum.of)))
            if length <= len(data):
                return data[:length]
        return self._read(found, length, offset)

    def _read(self, found: Found, most: int, start: int) -> bytes:
        self._pace.spend(most)
        return self.reader.read(found, most, start)[0]


def most_to_read(header: Header) -> int:
    """Bytes by which a record is known to be as long as its header says: those, and a page. Raises
    :class:`~ucm.store.record.Refused` where no record can be as long."""
    if header.record_len > MAX_RECORD:
        raise Refused(
            MissReason.BAD_HEADER, f"a record of {header.record_len} bytes, more than {MAX_RECORD}"
        )
    return header.record_len + PAGE


def read_footer(reader: Reader | RemoteReader, found: Found, crc: Crc) -> Footer:
    """The footer of a segment; raises :class:`~ucm.store.record.Refused` or :class:`OSError`."""
    tail, about = reader.read(found, PAGE, max(0, found.size - 1) // PAGE * PAGE)
    length = footer_length(tail, about.st_size, crc)
    footer, about = reader.read(found, length, about.st_size - length)
    parsed = parse_footer(footer, about.st_size, crc)
    if parsed.namespace[:16].hex() != found.namespace:
        raise Refused(MissReason.FOREIGN_IDENTITY, f"identity {parsed.namespace.hex()}")
    if parsed.name != found.name:
        raise Refused(MissReason.FOREIGN_ID, f"segment {parsed.name}")
    return parsed
