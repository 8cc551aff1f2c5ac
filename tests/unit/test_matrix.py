"""The page of what is cached is made from a table, and each test that the table names exists."""

from __future__ import annotations

import re
import subprocess
import sys

import matrix
import pytest

TESTS = sorted({cell.test for kind in matrix.KINDS for cell in kind.cells if cell.test})


def test_the_page_is_made_from_the_table() -> None:
    command = [sys.executable, matrix.__file__, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_old_page_is_found() -> None:
    page = matrix.PAGE.read_text()
    assert matrix.written(page) == page
    assert matrix.written(page.replace("Gemma 3 | engines", "Gemma 3 | no")) == page
    with pytest.raises(LookupError, match="others"):
        matrix.written(page.replace("<!-- others: made", "<!-- of others: written"))


@pytest.mark.parametrize("test", TESTS)
def test_a_test_that_the_table_names_exists(test: str) -> None:
    file, name = test.split("::")
    source = (matrix.PAGE.parents[1] / file).read_text()
    assert re.search(rf"^\s*def {name}\(", source, flags=re.MULTILINE), f"{file} has no {name}"
