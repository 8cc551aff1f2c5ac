"""``ucm bench store`` and ``ucm bench device``: bytes a second beside a reference of the same run.

Each round measures the references first, ``memcpy`` and plain files, then the store or the device
with as many bytes. A row's ratios are taken within a round, so that other load affects both. The
first round is not counted: it starts threads and touches memory.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.bench.metrics import interval, ratio
from ucm.errors import StoreIOError, UnsupportedError
from ucm.store import UcmConnectorFactoryV1
from ucm.trans import Device

Bytes = npt.NDArray[np.uint8]


@dataclass
class Row:
    """One figure and its reference, round by round, in bytes a second."""

    name: str
    beside: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Above 1 if ours is faster."""
        pairs = zip(self.theirs, self.ours, strict=True)
        return [ratio(theirs, ours, "more") for theirs, ours in pairs]

    def as_json(self) -> dict[str, Any]:
        """Medians, and the interval of the ratio."""
        return {
            "name": self.name,
            "bytes_per_second": statistics.median(self.ours),
            "beside": self.beside,
            "beside_bytes_per_second": statistics.median(self.theirs),
            "ratio": statistics.median(self.ratios),
            "interval": interval(self.ratios),
        }


class Rates:
    """Bytes a second of what one round does."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rates: dict[str, float] = {}

    @contextmanager
    def of(self, *names: str) -> Iterator[None]:
        """Measures what moves the bytes once."""
        began = time.perf_counter()
        yield
        rate = self._size / max(time.perf_counter() - began, 1e-9)
        self._rates |= dict.fromkeys(names, rate)

    def into(self, rows: list[Row]) -> None:
        """Adds this round to the rows."""
        for row in rows:
            row.ours.append(self._rates[row.name])
            row.theirs.append(self._rates[row.beside])


@contextmanager
def _place(where: str) -> Iterator[tuple[str, Path | None]]:
    """A root of its own and a directory for plain files, both removed afterwards; an address stays
    as it is."""
    if "://" in where:
        yield where, None
        return
    with TemporaryDirectory(prefix="ucm-bench-", dir=where) as made:
        files = Path(made) / "files"
        files.mkdir()
        yield str(Path(made) / "root"), files


def bench_store(
    name: str,
    where: str,
    options: Mapping[str, Any],
    blocks: int,
    size: int,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Dumps and loads blocks of that size in a store; in a directory beside plain files.

    Every loaded byte is compared. ``done`` is called after each round. Raises a
    :class:`~ucm.errors.UcmError` where the store fails.
    """
    source = np.random.default_rng(0).integers(0, 256, (blocks, size), dtype=np.uint8)
    target, copy = np.zeros_like(source), np.zeros_like(source)
    with _place(where) as (root, files):
        config = {
            "storage_backends": root,
            "identity": f"ucm bench {os.getpid()} {time.time_ns()}",
            "tensor_size": size,
            "shard_size": size,
            "block_size": size,
            "staging_capacity": max(4 * blocks * size, 64 << 20),
        }
        if files is not None:
            config["storage_capacity"] = max(4 * (rounds + 1) * blocks * size, 1 << 30)
        written, read = ("files written", "files read") if files else ("memcpy", "memcpy")
        rows = [Row("dump, staged", "memcpy"), Row("dump, published", written)]
        rows += [Row("load", "memcpy"), Row("load again", read)]
        opened = UcmConnectorFactoryV1.create_connector(name, config | dict(options))
        try:
            for number in range(rounds + 1):
                ids = [_id(number, block) for block in range(blocks)]
                rates = Rates(source.nbytes)
                with rates.of("memcpy"):
                    np.copyto(copy, source)
                with rates.of("dump, published"):
                    with rates.of("dump, staged"):
                        task = opened.dump_data(ids, [0] * blocks, _addresses(source))
                        opened.wait(task, until="staged")
                    opened.flush()
                    opened.wait(task)
                for load in ("load", "load again"):
                    target[:] = 0
                    with rates.of(load):
                        opened.wait(opened.load_data(ids, [0] * blocks, _addresses(target)))
                    if not np.array_equal(source, target):
                        raise StoreIOError("the store loaded other bytes than it was passed")
                if files is not None:
                    with rates.of("files written"):
                        _write(files, source)
                    with rates.of("files read"):
                        _read(files, copy)
                if number:
                    rates.into(rows)
                done()
        finally:
            opened.close()
    return rows


def _id(number: int, block: int) -> bytes:
    return number.to_bytes(8, "little") + block.to_bytes(8, "little")


def _addresses(memory: Bytes) -> npt.NDArray[np.uint64]:
    """The address of each block, a row each."""
    return np.array([[block.ctypes.data] for block in memory], dtype=np.uint64)


def _write(directory: Path, memory: Bytes) -> None:
    """Each block into a file that is renamed, as a plain store would do."""
    for number, block in enumerate(memory):
        private = directory / f"{number}.tmp"
        private.write_bytes(block.data)
        private.rename(directory / str(number))


def _read(directory: Path, memory: Bytes) -> None:
    for number, block in enumerate(memory):
        with open(directory / str(number), "rb", buffering=0) as file:
            file.readinto(block.data)


#: Ways of a copy (the key ``transfer``).
WAYS = ("auto", "dma", "sm", "staging")


def bench_device(
    platform: str | None,
    number: int,
    pieces: int,
    size: int,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> tuple[str, list[Row], dict[str, str]]:
    """Gathers and scatters pieces of a device's memory, by each way, beside one large copy.

    Returns the device's name, the rows, and for each way that the device has not, why. ``done`` is
    called after each round.
    """
    device = Device(platform)
    device.setup(number)
    whole = pieces * size
    buffers = device.make_buffer()
    there, here = buffers.make_device_buffer(whole), buffers.make_host_buffer(whole)
    source, copy = (np.ones(whole, np.uint8) for _ in range(2))
    # In an order that no copy can join: with gaps of one piece.
    order = [*range(0, pieces, 2), *range(1, pieces, 2)]
    places = np.array([there.address + at * size for at in order], dtype=np.uint64)
    streams, missing = {}, {}
    for way in WAYS:
        try:
            streams[way] = device.make_stream(way)
        except UnsupportedError as error:
            missing[way] = error.message
    plain = device.make_stream("dma")
    rows = [Row("one copy to the host", "memcpy"), Row("one copy to the device", "memcpy")]
    rows += [Row(f"gather, {way}", "one copy to the host") for way in streams]
    rows += [Row(f"scatter, {way}", "one copy to the device") for way in streams]
    for turn in range(rounds + 1):
        rates = Rates(whole)
        with rates.of("memcpy"):
            np.copyto(copy, source)
        with rates.of("one copy to the host"):
            plain.device_to_host(there, here, whole)
        with rates.of("one copy to the device"):
            plain.host_to_device(here, there, whole)
        for way, stream in streams.items():
            with rates.of(f"gather, {way}"):
                stream.device_to_host_gather(places, here, size, pieces)
            with rates.of(f"scatter, {way}"):
                stream.host_to_device_scatter(here, places, size, pieces)
        if turn:
            rates.into(rows)
        done()
    return device.name, rows, missing
