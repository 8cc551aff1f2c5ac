"""``docs/format-segment.md``: the frozen segment, and the second reader's verdicts on
damage."""

from __future__ import annotations

import struct
from pathlib import Path

import plain_record as record
import plain_segment as segment
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_record import PAGE, Expect, Part, Refused, crc32c

from ucm.reasons import MissReason

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
WHOLE = (FIXTURES / "segment-v1" / "whole.seg").read_bytes()
NEWER = (FIXTURES / "segment-v1" / "newer.seg").read_bytes()


def sealed(file: bytes, version: int | None = None, **fields: tuple[int, str, int]) -> bytes:
    """The file with changed fields of its trailer (offset, format, value) and a corrected
    checksum."""
    data = bytearray(file)
    at = len(data) - segment.TRAILER_LEN
    for offset, form, value in fields.values():
        struct.pack_into(form, data, at + offset, value)
    if version is not None:
        struct.pack_into("<I", data, at + 4, version)
    struct.pack_into("<I", data, at + 124, crc32c(bytes(data[at : at + 124])))
    return bytes(data)


def test_the_frozen_segment_says_where_its_records_lie() -> None:
    footer = segment.parse_footer(WHOLE, len(WHOLE))
    assert footer.name == f"{0xABC:016x}-{3:016x}.seg"
    assert (footer.namespace, footer.part, footer.time_ns) == (b"\7" * 32, Part(1, 2, 3), 99)
    assert footer.length == segment.footer_length(WHOLE[-PAGE:], len(WHOLE))
    assert [entry.offset for entry in footer.entries] == [
        PAGE,
        PAGE + footer.entries[0].length + PAGE,
    ]
    for entry, name in zip(footer.entries, ("plain", "sided"), strict=True):
        data = WHOLE[entry.offset : entry.offset + entry.length]
        assert data == (FIXTURES / "record-v1" / f"{name}.bin").read_bytes()
        assert record.verify(data, Expect(entry.record_id)).record_id == entry.record_id


def test_a_newer_segment_is_told_from_damage() -> None:
    for file in (NEWER, sealed(WHOLE, version=7), sealed(WHOLE, flags=(100, "<I", 1))):
        with pytest.raises(Refused) as refused:
            segment.parse_footer(file, len(file))
        assert refused.value.reason is MissReason.NEWER_VERSION


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (WHOLE[-100:], MissReason.TRUNCATED),
        (WHOLE[:-PAGE], MissReason.NOT_A_RECORD),
        (WHOLE + bytes(PAGE), MissReason.NOT_A_RECORD),
        (sealed(WHOLE, version=0), MissReason.BAD_HEADER),
        (sealed(WHOLE, start=(8, "<Q", 100)), MissReason.BAD_HEADER),
        (sealed(WHOLE, start=(8, "<Q", 3 * PAGE)), MissReason.WRONG_LENGTH),
        (sealed(WHOLE, count=(24, "<I", 1 << 30)), MissReason.BAD_HEADER),
        (sealed(WHOLE, count=(24, "<I", len(WHOLE) // PAGE)), MissReason.BAD_HEADER),
        (sealed(WHOLE, size=(28, "<I", 24)), MissReason.BAD_HEADER),
        (sealed(WHOLE, entries=(104, "<I", 0)), MissReason.BAD_CHECKSUM),
    ],
)
def test_a_footer_that_contradicts_itself_is_refused(file: bytes, reason: MissReason) -> None:
    with pytest.raises(Refused) as refused:
        segment.parse_footer(file, len(file))
    assert refused.value.reason is reason


def test_an_entry_outside_the_records_is_refused() -> None:
    start = segment.parse_footer(WHOLE, len(WHOLE)).start
    for offset, length in ((0, PAGE), (PAGE, 0), (PAGE + 1, PAGE), (PAGE, start), (2**63, PAGE)):
        data = bytearray(WHOLE)
        struct.pack_into("<QQ", data, start + 16, offset, length)
        crc = crc32c(bytes(data[start : len(data) - segment.TRAILER_LEN]))
        file = sealed(bytes(data), entries=(104, "<I", crc))
        with pytest.raises(Refused) as refused:
            segment.parse_footer(file, len(file))
        assert refused.value.reason is MissReason.BAD_HEADER


def test_entries_that_overlap_or_are_longer_than_any_record_are_refused() -> None:
    footer = segment.parse_footer(WHOLE, len(WHOLE))
    first, second = footer.entries
    at = first.offset
    for offset, length in ((at, first.length), (at + first.length - PAGE, 2 * PAGE), (at, PAGE)):
        data = bytearray(WHOLE)
        struct.pack_into("<QQ", data, footer.start + segment.ENTRY_LEN + 16, offset, length)
        crc = crc32c(bytes(data[footer.start : len(data) - segment.TRAILER_LEN]))
        file = sealed(bytes(data), entries=(104, "<I", crc))
        with pytest.raises(Refused) as refused:
            segment.parse_footer(file, len(file))
        assert refused.value.reason is MissReason.BAD_HEADER
    far = 4 << 30  # a sparse file, of which only the end is read
    end = bytearray(WHOLE[footer.start :])
    struct.pack_into("<Q", end, segment.ENTRY_LEN + 24, record.MAX_RECORD + PAGE)
    crc = crc32c(bytes(end[: len(end) - segment.TRAILER_LEN]))
    file = sealed(bytes(end), entries=(104, "<I", crc), start=(8, "<Q", far))
    with pytest.raises(
        Refused, match=f"an entry of {record.MAX_RECORD + PAGE} bytes at {second.offset}"
    ):
        segment.parse_footer(file, far + len(file))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, PAGE * 8 - 1))
def test_every_flipped_bit_of_a_footer_is_seen(bit: int) -> None:
    data = bytearray(WHOLE)
    data[len(data) - PAGE + bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(Refused):
        segment.parse_footer(bytes(data), len(data))
