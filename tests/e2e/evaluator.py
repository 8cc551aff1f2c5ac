"""Answers to a data set: JSON lines of a prompt and the answers that are right, scored as SQuAD is.

A line has ``prompt``, or ``context`` and ``question`` (also ``input``), ``answers`` (also
``answer``), and may have ``max_tokens``.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

#: Tokens of an answer where the line does not say.
MAX_TOKENS = 32
_DROPPED = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class Question:
    """A line of the data set."""

    prompt: str
    answers: tuple[str, ...]
    max_tokens: int = MAX_TOKENS


@dataclass(frozen=True)
class Scores:
    """Means over the data set, from 0 to 1."""

    exact: float
    f1: float
    count: int


def read(path: Path) -> list[Question]:
    """The questions of a file. Raises :class:`ValueError` with the line that has none."""
    questions = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                questions.append(_question(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: no question ({error!r})") from None
    return questions


def _question(line: dict[str, Any]) -> Question:
    prompt = line.get("prompt")
    if prompt is None:
        prompt = f"{line['context']}\n{line.get('question') or line['input']}"
    answers = line.get("answers") or line["answer"]
    answers = (answers,) if isinstance(answers, str) else tuple(answers)
    return Question(prompt, answers, line.get("max_tokens", MAX_TOKENS))


def words(text: str) -> list[str]:
    """The words of a text without articles, punctuation and case."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return _DROPPED.sub(" ", plain).split()


def exact(given: str, right: str) -> float:
    """1 if the words are the same."""
    return float(words(given) == words(right))


def f1(given: str, right: str) -> float:
    """The harmonic mean of precision and recall of words."""
    ours, theirs = words(given), words(right)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else float(ours == theirs)


def evaluate(questions: Iterable[Question], ask: Callable[[str, int], str]) -> Scores:
    """Sends every question; each scores as the right answer that it is closest to."""
    found = [
        (question, ask(question.prompt, question.max_tokens).strip()) for question in questions
    ]
    return Scores(
        *(
            fmean(
                max(score(given, right) for right in question.answers) for question, given in found
            )
            for score in (exact, f1)
        ),
        count=len(found),
    )
