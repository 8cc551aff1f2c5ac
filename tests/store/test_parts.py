"""One store of several parts: each through its view, by address and by number, and lookups of
scattered blocks of all of them."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from other_stores import FailingV1

from ucm.errors import ClosedError, ConfigError, InvalidInputError, UnsupportedError
from ucm.store import part_mask, record_ids
from ucm.store.posix import UcmPosixStore
from ucm.store.ucmstore_v1 import NOWHERE, UcmKVStoreBaseV1

#: Bytes of each piece of a layer, and layers, of three parts.
SHAPES = [((4096, 2048), 3), ((10240,), 5), ((96,), 2)]
BLOCKS = 4


def sizes(number: int) -> dict[str, Any]:
    pieces, layers = SHAPES[number]
    whole = sum(pieces) * layers
    return {"tensor_size_list": list(pieces), "shard_size": whole, "block_size": whole}


def config(common: dict[str, Any], **keys: Any) -> dict[str, Any]:
    own = [
        sizes(number) | {"part": (number, 0, 0), "block_tokens": 16 * number, "dtype": "float16"}
        for number in (1, 2)
    ]
    return common | sizes(0) | {"block_tokens": 8, "own_parts": own} | keys


def ids(number: int, blocks: int = BLOCKS) -> list[bytes]:
    return record_ids([bytes([n]) * 16 for n in range(blocks)], part_mask(number, 0, 0))


class PartKV:
    """The KV of one part: a tensor for each piece of each layer."""

    def __init__(self, number: int, fill: int | None = None) -> None:
        made = np.random.default_rng(number)
        pieces, layers = SHAPES[number]
        self.tensors: dict[str, npt.NDArray[np.uint8]] = {
            f"layers.{layer}.{piece}": made.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
            if fill is None
            else np.full((BLOCKS, size), fill, np.uint8)
            for layer in range(layers)
            for piece, size in enumerate(pieces)
        }

    def rows(self) -> npt.NDArray[np.uint64]:
        addresses = [
            [tensor[block].ctypes.data for tensor in self.tensors.values()]
            for block in range(BLOCKS)
        ]
        return np.array(addresses, dtype=np.uint64)

    def equals(self, other: PartKV) -> bool:
        return all(np.array_equal(self.tensors[name], other.tensors[name]) for name in self.tensors)


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("layout", ["file", "segment"])
def test_blocks_of_every_part_go_out_and_come_back(
    common: dict[str, Any], layout: str, by_number: bool
) -> None:
    given = config(common, layout=layout)
    every, shards = list(range(BLOCKS)), [0] * BLOCKS
    with UcmPosixStore(given) as store:
        tasks = []
        kept = [PartKV(number) for number in range(len(SHAPES))]
        for number, kv in enumerate(kept):
            view = store.for_part(number)
            view.describe(ids(number), ordinals=every)
            if by_number:
                view.register_kv_tensors(kv.tensors)
                tasks.append(view.dump_blocks(ids(number), every))
            else:
                tasks.append(view.dump_data(ids(number), shards, kv.rows()))
        store.wait(tasks)
        assert all(store.check(task) for task in tasks)
    with UcmPosixStore(given) as store:
        for number, source in enumerate(kept):
            target, view = PartKV(number, fill=0), store.for_part(number)
            assert view.lookup_on_prefix(ids(number)) == BLOCKS - 1
            if by_number:
                view.register_kv_tensors(target.tensors)
                task = view.load_blocks(ids(number), every)
            else:
                task = view.load_data(ids(number), shards, target.rows(), timeout=20.0)
            view.wait(task)
            assert target.equals(source) and list(store.served(task)) == [BLOCKS]
            store.wait(view.verify(ids(number)))
        lens = [store.for_part(number).record_len for number in range(len(SHAPES))]
        assert lens[2] < lens[0] < lens[1] == store.stats()["slot_bytes"]


def test_a_view_is_the_same_store(common: dict[str, Any]) -> None:
    store = UcmPosixStore(config(common, sides={"side": 64}))
    view = store.for_part(2)
    assert store.for_part(0) is store and view.for_part(0) is store
    assert view.for_part(1).record_len == store.for_part(1).record_len
    assert (view.settings.block_size, view.settings.part) == (192, (2, 0, 0))
    assert (dict(store.side_sizes), dict(view.side_sizes)) == ({"side": 64}, {})
    kv = PartKV(2)
    with pytest.raises(InvalidInputError):  # side shards are of the first part
        view.dump_data(
            ids(2), [0] * BLOCKS, kv.rows(), sides={"side": np.zeros((BLOCKS, 64), np.uint8)}
        )
    with pytest.raises(UnsupportedError):
        view.cc_store()
    with pytest.raises(InvalidInputError):
        store.for_part(3)
    other = PartKV(0)
    with pytest.raises(InvalidInputError):  # the rows of another part
        view.dump_data(ids(0), [0] * BLOCKS, other.rows())
    view.close()
    task = view.dump_data(ids(2), [0] * BLOCKS, kv.rows())
    store.wait(task)
    assert store.lookup(ids(2)) == view.lookup(ids(2)) == [True] * BLOCKS
    assert view.stats()["blocks_published"] == store.stats()["blocks_published"] == BLOCKS
    assert view.healthy() and view.trouble() == store.trouble()
    assert view.free_dump_slots() == store.free_dump_slots()
    store.close()
    for closed in (store, view):
        with pytest.raises(ClosedError):
            closed.lookup(ids(2))
        with pytest.raises(ClosedError):
            closed.for_part(1)
    with pytest.raises(ClosedError):
        view.load_data(ids(2), [0] * BLOCKS, kv.rows())
    del store
    with contextlib.suppress(ClosedError):
        view.dump_data(ids(2), [0] * BLOCKS, kv.rows())


def test_wrong_parts_are_refused_before_anything_starts(common: dict[str, Any]) -> None:
    given = config(common)
    given["own_parts"][1]["part"] = (1, 0, 0)
    with pytest.raises(ConfigError, match="each of its parts once"):
        UcmPosixStore(given)
    given = config(common)
    given["own_parts"][0]["tensor_size"] = 4096  # beside a list of sizes
    with pytest.raises(InvalidInputError, match="tensor_size"):
        UcmPosixStore(given)


@pytest.mark.parametrize("layout", ["file", "segment"])
def test_scattered_blocks_are_located_as_a_model_says(common: dict[str, Any], layout: str) -> None:
    rng = random.Random(layout)
    with UcmPosixStore(config(common, layout=layout)) as store:
        scheduler = UcmPosixStore(
            config(common, layout=layout, device_id=-1, own_parts=[])
            | {"parts": [sizes(number) | {"part": (number, 0, 0)} for number in (1, 2)]}
        )
        there: set[bytes] = set()
        for number in range(len(SHAPES)):
            chosen = rng.sample(range(BLOCKS), 3)
            kept, kv = [ids(number)[n] for n in chosen], PartKV(number)
            store.wait(store.for_part(number).dump_data(kept, [0] * 3, kv.rows()[chosen]))
            there.update(kept)
        while NOWHERE in scheduler.locate(list(there)):  # it finds segments of others about now
            threading.Event().wait(0.01)
        for _ in range(20):
            everything = [block for number in range(len(SHAPES)) for block in ids(number, 6)]
            asked = rng.choices(everything, k=rng.randrange(1, 12))
            right = bytes(0 if block in there else NOWHERE for block in asked)
            for one in (store, store.for_part(1), scheduler):
                assert one.locate(asked) == right
                begun = one.begin_locate(asked)
                while (answer := begun.answer()) is None:
                    threading.Event().wait(0.001)
                assert answer[:2] == (right, "absent")
        scheduler.close()


def test_a_store_of_python_has_one_part_and_locates_by_its_lookup() -> None:
    store: UcmKVStoreBaseV1 = FailingV1({"block_size": 1, "shard_size": 1})
    assert store.for_part(0) is store
    with pytest.raises(UnsupportedError, match="one KV cache group"):
        store.for_part(1)
    assert store.locate([b"a" * 16]) == bytes([NOWHERE])
    assert store.begin_locate([b"a" * 16]) is None
