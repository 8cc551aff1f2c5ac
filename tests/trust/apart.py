"""The cells of the matrix that do not apply, with reasons; and the cells of the short form.

Every exclusion is in :data:`APART`, with the reason that the table prints. A new row or column has
none: it runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from columns import COLUMNS, FILES, Column
from kinds import LONG, EngineRow, FileRow, FuseRow, Row


@dataclass(frozen=True)
class Apart:
    """A statement about these rows in those columns."""

    row: Callable[[Row], bool]
    column: Callable[[Column], bool]
    why: str


def _named(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.line in names


def _on_fuse(row: Row) -> bool:
    return (isinstance(row, FuseRow) and not row.disk) or row.line in (
        "kill -9 in a call",
        "dead root",
    )


APART = (
    Apart(
        lambda row: isinstance(row, FileRow) and row.of_segments,
        lambda column: not column.in_segments,
        "a block file has no footer and no head of its own",
    ),
    Apart(
        _named("newer version, longer"),
        lambda column: column.in_segments,
        "a record in a segment cannot grow; the entry's length is a row of its own",
    ),
    Apart(
        _on_fuse,
        lambda column: column.direct,
        "I/O past the page cache uses a disk of its own: the rows of the disk",
    ),
    Apart(
        lambda row: isinstance(row, FileRow) and row.of_codecs,
        lambda column: not column.compressed,
        "uncompressed records have no codec",
    ),
    Apart(
        lambda row: isinstance(row, EngineRow),
        lambda column: True,
        "there is no engine at the store level",
    ),
    Apart(
        _named("stalled: lookup", "EIO: lookup"),
        lambda column: column.in_segments,
        "a lookup of segments uses memory and no file system",
    ),
)

#: Cells that are known to fail, with reasons; they must fail.
KNOWN: tuple[Apart, ...] = ()

#: Rows that every column but the first runs in the short form, if they apply.
_SHORT = {
    *(
        "flip: header checksum",
        "flip: last shard",
        "zeroed: everything",
        "truncated: middle",
        "longer: a byte",
    ),
    *("swapped", "another identity", "newer version", "removed", "directory", "pipe"),
    *("root read-only", "root emptied", "namespace removed", "unmounted", "full"),
    *("stalled: read", "stalled: write", "EIO: read", "EIO: write", "lie: write"),
    *("much damage", "root missing"),
}
#: Rows of processes that some of the columns run in it, by name: each layout, each mode of reading
#: and each upper tier runs each of these rows at least once.
_SHORT_OF_PROCESSES = {
    "kill -9 of a writer": {"segment", "file/direct", "Cache|Posix", "Compress|Pc"},
    "two writers": {"segment/direct", "Cache|Pc", "Cache|Posix|Posix"},
    "no descriptors": {"segment/direct", "Cache|Posix"},
    "power cut": {"segment/direct"},
}
#: Rows that only some of them run in it: rows about the special features of these columns.
_SHORT_OF_SEGMENTS = {
    "footer: entry",
    "footer: cut off",
    "footer: newer version",
    "footer: another place",
}
_SHORT_OF_CODECS = {"codec: none", "codec: raw checksum", "codec: frame"}
_SHORT_PAST_CACHE = {"disk stalled: read", "disk stalled: write", "disk EIO: read"}

#: The columns of live engines: each model runner over block files, and one with memory above
#: segments.
V1, V2, OVER_PC = "vLLM v1", "vLLM v2", "vLLM Cache|Pc"
ENGINES = (V1, V2, OVER_PC)
#: Rows of the second of these in the short form: the runner affects the end of a failed load, not
#: the kind of damage.
_SHORT_ON_V2 = {
    *("flip: last shard", "truncated: middle", "removed", "pipe", "newer version"),
    *("full", "unmounted", "EIO: read"),
}
#: Rows of the last of these in it. The other rows of engines have tests of their own:
#: tests/vllm/test_beside.py and test_media.py.
_SHORT_OVER_PC = {
    *("flip: last shard", "flip: header checksum", "truncated: middle", "removed", "pipe"),
    *("full", "unmounted", "stalled: read", "kill -9 of an engine"),
    *("weights replaced", "sleep and wake"),
}

R = TypeVar("R", bound=Row)


def why_not(row: Row, column: Column) -> str:
    """Why this row does not apply to this column; empty if it applies."""
    return _first(APART, row, column)


def known_fault(row: Row, column: Column) -> str:
    """Why this cell is known to fail; empty if it is not."""
    return _first(KNOWN, row, column)


def _first(aparts: Sequence[Apart], row: Row, column: Column) -> str:
    return next((apart.why for apart in aparts if apart.row(row) and apart.column(column)), "")


def is_run(row: Row, column: Column) -> bool:
    """True if this run has this cell."""
    if why_not(row, column):
        return False
    if LONG:
        return True
    if column == FILES:
        return not (isinstance(row, FuseRow) and row.disk)
    if row.line in _SHORT_OF_PROCESSES:
        return column.name in _SHORT_OF_PROCESSES[row.line]
    more = (_SHORT_OF_SEGMENTS if column.in_segments else set()) | (
        _SHORT_OF_CODECS if column.compressed else set()
    )
    return row.line in _SHORT | more | (_SHORT_PAST_CACHE if column.direct else set())


def through(row: Row, engine: str) -> bool:
    """True if a live engine runs this row in this run."""
    if engine == OVER_PC:
        over_pc = next(column for column in COLUMNS if column.memory and column.in_segments)
        meets = isinstance(row, EngineRow) or (row.through != "no" and not why_not(row, over_pc))
        return meets and (LONG or row.line in _SHORT_OVER_PC)
    if LONG:
        return row.through != "no"
    return row.through == "short" and (engine == V1 or row.line in _SHORT_ON_V2)


def cells(rows: Sequence[R]) -> list[tuple[R, Column]]:
    """The cells of these rows in this run, column by column."""
    return [(row, column) for column in COLUMNS for row in rows if is_run(row, column)]
