"""``UcmMooncakeStore``: the engine over a pool of Mooncake Store, through Mooncake's own Python
client."""

from __future__ import annotations

from typing import ClassVar

from ucm.store.posix.connector import UcmPosixStore


class UcmMooncakeStore(UcmPosixStore):
    """Blocks in the memory that processes of several hosts lend to one pool.

    Mooncake evicts by itself when the pool is full, and what a process lent goes with that process:
    both are misses. The package ``mooncake-transfer-engine`` (or ``-non-cuda``) must be installed.
    """

    store_name: ClassVar[str] = "UcmMooncakeStore"
