"""The core and the second reader have the same verdict on every damaged record."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_cipher import Keys, find_open, key_id
from plain_planes import find_zstd
from plain_record import PAGE, Refused, lost_sides, parse_header, verify

_core = pytest.importorskip("ucm._core")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "record-v1"
RECORDS = {path.stem: path.read_bytes() for path in sorted(FIXTURES.glob("*.bin"))}
KEY = bytes(range(32))
OPEN = find_open()
KEYS = None if OPEN is None else Keys({key_id(KEY): KEY}, OPEN)
CORE_KEYS = None if KEYS is None else _core.RecordKeys(KEY.hex())


def by_the_second_reader(data: bytes) -> tuple[str, list[str]]:
    try:
        header = verify(data, zstd=find_zstd(), keys=KEYS)
    except Refused as refused:
        return str(refused.reason), []
    return "", sorted(lost_sides(data, header))


def by_the_core(data: bytes) -> tuple[str, list[str]]:
    whole, reason, _ = _core.verify_record(data, None, b"", None, CORE_KEYS)
    if whole is None:
        return reason, []
    return "", sorted(name for name, _, _ in whole["lost_sides"])


@pytest.mark.parametrize("name", RECORDS)
def test_a_frozen_record(name: str) -> None:
    assert by_the_core(RECORDS[name]) == by_the_second_reader(RECORDS[name])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RECORDS)), st.data())
def test_a_record_with_a_changed_byte_or_another_length(name: str, data: st.DataObject) -> None:
    record = bytearray(RECORDS[name])
    at = data.draw(st.one_of(st.integers(0, 700), st.integers(0, len(record) - 1)), "byte")
    record[min(at, len(record) - 1)] ^= data.draw(st.integers(1, 255), "change")
    end = data.draw(st.integers(0, len(record) + PAGE), "length")
    cut = bytes(record[:end]).ljust(end, b"\0") if data.draw(st.booleans(), "cut") else record
    assert by_the_core(bytes(cut)) == by_the_second_reader(bytes(cut))


def sided() -> list[str]:
    """The records with side shards that the second reader reads."""
    found = []
    for name, record in RECORDS.items():
        with contextlib.suppress(Refused):
            found += [name] if parse_header(record).sides else []
    return found


@pytest.mark.parametrize("name", sided())
def test_a_damaged_side_shard_is_lost_alone(name: str) -> None:
    for side in parse_header(RECORDS[name]).sides:
        record = bytearray(RECORDS[name])
        record[side.offset] ^= 1
        verdict = by_the_core(bytes(record))
        assert verdict == by_the_second_reader(bytes(record))
        assert side.name in verdict[1] or verdict[0], "the damage is seen"


@pytest.mark.parametrize("name", RECORDS)
def test_a_header(name: str) -> None:
    fields, reason, _ = _core.read_header(RECORDS[name])
    try:
        header = parse_header(RECORDS[name])
    except Refused as refused:
        assert (fields, reason) == (None, str(refused.reason))
        return
    assert fields["record_id"] == header.record_id.hex()
    assert fields["block_key"] == header.block_key.hex()
    assert fields["namespace_digest"] == header.namespace.hex()
    assert (fields["stored_bytes"], fields["record_bytes"]) == (
        header.stored_len,
        header.record_len,
    )
    assert fields["time"] == header.time_ns // 10**9
    assert [side["name"] for side in fields["sides"]] == [side.name for side in header.sides]
