"""``UcmPcStore``: the POSIX store over segments, with a load of a whole prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ucm.errors import InvalidInputError
from ucm.store.posix.connector import PosixTask, UcmPosixStore


class PrefixTask(PosixTask):
    """A load of the first :attr:`blocks` blocks of a prefix."""

    #: How many blocks, from the first on, are being loaded; 0: none is stored, and the task is
    #: finished.
    blocks: int = 0


class UcmPcStore(UcmPosixStore):
    """Blocks of one root in segments: many in one file that is published whole, looked up in
    memory."""

    store_name: ClassVar[str] = "UcmPcStore"

    def load_prefix(
        self,
        prefix_hashes: Sequence[bytes],
        dst_addrs: npt.NDArray[np.uint64],
        timeout: float | None = None,
    ) -> PrefixTask:
        """Load whole blocks from the first id on, as many as are stored without a gap.

        ``dst_addrs`` has shape (blocks * shards of a block, pieces per shard), the shards of a
        block one after the other. ``timeout`` in seconds, the configured deadline if None. The task
        says in :attr:`~PrefixTask.blocks` how many blocks it loads; memory of the others is not
        touched.
        """
        shards = self.settings.block_size // self.settings.shard_size
        addrs = np.asarray(dst_addrs)
        if addrs.shape[:1] != (len(prefix_hashes) * shards,):
            raise InvalidInputError(
                "dst_addrs has one row for each shard of each block",
                context={"shape": addrs.shape, "blocks": len(prefix_hashes), "shards": shards},
            )
        blocks = self.lookup_on_prefix(prefix_hashes) + 1
        ids = [block_id for block_id in prefix_hashes[:blocks] for _ in range(shards)]
        loading = self.load_data(
            ids, list(range(shards)) * blocks, addrs[: blocks * shards], timeout
        )
        task = PrefixTask(loading.handle, loading.kind)
        task.blocks = blocks
        return task
