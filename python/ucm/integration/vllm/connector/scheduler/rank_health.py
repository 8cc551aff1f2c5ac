"""What the scheduler side knows of the health of the ranks' stores.

The scheduler side looks up in a store of its own, which may answer while a rank's breaker is open.
A hit promised then is a load that fails and a request that takes a detour, so while any rank is
unhealthy no request is promised one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ucm.integration.vllm.connector.guard import logger

#: A rank's report that it is unhealthy counts for so long, in seconds: an idle engine gets no
#: other.
STALE_S = 1.0


class RankHealth:
    """What the scheduler side knows of the ranks' stores."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unhealthy: dict[int, float] = {}  # rank -> when it last said so

    def report(self, rank: int, healthy: bool) -> None:
        """A rank reports whether its store is healthy."""
        if healthy:
            if self._unhealthy.pop(rank, None) is not None:
                logger.info("rank %d: its store can be used", rank)
            return
        if rank not in self._unhealthy:
            logger.warning(
                "rank %d: its store cannot be used (its own message says why), so every request is "
                "computed and nothing is stored until it can",
                rank,
            )
        self._unhealthy[rank] = self._clock()

    @property
    def all_healthy(self) -> bool:
        """Whether every rank's store is healthy, as far as is known."""
        return not self._unhealthy

    @property
    def stale(self) -> bool:
        """Whether some rank said that it is unhealthy, and that a while ago: the next step brings a
        new report."""
        now = self._clock()
        return any(now - said > STALE_S for said in self._unhealthy.values())
