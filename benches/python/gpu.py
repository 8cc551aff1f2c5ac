"""Speed of small pieces between a device and the host, by each method, compared with one large copy
and torch's methods.

Run: ``python benches/python/gpu.py`` on a machine with a GPU, torch, NumPy and the wheel of ucm;
neither Rust nor a network is needed. Without a GPU it prints that and exits with 0. ``--device
host`` copies on the host instead, ``--quick`` runs a few points, ``--json FILE`` writes the
figures.

Pieces of one size are in random order on the device and contiguous in pinned memory of the host.
Every figure is a ratio: the time of one large copy of the same bytes (torch's, or ucm's if torch
does not support the device) divided by the time of the method, the median of rounds in which all
take turns. 1.0 is the speed of the bus; more is noise. ``index`` is torch's ``index_select`` or
``index_copy_`` with one copy, ``loop`` a ``copy_`` for each piece. A second table is a store in the
host's memory, which checks every byte: dumps and loads of blocks of 64 layers, compared with one
large copy of the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ucm
from ucm import trans
from ucm.store.cache.connector import UcmCacheStore

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from places import WORDS, MissingError, Place, place  # noqa: E402

METHODS = ("dma", "sm", "staging", "auto")
SIZES = [256, 1024, 4096, 8192, 16_384, 32_768, 65_536, 262_144, 1_048_576, 4_194_304]
COUNTS = [16, 256, 4096]
MOST_BYTES = 256 << 20
#: Blocks of the second table: bytes of a piece, pieces of a block, blocks.
BLOCKS = [(16_384, 64, 256), (32_768, 64, 128), (65_536, 64, 64), (262_144, 64, 16)]
#: Dumps before the measured ones: the first touch of memory is slow.
WARM = 4

#: A copy that waits for its end.
Work = Callable[[], object]


class Point:
    """Pieces of ``size`` bytes, ``count`` of them, in one direction."""

    def __init__(self, where: Place, device: trans.Device, size: int, count: int) -> None:
        self.size, self.count, self.bytes = size, count, size * count
        self.device = device
        self.order = np.random.default_rng(size).permutation(2 * count)[:count]
        self.torch: Any = importlib.import_module("torch") if where.word == "cuda" else None
        self._buffers = device.make_buffer()
        self.host = self._buffers.make_host_buffer(self.bytes)
        if self.torch is not None:
            self.pages = self.torch.zeros((2 * count, size), dtype=self.torch.uint8, device="cuda")
            self.pinned = self.torch.zeros((count, size), dtype=self.torch.uint8, pin_memory=True)
            self.index = self.torch.from_numpy(self.order).cuda()
            first = int(self.pages.data_ptr())
        else:
            self._memory = self._buffers.make_device_buffer(2 * self.bytes)
            first = self._memory.address
        self.first = first
        self.addresses = np.uint64(first) + self.order.astype(np.uint64) * np.uint64(size)

    def works(self, to_device: bool) -> dict[str, Work]:
        """The contenders, the reference first."""
        streams = {method: self.device.make_stream(method) for method in METHODS}
        works = {"one copy": self._one_copy(streams["dma"], to_device)}
        for method, stream in streams.items():
            works[method] = self._pieces(stream, to_device)
        if self.torch is not None:
            works |= {"index": self._index(to_device), "loop": self._loop(to_device)}
        return works

    def _one_copy(self, stream: trans.Stream, to_device: bool) -> Work:
        if self.torch is not None:
            flat = self.pages[: self.count]
            return self._of_torch(
                lambda: _copy(flat, self.pinned) if to_device else _copy(self.pinned, flat)
            )
        if to_device:
            return lambda: stream.host_to_device(self.host, self.first, self.bytes)
        return lambda: stream.device_to_host(self.first, self.host, self.bytes)

    def _pieces(self, stream: trans.Stream, to_device: bool) -> Work:
        if to_device:
            return lambda: stream.host_to_device_scatter(self.host, self.addresses, self.size)
        return lambda: stream.device_to_host_gather(self.addresses, self.host, self.size)

    def _index(self, to_device: bool) -> Work:
        if to_device:
            return self._of_torch(
                lambda: self.pages.index_copy_(
                    0, self.index, self.pinned.to("cuda", non_blocking=True)
                )
            )
        return self._of_torch(lambda: _copy(self.pinned, self.pages.index_select(0, self.index)))

    def _loop(self, to_device: bool) -> Work:
        pairs = [
            (self.pages[number], self.pinned[i]) for i, number in enumerate(self.order.tolist())
        ]

        def loop() -> None:
            for page, side in pairs:
                _copy(page, side) if to_device else _copy(side, page)

        return self._of_torch(loop)

    def _of_torch(self, work: Work) -> Work:
        def run() -> None:
            work()
            self.torch.cuda.synchronize()

        return run


def _copy(to: Any, from_: Any) -> object:
    return to.copy_(from_, non_blocking=True)


def seconds(work: Work) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(works: dict[str, Work], rounds: int) -> tuple[float, dict[str, float]]:
    """Median seconds of the first, and for each other the median of its ratios to the first in the
    same round."""
    for work in works.values():
        work()
    taken = [{name: seconds(work) for name, work in works.items()} for _ in range(rounds)]
    yardstick, *others = works
    ratios = {
        name: statistics.median(one[yardstick] / one[name] for one in taken) for name in others
    }
    return statistics.median(one[yardstick] for one in taken), ratios


def rows(where: Place, quick: bool) -> list[dict[str, Any]]:
    """Every point of the grid; each is printed when it is known."""
    device = trans.Device(where.platform)
    device.setup(0)
    found: list[dict[str, Any]] = []
    for size in [256, 32_768] if quick else SIZES:
        for count in [16] if quick else COUNTS:
            if size * count > MOST_BYTES:
                continue
            point = Point(where, device, size, count)
            for direction in ("to device", "to host"):
                taken, ratios = measure(point.works(direction == "to device"), 3 if quick else 15)
                row = {
                    "size": size,
                    "count": count,
                    "direction": direction,
                    "gb_s": point.bytes / taken / 1e9,
                }
                found.append(row | {"ratios": ratios})
                if len(found) == 1:
                    print(
                        f"{'bytes':>8} {'pieces':>6} {'direction':9} {'GB/s':>7}",
                        *(f"{name:>8}" for name in ratios),
                    )
                ratio = (f"{ratio:8.3f}" for ratio in ratios.values())
                print(f"{size:8} {count:6} {direction:9} {row['gb_s']:7.2f}", *ratio, flush=True)
    return found


def blocks(where: Place, quick: bool) -> list[dict[str, Any]]:
    """A store in memory, blocks of several sizes; each row is printed when it is known."""
    found: list[dict[str, Any]] = []
    print(f"{'bytes':>8} {'pieces':>6} {'blocks':>6} {'dump':>8} {'load':>8}  of one large copy")
    for piece, pieces, count in [(32_768, 16, 4)] if quick else BLOCKS:
        device = trans.Device(where.platform)
        device.setup(0)
        point = Point(where, device, piece, pieces * count)
        with Stored(point, where.platform, piece, pieces, count) as stored:
            for _ in range(WARM):
                stored.dump()
            rounds = 3 if quick else 9
            to_host, dumps = measure(
                {"one copy": point.works(False)["one copy"], "dump": stored.dump}, rounds
            )
            to_device, loads = measure(
                {"one copy": point.works(True)["one copy"], "load": stored.load}, rounds
            )
        row = {
            "piece": piece,
            "pieces": pieces,
            "blocks": count,
            "dump": dumps["dump"],
            "load": loads["load"],
        }
        found.append(row | {"gb_s": [point.bytes / took / 1e9 for took in (to_device, to_host)]})
        print(f"{piece:8} {pieces:6} {count:6} {row['dump']:8.3f} {row['load']:8.3f}", flush=True)
    return found


class Stored:
    """Blocks in a store in memory, which has room for twice as many."""

    def __init__(self, point: Point, platform: str, piece: int, pieces: int, count: int) -> None:
        self._rows = np.ascontiguousarray(point.addresses.reshape(count, pieces))
        self._count, self._turn = count, 0
        size = piece * pieces
        sizes: dict[str, Any] = {"tensor_size": piece, "shard_size": size, "block_size": size}
        room = {
            "cache_size": 2 * point.bytes + (64 << 20),
            "staging_capacity": 2 * point.bytes + (8 << 20),
        }
        self._store = UcmCacheStore(
            sizes | room | {"identity": f"bench of {piece}", "platform": platform}
        )

    def dump(self) -> None:
        """All of them, under names of their own."""
        self._turn += 1
        self._store.wait(self._store.dump_data(self._names(), [0] * self._count, self._rows))

    def load(self) -> None:
        """The blocks of the last dumps."""
        self._store.wait(self._store.load_data(self._names(), [0] * self._count, self._rows))

    def _names(self) -> list[bytes]:
        return [
            self._turn.to_bytes(8, "little") + block.to_bytes(8, "little")
            for block in range(self._count)
        ]

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._store.close()


def main() -> int:
    """Prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=WORDS, default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few points and rounds")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    try:
        where = place(arguments.device)
    except MissingError as missing:
        print(f"skipped, all of it: {missing}")
        return 0
    print(
        f"ucm {ucm.__version__} on {where.word}; GB/s of one large copy, and the ratio of each"
        " method to it"
    )
    found = rows(where, arguments.quick)
    stored = blocks(where, arguments.quick)
    if arguments.json is not None:
        figures = {"device": where.word, "rows": found, "blocks": stored}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
