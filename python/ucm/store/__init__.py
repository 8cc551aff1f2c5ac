"""Stores: where KV blocks are kept, and how they are named.

``UcmConnectorFactoryV1`` makes stores by name, ``BlockHasher`` computes block keys, ``record_ids``
the ids of one part. The names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucm._core import BlockHasher, part_mask, record_ids
    from ucm.store.factory import UcmConnectorFactory, UcmConnectorFactoryV1, select_storage
    from ucm.store.names import BlockId, RequestHasher
    from ucm.store.ucmstore_v1 import SidesTask, Task, UcmKVStoreBaseV1
    from ucm.store.v0 import UcmKVStoreBase

__all__ = [
    "BlockHasher",
    "BlockId",
    "RequestHasher",
    "SidesTask",
    "Task",
    "UcmConnectorFactory",
    "UcmConnectorFactoryV1",
    "UcmKVStoreBase",
    "UcmKVStoreBaseV1",
    "part_mask",
    "record_ids",
    "select_storage",
]

_WHERE = {
    "BlockHasher": "ucm._core",
    "part_mask": "ucm._core",
    "record_ids": "ucm._core",
    "BlockId": "ucm.store.names",
    "RequestHasher": "ucm.store.names",
    "select_storage": "ucm.store.factory",
    "UcmConnectorFactory": "ucm.store.factory",
    "UcmConnectorFactoryV1": "ucm.store.factory",
    "UcmKVStoreBase": "ucm.store.v0",
    "SidesTask": "ucm.store.ucmstore_v1",
    "Task": "ucm.store.ucmstore_v1",
    "UcmKVStoreBaseV1": "ucm.store.ucmstore_v1",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = found  # the next use does not come here
    return found
