"""Damage to the footer, the head or the name of a block's segment: each function makes one kind.

A complete but wrong footer is *forged*: its fields are changed and its checksums computed again, by
the offsets of ``docs/format-segment.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from harm import Harm, Victim
from plain_record import crc32c
from plain_segment import ENTRY_LEN, TRAILER_LEN, Footer, parse_footer

#: Changes the bytes of a segment, given its footer and the offset of the victim's entry.
Change = Callable[[bytearray, Footer, int], bytearray | None]


def _edit(victim: Victim, change: Change) -> None:
    data = bytearray(victim.path.read_bytes())
    footer = parse_footer(bytes(data), len(data))
    number = next(
        n for n, entry in enumerate(footer.entries) if entry.record_id == victim.copy.record_id
    )
    changed = change(data, footer, footer.start + number * ENTRY_LEN)
    victim.path.write_bytes(data if changed is None else changed)


def edit(change: Change) -> Harm:
    """Applied directly: checksums are wrong afterwards."""
    return lambda victim: _edit(victim, change)


def forge(change: Change) -> Harm:
    """Applied to a footer whose checksums are then computed again."""

    def sealed(data: bytearray, footer: Footer, entry: int) -> bytearray:
        changed = change(data, footer, entry)
        data = data if changed is None else changed
        trailer = len(data) - TRAILER_LEN
        struct.pack_into("<I", data, trailer + 104, crc32c(bytes(data[footer.start : trailer])))
        struct.pack_into("<I", data, trailer + 124, crc32c(bytes(data[trailer : trailer + 124])))
        return data

    return edit(sealed)


def flip_trailer(data: bytearray, _footer: Footer, _entry: int) -> None:
    """One bit of the start of the footer."""
    data[-TRAILER_LEN + 9] ^= 1


def flip_entry(data: bytearray, _footer: Footer, entry: int) -> None:
    """One bit of the victim's offset."""
    data[entry + 17] ^= 0x10


def flip_head(data: bytearray, _footer: Footer, _entry: int) -> None:
    """One bit of the name of the host."""
    data[170] ^= 1


def no_footer(data: bytearray, footer: Footer, _entry: int) -> bytearray:
    """The records only."""
    return data[: footer.start]


def zeroed_footer(data: bytearray, footer: Footer, _entry: int) -> None:
    """Zeros, as after a lost write."""
    data[footer.start :] = bytes(footer.length)


def newer_version(data: bytearray, _footer: Footer, _entry: int) -> None:
    """A trailer of version 2."""
    struct.pack_into("<I", data, len(data) - TRAILER_LEN + 4, 2)


def another_identity(data: bytearray, _footer: Footer, _entry: int) -> None:
    """The trailer names another model."""
    data[-TRAILER_LEN + 40] ^= 0xFF


def other_place(data: bytearray, _footer: Footer, entry: int) -> None:
    """The victim's entry begins a page into its record, and so is a page shorter."""
    offset, length = struct.unpack_from("<QQ", data, entry + 16)
    struct.pack_into("<QQ", data, entry + 16, offset + 4096, length - 4096)


def another_id(data: bytearray, _footer: Footer, entry: int) -> None:
    """The victim's entry names a block that was never stored; no entry names the victim."""
    data[entry : entry + 16] = bytes(16)


def shorter(data: bytearray, _footer: Footer, entry: int) -> None:
    """The victim's entry is a page shorter than its record."""
    (length,) = struct.unpack_from("<Q", data, entry + 24)
    struct.pack_into("<Q", data, entry + 24, length - 4096)


def renamed(victim: Victim) -> None:
    """The segment under the name of another writer."""
    victim.path.rename(victim.path.with_name("00" * 8 + "-" + "00" * 8 + ".seg"))


def doubled(victim: Victim) -> None:
    """The segment a second time, under the name of another writer."""
    victim.path.with_name("00" * 8 + "-" + "00" * 8 + ".seg").write_bytes(victim.path.read_bytes())
