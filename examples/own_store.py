"""A store of your own: every block is a file below a directory. ``own_store.yaml`` uses it:

    PYTHONPATH=examples python examples/offline.py --config examples/own_store.yaml

vLLM's processes import this module by its name, so it must be on ``PYTHONPATH``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.errors import NotFoundError
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

Addresses = npt.NDArray[np.uint64]


class FileStore(UcmKVStoreBaseV1):
    """Whole blocks in files. A row of addresses is the pieces of one block on the device."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._root = Path(config["storage_backends"])
        self._root.mkdir(parents=True, exist_ok=True)
        # the pieces of a layer, for as many layers as a row has
        layer = list(config["tensor_size_list"])
        self._sizes = layer * (config["shard_size"] // sum(layer))
        self._threads = ThreadPoolExecutor(2)

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        """Whether each block is stored."""
        return [self._path(block_id).exists() for block_id in block_ids]

    def load_data(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: Addresses
    ) -> Task:
        """Starts reading, on a thread: an engine must not wait here."""
        del shard_index  # always 0: blocks are not split
        return Task(self._threads.submit(self._each, self._read, block_ids, addrs.copy()))

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: Addresses,
        prerequisite_handle: int = 0,
    ) -> Task:
        """Starts writing."""
        del shard_index, prerequisite_handle  # an event of a device; a CPU has none
        return Task(self._threads.submit(self._each, self._write, block_ids, addrs.copy()))

    def wait(self, task: Any, timeout: float | None = None) -> None:  # type: ignore[override]
        """Waits for a task; what failed is raised here and is a miss for the engine."""
        task.handle.result(timeout)

    def _path(self, block_id: bytes) -> Path:
        return self._root / block_id.hex()

    def _each(self, work: Any, block_ids: Sequence[bytes], addrs: Addresses) -> None:
        for block_id, row in zip(block_ids, addrs.tolist(), strict=True):
            work(self._path(block_id), row)

    def _read(self, path: Path, row: list[int]) -> None:
        data, offset = path.read_bytes(), 0
        if len(data) != sum(self._sizes):
            raise NotFoundError("the file is not whole", context={"path": str(path)})
        for address, size in zip(row, self._sizes, strict=True):
            ctypes.memmove(address, data[offset : offset + size], size)
            offset += size

    def _write(self, path: Path, row: list[int]) -> None:
        pieces = zip(row, self._sizes, strict=True)
        private = path.with_suffix(".tmp")
        private.write_bytes(b"".join(ctypes.string_at(*piece) for piece in pieces))
        private.rename(path)
