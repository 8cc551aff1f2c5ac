"""Stores of the network, for ``make bench-remote``: ucm over a server, and Mooncake's own client over the same pool.

The directory of a round is the address of its server here, which is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
from peer import Blocks, Peer, UnavailableError, split
from peer_ucm import PATIENCE, Ucm

from ucm.store import UcmConnectorFactoryV1
from ucm.store.posix import UcmPosixStore


class UcmRemote(Ucm):
    """Options: ``store``, the class; ``keys``, of the store, in which ``{at}`` stands for the address."""

    threads = "the store's defaults"

    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        keys = {
            name: value.format(at=directory) if isinstance(value, str) else value
            for name, value in self.options["keys"].items()
        }
        config = {
            "identity": "bench",
            "tensor_size": block_bytes,
            "shard_size": block_bytes,
            "block_size": block_bytes,
            # All blocks are staged at once; a quarter of the slots is kept for loads, and a slot holds a header too.
            "staging_capacity": max(8, 4 * count // 3 + 2) * (block_bytes + (64 << 10)),
            "deadlines": {"lookup_ms": int(PATIENCE * 1000), "dump_s": PATIENCE},
        }
        store = UcmConnectorFactoryV1.create_connector(self.options["store"], config | keys)
        assert isinstance(store, UcmPosixStore)
        self._store = store
        if not store.healthy():
            raise RuntimeError(f"the server is not used: {store.trouble()}")


class MooncakeAlone(Peer):
    """Mooncake's Python client, driven as the store drives it: registered memory, one call for some megabytes."""

    threads = "one calls, Mooncake's own move bytes"
    #: Bytes of one call, as in the store.
    BATCH = 8 << 20

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        from mooncake.store import MooncakeDistributedStore

        self._make = MooncakeDistributedStore
        self._client: Any = None

    def version(self) -> str:
        for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        raise UnavailableError("not installed: make .tools/.stamp-mooncake")

    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        self._client = self._make()
        code = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", directory)
        if code != 0:
            raise RuntimeError(f"Mooncake's client answers {code} to its setup")

    def name_blocks(self, ids: Sequence[bytes]) -> list[str]:
        return [key.hex() for key in ids]

    def wrap(self, blocks: Blocks) -> tuple[npt.NDArray[np.uint64], int]:
        code = self._client.register_buffer(blocks.ctypes.data, blocks.nbytes)
        if code != 0:
            raise RuntimeError(f"Mooncake's client answers {code} to memory that is to be registered")
        return blocks.ctypes.data + np.arange(len(blocks), dtype=np.uint64) * blocks.strides[0], blocks.strides[0]

    def _batches(self, names: list[str], length: int) -> list[slice]:
        return split(len(names), -(-len(names) * length // self.BATCH))

    def dump(self, names: list[str], memory: tuple[npt.NDArray[np.uint64], int]) -> None:
        addresses, length = memory
        for part in self._batches(names, length):
            some = addresses[part].tolist()
            codes = self._client.batch_put_from(names[part], some, [length] * len(some))
            if any(code != 0 for code in codes):
                raise RuntimeError(f"a put is answered {codes}")

    def load(self, names: list[str], memory: tuple[npt.NDArray[np.uint64], int]) -> None:
        addresses, length = memory
        for part in self._batches(names, length):
            some = addresses[part].tolist()
            lengths = self._client.batch_get_into(names[part], some, [length] * len(some))
            if any(got != length for got in lengths):
                raise RuntimeError(f"a get is answered {lengths}")

    def lookup(self, names: list[str]) -> Sequence[bool]:
        return [found == 1 for found in self._client.batch_is_exist(names)]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
