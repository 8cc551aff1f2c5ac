"""Prompts of the recall model: records in a haystack, in one hop or two, and chains of records.

A prompt is filler from a Markov chain with records in it: ``k v .`` binds a value to a key; ``k m
.`` and, somewhere else, ``m v .`` do so through a middle. A query is ``? k v`` or ``? k m v``. Each
answer needs one token among all of them: random blocks, windows, and a selection for the previous
query miss it. The second answer of two hops needs another block than the first one, and is always
decoded. A chain is up to 16 adjacent records, each with the key of the next one: following it stays
in one block for many tokens, so a selection may be some steps old.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

VOCABULARY = 512
#: First token of each kind.
FILLER, KEYS, MIDDLES, VALUES, STOP, ASK = 0, 64, 192, 320, 504, 505
NAMES = 128
#: Most records of a chain.
LINKS = 16
#: Names of the kinds of answers.
ONE_HOP, FIRST, SECOND, LINK = 1, 2, 3, 4
KINDS = {ONE_HOP: "one hop", FIRST: "two hops, first", SECOND: "two hops, second", LINK: "chain"}

_SUCCESSORS: Ints = np.argsort(np.random.Generator(np.random.PCG64(20)).random((64, 64)), axis=1)[
    :, :8
]


@dataclass
class Sequence:
    """Tokens, and for each the kind of answer; 0: no answer, not determined."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], kinds: list[int] | None = None) -> None:
        """More of it."""
        self.tokens += tokens
        self.kinds += kinds or [0] * len(tokens)


class Filler:
    """A Markov chain of 64 tokens with 8 successors each."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._last = int(rng.integers(64))

    def take(self, count: int) -> list[int]:
        """The next tokens."""
        found, last = [], self._last
        for choice in self._rng.integers(8, size=count).tolist():
            last = int(_SUCCESSORS[last, choice])
            found.append(FILLER + last)
        self._last = last
        return found


def query(record: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Tokens and kinds of the query of a record ``(key, value)`` or ``(key, middle, value)``."""
    if len(record) == 2:
        return [ASK, KEYS + record[0], VALUES + record[1]], [0, 0, ONE_HOP]
    key, middle, value = record
    return [ASK, KEYS + key, MIDDLES + middle, VALUES + value], [0, 0, FIRST, SECOND]


def chain_of(key: int, middles: list[int], value: int) -> list[int]:
    """Tokens of the names of a chain, in order."""
    return [KEYS + key, *(MIDDLES + middle for middle in middles), VALUES + value]


def links(chain: list[int]) -> list[int]:
    """Its records."""
    return [token for told, name in pairwise(chain) for token in (told, name, STOP)]


def follow(chain: list[int]) -> tuple[list[int], list[int]]:
    """Tokens and kinds of its query."""
    return [ASK, *chain], [0, 0] + [LINK] * (len(chain) - 1)


@dataclass(frozen=True)
class Prompt:
    """A haystack, and the tokens fed to the decoder after it, one at a time, including answers."""

    tokens: list[int]
    queries: Sequence


def recall(seed: int, length: int, records: int, asked: int = 3, names: int = NAMES) -> Prompt:
    """A prompt with ``records`` records, each once, 5 of 8 of them halves of two hops; ``asked``
    queries of one hop and as many of two follow, in random order."""
    rng = np.random.Generator(np.random.PCG64([seed, length, records]))
    filler = Filler(rng)
    pairs = records * 5 // 16
    keys, middles, values = (rng.permutation(names).tolist() for _ in range(3))
    one = [(keys[i], values[i]) for i in range(records - 2 * pairs)]
    two = [(keys[i], middles[i], values[i]) for i in range(len(one), len(one) + pairs)]
    told = [[KEYS + key, VALUES + value, STOP] for key, value in one]
    told += [[KEYS + key, MIDDLES + middle, STOP] for key, middle, _ in two]
    told += [[MIDDLES + middle, VALUES + value, STOP] for _, middle, value in two]
    order = rng.permutation(len(told))
    places = np.sort(rng.integers(0, length - 3 * records + 1, size=records))
    tokens: list[int] = []
    before = 0
    for place, which in zip(places.tolist(), order.tolist(), strict=True):
        tokens += filler.take(place - before) + told[which]
        before = place
    tokens += filler.take(length - len(tokens))
    chosen = [
        *(one[i] for i in rng.permutation(len(one))[:asked]),
        *(two[i] for i in rng.permutation(pairs)[:asked]),
    ]
    queries = Sequence()
    for which in rng.permutation(len(chosen)).tolist():
        queries.add(*query(chosen[which]))
    return Prompt(tokens, queries)


def chain(seed: int, length: int) -> Prompt:
    """A prompt with one chain to follow, among other records."""
    rng = np.random.Generator(np.random.PCG64([seed, length, 1]))
    base = recall(seed, length - 3 * LINKS, length // 16, 0).tokens
    # Not inside a record: between two tokens of filler.
    places = [i for i in range(1, len(base)) if base[i] < KEYS and base[i - 1] < KEYS]
    place = places[int(rng.integers(len(places)))]

    def unused(kind: int) -> list[int]:
        found = sorted(set(range(NAMES)) - {token - kind for token in base})
        return [found[i] for i in rng.permutation(len(found)).tolist()]

    names = chain_of(unused(KEYS)[0], unused(MIDDLES)[: LINKS - 1], unused(VALUES)[0])
    return Prompt([*base[:place], *links(names), *base[place:]], Sequence(*follow(names)))
