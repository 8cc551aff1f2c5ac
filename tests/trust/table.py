"""The matrix as a table: what every row came to in every column, for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Iterator

from kinds import COLUMNS, Row
from rows import FILE_ROWS, FUSE_ROWS, PROCESS_ROWS, ROOT_ROWS

_HEAD = ("harm", "what", "counted", "expected", *COLUMNS)


class Table:
    """Results by row and column; a cell nobody ran is empty."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], str] = {}

    def add(self, row: str, column: str, outcome: str) -> None:
        """What a test said; of several tests of one cell the worst stays."""
        worst = ["ok", "skipped", "known fault", "FAILED"]
        before = self.cells.get((row, column), "ok")
        self.cells[row, column] = max(before, outcome, key=worst.index)

    def lines(self) -> Iterator[tuple[str, ...]]:
        """The head, then every row that was run."""
        yield _HEAD
        rows: list[Row] = [*FILE_ROWS, *ROOT_ROWS, *FUSE_ROWS, *PROCESS_ROWS]
        for name, row in {row.line: row for row in rows}.items():
            cells = [self.cells.get((name, column), "") for column in COLUMNS]
            if any(cells):
                yield (name, row.what, " or ".join(row.reasons), row.expected, *cells)

    def text(self) -> list[str]:
        """Columns side by side."""
        lines = list(self.lines())
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]

    def markdown(self) -> str:
        """The same for a page."""
        head, *rest = (f"| {' | '.join(line)} |" for line in self.lines())
        return "\n".join([head, "|" + "---|" * len(_HEAD), *rest]) + "\n"
