"""A store whose blocks are moved one layer at a time, for offload, which loads a block in one layer
and not in others.

It is opened with one shard for each layer. Blocks are dumped and loaded whole as before, their
layers as rows of one task; what is written is the same record. Besides, one layer of some blocks
can be loaded alone, which reads no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.errors import TaskError, UnsupportedError
from ucm.store.kv_layout import KVLayout, block_numbers
from ucm.store.ucmstore_v1 import Sides, Task, UcmKVStoreBaseV1

Ids = Sequence[int] | npt.NDArray[np.int64]


def layer_bytes(layout: KVLayout) -> int:
    """Bytes of one layer of a block. Raises :class:`~ucm.errors.UnsupportedError` where layers
    differ."""
    sizes = {sum(view.run * len(view.offsets) for view in layer) for layer in layout.layers}
    pieces = {sum(len(view.offsets) for view in layer) for layer in layout.layers}
    if len(sizes) != 1 or len(pieces) != 1:
        raise UnsupportedError(
            "the layers of this model have KV of different sizes", context={"bytes": sorted(sizes)}
        )
    return sizes.pop()


class LayeredStore:
    """Stands before a store that was opened with ``shard_size`` of one layer; everything else is
    that store's."""

    def __init__(self, store: UcmKVStoreBaseV1, layout: KVLayout) -> None:
        """Raises :class:`~ucm.errors.UnsupportedError` for a store whose loads cannot be bounded by
        a step."""
        if not store.takes_load_timeout:
            raise UnsupportedError(
                "offload needs a store whose loads end within a time that it is given"
                " (takes_load_timeout)"
            )
        self._store, self._layout = store, layout
        self._count = len(layout.layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load_blocks(
        self, block_ids: Sequence[bytes], blocks: Ids, timeout: float | None = None
    ) -> Any:
        """All layers of each block."""
        rows, shards, addresses = self._rows(block_ids, blocks)
        return self._load(rows, shards, addresses, timeout)

    def load_layer(
        self, layer: int, block_ids: Sequence[bytes], blocks: Ids, timeout: float | None = None
    ) -> Any:
        """One layer (its place among those of this rank) of each block; a row of the task is a
        block."""
        addresses = self._addresses(blocks)[:, layer]
        return _Task(self._load(block_ids, [layer] * len(block_ids), addresses, timeout).task, 1)

    def dump_blocks(
        self,
        block_ids: Sequence[bytes],
        blocks: Ids,
        prerequisite_handle: int = 0,
        *,
        sides: Sides | None = None,
    ) -> Any:
        """All layers of each block, each with its share of what is kept beside the KV."""
        rows, shards, addresses = self._rows(block_ids, blocks)
        shares = (
            None if sides is None else {name: self._shares(side) for name, side in sides.items()}
        )
        with_sides = {} if shares is None else {"sides": shares}
        task = self._store.dump_data(rows, shards, addresses, prerequisite_handle, **with_sides)
        return _Task(task, self._count)

    def wait(self, task: Any, *args: Any, **kwargs: Any) -> None:
        """As of the store; failures are told by block."""
        if not isinstance(task, _Task):
            self._store.wait(task, *args, **kwargs)
            return
        try:
            self._store.wait(task.task, *args, **kwargs)
        except TaskError as error:
            failures = {
                row // task.rows: why for row, why in sorted(error.failures.items(), reverse=True)
            }
            raise TaskError(str(error), failures=failures) from error

    def check(self, task: Any, *args: Any, **kwargs: Any) -> bool:
        """As of the store."""
        return bool(
            self._store.check(task.task if isinstance(task, _Task) else task, *args, **kwargs)
        )

    def served(self, task: Any) -> Sequence[int]:
        """As of the store."""
        return self._store.served(task.task if isinstance(task, _Task) else task)

    def _load(
        self, rows: Sequence[bytes], shards: Sequence[int], addresses: Any, timeout: float | None
    ) -> _Task:
        addresses = np.ascontiguousarray(addresses)
        if timeout is not None:
            task: Task = self._store.load_data(rows, shards, addresses, timeout=timeout)  # type: ignore[call-arg]
        else:
            task = self._store.load_data(rows, shards, addresses)
        return _Task(task, self._count)

    def _rows(self, block_ids: Sequence[bytes], blocks: Ids) -> tuple[list[bytes], list[int], Any]:
        addresses = self._addresses(blocks)
        rows = [block for block in block_ids for _ in range(self._count)]
        return rows, list(range(self._count)) * len(block_ids), addresses.reshape(len(rows), -1)

    def _addresses(self, blocks: Ids) -> npt.NDArray[np.uint64]:
        """``[blocks, layers, pieces]``."""
        found = self._layout.addresses(block_numbers(blocks))
        return found.reshape(len(found), self._count, -1)

    def _shares(self, side: Any) -> Any:
        rows = np.asarray(side)
        return rows.reshape(len(rows) * self._count, -1)


class _Task:
    """A task of the store, so many rows of which are one block."""

    def __init__(self, task: Any, rows: int) -> None:
        self.task, self.rows = task, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)
