"""Configuration values become the same JSON text everywhere, or an error."""

from __future__ import annotations

import enum
import functools
import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucm.errors import InvalidInputError
from ucm.integration.vllm.connector.identity.engine_identity import differences, plain, text_of

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Mode(enum.IntEnum):
    FAST = 1


@dataclass
class Point:
    y: int
    x: torch.dtype


class Object:
    def __init__(self) -> None:
        self.b, self.a = 1, {2}


@given(JSON)
def test_plain_keeps_json_values_and_is_stable(value: object) -> None:
    once = plain(value)
    assert json.loads(text_of(once)) == json.loads(text_of(plain(once)))
    assert once == value


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_order_of_a_dictionary_does_not_matter(value: dict[str, object]) -> None:
    assert text_of(plain(value)) == text_of(plain(dict(reversed(value.items()))))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Mode.FAST, "FAST"),
        (torch.bfloat16, "bfloat16"),
        (Fraction(1, 4), "1/4"),
        (float("inf"), "inf"),
        (b"\x01\xff", "01ff"),
        (Path("/a/b"), "/a/b"),
        ((1, 2), [1, 2]),
        ({3, 1, 2}, [1, 2, 3]),
        ({2: "b", 1: "a"}, {"1": "a", "2": "b"}),
        (Point(1, torch.float16), {"x": "float16", "y": 1}),
        (Object(), {"": "Object", "a": [2], "b": 1}),
        (Object, f"{__name__}.Object"),
        (True, True),
    ],
)
def test_types_that_json_lacks(value: object, expected: object) -> None:
    assert plain(value) == expected
    if isinstance(expected, dict):
        assert list(plain(value)) == sorted(expected)


def test_a_value_without_a_stable_description_is_refused() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    for value in (object(), lambda: 0, functools.partial(print), cycle):
        with pytest.raises(InvalidInputError):
            plain({"value": value})


@given(JSON, JSON)
def test_a_difference_is_empty_exactly_when_the_texts_are_equal(a: object, b: object) -> None:
    left, right = plain(a), plain(b)
    assert (differences(left, right) == []) == (text_of(left) == text_of(right))


def test_differences_name_the_path_and_both_values() -> None:
    here = {"a": {"b": [1, 2]}, "only": 1, "n": 1}
    there = {"a": {"b": [1, 3]}, "new": None, "n": 1.0}
    assert differences(here, there) == [
        "a.b[1] is 2 here and 3 there",
        "only is 1 here and absent there",
        "n is 1 here and 1.0 there",
        "new is absent here and null there",
    ]
    assert differences([1], [1, 2], "layers") == ["layers has 1 items here and 2 there"]
    (line,) = differences("x" * 1000, "y", "long")
    assert len(line) < 200
