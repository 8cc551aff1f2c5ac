"""The pages of sparse attention match the code for every key, and its tests exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
from config_cases import REPOSITORY

from ucm.config.sparse import AlgorithmConfig, algorithms, chooses_blocks, keys_of
from ucm.config.words import SPARSE_ALIASES as ALIASES

pytest.importorskip("ucm._core")

TEXT = "".join(page.read_text() for page in (REPOSITORY / "docs").glob("sparse*.md"))


def table(name: str) -> list[list[str]]:
    """Cells of the rows between a marker and its end."""
    found = re.search(rf"<!-- {name}: .*? -->\n(.*?)<!-- end -->", TEXT, re.DOTALL)
    assert found is not None
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in found[1].strip().splitlines()
    ]
    return rows[2:]


def shown(value: Any) -> str:
    return (
        "none"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else "empty"
        if value == {}
        else str(value)
    )


def says(cell: str, value: Any) -> bool:
    """True if a cell begins with a value; for none or the budget it may be a text."""
    return (
        cell == shown(value)
        or cell.startswith(f"{shown(value)},")
        or (value is None and not cell[0].isupper())
    )


def test_every_key_and_default_that_all_methods_have() -> None:
    rows = table("keys of all")
    assert [row[0].strip("`") for row in rows] == list(AlgorithmConfig.model_fields)
    for key, default, _ in rows:
        name = key.strip("`")
        value = AlgorithmConfig.model_fields[name].get_default(call_default_factory=True)
        if name == AlgorithmConfig.default_budget[0]:
            value = AlgorithmConfig.default_budget[1]
        assert says(default, value), (name, default, value)


def test_every_key_and_default_of_one_method() -> None:
    written: dict[tuple[str, str], str] = {
        (row[0], row[1].strip("`")): row[2] for row in table("keys of each")
    }
    expected = {}
    for algorithm in filter(chooses_blocks, algorithms()):
        section = keys_of(algorithm)
        assert issubclass(section, AlgorithmConfig)
        for name, field in section.model_fields.items():
            value = field.get_default(call_default_factory=True)
            common = AlgorithmConfig.model_fields.get(name)
            if common is None or common.get_default(call_default_factory=True) != value:
                expected[algorithm, name] = value
        if section.default_budget != AlgorithmConfig.default_budget:
            expected[algorithm, section.default_budget[0]] = section.default_budget[1]
    assert written.keys() == expected.keys() | {
        key for key in written if key[0] == "GSA" and key[1] == "stride"
    }
    for key, value in expected.items():
        numbered = re.match(r"[\d.]+", written[key])
        assert says(written[key], value) or (value is None and numbered), (key, written[key], value)


def test_every_other_spelling_is_told() -> None:
    of_blend = {"min_blend_threshold"}
    told = set(re.findall(r"`(\w+)`", TEXT))
    assert set(ALIASES) - of_blend <= told


def test_presets_are_those_of_the_code() -> None:
    torch = pytest.importorskip("torch")
    assert torch is not None

    hashed = keys_of("GSAOnDevice")
    assert issubclass(hashed, AlgorithmConfig)
    found = [
        (name, int(topk), int(least), hashed(dense_layers=layers).dense_layers)
        for name, topk, least, layers in table("presets")
    ]
    assert found == [(p.name, p.topk_tokens, p.min_tokens, p.dense_layers) for p in hashed.presets]


def test_named_tests_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 10
    for file, function in named:
        assert f"def {function}(" in (REPOSITORY / file).read_text(), (file, function)
