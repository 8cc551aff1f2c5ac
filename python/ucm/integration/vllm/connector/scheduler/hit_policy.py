"""Which of the hits that could be loaded are: what of them pays, but for those computed to be compared."""

from __future__ import annotations

from collections.abc import Callable

from ucm.integration.vllm.connector.admission.admission import Admission, Cut, Verdict
from ucm.integration.vllm.connector.scheduler.request_tracker import Tracked
from ucm.reasons import MissReason


class Hits:
    """One engine's decisions about hits, one for each hit of a request however often vLLM asks."""

    def __init__(
        self,
        admission: Admission,
        audit_one_in: int,
        block_tokens: int,
        block_bytes: Callable[[], int],
        min_hit_tokens: int = 0,
    ) -> None:
        """``audit_one_in``: one hit in so many is computed and compared, 0 for none; ``block_bytes``: of all ranks;
        ``min_hit_tokens``: nothing shorter is loaded."""
        self._admission = admission
        self._audit_one_in = audit_one_in
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._min_hit_tokens = min_hit_tokens
        self._loaded = 0

    def taken(self, tracked: Tracked, first: int, end: int) -> tuple[int, MissReason | None]:
        """Up to where the blocks from ``first`` to ``end`` are loaded, and why the others are not although the store
        has them; None: all are."""
        tiers = self._tiers(tracked, first, end)
        if tracked.judged_hit != range(first, end) or tracked.judged_tiers != tiers:
            again = tracked.judged_hit == range(first, end)
            tracked.judged_hit, tracked.judged_tiers = range(first, end), tiers
            rest = tracked.request.num_tokens - end * self._block_tokens
            cut, tracked.verdict = self._admission.judge(self._cuts(tiers), rest, again=again)
            tracked.judged_end = first + (0 if cut is None else cut.tokens // self._block_tokens)
        if tracked.judged_end == first:
            return first, MissReason.DECLINED
        if self._audits(tracked, first, end):
            return first, MissReason.AUDIT
        return tracked.judged_end, None if tracked.judged_end == end else MissReason.DECLINED

    def begins(self, tracked: Tracked, tokens: int) -> float | None:
        """A load of so many tokens is planned; the seconds it may take, None for the store's own deadline."""
        request, rest = tracked.request, tracked.request.num_tokens - tracked.local - tokens
        first = tracked.local // self._block_tokens
        whole = self._cut(self._tiers(tracked, first, first + tokens // self._block_tokens))
        return self._admission.began(request.request_id, whole, rest, learns=tracked.verdict == Verdict.LEARN)

    def _cuts(self, tiers: bytes) -> list[Cut]:
        """What can be loaded of a hit: up to the first block further down than each tier, and all of it."""
        lengths, kinds = {len(tiers)}, sorted(set(tiers))
        for above in range(1, len(kinds)):
            length = min(tiers.find(tier) for tier in kinds[above:])
            if length * self._block_tokens >= max(self._min_hit_tokens, 1):
                lengths.add(length)
        return [self._cut(tiers[:length]) for length in sorted(lengths)]

    def _cut(self, tiers: bytes) -> Cut:
        size = max(self._block_bytes(), 1)
        return Cut(len(tiers) * self._block_tokens, {tier: tiers.count(tier) * size for tier in set(tiers)})

    @staticmethod
    def _tiers(tracked: Tracked, first: int, end: int) -> bytes:
        """The tier of each block; what the lookup does not say is in the top one."""
        known = b"" if tracked.lookup is None else tracked.lookup.tiers[first:end]
        return known.ljust(end - first, b"\0")

    def _audits(self, tracked: Tracked, first: int, end: int) -> bool:
        """Whether this hit is the one in N that is computed all the same; decided once per request."""
        if self._audit_one_in and not tracked.judged:
            tracked.judged = True
            self._loaded += 1
            if self._loaded % self._audit_one_in == 0:
                tracked.audit = range(first, end)
        return bool(tracked.audit)
