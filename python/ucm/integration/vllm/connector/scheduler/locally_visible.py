"""Blocks that the ranks of this engine can read before others see them: in a segment that is still
open, in memory.

A rank lists their record ids in its report. The scheduler side looks up in a store of its own,
which sees only what is published; where that prefix ends, the blocks listed here continue it. They
count for this engine alone, and only if every rank that would read the record has listed it. A rank
keeps a published record in its list until the scheduler half's store, which lists a directory from
time to time, must have found it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucm.integration.vllm.connector.metadata import split_keys

#: Most ids remembered of one rank; a further one costs a hit until it is published.
LIMIT = 1 << 18


class LocallyVisible:
    """Written by the scheduler's thread, read by the lookups' threads."""

    def __init__(self, limit: int = LIMIT) -> None:
        """``limit``: most ids remembered of one rank."""
        self._limit = limit
        self._ranks: dict[int, set[bytes]] = {}
        self._readers: list[list[int]] = []

    def open(self, readers: Sequence[Sequence[int]]) -> None:
        """``readers[p]``: the ranks that read part *p*, in the order in which lookups ask for the
        parts."""
        self._readers = [list(ranks) for ranks in readers]

    def report(self, rank: int, gained: bytes, lost: bytes) -> None:
        """A rank's report: the record ids it can read from now on, and those that are now published
        or gone."""
        if not (gained or lost):
            return
        known = self._ranks.setdefault(rank, set())
        known.update(split_keys(gained)[: max(0, self._limit - len(known))])
        known.difference_update(split_keys(lost))

    def run(self, ids: Sequence[bytes], start: int) -> int:
        """How many record ids from ``start`` on are locally visible; ``ids`` holds the parts of
        each block in turn."""
        if not any(self._ranks.values()):
            return 0
        for at in range(start, len(ids)):
            if not self._is_locally_visible(ids[at], at % len(self._readers)):
                return at - start
        return len(ids) - start

    def _is_locally_visible(self, record_id: bytes, part: int) -> bool:
        readers = self._readers[part]
        return bool(readers) and all(record_id in self._ranks.get(rank, ()) for rank in readers)
