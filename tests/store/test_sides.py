"""Side shards through the public interface: written with a dump or later, read without the KV,
refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from blocks import KV, LAYERS, PIECES, SHAPE, Memory, ids, record_files
from plain_record import read_side, verify_file

from ucm.errors import BusyError, ClosedError, ConfigError, InvalidInputError, UnsupportedError
from ucm.store import SidesTask
from ucm.store.posix import UcmPosixStore
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

Open = Callable[..., UcmPosixStore]
Bytes = npt.NDArray[np.uint8]

SIDES = {"mean-k": 96, "codes": {"bytes": 6000, "version": 2}}
COUNT = 5


def made(count: int = COUNT, shards: int = 1) -> dict[str, Bytes]:
    """Side shards of some blocks: a share for each row of a dump."""
    random = np.random.default_rng(7)
    whole = {
        name: random.integers(0, 256, (count, size), dtype=np.uint8)
        for name, size in sizes().items()
    }
    return {name: side.reshape(count * shards, -1) for name, side in whole.items()}


def sizes() -> dict[str, int]:
    return {"mean-k": 96, "codes": 6000}


@pytest.fixture
def opened(common: dict[str, Any], open_store: Open) -> Open:

    def make(**keys: Any) -> UcmPosixStore:
        name = keys.pop("name", "UcmPosixStore")
        config = {**common, **SHAPE, "sides": SIDES, "segment_age": 0, **keys}
        if name == "UcmCacheStore":
            of_directories = (
                "storage_backends",
                "storage_capacity",
                "free_space_floor",
                "layout",
                "segment_age",
            )
            config = {key: config[key] for key in config if key not in of_directories}
        return open_store(name, config)

    return make


def dump(
    store: UcmPosixStore, memory: Memory, sides: Mapping[str, Bytes] | None, *blocks: int
) -> None:
    names = ids(COUNT)
    chosen = None if sides is None else {name: side[list(blocks)] for name, side in sides.items()}
    rows = memory.rows(*blocks)
    store.wait(store.dump_data([names[n] for n in blocks], [0] * len(blocks), rows, sides=chosen))


def load(store: UcmKVStoreBaseV1, blocks: list[bytes], name: str) -> tuple[Bytes, list[bool]]:
    task = store.load_sides(blocks, name)
    store.wait(task)
    assert task.completed
    data, found = task.result()
    assert data.shape == (len(blocks), sizes()[name])
    return data, found.tolist()


LAYOUTS = [
    {"layout": "file"},
    {"layout": "segment"},
    {"layout": "segment", "codec": "zstd", "dtype": "bfloat16"},
    {
        "name": "UcmPipelineStore",
        "store_pipeline": "Cache|Posix",
        "cache_size": "4MiB",
        "layout": "file",
    },
    {"name": "UcmCacheStore", "cache_size": "4MiB"},
]


@pytest.mark.parametrize(
    "keys", LAYOUTS, ids=["file", "segment", "compressed", "cache over posix", "cache"]
)
def test_they_come_back_with_the_blocks_and_alone(opened: Open, keys: dict[str, Any]) -> None:
    store, memory, sides, blocks = opened(**keys), Memory(COUNT), made(), ids(COUNT)
    assert dict(store.side_sizes) == sizes()
    dump(store, memory, sides, 0, 1, 2)
    dump(store, memory, None, 3)  # without, and then made again
    for name, side in sides.items():
        data, found = load(store, blocks, name)
        assert found == [True, True, True, False, False]
        assert np.array_equal(data[:3], side[:3])
        assert not data[3:].any()
    store.wait(store.dump_sides([blocks[3]], {"codes": sides["codes"][[3]]}))
    assert load(store, blocks, "codes")[1] == [True, True, True, True, False]
    assert np.array_equal(load(store, blocks, "codes")[0][3], sides["codes"][3])
    assert load(store, blocks, "mean-k")[1] == [True, True, True, False, False]
    assert store.lookup(blocks) == [True] * 4 + [False]
    target = Memory(COUNT, fill=0)
    store.wait(store.load_data(blocks[:4], [0] * 4, target.rows(0, 1, 2, 3)))
    assert all(memory.equals(target, block) for block in range(4))


def test_the_second_reader_finds_them_where_the_format_says(opened: Open, tmp_path: Path) -> None:
    store, sides, blocks = opened(layout="file"), made(), ids(COUNT)
    dump(store, Memory(COUNT), sides, 0)
    store.wait(store.dump_sides([blocks[1]], {"codes": sides["codes"][[1]]}))
    headers = {path: verify_file(path) for path in record_files(tmp_path)}
    found = {
        (header.without_kv, header.block_record_id): (path, header)
        for path, header in headers.items()
    }
    path, header = found[False, blocks[0]]
    assert [(side.name, side.version, side.length) for side in header.sides] == [
        ("mean-k", 0, 96),
        ("codes", 2, 6000),
    ]
    for side in header.sides:
        assert read_side(path.read_bytes(), side) == sides[side.name][0].tobytes()
    path, header = found[True, blocks[1]]
    assert read_side(path.read_bytes(), header.sides[0]) == sides["codes"][1].tobytes()
    assert header.record_id == bytes(
        a ^ b for a, b in zip(blocks[1], header.sides[0].mask(), strict=True)
    )


def test_rows_of_layers_bring_their_shares(opened: Open) -> None:
    layer = sum(PIECES)
    store, memory, blocks = opened(shard_size=layer), Memory(COUNT), ids(COUNT)
    shares = made(1, LAYERS)
    rows = [memory.layer_rows(0)[[shard]] for shard in range(LAYERS)]
    tasks = []
    for shard in (2, 0, 1):  # in three calls, in any order
        sides = {name: side[[shard]] for name, side in shares.items()}
        tasks.append(store.dump_data([blocks[0]], [shard], rows[shard], sides=sides))
    for task in tasks:  # any of them may be gathered last
        store.wait(task)
    for name, share in shares.items():
        data, found = load(store, blocks[:1], name)
        assert (found, data[0].tobytes()) == ([True], share.tobytes())


def test_by_number_and_of_any_type(opened: Open) -> None:
    store, kv, blocks = opened(), KV(COUNT), ids(COUNT)
    store.register_kv_tensors(kv.tensors)
    sides = made()
    as_numbers: Mapping[str, npt.NDArray[Any]] = {
        "mean-k": sides["mean-k"].view(np.float32),
        "codes": sides["codes"]
        .view(np.uint64)
        .reshape(COUNT, 5, -1)[:, ::-1],  # no piece of memory as it is
    }
    store.wait(store.dump_blocks(blocks, np.arange(COUNT), sides=as_numbers))
    data, found = load(store, blocks, "mean-k")
    assert all(found)
    assert np.array_equal(data, sides["mean-k"])
    assert load(store, blocks, "codes")[0].tobytes() == as_numbers["codes"].tobytes()


def test_what_is_given_may_change_when_the_call_is_over(opened: Open) -> None:
    store, memory, sides = opened(), Memory(COUNT), made()
    given = {name: side[[0]].copy() for name, side in sides.items()}
    task = store.dump_data(ids(1), [0], memory.rows(0), sides=given)
    for side in given.values():
        side.fill(0)
    store.wait(task)
    assert np.array_equal(load(store, ids(1), "codes")[0], sides["codes"][[0]])


def test_a_prompt_is_selected_from_without_being_read(common: dict[str, Any]) -> None:
    """The bytes read at admission are at most a tenth of the KV, at 256 KiB a block."""
    block, count = 256 << 10, 12
    config = common | {
        "tensor_size": block // 4,
        "shard_size": block,
        "block_size": block,
        "sides": {"mean-k": 4096},
    }
    memory = np.random.default_rng(1).integers(0, 256, (count, 4, block // 4), dtype=np.uint8)
    rows = np.array([[piece.ctypes.data for piece in pieces] for pieces in memory], dtype=np.uint64)
    side = np.random.default_rng(2).integers(0, 256, (count, 4096), dtype=np.uint8)
    for layout in ("file", "segment"):
        keys = config | {"layout": layout, "identity": layout, "staging_capacity": "8MiB"}
        with UcmPosixStore(keys) as store:
            store.wait(store.dump_data(ids(count), [0] * count, rows, sides={"mean-k": side}))
        with UcmPosixStore(keys) as store:
            task = store.load_sides(ids(count), "mean-k")
            store.wait(task)
            data, found = task.result()
            assert found.all()
            assert np.array_equal(data, side)
            (tier,) = store.stats()["tiers"]
            assert (tier["blocks_read"], tier["sides_read"]) == (0, count)
            assert tier["bytes_read"] == count * 2 * 4096 <= count * block // 10


def test_a_damaged_side_shard_is_a_miss_that_says_why(opened: Open, tmp_path: Path) -> None:
    store, memory, sides, blocks = opened(), Memory(COUNT), made(), ids(COUNT)
    dump(store, memory, sides, 0, 1)
    for path in record_files(tmp_path):
        if verify_file(path).record_id == blocks[1]:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    task = store.load_sides(blocks[:3], "codes")
    store.wait(task)
    assert task.result()[1].tolist() == [True, False, False]
    missing = task.missing()
    assert missing.keys() == {1, 2}
    assert (missing[1].kind, missing[2].kind) == ("corrupt", "not_found")
    assert store.lookup(blocks[:2]) == [True, True]
    target = Memory(COUNT, fill=0)
    store.wait(store.load_data(blocks[:2], [0, 0], target.rows(0, 1)))
    assert memory.equals(target, 1)
    counted = store.stats()
    assert (counted["sides_loaded"], counted["sides_missing"], counted["sides_refused"]) == (
        1,
        2,
        1,
    )
    assert counted["records_refused"] == 0


def test_stores_with_and_without_share_a_root(opened: Open) -> None:
    memory, sides, blocks = Memory(COUNT), made(), ids(COUNT)
    for layout in ("file", "segment"):
        dense = opened(layout=layout, identity=layout, sides={})
        sparse = opened(layout=layout, identity=layout)
        assert dense.side_sizes == {}
        dump(dense, memory, None, 0)
        dump(sparse, memory, sides, 1)
        target = Memory(COUNT, fill=0)
        for store, block in ((dense, 1), (sparse, 0)):
            store.wait(store.load_data([blocks[block]], [0], target.rows(block)))
            assert memory.equals(target, block)
        assert load(sparse, blocks[:2], "codes")[1] == [False, True]


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        ({"Mean": 96}, "Mean"),
        ({"a-name-that-is-too-long": 96}, "a-name-that-is-too-long"),
        ({str(n): 1 for n in range(9)}, "at most 8"),
        ({"large": 17 << 20}, "large"),
        ({"nothing": 0}, "nothing"),
        ({"mean-k": {"bytes": 96, "wersion": 1}}, "wersion"),
        ({"mean-k": "many"}, "mean-k"),
    ],
)
def test_sides_that_no_store_can_keep_are_refused_by_name(
    common: dict[str, Any], sides: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, InvalidInputError), match=words):
        UcmPosixStore(common | SHAPE | {"sides": sides})


def test_sides_that_do_not_fit_the_call_are_refused_and_nothing_is_written(opened: Open) -> None:
    store, memory, sides, blocks = opened(), Memory(COUNT), made(), ids(COUNT)
    short = {name: side[:2, :-1] for name, side in sides.items()}
    few = {name: side[:1] for name, side in sides.items()}
    for wrong in (short, few, {"mean-k": sides["mean-k"][:2]}, sides | {"other": sides["codes"]}):
        with pytest.raises(InvalidInputError, match="side"):
            store.dump_data(blocks[:2], [0, 0], memory.rows(0, 1), sides=wrong)
    for wrong in ({"other": sides["codes"]}, {"codes": sides["codes"][:, :10]}):
        with pytest.raises(InvalidInputError, match=r"other|codes"):
            store.dump_sides(blocks, wrong)
    with pytest.raises(InvalidInputError, match=r"other.*mean-k"):
        store.load_sides(blocks, "other")
    assert store.lookup(blocks[:2]) == [False, False]
    task = store.load_sides([], "codes")
    store.wait(task)
    assert [part.shape for part in task.result()] == [(0, 6000), (0,)]
    many = {"mean-k": np.zeros((4096, 96), np.uint8)}
    with pytest.raises(BusyError):
        store.dump_sides(ids(4096), many)
    store.close()
    with pytest.raises(ClosedError):
        store.load_sides(blocks, "codes")


class Plain(UcmKVStoreBaseV1):
    """A user's store without side shards."""

    def lookup(self, block_ids: Any) -> list[bool]:
        return [False] * len(block_ids)

    def load_data(self, block_ids: Any, shard_index: Any, addrs: Any) -> Task:
        return Task()

    def dump_data(
        self, block_ids: Any, shard_index: Any, addrs: Any, prerequisite_handle: int = 0
    ) -> Task:
        return Task()

    def wait(self, task: Any, timeout: Any = None, until: Any = "published") -> None:
        return None


class WithSides(Plain):
    """A user's store with side shards."""

    side_sizes = {"mean-k": 96}  # noqa: RUF012 - as a user writes it

    def __init__(self) -> None:
        super().__init__({})
        self.kept: dict[bytes, Bytes] = {}

    def dump_data(  # type: ignore[override]
        self,
        block_ids: Any,
        shard_index: Any,
        addrs: Any,
        prerequisite_handle: int = 0,
        *,
        sides: Any = None,
    ) -> Task:
        self.kept.update(zip(block_ids, sides["mean-k"], strict=True))
        return Task()

    def load_sides(self, block_ids: Any, name: str, timeout: float | None = None) -> SidesTask:
        found = np.array([block in self.kept for block in block_ids])
        data = np.stack([self.kept.get(block, np.zeros(96, np.uint8)) for block in block_ids])
        return SidesTask(sides=(data, found))


def test_a_store_of_a_users_needs_none_of_it_and_may_have_it() -> None:
    blocks, kv, side = ids(2), KV(2), np.arange(192, dtype=np.uint8).reshape(2, 96)
    plain = Plain({})
    assert plain.side_sizes == {}
    plain.register_kv_tensors(kv.tensors)
    plain.dump_blocks(blocks, [0, 1])
    for call in (
        lambda: plain.dump_blocks(blocks, [0, 1], sides={"mean-k": side}),
        lambda: plain.load_sides(blocks, "mean-k"),
        lambda: plain.dump_sides(blocks, {"mean-k": side}),
    ):
        with pytest.raises(UnsupportedError, match="Plain"):
            call()
    own = WithSides()
    own.register_kv_tensors(kv.tensors)
    own.dump_blocks(blocks[:1], [0], sides={"mean-k": side[:1]})
    task = own.load_sides(blocks, "mean-k")
    assert task.completed
    data, found = task.result()
    assert found.tolist() == [True, False]
    assert np.array_equal(data[0], side[0])
    with pytest.raises(InvalidInputError, match="wait"):
        SidesTask().result()
