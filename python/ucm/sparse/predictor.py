"""Which blocks a request will choose next: those it chose last, and those it has chosen most often.

Source: book 9.5.1; the seeds' history of accesses is part of it, their weight by position is not:
it ignores the query.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from ucm.sparse.stats import SparseStats


class Predictor:
    """Choices of one request in one layer, and how well they were foreseen."""

    def __init__(self, extra: int = 8, stats: SparseStats | None = None) -> None:
        """``extra``: how many of the most used blocks are foreseen beside the last choice."""
        self._extra = extra
        self._stats = stats or SparseStats()
        self._last: list[int] = []
        self._next: list[int] = []  # what is foreseen of the next choice
        self._used: Counter[int] = Counter()
        self._asked = self._hit = 0

    def record(self, chosen: Iterable[int]) -> None:
        """A choice, the most wanted first. Counts how much of it had been foreseen."""
        found = list(chosen)
        if self._last:
            foreseen = set(self._next)
            hit = sum(block in foreseen for block in found)
            self._asked += len(found)
            self._hit += hit
            self._stats.add(blocks_asked=len(found), blocks_predicted=hit)
        self._last = found
        self._used.update(found)
        last = set(found)
        others = (block for block in self._used if block not in last)
        # Of equally often used ones the lower id: counters keep the order of insertion, which is no
        # property of a block.
        often = heapq.nsmallest(self._extra, others, key=lambda block: (-self._used[block], block))
        self._next = [*found, *often]

    def by_use(self, blocks: Iterable[int]) -> list[int]:
        """These blocks, the ones first that were chosen most often; of equally often chosen ones
        the lower id."""
        return sorted(blocks, key=lambda block: (-self._used[block], block))

    def predict(self, count: int | None = None) -> list[int]:
        """The blocks of the next choice, the likeliest first, at most ``count``."""
        return self._next[:count]

    @property
    def hit_rate(self) -> float:
        """Share of the chosen blocks that had been foreseen; 0 before there was a second choice."""
        return self._hit / self._asked if self._asked else 0.0
