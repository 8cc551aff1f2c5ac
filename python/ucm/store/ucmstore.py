"""Names of the original; see :mod:`ucm.store.v0`."""

from ucm.store.v0 import DUPLICATE_KEY, OK, Task, UcmKVStoreBase, block_id

__all__ = ["DUPLICATE_KEY", "OK", "Task", "UcmKVStoreBase", "block_id"]
