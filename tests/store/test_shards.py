"""Loads of blocks in shards: each layer is loaded and reported when its bytes were read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blocks import ids

from ucm.errors import TaskError
from ucm.store.posix.connector import PosixTask, UcmPosixStore

LAYER, LAYERS = 1 << 17, 8
SHAPE = {
    "tensor_size": LAYER,
    "shard_size": LAYER,
    "block_size": LAYER * LAYERS,
    "staging_capacity": "8MiB",
}


def addresses(memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([[layer.ctypes.data] for layer in memory], np.uint64)


@pytest.mark.parametrize("layout", ["file", "segment"])
def test_a_load_says_of_each_layer_when_it_is_there(common: dict[str, Any], layout: str) -> None:
    names, shards = ids(1) * LAYERS, list(range(LAYERS))
    source = np.random.default_rng(1).integers(0, 256, (LAYERS, LAYER), np.uint8)
    target = np.zeros_like(source)
    with UcmPosixStore(common | SHAPE | {"layout": layout, "segment_age": 0}) as store:
        dumped = store.dump_data(names, shards, addresses(source))
        store.wait(dumped)
        assert isinstance(dumped, PosixTask)
        task = store.load_data(names, shards, addresses(target))
        assert isinstance(task, PosixTask)
        for row in shards:
            assert task.wait_shard(row, 20.0)
            assert task.shard_done(row)
            assert (target[row] == source[row]).all()
        store.wait(task)
        assert not task.shard_done(LAYERS)
        assert not dumped.shard_done(0), "of a load only"


def test_a_row_that_fails_keeps_nobody_waiting(common: dict[str, Any]) -> None:
    target = np.zeros((LAYERS, LAYER), np.uint8)
    with UcmPosixStore(common | SHAPE) as store:
        task = store.load_data(ids(1) * LAYERS, list(range(LAYERS)), addresses(target))
        assert isinstance(task, PosixTask)
        assert not task.wait_shard(0)
        with pytest.raises(TaskError):
            store.wait(task)
