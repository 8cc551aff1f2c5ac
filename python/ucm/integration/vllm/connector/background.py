"""A bounded number of daemon threads for what may take long: opening stores, lookups, touches.

Nothing here is joined: a thread stuck in a system call of a dead mount costs itself and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ucm.integration.vllm.connector.guard import throttle

#: A thread whose job runs longer than this counts as stuck, in seconds.
STUCK_S = 1.0

URGENT, IDLE = 0, 1


class Background:
    """Runs functions without arguments, urgent ones first; one thread is kept for the urgent ones alone."""

    def __init__(
        self, name: str, threads: int = 3, capacity: int = 1024, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._capacity = capacity
        self._jobs: tuple[deque[Callable[[], None]], deque[Callable[[], None]]] = (deque(), deque())
        self._turn = threading.Condition()
        self._closed = False
        self._busy_since: list[float | None] = [None] * threads
        for index in range(threads):
            threading.Thread(target=self._run, args=(index,), name=f"{name}-{index}", daemon=True).start()

    def submit(self, job: Callable[[], None], priority: int = URGENT) -> bool:
        """Run ``job`` soon; False when too much of its kind waits already (the job is then forgotten)."""
        with self._turn:
            if self._closed or len(self._jobs[priority]) >= self._capacity:
                return False
            self._jobs[priority].append(job)
            self._turn.notify_all()
        return True

    def stalled(self) -> bool:
        """Whether every thread has been at one job for longer than :data:`STUCK_S`: asking now is pointless."""
        now = self._clock()
        return all(since is not None and now - since > STUCK_S for since in self._busy_since)

    def close(self) -> None:
        """Forget what waits and let the threads end when their job does. Idempotent."""
        with self._turn:
            self._closed = True
            for jobs in self._jobs:
                jobs.clear()
            self._turn.notify_all()

    def _next(self, index: int) -> Callable[[], None] | None:
        kinds = self._jobs[: 1 if index == 0 else 2]
        with self._turn:
            while not self._closed:
                for jobs in kinds:
                    if jobs:
                        return jobs.popleft()
                self._turn.wait()
        return None

    def _run(self, index: int) -> None:
        while (job := self._next(index)) is not None:
            self._busy_since[index] = self._clock()
            try:
                job()
            except Exception as error:
                throttle.warning("background", "a background job failed: %r", error)
            finally:
                self._busy_since[index] = None
