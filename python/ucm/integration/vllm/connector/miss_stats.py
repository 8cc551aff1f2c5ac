"""Counters of the blocks that requests asked for: each block is counted once, per request and per
process.

A request *asks* for the full blocks that vLLM's own cache does not hold, when it is admitted and
again after a preemption. Each of these is either part of the *hit* that was claimed or *missed* for
one reason. A block of the hit is later *loaded*, or missed for the reason why its load failed. So
once no load is under way::

    asked = loaded + missed        asked = hit + what was missed without a load

Counting costs a few additions per request and one comparison per step without news.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.guard import logger
from ucm.reasons import MissReason

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Between two summaries in the log, in seconds.
SUMMARY_S = 60.0

#: Times kept between two questions of vLLM, of each kind; more are not measured.
TIMES = 1024

#: Names of the counters; that of a missed block ends with its reason.
ASKED, HIT, LOADED, PUBLISHED, UNPUBLISHED = "asked", "hit", "loaded", "published", "unpublished"
MISSED = "missed."
#: Blocks not stored for want of staging; the name of the counter ends with the reason. Busy: a rank
#: had no free slot, and they are offered again. Ended: their request had ended, and no slot became
#: free in time. Overwritten: it had ended, and vLLM reused their device blocks.
UNSTORED = "unstored."
BUSY, ENDED, OVERWRITTEN = "busy", "ended", "overwritten"
#: Counts tokens, not blocks.
DECLINED_TOKENS = "declined_tokens"
#: Name of the times of lookups, in seconds.
LOOKUP_SECONDS = "lookup_seconds"


class Tally:
    """Blocks of one request, or of a whole process."""

    __slots__ = ("asked", "hit", "loaded", "missed", "offered")

    def __init__(self) -> None:
        self.asked = 0
        self.hit = 0  # claimed from the store
        self.loaded = 0
        self.offered = 0  # given to the store to keep
        self.missed: Counter[str] = Counter()

    def __str__(self) -> str:
        missed = format_counts(self.missed) if self.missed else "none"
        return (
            f"{self.asked} blocks asked, {self.hit} hit, {self.loaded} loaded, missed: {missed};"
            f" {self.offered} offered"
        )


def format_counts(missed: Mapping[str, int]) -> str:
    """Reasons with their counts, the most frequent first."""
    ordered = sorted(missed.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered)


class MissStats:
    """The counters of one scheduler side: for vLLM's metrics, for the log, and per request through
    its tally."""

    def __init__(
        self, block_tokens: int, now: float, rates: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        """``now``: seconds on the clock that :meth:`summary` is called with; ``rates``: speeds to
        tell, by name."""
        self.total = Tally()
        self._block_tokens = block_tokens
        self._rates = rates
        self._news: Counter[str] = Counter()  # since the last take()
        self._recent: Counter[str] = Counter()  # since the last summary
        self._lookups: list[float] = []  # since the last take()
        self.next_summary = now + SUMMARY_S

    # What happened
    # ------------------------------------------------------------------------------------------

    def asked(self, tally: Tally, hit: int, missed: Mapping[MissReason, int]) -> None:
        """A request was admitted, with ``hit`` blocks to be loaded."""
        blocks = hit + sum(missed.values())
        for each in (tally, self.total):
            each.asked += blocks
            each.hit += hit
        self._count(ASKED, blocks)
        self._count(HIT, hit)
        for reason, count in missed.items():
            self.missed(tally, reason, count)

    def missed(self, tally: Tally, reason: MissReason, blocks: int) -> None:
        """So many blocks that were asked for are not there, or did not arrive."""
        name = str(reason)
        if blocks > 0:
            tally.missed[name] += blocks
            self.total.missed[name] += blocks
            self._count(MISSED + name, blocks)

    def declined(self, blocks: int) -> None:
        """So many of the blocks missed are those of hits that were declined."""
        if blocks > 0:
            self._news[DECLINED_TOKENS] += blocks * self._block_tokens

    def loaded(self, tally: Tally, blocks: int) -> None:
        """So many blocks of a hit have arrived on every rank."""
        tally.loaded += blocks
        self.total.loaded += blocks
        self._count(LOADED, blocks)

    def looked_up(self, seconds: float) -> None:
        """The store answered a lookup, so long after it began."""
        if len(self._lookups) < TIMES:
            self._lookups.append(seconds)

    def bypassed(self, request: Request, reason: MissReason) -> None:
        """A request is neither looked up nor stored: nothing more will be said of it."""
        tally, blocks = Tally(), request.num_tokens // self._block_tokens
        self.asked(tally, 0, {reason: blocks} if blocks else {})
        self.log_request(request, tally)

    @staticmethod
    def log_request(request: Request, tally: Tally) -> None:
        """The line of one request in the log."""
        logger.debug(
            "request %s: %d prompt tokens, %s", request.request_id, request.num_prompt_tokens, tally
        )

    def offered(self, tally: Tally, blocks: int) -> None:
        """So many blocks of a request are being dumped."""
        tally.offered += blocks
        self.total.offered += blocks

    def dumped(self, published: int, failed: int) -> None:
        """So many blocks were published by every rank, and so many could not be."""
        self._count(PUBLISHED, published)
        self._count(UNPUBLISHED, failed)

    def unstored(self, reason: str, blocks: int) -> None:
        """These blocks were not stored for want of staging."""
        self._count(UNSTORED + reason, blocks)

    def _count(self, name: str, blocks: int) -> None:
        if blocks > 0:
            self._news[name] += blocks
            self._recent[name] += blocks

    # What is told
    # -------------------------------------------------------------------------------------------

    def take(self) -> dict[str, Any] | None:
        """Counters and times since the last call, and the speeds; None when nothing was counted."""
        if not (self._news or self._lookups):
            return None
        news: dict[str, Any] = {**self._news, **self._rates()}
        if self._lookups:
            news[LOOKUP_SECONDS] = self._lookups
        self._news, self._lookups = Counter(), []
        return news

    def summary(self, now: float, block_bytes: int) -> None:
        """Log what was counted since the last summary; ``block_bytes`` is a block of all ranks."""
        self.next_summary = now + SUMMARY_S
        recent, self._recent = self._recent, Counter()
        if not recent:
            return
        missed = {
            name.removeprefix(MISSED): n for name, n in recent.items() if name.startswith(MISSED)
        }
        loaded, published = recent[LOADED], recent[PUBLISHED]
        logger.info(
            "%d blocks asked, %d hit, %d loaded (%.1f MiB); missed: %s; %d published (%.1f MiB),"
            " %d not",
            recent[ASKED],
            recent[HIT],
            loaded,
            loaded * block_bytes / (1 << 20),
            format_counts(missed) if missed else "none",
            published,
            published * block_bytes / (1 << 20),
            recent[UNPUBLISHED],
        )
