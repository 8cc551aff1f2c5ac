"""Ids in the order they came, the oldest forgotten first; in this process alone, or in a file that
several map."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from ucm.errors import ConfigError

_COUNT = struct.Struct("<Q")
_ID = 16


class IdRing:
    """A bounded first-in-first-out set of 16-byte ids. Thread safe, and process safe over one
    file."""

    def __init__(self, limit: int, path: Path | None = None) -> None:
        """``limit``: most ids kept; all who share ``path`` give the same."""
        self._limit = limit
        self._lock = threading.Lock()
        self._known: dict[bytes, None] = {}
        self._seen = 0  # of all ids that ever came
        size = _COUNT.size + limit * _ID
        if path is None:
            self._file = None
            self._map = mmap.mmap(-1, size)
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                there = os.fstat(self._file).st_size
                # to cut it would pull the memory from under those who map it
                if there not in (
                    0,
                    size,
                ):
                    raise ConfigError(
                        "all who share the ids of a UcmFakeStore give the same buffer_number",
                        context={"path": str(path), "bytes": there, "expected": size},
                    )
                os.ftruncate(self._file, size)
            except BaseException:
                os.close(self._file)
                raise
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._map = mmap.mmap(self._file, size)

    def has(self, ids: Sequence[bytes]) -> list[bool]:
        """Which of them are kept."""
        with self._lock:
            self._catch_up()
            return [block in self._known for block in ids]

    def add(self, ids: Sequence[bytes]) -> None:
        """Keep them; one that is kept already stays where it is."""
        with self._lock:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._catch_up()
                for block in ids:
                    if block not in self._known:
                        at = _COUNT.size + self._seen % self._limit * _ID
                        self._map[at : at + _ID] = block
                        _COUNT.pack_into(self._map, 0, self._seen + 1)
                        self._catch_up()
            finally:
                if self._file is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        count = int(_COUNT.unpack_from(self._map)[0])
        for number in range(max(self._seen, count - self._limit), count):
            at = _COUNT.size + number % self._limit * _ID
            self._known[self._map[at : at + _ID]] = None
        self._seen = count
        while len(self._known) > self._limit:
            del self._known[next(iter(self._known))]

    def close(self) -> None:
        """Let the file go."""
        with self._lock:
            self._known.clear()
            if self._file is not None:
                os.close(self._file)
                self._file = None
