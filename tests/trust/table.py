"""The matrix as a table: the result of every row in every column, for the terminal and as
markdown."""

from __future__ import annotations

from collections.abc import Iterator

import columns
from apart import ENGINES, why_not
from kinds import Row
from rows import ENGINE_ROWS, FILE_ROWS, FUSE_ROWS, PROCESS_ROWS, ROOT_ROWS

#: Columns at the store level, then through live engines.
COLUMNS = (*(column.name for column in columns.COLUMNS), *ENGINES)
_WORST = ("ok", "skipped", "known fault", "FAILED")


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
        """The same for a page."""
        notes = "\n".join(f"- {note}" for note in self.notes())
        return f"{_markdown(self.lines())}\n{notes}\n\n{_markdown(self.totals())}"


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _markdown(lines: Iterator[tuple[str, ...]]) -> str:
    """A bar in a name would end its cell."""
    head, *rest = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest)) + "\n"
    )
