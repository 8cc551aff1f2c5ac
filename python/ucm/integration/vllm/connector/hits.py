"""Which of the hits that could be loaded are: the ones that pay, but for those computed to be compared."""

from __future__ import annotations

from collections.abc import Callable

from ucm.integration.vllm.connector.admission import Admission, Verdict
from ucm.integration.vllm.connector.tracked import Tracked
from ucm.reasons import MissReason


class Hits:
    """One engine's decisions about hits, one for each hit of a request however often vLLM asks."""

    def __init__(
        self, admission: Admission, audit_one_in: int, block_tokens: int, block_bytes: Callable[[], int]
    ) -> None:
        """``audit_one_in``: one hit in so many is computed and compared, 0 for none; ``block_bytes``: of all ranks."""
        self._admission = admission
        self._audit_one_in = audit_one_in
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._loaded = 0

    def declined(self, tracked: Tracked, first: int, end: int) -> MissReason | None:
        """Why the blocks from ``first`` to ``end`` are not loaded although the store has them; None: they are."""
        if tracked.judged_hit != range(first, end):
            tracked.judged_hit = range(first, end)
            tokens, rest = (end - first) * self._block_tokens, tracked.request.num_tokens - end * self._block_tokens
            tracked.verdict = self._admission.judge(tokens, rest, *self._of(tracked, end - first))
        if tracked.verdict == Verdict.DECLINE:
            return MissReason.DECLINED
        return MissReason.AUDIT if self._audits(tracked, first, end) else None

    def begins(self, tracked: Tracked, tokens: int) -> float | None:
        """A load of so many tokens is planned; the seconds it may take, None for the store's own deadline."""
        request, rest = tracked.request, tracked.request.num_tokens - tracked.local - tokens
        size, tier = self._of(tracked, tokens // self._block_tokens)
        learns = tracked.verdict == Verdict.LEARN
        return self._admission.began(request.request_id, tokens, rest, size, tier, learns=learns)

    def _of(self, tracked: Tracked, blocks: int) -> tuple[int, str]:
        """Bytes of so many blocks, and the tier they come from."""
        tier = "" if tracked.lookup is None else tracked.lookup.tier
        return blocks * max(self._block_bytes(), 1), tier

    def _audits(self, tracked: Tracked, first: int, end: int) -> bool:
        """Whether this hit is the one in N that is computed all the same; decided once per request."""
        if self._audit_one_in and not tracked.judged:
            tracked.judged = True
            self._loaded += 1
            if self._loaded % self._audit_one_in == 0:
                tracked.audit = range(first, end)
        return bool(tracked.audit)
