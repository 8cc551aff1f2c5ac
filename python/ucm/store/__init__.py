"""Stores: where KV blocks are kept, and how they are named.

``UcmConnectorFactoryV1`` makes stores by name, ``BlockHasher`` computes block keys, ``record_ids`` the ids of one part.
"""

from ucm._core import BlockHasher, part_mask, record_ids
from ucm.store.factory_v1 import UcmConnectorFactoryV1
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

__all__ = ["BlockHasher", "Task", "UcmConnectorFactoryV1", "UcmKVStoreBaseV1", "part_mask", "record_ids"]
