"""Stores of the network, for ``make bench-remote``: ucm over a server, and Mooncake's own client
over the same pool.

Here the directory of a round is the address of its empty server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from peer import Blocks, Peer, UnavailableError, split
from peer_ucm import PATIENCE, Ucm

from ucm.store import UcmConnectorFactoryV1
from ucm.store.posix import UcmPosixStore


class UcmRemote(Ucm):
    """Options: ``store``, the class; ``keys``, the store's keys, with ``{at}`` for the address."""

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
            # All blocks are staged at once; a quarter of the slots is kept for loads, and a slot
            # holds a header too.
            "staging_capacity": max(8, 4 * count // 3 + 2) * (block_bytes + (64 << 10)),
            "deadlines": {"lookup_ms": int(PATIENCE * 1000), "dump_s": PATIENCE},
        }
        store = UcmConnectorFactoryV1.create_connector(self.options["store"], config | keys)
        assert isinstance(store, UcmPosixStore)
        self._store = store
        if not store.healthy():
            raise RuntimeError(f"the server is not used: {store.trouble()}")


class MooncakeAlone(Peer):
    """Mooncake's Python client, used as in the store: registered memory, one call for some
    megabytes."""

    threads = "one for calls, Mooncake's own for bytes"
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
            raise RuntimeError(f"Mooncake's client returns {code} from its setup")

    def name_blocks(self, ids: Sequence[bytes]) -> list[str]:
        return [key.hex() for key in ids]

    def wrap(self, blocks: Blocks) -> Blocks:
        code = self._client.register_buffer(blocks.ctypes.data, blocks.nbytes)
        if code != 0:
            raise RuntimeError(f"Mooncake's client returns {code} from the registration of memory")
        return blocks

    def _batches(
        self, names: list[str], memory: Blocks
    ) -> Iterator[tuple[list[str], list[int], list[int]]]:
        """Keys, addresses and lengths of some megabytes at a time."""
        addresses = [block.ctypes.data for block in memory]
        for part in split(len(names), -(-memory.nbytes // self.BATCH)):
            some = addresses[part]
            yield names[part], some, [memory.shape[1]] * len(some)

    def dump(self, names: list[str], memory: Blocks) -> None:
        for keys, addresses, lengths in self._batches(names, memory):
            codes = self._client.batch_put_from(keys, addresses, lengths)
            if any(code != 0 for code in codes):
                raise RuntimeError(f"a put returned {codes}")

    def load(self, names: list[str], memory: Blocks) -> None:
        for keys, addresses, lengths in self._batches(names, memory):
            came = self._client.batch_get_into(keys, addresses, lengths)
            if came != lengths:
                raise RuntimeError(f"a get returned {came}")

    def lookup(self, names: list[str]) -> Sequence[bool]:
        return [found == 1 for found in self._client.batch_is_exist(names)]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
