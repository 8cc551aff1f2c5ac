"""The base of the matrix at the store level: blocks whose bytes follow from their ids, and a store
over a root.

Any process can compute the bytes of a block from its id, so every process can check a block. The
column under test decides the kind of store (``columns.py``).
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
#: Initial bytes of a target; no block consists of them.
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
    """The configuration of every store under test. Deadlines are long enough for a busy machine, so
    a single missed one matters."""
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
        # The software driver interprets its kernels, so they are never the cheapest method.
        **({"platform": "cuda", "transfer": "staging"} if IN_USE else {}),
    }
    return config | changes


def block_ids(count: int, salt: str = "") -> list[bytes]:
    """Ids that look like hashes, of blocks in directories of their own as far as there are
    enough."""
    return [hashlib.sha256(f"{salt} {n}".encode()).digest()[:16] for n in range(count)]


def right_bytes(block: bytes) -> npt.NDArray[np.uint8]:
    """The KV of a block, piece by piece: bfloat16 with similar exponents, like a model's."""
    numbers = np.frombuffer(random.Random(block).randbytes(BLOCK), dtype=np.uint8).copy()
    numbers[1::2] = numbers[1::2] & 0x81 | 0x3C
    return numbers


class Memory:
    """Blocks in device layout: one row of pieces each."""

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
        """State of each block: ``right``, ``blank`` (no byte written) or ``wrong``."""
        return [self._state(block, row) for block, row in zip(self.blocks, self.rows, strict=True)]

    @staticmethod
    def _state(block: bytes, row: npt.NDArray[np.uint8] | DeviceMemory) -> str:
        if isinstance(row, DeviceMemory):
            row = np.frombuffer(row.read(), np.uint8)
        if np.array_equal(row, right_bytes(block)):
            return "right"
        return "blank" if bool((row == BLANK).all()) else "wrong"


class Ground:
    """A store over a root, with common operations of the tests."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root = root
        self.column = columns.current()
        #: All its directories; the last one decides about publishing.
        self.roots = self.column.roots(root)
        self._changes = changes
        self.store = self.column.open(root, config(**changes))

    def reopen(self, **changes: Any) -> None:
        """Replaces it by a new store of the same kind, as in another process, with empty memory."""
        self.close()
        self._changes |= changes
        self.store = self.column.open(self.root, config(**self._changes))

    def settle(self, blocks: Sequence[bytes]) -> None:
        """Waits until every directory has these blocks, because copies between tiers run in the
        background."""
        wait_until(
            lambda: all(set(blocks) <= set(places.newest(root)) for root in self.roots),
            "copies are everywhere",
        )

    def forget(self) -> None:
        """Empties the memory tier, if there is one."""
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
        longer than one dump waits for space."""
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
        """True if these blocks can be dumped and loaded again now; wrong bytes are always an
        error."""
        try:
            if self.dump(blocks) or not all(self.store.lookup(blocks)):
                return False
        except Exception as error:
            if not getattr(error, "retryable", False) and getattr(error, "kind", "") != "unhealthy":
                raise
            return False
        return not self.load(blocks)[1]

    def counts(self) -> dict[str, int]:
        """Misses by reason and the other counters in one dict: their names do not overlap. Those of
        tiers are ``<tier>.<name>``."""
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
        """The location of the record by which a block counts as published."""
        return places.newest(self.root)[block]

    def newest(self, block: bytes, directory: int = -1) -> Place | None:
        """The same, or in another directory, if it exists and is right."""
        place = places.newest(self.roots[directory]).get(block)
        return place if place is not None and place.is_right(SHAPE) else None

    def places(self) -> list[Place]:
        """Every copy of every record."""
        return [place for root in self.roots for place in places.places(root)]

    def await_all_right(self) -> None:
        """Waits until the second reader accepts every record: copies of a tier are written later,
        and after a full file system some are still being removed."""

        def is_wrong(place: Place) -> bool:
            return place.path.exists() and not place.is_right(SHAPE)

        wait_until(lambda: not any(map(is_wrong, self.places())), "every record is right", 30)

    def files(self) -> list[Path]:
        """Every file of records, in the deciding directory."""
        return places.files(self.root)

    def bytes_stored(self) -> int:
        """Bytes of all of these and of unpublished ones; the collector may be running."""
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
