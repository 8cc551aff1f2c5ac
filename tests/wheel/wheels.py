"""The wheels that are given, and what runs with each."""

from __future__ import annotations

import os
from pathlib import Path

#: The wheels, one a line: ``make test-wheel`` names one, ``make test-wheels`` one for each
#: processor.
GIVEN = [Path(name) for name in os.environ.get("UCM_TEST_WHEEL", "").splitlines()]

#: A program that dumps a block of known bytes, or loads it with a new store: its root, then its
#: steps.
ROUND_TRIP = """
import sys, time
import numpy as np
from ucm.store import BlockHasher
from ucm.store.factory_v1 import UcmConnectorFactoryV1

root, *steps = sys.argv[1:]
config = {
    "storage_backends": root, "device_id": 0, "identity": '{"model": "none"}', "part": (0, 0, 0),
    "tensor_size_list": [65536, 65536], "shard_size": 131072, "block_size": 131072,
    "block_tokens": 16, "dtype": "float32", "storage_capacity": "64MiB", "free_space_floor": 0,
    "deadlines": {"lookup_ms": 20000, "load_unknown_s": 60, "load_max_s": 60, "probe_s": 60},
}
(key,) = BlockHasher(bytes(32), 16).hash_blocks(np.arange(16, dtype=np.uint32))
source = np.random.default_rng(1).integers(0, 256, (2, 65536), dtype=np.uint8)
target = np.zeros_like(source)
done = []
for step in steps:
    with UcmConnectorFactoryV1.create_connector("UcmPosixStore", config) as store:
        if step == "dump":
            while not store.stats()["storage_counted"]:  # until then a dump waits
                time.sleep(0.01)
            store.wait(store.dump([key], [0], [[source[0], source[1]]]))
            done.append("dumped")
        else:
            assert list(store.lookup([key, bytes(16)])) == [True, False]
            store.wait(store.load([key], [0], [[target[0], target[1]]]))
            assert np.array_equal(source, target)
            done.append("equal")
print(*done)
"""


def machine_of(wheel: Path) -> str:
    """The processor of a wheel, by its tag."""
    return next(name for name in ("x86_64", "aarch64") if wheel.stem.endswith(name))
