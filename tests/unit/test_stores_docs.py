"""The tests that docs/stores-compared.md lists for each kind of store exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
SECTION = re.search(
    r"^## What is tried on each$.*?(?=^## |\Z)",
    (DOCS / "stores-compared.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
ROWS = [
    line.strip("|").split("|")
    for line in (SECTION[0] if SECTION else "").splitlines()
    if line.startswith("| ")
]
NAMED = sorted(
    {named for row in ROWS for cell in row for named in re.findall(r"\[(\w+)\]\(([^)]+)\)", cell)}
)
#: Other permitted texts of a cell.
WORDS = {"as `posix`", "as killed", "not tried"}


@pytest.mark.parametrize(("name", "file"), NAMED)
def test_a_test_that_is_named_exists(name: str, file: str) -> None:
    word = "def" if file.endswith(".py") else "fn"
    assert re.search(rf"^{word} {name}\(", (DOCS / file).read_text(), re.MULTILINE), (
        f"{file} has no {name}"
    )


def test_every_kind_has_a_cell_in_every_row() -> None:
    head, *rows = ROWS
    kinds = {cell.strip().strip("`") for cell in head if cell.strip()}
    assert kinds == {"posix", "nfs", "ds3fs", "object", "redis", "mooncake"}
    assert len(rows) >= 9
    for row in rows:
        assert len(row) == len(head), row
        assert all("](" in cell or cell.strip() in WORDS for cell in row[1:]), row
