"""What the matrix stands on at the store level: blocks whose bytes follow from their ids, and a
store over a root.

Any process can make the bytes of a block again from its id alone, so whoever finds a block can
judge it. What kind of store it is says the column under test (``columns.py``).
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import columns
import numpy as np
import numpy.typing as npt
import places
from harm import Victim
from places import Place
from plain_record import Shape
from software_driver import IN_USE, DeviceMemory

from ucm.errors import TaskError

#: Bytes of one layer's tensors: a layer ends inside its alignment, the payload inside its last
#: page.
TENSORS = (4000, 2000)
LAYERS = 3
BLOCK_TOKENS = 16
BLOCK = sum(TENSORS) * LAYERS
SHAPE = Shape(tensors=TENSORS, layers=LAYERS, block_tokens=BLOCK_TOKENS, dtype=2)
#: What a target holds before a load; no block is full of it.
BLANK = 0x33

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, deadline: float = 120.0) -> T:
    """Polls until the condition is true; fails with ``what`` at the deadline (seconds), which only
    a hang meets."""
    end, pause = time.monotonic() + deadline, threading.Event()
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:.0f} s: {what}")
        pause.wait(0.01)
    return value


def config(**changes: Any) -> dict[str, Any]:
    """What every store under test is told; deadlines long enough for a busy machine, so that one
    hit is news."""
    config: dict[str, Any] = {
        "identity": f"trust {columns.RUN}",
        "storage_capacity": "64MiB",
        "free_space_floor": 0,
        "staging_capacity": "2MiB",
        "deadlines": {
            "lookup_ms": 20_000,
            "load_unknown_s": 60,
            "dump_s": 60,
            "probe_s": 60,
            "shutdown_s": 30,
        },
        # A breaker that tries again at once.
        "breaker": {"cool_down_s": 0.5},
        "posix_data_trans_concurrency": 4,
        "tensor_size_list": list(TENSORS),
        "shard_size": BLOCK,
        "block_size": BLOCK,
        "block_tokens": BLOCK_TOKENS,
        "dtype": "bfloat16",
        # The software driver interprets its kernels, so that they are never measured to be the
        # cheapest.
        **({"platform": "cuda", "transfer": "staging"} if IN_USE else {}),
    }
    return config | changes


def block_ids(count: int, salt: str = "") -> list[bytes]:
    """Ids that look like hashes, of blocks in directories of their own as far as there are
    enough."""
    return [hashlib.sha256(f"{salt} {n}".encode()).digest()[:16] for n in range(count)]


def right_bytes(block: bytes) -> npt.NDArray[np.uint8]:
    """The KV of a block, one piece after the other: bfloat16 whose exponents are alike, as they are
    in a model's."""
    numbers = np.frombuffer(random.Random(block).randbytes(BLOCK), dtype=np.uint8).copy()
    numbers[1::2] = numbers[1::2] & 0x81 | 0x3C
    return numbers


class Memory:
    """Blocks as a device holds them: one row of pieces each."""

    def __init__(self, blocks: Sequence[bytes], filled: bool) -> None:
        self.blocks = list(blocks)
        content = [
            right_bytes(b) if filled else np.full(BLOCK, BLANK, np.uint8) for b in self.blocks
        ]
        self.rows = [DeviceMemory(row.tobytes()) for row in content] if IN_USE else content

    def addresses(self) -> npt.NDArray[np.uint64]:
        """One row of addresses per block."""
        sizes = np.array([0, *(TENSORS * LAYERS)[:-1]], dtype=np.uint64).cumsum(dtype=np.uint64)
        first = [
            row.address if isinstance(row, DeviceMemory) else row.ctypes.data for row in self.rows
        ]
        return np.array([np.uint64(address) + sizes for address in first], dtype=np.uint64)

    def states(self) -> list[str]:
        """Of each block: ``right``, ``blank`` (not a byte of it was written) or ``wrong``."""
        return [self._state(block, row) for block, row in zip(self.blocks, self.rows, strict=True)]

    @staticmethod
    def _state(block: bytes, row: npt.NDArray[np.uint8] | DeviceMemory) -> str:
        if isinstance(row, DeviceMemory):
            row = np.frombuffer(row.read(), np.uint8)
        if np.array_equal(row, right_bytes(block)):
            return "right"
        return "blank" if bool((row == BLANK).all()) else "wrong"


class Ground:
    """A store over a root, and what a test does with it again and again."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root = root
        self.column = columns.current()
        #: All its directories, the one that decides what is published last.
        self.roots = self.column.roots(root)
        self._changes = changes
        self.store = self.column.open(root, config(**changes))

    def reopen(self, **changes: Any) -> None:
        """Another store of the same kind in its place, as another process opens one: it has nothing
        in memory."""
        self.close()
        self._changes |= changes
        self.store = self.column.open(self.root, config(**self._changes))

    def settle(self, blocks: Sequence[bytes]) -> None:
        """Waits until every directory has these blocks: nobody waits for copies between tiers but
        who asks for them."""
        wait_until(
            lambda: all(set(blocks) <= set(places.newest(root)) for root in self.roots),
            "copies are everywhere",
        )

    def forget(self) -> None:
        """Leaves nothing in memory, where there is a memory."""
        if self.column.memory:
            self.reopen()

    def dump(self, blocks: Sequence[bytes]) -> dict[int, Exception]:
        """Dumps the blocks and waits until they are published; the failures by row."""
        memory = Memory(blocks, filled=True)
        try:
            self.store.wait(
                self.store.dump_data(list(blocks), [0] * len(blocks), memory.addresses())
            )
        except TaskError as error:
            return dict(error.failures)
        return {}

    def fill(self, blocks: Sequence[bytes]) -> None:
        """Dumps the blocks into a root that may be new: on a busy machine its first count may take
        longer than one dump waits for room."""
        wait_until(lambda: not self.dump(blocks), "blocks are stored")

    def load(self, blocks: Sequence[bytes]) -> tuple[list[str], dict[int, Exception]]:
        """Loads the blocks; the state of each, and the failures by row. A block that did not fail
        is right."""
        memory = Memory(blocks, filled=False)
        failures: dict[int, Exception] = {}
        try:
            self.store.wait(
                self.store.load_data(list(blocks), [0] * len(blocks), memory.addresses())
            )
        except TaskError as error:
            failures = dict(error.failures)
        states = memory.states()
        assert "wrong" not in states, "wrong bytes reached the device"
        assert all(state == "right" for row, state in enumerate(states) if row not in failures)
        return states, failures

    def assert_hits(self, blocks: Sequence[bytes]) -> None:
        """Every block is found and loaded, byte for byte."""
        assert self.store.lookup(blocks) == [True] * len(blocks)
        states, failures = self.load(blocks)
        assert not failures, failures
        assert states == ["right"] * len(blocks)

    def is_healthy(self, blocks: Sequence[bytes]) -> bool:
        """Whether these blocks can be dumped and loaded again now; wrong bytes are an error at any
        time."""
        try:
            if self.dump(blocks) or not all(self.store.lookup(blocks)):
                return False
        except Exception as error:
            if not getattr(error, "retryable", False) and getattr(error, "kind", "") != "unhealthy":
                raise
            return False
        return not self.load(blocks)[1]

    def counts(self) -> dict[str, int]:
        """Misses by reason and the other counters, under one roof: their names do not overlap.
        Those of tiers are ``<tier>.<name>``."""
        stats = self.store.stats()
        numbers = {name: value for name, value in stats.items() if isinstance(value, int)}
        for tier in stats.get("tiers", ()):
            numbers |= {
                f"{tier['name']}.{name}": n for name, n in tier.items() if isinstance(n, int)
            }
        return {**numbers, **stats["misses"]}

    def victims(self, block: bytes, other: bytes, seed: str) -> list[Victim]:
        """Every copy of a block below the directories, with one of another block beside it."""
        self.settle([block, other])
        found = [places.newest(root) for root in self.roots]
        return [Victim(copies[block], copies[other], random.Random(seed)) for copies in found]

    def place(self, block: bytes) -> Place:
        """Where the record of a block lies by which it counts as published."""
        return places.newest(self.root)[block]

    def newest(self, block: bytes, directory: int = -1) -> Place | None:
        """The same, or in another of the directories, if it is there and right."""
        place = places.newest(self.roots[directory]).get(block)
        return place if place is not None and place.is_right(SHAPE) else None

    def places(self) -> list[Place]:
        """Every copy of every record."""
        return [place for root in self.roots for place in places.places(root)]

    def await_all_right(self) -> None:
        """Waits until the second reader agrees that every record is right: copies of a tier come a
        little later, and where a file system was full some are still being removed."""

        def is_wrong(place: Place) -> bool:
            return place.path.exists() and not place.is_right(SHAPE)

        wait_until(lambda: not any(map(is_wrong, self.places())), "every record is right", 30)

    def files(self) -> list[Path]:
        """Every file of records, in the directory that decides."""
        return places.files(self.root)

    def bytes_stored(self) -> int:
        """Bytes of all of these and of what is not published yet; the collector may be at work."""
        total = 0
        for path in [*places.private_files(self.root), *self.files()]:
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        return total

    def close(self) -> None:
        """Ends the store."""
        self.store.close()


def counted(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was counted in between."""
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if value != before.get(name, 0)
    }


def assert_no_wait(news: dict[str, int]) -> None:
    """No deadline was hit and the breaker stayed closed: the harm cost no waiting at all."""
    waits = {"timeout", "lookup_late", "busy", "unhealthy", "breaker_opened"} & set(news)
    assert not waits, f"counted: {news}"
