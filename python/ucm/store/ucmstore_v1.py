"""The public store interface, V1: what a store must define, and what the base class adds.

A block is named by 16 raw bytes and moved in *rows*: (block id, shard index, device addresses). A
store written in Python defines :meth:`~UcmKVStoreBaseV1.lookup`,
:meth:`~UcmKVStoreBaseV1.load_data`, :meth:`~UcmKVStoreBaseV1.dump_data` and
:meth:`~UcmKVStoreBaseV1.wait`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ucm.errors import (
    BusyError,
    ClosedError,
    InvalidInputError,
    TaskError,
    UcmError,
    UnsupportedError,
)
from ucm.store.kv_layout import KVLayout, address_of

#: Ids of blocks, 16 raw bytes each; whole numbers; device addresses, of shape (rows, pieces of a
#: row); numbers of device blocks.
Ids = Sequence[bytes]
Ints = Sequence[int]
Addresses = npt.NDArray[np.uint64]
Blocks = Sequence[int] | npt.NDArray[np.int64]

#: ``"published"``: visible to others and survives this process. ``"staged"``: device memory may be
#: reused.
Until = Literal["staged", "published"]

#: Bytes kept beside the KV, by the name of the side shard: an array with a row for each row of the
#: call.
Sides = Mapping[str, npt.NDArray[Any]]

#: How soon a prefetched block will be loaded, the soonest first.
Priority = Literal["urgent", "next_batch", "normal", "speculative"]

#: Where a tier keeps its blocks: in memory of this host, in a file system, or elsewhere.
Medium = Literal["host", "disk", ""]

Tensors = Sequence[Sequence[Any]]

K = TypeVar("K", bound="Task")

#: Stands for the tier of a block that is no hit, in the answer of
#: :meth:`UcmKVStoreBaseV1.locate`.
NOWHERE = 255


class Asked(Protocol):
    """A lookup under way on a thread of a store."""

    def answer(self) -> tuple[bytes, str, float] | None:
        """The tiers of :meth:`UcmKVStoreBaseV1.locate_on_prefix` or
        :meth:`UcmKVStoreBaseV1.locate`, why the first block that is no hit is none ("absent" if all
        are hits), and the seconds until that was known; None before. Never waits; raises the error
        of the lookup."""


class Task:
    """A load or dump under way. Stores may subclass it or return any object of their own."""

    _store: UcmKVStoreBaseV1 | None = None
    _completed = False

    def __init__(self, handle: Any = None, store: UcmKVStoreBaseV1 | None = None) -> None:
        """``store`` is polled for the end of the task; without one, :attr:`completed` is what was
        last written into it."""
        self.handle = handle
        self.error: UcmError | None = None
        self._store = store

    @property
    def completed(self) -> bool:
        """Whether it is finished, also when it failed. Polls its store, and never waits."""
        if not self._completed:
            try:
                self._completed = self._is_over()
            except UcmError as error:  # busy says nothing; a closed store ended all its tasks
                self._completed = not error.retryable
        return self._completed

    @completed.setter
    def completed(self, completed: bool) -> None:
        self._completed = completed

    def _is_over(self) -> bool:
        """Polls the store; overridden by tasks that know their end."""
        store, self._store = self._store, None  # its check() may read `completed` itself
        if store is None:
            return False
        try:
            return store.check(self)
        finally:
            self._store = store


class SidesTask(Task):
    """Side shards being read. A store that has them at once passes them here; others override
    :meth:`result`."""

    def __init__(
        self,
        handle: Any = None,
        store: UcmKVStoreBaseV1 | None = None,
        sides: tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        super().__init__(handle, store)
        self._sides = sides
        self._completed = sides is not None

    def result(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """The bytes, of shape (ids, bytes of the side), and for each id whether they are there and
        sound; missing bytes are zero. Raises :class:`~ucm.errors.InvalidInputError` before the task
        is finished."""
        if self._sides is None:
            raise InvalidInputError("the side shards are not there yet: wait for the task first")
        return self._sides


class UcmKVStoreBaseV1(ABC):
    """Base of every store. ``config`` is a plain dictionary; its keys are those of
    ``docs/configuration.md``."""

    #: Where the KV lies, once it is registered.
    _kv: KVLayout | None = None

    #: A store that distinguishes the two levels of a dump sets this and overrides :meth:`check` and
    #: :meth:`wait`.
    has_staged_level: bool = False

    #: A store whose :meth:`load_data` takes ``timeout`` (seconds, keyword) sets this.
    takes_load_timeout: bool = False

    #: Whether rows may name memory of an accelerator; a store that does not set this is not used
    #: for KV on one. A store that sets it is passed ``platform``.
    serves_accelerators: bool = False

    #: Names of the tiers, the top one first, of a store that has several.
    tier_names: tuple[str, ...] = ()

    #: The medium of each tier, the top one first, for metrics; empty where it is not known.
    tier_media: tuple[Medium, ...] = ()

    #: Side shards that this store keeps beside the KV of a block, by name: the bytes of each for a
    #: whole block. A store with any takes ``sides``, a keyword of :meth:`dump_data`, and overrides
    #: :meth:`load_sides` and :meth:`dump_sides`.
    side_sizes: Mapping[str, int] = MappingProxyType({})

    #: Set where each process has memory of its own, which :meth:`touch` of another does not reach.
    has_own_memory: bool = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self._closed = False
        self._waiter: _Waiter | None = None

    # What a store must define
    # -------------------------------------------------------------------------------

    @abstractmethod
    def lookup(self, block_ids: Ids) -> Sequence[bool]:
        """Whether each block is stored whole; exact per id, in order."""

    @abstractmethod
    def load_data(self, block_ids: Ids, shard_index: Ints, addrs: Addresses) -> Task:
        """Start reading: row *i* fills the device pieces ``addrs[i]`` of shard ``shard_index[i]``.
        ``addrs`` has shape (rows, pieces per row); the sizes are those of the configuration."""

    @abstractmethod
    def dump_data(
        self, block_ids: Ids, shard_index: Ints, addrs: Addresses, prerequisite_handle: int = 0
    ) -> Task:
        """Start writing. ``prerequisite_handle`` is a device event to wait for before reading, 0
        for none. Raises :class:`~ucm.errors.BusyError` at once when no slot is free; the source is
        then untouched. A store with :attr:`side_sizes` takes a keyword ``sides`` too, as
        :meth:`dump` does."""

    @abstractmethod
    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        """Wait for one task or a list of them, at most ``timeout`` seconds (None: the store's own
        deadline). Repeatable. Raises :class:`~ucm.errors.TaskError` (with the failures by row) or
        another :class:`~ucm.errors.UcmError`. A store may leave out ``timeout`` and ``until``."""

    # What the base class gives
    # ------------------------------------------------------------------------------

    def for_part(self, index: int) -> UcmKVStoreBaseV1:
        """This store for the blocks of its part of that number (key ``own_parts``; 0 is the first):
        what is loaded, dumped and registered is of that part, all else is the store's. Closing it
        does nothing. By default a store has one part."""
        if index:
            raise UnsupportedError(
                "this store serves models with one KV cache group",
                context={"store": type(self).__name__, "part": index},
            )
        return self

    def register_kv_tensors(self, kv_caches: Mapping[str, Any]) -> None:
        """Register where a model's KV lies: for each layer, by name, a tensor whose first dimension
        counts blocks."""
        self.register_kv(KVLayout(kv_caches))

    def register_kv(self, layout: KVLayout) -> None:
        """Register where the KV lies, so that :meth:`load_blocks` and :meth:`dump_blocks` need no
        addresses. Tasks under way keep the earlier layout; its tensors must stay until they end."""
        self._kv = layout

    def load_blocks(self, block_ids: Ids, blocks: Blocks, timeout: float | None = None) -> Task:
        """:meth:`load_data` of whole blocks, block *i* into the registered device block number
        ``blocks[i]``; ``timeout`` in seconds for stores that take one, their own deadline if
        None."""
        shards, addresses = [0] * len(block_ids), self._registered().addresses(blocks)
        if timeout is not None and self.takes_load_timeout:
            return self.load_data(block_ids, shards, addresses, timeout=timeout)  # type: ignore[call-arg]
        return self.load_data(block_ids, shards, addresses)

    def dump_blocks(
        self,
        block_ids: Ids,
        blocks: Blocks,
        prerequisite_handle: int = 0,
        *,
        sides: Sides | None = None,
    ) -> Task:
        """:meth:`dump_data` of whole blocks, block *i* from the device block number ``blocks[i]``.

        ``sides``: for each name of :attr:`side_sizes` an array whose row *i* belongs to block *i*.
        Arrays lie in host memory and are copied before this returns. A stored block stays as it is,
        with the sides it has or without: see :meth:`dump_sides`.
        """
        addresses = self._registered().addresses(blocks)
        return self._dump_rows(
            block_ids, [0] * len(block_ids), addresses, prerequisite_handle, sides
        )

    def _dump_rows(
        self,
        block_ids: Ids,
        shard_index: Ints,
        addrs: Addresses,
        prerequisite_handle: int,
        sides: Sides | None,
    ) -> Task:
        """:meth:`dump_data`, which is passed ``sides`` only where there are any."""
        if not sides:
            return self.dump_data(block_ids, shard_index, addrs, prerequisite_handle)
        if not self.side_sizes:
            raise _without_sides(self)
        return self.dump_data(block_ids, shard_index, addrs, prerequisite_handle, sides=sides)  # type: ignore[call-arg]

    def load_sides(self, block_ids: Ids, name: str, timeout: float | None = None) -> SidesTask:
        """Start reading the side shard of that name of each block, without its KV; ``timeout`` in
        seconds, the deadline of a load if None.

        Each is read from the record of its block, else from a record of its own
        (:meth:`dump_sides`). One that is missing, not sound or late fails nothing:
        :meth:`SidesTask.result` says which are there.
        """
        del block_ids, name, timeout
        raise _without_sides(self)

    def dump_sides(self, block_ids: Ids, sides: Sides) -> Task:
        """Start writing side shards of blocks that are stored without them: each becomes a record
        of its own, which :meth:`load_sides` finds. ``sides`` as of :meth:`dump_blocks`, but not all
        names are needed. Raises :class:`~ucm.errors.BusyError` at once when no slot is free."""
        del block_ids, sides
        raise _without_sides(self)

    def _registered(self) -> KVLayout:
        if self._kv is None:
            raise InvalidInputError(
                "no KV is registered with this store: call register_kv_tensors first"
            )
        return self._kv

    def check(self, task: Any, until: Until = "published") -> bool:
        """Whether the task is finished (also when it failed), without waiting. By default a bounded
        thread of the store's own waits for it."""
        del until  # a store without two levels has one answer
        if self._waiter is None:
            self._waiter = _Waiter(self)
        return self._waiter.finished(task)

    def lookup_on_prefix(self, block_ids: Ids) -> int:
        """Index of the last block of the present prefix, -1 when the first is absent; every counted
        id is checked."""
        done, window = 0, 16
        while done < len(block_ids):
            for present in self.lookup(block_ids[done : done + window]):
                if not present:
                    return done - 1
                done += 1
            window = min(window * 2, 4096)
        return done - 1

    def explain_on_prefix(self, block_ids: Ids) -> tuple[int, str]:
        """The same, and why the next block is no hit: a name of :class:`ucm.reasons.MissReason`.
        Overridden by stores that know other reasons than absent."""
        return self.lookup_on_prefix(block_ids), "absent"

    def locate_on_prefix(self, block_ids: Ids) -> tuple[bytes, str]:
        """The tier that each block of the present prefix would be loaded from, a byte each (0 is
        the top one), and the reason of :meth:`explain_on_prefix`. The speed of loads is measured
        for each tier."""
        last, reason = self.explain_on_prefix(block_ids)
        return bytes(last + 1), reason

    def begin_locate_on_prefix(self, block_ids: Ids) -> Asked | None:  # noqa: ARG002 - see below
        """:meth:`locate_on_prefix` on a thread of the store, which does not need the interpreter;
        never waits. None where the store has no such thread."""
        return None

    def locate(self, block_ids: Ids) -> bytes:
        """The tier that each of these blocks would be loaded from, a byte each, :data:`NOWHERE` for
        one that is no hit. For blocks that are no prefix of a chain, such as those of a window."""
        return bytes(0 if there else NOWHERE for there in self.lookup(block_ids))

    def begin_locate(self, block_ids: Ids) -> Asked | None:  # noqa: ARG002 - see below
        """:meth:`locate` on a thread of the store, which does not need the interpreter; never
        waits. None where the store has no such thread."""
        return None

    @property
    def answers_at_once(self) -> bool:
        """Whether :meth:`locate_on_prefix` is answered from memory, without a system call. May
        change."""
        return False

    def served(self, task: Any) -> Sequence[int]:  # noqa: ARG002 - for stores that have several tiers
        """Blocks that a finished load read from each tier, the top one first; empty where that is
        not known. :meth:`locate_on_prefix` may be outdated by then."""
        return ()

    def stages(self, task: Any) -> Mapping[str, Sequence[float]]:  # noqa: ARG002 - as above
        """The stages of a finished task, for a profile: of each the first begin and the last end,
        in seconds after the begin of the task, and the sum over its blocks. Empty where the store
        does not measure them."""
        return {}

    def prefetch(self, block_ids: Ids, priority: Priority = "normal") -> int | None:
        """A hint that these blocks will be loaded; may be ignored.

        A store with stages brings them into its upper ones, the most urgent first and after all
        loads, unless they are ``"urgent"``. Returns how many it accepted, waiting ones included;
        blocks beyond its queue are dropped. 0 without an upper stage, None here.
        """
        del block_ids, priority
        return None

    def prefetch_room(self) -> int:
        """Blocks that may be prefetched ahead of need; 0 where prefetching does nothing."""
        return 0

    def cancel_prefetch(self, block_ids: Ids) -> int:
        """Cancel prefetches of these blocks; returns how many were still waiting."""
        del block_ids
        return 0

    def flush(self) -> None:
        """Publish soon what was dumped and waits for more to be published with it (an open
        segment). Not needed before :meth:`wait`."""

    def refresh(self) -> None:
        """A block is waited for that another process publishes: a store whose lookups are answered
        from what it listed some time ago lists it again soon. Never waits."""

    def describe(
        self,
        block_ids: Ids,
        *,
        parents: Sequence[bytes] | None = None,
        ordinals: Ints | None = None,
        tokens: Ints | None = None,
        tenant: bytes | None = None,
    ) -> None:
        """What ids do not say, for the record's header: parent id, ordinal in the chain, number of
        tokens; ``tenant``: the 32-byte tag of the tenant of all these blocks. A store that
        overrides this without ``tenant`` is not passed it."""

    def mark_bad(self, block_ids: Ids) -> None:
        """A rank of this engine could not use these records. They are no hits until the next dump
        replaces them, even where this store finds them sound."""
        self.distrust(block_ids)

    def clear_bad(self, block_ids: Ids) -> None:
        """Another rank, which writes for this one too, replaces these records: they may be read
        again."""
        self.trust(block_ids)

    def distrust(self, block_ids: Ids) -> None:
        """Older name of :meth:`mark_bad`, called for stores that define it."""

    def trust(self, block_ids: Ids) -> None:
        """Older name of :meth:`clear_bad`, called for stores that define it."""

    def touch(self, block_ids: Ids) -> None:
        """These blocks, in chain order, were used by a request, even if found elsewhere: evict them
        later."""

    def touch_own(self, block_ids: Ids, first: int = 0) -> None:
        """The same for what only this process can touch, its memory and the segments it merges;
        ``first``: position of the first of these blocks in its chain. Must be quick."""

    @property
    def wants_touch_own(self) -> bool:
        """Whether :meth:`touch_own` does anything; may change until the first lookup."""
        return self.has_own_memory

    def load(self, block_ids: Ids, shard_index: Ints, tensors: Tensors) -> Task:
        """:meth:`load_data` into tensors: ``tensors[i][j]`` is piece *j* of row *i*."""
        return self._own(self.load_data(block_ids, shard_index, _addresses(tensors)))

    def dump(
        self,
        block_ids: Ids,
        shard_index: Ints,
        tensors: Tensors,
        prerequisite_handle: int = 0,
        *,
        sides: Sides | None = None,
    ) -> Task:
        """:meth:`dump_data` from tensors: ``tensors[i][j]`` is piece *j* of row *i*.

        ``sides`` as of :meth:`dump_blocks`; where a block is split into shards, row *i* of an array
        is the share of row *i* of the call: a side shard is the shares of all shards in order.
        """
        rows = _addresses(tensors)
        return self._own(self._dump_rows(block_ids, shard_index, rows, prerequisite_handle, sides))

    def _own(self, task: Task) -> Task:
        """The task, which polls this store from now on unless it was made with one."""
        if getattr(task, "_store", self) is None:  # a store may return an object of its own
            task._store = self
        return task

    def cc_store(self) -> int:
        """Address of the C table of this store (``ucm_store.h``, see ``docs/store-api.md``), 0
        without one."""
        return 0

    def stats(self) -> dict[str, Any]:
        """Counters and histograms, readable at any time."""
        return {}

    def healthy(self) -> bool:
        """Whether loads and dumps can succeed now, without waiting. A store that returns False must
        return True again after a :meth:`lookup` found its medium well; lookups go on from time to
        time."""
        return True

    def early(self) -> tuple[list[bytes], list[bytes]]:
        """Block ids that this store can read before others can (in its memory, in a file that is
        not published yet): those added and those removed since the last call. Removed means
        evicted, or published so long ago that others have found them."""
        return [], []

    def trouble(self) -> str:
        """Why :meth:`healthy` is False, for a log; empty when that is not known."""
        return ""

    def free_dump_slots(self) -> int | None:
        """How many more blocks a dump could take now, None when unbounded or unknown."""
        return None

    def close(self) -> None:
        """Finish or fail what is under way, within the shutdown deadline. Idempotent."""
        self._closed = True
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None

    def __enter__(self) -> UcmKVStoreBaseV1:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _without_sides(store: UcmKVStoreBaseV1) -> UnsupportedError:
    return UnsupportedError(
        "this store keeps no side shards; one of the core does where its key `sides` names them",
        context={"store": type(store).__name__},
    )


def wait_all(
    store: UcmKVStoreBaseV1,
    tasks: Sequence[Any],
    timeout: float | None,
    until: Until,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait for several tasks within one ``timeout`` (seconds); raises the first failure once all
    have been waited for."""
    end = None if timeout is None else clock() + timeout
    failed: UcmError | None = None
    for task in tasks:
        try:
            store.wait(task, None if end is None else max(0.0, end - clock()), until)
        except UcmError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def rows_failed(task: Any, failures: Mapping[int, Any]) -> TaskError:
    """The error of a task of which rows failed; ``task.error`` is it from now on."""
    first = min(failures)
    text = f"{len(failures)} rows of the {task.kind} failed, the first: {failures[first]}"
    error = task.error = TaskError(text, failures=dict(failures), context={"row": first})
    return error


def checked_ids(block_ids: Sequence[Any]) -> Sequence[bytes]:
    """The ids, if each is 16 raw bytes."""
    for block in block_ids:
        if not isinstance(block, bytes) or len(block) != 16:
            raise InvalidInputError(
                "a block id is 16 raw bytes (type bytes)", context={"got": repr(block)[:80]}
            )
    return block_ids


def same_rows(block_ids: Sequence[Any], shard_index: Ints, addrs: Any) -> int:
    """The number of rows, if it is the same everywhere."""
    rows = len(block_ids)
    if not rows == len(shard_index) == len(addrs):
        raise InvalidInputError(
            "block_ids, shard_index and the rows of addrs must be equally many",
            context={"block_ids": rows, "shard_index": len(shard_index), "addrs": len(addrs)},
        )
    return rows


def task_of(kind: type[K], task: Any, store: str, **context: Any) -> K:
    """The task, if it is one of this kind, which that store makes."""
    if not isinstance(task, kind):
        given = {"type": type(task).__name__, **context}
        raise InvalidInputError(f"this is no task of {store}", context=given)
    return task


def _addresses(tensors: Tensors) -> npt.NDArray[np.uint64]:
    """Addresses of a matrix of tensors (anything with ``data_ptr()``, or NumPy arrays)."""
    widths = {len(row) for row in tensors}
    if len(widths) > 1:
        raise InvalidInputError(
            "every row names the same number of tensors", context={"widths": sorted(widths)}
        )
    matrix = np.empty((len(tensors), widths.pop() if widths else 0), dtype=np.uint64)
    for i, row in enumerate(tensors):
        for j, tensor in enumerate(row):
            matrix[i, j] = address_of(tensor, row=i, column=j)
    return matrix


class _Waiter:
    """Answers ``check`` for stores that can only wait: one daemon thread, a bounded queue."""

    LIMIT = 4096

    def __init__(self, store: UcmKVStoreBaseV1) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._states: dict[int, tuple[Any, bool]] = {}
        self._queue: queue.Queue[Any] = queue.Queue(self.LIMIT)
        self._thread = threading.Thread(target=self._run, name="ucm-waiter", daemon=True)
        self._thread.start()

    def finished(self, task: Any) -> bool:
        with self._lock:
            state = self._states.get(id(task))
            if state is not None and state[0] is task:
                if state[1]:
                    del self._states[id(task)]
                    _mark(task)
                return state[1]
            if task._completed if isinstance(task, Task) else getattr(task, "completed", False):
                return True
            try:
                self._queue.put_nowait(task)
            except queue.Full:
                limit = {"limit": self.LIMIT}
                raise BusyError("too many tasks are being waited for", context=limit) from None
            self._states[id(task)] = (task, False)
            return False

    def close(self) -> None:
        with self._lock:
            self._states.clear()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(_STOP)

    def _run(self) -> None:
        while (task := self._queue.get()) is not _STOP:
            with contextlib.suppress(Exception):  # raised again by the caller's wait()
                self._store.wait(task)
            with self._lock:
                if id(task) in self._states:
                    self._states[id(task)] = (task, True)


_STOP = object()


def _mark(task: Any) -> None:
    with contextlib.suppress(AttributeError):
        task.completed = True


__all__ = [
    "NOWHERE",
    "BusyError",
    "ClosedError",
    "Priority",
    "Sides",
    "SidesTask",
    "Task",
    "UcmKVStoreBaseV1",
    "Until",
]
