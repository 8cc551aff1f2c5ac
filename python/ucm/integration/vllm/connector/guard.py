"""Logging and error handling for code that vLLM calls: failures become misses, and repeated warnings are limited."""

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


def harmless(default: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A method that never raises into vLLM: an exception is logged now and then, and ``default`` returned.

    ``default`` may be a function without arguments, called for each answer.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                throttle.warning(function.__qualname__, "%s failed, treated as a miss: %r", function.__name__, error)
                logger.debug("traceback", exc_info=True)
                answer: R = default() if callable(default) else default
                return answer

        return guarded

    return decorate
