"""Names of the original; see :mod:`ucm.store.v0`."""

from ucm.store.v0 import BlockId, RequestHasher, compute_block_hash

__all__ = ["BlockId", "RequestHasher", "compute_block_hash"]
