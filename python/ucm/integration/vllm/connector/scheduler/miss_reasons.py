"""Why the blocks of a request are no hits: one reason for each block, counted by
:mod:`..miss_stats`."""

from __future__ import annotations

from collections import Counter

from ucm.integration.vllm.connector.scheduler.block_tracker import BlockTracker
from ucm.integration.vllm.connector.scheduler.request_tracker import RequestTracker
from ucm.reasons import MissReason


def misses(
    tracker: RequestTracker,
    hit: int,
    block_tracker: BlockTracker,
    block_tokens: int,
    min_hit_tokens: int,
) -> dict[MissReason, int]:
    """Why the full blocks of a request beyond those on the device and the ``hit`` ones are no hits.

    Where the store's prefix ends, its reason holds for all that follows: those blocks are of no use
    without the one before. What the store has and was not claimed has the reason of that. Where its
    answer was not worth waiting for, all that it could have was too short.
    """
    full = tracker.request.num_tokens // block_tokens
    local = tracker.local // block_tokens
    at, found = local + hit, Counter[MissReason]()
    if at >= full:
        return {}
    lookup = tracker.lookup
    if tracker.unanswered and not tracker.reason:
        most = max(tracker.most_claimable(block_tokens), at)
        found[MissReason.TOO_SHORT], found[MissReason.LAST_TOKEN] = most - at, full - most
        return {reason: count for reason, count in found.items() if count > 0}
    chosen = tracker.reason if tracker.reason in (MissReason.AUDIT, MissReason.DECLINED) else None
    if (tracker.reason and not chosen) or lookup is None:
        return {tracker.reason or MissReason.INTERNAL: full - at}
    stored = min(max(lookup.hits, at), full)
    found[lookup.reason] = full - stored
    claimable, why = tracker.claimable_and_why(block_tracker, block_tokens)
    claimable = min(max(claimable, at), stored)
    short = not hit and (claimable - local) * block_tokens < min_hit_tokens
    found[chosen or (MissReason.TOO_SHORT if short else MissReason.NOT_TAKEN)] += claimable - at
    found[why] += stored - claimable
    return {reason: count for reason, count in found.items() if count > 0}
