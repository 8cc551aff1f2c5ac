"""Logging and error handling for code that vLLM calls: failures become misses, and repeated
warnings are limited.

Methods that vLLM calls are :func:`harmless`. Each side of a connector counts what its methods raise
in one :class:`Failures`; at the bound the side is given up, and its methods are not called again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ucm.logger import init_logger

logger = init_logger("ucm.vllm")

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds between two log lines about the same thing.
QUIET_S = 60.0
#: Exceptions of one side's methods, of all together, after which it is given up. The store's own
#: failures are no exceptions here: they end as misses in the methods.
MOST_FAILURES = 16


class Throttle:
    """Lets a message through at most once per :data:`QUIET_S` and tells how many it held back."""

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
    """What the methods of one side raised so far. After :data:`MOST_FAILURES`, or after one that is
    vital, the side is given up for the life of its engine."""

    def __init__(self, side: str, on_give_up: Callable[[str], None] | None = None) -> None:
        """``side`` is its name in the log; ``on_give_up`` is called once, with the reason."""
        self._side, self._on_give_up = side, on_give_up
        self.count = 0
        self.why = ""  # the side is given up, empty while it is not

    def note(self, name: str, error: Exception, *, vital: bool = False) -> None:
        """A method of this name raised; ``vital``: without it nothing the side does is right."""
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
    ``default`` may be a function without arguments, called for each answer.
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
                    if failures is None:
                        throttle.warning(
                            function.__qualname__, "%s failed: %r", function.__name__, error
                        )
                    else:
                        failures.note(function.__name__, error, vital=vital)
            answer: R = default() if callable(default) else default
            return answer

        return guarded

    return decorate
