"""The prefix cache store: segments below its root, and prefixes loaded as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import BLOCK, LAYERS, PIECES, Memory, ids, record_files

from ucm.errors import InvalidInputError
from ucm.store.pc import UcmPcStore
from ucm.store.posix import UcmPosixStore


@pytest.fixture(params=["direct", "layerwise"])
def config(common: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    shard = BLOCK if request.param == "direct" else BLOCK // LAYERS
    return common | {
        "tensor_size_list": PIECES,
        "shard_size": shard,
        "block_size": BLOCK,
        "segment_age": 0,
    }


@pytest.fixture
def store(config: dict[str, Any]) -> Iterator[UcmPcStore]:
    with UcmPcStore(config) as store:
        yield store


def rows(store: UcmPosixStore, memory: Memory, *blocks: int) -> Any:
    """Addresses of whole blocks, one row per shard."""
    shards = BLOCK // store.settings.shard_size
    return memory.rows(*blocks).reshape(len(blocks) * shards, -1)


def dump(store: UcmPosixStore, memory: Memory, *blocks: int) -> None:
    shards = BLOCK // store.settings.shard_size
    names = [name for block in blocks for name in [ids(8)[block]] * shards]
    store.wait(
        store.dump_data(names, list(range(shards)) * len(blocks), rows(store, memory, *blocks))
    )


def test_blocks_lie_in_segments(store: UcmPcStore, config: dict[str, Any]) -> None:
    source = Memory(3)
    dump(store, source, 0, 1, 2)
    root = Path(config["storage_backends"])
    assert record_files(root) == []
    assert list(root.rglob("*.seg")) != []
    with UcmPosixStore(config | {"layout": "segment"}) as other:
        assert other.lookup(ids(4)) == [True, True, True, False]
    with UcmPosixStore(config) as other:
        assert other.lookup(ids(4)) == [False] * 4, "another layout"


def test_a_prefix_is_loaded_as_far_as_it_goes(store: UcmPcStore) -> None:
    source, target = Memory(5), Memory(5, fill=9)
    dump(store, source, 0, 1, 3, 4)
    task = store.load_prefix(ids(5), rows(store, target, *range(5)))
    store.wait(task)
    assert task.blocks == 2
    assert [target.equals(source, n) for n in range(5)] == [True, True, False, False, False]
    assert target.equals(Memory(5, fill=9), 3), "memory behind the gap is not touched"


def test_no_prefix_is_no_load(store: UcmPcStore) -> None:
    task = store.load_prefix(ids(2), rows(store, Memory(2, fill=0), 0, 1))
    store.wait(task)
    assert (task.blocks, store.check(task)) == (0, True)


def test_addresses_of_another_shape_are_refused(store: UcmPcStore) -> None:
    with pytest.raises(InvalidInputError, match="one row for each shard"):
        store.load_prefix(ids(2), np.zeros((1, 2), dtype=np.uint64))


def test_keys_of_the_seeds_are_taken(config: dict[str, Any]) -> None:
    with UcmPcStore(
        config | {"stream_number": 8, "buffer_number": 64, "use_scatter_gather": True}
    ) as store:
        assert store.lookup(ids(1)) == [False]
