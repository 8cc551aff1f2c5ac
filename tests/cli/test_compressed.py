"""Roots with compressed records: verified after decoding if there is a decoder, else in their
stored form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plain_segment as segment
import pytest
from blocks import PATIENT, await_room
from cli_damage import flip
from cli_roots import BLOCK, PIECES, Written
from click.testing import Result

from ucm.store.pipeline import UcmPipelineStore

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]


@pytest.fixture
def compressed(root: Written) -> Written:
    config = {
        "store_pipeline": "Compress|Pc",
        "storage_backends": str(root.path),
        "identity": "one",
        "storage_capacity": "64MiB",
        "free_space_floor": 0,
        "staging_capacity": "4MiB",
        "deadlines": PATIENT,
        "tensor_size": sum(PIECES),
        "shard_size": BLOCK,
        "block_size": BLOCK,
        "dtype": "bfloat16",
        "segment_age": 60,  # sealed by the wait, when all three are in it
        "labels": {"model": "/models/one"},
    }
    with UcmPipelineStore(config) as store:
        ids = [bytes([n]) * 16 for n in range(3)]
        data = np.random.default_rng(1).integers(0, 256, (3, BLOCK), dtype=np.uint8)
        data[:2, 1::2] &= 3  # the third does not shrink
        starts = range(0, BLOCK, sum(PIECES))
        rows = np.array(
            [[data[n].ctypes.data + at for at in starts] for n in range(3)], dtype=np.uint64
        )
        await_room(store)
        store.wait(store.dump_data(ids, [0] * 3, rows))
    return root


def footer_of(root: Written) -> tuple[Path, segment.Footer]:
    (file,) = root.path.glob("*/segments/*.seg")
    return file, segment.parse_footer(file.read_bytes(), file.stat().st_size)


def test_they_are_good_and_it_is_told_how_they_were_judged(
    compressed: Written, ucm: Run, ucm_json: Json
) -> None:
    document = ucm_json("verify", compressed.path)
    assert (document["exit"], document["good"], document["bad"], document["newer"]) == (0, 3, 0, 0)
    assert (document["compressed"], document["decoder"]) == (2, "compiled core")
    assert "2 records, decoded" in ucm("verify", compressed.path).stdout


def test_damage_in_one_is_named(compressed: Written, ucm_json: Json) -> None:
    file, footer = footer_of(compressed)
    entry = min(footer.entries, key=lambda entry: entry.length)
    flip(entry.offset + 5000)(file)
    document = ucm_json("verify", compressed.path)
    assert (document["exit"], document["good"], document["reasons"]) == (1, 2, {"bad_checksum": 1})
    assert document["bad_records"][0]["path"].endswith(f"@{entry.offset}")


def test_they_are_counted_and_go_with_their_segment(compressed: Written, ucm_json: Json) -> None:
    file, footer = footer_of(compressed)
    lengths = sorted(entry.length for entry in footer.entries)
    assert lengths[0] < lengths[2]
    document = ucm_json("inspect", compressed.path)["roots"][0]
    assert (document["segments"], document["segment_records"]) == (1, 3)
    assert document["used_bytes"] == file.stat().st_size
    ucm_json("gc", compressed.path, "--namespace", compressed.namespace("one"), "--yes")
    assert not file.exists()


def test_one_on_its_own(compressed: Written, ucm_json: Json, tmp_path: Path) -> None:
    file, footer = footer_of(compressed)
    entry = min(footer.entries, key=lambda entry: entry.length)
    alone = tmp_path / "record.bin"
    alone.write_bytes(file.read_bytes()[entry.offset : entry.offset + entry.length])
    (document,) = ucm_json("inspect", alone)["records"]
    assert (document["verdict"], document["header"]["codec"]) == ("good", "0x201")
    assert document["header"]["stored_bytes"] < document["header"]["kv_bytes"]
