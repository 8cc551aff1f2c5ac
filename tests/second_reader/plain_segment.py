"""Reads the footer of a segment in plain Python, by the offsets of ``docs/format-segment.md``
alone.

The second reader of the format for segments, beside :mod:`plain_record` for the records in them. A
footer is accepted only as a whole; its records are then verified like any others.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from itertools import pairwise

from plain_record import MAX_RECORD, PAGE, Part, Refused, crc32c

from ucm.reasons import MissReason

HEAD_MAGIC = b"UCMS"
TRAILER_MAGIC = b"UCMF"
VERSION = 1
HEAD_LEN = PAGE
TRAILER_LEN = 128
ENTRY_LEN = 32
MAX_ENTRIES = 1 << 20

#: A segment's file name: its writer's number and that writer's number for it.
NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.seg")


@dataclass(frozen=True)
class Entry:
    """The range of a record in its segment, in bytes."""

    record_id: bytes
    offset: int
    length: int


@dataclass(frozen=True)
class Footer:
    """The content of a segment's footer."""

    start: int
    length: int
    namespace: bytes
    writer: int
    sequence: int
    time_ns: int
    part: Part
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """The file name that the segment must have."""
        return f"{self.writer:016x}-{self.sequence:016x}.seg"


def footer_length(tail: bytes, file_len: int) -> int:
    """Bytes of the footer, by the last bytes of a file of ``file_len``; raises
    :class:`~plain_record.Refused`."""
    return _trailer(tail, file_len)[1]


def parse_footer(footer: bytes, file_len: int) -> Footer:
    """Verifies a whole footer, the last bytes of a file of ``file_len``; raises
    :class:`~plain_record.Refused`."""
    start, length, count = _trailer(footer, file_len)
    if len(footer) < length:
        raise Refused(MissReason.TRUNCATED, f"{len(footer)} bytes of a footer of {length}")
    footer = footer[len(footer) - length :]
    listed, trailer = footer[:-TRAILER_LEN], footer[-TRAILER_LEN:]
    _check(listed, _u32(trailer, 104), MissReason.BAD_CHECKSUM, "entries")
    entries = []
    for at in range(0, count * ENTRY_LEN, ENTRY_LEN):
        entry = Entry(*struct.unpack_from("<16sQQ", listed, at))
        whole = (
            entry.offset % PAGE == 0 and entry.length % PAGE == 0 and 0 < entry.length <= MAX_RECORD
        )
        if not whole or entry.offset < HEAD_LEN or entry.offset + entry.length > start:
            raise Refused(
                MissReason.BAD_HEADER, f"an entry of {entry.length} bytes at {entry.offset}"
            )
        entries.append(entry)
    by_place = sorted(entries, key=lambda entry: entry.offset)
    for before, entry in pairwise(by_place):
        if entry.offset < before.offset + before.length:
            raise Refused(
                MissReason.BAD_HEADER, f"entries at {before.offset} and {entry.offset} overlap"
            )
    return Footer(
        start=start,
        length=length,
        namespace=trailer[32:64],
        writer=_u64(trailer, 64),
        sequence=_u64(trailer, 72),
        time_ns=_u64(trailer, 80),
        part=Part(*struct.unpack_from("<III", trailer, 88)),
        entries=tuple(entries),
    )


def _trailer(tail: bytes, file_len: int) -> tuple[int, int, int]:
    """Start and length of the footer, and how many entries it has."""
    if len(tail) < TRAILER_LEN:
        raise Refused(MissReason.TRUNCATED, f"{len(tail)} bytes")
    trailer = tail[-TRAILER_LEN:]
    if trailer[:4] != TRAILER_MAGIC:
        raise Refused(MissReason.NOT_A_RECORD, f"magic {trailer[:4]!r} of the trailer")
    _check(trailer[:124], _u32(trailer, 124), MissReason.BAD_HEADER, "trailer")
    version, flags = _u32(trailer, 4), _u32(trailer, 100)
    if version == 0:
        raise Refused(MissReason.BAD_HEADER, "version 0")
    if version > VERSION or flags:
        raise Refused(
            MissReason.NEWER_VERSION,
            f"version {version}, flags {flags:#x}, known are {VERSION} and 0",
        )
    start, length = _u64(trailer, 8), _u64(trailer, 16)
    count, size = _u32(trailer, 24), _u32(trailer, 28)
    right = -(-(count * ENTRY_LEN + TRAILER_LEN) // PAGE) * PAGE
    fits = (
        start >= HEAD_LEN
        and start % PAGE == 0
        and count <= min(MAX_ENTRIES, (start - HEAD_LEN) // PAGE)
    )
    if not fits or size != ENTRY_LEN or length != right:
        raise Refused(
            MissReason.BAD_HEADER,
            f"a footer of {length} bytes at {start} with {count} entries of {size}",
        )
    if start + length != file_len:
        raise Refused(
            MissReason.WRONG_LENGTH, f"{file_len} bytes, the trailer says {start + length}"
        )
    return start, length, count


def _check(data: bytes, written: int, reason: MissReason, what: str) -> None:
    if (found := crc32c(data)) != written:
        raise Refused(reason, f"{what}: CRC-32C {found:08x}, written was {written:08x}")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")
