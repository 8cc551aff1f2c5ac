"""What lies below a root and is not ours: counted, listed up to a bound, looked at for the
original's block files.

The original's own form is a file ``blocks/<hh>/<32 hex>.bin`` that begins with 64 bytes of ``UCMB``
and no checksum (``seed_form`` in ``docs/format.md``). Foreign directories are walked without
following links, up to a bound.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any

from ucm.cli.remote import AnyRoot
from ucm.cli.roots import Foreign
from ucm.reasons import MissReason
from ucm.store.record import PREAMBLE_LEN, Refused, parse_header

#: Most entries visited in foreign directories.
VISITED_MOST = 100_000
#: Most foreign entries listed by name.
LISTED_MOST = 100


class Foreigners:
    """Collects what is not ours below one root."""

    def __init__(self, root: AnyRoot) -> None:
        self._root = root
        self._listed: list[dict[str, Any]] = []
        self._count = self._bytes = 0
        self._seeds = self._seed_bytes = 0
        self._visited = 0

    def add(self, found: Iterable[Foreign]) -> None:
        """Counts these; a directory counts as one and is looked into for the original's files."""
        for one in found:
            seeds, size = self._seeds, one.size
            if one.what == "directory":
                size = self._walk(tuple(one.path.split("/")))
            elif one.what == "file":
                self._peek(tuple(one.path.split("/")[:-1]), one.path.rpartition("/")[2], one.size)
            self._count += 1
            self._bytes += size
            if len(self._listed) < LISTED_MOST:
                listed = {
                    "path": one.path,
                    "what": one.what,
                    "bytes": size,
                    "seed_form": self._seeds - seeds,
                }
                self._listed.append(listed)

    def document(self) -> dict[str, Any]:
        """What was found, as it stands in the JSON document."""
        return {
            "foreign": self._count,
            "foreign_bytes": self._bytes,
            "foreign_files": self._listed,
            "foreign_complete": self._visited <= VISITED_MOST,
            "seed_form": self._seeds,
            "seed_form_bytes": self._seed_bytes,
        }

    def _walk(self, where: tuple[str, ...]) -> int:
        """Bytes of the files below a foreign directory."""
        size, waiting = 0, [where]
        while waiting and self._visited <= VISITED_MOST:
            names = waiting.pop()
            with self._root.directory(*names) as here:
                if here is None:
                    continue
                with os.scandir(here) as entries:
                    for entry in entries:
                        self._visited += 1
                        if self._visited > VISITED_MOST:
                            break
                        try:
                            about = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        if stat.S_ISDIR(about.st_mode):
                            waiting.append((*names, entry.name))
                        elif stat.S_ISREG(about.st_mode):
                            size += about.st_size
                            self._peek(names, entry.name, about.st_size)
        return size

    def _peek(self, where: tuple[str, ...], name: str, size: int) -> None:
        if size < PREAMBLE_LEN:
            return
        with self._root.directory(*where) as here:
            if here is None:
                return
            try:
                fd = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here
                )
            except OSError:  # gone, or not ours to read
                return
        try:
            parse_header(os.pread(fd, PREAMBLE_LEN, 0))
        except Refused as refused:
            if refused.reason is MissReason.SEED_FORM:
                self._seeds += 1
                self._seed_bytes += size
        except OSError:
            return
        finally:
            os.close(fd)
