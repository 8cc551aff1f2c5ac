"""A small JSON file beside a root's marker, in which processes remember what costs time to find out again.

It is a convenience and never the truth: it is read with doubt, written as a whole under a private name first, and two
that write at the same time may lose an entry of one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

#: The file that makes a directory a store's root; nothing is written beside it where it is missing (an unmounted
#: share, a root no store has opened yet).
ROOT_MARKER = "ucm-root.json"
#: A longer file is none of ours.
LONGEST = 16 << 20


class RootFile:
    """Entries by name, each an object, in the list ``kind`` of one file."""

    def __init__(self, root: str, name: str, kind: str, limit: int) -> None:
        """``limit``: most entries; those written last are kept."""
        self._root, self._name, self._kind, self._limit = root, name, kind, limit

    def marked(self) -> bool:
        """Whether a store has opened the root and it is there."""
        return os.path.exists(os.path.join(self._root, ROOT_MARKER))

    def read(self) -> dict[str, dict[str, Any]]:
        """What is there; nothing where there is no such file, or one of another version, or damage."""
        try:
            with open(os.path.join(self._root, self._name), encoding="ascii") as file:
                stored = json.loads(file.read(LONGEST))
        except (OSError, ValueError, RecursionError):
            return {}
        entries = stored.get(self._kind) if isinstance(stored, dict) and stored.get("version") == 1 else None
        if not isinstance(entries, dict):
            return {}
        return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}

    def merge(self, new: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Write these entries beside what others wrote meanwhile, and return all. Raises :class:`OSError`."""
        merged = {name: entry for name, entry in self.read().items() if name not in new}
        merged.update((name, dict(entry)) for name, entry in new.items())
        kept = dict(list(merged.items())[-self._limit :])
        text = json.dumps({"version": 1, self._kind: kept}, separators=(",", ":"))
        # Named as the private files of a root are, so that one left behind by a killed process is removed like those.
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
