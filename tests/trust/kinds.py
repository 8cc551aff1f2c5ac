"""The kinds of rows of the matrix (``rows.py`` has the rows): what each says of a harm, and its
words in the table.

A :class:`FileRow` harms the record of one block, or the file it lies in; it is run at the store
level and in live engines. A :class:`RootRow` harms the root under an open store, a :class:`FuseRow`
the file system below it, or the disk below that. A :class:`ProcessRow` has several processes or
clocks in it.
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
    """A line of the table. ``reasons``: one of these is counted; none means that nothing is."""

    name: str
    what: str
    reasons: tuple[str, ...]

    @property
    def through(self) -> Through:
        """Whether a live engine over block files meets it: in the short form, in the long form, or
        not at all."""
        engine: Through = getattr(self, "engine", "no")
        return engine

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
    #: ``dump``: the next dump replaces it. ``left``: it is not ours to replace; a miss until
    #: somebody removes it.
    heals: Literal["dump", "left"] = "dump"
    #: Whether the second reader has a word on it (it knows records, not directories and pipes).
    judged: bool = True
    #: Whether a live engine meets it too: in the short form, in the long form, or not at all.
    engine: Through = "short"
    #: Harms any file of this kind; the others know how a record of ours is made.
    any_file: bool = True
    #: It is done behind the record: what is there is right, and who knows where it lies may read
    #: it.
    behind: bool = False
    #: The segment is whole under another name: who keeps it open reads on, exactly.
    moved: bool = False
    #: It is about how segments are made: their footer, their head, their name.
    of_segments: bool = False
    #: It is about the form in which compressed records are stored.
    of_codecs: bool = False
    #: Nothing is lost by it, and nobody may mind.
    harmless: bool = False

    @property
    def expected(self) -> str:
        if self.harmless:
            return "hits go on"
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
    #: ``made``: they make again what is missing, at the latest the second time. ``untried``: none
    #: is tried meanwhile.
    dumps: Literal["fail", "made", "untried"] = "fail"
    #: The files are whole where nobody gets at them any more: who keeps a segment open reads on,
    #: exactly.
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
    """The file system behaves like this for a while (``fuse.py``), while one kind of call is made.

    With ``disk`` it is the disk of a local file system that behaves so (``disk.py``).
    """

    manners: Mapping[str, Any]
    call: Literal["lookup", "load", "dump"]
    #: The call waits until its deadline, once; the others do not wait at all.
    waits: bool = False
    #: A dump that is told to have worked; what it wrote is found out when it is read.
    believed: bool = False
    disk: bool = False
    #: As above.
    engine: Through = "no"

    @property
    def expected(self) -> str:
        if self.believed:
            return "found out by the next load, then healthy"
        fails = "dumps fail" if self.call == "dump" else "misses"
        return f"{fails}{', one deadline' if self.waits else ''}; then healthy"


@dataclass(frozen=True)
class EngineRow(Row):
    """Done to the processes of a live engine; each costs a start."""

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
