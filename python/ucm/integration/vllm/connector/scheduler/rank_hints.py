"""Hints for the ranks' own stores, sent with each step: blocks in use, and blocks that will be
needed.

Both are bounded and optional: a rank that ignores them serves every request as well, only later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.metadata import Prefetch, RankReport
from ucm.integration.vllm.connector.scheduler.lookup import Lookup
from ucm.integration.vllm.connector.scheduler.prefetch import PrefetchPlanner
from ucm.integration.vllm.connector.scheduler.request_tracker import RequestTracker
from ucm.integration.vllm.connector.scheduler.touches import TouchQueue


class RankHints:
    """The hints of one engine."""

    def __init__(
        self,
        relocate: Callable[[Lookup], None],
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``relocate`` asks, in the background, where the blocks of a lookup are now."""
        self._touches = TouchQueue()
        self.prefetches = PrefetchPlanner(relocate, block_tokens, clock)

    def report(self, rank: RankReport) -> None:
        """Whether a rank uses hints about blocks in use, and what room it has in memory of its
        own."""
        if rank.ready:
            self._touches.report(rank.wants_touches)
            self.prefetches.report(rank.rank, rank.prefetch_room)

    def waits(self, tracker: RequestTracker) -> None:
        """A request has come."""
        self.prefetches.waits(tracker)

    def gone(self, name: str) -> None:
        """A request was admitted or has ended."""
        self.prefetches.gone(name)

    def used(self, chain: Sequence[bytes]) -> None:
        """A request uses these blocks, the first ones of its chain."""
        self._touches.add(chain)

    def take(self) -> tuple[list[tuple[int, bytes]], Prefetch | None]:
        """What goes with the next plan. Never raises."""
        try:
            return self._touches.take(), self.prefetches.take()
        except Exception as error:
            throttle.warning("hints", "the ranks could not be told what will be used: %r", error)
            return [], None
