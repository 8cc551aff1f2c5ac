"""Decides for each hit of a request how much of it is loaded: what admission allows, except hits
that are audited."""

from __future__ import annotations

from collections.abc import Callable

from ucm.integration.vllm.connector.admission.admission import Admission, Cut, Verdict
from ucm.integration.vllm.connector.scheduler.request_tracker import RequestTracker
from ucm.reasons import MissReason


class HitPolicy:
    """One engine's decisions about hits, one for each hit of a request however often vLLM asks."""

    def __init__(
        self,
        admission: Admission,
        audit_one_in: int,
        block_tokens: int,
        block_bytes: Callable[[], int],
        min_hit_tokens: int = 0,
    ) -> None:
        """``audit_one_in``: one hit in so many is computed and compared, 0 for none;
        ``block_bytes``: of all ranks; ``min_hit_tokens``: nothing shorter is loaded."""
        self._admission = admission
        self._audit_one_in = audit_one_in
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._min_hit_tokens = min_hit_tokens
        self._loaded = 0

    def taken(self, tracker: RequestTracker, first: int, end: int) -> tuple[int, MissReason | None]:
        """Up to where the blocks from ``first`` to ``end`` are loaded, and why the others are not
        although the store has them; None: all are."""
        tiers = self._tiers(tracker, first, end)
        if tracker.decided_hit != range(first, end) or tracker.decided_tiers != tiers:
            again = tracker.decided_hit == range(first, end)
            tracker.decided_hit, tracker.decided_tiers = range(first, end), tiers
            rest = tracker.request.num_tokens - end * self._block_tokens
            cut, tracker.verdict = self._admission.decide(self._cuts(tiers), rest, again=again)
            tracker.load_end = first + (0 if cut is None else cut.tokens // self._block_tokens)
        if tracker.load_end == first:
            return first, MissReason.DECLINED
        if self._audits(tracker, first, end):
            return first, MissReason.AUDIT
        return tracker.load_end, None if tracker.load_end == end else MissReason.DECLINED

    def begin_load(self, tracker: RequestTracker, tokens: int) -> float:
        """A load of ``tokens`` tokens is planned; returns the seconds it may take."""
        request, rest = tracker.request, tracker.request.num_tokens - tracker.local - tokens
        first = tracker.local // self._block_tokens
        whole = self._cut(self._tiers(tracker, first, first + tokens // self._block_tokens))
        return self._admission.began(
            request.request_id, whole, rest, learns=tracker.verdict == Verdict.LEARN
        )

    def _cuts(self, tiers: bytes) -> list[Cut]:
        """What can be loaded of a hit: up to the first block further down than each tier, and all
        of it."""
        lengths, kinds = {len(tiers)}, sorted(set(tiers))
        for above in range(1, len(kinds)):
            length = min(tiers.find(tier) for tier in kinds[above:])
            if length * self._block_tokens >= max(self._min_hit_tokens, 1):
                lengths.add(length)
        return [self._cut(tiers[:length]) for length in sorted(lengths)]

    def _cut(self, tiers: bytes) -> Cut:
        size = max(self._block_bytes(), 1)
        return Cut(
            len(tiers) * self._block_tokens, {tier: tiers.count(tier) * size for tier in set(tiers)}
        )

    @staticmethod
    def _tiers(tracker: RequestTracker, first: int, end: int) -> bytes:
        """The tier of each block; what the lookup does not say is in the top one."""
        known = b"" if tracker.lookup is None else tracker.lookup.tiers[first:end]
        return known.ljust(end - first, b"\0")

    def _audits(self, tracker: RequestTracker, first: int, end: int) -> bool:
        """Whether this hit is the one in N that is computed all the same; decided once per
        request."""
        if self._audit_one_in and not tracker.audit_decided:
            tracker.audit_decided = True
            self._loaded += 1
            if self._loaded % self._audit_one_in == 0:
                tracker.audit = range(first, end)
        return bool(tracker.audit)
