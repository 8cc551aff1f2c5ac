"""Keeps failing and slow parts from delaying vLLM: failures become misses, repeated warnings are
limited, and slow work runs on threads of its own.

Methods that vLLM calls are :func:`harmless`. Each side of a connector counts the exceptions of its
methods in one :class:`Failures`; at the bound the side is given up, and its methods are not called
again.

:class:`Background` is a small pool of daemon threads: opening stores, lookups, touches. Its threads
are never joined: one that is stuck in a system call on a dead mount delays nothing else.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ucm.logger import init_logger

logger = init_logger("ucm.vllm")

P = ParamSpec("P")
R = TypeVar("R")

# Failures
# --------------------------------------------------------------------------------------------------

#: Seconds between two log lines about the same thing.
QUIET_S = 60.0
#: Exceptions of one side's methods, of all together, after which it is given up. Failures of the
#: store are no exceptions here: the methods treat them as misses.
MOST_FAILURES = 16


class Throttle:
    """Lets a message through at most once per :data:`QUIET_S` and adds how many it held back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warning(self, about: str, message: str, *args: object) -> None:
        """Log ``message % args`` unless ``about`` was logged a moment ago."""
        now = self._clock()
        if now - self._last.get(about, -QUIET_S) < QUIET_S:
            self._held[about] = self._held.get(about, 0) + 1
            return
        self._last[about] = now
        held = self._held.pop(about, 0)
        text = message % args if args else message
        logger.warning("%s%s", text, f" ({held} more like this in the meantime)" if held else "")


throttle = Throttle()

_once: set[str] = set()


def info_once(message: str, *args: object) -> None:
    """Log at level info, once per process and text."""
    text = message % args if args else message
    if text not in _once:
        _once.add(text)
        logger.info("%s", text)


class Failures:
    """The exceptions of one side's methods. After :data:`MOST_FAILURES`, or after a vital one, the
    side is given up for the life of its engine."""

    def __init__(self, side: str, on_give_up: Callable[[str], None] | None = None) -> None:
        """``side`` is its name in the log; ``on_give_up`` is called once, with the reason."""
        self._side, self._on_give_up = side, on_give_up
        self.count = 0
        self.why = ""  # the side is given up, empty while it is not

    def note(self, name: str, error: Exception, *, vital: bool = False) -> None:
        """A method of this name raised; ``vital``: the side cannot work without it."""
        self.count += 1
        throttle.warning(f"{self._side} {name}", "%s failed, treated as a miss: %r", name, error)
        logger.debug("traceback", exc_info=error)
        if vital or self.count >= MOST_FAILURES:
            self.give_up(f"{self.count} calls failed, the last in {name}: {error!r}")

    def give_up(self, why: str) -> None:
        """Call the side's methods no more."""
        if self.why:
            return
        self.why = why
        logger.warning("%s: given up until the engine is started again: %s", self._side, why)
        if self._on_give_up is None:
            return
        try:
            self._on_give_up(why)
        except Exception as error:
            logger.warning("%s: its work could not be ended: %r", self._side, error)


def harmless(
    default: Any, *, vital: bool = False, after: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A method that never raises into vLLM: an exception is noted, and ``default`` returned.

    Where the object has ``failures``, a :class:`Failures`, it is noted there, and the method is not
    called once the side is given up, unless ``after``. ``vital``: see :meth:`Failures.note`.
    ``default`` may be a function without arguments.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            found = getattr(args[0], "failures", None)
            failures = found if isinstance(found, Failures) else None  # a class has none of its own
            if after or failures is None or not failures.why:
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    name = function.__name__
                    if failures is None:
                        throttle.warning(function.__qualname__, "%s failed: %r", name, error)
                    else:
                        failures.note(name, error, vital=vital)
            answer: R = default() if callable(default) else default
            return answer

        return guarded

    return decorate


# Threads
# --------------------------------------------------------------------------------------------------

#: A thread whose job runs longer than this counts as stuck, in seconds.
STUCK_S = 1.0

URGENT, IDLE = 0, 1


class Background:
    """Runs functions without arguments, urgent ones first; one thread is kept for these alone. A
    thread is started when a job finds none that is free, and one alone wakes up for a job."""

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
        """Run ``job`` soon; False when too much of its kind waits already (the job is dropped)."""
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
        name = f"{self._name}-{index}"
        try:
            threading.Thread(target=self._run, args=(index,), name=name, daemon=True).start()
        except RuntimeError as error:  # the system gives no thread: tried again with the next job
            throttle.warning("background", "a background thread cannot be started: %r", error)
            with self._lock:
                self._missing.append(index)
        return True

    def stalled(self) -> bool:
        """Whether every thread has been at one job for longer than :data:`STUCK_S`."""
        now = self._clock()
        return all(since is not None and now - since > STUCK_S for since in self._busy_since)

    def close(self) -> None:
        """Drop waiting jobs and let the threads end when their job does. Idempotent."""
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
