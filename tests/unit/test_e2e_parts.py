"""Parts of the end-to-end tests that need no server: the choice of tests, and scores of answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from e2e_selection import stages, why_not
from evaluator import Question, evaluate, exact, f1, read


def item(**marks: object) -> pytest.Item:
    """A test with these marks."""
    made = {
        name: SimpleNamespace(args=given if isinstance(given, tuple) else (given,))
        for name, given in marks.items()
    }
    return SimpleNamespace(get_closest_marker=made.get)  # type: ignore[return-value]


def test_stages() -> None:
    assert list(stages("2")) == [2]
    assert list(stages("0-2")) == [0, 1, 2]
    assert 7 in stages("1+")
    assert 0 not in stages("1+")
    for wrong in ("", "two", "1-", "-"):
        with pytest.raises(pytest.UsageError):
            stages(wrong)


def test_the_choice_of_tests() -> None:
    one = item(stage=1, feature="correctness", platform=("cuda", "hip"))
    assert why_not(one, None, [], "cuda") is None
    assert why_not(one, stages("1+"), ["correctness", "other"], "hip") is None
    assert why_not(one, stages("2"), [], "cuda") == "another stage"
    assert why_not(one, None, ["performance"], "cuda") == "another feature"
    assert why_not(one, None, [], "cpu") == "only on cuda, hip"
    plain = item()
    assert why_not(plain, None, [], "cpu") is None
    assert why_not(plain, stages("1"), [], "cpu") == "another stage"
    assert why_not(plain, None, ["performance"], "cpu") == "another feature"


def test_scores() -> None:
    assert exact("The Eiffel-Tower.", "eiffeltower") == 1
    assert exact("a tower", "a house") == 0
    assert f1("the red house", "red car") == pytest.approx(0.5)
    assert f1("red", "blue") == 0
    assert f1("", "") == 1
    questions = [Question("p", ("x y", "z")), Question("q", ("w",), 3)]
    answers = {("p", 32): " z ", ("q", 3): "w v"}
    found = evaluate(questions, lambda prompt, tokens: answers[prompt, tokens])
    assert (found.exact, found.count) == (0.5, 2)
    assert found.f1 == pytest.approx((1 + 2 / 3) / 2)


def test_a_data_set(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    lines: list[dict[str, object]] = [
        {"prompt": "p", "answers": ["a", "b"], "max_tokens": 2},
        {"context": "c", "question": "q", "answer": "a"},
        {"context": "c", "input": "q", "answers": "a"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read(path) == [
        Question("p", ("a", "b"), 2),
        Question("c\nq", ("a",)),
        Question("c\nq", ("a",)),
    ]
    path.write_text('{"prompt": "p", "answers": ["a"]}\n{"prompt": "p"}\n')
    with pytest.raises(ValueError, match="line 2: no question"):
        read(path)
