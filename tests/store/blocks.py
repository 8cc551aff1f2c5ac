"""Blocks of the tests: memory used as device, ids, and the locations of a directory's records."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from plain_segment import parse_footer

if TYPE_CHECKING:
    from ucm.store.posix import UcmPosixStore

PIECES = [4096, 2048]
LAYERS = 3
BLOCK = sum(PIECES) * LAYERS
#: A store of whole blocks.
SHAPE = {"tensor_size_list": PIECES, "shard_size": BLOCK, "block_size": BLOCK}
#: Deadlines long enough for a busy machine, because a late lookup is a miss.
PATIENT = {
    "lookup_ms": 20_000,
    "load_unknown_s": 60.0,
    "load_max_s": 60.0,
    "probe_s": 60.0,
    "shutdown_s": 30.0,
}


def await_room(store: UcmPosixStore) -> None:
    """Returns when the store has counted its root: an earlier dump would wait for that. A
    lookup-only or unhealthy store never counts."""
    pause = threading.Event()
    for _ in range(6000):
        stats = store.stats()
        well = all(tier["healthy"] for tier in stats["tiers"])
        if store.settings.device_id == -1 or stats["storage_counted"] or not well:
            return
        pause.wait(0.01)


class Memory:
    """One row of pieces per block, in device layout: every piece separate."""

    def __init__(self, blocks: int, fill: int | None = None) -> None:
        random = np.random.default_rng(blocks)
        self.pieces: list[list[npt.NDArray[np.uint8]]] = [
            [
                random.integers(0, 256, size, dtype=np.uint8)
                if fill is None
                else np.full(size, fill, np.uint8)
                for _ in range(LAYERS)
                for size in PIECES
            ]
            for _ in range(blocks)
        ]

    def rows(self, *blocks: int) -> npt.NDArray[np.uint64]:
        return np.array(
            [[piece.ctypes.data for piece in self.pieces[b]] for b in blocks], dtype=np.uint64
        )

    def layer_rows(self, block: int) -> npt.NDArray[np.uint64]:
        return self.rows(block).reshape(LAYERS, len(PIECES))

    def equals(self, other: Memory, block: int) -> bool:
        return all(
            np.array_equal(a, b)
            for a, b in zip(self.pieces[block], other.pieces[block], strict=True)
        )


class KV:
    """The KV of a model: the pieces of all blocks in one tensor each, with a gap from block to
    block."""

    def __init__(self, blocks: int, fill: int | None = None) -> None:
        random = np.random.default_rng(blocks)
        self.tensors: dict[str, npt.NDArray[np.uint8]] = {}
        for layer in range(LAYERS):
            for piece, size in enumerate(PIECES):
                shape = (blocks, 2, size)
                whole = (
                    random.integers(0, 256, shape, dtype=np.uint8)
                    if fill is None
                    else np.full(shape, fill, np.uint8)
                )
                self.tensors[f"layers.{layer}.piece.{piece}"] = whole[:, 0]

    def block(self, number: int) -> bytes:
        """What is in a block."""
        return b"".join(tensor[number].tobytes() for tensor in self.tensors.values())


def ids(count: int) -> list[bytes]:
    return [bytes([n * 7 % 256]) * 8 + n.to_bytes(8, "little") for n in range(count)]


def record_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.bin"))


@dataclass(frozen=True)
class Stored:
    """A record on disk: a file of its own, or a stretch of a segment."""

    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        return self.path.read_bytes()[self.offset : self.offset + self.length]

    def flip(self, at: int) -> None:
        data = bytearray(self.path.read_bytes())
        data[self.offset + at] ^= 0x10
        self.path.write_bytes(data)


def records(root: Path) -> list[Stored]:
    """Every record below a root, whatever its layout."""
    found = [Stored(path, 0, path.stat().st_size) for path in root.rglob("*.bin")]
    for path in root.rglob("*.seg"):
        footer = parse_footer(path.read_bytes(), path.stat().st_size)
        found += [Stored(path, entry.offset, entry.length) for entry in footer.entries]
    return sorted(found, key=lambda stored: (stored.path, stored.offset))
