"""A quota for each tenant, from the configuration key to the contents of a store."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from blocks import BLOCK, PIECES, Memory, ids

from ucm.config import load
from ucm.errors import ConfigError
from ucm.store import UcmConnectorFactoryV1

NAMES = ids(9)
#: A page for the header, then the layers in whole pages.
RECORD = 4096 + -(-BLOCK // 4096) * 4096


@pytest.mark.parametrize(
    "written", [{}, {"layout": "file"}, {"store_pipeline": "Cache|Posix", "cache_size": "4MiB"}]
)
def test_the_oldest_blocks_of_a_tenant_go(common: dict[str, Any], written: dict[str, Any]) -> None:
    """As in the connector: a checked configuration, then the sizes of the engine."""
    quota = {"tenant_quota": 3 * RECORD + RECORD // 2, "path": common["storage_backends"]}
    config = load(
        written | quota | {"storage_capacity": "1GiB", "free_space_floor": 0, "segment_age": 0}, {}
    )
    shape = {"tensor_size_list": PIECES, "shard_size": BLOCK, "block_size": BLOCK}
    keys = config.store_config() | shape | {key: common[key] for key in ("identity", "deadlines")}
    with UcmConnectorFactoryV1.create_connector(config.ucm_connector_name, keys) as store:
        memory = Memory(len(NAMES))
        store.describe(NAMES[:6], tenant=bytes(range(32)))
        for block, name in enumerate(NAMES):
            store.wait(store.dump_data([name], [0], memory.rows(block)))
        pause = threading.Event()
        for _ in range(3000):
            removed = sum(tier["quota_removed"] for tier in store.stats()["tiers"])
            if removed == 3:
                break
            pause.wait(0.01)
        assert removed == 3
        if "store_pipeline" not in written:  # memory keeps its own
            assert list(store.lookup(NAMES)) == [False] * 3 + [True] * 6


def test_it_stands_beside_a_pipeline_and_not_beside_a_store_of_your_own() -> None:
    with pytest.raises(ConfigError, match="tenant_quota stands beside the pipeline"):
        load(
            {
                "store_pipeline": [
                    "Cache",
                    {"type": "posix", "tenant_quota": "1GiB", "storage_backends": "/d"},
                ]
            },
            {},
        )
    own = {
        "ucm_connector_name": "Mine",
        "ucm_connector_module_path": "mine",
        "tenant_quota": "1GiB",
    }
    with pytest.raises(ConfigError, match="bound its tenants by itself"):
        load(own, {})
