"""The store interface of the original UCM, V0, and adapters between it and V1.

V0 has text ids, byte offsets, ``create`` before and ``commit`` after a dump. A block is written in
this order: ``create`` reserves it, ``dump`` or ``dump_data`` writes its parts, ``wait`` reports
their end, ``commit(True)`` makes it visible as a whole or ``commit(False)`` drops it. A block that
was not committed is never found by ``lookup``. New stores use :mod:`ucm.store.ucmstore_v1`.

:class:`V0OverV1` puts V0 in front of any V1 store. V1 publishes a block when its last shard is
dumped, V0 when it is committed. So a dump is kept in memory until the commit, which dumps the whole
block to the V1 store, waits until it is published and raises when it was not. That memory is
bounded: ``create`` answers -50004 (try again) while it is full, and a block that is neither
committed nor dropped for five minutes is dropped. Addresses are host memory. A row covers whole
shards of its block: offset and size are multiples of ``shard_size`` (``io_size`` in V0).

:class:`V1OverV0` puts V1 in front of a V0 store, so that one written against the original works
wherever a V1 store does. V0 calls may block without a deadline, so they run on two threads of this
adapter, one for loads and one for dumps, and never touch the caller's memory: a dump is copied
before it is queued, a load is read into memory of the adapter and copied when it is complete in
time. A late one fails, and no byte of it reaches the caller afterwards. Both directions are
bounded; a dump without room is refused as busy. A block is created with its first shard and
committed with its last; the adapter then looks it up, and a block that is not found was not
published.

Block ids as objects and the block keys of a token list are names of the original too. Every store
takes plain ``bytes``, and the vLLM connector computes keys for a whole identity (weights, layout,
adapters), which are other ones than these.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ucm._core import BlockHasher
from ucm.config.fields import config_error
from ucm.config.model import Deadlines, StoreSettings
from ucm.errors import (
    BY_KIND,
    BusyError,
    ClosedError,
    DeadlineError,
    InternalError,
    InvalidInputError,
    NotFoundError,
    StoreIOError,
    TaskError,
    UcmError,
    UnhealthyError,
    UnsupportedError,
)
from ucm.store.kv_layout import BlockShape, address_of, bytes_of, on_host
from ucm.store.ucmstore_v1 import (
    Addresses,
    Ids,
    Ints,
    Priority,
    Task,
    UcmKVStoreBaseV1,
    Until,
    checked_ids,
    rows_failed,
    same_rows,
    task_of,
    wait_all,
)

__all__ = [
    "DUPLICATE_KEY",
    "OK",
    "BlockId",
    "RequestHasher",
    "Task",
    "UcmKVStoreBase",
    "V0OverV1",
    "V0ToV1Adapter",
    "V1OverV0",
    "block_id",
    "compute_block_hash",
]

#: What ``create``, ``wait`` and ``check`` return for success; any other number is an error
#: (``UcmError.code``).
OK = 0
#: ``create``: the block is stored already, or is being written.
DUPLICATE_KEY = -50003

_HEX_ID = re.compile(r"[0-9a-fA-F]{32}")


def block_id(name: str | bytes) -> bytes:
    """The 16 bytes that a V0 block id names: 32 hexadecimal digits, or the 16 bytes themselves. Any
    other text is an :class:`~ucm.errors.InvalidInputError`: only the caller can hash it safely."""
    if isinstance(name, bytes) and len(name) == 16:
        return name
    if isinstance(name, str) and _HEX_ID.fullmatch(name):
        return bytes.fromhex(name)
    raise InvalidInputError(
        "a block id is 32 hexadecimal digits or 16 bytes; from another text make one with "
        "hashlib.sha256(text.encode()).hexdigest()[:32]",
        context={"block_id": repr(name)[:80]},
    )


class UcmKVStoreBase(ABC):
    """Base of V0 stores. ``config`` is a plain dictionary.

    A store defines ``create``, ``lookup``, ``wait``, ``commit`` and either ``fetch_data`` and
    ``dump_data`` (raw addresses) or ``load`` and ``dump`` (tensors).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    def cc_store(self) -> int:
        """Address of the C table of this store (``ucm_store.h``), 0 where there is none."""
        return 0

    @abstractmethod
    def create(self, block_ids: Sequence[str]) -> Sequence[int]:
        """Reserve blocks: 0 for each that may be dumped now, else why not (:data:`DUPLICATE_KEY`,
        or an error's code, -50004 when there is no room at the moment)."""

    @abstractmethod
    def lookup(self, block_ids: Sequence[str]) -> Sequence[bool]:
        """Whether each block is stored and committed."""

    def prefetch(self, block_ids: Sequence[str]) -> None:
        """A hint that these blocks will be loaded; may be ignored."""

    def load(self, block_ids: Sequence[str], offset: Ints, tensors: Sequence[Any]) -> Any:
        """Start reading: row *i* fills ``tensors[i]`` from byte ``offset[i]`` of block
        ``block_ids[i]``."""
        return self.fetch_data(block_ids, offset, *_spans(tensors))

    def dump(self, block_ids: Sequence[str], offset: Ints, tensors: Sequence[Any]) -> Any:
        """Start writing: row *i* puts ``tensors[i]`` at byte ``offset[i]`` of block
        ``block_ids[i]``, which was created. The tensors must not change before the task was waited
        for."""
        return self.dump_data(block_ids, offset, *_spans(tensors))

    def fetch_data(self, block_ids: Sequence[str], offset: Ints, addr: Ints, size: Ints) -> Any:
        """:meth:`load` into raw memory: ``size[i]`` bytes to address ``addr[i]``."""
        raise NotImplementedError("this store takes tensors, not addresses")

    def dump_data(self, block_ids: Sequence[str], offset: Ints, addr: Ints, size: Ints) -> Any:
        """:meth:`dump` from raw memory: ``size[i]`` bytes from address ``addr[i]``."""
        raise NotImplementedError("this store takes tensors, not addresses")

    @abstractmethod
    def wait(self, task: Any) -> int:
        """Wait for a task: 0, or the code of what went wrong."""

    @abstractmethod
    def commit(self, block_ids: Sequence[str], is_success: bool | Sequence[bool] = True) -> None:
        """Publish created blocks, or drop them; one answer for all or one for each."""

    def check(self, task: Any) -> tuple[int, bool]:
        """(0 or an error's code, whether the task is finished). By default it waits for the
        task."""
        return self.wait(task), True


def _spans(tensors: Sequence[Any]) -> tuple[list[int], list[int]]:
    addresses = [address_of(tensor, row=row) for row, tensor in enumerate(tensors)]
    return addresses, [bytes_of(tensor) for tensor in tensors]


#: Seconds after which a block that is neither committed nor dropped is dropped, as in the original.
FORGOTTEN_S = 300.0
#: Default bound of the bytes of created blocks.
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
        """A hint that these blocks will be loaded."""
        self.v1.prefetch(_ids(block_ids))

    def create(self, block_ids: Sequence[str]) -> list[int]:
        """Reserve blocks: 0; -50003 when stored already, or created here and not committed; -50004
        when the memory for created blocks is full; -50013 when the store is unhealthy; or the error
        of the lookup."""
        ids = _ids(block_ids)
        try:
            if not self.v1.healthy():
                return [UnhealthyError.code] * len(ids)
            stored = self.v1.lookup(ids)
        except UcmError as error:
            return [error.code] * len(ids)
        with self._lock:
            self._sweep()
            return [self._reserve(*one) for one in zip(ids, map(bool, stored), strict=True)]

    def _reserve(self, block: bytes, stored: bool) -> int:
        if stored or block in self._created:
            return DUPLICATE_KEY
        if len(self._created) + sum(len(blocks) for _, blocks in self._read) >= self._most:
            return BusyError.code
        self._created[block] = _Created(self._clock(), self._shape.shards)
        return OK

    def _sweep(self) -> None:
        """Drop blocks that were created long ago, and memory that the V1 store no longer reads."""
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

    def load(self, block_ids: Sequence[str], offset: Ints, tensors: Sequence[Any]) -> Any:
        """As in V0; the tensors lie in host memory."""
        _on_host(tensors)
        return super().load(block_ids, offset, tensors)

    def dump(self, block_ids: Sequence[str], offset: Ints, tensors: Sequence[Any]) -> Any:
        """As in V0; the tensors lie in host memory and are free again when this returns."""
        _on_host(tensors)
        return super().dump(block_ids, offset, tensors)

    def fetch_data(self, block_ids: Sequence[str], offset: Ints, addr: Ints, size: Ints) -> Task:
        """Start reading into the caller's memory, which is written until the task was waited
        for."""
        blocks: list[bytes] = []
        shards: list[int] = []
        rows: list[list[int]] = []
        for block, first, count, address in self._rows(block_ids, offset, addr, size):
            for number in range(count):
                blocks.append(block)
                shards.append(first + number)
                base = address + number * self._shape.shard
                rows.append([base + piece for piece in self._offsets])
        matrix = np.array(rows, dtype=np.uint64).reshape(len(rows), len(self._offsets))
        return _Fetch(self.v1.load_data(blocks, shards, matrix), self.v1)

    def dump_data(self, block_ids: Sequence[str], offset: Ints, addr: Ints, size: Ints) -> Task:
        """Keep these parts for the commit; the source is free again when this returns. Raises
        :class:`~ucm.errors.NotFoundError`, and keeps nothing, for a block that is not created."""
        rows = list(self._rows(block_ids, offset, addr, size))
        with self._lock:
            for number, (block, *_) in enumerate(rows):
                if (created := self._created.get(block)) is None or created.committing:
                    raise NotFoundError(
                        "this block is not created, or its commit has begun: create() it first",
                        context={"row": number, "block_id": block.hex()},
                    )
            targets = [(self._created[one[0]], *one[1:]) for one in rows]
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
        self, block_ids: Sequence[str], offset: Ints, addr: Ints, size: Ints
    ) -> Iterator[tuple[bytes, int, int, int]]:
        """(block, first shard, number of shards, address) of each row."""
        given = {"block_ids": block_ids, "offset": offset, "addr": addr, "size": size}
        lengths = {name: len(values) for name, values in given.items()}
        if len(set(lengths.values())) != 1:
            raise InvalidInputError(
                "block_ids, offset, addr and size must be equally many", context=lengths
            )
        shape, rows = self._shape, zip(_ids(block_ids), offset, addr, size, strict=True)
        for row, (block, at, address, length) in enumerate(rows):
            first, odd = divmod(int(at), shape.shard)
            count, rest = divmod(int(length), shape.shard)
            if odd or rest or first < 0 or count < 1 or first + count > shape.shards:
                where = {"row": row, "offset": at, "size": length}
                raise InvalidInputError(
                    "a row covers whole shards of its block: offset and size are multiples of"
                    " shard_size",
                    context=where | {"shard_size": shape.shard, "block": shape.block},
                )
            if not address:
                raise InvalidInputError("an address is null", context={"row": row})
            yield block, first, count, int(address)

    def wait(self, task: Any) -> int:
        """0, or the code of the first row that failed; ``task.error`` has all of them.
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
        """Publish created blocks, or drop them; returns when every block with True is published.
        Raises :class:`~ucm.errors.TaskError` that names those that are not, by their index in
        ``block_ids``; they may be committed again. Committing a stored block does nothing."""
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
            found = self.v1.lookup([ids[index] for index in unknown])
            for index, stored in zip(unknown, found, strict=True):
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
        """Dump whole blocks, as many at a time as the store has room for, until they are
        published."""
        at = 0
        while at < len(todo):
            room = self.v1.free_dump_slots()
            batch = todo[at : at + (len(todo) if room is None else max(room, 1))]
            at += len(batch)
            failed = self._dump(batch)
            good = [number for number in range(len(batch)) if number not in failed]
            # A dump may succeed and the block still be absent: the next lookup decides.
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
        bases = np.array([made.memory.ctypes.data for *_, made in batch if made.memory is not None])
        pieces = [shard * size + piece for shard in range(shards) for piece in self._offsets]
        matrix = bases.astype(np.uint64)[:, None] + np.array(pieces, np.uint64)[None, :]
        task: Any = None
        try:
            task = self.v1.dump_data(
                [block for _, block, _ in batch for _ in range(shards)],
                list(range(shards)) * len(batch),
                matrix.reshape(len(batch) * shards, -1),
            )
            self.v1.wait(task)
        except TaskError as error:
            if error.failures:
                rows = sorted(error.failures.items(), reverse=True)
                return {row // shards: why for row, why in rows}
            return dict.fromkeys(range(len(batch)), error)
        except BaseException as error:
            if task is not None:  # it may go on reading
                with self._lock:
                    self._read.append((task, [created for _, _, created in batch]))
            if not isinstance(error, Exception):
                raise  # an interrupt of the waiting thread
            why = InternalError(f"the store failed: {error!r}")
            ours = error if isinstance(error, UcmError) else why
            return dict.fromkeys(range(len(batch)), ours)
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


#: Tasks that wait in one lane.
QUEUE = 1024


class V0Task(Task):
    """A load or dump of a V0 store. Ends once: when its work is done, or at its deadline."""

    def __init__(self, kind: str, rows: int, deadline: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self.kind, self.deadline = kind, deadline
        self._clock = clock
        self._rows = rows
        self._lock = threading.Lock()
        self._done: set[int] = set()
        self._failures: dict[int, UcmError] = {}
        self._ended = threading.Event()

    def deliver(self, rows: range, work: Callable[[], None]) -> bool:
        """Do ``work``, which completes these rows, unless the task has ended; it cannot end before
        this returns."""
        with self._lock:
            if self._ended.is_set():
                return False
            work()
            self._done.update(rows)
        return True

    def fail(self, rows: Ints, error: UcmError) -> None:
        """These rows failed."""
        with self._lock:
            if not self._ended.is_set():
                self._failures.update(dict.fromkeys(rows, error))

    def end(self, error: UcmError | None = None) -> None:
        """The work is over; rows that neither succeeded nor failed fail with ``error``."""
        with self._lock:
            if self._ended.is_set():
                return
            for row in range(self._rows):
                if row not in self._done and row not in self._failures:
                    self._failures[row] = error or InternalError("this row was forgotten")
            self.completed = True
            self._ended.set()

    def over(self) -> bool:
        """Whether it has ended; it ends at its deadline."""
        if not self._ended.is_set() and self._clock() >= self.deadline:
            self.end(DeadlineError(f"the {self.kind} of a V0 store did not end in time"))
        return self._ended.is_set()

    _is_over = over

    def outcome(self, timeout: float | None) -> dict[int, UcmError]:
        """The failures by row, after at most ``timeout`` seconds;
        :class:`~ucm.errors.DeadlineError` if not over."""
        left = max(0.0, self.deadline - self._clock())
        self._ended.wait(left if timeout is None else min(left, timeout))
        if not self.over():
            raise DeadlineError(f"the {self.kind} has not ended yet", context={"timeout": timeout})
        return self._failures


class Lane:
    """One daemon thread and a bounded queue; nothing joins it."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        self._lock = threading.Lock()
        self._jobs: queue.Queue[tuple[V0Task, Callable[[], None]] | None] = queue.Queue(QUEUE)
        self._thread: threading.Thread | None = None
        self._running: V0Task | None = None
        self._closed = False

    def submit(self, task: V0Task, job: Callable[[], None]) -> None:
        """Run ``job`` in its turn; it ends ``task`` whatever happens."""
        with self._lock:
            if self._closed:
                raise ClosedError("the store is closed")
            try:
                self._jobs.put_nowait((task, job))
            except queue.Full:
                text = "too many tasks of a V0 store are waiting"
                raise BusyError(text, context={"limit": QUEUE}) from None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    @property
    def stuck(self) -> bool:
        """Whether a call of the store is past its deadline."""
        running = self._running
        return running is not None and self._clock() > running.deadline

    def close(self) -> None:
        """No more jobs. Those waiting and running fail; later results of a running call are
        dropped."""
        closed = ClosedError("the store was closed")
        with self._lock:
            self._closed = True
            running = self._running
            try:
                while (waiting := self._jobs.get_nowait()) is not None:
                    waiting[0].end(closed)
            except queue.Empty:
                pass
            self._jobs.put_nowait(None)
        if running is not None:
            running.end(closed)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            task, job = item
            with self._lock:
                self._running = task
                closed = self._closed
            if closed:
                task.end(ClosedError("the store was closed"))
            try:
                job()
                task.end()
            except Exception as error:
                failed = StoreIOError(f"the V0 store failed: {error!r}")
                task.end(error if isinstance(error, UcmError) else failed)
            self._running = None
            del item, task, job


#: Most blocks at one time of which shards are missing.
INCOMPLETE = 4096
#: Default bound of the bytes of dumps that are copied and not written yet.
_ROOM = 256 << 20

Bytes = npt.NDArray[np.uint8]

_BY_CODE: dict[int, type[UcmError]] = {cls.code: cls for cls in BY_KIND.values()} | {
    InvalidInputError.code: InvalidInputError,
    -50001: BusyError,  # out of memory
}


def error_of(code: int, what: str) -> UcmError:
    """The exception for a code of V0."""
    kind = _BY_CODE.get(code, StoreIOError)
    return kind(f"the V0 store failed to {what}", context={"code": code})


class _Settings(StoreSettings):
    """Those keys of all stores that mean something here."""

    deadlines: Deadlines = Deadlines()


def with_v0_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a V1 store with the keys that V0 stores read, unless they are there."""
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
    ``staging_capacity``: the most bytes of dumps under way, and of the memory for loads; one block
    always fits.
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
            raise config_error(error) from None
        deadlines = settings.deadlines
        self._allowances = {"load": deadlines.load_unknown_s, "dump": deadlines.dump_s}
        self._clock = clock
        starts = np.cumsum([0, *self._shape.pieces]).tolist()
        self._pieces = list(zip(starts, self._shape.pieces, strict=False))
        self._room = max(settings.staging_capacity or _ROOM, self._shape.block)
        self._per_load = max(1, self._room // self._shape.shard)
        self._lock = threading.Lock()
        self._on_their_way = 0  # bytes of dumps
        self._incomplete: dict[bytes, set[int]] = {}  # of the dump thread: block -> missing shards
        self._loads, self._dumps = Lane("ucm-v0-load", clock), Lane("ucm-v0-dump", clock)
        self._tensors_only = type(store).fetch_data is UcmKVStoreBase.fetch_data

    def lookup(self, block_ids: Ids) -> list[bool]:
        """Whether the V0 store has each block."""
        return [bool(found) for found in self.v0.lookup(_names(block_ids))]

    def prefetch(self, block_ids: Ids, priority: Priority = "normal") -> None:
        """Passed on; V0 knows no priorities."""
        del priority
        self.v0.prefetch(_names(block_ids))

    # Loads
    # ----------------------------------------------------------------------------------------------

    def load_data(
        self, block_ids: Ids, shard_index: Ints, addrs: Addresses, timeout: float | None = None
    ) -> V0Task:
        """As in the base class; ``timeout`` in seconds, the configured deadline if None."""
        names, offsets, matrix = self._rows(block_ids, shard_index, addrs)
        task = self._task("load", len(names), timeout)

        def job() -> None:
            for first in range(0, len(names), self._per_load):
                rows = range(first, min(first + self._per_load, len(names)))
                if task.over():
                    return
                part = slice(rows.start, rows.stop)
                self._load(task, rows, names[part], offsets[part], matrix)

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
        self, block_ids: Ids, shard_index: Ints, addrs: Addresses, prerequisite_handle: int = 0
    ) -> V0Task:
        """As in the base class; the source has been read when this returns."""
        if prerequisite_handle:
            raise UnsupportedError("a V0 store knows no events: pass prerequisite_handle 0")
        names, offsets, matrix = self._rows(block_ids, shard_index, addrs)
        size = len(names) * self._shape.shard
        with self._lock:
            if size and self._on_their_way and self._on_their_way + size > self._room:
                limits = {"bytes": size, "limit": self._room}
                raise BusyError("no room for this dump", context=limits)
            self._on_their_way += size
        memory = np.empty((len(names), self._shape.shard), np.uint8)
        for row, addresses in enumerate(matrix.tolist()):
            base = memory.ctypes.data + row * self._shape.shard
            for (offset, length), address in zip(self._pieces, addresses, strict=True):
                ctypes.memmove(base + offset, address, length)
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
        memory: Bytes,
    ) -> None:
        refused = self._create(list(dict.fromkeys(ids)))
        for row, block in enumerate(ids):
            if (why := refused.get(block)) is not None:
                task.fail([row], why)
        taken = [row for row, block in enumerate(ids) if block not in refused]
        rows = [row for row in taken if ids[row] in self._incomplete]
        mine = list(dict.fromkeys(ids[row] for row in rows))
        why_not: UcmError | None = None
        if rows:
            mine_only = memory if len(rows) == len(ids) else memory[rows]
            mine_at = [offsets[row] for row in rows]
            try:
                code = self._move("dump_data", "dump", [names[r] for r in rows], mine_at, mine_only)
                why_not = None if code == OK else error_of(code, "dump")
            except Exception as error:
                why_not = _as_ours(error, "dump")
        if why_not is None:
            for row in rows:
                self._incomplete[ids[row]].discard(shards[row])
        whole = [block for block in mine if why_not is None and not self._incomplete[block]]
        unpublished = self._commit(whole, mine if why_not is not None else [])
        for row in taken:
            failed = (why_not or unpublished.get(ids[row])) if row in set(rows) else None
            if failed is not None:
                task.fail([row], failed)
            else:
                task.deliver(range(row, row + 1), lambda: None)

    def _create(self, blocks: list[bytes]) -> dict[bytes, UcmError]:
        """Create new blocks. Returns why some cannot be dumped; stored ones are neither created nor
        refused."""
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
                where = {"block_id": block.hex()}
                refused[block] = BusyError("another process is writing this block", context=where)
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
        self, raw: str, tensors: str, names: list[str], offsets: list[int], memory: Bytes
    ) -> int:
        """Call the store by addresses, or by tensors where it takes only these, and wait; its
        code."""
        if not self._tensors_only:
            shard = self._shape.shard
            addresses = [memory.ctypes.data + row * shard for row in range(len(names))]
            try:
                task = getattr(self.v0, raw)(names, offsets, addresses, [shard] * len(names))
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
        self, block_ids: Ids, shard_index: Ints, addrs: Any
    ) -> tuple[list[str], list[int], Addresses]:
        """Checked rows: names, byte offsets, a copy of the addresses."""
        matrix = np.array(addrs, dtype=np.uint64)
        if matrix.size == 0:
            matrix = matrix.reshape(0, len(self._pieces))
        rows = same_rows(block_ids, shard_index, matrix)
        if matrix.ndim != 2 or matrix.shape[1] != len(self._pieces):
            raise InvalidInputError(
                "addrs must have one column per tensor of a shard",
                context={"shape": matrix.shape, "expected": len(self._pieces)},
            )
        if rows and not matrix.all():
            raise InvalidInputError("an address is null")
        for row, shard in enumerate(shard_index):
            if not 0 <= shard < self._shape.shards:
                where = {"row": row, "shard": shard}
                raise InvalidInputError("shard index out of range", context=where)
        return _names(block_ids), [int(shard) * self._shape.shard for shard in shard_index], matrix

    def _task(self, kind: str, rows: int, timeout: float | None) -> V0Task:
        allowance = self._allowances[kind] if timeout is None else max(0.0, timeout)
        return V0Task(kind, rows, self._clock() + allowance, self._clock)

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        """As in the base class. A dump is staged when :meth:`dump_data` returns."""
        if isinstance(task, list | tuple):
            return wait_all(self, task, timeout, until, self._clock)
        mine = task_of(V0Task, task, "a V0 store")
        staged = until == "staged" and mine.kind == "dump"
        if not staged and (failures := mine.outcome(timeout)):
            raise rows_failed(mine, failures)

    def check(self, task: Any, until: Until = "published") -> bool:
        """Whether it has ended; never waits."""
        mine = task_of(V0Task, task, "a V0 store")
        return (until == "staged" and mine.kind == "dump") or mine.over()

    def healthy(self) -> bool:
        """False while a call of the V0 store is past its deadline."""
        return not (self._loads.stuck or self._dumps.stuck)

    def free_dump_slots(self) -> int:
        """Blocks that fit into what dumps may hold."""
        return max(0, self._room - self._on_their_way) // self._shape.block

    def stats(self) -> dict[str, Any]:
        """Dumps under way, and the V0 store's own ``stats`` if it has any."""
        own = {"dump_bytes_waiting": self._on_their_way, "healthy": self.healthy()}
        more = getattr(self.v0, "stats", None)
        return own | (dict(more()) if callable(more) else {})

    def close(self) -> None:
        """End the threads and close the V0 store if it can be closed. Queued tasks fail."""
        if self._closed:
            return
        super().close()
        self._loads.close()
        self._dumps.close()
        if callable(close := getattr(self.v0, "close", None)):
            close()


#: The name of the book.
V0ToV1Adapter = V1OverV0


def _names(block_ids: Sequence[Any]) -> list[str]:
    return [block.hex() for block in checked_ids(block_ids)]


def _as_ours(error: Exception, what: str) -> UcmError:
    if isinstance(error, UcmError):
        return error
    return StoreIOError(f"the V0 store failed to {what}: {type(error).__name__}: {error}")


# Names of blocks
# --------------------------------------------------------------------------------------------------


class BlockId(bytes):
    """The 16 bytes that name a block. It is bytes, so it goes wherever an id goes."""

    #: Bytes of an id.
    SIZE = 16

    def __new__(cls, hash_bytes: bytes) -> Self:
        """Raises :class:`~ucm.errors.InvalidInputError` for anything but 16 bytes."""
        checked_ids([hash_bytes])
        return super().__new__(cls, hash_bytes)

    @property
    def bytes(self) -> bytes:
        """The id without its class."""
        return self[:]

    def to_hex(self) -> str:
        """32 hexadecimal digits."""
        return self.hex()

    @classmethod
    def from_hex(cls, hex_str: str) -> Self:
        """The id of 32 hexadecimal digits, in either case; another text is an error."""
        return cls(block_id(hex_str))


def compute_block_hash(
    parent: bytes | Ints,
    tokens: Ints | int,
    prefix_hash: str | None = None,
    *,
    hash_method: str = "sha256",
) -> bytes | str:
    """The key of one block in the chain of :class:`RequestHasher`, in the two forms of the book:
    ``(parent_hash, token_ids)`` gives bytes; ``(token_ids, block_size, prefix_hash)`` gives 32 hex
    digits, and without a prefix hash begins a chain without identity. Raises
    :class:`~ucm.errors.InvalidInputError`."""
    if isinstance(parent, bytes) and not isinstance(tokens, int):
        return _next_key(block_id(parent), tokens, hash_method)
    if isinstance(parent, bytes) or not isinstance(tokens, int) or len(parent) != tokens:
        raise InvalidInputError(
            "a block's key is made from (parent_hash, token_ids), or from (token_ids, block_size,"
            " prefix_hash) with as many tokens as the block has"
        )
    if prefix_hash is None:
        return BlockHasher(b"", tokens, hash_method).hash_blocks(parent)[0].hex()
    return _next_key(block_id(prefix_hash), parent, hash_method).hex()


def _next_key(parent: bytes, tokens: Ints, hash_method: str) -> bytes:
    if hash_method not in ("sha256", "md5"):
        raise InvalidInputError(f"one block is hashed by sha256 or md5, not {hash_method}")
    try:
        content = parent + b"".join(token.to_bytes(4, "little") for token in tokens)
    except (AttributeError, OverflowError) as error:
        raise InvalidInputError(f"a token is a number of 32 bits: {error}") from error
    return hashlib.new(hash_method, content, usedforsecurity=False).digest()[:16]


#: Tokens of a block by default.
DEFAULT_BLOCK_SIZE = 16


class RequestHasher:
    """Chained keys of the full blocks of a request; what is left over at its end has none."""

    def __init__(self, config: Any = None, rank_id: int = 0) -> None:
        """``config`` is vLLM's configuration, whose model, ranks and dtype, with ``rank_id``, make
        keys differ; or a dictionary with ``block_size`` (tokens), ``hash_method`` and perhaps
        ``identity``; or None for the defaults of these."""
        if config is None or isinstance(config, Mapping):
            config = config or {}
            self.block_size = int(config.get("block_size", DEFAULT_BLOCK_SIZE))
            self.hash_method = str(config.get("hash_method", "sha256"))
            self.meta_bytes = str(config.get("identity", "")).encode()
            return
        model = getattr(config, "model_config", config)
        parallel = getattr(config, "parallel_config", config)
        meta = f"{model.model}:{parallel.tensor_parallel_size}:{model.dtype}:{rank_id}"
        self.block_size = int(
            getattr(getattr(config, "cache_config", None), "block_size", 0) or DEFAULT_BLOCK_SIZE
        )
        self.hash_method = "sha256"
        self.meta_bytes = meta.encode()

    def compute_block_hashes(self, token_ids: Any, block_size: int | None = None) -> list[bytes]:
        """The keys of all full blocks, in order; ``block_size`` in tokens, by default the
        configured one."""
        hasher = BlockHasher(
            self.meta_bytes, self.block_size if block_size is None else block_size, self.hash_method
        )
        return hasher.hash_blocks(token_ids)

    #: The same by its other name.
    generate_block_hashes = compute_block_hashes
