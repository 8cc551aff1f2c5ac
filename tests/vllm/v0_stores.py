"""A store as users of the original wrote them, against its V0 interface: plain files, no deadlines,
codes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ucm.store.ucmstore import UcmKVStoreBase


class FilesV0(UcmKVStoreBase):
    """A file per block: ``<id>.act`` while it is written, ``<id>.dat`` once it is committed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._root = Path(config["storage_backends"])
        self._size = config["kv_block_size"]

    def _path(self, block: str, kind: str) -> Path:
        return self._root / f"{block}.{kind}"

    def create(self, block_ids: Sequence[str]) -> list[int]:
        codes = []
        for block in block_ids:
            if self._path(block, "dat").exists():
                codes.append(-50003)
                continue
            with self._path(block, "act").open("wb") as file:
                file.truncate(self._size)
            codes.append(0)
        return codes

    def lookup(self, block_ids: Sequence[str]) -> list[bool]:
        return [self._path(block, "dat").exists() for block in block_ids]

    def dump_data(self, block_ids: Any, offset: Any, addr: Any, size: Any) -> int:
        for block, at, address, length in zip(block_ids, offset, addr, size, strict=True):
            with self._path(block, "act").open("r+b") as file:
                file.seek(at)
                file.write(ctypes.string_at(address, length))
        return 0

    def fetch_data(self, block_ids: Any, offset: Any, addr: Any, size: Any) -> int:
        for block, at, address, length in zip(block_ids, offset, addr, size, strict=True):
            with self._path(block, "dat").open("rb") as file:
                file.seek(at)
                ctypes.memmove(address, file.read(length), length)
        return 0

    def wait(self, task: Any) -> int:
        return int(task)

    def check(self, task: Any) -> tuple[int, bool]:
        return int(task), True

    def commit(self, block_ids: Sequence[str], is_success: Any = True) -> None:
        for block in block_ids:
            path = self._path(block, "act")
            if is_success:
                os.replace(path, self._path(block, "dat"))
            else:
                path.unlink(missing_ok=True)
