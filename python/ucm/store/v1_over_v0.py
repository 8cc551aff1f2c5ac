"""A V0 store behind the V1 interface, so that one written against the original works wherever a V1
store does.

V0 calls may block for as long as they like and know no deadline, so they run on two threads of this
adapter, one for loads and one for dumps, and never touch the caller's memory: a dump is copied
before it is queued (its source is free at once), a load is read into memory of the adapter and
copied when it has arrived in time. What is late is failed, and not one byte of it reaches the
caller afterwards. Both directions are bounded; a dump without room is refused as busy.

A block is created with its first shard and committed with its last; after the commit the store is
asked whether it finds the block, and one that it does not find was not published.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ucm.config.model import Deadlines, StoreSettings
from ucm.errors import (
    BY_KIND,
    BusyError,
    ConfigError,
    InvalidInputError,
    NotFoundError,
    StoreIOError,
    TaskError,
    UcmError,
    UnsupportedError,
)
from ucm.store.shape import BlockShape
from ucm.store.ucmstore import DUPLICATE_KEY, OK, UcmKVStoreBase
from ucm.store.ucmstore_v1 import Priority, UcmKVStoreBaseV1, Until
from ucm.store.v0_tasks import Lane, V0Task

#: Blocks whose shards are still to come, at one time.
INCOMPLETE = 4096
#: Bytes of dumps copied and not written yet, where nobody says how many.
_ROOM = 256 << 20

Addresses = npt.NDArray[np.uint64]

_BY_CODE: dict[int, type[UcmError]] = {cls.code: cls for cls in BY_KIND.values()} | {
    InvalidInputError.code: InvalidInputError,
    -50001: BusyError,  # out of memory
}


def error_of(code: int, what: str) -> UcmError:
    """The exception for a code of V0."""
    return _BY_CODE.get(code, StoreIOError)(
        f"the V0 store failed to {what}", context={"code": code}
    )


class _Settings(StoreSettings):
    """Those keys of all stores that mean something here."""

    deadlines: Deadlines = Deadlines()


def with_v0_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a V1 store with the keys that V0 stores read beside it, unless they are
    there."""
    lookups_only = config.get("device_id", 0) == -1
    words = {
        "kv_block_size": config.get("block_size"),
        "io_size": config.get("shard_size"),
        "role": "scheduler" if lookups_only else "worker",
        "device": config.get("device_id", 0),
    }
    return {key: value for key, value in words.items() if value is not None} | dict(config)


class V1OverV0(UcmKVStoreBaseV1):
    """A V0 store where a V1 store is wanted. Record ids become 32 hex digits.

    ``config`` names the sizes, and may hold ``deadlines`` (``load_unknown_s``, ``dump_s``) and
    ``staging_capacity``: the bytes of dumps on their way at one time, and of the memory loads pass
    through; one block always fits.
    """

    has_staged_level = True
    takes_load_timeout = True

    def __init__(
        self,
        store: UcmKVStoreBase,
        config: Mapping[str, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises :class:`~ucm.errors.ConfigError` for a wrong value among them."""
        super().__init__(config)
        self.v0 = store
        self._shape = BlockShape.of(config)
        common = {key: config[key] for key in ("deadlines", "staging_capacity") if key in config}
        try:
            settings = _Settings.model_validate(common)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        self._allowances = {
            "load": settings.deadlines.load_unknown_s,
            "dump": settings.deadlines.dump_s,
        }
        self._clock = clock
        self._pieces = list(
            zip(np.cumsum([0, *self._shape.pieces]).tolist(), self._shape.pieces, strict=False)
        )
        self._room = max(settings.staging_capacity or _ROOM, self._shape.block)
        self._per_load = max(1, self._room // self._shape.shard)
        self._lock = threading.Lock()
        self._on_their_way = 0  # bytes of dumps
        # of the dump thread alone: block -> shards still to come
        self._incomplete: dict[bytes, set[int]] = {}
        self._loads, self._dumps = Lane("ucm-v0-load", clock), Lane("ucm-v0-dump", clock)
        self._tensors_only = type(store).fetch_data is UcmKVStoreBase.fetch_data

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        """Whether the V0 store has each block."""
        return [bool(found) for found in self.v0.lookup(_names(block_ids))]

    def prefetch(self, block_ids: Sequence[bytes], priority: Priority = "normal") -> None:
        """Passed on; V0 knows no priorities."""
        del priority
        self.v0.prefetch(_names(block_ids))

    # Loads
    # ----------------------------------------------------------------------------------------------

    def load_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: Addresses,
        timeout: float | None = None,
    ) -> V0Task:
        """As in the base class; ``timeout`` in seconds, the configured deadline if None."""
        names, offsets, matrix = self._rows(block_ids, shard_index, addrs)
        task = self._task("load", len(names), timeout)

        def job() -> None:
            for first in range(0, len(names), self._per_load):
                rows = range(first, min(first + self._per_load, len(names)))
                if task.over():
                    return
                self._load(
                    task,
                    rows,
                    names[rows.start : rows.stop],
                    offsets[rows.start : rows.stop],
                    matrix,
                )

        self._loads.submit(task, job)
        return task

    def _load(
        self, task: V0Task, rows: range, names: list[str], offsets: list[int], matrix: Addresses
    ) -> None:
        memory = np.empty((len(rows), self._shape.shard), np.uint8)
        try:
            code = self._move("fetch_data", "load", names, offsets, memory)
        except Exception as error:
            return task.fail(rows, _as_ours(error, "load"))
        if code != OK:
            return task.fail(rows, error_of(code, "load"))

        def scatter() -> None:
            base, shard = memory.ctypes.data, self._shape.shard
            for at, row in enumerate(rows):
                for (offset, size), address in zip(self._pieces, matrix[row].tolist(), strict=True):
                    ctypes.memmove(address, base + at * shard + offset, size)

        task.deliver(rows, scatter)

    # Dumps
    # ----------------------------------------------------------------------------------------------

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: Addresses,
        prerequisite_handle: int = 0,
    ) -> V0Task:
        """As in the base class; the source has been read when this returns."""
        if prerequisite_handle:
            raise UnsupportedError("a V0 store knows no events: pass prerequisite_handle 0")
        names, offsets, matrix = self._rows(block_ids, shard_index, addrs)
        size = len(names) * self._shape.shard
        with self._lock:
            if size and self._on_their_way and self._on_their_way + size > self._room:
                raise BusyError(
                    "no room for this dump", context={"bytes": size, "limit": self._room}
                )
            self._on_their_way += size
        memory = np.empty((len(names), self._shape.shard), np.uint8)
        for row, addresses in enumerate(matrix.tolist()):
            for (offset, length), address in zip(self._pieces, addresses, strict=True):
                ctypes.memmove(
                    memory.ctypes.data + row * self._shape.shard + offset, address, length
                )
        task = self._task("dump", len(names), None)
        ids, shards = list(block_ids), [int(shard) for shard in shard_index]

        def job() -> None:
            try:
                if not task.over():
                    self._dump(task, ids, shards, names, offsets, memory)
            finally:
                with self._lock:
                    self._on_their_way -= size

        try:
            self._dumps.submit(task, job)
        except UcmError:
            with self._lock:
                self._on_their_way -= size
            raise
        return task

    def _dump(
        self,
        task: V0Task,
        ids: list[bytes],
        shards: list[int],
        names: list[str],
        offsets: list[int],
        memory: npt.NDArray[np.uint8],
    ) -> None:
        refused = self._create(list(dict.fromkeys(ids)))
        for row, block in enumerate(ids):
            if (why := refused.get(block)) is not None:
                task.fail([row], why)
        rows = [
            row
            for row, block in enumerate(ids)
            if block in self._incomplete and block not in refused
        ]
        stored = [
            row
            for row, block in enumerate(ids)
            if block not in self._incomplete and block not in refused
        ]
        mine = list(dict.fromkeys(ids[row] for row in rows))
        why_not: UcmError | None = None
        if rows:
            try:
                mine_only = memory if len(rows) == len(ids) else memory[rows]
                code = self._move(
                    "dump_data",
                    "dump",
                    [names[r] for r in rows],
                    [offsets[r] for r in rows],
                    mine_only,
                )
                why_not = None if code == OK else error_of(code, "dump")
            except Exception as error:
                why_not = _as_ours(error, "dump")
        if why_not is None:
            for row in rows:
                self._incomplete[ids[row]].discard(shards[row])
        whole = [block for block in mine if why_not is None and not self._incomplete[block]]
        unpublished = self._commit(whole, mine if why_not is not None else [])
        for row in rows:
            failed = why_not or unpublished.get(ids[row])
            if failed is not None:
                task.fail([row], failed)
        well = {row for row in rows if why_not is None and ids[row] not in unpublished} | set(
            stored
        )
        for row in well:
            task.deliver(range(row, row + 1), lambda: None)

    def _create(self, blocks: list[bytes]) -> dict[bytes, UcmError]:
        """Create those that are not begun. Why some cannot be dumped; those that are stored already
        are in neither."""
        new = [block for block in blocks if block not in self._incomplete]
        if not new:
            return {}
        while len(self._incomplete) + len(new) > INCOMPLETE and self._incomplete:
            oldest = next(iter(self._incomplete))  # its caller has given it up
            self._commit([], [oldest])
        codes = list(self.v0.create(_names(new)))
        refused: dict[bytes, UcmError] = {}
        for block, code in zip(new, codes, strict=True):
            if code == OK:
                self._incomplete[block] = set(range(self._shape.shards))
            elif code != DUPLICATE_KEY:
                refused[block] = error_of(int(code), "create the block")
        taken = [block for block, code in zip(new, codes, strict=True) if code == DUPLICATE_KEY]
        for block, there in zip(taken, self.lookup(taken) if taken else [], strict=True):
            if not there:
                refused[block] = BusyError(
                    "somebody else is writing this block", context={"block_id": block.hex()}
                )
        return refused

    def _commit(self, whole: list[bytes], broken: list[bytes]) -> dict[bytes, UcmError]:
        """Publish the first, drop the second; why some of the first were not published."""
        for block in (*whole, *broken):
            self._incomplete.pop(block, None)
        if broken:
            try:
                self.v0.commit(_names(broken), False)
            except Exception:  # noqa: S110 - the dump has failed already, with a reason of its own
                pass
        if not whole:
            return {}
        try:
            self.v0.commit(_names(whole), True)
            found = self.lookup(whole)
        except TaskError as error:
            return {whole[at]: why for at, why in error.failures.items() if at < len(whole)}
        except Exception as error:
            return dict.fromkeys(whole, _as_ours(error, "commit"))
        missing = NotFoundError("the V0 store committed the block and does not find it")
        return {block: missing for block, there in zip(whole, found, strict=True) if not there}

    # Both
    # ----------------------------------------------------------------------------------------------

    def _move(
        self,
        raw: str,
        tensors: str,
        names: list[str],
        offsets: list[int],
        memory: npt.NDArray[np.uint8],
    ) -> int:
        """Call the store by addresses, or by tensors where that is all it knows, and wait; its
        code."""
        if not self._tensors_only:
            addresses = [memory.ctypes.data + row * self._shape.shard for row in range(len(names))]
            try:
                task = getattr(self.v0, raw)(
                    names, offsets, addresses, [self._shape.shard] * len(names)
                )
                return int(self.v0.wait(task) or OK)
            except NotImplementedError:
                self._tensors_only = True
        try:
            import torch
        except ImportError:
            raise UnsupportedError(
                "this V0 store takes torch tensors alone, and torch is not installed"
            ) from None
        task = getattr(self.v0, tensors)(names, offsets, [torch.from_numpy(row) for row in memory])
        return int(self.v0.wait(task) or OK)

    def _rows(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: Any
    ) -> tuple[list[str], list[int], Addresses]:
        """Checked rows: names, byte offsets, a copy of the addresses."""
        matrix = np.array(addrs, dtype=np.uint64)
        if matrix.size == 0:
            matrix = matrix.reshape(0, len(self._pieces))
        if len(block_ids) != len(matrix) or len(shard_index) != len(matrix):
            raise InvalidInputError(
                "block_ids, shard_index and the rows of addrs must be equally many",
                context={
                    "block_ids": len(block_ids),
                    "shard_index": len(shard_index),
                    "addrs": len(matrix),
                },
            )
        if matrix.ndim != 2 or matrix.shape[1] != len(self._pieces):
            raise InvalidInputError(
                "addrs must have one column per tensor of a shard",
                context={"shape": matrix.shape, "expected": len(self._pieces)},
            )
        if len(matrix) and not matrix.all():
            raise InvalidInputError("an address is null")
        for row, shard in enumerate(shard_index):
            if not 0 <= shard < self._shape.shards:
                raise InvalidInputError(
                    "shard index out of range", context={"row": row, "shard": shard}
                )
        return _names(block_ids), [int(shard) * self._shape.shard for shard in shard_index], matrix

    def _task(self, kind: str, rows: int, timeout: float | None) -> V0Task:
        allowance = self._allowances[kind] if timeout is None else max(0.0, timeout)
        return V0Task(kind, rows, self._clock() + allowance, self._clock)

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        """As in the base class. A dump is staged when :meth:`dump_data` returns."""
        if isinstance(task, list | tuple):
            self._wait_all(task, timeout, until)
            return
        mine = _mine(task)
        staged = until == "staged" and mine.kind == "dump"
        if not staged and (failures := mine.outcome(timeout)):
            first = min(failures)
            mine.error = TaskError(
                f"{len(failures)} rows of the {mine.kind} failed, the first: {failures[first]}",
                failures=dict(failures),
                context={"row": first},
            )
            raise mine.error

    def _wait_all(self, tasks: Sequence[Any], timeout: float | None, until: Until) -> None:
        end = None if timeout is None else self._clock() + timeout
        failed: UcmError | None = None
        for task in tasks:
            try:
                self.wait(task, None if end is None else max(0.0, end - self._clock()), until)
            except UcmError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def check(self, task: Any, until: Until = "published") -> bool:
        """Whether it has ended; never waits."""
        mine = _mine(task)
        return (until == "staged" and mine.kind == "dump") or mine.over()

    def healthy(self) -> bool:
        """False while the V0 store is at a call that should have ended long ago."""
        return not (self._loads.stuck or self._dumps.stuck)

    def free_dump_slots(self) -> int:
        """Blocks that fit into what dumps may hold."""
        return max(0, self._room - self._on_their_way) // self._shape.block

    def stats(self) -> dict[str, Any]:
        """What is on its way, and what the V0 store says of itself if it has a ``stats``."""
        own = {"dump_bytes_waiting": self._on_their_way, "healthy": self.healthy()}
        more = getattr(self.v0, "stats", None)
        return own | (dict(more()) if callable(more) else {})

    def close(self) -> None:
        """End the threads and close the V0 store if it can be closed. What waits in the queues
        fails."""
        if self._closed:
            return
        super().close()
        self._loads.close()
        self._dumps.close()
        if callable(close := getattr(self.v0, "close", None)):
            close()


def _names(block_ids: Sequence[Any]) -> list[str]:
    for block in block_ids:
        if not isinstance(block, bytes) or len(block) != 16:
            raise InvalidInputError(
                "a block id is 16 raw bytes (type bytes)", context={"got": repr(block)[:80]}
            )
    return [block.hex() for block in block_ids]


def _mine(task: Any) -> V0Task:
    if not isinstance(task, V0Task):
        raise InvalidInputError(
            "this is no task of a V0 store", context={"type": type(task).__name__}
        )
    return task


def _as_ours(error: Exception, what: str) -> UcmError:
    if isinstance(error, UcmError):
        return error
    return StoreIOError(f"the V0 store failed to {what}: {type(error).__name__}: {error}")
