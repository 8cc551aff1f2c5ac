"""The tests that the README names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()
NAMED = re.findall(r"`([\w./-]+\.(?:py|rs))::(\w+)`", README)
PROMISES = re.findall(r"^\| (\d)\. (.*)$", README, flags=re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    source = (REPOSITORY / file).read_text()
    word = "def" if file.endswith(".py") else "fn"
    assert re.search(rf"^\s*{word} {name}\(", source, flags=re.MULTILINE), f"{file} has no {name}"


def test_every_promise_names_a_test() -> None:
    assert [number for number, _ in PROMISES] == [str(number) for number in range(1, 9)]
    assert all("::" in row for _, row in PROMISES)
