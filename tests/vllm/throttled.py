"""A tier as slow as a test says: the POSIX store behind a thread that moves loads at a given
number of bytes a second.

The speed is read from a file before each load. A load that cannot end by its deadline waits until
that, touches nothing and fails, as the store's own would.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from stores import Addresses, Faults
from ucm.errors import BusyError, DeadlineError, TaskError
from ucm.store.posix import UcmPosixStore
from ucm.store.ucmstore_v1 import Task, Until

#: Loads that may wait for the thread.
LIMIT = 1024


class Throttle:
    """The file with the speed, in bytes a second; without it loads are as fast as the store."""

    def __init__(self, control: Path) -> None:
        self.events = Faults(control)

    def set(self, bytes_per_second: float) -> None:
        """From the next load on."""
        self.events.set("speed", str(bytes_per_second))

    def clear(self) -> None:
        """As fast as the store."""
        self.events.clear("speed")

    def get(self) -> float:
        """Bytes a second."""
        text = self.events.active("speed")
        return float(text) if text else float("inf")


class ThrottledStore(UcmPosixStore):
    """``UcmPosixStore`` with loads one after the other at a given speed. Its configuration has
    ``control`` besides."""

    takes_load_timeout = True
    serves_accelerators = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        own = dict(config)
        self._throttle = Throttle(Path(own.pop("control")))
        super().__init__(own)
        self._stop = threading.Event()
        self._queue: queue.Queue[tuple[Future[Any], Any, float]] = queue.Queue(LIMIT)
        threading.Thread(target=self._run, name="throttled", daemon=True).start()

    def load_data(  # type: ignore[override]  # another class of task
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: Addresses,
        timeout: float | None = None,
    ) -> Task:
        self._throttle.events.say("load", block_ids, 0)
        allowed = self.config["deadlines"]["load_unknown_s"] if timeout is None else timeout
        future: Future[Any] = Future()
        try:
            rows = (list(block_ids), list(shard_index), addrs.copy())
            self._queue.put_nowait((future, rows, time.monotonic() + allowed))
        except queue.Full:
            raise BusyError("too many loads wait", context={"limit": LIMIT}) from None
        return Task(future)

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._throttle.events.say("touch", block_ids, 0)
        super().touch(block_ids)

    def check(self, task: Any, until: Until = "published") -> bool:
        return task.handle.done() if isinstance(task.handle, Future) else super().check(task, until)

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        if not isinstance(getattr(task, "handle", None), Future):
            return super().wait(task, timeout, until)
        try:
            task.handle.result(timeout)
        except FutureTimeout:
            raise DeadlineError("the load has not ended") from None

    def close(self) -> None:
        self._stop.set()
        super().close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                future, rows, deadline = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                self._load(rows, deadline)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _load(self, rows: Any, deadline: float) -> None:
        ids, shards, addrs = rows
        needs = len(ids) * int(self.config["shard_size"]) / self._throttle.get()
        left = deadline - time.monotonic()
        if self._stop.wait(min(needs, max(left, 0.0))) or needs > left:
            late = DeadlineError("the tier is too slow for this load", context={"seconds": needs})
            raise TaskError("the load was given up", failures=dict.fromkeys(range(len(ids)), late))
        task = super().load_data(ids, shards, addrs, max(deadline - time.monotonic(), 0.001))
        super().wait(task)
