"""Writes the tables of docs/metrics.md from :mod:`ucm.metrics.names`.

``tests/connector/test_metrics.py`` checks that exactly these series are exported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import page

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
TABLE = page.tables_of("metric_names.py")

sys.path.insert(0, str(ROOT / "python"))
from ucm.metrics.names import Row, rows  # noqa: E402 - the package of this checkout


def lines(found: Iterable[Row]) -> Iterator[str]:
    """The table of one topic."""
    yield "| name | kind | labels | definition |"
    yield "|---|---|---|---|"
    for row in found:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        text = re.sub(r"\b((?:ucm|vllm)_\w+|staging_capacity|deadlines\.\w+)\b", r"`\1`", row.text)
        yield f"| `{row.name}` | {row.kind} | {labels} | {text} |"


def written(text: str) -> str:
    """The page with its tables as they are here."""
    made = dict(rows())

    def table(match: re.Match[str]) -> str:
        return match[1] + "".join(f"{line}\n" for line in lines(made.pop(match["name"]))) + match[4]

    new = TABLE.sub(table, text)
    if made:
        raise LookupError(f"there is no place for the table of {', '.join(made)}")
    return new


if __name__ == "__main__":
    sys.exit(page.run(__doc__, [PAGE], "metric_names.py", written))
