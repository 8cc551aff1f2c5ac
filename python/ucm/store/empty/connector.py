"""``UcmEmptyStore``: takes everything, keeps nothing, has nothing. For measuring what is above a
store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.errors import NotFoundError
from ucm.store.instant import InstantStore, InstantTask


class UcmEmptyStore(InstantStore):
    """Never a hit; a load fails with :class:`~ucm.errors.NotFoundError`, a dump is accepted and
    dropped.

    Every key of the other stores is accepted and means nothing.
    """

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return [False for _ in self.checked(block_ids)]

    def load_data(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: npt.NDArray[np.uint64]
    ) -> InstantTask:
        rows = self.rows(block_ids, shard_index, addrs)
        return InstantTask(
            "load", {row: NotFoundError("the empty store has no block") for row in range(rows)}
        )

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: npt.NDArray[np.uint64],
        prerequisite_handle: int = 0,
    ) -> InstantTask:
        self.rows(block_ids, shard_index, addrs)
        return InstantTask("dump", {})

    def stats(self) -> dict[str, Any]:
        return {"healthy": True}
