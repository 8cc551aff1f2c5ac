"""Stores: where KV blocks are kept, and how they are named.

``UcmConnectorFactoryV1`` makes stores by name, ``BlockHasher`` computes block keys, ``record_ids``
the ids of one part. The names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ucm.lazy import lazy

if TYPE_CHECKING:
    from ucm._core import BlockHasher, part_mask, record_ids
    from ucm.store.factory import UcmConnectorFactory, UcmConnectorFactoryV1, select_storage
    from ucm.store.names import BlockId, RequestHasher, compute_block_hash
    from ucm.store.ucmstore_v1 import SidesTask, Task, UcmKVStoreBaseV1
    from ucm.store.v0 import UcmKVStoreBase, V0ToV1Adapter

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
    "V0ToV1Adapter",
    "compute_block_hash",
    "part_mask",
    "record_ids",
    "select_storage",
]

_MODULES = {
    "ucm._core": ("BlockHasher", "part_mask", "record_ids"),
    "ucm.store.names": ("BlockId", "RequestHasher", "compute_block_hash"),
    "ucm.store.factory": ("UcmConnectorFactory", "UcmConnectorFactoryV1", "select_storage"),
    "ucm.store.v0": ("UcmKVStoreBase", "V0ToV1Adapter"),
    "ucm.store.ucmstore_v1": ("SidesTask", "Task", "UcmKVStoreBaseV1"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}
__getattr__ = lazy(__name__, _WHERE)
