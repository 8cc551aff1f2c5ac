"""The kinds of rows of the matrix (``rows.py`` has the rows): what each says of a harm, and its words in the table.

A :class:`FileRow` harms the file of one block; it is run at the store level and in a live engine of each runner. A
:class:`RootRow` harms the root under an open store, a :class:`FuseRow` the file system below it. A :class:`ProcessRow`
has several processes or clocks in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import harm
import roots

#: The slow form: more seeds, more points, more lengths.
LONG = os.environ.get("UCM_TEST_LONG", "") not in ("", "0")

STORE, V1, V2 = "store", "vLLM v1", "vLLM v2"
COLUMNS = (STORE, V1, V2)
Through = Literal["short", "long", "no"]


@dataclass(frozen=True)
class Row:
    """A line of the table. ``reasons``: one of these is counted; none means that nothing is."""

    name: str
    what: str
    reasons: tuple[str, ...]
    #: Why this row is known to fail at the store level; such a row must fail.
    known: str = field(default="", kw_only=True)

    @property
    def in_engine(self) -> bool:
        """Whether a live engine meets it in this run."""
        through = getattr(self, "engine", "no")
        return through == "short" or (LONG and through == "long")

    @property
    def line(self) -> str:
        """Where in the table it stands: rows that differ by a number share a line."""
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
    #: ``dump``: the next dump replaces it. ``left``: it is not ours to replace; a miss until somebody removes it.
    heals: Literal["dump", "left"] = "dump"
    #: Whether the second reader has a word on it (it knows records, not directories and pipes).
    judged: bool = True
    #: Whether a live engine meets it too: in the short form, in the long form, or not at all.
    engine: Through = "short"
    #: Harms any file of this kind; the others know how a record of ours is made.
    any_file: bool = True

    @property
    def expected(self) -> str:
        if self.heals == "left":
            return "miss, left alone until it is removed"
        return super().expected


@dataclass(frozen=True)
class RootRow(Row):
    """``harm`` is done to the root under an open store and taken back."""

    harm: roots.RootHarm
    kind: roots.Kind = "plain"
    #: Whether blocks stored before are found and loaded meanwhile.
    reads: bool = False
    #: Blocks stored before are gone (also to make room), or misses until they are dumped again.
    lost: bool = False
    #: ``made``: they make again what is missing, at the latest the second time. ``untried``: none is tried meanwhile.
    dumps: Literal["fail", "made", "untried"] = "fail"
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
    """The file system behaves like this for a while (``fuse.py``), while one kind of call is made."""

    manners: Mapping[str, Any]
    call: Literal["lookup", "load", "dump"]
    #: The call waits until its deadline, once; the others do not wait at all.
    waits: bool = False
    #: A dump that is told to have worked; what it wrote is found out when it is read.
    believed: bool = False
    #: As above.
    engine: Through = "no"

    @property
    def expected(self) -> str:
        if self.believed:
            return "found out by the next load, then healthy"
        fails = "dumps fail" if self.call == "dump" else "misses"
        return f"{fails}{', one deadline' if self.waits else ''}; then healthy"


@dataclass(frozen=True)
class ProcessRow(Row):
    """``run`` does all of it over a directory, and asserts."""

    run: Callable[[Path, bool], None]
    needs_root: bool = False

    @property
    def expected(self) -> str:
        return "every hit exact, then healthy"
