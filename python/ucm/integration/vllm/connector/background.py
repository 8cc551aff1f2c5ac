"""A bounded number of daemon threads for what may take long: opening stores, lookups, touches.

Nothing here is joined: a thread stuck in a system call of a dead mount costs itself and nothing else.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable

from ucm.integration.vllm.connector.guard import throttle

#: A thread whose job runs longer than this counts as stuck, in seconds.
STUCK_S = 1.0

URGENT, IDLE = 0, 1


class Background:
    """Runs functions without arguments, urgent ones first."""

    def __init__(
        self, name: str, threads: int = 2, capacity: int = 1024, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue(capacity)
        self._order = itertools.count()
        self._busy_since: list[float | None] = [None] * threads
        for index in range(threads):
            threading.Thread(target=self._run, args=(index,), name=f"{name}-{index}", daemon=True).start()

    def submit(self, job: Callable[[], None], priority: int = URGENT) -> bool:
        """Run ``job`` soon; False when the queue is full (the job is then forgotten)."""
        try:
            self._queue.put_nowait((priority, next(self._order), job))
        except queue.Full:
            return False
        return True

    def stalled(self) -> bool:
        """Whether every thread has been at one job for longer than :data:`STUCK_S`: asking now is pointless."""
        now = self._clock()
        return all(since is not None and now - since > STUCK_S for since in self._busy_since)

    def close(self) -> None:
        """Forget what waits and let the threads end when their job does."""
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass
        for _ in self._busy_since:
            self._queue.put_nowait((IDLE, next(self._order), None))

    def _run(self, index: int) -> None:
        while (job := self._queue.get()[2]) is not None:
            self._busy_since[index] = self._clock()
            try:
                job()
            except Exception as error:
                throttle.warning("background", "a background job failed: %r", error)
            finally:
                self._busy_since[index] = None
