"""Two stores written in Python: a user's minimal store, and one with failures on demand.

:class:`PlainStore` is the example of a store in about forty lines, over plain files.
:class:`FaultStore` wraps another store; files in its control directory (see :class:`Faults`) make
it hold, fail or refuse.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.errors import BusyError, DeadlineError, StoreIOError, TaskError, UcmError
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1, Until

Addresses = npt.NDArray[np.uint64]


class PlainStore(UcmKVStoreBaseV1):
    """One file per block and shard, which holds the pieces back to back."""

    #: The software driver treats memory of the host as its own (``accelerated.py``).
    serves_accelerators = "UCM_TEST_DRIVER" in os.environ

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        root = config["storage_backends"]
        self._root = Path(root if isinstance(root, str) else root[0])
        # one layer's pieces; a row holds those of all layers
        layer = list(config.get("tensor_size_list", ()))
        self._sizes = layer * (config["shard_size"] // sum(layer)) if layer else []
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="plain-store")

    def _path(self, block_id: bytes, shard: int) -> Path:
        return self._root / f"{block_id.hex()}.{shard}"

    def for_part(self, index: int) -> UcmKVStoreBaseV1:
        if index == 0:
            return self
        return type(self)({**self.config, **self.config["own_parts"][index - 1]})

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return [self._path(block_id, 0).exists() for block_id in block_ids]

    def load_data(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: Addresses
    ) -> Task:
        return Task(self._pool.submit(self._each, self._read, block_ids, shard_index, addrs.copy()))

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: Addresses,
        prerequisite_handle: int = 0,
    ) -> Task:
        return Task(
            self._pool.submit(self._each, self._write, block_ids, shard_index, addrs.copy())
        )

    def wait(self, task: Any) -> None:  # type: ignore[override]  # neither a timeout nor a level of its own
        task.handle.result()

    def _each(
        self, work: Any, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: Addresses
    ) -> None:
        for block_id, shard, row in zip(block_ids, shard_index, addrs, strict=True):
            work(self._path(block_id, shard), row)

    def _read(self, path: Path, row: Addresses) -> None:
        data, offset = path.read_bytes(), 0
        if len(data) != sum(self._sizes):
            raise StoreIOError("the file has another length", context={"path": str(path)})
        for address, size in zip(row, self._sizes, strict=True):
            ctypes.memmove(int(address), data[offset : offset + size], size)
            offset += size

    def _write(self, path: Path, row: Addresses) -> None:
        private = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        private.write_bytes(
            b"".join(ctypes.string_at(int(a), n) for a, n in zip(row, self._sizes, strict=True))
        )
        private.rename(path)


class Faults:
    """The files by which a test controls the stores of an engine, and reads their events.

    ``hold-lookup``, ``hold-found`` (after the lookup), ``hold-load``, ``hold-dump``: while the file
    exists, the operation is held; a number in it is a deadline in seconds after which the operation
    fails. A load fails at the connector's deadline, with an event (``load-late``). ``fail-lookup``,
    ``fail-load``, ``fail-dump``: it fails, for all blocks or for the ids (hex, one a line) in the
    file; a line ``rank=N`` fails that tensor rank's. ``busy-dump``: refused at once, always or for
    the number of times in the file. ``hold-dump-PID`` and so on hold the operations of one process.
    """

    def __init__(self, control: Path) -> None:
        self.control = control
        control.mkdir(parents=True, exist_ok=True)

    def set(self, name: str, content: str = "") -> None:
        """Activates a fault, from the next operation on."""
        private = self.control / f".{name}"
        private.write_text(content)
        private.rename(self.control / name)

    def clear(self, *names: str) -> None:
        """Deactivates these faults; all of them by default."""
        for path in self.control.iterdir():
            if path.name in names or (not names and path.name != "events"):
                path.unlink(missing_ok=True)

    def active(self, name: str) -> str | None:
        """Content of the fault's file, None when it is off."""
        try:
            return (self.control / name).read_text()
        except FileNotFoundError:
            return None

    def say(
        self, event: str, ids: Sequence[bytes], rank: int, seconds: float | None = None
    ) -> None:
        """Appends to the log of events, atomically."""
        line = (
            json.dumps(
                {
                    "event": event,
                    "ids": [i.hex() for i in ids],
                    "rank": rank,
                    "seconds": seconds,
                    "process": os.getpid(),
                }
            )
            + "\n"
        )
        descriptor = os.open(self.control / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Events of the stores, oldest first, of these names (default: all)."""
        try:
            lines = (self.control / "events").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [event for event in map(json.loads, lines) if not names or event["event"] in names]


class FaultStore(UcmKVStoreBaseV1):
    """Another store behind gates. Its configuration: that of the other, ``control``, and ``inner``
    (its name)."""

    serves_accelerators = True
    takes_load_timeout = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        own = dict(config)
        self._faults = Faults(Path(own.pop("control")))
        inner = own.pop("inner")
        self._rank = _tensor_rank(own.get("part"))
        self._inner: UcmKVStoreBaseV1
        if inner == "PlainStore":
            self._inner = PlainStore(own)
        else:
            from ucm.store.factory_v1 import UcmConnectorFactoryV1

            self._inner = UcmConnectorFactoryV1.create_connector(inner, own)
        self.has_staged_level = self._inner.has_staged_level
        self.tier_media = self._inner.tier_media
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="fault-store")
        self._is_view = False

    def for_part(self, index: int) -> UcmKVStoreBaseV1:
        if index == 0:
            return self
        view = copy.copy(self)
        view._inner, view._is_view = self._inner.for_part(index), True
        view.config = {**self.config, **self.config["own_parts"][index - 1]}
        return view

    def lookup(self, block_ids: Sequence[bytes]) -> Sequence[bool]:
        self._faults.say("lookup", block_ids, self._rank)
        self._hold("hold-lookup")
        if self._faults.active("fail-lookup") is not None:
            raise StoreIOError("the test made this lookup fail")
        found = self._inner.lookup(block_ids)
        self._faults.say("found", block_ids, self._rank)
        self._hold("hold-found")
        return found

    def load_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: Addresses,
        timeout: float | None = None,
    ) -> Task:
        return Task(
            self._pool.submit(self._load, list(block_ids), list(shard_index), addrs.copy(), timeout)
        )

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: Addresses,
        prerequisite_handle: int = 0,
    ) -> Task:
        busy = self._faults.active("busy-dump")
        if busy is not None:
            if busy == "1":
                self._faults.clear("busy-dump")
            elif busy:
                self._faults.set("busy-dump", str(int(busy) - 1))
            self._faults.say("busy", block_ids, self._rank)
            raise BusyError("the test made this dump be refused")
        rows = (list(block_ids), list(shard_index), addrs.copy())
        return Task(self._pool.submit(self._dump, *rows, prerequisite_handle))

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        try:
            inner = task.handle.result(timeout)
        except FutureTimeout:
            raise DeadlineError("the operation has not ended") from None
        if self.has_staged_level:
            self._inner.wait(inner, timeout, until)
        else:
            self._inner.wait(inner)

    def check(self, task: Any, until: Until = "published") -> bool:
        future: Future[Any] = task.handle
        if not future.done():
            return False
        return future.exception() is not None or self._inner.check(future.result(), until)

    def describe(self, block_ids: Sequence[bytes], **hints: Any) -> None:
        self._inner.describe(block_ids, **hints)

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._inner.touch(block_ids)

    def free_dump_slots(self) -> int | None:
        return self._inner.free_dump_slots()

    def stats(self) -> dict[str, Any]:
        return self._inner.stats()

    def close(self) -> None:
        if self._is_view:
            return
        if not self._closed:
            self._faults.say("close", [], self._rank)
            self._pool.shutdown(wait=False)
            self._inner.close()
        super().close()

    def _load(
        self, block_ids: list[bytes], shards: list[int], addrs: Addresses, timeout: float | None
    ) -> Any:
        self._faults.say("load", block_ids, self._rank)
        try:
            self._hold("hold-load", timeout)
        except DeadlineError:
            self._faults.say("load-late", block_ids, self._rank, timeout)
            raise
        bad = self._failures("fail-load", block_ids)
        good = [row for row in range(len(block_ids)) if row not in bad]
        task = None
        if good:
            task = self._inner.load_data(
                [block_ids[r] for r in good], [shards[r] for r in good], addrs[good]
            )
        if bad:
            if task is not None:
                self._inner.wait(task)
            self._faults.say("load-failed", [block_ids[r] for r in bad], self._rank)
            raise TaskError("the test made this load fail", failures=bad)
        return task

    def _dump(
        self, block_ids: list[bytes], shards: list[int], addrs: Addresses, prerequisite: int
    ) -> Any:
        self._faults.say("dump", block_ids, self._rank)
        self._hold("hold-dump")
        bad = self._failures("fail-dump", block_ids)
        if bad:
            self._faults.say("dump-failed", [block_ids[r] for r in bad], self._rank)
            raise TaskError("the test made this dump fail", failures=bad)
        return self._inner.dump_data(block_ids, shards, addrs, prerequisite)

    def _failures(self, name: str, block_ids: list[bytes]) -> dict[int, UcmError]:
        content = self._faults.active(name)
        if content is None:
            return {}
        chosen = set(content.split())
        everything = not chosen or f"rank={self._rank}" in chosen
        return {
            row: StoreIOError("the test made this block fail", context={"id": block_id.hex()})
            for row, block_id in enumerate(block_ids)
            if everything or block_id.hex() in chosen
        }

    def _hold(self, name: str, timeout: float | None = None) -> None:
        start, pause = time.monotonic(), threading.Event()
        names = (name, f"{name}-{os.getpid()}")
        while held_by := [text for one in names if (text := self._faults.active(one)) is not None]:
            content = held_by[0]
            # A held operation ends by itself before the test's own deadline, so that a failing test
            # cannot hang.
            held = time.monotonic() - start
            if held > (float(content) if content else 180.0):
                raise DeadlineError(f"{name}: the test made this operation miss its deadline")
            if timeout is not None and held > timeout:
                raise DeadlineError(f"{name}: not within the {timeout} s that it was given")
            pause.wait(0.005)


def _tensor_rank(part: Any) -> int:
    """Tensor rank of a part (group, pipeline rank, tensor rank); -1 if a store has no part of its
    own."""
    return int(part[2]) if part is not None and len(part) == 3 else -1
