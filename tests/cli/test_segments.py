"""Roots with segments: records are counted and verified one by one, segments are removed whole."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_segment as segment
import pytest
from cli_damage import flip
from cli_roots import RECORD, Written
from click.testing import Result
from plain_record import PAGE, crc32c

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]


@pytest.fixture
def segments(root: Written) -> Written:
    # A segment sealed by a wait, when all four are in it, and not by its age.
    return root.fill("one", 4, layout="segment", segment_age=60).fill("two", 2)


def file_of(root: Written) -> Path:
    (file,) = root.path.glob("*/segments/*.seg")
    return file


def test_records_in_segments_are_counted_and_good(
    segments: Written, ucm: Run, ucm_json: Json
) -> None:
    document = ucm_json("inspect", segments.path)["roots"][0]
    assert (document["segments"], document["segment_records"], document["records"]) == (1, 4, 2)
    assert document["segment_bytes"] == file_of(segments).stat().st_size == 4096 + 4 * RECORD + 4096
    assert document["used_bytes"] == document["segment_bytes"] + 2 * RECORD
    assert (document["foreign"], document["private"]) == (0, 0)
    spaces = {space["segments"]: space for space in document["namespaces"]}
    assert [(spaces[n]["records"], sum(spaces[n]["parts_present"].values())) for n in (0, 1)] == [
        (2, 2),
        (4, 4),
    ]
    assert (spaces[0]["bytes"], spaces[1]["bytes"]) == (2 * RECORD, document["segment_bytes"])
    shown = ucm("inspect", segments.path).stdout
    assert "4 records in them" in shown
    (row,) = [
        line
        for line in shown.splitlines()
        if line.strip().startswith(spaces[1]["namespace"]) and "g0p0t0" in line
    ]
    assert row.split()[1] == "4"
    document = ucm_json("verify", segments.path)
    assert (document["exit"], document["good"], document["records"], document["segments"]) == (
        0,
        6,
        6,
        1,
    )


def test_damage_in_a_segment_is_named(segments: Written, ucm_json: Json) -> None:
    file = file_of(segments)
    footer = segment.parse_footer(file.read_bytes(), file.stat().st_size)
    flip(footer.entries[2].offset + 5000)(file)
    before = file.read_bytes()
    document = ucm_json("verify", segments.path)
    assert (document["exit"], document["good"], document["bad"]) == (1, 5, 1)
    (bad,) = document["bad_records"]
    assert bad["path"] == f"{file.relative_to(segments.path)}@{footer.entries[2].offset}"
    assert (bad["reason"], file.read_bytes() == before) == ("bad_checksum", True)


def test_a_damaged_footer_is_one_finding(segments: Written, ucm_json: Json) -> None:
    file = file_of(segments)
    flip(file.stat().st_size - 10)(file)
    document = ucm_json("verify", segments.path)
    assert (document["exit"], document["good"], document["bad"]) == (1, 2, 1)
    assert document["reasons"] == {"bad_header": 1}
    (space,) = (
        space
        for space in ucm_json("inspect", segments.path)["roots"][0]["namespaces"]
        if space["segments"]
    )
    assert (space["segment_records"], space["footers_refused"]) == (0, {"bad_header": 1})


def test_segments_go_whole(segments: Written, ucm_json: Json) -> None:
    name = segments.namespace("one")
    document = ucm_json("gc", segments.path, "--namespace", name)
    (space,) = document["namespaces"]
    assert (space["segments"], space["records"], space["segments_left"]) == (1, 0, 0)
    assert file_of(segments).exists()
    ucm_json("gc", segments.path, "--namespace", name, "--yes")
    assert not (segments.path / name).exists()
    assert len(segments.records()) == 2


def test_gc_shows_the_segments_that_remain(segments: Written, ucm: Run) -> None:
    segments.fill("one", 2)  # two records with files of their own, beside the segment
    os.utime(file_of(segments))
    shown = ucm("gc", segments.path, "--older-than", "1h").stdout
    rows = {line.split()[0]: line for line in shown.splitlines() if " ago " in line}
    assert set(rows) == {segments.namespace(name) for name in ("one", "two")}
    assert rows[segments.namespace("one")].endswith("1 segment")
    assert rows[segments.namespace("two")].endswith("nothing")


def test_what_the_store_reads_back(segments: Written) -> None:
    with segments.open("one", layout="segment") as store:
        ids = [bytes([n * 37 % 256]) * 8 + n.to_bytes(8, "little") for n in range(5)]
        assert store.lookup(ids) == [True] * 4 + [False]
    with segments.open("one") as store:
        assert store.lookup(ids) == [False] * 5, "a store reads its own layout only"


def lying(file: Path, places: list[tuple[int, int]], start: int) -> int:
    """Gives the file a footer at ``start`` with these places (offset, length); its bytes on
    disk."""
    with open(file, "rb") as whole:
        whole.seek(-segment.TRAILER_LEN, os.SEEK_END)
        trailer = bytearray(whole.read())
    listed = b"".join(
        struct.pack("<16sQQ", bytes([n % 256]) * 16, *place) for n, place in enumerate(places)
    )
    length = -(-(len(listed) + segment.TRAILER_LEN) // PAGE) * PAGE
    listed = listed.ljust(length - segment.TRAILER_LEN, b"\0")
    struct.pack_into("<QQII", trailer, 8, start, length, len(places), segment.ENTRY_LEN)
    struct.pack_into("<I", trailer, 104, crc32c(listed))
    struct.pack_into("<I", trailer, 124, crc32c(bytes(trailer[:124])))
    with open(file, "r+b") as out:
        out.truncate(start)
        out.seek(start)
        out.write(listed + trailer)
    return file.stat().st_blocks * 512


def test_a_footer_that_lies_has_little_read(segments: Written, ucm_json: Json) -> None:
    """A sparse file of few bytes on disk: entries that overlap are refused before a record is read,
    and a long entry over a hole is no record by its first bytes."""
    file = file_of(segments)
    start = 2 << 30
    over = [(PAGE, 1 << 20)] * 2000
    assert lying(file, over, start) < 1 << 20
    document = ucm_json("verify", segments.path)
    assert document["reasons"] == {"bad_header": 1}
    assert document["bytes_read"] < 4 << 20
    beside = [((256 << 20) + n * (512 << 20), 512 << 20) for n in range(3)]
    assert lying(file, beside, start) < 1 << 20
    document = ucm_json("verify", segments.path)
    assert document["reasons"] == {"not_a_record": 3}
    assert document["bytes_read"] < 16 << 20
