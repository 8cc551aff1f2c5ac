"""A profile of what ucm does, as a Chrome trace: Perfetto (https://ui.perfetto.dev) opens it.

All processes of an engine append to one file, each its lines: an array of events that is never
closed, which the format allows. Spans that overlap, such as loads of several requests, are
asynchronous events with an id; a step of a rank is a complete event. Times are those of the
machine's monotonic clock, so that the processes of one host agree. The stages of a load or dump
run on threads of the core, which keeps their times once a profile is open.

Where no profile is open, :func:`span` returns at once.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from typing import Any

from ucm._core import keep_stages

_log = logging.getLogger("ucm.profile")


class Profile:
    """The events of one process."""

    def __init__(self) -> None:
        self._file = -1
        self._ids = itertools.count(1)

    @property
    def on(self) -> bool:
        """Whether spans are recorded."""
        return self._file >= 0

    def open(self, path: str, process: str) -> None:
        """Append to this file from now on, under this process's name. Where it cannot be opened
        there is a warning and no profile."""
        if self.on:
            return
        how = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        try:
            try:
                self._file = os.open(path, how | os.O_CREAT | os.O_EXCL, 0o644)
                os.write(self._file, b"[\n")
            except FileExistsError:
                self._file = os.open(path, how)
        except OSError as error:
            _log.warning("no profile is written: %s: %s", path, error.strerror)
            return
        keep_stages()
        _log.info("a profile is appended to %s; open it with https://ui.perfetto.dev", path)
        self._add({"name": "process_name", "ph": "M", "args": {"name": f"ucm {process}"}})

    def span(self, name: str, began: float, ended: float, **args: Any) -> None:
        """Something that others may overlap; times in seconds of the monotonic clock."""
        if not self.on:
            return
        own = {"name": name, "cat": "ucm", "id": next(self._ids)}
        self._add(own | {"ph": "b", "ts": _micros(began), "args": args})
        self._add(own | {"ph": "e", "ts": _micros(ended)})

    def step(self, name: str, began: float, ended: float, **args: Any) -> None:
        """Something that this thread did alone."""
        if self.on:
            took = _micros(ended) - _micros(began)
            event = {"name": name, "cat": "ucm", "ph": "X", "ts": _micros(began), "dur": took}
            self._add(event | {"args": args})

    def stages(self, what: str, store: Any, task: Any, began: float, **args: Any) -> None:
        """Those of a finished task of a store that began at this time, and its queue before the
        first: each from its first block to the end of its last."""
        try:
            found = store.stages(task) if self.on else {}
        except Exception:  # of a user's store: the profile lacks them
            return
        if found:
            first = min(times[0] for times in found.values())
            self.span(f"{what} queue", began, began + first, **args)
        for stage, (first, last, busy) in found.items():
            at = {"busy_ms": round(busy * 1e3, 3)}
            self.span(f"{what} {stage}", began + first, began + last, **args, **at)

    def _add(self, event: dict[str, Any]) -> None:
        here = {"pid": os.getpid(), "tid": threading.get_native_id()}
        line = json.dumps(event | here, separators=(",", ":"), default=str)
        try:
            os.write(self._file, f"{line},\n".encode())  # at once: a process may be killed
        except OSError as error:
            _log.warning("the profile ends here: %s", error.strerror)
            self.close()

    def close(self) -> None:
        """Record nothing more. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


#: The one of this process.
profile = Profile()
span, stages, step = profile.span, profile.stages, profile.step
