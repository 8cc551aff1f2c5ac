"""ucm itself: ``UcmPosixStore`` as this source tree builds it, with its checksums on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from peer import THREADS, Blocks, Peer, UnavailableError

import ucm
from ucm.errors import ConfigError, UnsupportedError
from ucm.store.posix import UcmPosixStore

#: Longest wait for one batch, in seconds: a bound, not an expectation.
PATIENCE = 60.0


class Ucm(Peer):
    """Options: ``config``, keys of the store in addition to those of every arm."""

    threads = (
        f"{THREADS} for I/O (half of them for dumps), 3 that gather: two write too, the third where"
        " these wait"
    )

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._store: UcmPosixStore | None = None

    def version(self) -> str:
        return ucm.__version__

    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        config = {
            "storage_backends": directory,
            "identity": "bench",
            "tensor_size": block_bytes,
            "shard_size": block_bytes,
            "block_size": block_bytes,
            "io_direct": direct,
            # A realistic limit: a segment is never longer than a 64th of it.
            "storage_capacity": "64GiB",
            "free_space_floor": "1%",
            # All blocks are staged at once; a quarter of the slots is kept for loads, and a slot
            # holds a header too.
            "staging_capacity": max(8, 4 * count // 3 + 2) * (block_bytes + (64 << 10)),
            "posix_data_trans_concurrency": THREADS,
            "posix_lookup_concurrency": THREADS,
            "deadlines": {"lookup_ms": int(PATIENCE * 1000), "dump_s": PATIENCE},
        }
        special = self.options.get("config", {})
        try:
            self._store = UcmPosixStore(config | special)
        except (ConfigError, UnsupportedError) as error:
            if not special:
                raise
            raise UnavailableError(f"not built: {error}") from error
        self._counted(self._store)

    def _counted(self, store: UcmPosixStore) -> None:
        """Wait until the store has counted its root: before that it accepts only a few hundred
        blocks."""
        end = time.monotonic() + PATIENCE
        while not store.stats().get("storage_counted", 1):
            if time.monotonic() > end:
                raise RuntimeError(f"the root was not counted within {PATIENCE:.0f} s")
            time.sleep(0.01)

    def wrap(self, blocks: Blocks) -> npt.NDArray[np.uint64]:
        return np.array([[block.ctypes.data] for block in blocks], dtype=np.uint64)

    def dump(self, names: Sequence[bytes], memory: npt.NDArray[np.uint64]) -> None:
        assert self._store is not None
        self._store.wait(
            self._store.dump_data(names, [0] * len(names), memory), PATIENCE, "published"
        )

    def load(self, names: Sequence[bytes], memory: npt.NDArray[np.uint64]) -> None:
        assert self._store is not None
        self._store.wait(self._store.load_data(names, [0] * len(names), memory, PATIENCE), PATIENCE)

    def lookup(self, names: Sequence[bytes]) -> Sequence[bool]:
        assert self._store is not None
        return self._store.lookup(names)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class UcmToSlot(Ucm):
    """The same store, loads only, up to the end of the peers' loads: in host memory, here the
    store's own.

    Every block is read and verified as for any load, in the slot from which it would be copied to
    an accelerator.
    """

    figures = ("load",)

    def load(self, names: Sequence[bytes], memory: npt.NDArray[np.uint64]) -> None:
        assert self._store is not None
        self._store.wait(self._store.verify(names, PATIENCE), PATIENCE)

    def fetch(self, names: Sequence[bytes], memory: npt.NDArray[np.uint64]) -> None:
        super().load(names, memory)
