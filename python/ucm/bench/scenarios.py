"""Scenarios of ``ucm bench vllm``: lengths, how many requests run at once, and what they share.

A run is a number of *conversations*, some at the same time; the requests of one follow each other.
Prompts are random token ids that depend on the seed alone: another seed shares nothing with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: The first id of a prompt: smaller ones are often special tokens.
FIRST_ID = 3
#: Ids of a prompt; every vocabulary is at least this large.
VOCABULARY = 256


@dataclass(frozen=True)
class Scenario:
    """The figures of a scenario; lengths in tokens."""

    name: str
    about: str
    #: Of the first request of a conversation. Without ``question_tokens`` each further one adds as
    #: many to the prompt and answer before it.
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    #: Conversations of a run.
    requests: int
    #: Share of the prompt that all conversations have in common.
    prefix_ratio: float = 0.0
    #: Share of each first prompt that the server has computed before the run.
    warmed: float = 0.0
    #: Requests of a conversation.
    turns: int = 1
    #: Each request is the first prompt and a new question of this length.
    question_tokens: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer."""
        if self.question_tokens:
            return self.prompt_tokens + self.question_tokens + self.output_tokens
        return self.turns * (self.prompt_tokens + self.output_tokens)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("short_high_concurrency", "many short prompts at once", 512, 128, 32, 128),
        Scenario("long_low_concurrency", "few long prompts", 8192, 1024, 4, 16),
        Scenario("prefix_sharing", "four fifths of all prompts are equal", 4096, 512, 16, 64, 0.8),
        Scenario("multi_turn", "chats of ten turns of 500 tokens", 400, 100, 4, 8, turns=10),
        Scenario(
            "document_qa",
            "five questions to each document of 100,000 tokens",
            100_000,
            128,
            1,
            2,
            turns=5,
            question_tokens=64,
        ),
        Scenario(
            "hit80", "four fifths of each prompt were computed before", 4000, 1024, 8, 8, warmed=0.8
        ),
    )
}


class Conversation:
    """The prompts of one conversation, each made when it is needed."""

    def __init__(self, scenario: Scenario, seed: str, number: int) -> None:
        self._scenario = scenario
        common = round(scenario.prompt_tokens * scenario.prefix_ratio)
        self._own = random.Random(f"{seed} {number}")
        self.first = _tokens(random.Random(seed), common)
        self.first += _tokens(self._own, scenario.prompt_tokens - common)
        self._history: list[int] = []

    def prompt(self, answer: Sequence[int]) -> list[int]:
        """The next prompt, after the answer to the one before it; empty before the first."""
        if self._scenario.question_tokens:
            return self.first + _tokens(self._own, self._scenario.question_tokens)
        if self._history:
            more = _tokens(self._own, self._scenario.prompt_tokens)
            self._history = [*self._history, *answer, *more]
        else:
            self._history = self.first
        return self._history

    def warming(self) -> list[int]:
        """What the server computes before the run; may be empty."""
        return self.first[: round(len(self.first) * self._scenario.warmed)]


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(FIRST_ID, FIRST_ID + VOCABULARY) for _ in range(count)]
