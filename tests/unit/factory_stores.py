"""Stores for the tests of the factory: a minimal one, and some invalid ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.errors import BusyError
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1, Until


class LeastStore(UcmKVStoreBaseV1):
    def lookup(self, block_ids: Sequence[bytes]) -> Sequence[bool]:
        return [False for _ in block_ids]

    def load_data(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: npt.NDArray[np.uint64]
    ) -> Task:
        return Task()

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: npt.NDArray[np.uint64],
        prerequisite_handle: int = 0,
    ) -> Task:
        return Task()

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        pass


class HalfStore(UcmKVStoreBaseV1):
    def lookup(self, block_ids: Sequence[bytes]) -> Sequence[bool]:
        return [False for _ in block_ids]


class BrokenStore(LeastStore):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        raise KeyError(config.get("missing", "endpoint"))


class BusyStore(LeastStore):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        raise BusyError("come back later")


class NoStore:
    pass
