"""The matrix as a table: the result of every row in every column, for the terminal and as
markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import columns
from apart import ENGINES, why_not
from kinds import Row
from rows import ENGINE_ROWS, FILE_ROWS, FUSE_ROWS, PROCESS_ROWS, ROOT_ROWS

#: Columns at the store level, then through live engines.
COLUMNS = (*(column.name for column in columns.COLUMNS), *ENGINES)
STORES = tuple(column.name for column in columns.COLUMNS)
_WORST = ("ok", "skipped", "known fault", "FAILED")
#: The tables of the pages: a heading, and its rows.
PARTS: tuple[tuple[str, Sequence[Row]], ...] = (
    ("Damage to a record", [row for row in FILE_ROWS if not (row.of_segments or row.of_codecs)]),
    ("Damage to a segment", [row for row in FILE_ROWS if row.of_segments]),
    ("Damage to a compressed record", [row for row in FILE_ROWS if row.of_codecs]),
    ("Harm to a root", ROOT_ROWS),
    ("Faults of the file system and of the disk", FUSE_ROWS),
    ("Several processes, and limits of one", PROCESS_ROWS),
    ("Engines", ENGINE_ROWS),
)


class Table:
    """Results by row and column; a cell that was not run is empty, one that does not apply has the
    number of the reason."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], str] = {}

    def add(self, row: str, column: str, outcome: str) -> None:
        """Records the result of a test; of several tests of one cell the worst counts."""
        before = self.cells.get((row, column), "ok")
        self.cells[row, column] = max(before, outcome, key=_WORST.index)

    def lines(self) -> Iterator[tuple[str, ...]]:
        """The head, then every row that was run. A column in which nothing was run is left out."""
        run = [name for name in COLUMNS if any(column == name for _, column in self.cells)]
        yield ("harm", "what", "counted", "expected", *run)
        for name, row in self._rows().items():
            if any((name, column) in self.cells for column in run):
                cells = (self._cell(row, column) for column in run)
                yield (name, row.what, " or ".join(row.reasons), row.expected, *cells)

    @staticmethod
    def _rows() -> dict[str, Row]:
        rows: list[Row] = [*FILE_ROWS, *ROOT_ROWS, *FUSE_ROWS, *PROCESS_ROWS, *ENGINE_ROWS]
        return {row.line: row for row in rows}

    def _cell(self, row: Row, column: str) -> str:
        outcome = self.cells.get((row.line, column))
        if outcome is not None:
            return outcome
        why = next((why_not(row, kind) for kind in columns.COLUMNS if kind.name == column), "")
        return f"- ({self._reasons().index(why) + 1})" if why else ""

    def _reasons(self) -> list[str]:
        """The reasons of cells that do not apply, each once, in the order of the table."""
        found = (
            why_not(row, column) for row in self._rows().values() for column in columns.COLUMNS
        )
        return list(dict.fromkeys(filter(None, found)))

    def notes(self) -> list[str]:
        """The meaning of the numbers in the cells."""
        return [
            f"({number}) not applicable: {why}" for number, why in enumerate(self._reasons(), 1)
        ]

    def totals(self) -> Iterator[tuple[str, ...]]:
        """For every column: its run rows, the number of passed ones, and the number of those that
        do not apply."""
        yield ("column", "rows run", "ok", "not applicable")
        for column in COLUMNS:
            outcomes = [outcome for (_, name), outcome in self.cells.items() if name == column]
            kinds = [kind for kind in columns.COLUMNS if kind.name == column]
            nothing = sum(
                bool(why_not(row, kind)) for kind in kinds for row in self._rows().values()
            )
            if outcomes:
                yield (column, str(len(outcomes)), str(outcomes.count("ok")), str(nothing))

    def text(self) -> list[str]:
        """Columns side by side."""
        return [
            *_aligned(list(self.lines())),
            "",
            *self.notes(),
            "",
            *_aligned(list(self.totals())),
        ]

    def markdown(self) -> str:
        """For pages: the totals, the meaning of the numbers, and a table for each kind of harm,
        with one cell for all stores and one for all engines."""
        notes = (
            f"- ({number}) not in {', '.join(self._without(why))}: {why}"
            for number, why in enumerate(self._reasons(), 1)
        )
        tables = (
            f"## {title}\n\n{_markdown(lines)}"
            for title, rows in PARTS
            if len(lines := list(self._together(rows))) > 1
        )
        return "\n".join([_markdown(self.totals()), *notes, "", *tables])

    def _without(self, why: str) -> list[str]:
        """The columns in which rows do not apply for this reason."""
        rows = self._rows().values()
        return [
            column.name
            for column in columns.COLUMNS
            if any(why_not(row, column) == why for row in rows)
        ]

    def _together(self, rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
        yield ("harm", "what", "counted", "expected", "stores", "engines")
        for row in {row.line: row for row in rows}.values():
            cells = (self._of_several(row, STORES), self._of_several(row, ENGINES))
            if any(cells):
                yield (row.line, row.what, " or ".join(row.reasons), row.expected, *cells)

    def _of_several(self, row: Row, names: Sequence[str]) -> str:
        """The result in all of these columns, and the numbers of those that do not apply; the
        columns by name if some differ or were not run."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self._cell(row, name), []).append(name)
        run = {cell: where for cell, where in found.items() if cell in _WORST}
        if not run:
            return ""
        numbers = [cell.removeprefix("- ") for cell in found if cell.startswith("-")]
        if len(run) == 1 and "" not in found:
            return " ".join([*run, *numbers])
        named = [f"{cell}: {', '.join(where)}" for cell, where in run.items()]
        return " ".join(["; ".join(named), *numbers])


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _markdown(lines: Iterable[tuple[str, ...]]) -> str:
    """A bar in a name would end its cell."""
    head, *rest = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest)) + "\n"
    )
