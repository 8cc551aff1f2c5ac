"""The README names the promises that the page of proofs proves, by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()
PROOFS = (REPOSITORY / "docs" / "proofs.md").read_text()
NAMED = re.findall(r"`([\w./-]+\.(?:py|rs))::(\w+)`", PROOFS)
PROMISES = re.findall(r"^\| (\d)\. (.*)$", PROOFS, flags=re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    source = (REPOSITORY / file).read_text()
    word = "def" if file.endswith(".py") else "fn"
    assert re.search(rf"^\s*{word} {name}\(", source, flags=re.MULTILINE), f"{file} has no {name}"


def test_every_promise_names_a_test() -> None:
    assert [number for number, _ in PROMISES] == [str(number) for number in range(1, 9)]
    assert all("::" in row for _, row in PROMISES)


def test_the_readme_has_every_promise() -> None:
    section = README.partition("\n## Promises\n")[2].partition("\n## ")[0]
    assert re.findall(r"^(\d)\. ", section, flags=re.MULTILINE) == [n for n, _ in PROMISES]


def test_the_readme_fits_on_two_screens() -> None:
    assert len(README.splitlines()) <= 120


def test_the_readme_has_every_way_to_install_in_one_sentence() -> None:
    sentences = README.replace("\n", " ").split(". ")
    ways = ("`make wheel`", "`pip install 'ucm-kv[vllm]'`", "`docker build .`")
    assert any(all(way in sentence for way in ways) for sentence in sentences)
