"""NIXL's POSIX plugin: transfers between registered memory and one preallocated file.

It moves bytes and is no store: no names, nothing to look up, nothing published. It is here as what
one large file reaches, and as the library on which others build their file tiers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from nixl_cu12 import nixl_agent, nixl_agent_config
from peer import Blocks, Peer, UnavailableError


class NixlPosix(Peer):
    """Option ``queue``: which of the plugin's I/O queues to use, as ``use_aio`` or
    ``use_uring``."""

    threads = "the caller's, and the kernel's queue"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._agent = nixl_agent("bench", nixl_agent_config(backends=[]))
        try:
            self._agent.create_backend("POSIX", {options["queue"]: "true"})
        except Exception as error:
            raise UnavailableError(
                f"the plugin does not start with {options['queue']}: {error}"
            ) from error
        self._file = -1
        self._registered: list[Any] = []
        self._offsets: dict[bytes, int] = {}
        self._block_bytes = 0

    def version(self) -> str:
        return metadata.version("nixl-cu12")

    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._file = os.open(os.path.join(directory, "blocks"), flags, 0o600)
        # Names of absent blocks are given offsets as well, which nobody writes.
        size = 3 * block_bytes * count
        os.posix_fallocate(self._file, 0, size)
        self._registered.append(self._agent.register_memory([(0, size, self._file, "")], "FILE"))
        self._offsets, self._block_bytes = {}, block_bytes

    def name_blocks(self, ids: Sequence[bytes]) -> list[tuple[int, int, int]]:
        for key in ids:
            self._offsets.setdefault(key, len(self._offsets) * self._block_bytes)
        return [(self._offsets[key], self._block_bytes, self._file) for key in ids]

    def wrap(self, blocks: Blocks) -> list[tuple[int, int, int]]:
        region = (blocks.ctypes.data, blocks.nbytes, 0, "")
        self._registered.append(self._agent.register_memory([region], "DRAM"))
        return [(block.ctypes.data, block.nbytes, 0) for block in blocks]

    def dump(self, names: list[tuple[int, int, int]], memory: list[tuple[int, int, int]]) -> None:
        self._transfer("WRITE", names, memory)

    def load(self, names: list[tuple[int, int, int]], memory: list[tuple[int, int, int]]) -> None:
        self._transfer("READ", names, memory)

    def _transfer(
        self, way: str, names: list[tuple[int, int, int]], memory: list[tuple[int, int, int]]
    ) -> None:
        """Asks for progress in a loop, as the library's own examples do: the plugin has no thread
        of its own."""
        agent = self._agent
        handle = agent.initialize_xfer(
            way, agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(names, "FILE"), "bench"
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
