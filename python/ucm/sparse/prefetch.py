"""Blocks brought before they are asked for, by a few threads, the most urgent request first.

Everything is bounded: threads, requests that wait, blocks that are kept once they are there, and
every wait. A request that finds no room is refused (or takes the place of a less urgent one), which
costs nothing but the time that it would have saved.

Source: document 002, sections 3 and 7.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ucm.config.sparse import AlgorithmConfig
from ucm.errors import UcmError
from ucm.sparse.config import settings_of
from ucm.store.v0 import block_id

_log = logging.getLogger("ucm.sparse")

#: A block's key: 16 bytes, or 32 hex digits.
BlockHash = bytes | str
#: Brings blocks: what it returns is what :meth:`PrefetchEngine.get_prefetched_kv` gives.
Load = Callable[[Sequence[BlockHash]], Any]
State = Literal["waiting", "loading", "done", "failed", "cancelled", "refused"]

#: How long :meth:`PrefetchEngine.wait_for_completion` waits where nothing is said, in seconds.
WAIT_S = 5.0


class PrefetchPriority:
    """How soon a request will ask, the most urgent first."""

    URGENT = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3

    @staticmethod
    def compute_priority(request: Any, current_step: int, queue_position: int) -> int:
        """By the place in the queue: 0 is urgent, up to 4 high, up to 16 normal, the rest low."""
        del request, current_step
        for bound, priority in (
            (0, PrefetchPriority.URGENT),
            (4, PrefetchPriority.HIGH),
            (16, PrefetchPriority.NORMAL),
        ):
            if queue_position <= bound:
                return priority
        return PrefetchPriority.LOW


@dataclass(slots=True)
class PrefetchTask:
    """Blocks of one request that are to be brought."""

    request_id: str
    block_hashes: tuple[BlockHash, ...]
    priority: int
    state: State = "waiting"
    kv: Any = None
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, state: State) -> None:
        """Nothing more comes of it."""
        self.state = state
        self.ended.set()


class PrefetchHandle:
    """What became of a request's prefetch."""

    def __init__(self, task: PrefetchTask, engine: PrefetchEngine) -> None:
        self._task, self._engine = task, engine

    @property
    def request_id(self) -> str:
        """Whose blocks they are."""
        return self._task.request_id

    @property
    def state(self) -> State:
        """waiting, loading, done, failed, cancelled or refused."""
        return self._task.state

    @property
    def error(self) -> BaseException | None:
        """What a failed one failed with."""
        return self._task.error

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the blocks are there, after at most ``timeout`` seconds (None:
        :data:`WAIT_S`)."""
        return (
            self._task.ended.wait(WAIT_S if timeout is None else timeout)
            and self._task.state == "done"
        )

    def cancel(self) -> None:
        """The blocks need not be brought any more."""
        self._engine.cancel(self.request_id)


class PrefetchEngine:
    """Threads that bring blocks. One prefetch for each request at a time: a new one takes the place
    of the one before."""

    def __init__(
        self,
        config: Mapping[str, Any] | AlgorithmConfig | None = None,
        load: Load | None = None,
        store: Any = None,
    ) -> None:
        """``config`` has ``prefetch_workers`` (4), ``max_pending_prefetch`` (64) and
        ``prefetch_cache_size`` (1000 blocks). Blocks come from ``load``, or from ``store``
        (:class:`~ucm.store.ucmstore_v1.UcmKVStoreBaseV1`) as rows of an array of bytes, one for
        each block; without either every prefetch is refused.
        """
        settings = settings_of("GSA", config)
        self._most_pending, self._most_kept = (
            settings.max_pending_prefetch,
            settings.prefetch_cache_size,
        )
        self._load = (
            load if load is not None else store_loader(store) if store is not None else None
        )
        self._lock = threading.Condition()
        self._queue: list[tuple[int, int, PrefetchTask]] = []
        self._order = itertools.count()
        self._tasks: dict[str, PrefetchTask] = {}
        # requests whose task was refused or failed
        self._given_up: OrderedDict[str, None] = OrderedDict()
        # request -> its blocks that are there, the oldest first
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._stopped = False
        for number in range(settings.prefetch_workers):
            threading.Thread(target=self._work, name=f"ucm-prefetch-{number}", daemon=True).start()

    def submit_prefetch(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        priority: int = PrefetchPriority.URGENT,
    ) -> PrefetchHandle:
        """Bring these blocks; never waits."""
        task = PrefetchTask(request_id, tuple(block_hashes), priority)
        with self._lock:
            self._drop(request_id)
            self._tasks[request_id] = task
            possible = (
                self._load is not None
                and not self._stopped
                and len(task.block_hashes) <= self._most_kept
            )
            if not possible or not self._has_room_for(task):
                self._give_up(task, "refused")
            else:
                heapq.heappush(self._queue, (priority, next(self._order), task))
                self._lock.notify()
        return PrefetchHandle(task, self)

    def wait_for_completion(self, request_id: str, timeout: float | None = None) -> bool:
        """Whether a request's blocks are there, after at most ``timeout`` seconds (None:
        :data:`WAIT_S`); true for one that has none to come."""
        with self._lock:
            task = self._tasks.get(request_id)
        return task is None or PrefetchHandle(task, self).wait(timeout)

    def get_prefetched_kv(self, request_id: str) -> Any | None:
        """What was brought for a request; None while it is not there, when it was given up, and
        after it had to make room."""
        with self._lock:
            task = self._tasks.get(request_id)
            if task is None or task.state != "done":
                return None
            self._kept.move_to_end(request_id)
            return task.kv

    def cancel(self, request_id: str) -> None:
        """A request's blocks need not be brought, or kept, any more."""
        with self._lock:
            self._drop(request_id)

    def shutdown(self) -> None:
        """Stop. Threads end as soon as what they are at has ended; it is not waited for, and its
        result is dropped."""
        with self._lock:
            self._stopped = True
            for request_id in list(self._tasks):
                self._drop(request_id)
            self._lock.notify_all()

    def _has_room_for(self, task: PrefetchTask) -> bool:
        self._queue = [entry for entry in self._queue if entry[2].state == "waiting"]
        heapq.heapify(self._queue)
        if len(self._queue) < self._most_pending:
            return True
        last = max(self._queue)
        if last[0] <= task.priority:
            return False
        self._queue.remove(last)
        heapq.heapify(self._queue)
        self._give_up(last[2], "refused")
        return True

    def _give_up(self, task: PrefetchTask, state: State) -> None:
        """It does not come. That is remembered of so many requests as may wait."""
        task.end(state)
        self._given_up[task.request_id] = None
        if len(self._given_up) > self._most_pending:
            self._tasks.pop(self._given_up.popitem(last=False)[0])

    def _drop(self, request_id: str) -> None:
        task = self._tasks.pop(request_id, None)
        self._kept.pop(request_id, None)
        self._given_up.pop(request_id, None)
        if task is not None and task.state in ("waiting", "loading", "done"):
            task.kv = None
            task.end("cancelled")

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                assert self._load is not None
                kv, error = self._load(task.block_hashes), None
            except Exception as failure:
                kv, error = None, failure
            with self._lock:
                if task.state == "loading":
                    self._finish(task, kv, error)

    def _next(self) -> PrefetchTask | None:
        with self._lock:
            while not self._stopped:
                while self._queue:
                    task = heapq.heappop(self._queue)[2]
                    if task.state == "waiting":
                        task.state = "loading"
                        return task
                self._lock.wait()
        return None

    def _finish(self, task: PrefetchTask, kv: Any, error: Exception | None) -> None:
        if error is not None:
            task.error = error
            level = logging.DEBUG if isinstance(error, UcmError) else logging.WARNING
            _log.log(level, "prefetching %d blocks failed: %r", len(task.block_hashes), error)
            self._give_up(task, "failed")
            return
        task.kv = kv
        self._kept[task.request_id] = len(task.block_hashes)
        while sum(self._kept.values()) > self._most_kept or len(self._kept) > self._most_kept:
            oldest, _ = self._kept.popitem(last=False)
            self._tasks.pop(oldest).kv = None
        task.end("done")


def store_loader(store: Any) -> Load:
    """Brings blocks from a V1 store into an array of bytes, ``[blocks, bytes of a block]``; waits
    no longer than the store's own deadline. The sizes are those of the store's configuration."""
    config = store.config
    block, shard = int(config["block_size"]), int(config["shard_size"])
    sizes = [int(size) for size in config.get("tensor_size_list") or [config["tensor_size"]]]
    sizes *= shard // sum(sizes)
    pieces = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.uint64)
    shards = list(range(block // shard))

    def load(block_hashes: Sequence[BlockHash]) -> Any:
        ids = [block_id(name) for name in block_hashes]
        found = np.empty((len(ids), block), dtype=np.uint8)
        starts = np.arange(0, len(ids) * block, shard, dtype=np.uint64) + np.uint64(
            found.ctypes.data
        )
        rows = [name for name in ids for _ in shards]
        store.wait(store.load_data(rows, shards * len(ids), starts[:, None] + pieces))
        return found

    return load
