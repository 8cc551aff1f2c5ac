"""Blocks that come up from a server into the stages above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import BLOCK, PIECES, Memory, ids
from remote_columns import REDIS, started
from test_matrix import soon

from ucm.store import UcmConnectorFactoryV1
from ucm.store.posix import UcmPosixStore

COUNT = 4
SIDES = {"mean-k": 96, "codes": 6000}


def opened(store: str, **keys: Any) -> UcmPosixStore:
    told = {
        "identity": "tests",
        "tensor_size_list": PIECES,
        "shard_size": BLOCK,
        "block_size": BLOCK,
        "staging_capacity": "4MiB",
        "deadlines": {"lookup_ms": 20_000},
    }
    made = UcmConnectorFactoryV1.create_connector(store, told | keys)
    assert isinstance(made, UcmPosixStore)
    soon("it reaches the server", made.healthy)
    return made


@pytest.mark.parametrize("above", ["Cache", "Posix"])
def test_blocks_of_one_that_keeps_side_shards_come_up_for_one_that_keeps_none(tmp_path: Path, above: str) -> None:
    """A value is longer there than a record of the reader: of what the server answers it takes what it knows."""
    stages = {
        "Cache": {"type": "Cache", "cache_size": "4MiB"},
        "Posix": {"type": "Posix", "storage_backends": str(tmp_path / "root"), "storage_capacity": "1GiB"},
    }
    random, source = np.random.default_rng(7), Memory(COUNT)
    beside = {name: random.integers(0, 256, (COUNT, size), dtype=np.uint8) for name, size in SIDES.items()}
    with started(REDIS, tmp_path / "server") as server:
        at = REDIS.keys(server.at)
        with opened(REDIS.store, **at, sides=SIDES) as writer:
            writer.wait(writer.dump_data(ids(COUNT), [0] * COUNT, source.rows(*range(COUNT)), sides=beside))
        with opened("UcmPipelineStore", store_pipeline=[stages[above], {"type": "Redis", **at}]) as reader:
            for _ in range(2):
                target = Memory(COUNT, fill=0)
                reader.wait(reader.load_data(ids(COUNT), [0] * COUNT, target.rows(*range(COUNT))))
                assert all(source.equals(target, block) for block in range(COUNT))
                soon("they came up", lambda: reader.stats()["tiers"][0]["promotions"] == COUNT)
