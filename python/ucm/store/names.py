"""Names of the original; see :mod:`ucm.store.v0`."""

from ucm.store.v0 import DEFAULT_BLOCK_SIZE, BlockId, RequestHasher, compute_block_hash

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockId", "RequestHasher", "compute_block_hash"]
