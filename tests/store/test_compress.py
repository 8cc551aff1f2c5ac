"""Stores that compress, through the public interface: the same blocks in less space, and other
stores on their roots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocks import SHAPE, Memory, ids

from ucm.errors import ConfigError, TaskError
from ucm.store.posix import UcmPosixStore

Open = Callable[..., UcmPosixStore]
COUNT = 6


def like_a_model(count: int) -> Memory:
    """Blocks of similar numbers: one of every two bytes hardly changes."""
    memory = Memory(count)
    for pieces in memory.pieces:
        for piece in pieces:
            piece[1::2] &= 3
    return memory


@pytest.fixture
def opened(common: dict[str, Any], open_store: Open) -> Open:
    """Opens stores by their pipelines."""

    def make(pipeline: Any, **keys: Any) -> UcmPosixStore:
        config = {
            **common,
            **SHAPE,
            "dtype": "bfloat16",
            "store_pipeline": pipeline,
            "segment_age": 0,
            **keys,
        }
        return open_store("UcmPipelineStore", config)

    return make


def dump(store: UcmPosixStore, memory: Memory, *blocks: int) -> None:
    names = ids(COUNT)
    store.wait(store.dump_data([names[n] for n in blocks], [0] * len(blocks), memory.rows(*blocks)))


def check_load(store: UcmPosixStore, memory: Memory, *blocks: int) -> None:
    target, names = Memory(COUNT, fill=0), ids(COUNT)
    store.wait(store.load_data([names[n] for n in blocks], [0] * len(blocks), target.rows(*blocks)))
    assert all(memory.equals(target, block) for block in blocks)


def lowest(store: UcmPosixStore) -> dict[str, Any]:
    tier: dict[str, Any] = store.stats()["tiers"][-1]
    return tier


def stored(root: Path) -> int:
    return sum(path.stat().st_size - 2 * 4096 for path in root.rglob("*.seg"))


@pytest.mark.parametrize(
    ("pipeline", "keys"),
    [
        ("Compress|Pc", {}),
        ("Cache|Compress|Pc", {"cache_size": "1MiB"}),
        ("Compress|Posix", {"layout": "segment"}),
        (["cache", {"type": "pc", "codec": "zstd"}], {"cache_size": "1MiB"}),
        (["cache", {"type": "compress"}, "pc"], {"cache_size": "1MiB"}),
    ],
)
def test_the_same_blocks_in_less_room(
    opened: Open, tmp_path: Path, pipeline: Any, keys: dict[str, Any]
) -> None:
    memory, every = like_a_model(COUNT), range(COUNT)
    store = opened(pipeline, **keys)
    dump(store, memory, *every)
    assert store.lookup(ids(COUNT)) == [True] * COUNT
    check_load(store, memory, *every)
    tier = lowest(store)
    assert (tier["name"], tier["blocks_written"]) == ("posix", COUNT)
    assert tier["compression"]["records_compressed"] == COUNT
    store.close()
    assert stored(tmp_path / "root") == tier["compression"]["bytes_stored"]
    assert tier["compression"]["bytes_stored"] * 12 < tier["compression"]["bytes_compressed"] * 10
    later = opened(pipeline, **keys)
    assert later.lookup(ids(COUNT)) == [True] * COUNT
    check_load(later, memory, *every)
    assert lowest(later)["compression"]["records_decompressed"] == COUNT


def test_with_and_without_it_in_turns(opened: Open) -> None:
    memory = like_a_model(COUNT)
    store = opened("Compress|Pc")
    dump(store, memory, 0, 1, 2)
    store.close()
    plain = opened("Pc")
    assert plain.lookup(ids(3)) == [False] * 3, (
        "to a store that does not decompress these are misses"
    )
    with pytest.raises(TaskError):
        check_load(plain, memory, 0)
    assert plain.stats()["misses"]["newer_version"] == 1
    dump(plain, memory, 0, 4, 5)
    check_load(plain, memory, 0, 4, 5)
    plain.close()
    again = opened("Compress|Pc")
    assert again.lookup(ids(COUNT)) == [True, True, True, False, True, True]
    check_load(again, memory, 0, 1, 2, 4, 5)
    assert lowest(again)["compression"]["records_decompressed"] == 2


def test_what_does_not_shrink_is_stored_as_it_is(opened: Open) -> None:
    memory = Memory(COUNT)
    store = opened("Compress|Pc")
    dump(store, memory, 0, 1)
    check_load(store, memory, 0, 1)
    compression = lowest(store)["compression"]
    assert (compression["records_compressed"], compression["records_as_is"]) == (0, 2)
    store.close()
    check_load(opened("Pc"), memory, 0, 1)


def test_a_damaged_byte_is_a_miss_until_the_next_dump(opened: Open, tmp_path: Path) -> None:
    memory = like_a_model(COUNT)
    store = opened("Compress|Pc")
    dump(store, memory, 0)
    store.close()
    (file,) = (tmp_path / "root").rglob("*.seg")
    with file.open("r+b") as segment:
        segment.seek(2 * 4096 + 5000)
        byte = segment.read(1)[0]
        segment.seek(-1, 1)
        segment.write(bytes([byte ^ 1]))
    store = opened("Compress|Pc")
    with pytest.raises(TaskError):
        check_load(store, memory, 0)
    assert store.stats()["misses"]["bad_checksum"] == 1
    assert store.lookup(ids(1)) == [False]
    dump(store, memory, 0)
    check_load(store, memory, 0)


def test_it_is_told_at_the_start_and_a_store_for_lookups_has_no_threads_for_it(
    opened: Open,
) -> None:
    memory = like_a_model(COUNT)
    dump(opened("Compress|Pc"), memory, 0)
    lookups = opened("Compress|Pc", device_id=-1)
    assert lookups.lookup(ids(2)) == [True, False]
    assert "compression" not in lowest(lookups)


def test_over_files_it_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError, match="segments only"):
        opened("Compress|Posix", layout="file")
    with pytest.raises(ConfigError, match="segments only"):
        opened("Posix", layout="file", codec="zstd")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_the_codec_of_a_store_of_one_tier(opened: Open, tmp_path: Path, codec: str) -> None:
    """lz4 of older configurations means zstd."""
    memory, every = like_a_model(COUNT), range(COUNT)
    store = opened("Pc", codec=codec)
    dump(store, memory, *every)
    check_load(store, memory, *every)
    compression = lowest(store)["compression"]
    assert (compression["records_compressed"], compression["records_decompressed"]) == (
        COUNT,
        COUNT,
    )
    store.close()
    assert (
        stored(tmp_path / "root") == compression["bytes_stored"] < compression["bytes_compressed"]
    )
