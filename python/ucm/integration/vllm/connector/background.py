"""A small pool of daemon threads for work that may take long: opening stores, lookups, touches.

Its threads are never joined: one that is stuck in a system call on a dead mount delays nothing
else.
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
    """Runs functions without arguments, urgent ones first; one thread is kept for the urgent ones
    alone.

    A thread is started when a job finds none that is free, and one alone wakes up for a job.
    """

    def __init__(
        self,
        name: str,
        threads: int = 3,
        capacity: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._capacity = capacity
        self._jobs: tuple[deque[Callable[[], None]], deque[Callable[[], None]]] = (deque(), deque())
        self._name = name
        self._lock = threading.Lock()
        self._turns = [threading.Condition(self._lock) for _ in range(threads)]
        self._missing = list(range(threads))  # threads not started yet
        self._free: set[int] = set()  # threads that wait for their turn
        self._closed = False
        self._busy_since: list[float | None] = [None] * threads

    def submit(self, job: Callable[[], None], priority: int = URGENT) -> bool:
        """Run ``job`` soon; False when too much of its kind waits already (the job is then
        forgotten)."""
        with self._lock:
            if self._closed or len(self._jobs[priority]) >= self._capacity:
                return False
            self._jobs[priority].append(job)
            free = max(self._free, default=-1)
            if free >= priority:  # number 0 is kept for the urgent ones
                self._free.discard(free)
                self._turns[free].notify()
                return True
            index = next((index for index in self._missing if index >= priority), None)
            if index is None:
                return True
            self._missing.remove(index)
        try:
            threading.Thread(
                target=self._run, args=(index,), name=f"{self._name}-{index}", daemon=True
            ).start()
        except RuntimeError as error:  # the system gives no thread: tried again with the next job
            throttle.warning("background", "a background thread cannot be started: %r", error)
            with self._lock:
                self._missing.append(index)
        return True

    def stalled(self) -> bool:
        """Whether every thread has been at one job for longer than :data:`STUCK_S`: asking now is
        pointless."""
        now = self._clock()
        return all(since is not None and now - since > STUCK_S for since in self._busy_since)

    def close(self) -> None:
        """Forget what waits and let the threads end when their job does. Idempotent."""
        with self._lock:
            self._closed = True
            for jobs in self._jobs:
                jobs.clear()
            for turn in self._turns:
                turn.notify()

    def _next(self, index: int) -> Callable[[], None] | None:
        kinds = self._jobs[: 1 if index == 0 else 2]
        with self._lock:
            while not self._closed:
                for jobs in kinds:
                    if jobs:
                        return jobs.popleft()
                self._free.add(index)
                self._turns[index].wait()
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
