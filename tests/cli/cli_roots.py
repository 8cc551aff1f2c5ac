"""Roots written by the real store."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blocks import PATIENT, await_room

from ucm.store.posix import UcmPosixStore

PIECES = [4096, 2048]
LAYERS = 3
BLOCK = sum(PIECES) * LAYERS
RECORD = 4096 + 20480
HOUR = 3600


@dataclass
class Written:
    """A root with its blocks."""

    path: Path
    ids: list[bytes] = field(default_factory=list)

    def open(self, identity: str = "one", **changes: Any) -> UcmPosixStore:
        config = {
            "storage_backends": str(self.path),
            "identity": identity,
            "layout": "file",
            "storage_capacity": "64MiB",
            "free_space_floor": 0,
            "staging_capacity": "4MiB",
            "deadlines": PATIENT,
            "tensor_size_list": PIECES,
            "shard_size": BLOCK,
            "block_size": BLOCK,
            "labels": {"model": f"/models/{identity}"},
        }
        store = UcmPosixStore(config | changes)
        await_room(store)
        return store

    def dump(self, store: UcmPosixStore, count: int, first: int = 0) -> list[bytes]:
        ids = [
            bytes([n * 37 % 256]) * 8 + n.to_bytes(8, "little") for n in range(first, first + count)
        ]
        data = np.random.default_rng(count).integers(0, 256, (count, BLOCK), dtype=np.uint8)
        offsets = [layer * sum(PIECES) + at for layer in range(LAYERS) for at in (0, PIECES[0])]
        rows = np.array(
            [[data[n].ctypes.data + at for at in offsets] for n in range(count)], dtype=np.uint64
        )
        store.wait(store.dump_data(ids, [0] * count, rows))
        return ids

    def fill(self, identity: str = "one", count: int = 6, **changes: Any) -> Written:
        with self.open(identity, **changes) as store:
            self.ids = self.dump(store, count)
        self.age(2 * HOUR)
        return self

    def age(self, seconds: float) -> None:
        """Sets the time of use of every record; of two records the one with the smaller path is
        older."""
        now = time.time()
        for at, path in enumerate(self.records()):
            os.utime(path, (now - seconds + at, now - seconds + at))
        for path in self.path.glob("*/tmp"):
            os.utime(path, (now - seconds, now - seconds))

    def limit(self, capacity: int) -> None:
        """Writes another limit into the marker."""
        path = self.path / "ucm-root.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"storage_capacity": capacity}))

    def records(self, namespace: str = "*") -> list[Path]:
        return sorted(self.path.glob(f"{namespace}/blocks/*/*.bin"))

    def namespace(self, identity: str) -> str:
        for path in self.path.glob("*/manifest.json"):
            if json.loads(path.read_text())["labels"]["model"] == f"/models/{identity}":
                return path.parent.name
        raise AssertionError(identity)

    def tree(self) -> dict[str, tuple[int, int, int]]:
        """All its files with their times, to detect any change."""
        found = {}
        for path in sorted(self.path.rglob("*")):
            about = path.lstat()
            found[str(path.relative_to(self.path))] = (
                about.st_ino,
                about.st_size,
                about.st_mtime_ns,
            )
        return found


#: Side shards of blocks.
SIDES = {"mean-k": 96, "codes": 6000}


def sided(root: Written, layout: str = "file", **changes: Any) -> list[bytes]:
    """Three blocks with side shards, one without, and one side shard alone."""
    ids = [bytes([n]) * 16 for n in range(5)]
    data = np.random.default_rng(3).integers(0, 4, (4, BLOCK), dtype=np.uint8)
    offsets = [layer * sum(PIECES) + at for layer in range(LAYERS) for at in (0, PIECES[0])]
    rows = np.array([[block.ctypes.data + at for at in offsets] for block in data], dtype=np.uint64)
    sides = {name: np.full((3, size), size % 251, np.uint8) for name, size in SIDES.items()}
    with root.open(sides=SIDES, layout=layout, segment_age=0, **changes) as store:
        store.wait(store.dump_data(ids[:3], [0] * 3, rows[:3], sides=sides))
        store.wait(store.dump_data(ids[3:4], [0], rows[3:]))
        store.wait(store.dump_sides(ids[3:4], {"codes": sides["codes"][:1]}))
    return ids
