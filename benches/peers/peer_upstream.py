"""UCM 0.8.1, the original project: its store pipeline ``Posix``, from its own wheel.

The wheel is for CPython 3.12 and its package is also called ``ucm``, so this runs in an environment
of its own. It imports torch (5 GB) for the annotations of two unused methods: an empty module
replaces it.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
from peer import THREADS, Blocks, Peer, UnavailableError


class Upstream(Peer):
    """Option ``engine``: ``psync`` or ``aio``, the second with O_DIRECT only."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        os.environ.setdefault("UCM_LOG_TO_FILE", "false")
        stand_in = types.ModuleType("torch")
        stand_in.__dict__["Tensor"] = type("Tensor", (), {})
        sys.modules.setdefault("torch", stand_in)
        self._make = importlib.import_module("ucm.store.pipeline.connector").UcmPipelineStore
        self._store: Any = None

    def version(self) -> str:
        return metadata.version("uc-manager-cuda-cu129")

    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        if self.options["engine"] == "aio" and not direct:
            raise UnavailableError("its aio engine reads and writes with O_DIRECT only")
        self._store = self._make(
            {
                "store_pipeline": "Posix",
                "storage_backends": [directory],
                "device_id": 0,
                "tensor_size": block_bytes,
                "shard_size": block_bytes,
                "block_size": block_bytes,
                "posix_io_engine": self.options["engine"],
                "io_direct": direct,
                "posix_data_trans_concurrency": THREADS,
                "posix_lookup_concurrency": THREADS,
                "posix_gc_enable": False,
            }
        )

    def wrap(self, blocks: Blocks) -> npt.NDArray[np.uint64]:
        return np.array([[block.ctypes.data] for block in blocks], dtype=np.uint64)

    def dump(self, names: Sequence[bytes], memory: npt.NDArray[np.uint64]) -> None:
        self._store.wait(self._store.dump_data(names, [0] * len(names), memory))

    def load(self, names: Sequence[bytes], memory: npt.NDArray[np.uint64]) -> None:
        self._store.wait(self._store.load_data(names, [0] * len(names), memory))

    def lookup(self, names: Sequence[bytes]) -> Sequence[bool]:
        found: Sequence[bool] = self._store.lookup(names)
        return found

    def close(self) -> None:
        self._store = None  # the C++ object ends with its last reference
