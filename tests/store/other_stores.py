"""Stores for the tests of adapters: a user's store for the original's V0, and a V1 store with
failures on demand. Both keep blocks in memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ucm.errors import BusyError, CorruptError, DeadlineError, TaskError
from ucm.store.ucmstore import UcmKVStoreBase
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1, Until


class UsersV0(UcmKVStoreBase):
    """In the style of the original's users: synchronous, codes instead of exceptions, no
    ``close``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.parts: dict[tuple[str, int], bytes] = {}
        self.created: set[str] = set()
        self.committed: set[str] = set()
        self.codes: dict[str, int] = {}  # what create() answers instead
        self.wait_code = 0
        self.forgetful = False  # commit() says nothing and does nothing
        self.go = threading.Event()
        self.go.set()
        self.at_wait = threading.Event()
        self.calls: list[str] = []

    def create(self, block_ids: list[str]) -> list[int]:  # type: ignore[override]
        self.calls.append("create")
        answer = []
        for block in block_ids:
            code = -50003 if block in self.created | self.committed else self.codes.get(block, 0)
            if code == 0:
                self.created.add(block)
            answer.append(code)
        return answer

    def lookup(self, block_ids: Sequence[str]) -> list[bool]:
        return [block in self.committed for block in block_ids]

    def fetch_data(self, block_ids: Any, offset: Any, addr: Any, size: Any) -> Any:
        for block, at, address, length in zip(block_ids, offset, addr, size, strict=True):
            part = self.parts.get((block, at), b"")
            ctypes.memmove(address, part, min(len(part), length))
        return object()

    def dump_data(self, block_ids: Any, offset: Any, addr: Any, size: Any) -> Any:
        for block, at, address, length in zip(block_ids, offset, addr, size, strict=True):
            self.parts[block, at] = ctypes.string_at(address, length)
        return object()

    def wait(self, task: Any) -> int:
        self.at_wait.set()
        assert self.go.wait(60)
        return self.wait_code

    def check(self, task: Any) -> tuple[int, bool]:
        return 0, True

    def commit(self, block_ids: Sequence[str], is_success: Any = True) -> None:
        self.calls.append(f"commit {is_success}")
        for block in block_ids:
            self.created.discard(block)
            if is_success and not self.forgetful:
                self.committed.add(block)


class TensorV0(UsersV0):
    """One that accepts tensors only, like the original's Mooncake store."""

    def fetch_data(self, block_ids: Any, offset: Any, addr: Any, size: Any) -> Any:
        raise NotImplementedError

    def dump_data(self, block_ids: Any, offset: Any, addr: Any, size: Any) -> Any:
        raise NotImplementedError

    def load(self, block_ids: Any, offset: Any, tensors: Any) -> Any:
        import torch

        for block, at, tensor in zip(block_ids, offset, tensors, strict=True):
            tensor.copy_(torch.frombuffer(bytearray(self.parts[block, at]), dtype=torch.uint8))
        return object()

    def dump(self, block_ids: Any, offset: Any, tensors: Any) -> Any:
        for block, at, tensor in zip(block_ids, offset, tensors, strict=True):
            self.parts[block, at] = bytes(tensor.numpy())
        return object()


class FailingV1(UcmKVStoreBaseV1):
    """A V1 store in memory whose next dump can be made to fail."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.shards: dict[tuple[bytes, int], list[bytes]] = {}
        self.slots: int | None = None
        self.trouble = ""
        self.forgetful = False
        self.well = True
        self.dumped: list[int] = []  # rows of each dump

    @property
    def pieces(self) -> list[int]:
        """Sizes of the pieces of a shard."""
        layer = self.config.get("tensor_size_list") or [self.config["tensor_size"]]
        return list(layer) * (self.config["shard_size"] // sum(layer))

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        number = self.config["block_size"] // self.config["shard_size"]
        return [
            all((block, shard) in self.shards for shard in range(number)) for block in block_ids
        ]

    def load_data(self, block_ids: Any, shard_index: Any, addrs: Any) -> Task:
        missing = {}
        for row, key in enumerate(zip(block_ids, shard_index, strict=True)):
            if key not in self.shards:
                missing[row] = CorruptError("it is not there")
                continue
            for address, part in zip(addrs[row].tolist(), self.shards[key], strict=True):
                ctypes.memmove(address, part, len(part))
        return Task(missing)

    def dump_data(
        self, block_ids: Any, shard_index: Any, addrs: Any, prerequisite_handle: int = 0
    ) -> Task:
        trouble, self.trouble = self.trouble, ""
        if trouble == "busy":
            raise BusyError("no slot")
        self.dumped.append(len(block_ids))
        if trouble == "first row":
            return Task({0: CorruptError("told to")})
        if trouble == "late":
            return Task("late")
        if not self.forgetful:
            for block, shard, row in zip(block_ids, shard_index, addrs.tolist(), strict=True):
                parts = [ctypes.string_at(a, n) for a, n in zip(row, self.pieces, strict=True)]
                self.shards[block, shard] = parts
        return Task({})

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        if task.handle == "late":
            raise DeadlineError("not yet")
        if task.handle:
            raise TaskError("told to", failures=dict(task.handle))

    def check(self, task: Any, until: Until = "published") -> bool:
        return bool(task.handle != "late")

    def healthy(self) -> bool:
        return self.well

    def free_dump_slots(self) -> int | None:
        return self.slots
