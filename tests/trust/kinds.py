"""The kinds of rows of the matrix (``rows.py`` has the rows): their properties and their texts in
the table.

A :class:`FileRow` harms the record of one block or its file, at the store level and in live
engines. A :class:`RootRow` harms the root under an open store, a :class:`FuseRow` the file system
below it, or the disk below that. A :class:`ProcessRow` has several processes or clocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import harm
import roots

#: The slow form: more seeds, more points, more lengths.
LONG = os.environ.get("UCM_TEST_LONG", "") not in ("", "0")

Through = Literal["short", "long", "no"]


@dataclass(frozen=True)
class Row:
    """A line of the table. ``reasons``: one of these is counted; empty: none is counted."""

    name: str
    what: str
    reasons: tuple[str, ...]

    @property
    def through(self) -> Through:
        """Whether a live engine over block files runs it: in the short form, in the long form, or
        not at all."""
        engine: Through = getattr(self, "engine", "no")
        return engine

    @property
    def line(self) -> str:
        """Its line in the table: rows that differ by a number share a line."""
        return self.name.partition(" #")[0]

    @property
    def expected(self) -> str:
        """In words."""
        return "miss, the next dump replaces it"


@dataclass(frozen=True)
class FileRow(Row):
    """``harm`` is done to one block's file, or to two."""

    harm: harm.Harm
    #: Both blocks' files are bad afterwards.
    both: bool = False
    #: ``dump``: the next dump replaces it. ``left``: it is not ours to replace; a miss until it is
    #: removed.
    heals: Literal["dump", "left"] = "dump"
    #: True if the second reader can check it (records, but not directories and pipes).
    judged: bool = True
    #: Whether a live engine runs it too: in the short form, in the long form, or not at all.
    engine: Through = "short"
    #: Harms any file of this kind; the others use the structure of our records.
    any_file: bool = True
    #: The change is behind the record, which stays right for a reader that knows its location.
    behind: bool = False
    #: The segment is complete under another name: a process that keeps it open still reads exact
    #: bytes.
    moved: bool = False
    #: Concerns the structure of segments: footer, head, name.
    of_segments: bool = False
    #: Concerns the stored form of compressed records.
    of_codecs: bool = False
    #: It has no effect and must not cause an error.
    harmless: bool = False

    @property
    def expected(self) -> str:
        if self.harmless:
            return "hits go on"
        if self.heals == "left":
            return "miss, not replaced until it is removed"
        return super().expected


@dataclass(frozen=True)
class RootRow(Row):
    """``harm`` changes the root under an open store and reverts the change."""

    harm: roots.RootHarm
    kind: roots.Kind = "plain"
    #: True if blocks stored before are hits during the harm.
    reads: bool = False
    #: Blocks stored before are removed (also to free space), or misses until they are dumped again.
    lost: bool = False
    #: ``made``: they create missing parts again, at the latest at the second dump. ``untried``: no
    #: dump is tried during the harm.
    dumps: Literal["fail", "made", "untried"] = "fail"
    #: The files are intact but unreachable: a process that keeps a segment open still reads exact
    #: bytes.
    whole: bool = False
    nobody: bool = False
    #: As above; the root of an engine is mounted.
    engine: Through = "short"

    @property
    def expected(self) -> str:
        reads = "hits go on" if self.reads else "misses"
        dumps = {"fail": ", dumps fail", "made": ", dumps make it again", "untried": ""}[self.dumps]
        return f"{reads}{dumps}; then healthy"


@dataclass(frozen=True)
class FuseRow(Row):
    """The file system has this behaviour for a while (``fuse.py``), during one kind of call.

    With ``disk`` the disk of a local file system has it (``disk.py``).
    """

    manners: Mapping[str, Any]
    call: Literal["lookup", "load", "dump"]
    #: The call waits until its deadline, once; other calls do not wait.
    waits: bool = False
    #: A dump with a wrong success; the damage is detected by the next read.
    believed: bool = False
    disk: bool = False
    #: As above.
    engine: Through = "no"

    @property
    def expected(self) -> str:
        if self.believed:
            return "detected by the next load, then healthy"
        fails = "dumps fail" if self.call == "dump" else "misses"
        return f"{fails}{', one deadline' if self.waits else ''}; then healthy"


@dataclass(frozen=True)
class EngineRow(Row):
    """A harm to the processes of a live engine; each costs a start."""

    engine: Through = "long"

    @property
    def expected(self) -> str:
        return "every hit exact, then healthy"


@dataclass(frozen=True)
class ProcessRow(Row):
    """``run`` does all of it over a directory, and asserts."""

    run: Callable[[Path, bool], None]
    needs_root: bool = False

    @property
    def expected(self) -> str:
        return "every hit exact, then healthy"
