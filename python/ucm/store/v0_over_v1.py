"""The V0 face over any V1 store: text ids and byte offsets in front, ``create`` and ``commit`` kept
exactly.

V1 publishes a block when its last shard is dumped, V0 when it is committed. So that no one sees a
block before its ``commit(True)``, and nothing is left of one after ``commit(False)``, what is
dumped is kept in memory here and given to the V1 store as a whole by the commit, which waits until
it is published and raises when it was not. That memory is bounded: ``create`` answers -50004 (try
again) when it is spoken for, and a block that is neither committed nor dropped for five minutes is
dropped.

Addresses are host memory, as everywhere in a store on the host. A row covers whole shards of its
block: offset and size are multiples of ``shard_size`` (``io_size`` in the words of V0).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.errors import (
    BusyError,
    InternalError,
    InvalidInputError,
    NotFoundError,
    TaskError,
    UcmError,
    UnhealthyError,
    UnsupportedError,
)
from ucm.store.shape import BlockShape
from ucm.store.tensors import on_host
from ucm.store.ucmstore import DUPLICATE_KEY, OK, UcmKVStoreBase, block_id
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

#: A block that was created and neither committed nor dropped is dropped after this many seconds, as
#: in the original.
FORGOTTEN_S = 300.0
#: Bytes of created blocks at one time, unless told otherwise.
BUFFER_BYTES = 256 << 20


class _Created:
    """A block between create and commit."""

    def __init__(self, since: float, shards: int) -> None:
        self.since = since
        self.missing = set(range(shards))
        self.memory: npt.NDArray[np.uint8] | None = None
        self.committing = False


class _Fetch(Task):
    """A load, which is over when that of the V1 store is."""

    def __init__(self, handle: Any, v1: UcmKVStoreBaseV1) -> None:
        super().__init__(handle)
        self._v1 = v1

    def _is_over(self) -> bool:
        return self._v1.check(self.handle)


class V0OverV1(UcmKVStoreBase):
    """A V1 store behind the interface of V0."""

    def __init__(
        self,
        store: UcmKVStoreBaseV1,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``buffer_bytes`` bounds what is kept of created blocks; at least one block always
        fits."""
        super().__init__(store.config)
        self.v1 = store
        self._shape = BlockShape.of(store.config)
        self._offsets = [0, *itertools.accumulate(self._shape.pieces)][:-1]
        self._most = max(1, buffer_bytes // self._shape.block)
        self._clock = clock
        self._lock = threading.Lock()
        self._created: dict[bytes, _Created] = {}
        self._read: list[tuple[Any, list[_Created]]] = []  # dumps that may still read what was kept

    # Presence
    # ----------------------------------------------------------------------------------------------

    def cc_store(self) -> int:
        """Address of the V1 store's C table, 0 where there is none."""
        return self.v1.cc_store()

    def lookup(self, block_ids: Sequence[str]) -> list[bool]:
        """Whether each block is published."""
        return [bool(found) for found in self.v1.lookup(_ids(block_ids))]

    def prefetch(self, block_ids: Sequence[str]) -> None:
        """A hint that these blocks will be asked for."""
        self.v1.prefetch(_ids(block_ids))

    def create(self, block_ids: Sequence[str]) -> list[int]:
        """Reserve blocks: 0; -50003 when stored already or created here and not committed; -50004
        when the memory for created blocks is spoken for; -50013 when the store is unhealthy; what
        the lookup failed with."""
        ids = _ids(block_ids)
        try:
            if not self.v1.healthy():
                return [UnhealthyError.code] * len(ids)
            stored = self.v1.lookup(ids)
        except UcmError as error:
            return [error.code] * len(ids)
        with self._lock:
            self._sweep()
            return [
                self._reserve(block, bool(there)) for block, there in zip(ids, stored, strict=True)
            ]

    def _reserve(self, block: bytes, stored: bool) -> int:
        if stored or block in self._created:
            return DUPLICATE_KEY
        if len(self._created) + sum(len(blocks) for _, blocks in self._read) >= self._most:
            return BusyError.code
        self._created[block] = _Created(self._clock(), self._shape.shards)
        return OK

    def _sweep(self) -> None:
        """Forget what no one commits, and what the V1 store no longer reads."""
        now = self._clock()
        for block, created in list(self._created.items()):
            if now - created.since > FORGOTTEN_S and not created.committing:
                del self._created[block]
        self._read = [(task, blocks) for task, blocks in self._read if not self._has_ended(task)]

    def _has_ended(self, task: Any) -> bool:
        try:
            return self.v1.check(task)
        except UcmError as error:
            return not error.retryable
        except Exception:  # a store that cannot say: its memory stays with it
            return False

    # Moving bytes
    # -------------------------------------------------------------------------------------------

    def load(self, block_ids: Sequence[str], offset: Sequence[int], tensors: Sequence[Any]) -> Task:
        """As in V0; the tensors lie in host memory."""
        _on_host(tensors)
        task: Task = super().load(block_ids, offset, tensors)
        return task

    def dump(self, block_ids: Sequence[str], offset: Sequence[int], tensors: Sequence[Any]) -> Task:
        """As in V0; the tensors lie in host memory and are free again when this returns."""
        _on_host(tensors)
        task: Task = super().dump(block_ids, offset, tensors)
        return task

    def fetch_data(
        self,
        block_ids: Sequence[str],
        offset: Sequence[int],
        addr: Sequence[int],
        size: Sequence[int],
    ) -> Task:
        """Start reading straight into the caller's memory, which is written until the task was
        waited for."""
        blocks: list[bytes] = []
        shards: list[int] = []
        rows: list[list[int]] = []
        for block, first, count, address in self._rows(block_ids, offset, addr, size):
            for number in range(count):
                blocks.append(block)
                shards.append(first + number)
                rows.append(
                    [address + number * self._shape.shard + piece for piece in self._offsets]
                )
        matrix = np.array(rows, dtype=np.uint64).reshape(len(rows), len(self._offsets))
        return _Fetch(self.v1.load_data(blocks, shards, matrix), self.v1)

    def dump_data(
        self,
        block_ids: Sequence[str],
        offset: Sequence[int],
        addr: Sequence[int],
        size: Sequence[int],
    ) -> Task:
        """Keep these parts for the commit; the source is free again when this returns.

        Raises :class:`~ucm.errors.NotFoundError` for a block that is not created; then nothing of
        the call is kept.
        """
        rows = list(self._rows(block_ids, offset, addr, size))
        with self._lock:
            for number, (block, *_) in enumerate(rows):
                if (created := self._created.get(block)) is None or created.committing:
                    raise NotFoundError(
                        "this block is not created, or its commit has begun: create() it first",
                        context={"row": number, "block_id": block.hex()},
                    )
            targets = [
                (self._created[block], first, count, address)
                for block, first, count, address in rows
            ]
            for created, *_ in targets:
                if created.memory is None:
                    created.memory = np.empty(self._shape.block, np.uint8)
        for created, first, count, address in targets:
            assert created.memory is not None  # made above
            size_of = self._shape.shard
            ctypes.memmove(created.memory.ctypes.data + first * size_of, address, count * size_of)
        with self._lock:
            for created, first, count, _ in targets:
                created.missing.difference_update(range(first, first + count))
        done = Task()
        done.completed = True
        return done

    def _rows(
        self,
        block_ids: Sequence[str],
        offset: Sequence[int],
        addr: Sequence[int],
        size: Sequence[int],
    ) -> Iterator[tuple[bytes, int, int, int]]:
        """(block, first shard, number of shards, address) of each row."""
        if not len(block_ids) == len(offset) == len(addr) == len(size):
            raise InvalidInputError(
                "block_ids, offset, addr and size must be equally many",
                context={
                    "block_ids": len(block_ids),
                    "offset": len(offset),
                    "addr": len(addr),
                    "size": len(size),
                },
            )
        shape = self._shape
        for row, (block, at, address, length) in enumerate(
            zip(_ids(block_ids), offset, addr, size, strict=True)
        ):
            first, odd = divmod(int(at), shape.shard)
            count, rest = divmod(int(length), shape.shard)
            if odd or rest or first < 0 or count < 1 or first + count > shape.shards:
                raise InvalidInputError(
                    "a row covers whole shards of its block: offset and size are multiples of"
                    " shard_size",
                    context={
                        "row": row,
                        "offset": at,
                        "size": length,
                        "shard_size": shape.shard,
                        "block": shape.block,
                    },
                )
            if not address:
                raise InvalidInputError("an address is null", context={"row": row})
            yield block, first, count, int(address)

    def wait(self, task: Any) -> int:
        """0, or the code of the first row that failed; ``task.error`` has the whole story.
        Repeatable."""
        if isinstance(task, list | tuple):
            return next((code for code in [self.wait(one) for one in task] if code), OK)
        if task.handle is None:
            return OK  # a dump: kept when it was made
        try:
            self.v1.wait(task.handle)
        except TaskError as error:
            task.error, task.completed = error, True
            return error.failures[min(error.failures)].code if error.failures else error.code
        except UcmError as error:
            task.error = error
            return error.code
        task.completed = True
        return OK

    def check(self, task: Any) -> tuple[int, bool]:
        """(code, finished), without waiting."""
        if task.handle is not None and not self.v1.check(task.handle):
            return OK, False
        return self.wait(task), True

    # Commit
    # ----------------------------------------------------------------------------------------------

    def commit(self, block_ids: Sequence[str], is_success: bool | Sequence[bool] = True) -> None:
        """Publish created blocks, or drop them.

        Returns when every block with True is published. Raises :class:`~ucm.errors.TaskError` that
        names those that are not, by their index in ``block_ids``; they stay created and may be
        committed again. Committing a block that is stored already does nothing.
        """
        ids = _ids(block_ids)
        flags = [is_success] * len(ids) if isinstance(is_success, bool | int) else list(is_success)
        if len(flags) != len(ids):
            raise InvalidInputError(
                "is_success is one answer for all blocks or one for each",
                context={"block_ids": len(ids), "is_success": len(flags)},
            )
        failures: dict[int, UcmError] = {}
        todo: list[tuple[int, bytes, _Created]] = []
        unknown: list[int] = []
        with self._lock:
            for index, (block, good) in enumerate(zip(ids, flags, strict=True)):
                created = self._created.get(block)
                if not good:
                    if created is not None and not created.committing:
                        del self._created[block]
                elif created is None:
                    unknown.append(index)
                elif created.committing:
                    failures[index] = BusyError("another commit of this block is under way")
                elif created.missing:
                    failures[index] = InvalidInputError(
                        "not every part of this block was dumped",
                        context={"missing_shards": sorted(created.missing)},
                    )
                else:
                    created.committing = True
                    todo.append((index, block, created))
        if unknown:
            for index, stored in zip(
                unknown, self.v1.lookup([ids[i] for i in unknown]), strict=True
            ):
                if not stored:
                    failures[index] = NotFoundError("this block is neither created nor stored")
        ended = False
        try:
            self._publish(todo, failures)
            ended = True
        finally:
            with self._lock:
                for index, block, created in todo:
                    created.committing = False
                    if ended and index not in failures and self._created.get(block) is created:
                        del self._created[block]
        if failures:
            first = min(failures)
            raise TaskError(
                f"{len(failures)} of {len(ids)} blocks were not published, the first:"
                f" {failures[first]}",
                failures=failures,
                context={"block_id": ids[first].hex()},
            )

    def _publish(
        self, todo: list[tuple[int, bytes, _Created]], failures: dict[int, UcmError]
    ) -> None:
        """Dump whole blocks, as many at a time as the store has room for, and wait until they are
        published."""
        at = 0
        while at < len(todo):
            room = self.v1.free_dump_slots()
            batch = todo[at : at + (len(todo) if room is None else max(room, 1))]
            at += len(batch)
            failed = self._dump(batch)
            good = [number for number in range(len(batch)) if number not in failed]
            # A dump may be well and the block still not there: what counts is what the next lookup
            # says.
            try:
                found = self.v1.lookup([batch[number][1] for number in good])
            except UcmError as error:
                found, failed = [], failed | dict.fromkeys(good, error)
            for number, there in zip(good, found, strict=False):
                if not there:
                    failed[number] = InternalError(
                        "the dump ended well, but the store does not find the block"
                    )
            failures.update({batch[number][0]: error for number, error in failed.items()})

    def _dump(self, batch: list[tuple[int, bytes, _Created]]) -> dict[int, UcmError]:
        """Why blocks of the batch were not published, by their index in it."""
        size, shards = self._shape.shard, self._shape.shards
        bases = [
            created.memory.ctypes.data for _, _, created in batch if created.memory is not None
        ]
        pieces = np.array(
            [shard * size + piece for shard in range(shards) for piece in self._offsets], np.uint64
        )
        matrix = (np.array(bases, np.uint64)[:, None] + pieces[None, :]).reshape(
            len(bases) * shards, -1
        )
        task: Any = None
        try:
            task = self.v1.dump_data(
                [block for _, block, _ in batch for _ in range(shards)],
                list(range(shards)) * len(batch),
                matrix,
            )
            self.v1.wait(task)
        except TaskError as error:
            if error.failures:
                return {
                    row // shards: why for row, why in sorted(error.failures.items(), reverse=True)
                }
            return dict.fromkeys(range(len(batch)), error)
        except BaseException as error:
            if task is not None:  # not over yet, as far as is known: it may go on reading
                with self._lock:
                    self._read.append((task, [created for _, _, created in batch]))
            if not isinstance(error, Exception):
                raise  # the user's: who waits is interrupted
            why = (
                error
                if isinstance(error, UcmError)
                else InternalError(f"the store failed: {error!r}")
            )
            return dict.fromkeys(range(len(batch)), why)
        return {}

    def close(self) -> None:
        """Drop what is not committed and close the V1 store. Idempotent."""
        self.v1.close()
        with self._lock:
            self._created.clear()
            self._sweep()

    def __enter__(self) -> V0OverV1:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _ids(names: Sequence[str]) -> list[bytes]:
    if isinstance(names, str | bytes):
        raise InvalidInputError("block ids are a list of texts, not one text")
    return [block_id(name) for name in names]


def _on_host(tensors: Sequence[Any]) -> None:
    for row, tensor in enumerate(tensors):
        if not on_host(tensor):
            raise UnsupportedError(
                "V0 over a V1 store takes tensors in host memory", context={"row": row}
            )
