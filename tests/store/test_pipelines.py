"""Stores with several stages, and the other names of the one engine, through the public
interface."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocks import BLOCK, PIECES, SHAPE, Memory, ids, record_files

from ucm.config import load
from ucm.errors import ClosedError, ConfigError, InvalidInputError, TaskError
from ucm.store import UcmConnectorFactoryV1
from ucm.store.posix import UcmPosixStore
from ucm.store.ucmstore_v1 import NOWHERE

Open = Callable[..., UcmPosixStore]


@pytest.fixture
def opened(common: dict[str, Any], tmp_path: Path, open_store: Open) -> Open:
    """Opens stores by name."""

    def make(name: str, **keys: Any) -> UcmPosixStore:
        config = {**common, **SHAPE, "identity": str(tmp_path), **keys}
        if name == "UcmCacheStore" or any(
            isinstance(stage, dict) for stage in keys.get("store_pipeline", ())
        ):
            del config["storage_backends"]
        return open_store(name, config)

    return make


def dump(store: UcmPosixStore, count: int) -> Memory:
    source = Memory(count)
    store.wait(store.dump_data(ids(count), [0] * count, source.rows(*range(count))))
    return source


def check_load(store: UcmPosixStore, source: Memory, count: int) -> None:
    target = Memory(count, fill=0)
    store.wait(store.load_data(ids(count), [0] * count, target.rows(*range(count))))
    assert all(source.equals(target, block) for block in range(count))


def comes_up(store: UcmPosixStore, count: int) -> None:
    """Returns when this number of blocks is in the top tier: a load does not wait for its copies
    there."""
    pause = threading.Event()
    for _ in range(12_000):
        if not any(store.locate_on_prefix(ids(count))[0]):
            return
        pause.wait(0.01)
    raise AssertionError(f"they never came up: {store.stats()}")


def tiers(store: UcmPosixStore) -> dict[str, dict[str, Any]]:
    found = {tier["name"]: tier for tier in store.stats()["tiers"]}
    assert len(found) == len(store.stats()["tiers"]), "every tier has a name of its own"
    return found


def test_cache_above_a_directory(opened: Open, tmp_path: Path) -> None:
    store = opened("UcmPipelineStore", store_pipeline="Cache|Posix", cache_size="1MiB")
    source = dump(store, 5)
    assert store.lookup([*ids(5), b"x" * 16]) == [True] * 5 + [False]
    check_load(store, source, 5)
    of = tiers(store)
    assert (of["memory"]["blocks_read"], of["posix"]["blocks_read"]) == (5, 0)
    assert of["posix"]["blocks_written"] == len(record_files(tmp_path / "root")) == 5
    assert of["memory"]["capacity_bytes"] > 0
    assert of["posix"]["capacity_bytes"] == 1 << 30
    store.close()
    # A store without memory reads the same directory, and vice versa.
    check_load(opened("UcmPosixStore"), source, 5)
    second = opened("UcmPipelineStore", store_pipeline="Cache|Posix", cache_size="1MiB")
    check_load(second, source, 5)
    comes_up(second, 5)
    for _ in range(12_000):  # a block can be seen above before it is counted
        if tiers(second)["memory"]["promotions"] == 5:
            break
        threading.Event().wait(0.01)
    assert tiers(second)["memory"]["promotions"] == 5


def test_two_directories_and_memory(opened: Open, tmp_path: Path) -> None:
    stages = [
        "cache",
        {"type": "posix", "path": str(tmp_path / "a")},
        {"type": "posix", "path": str(tmp_path / "b")},
    ]
    store = opened("UcmPipelineStore", store_pipeline=stages)
    source = dump(store, 3)
    assert set(tiers(store)) == {"memory", "posix", "posix2"}
    check_load(store, source, 3)
    store.close()
    assert len(record_files(tmp_path / "b")) == 3, "a block in the lowest tier is published"


def test_prefetch_through_the_interface(opened: Open) -> None:
    keys: dict[str, Any] = {"store_pipeline": "Cache|Posix", "cache_size": "1MiB"}
    first = opened("UcmPipelineStore", **keys)
    source = dump(first, 4)
    first.close()
    store = opened("UcmPipelineStore", **keys)
    assert store.prefetch(ids(4), "next_batch") == 4
    check_load(store, source, 4)
    assert store.cancel_prefetch(ids(4)) == 0
    with pytest.raises(InvalidInputError, match="no such priority"):
        store.prefetch(ids(1), "soon")  # type: ignore[arg-type]
    assert opened("UcmPosixStore").prefetch(ids(4)) == 0, "no upper tier for them"


def test_a_lookup_tells_where_blocks_are_and_a_load_where_they_came_from(opened: Open) -> None:
    keys: dict[str, Any] = {"store_pipeline": "Cache|Posix", "cache_size": "1MiB"}
    first = opened("UcmPipelineStore", **keys)
    assert (first.tier_names, first.has_own_memory) == (("memory", "posix"), True)
    assert first.tier_media == ("host", "disk")
    source = dump(first, 4)
    assert first.locate_on_prefix([*ids(4), b"x" * 16]) == (bytes(4), "absent")
    first.close()
    store = opened("UcmPipelineStore", **keys)
    check_load(store, source, 2)
    comes_up(store, 2)
    assert store.locate_on_prefix(ids(4)) == (bytes([0, 0, 1, 1]), "absent")
    # As reported by a scheduler's store, which has no memory of its own.
    scheduler = opened("UcmPipelineStore", **keys, device_id=-1)
    assert scheduler.locate_on_prefix(ids(4)) == (bytes([0, 0, 1, 1]), "absent")
    target = Memory(4, fill=0)
    task = store.load_data(ids(4), [0] * 4, target.rows(*range(4)))
    store.wait(task)
    assert list(store.served(task)) == [2, 2]
    comes_up(store, 4)
    assert 0 < store.prefetch_room() <= (1 << 20) // BLOCK // 8
    alone = opened("UcmPosixStore")
    assert (alone.tier_names, alone.has_own_memory, alone.prefetch_room()) == ((), False, 0)
    assert alone.tier_media == ("disk",)
    assert alone.locate_on_prefix(ids(4)) == (bytes(4), "absent")
    alone.touch_own(ids(4))


def test_blocks_told_to_be_in_use_stay_in_memory(opened: Open) -> None:
    store = opened("UcmPipelineStore", store_pipeline="Cache|Posix", cache_size="1MiB")
    memory, _ = store.stats()["tiers"]
    room = memory["capacity_bytes"] // store.record_len
    source = Memory(room + 4)
    for block in range(room):
        store.wait(store.dump_data([ids(room)[block]], [0], source.rows(block)))
    used = ids(room)[:4]
    store.touch_own(used)
    for block in range(room, room + 4):
        store.wait(store.dump_data([ids(room + 4)[block]], [0], source.rows(block)))
    tiers = [store.locate_on_prefix([block])[0] for block in ids(room + 4)]
    assert tiers[:4] == [b"\0"] * 4, "in use"
    assert tiers[4:8] == [b"\1"] * 4, "the oldest of the others went"
    assert tiers[8:] == [b"\0"] * (room - 4)


@pytest.mark.parametrize("name", ["UcmCacheStore", "UcmPipelineStore"])
def test_memory_alone(opened: Open, name: str) -> None:
    if name == "UcmPipelineStore":
        store = opened(
            "UcmPipelineStore", store_pipeline=[{"type": "cache", "cache_size": "1MiB"}, "empty"]
        )
    else:
        store = opened(name, cache_size="1MiB")
    source = dump(store, 3)
    check_load(store, source, 3)
    assert set(tiers(store)) == {"memory"}
    scheduler = opened(name, cache_size="1MiB", device_id=-1) if name == "UcmCacheStore" else store
    assert scheduler.lookup_on_prefix(ids(4)) == 2, (
        "a lookup-only store finds the memory of the others"
    )


def test_what_is_written_back_goes_down_at_the_end(opened: Open, tmp_path: Path) -> None:
    root = tmp_path / "back"
    stages = ["cache", {"type": "posix", "path": str(root), "write_policy": "back"}]
    store = opened("UcmPipelineStore", store_pipeline=stages)
    source = dump(store, 4)
    assert record_files(root) == []
    store.close()
    assert len(record_files(root)) == 4
    check_load(opened("UcmPosixStore", storage_backends=str(root)), source, 4)


@pytest.mark.parametrize(
    "written",
    [
        {"store_pipeline": "Cache|Posix", "cache_size": "2MiB"},
        {"store_pipeline": "Cache|Empty", "size_gb": 0.01},
        {"store_pipeline": "Cache|Pc", "segment_age": 0},
        {"store_pipeline": "Cache|Compress|Pc", "segment_age": 0},
        {"storage_backend": "pc", "segment_age": 0},
        {"ucm_connector_name": "UcmNfsStore"},
        {
            "pipeline": "Cache|Posix",
            "posix": {"write_policy": "back", "file_mode": "0660"},
            "expire_after": "2d",
        },
    ],
)
def test_what_a_configuration_says_opens(
    common: dict[str, Any], tmp_path: Path, written: dict[str, Any]
) -> None:
    """As in the connector: a checked configuration, then the sizes of the engine."""
    root = {"path": common["storage_backends"], "free_space_floor": 0}
    root = {} if "Empty" in written.get("store_pipeline", "") else root
    config = load(written | root | {"storage_capacity": "1GiB", "namespace_quota": "50%"}, {})
    shape = {
        "tensor_size_list": PIECES,
        "shard_size": BLOCK,
        "block_size": BLOCK,
        "identity": str(tmp_path),
    }
    deadlines = {"deadlines": common["deadlines"]}
    with UcmConnectorFactoryV1.create_connector(
        config.ucm_connector_name,
        config.store_config() | shape | deadlines,
        config.ucm_connector_module_path,
    ) as store:
        assert isinstance(store, UcmPosixStore)
        check_load(store, dump(store, 3), 3)


def test_nfs_is_another_name(opened: Open) -> None:
    source = dump(opened("UcmNfsStore"), 2)
    check_load(opened("UcmPosixStore"), source, 2)


def test_a_missing_block_fails_a_load_as_ever(opened: Open) -> None:
    store = opened("UcmPipelineStore", store_pipeline="Cache|Posix", cache_size="1MiB")
    with pytest.raises(TaskError, match="rows of the load failed"):
        store.wait(store.load_data(ids(1), [0], Memory(1, fill=0).rows(0)))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "needs store_pipeline"),
        ({"store_pipeline": "Posix|Cache"}, "write it first"),
        ({"store_pipeline": "Cache|Posix", "cache_sise": 1}, 'did you mean "cache_size"'),
        ({"store_pipeline": "Cache|Posix", "cache_size": "64EiB"}, "cache_size"),
        ({"store_pipeline": "Cache|Posix", "cache_size": "1000TiB"}, "cache_size"),
    ],
)
def test_refusals(opened: Open, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened("UcmPipelineStore", **keys)


@pytest.mark.parametrize(
    ("name", "keys", "at_once"),
    [
        ("UcmPosixStore", {"layout": "file"}, False),
        ("UcmPosixStore", {"layout": "segment"}, True),
        ("UcmPipelineStore", {"store_pipeline": "Cache|Posix", "layout": "segment"}, True),
        ("UcmPipelineStore", {"store_pipeline": "Cache|Posix", "layout": "file"}, False),
    ],
)
def test_whether_lookups_are_answered_from_memory(
    opened: Open, name: str, keys: dict[str, Any], at_once: bool
) -> None:
    assert opened(name, **keys).answers_at_once is at_once


@pytest.mark.parametrize("layout", ["file", "segment"])
def test_a_lookup_on_a_thread_of_the_store_says_the_same(opened: Open, layout: str) -> None:
    store = opened("UcmPipelineStore", store_pipeline="Cache|Posix", layout=layout)
    dump(store, 4)
    asked = ids(6)
    for block_ids in (asked, asked[:4], asked[4:], []):
        begun = store.begin_locate_on_prefix(block_ids)
        while (answer := begun.answer()) is None:
            threading.Event().wait(0.001)
        assert answer[:2] == store.locate_on_prefix(block_ids)
        assert answer[2] >= 0
    scattered = [asked[5], asked[2], asked[4], asked[2], asked[0]]
    for block_ids, reason in ((scattered, "absent"), (scattered[::2], "absent"), ([], "absent")):
        located = store.locate(block_ids)
        assert list(located) == [0 if block in asked[:4] else NOWHERE for block in block_ids]
        begun = store.begin_locate(block_ids)
        while (answer := begun.answer()) is None:
            threading.Event().wait(0.001)
        assert answer[:2] == (located, reason)
    begun = store.begin_locate_on_prefix(asked)
    store.close()
    with contextlib.suppress(ClosedError):
        while (answer := begun.answer()) is None:
            threading.Event().wait(0.001)  # a thread is about to report
        assert answer[:2] == (bytes(4), "absent")
    for call in (store.begin_locate_on_prefix, store.begin_locate, store.locate):
        with pytest.raises(ClosedError):
            call(asked)
