"""Work of a V0 store: a task that ends once, in time, and the one thread its calls run on.

A V0 call may block for ever. It blocks a thread that no one joins; its task ends at the deadline
all the same, and what the call brings afterwards is thrown away.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from ucm.errors import BusyError, ClosedError, DeadlineError, InternalError, StoreIOError, UcmError
from ucm.store.ucmstore_v1 import Task

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

    def _is_over(self) -> bool:
        return self.over()

    def deliver(self, rows: range, work: Callable[[], None]) -> bool:
        """Do ``work``, which ends these rows well, unless the task has ended. Nothing ends it
        meanwhile."""
        with self._lock:
            if self._ended.is_set():
                return False
            work()
            self._done.update(rows)
        return True

    def fail(self, rows: Sequence[int], error: UcmError) -> None:
        """These rows failed."""
        with self._lock:
            if not self._ended.is_set():
                self._failures.update(dict.fromkeys(rows, error))

    def end(self, error: UcmError | None = None) -> None:
        """The work is over; rows that neither arrived nor failed fail with ``error``."""
        with self._lock:
            if self._ended.is_set():
                return
            for row in range(self._rows):
                if row not in self._done and row not in self._failures:
                    self._failures[row] = error or InternalError("this row was forgotten")
            self.completed = True
            self._ended.set()

    def over(self) -> bool:
        """Whether it has ended; at its deadline it does."""
        if not self._ended.is_set() and self._clock() >= self.deadline:
            self.end(DeadlineError(f"the {self.kind} of a V0 store did not end in time"))
        return self._ended.is_set()

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
                raise BusyError(
                    "too many tasks of a V0 store are waiting", context={"limit": QUEUE}
                ) from None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    @property
    def stuck(self) -> bool:
        """Whether the store is at a call that should have ended."""
        running = self._running
        return running is not None and self._clock() > running.deadline

    def close(self) -> None:
        """No more jobs. What waits fails, and so does what runs: what its call still brings is
        thrown away."""
        with self._lock:
            self._closed = True
            running = self._running
            while True:
                try:
                    waiting = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if waiting is not None:
                    waiting[0].end(ClosedError("the store was closed"))
            self._jobs.put_nowait(None)
        if running is not None:
            running.end(ClosedError("the store was closed"))

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
                task.end(
                    error
                    if isinstance(error, UcmError)
                    else StoreIOError(f"the V0 store failed: {error!r}")
                )
            self._running = None
            del item, task, job
