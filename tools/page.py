"""Writes the tables of pages of the documents that are made from the code. A table stands between
``<!-- <name>: made by tools/<program> -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path


def tables_of(program: str) -> re.Pattern[str]:
    """Finds the tables that this program makes: groups 1, ``name``, ``table`` and 4."""
    begin = rf"(<!-- (?P<name>[^:>]+): made by tools/{re.escape(program)} -->\n)"
    return re.compile(begin + r"(?P<table>.*?)(<!-- end -->)", re.DOTALL)


def run(
    about: str | None, pages: Iterable[Path], program: str, written: Callable[[str], str]
) -> int:
    """Writes the pages, or with ``--check`` checks that they are up to date; returns the exit code.
    ``written`` makes the new text of one of the old, or raises LookupError with what is missing."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is out of date"
    )
    check = parser.parse_args().check
    for page in pages:
        old = page.read_text()
        try:
            new = written(old)
        except LookupError as error:
            print(f"tools/{program}: {error}")
            return 1
        if check and new != old:
            print(f"{page.name} is out of date; run: python tools/{program}")
            return 1
        if not check:
            page.write_text(new)
    return 0
