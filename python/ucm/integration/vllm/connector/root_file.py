"""A small JSON file beside a root's marker that keeps results which are slow to compute, across
processes.

The file is a cache: its content is checked when it is read and may be missing. A writer replaces it
as a whole, and two processes that write at the same time may lose entries of one of them. Calls on
a directory that does not answer are limited in time and number. Stores without a directory use the
user's state directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from ucm.config.words import STATE_VARIABLE

#: The file that makes a directory a store's root; nothing is written beside it where it is missing
#: (an unmounted share, a root no store has opened yet).
ROOT_MARKER = "ucm-root.json"
#: A longer file is none of ours.
LONGEST = 16 << 20


#: How long a directory has to answer, in seconds, and how many calls may hang on one before it is
#: not asked any more.
ANSWER_S, MOST_HANGING = 2.0, 4

_under_way: Counter[str] = Counter()
_counting = threading.Lock()
_T = TypeVar("_T")


def state_directory() -> str | None:
    """Where processes of this user remember what belongs to no root: ``UCM_STATE_DIR``, or ``ucm``
    below the directory of the XDG standard (``XDG_STATE_HOME``, ``~/.local/state``); None for a
    user without a home."""
    if named := os.environ.get(STATE_VARIABLE):
        return os.path.abspath(named)
    below = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(below):  # the standard has such a one ignored
        below = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(below, "ucm") if os.path.isabs(below) else None


class RootFile:
    """Entries by name, each an object, in the list ``kind`` of one file."""

    def __init__(self, root: str, name: str, kind: str, limit: int) -> None:
        """``limit``: most entries; those written last are kept."""
        self._root, self._name, self._kind, self._limit = root, name, kind, limit

    def marked(self) -> bool:
        """Whether a store has opened the root and it is there. The state directory always is, or is
        made."""
        if self._root != state_directory():
            return os.path.exists(os.path.join(self._root, ROOT_MARKER))
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
        except OSError:
            return False
        return True

    def read_soon(self) -> dict[str, dict[str, Any]]:
        """:meth:`read`; nothing where that takes too long."""
        return self._soon(self.read, {})

    def merge_soon(self, new: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]] | None:
        """:meth:`merge` if the root is marked; None where it is not, or that takes too long: it may
        be written yet."""
        return self._soon(lambda: self.merge(new) if self.marked() else None, None)

    def _soon(self, work: Callable[[], _T], late: _T) -> _T:
        """What ``work`` returns or raises, or ``late`` where the directory does not answer in
        time."""
        with _counting:
            if _under_way[self._root] >= MOST_HANGING:
                return late
            _under_way[self._root] += 1
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                with _counting:
                    _under_way[self._root] -= 1

        try:
            threading.Thread(target=run, name="ucm-memo", daemon=True).start()
        except RuntimeError:  # there is no thread to be had
            with _counting:
                _under_way[self._root] -= 1
            return late
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            return late

    def read(self) -> dict[str, dict[str, Any]]:
        """What is there; nothing where there is no such file, or one of another version, or
        damage."""
        try:
            # A link in its place is none of ours, and makes way for the file that is written next.
            how = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(os.path.join(self._root, self._name), how)
            with open(handle, encoding="ascii") as file:
                stored = json.loads(file.read(LONGEST))
        except (OSError, ValueError, RecursionError):
            return {}
        entries = (
            stored.get(self._kind)
            if isinstance(stored, dict) and stored.get("version") == 1
            else None
        )
        if not isinstance(entries, dict):
            return {}
        return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}

    def merge(self, new: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Write these entries beside what others wrote meanwhile, and return all. Raises
        :class:`OSError`."""
        merged = {name: entry for name, entry in self.read().items() if name not in new}
        merged.update((name, dict(entry)) for name, entry in new.items())
        kept = dict(list(merged.items())[-self._limit :])
        text = json.dumps({"version": 1, self._kind: kept}, separators=(",", ":"))
        # Named as the private files of a root are, so that one left behind by a killed process is
        # removed like those.
        private = os.path.join(self._root, f".{uuid.uuid4().hex}.tmp")
        handle = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(handle, "w", encoding="ascii") as file:
                file.write(text)
            os.replace(private, os.path.join(self._root, self._name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(private)
            raise
        return kept
