"""The state of one live request on the scheduler side, which part of a hit it loads, and why its
other blocks are no hits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.admission.admission import Admission, Cut, Verdict
from ucm.integration.vllm.connector.groups import (
    ABSENT,
    ONE_GROUP,
    UNKNOWN,
    Group,
    hit_tiers,
    known_hit,
    longest_hit,
    shorter_hits,
)
from ucm.integration.vllm.connector.identity.keys import KeyMaker, UnkeyableError
from ucm.integration.vllm.connector.scheduler.lookup import NEVER, BlockTracker, Lookup
from ucm.integration.vllm.connector.scheduler.policies import RequestPolicy
from ucm.integration.vllm.connector.scheduler.roles import PublishWait
from ucm.integration.vllm.connector.stats import Tally
from ucm.reasons import MissReason
from ucm.store import record_ids

if TYPE_CHECKING:
    from vllm.v1.request import Request


#: An ordinal, or a number of tokens, that is never reached.
FAR = 1 << 62
#: Most lookups of a shorter hit for one request. What is not known then is no hit.
ASKED_AGAIN = 4


class Chain:
    """The blocks of a request in one KV group: the keys of their records, and the offered ones."""

    __slots__ = ("compared", "cursor", "group", "keys", "offered_below")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.keys: list[bytes] = []
        self.cursor = 0  # blocks before it were offered, or are in the store
        self.compared = range(0)  # ordinals of a hit that is not loaded but compared
        #: Only blocks before it are offered, since the chain was evicted from a store that is too
        #: small; None: not so, or not decided yet.
        self.offered_below: int | None = None


class RequestTracker:
    """A request: its block keys, its lookup, the blocks offered so far, and those it may not claim
    again."""

    def __init__(
        self,
        request: Request,
        tenant: bytes = b"",
        policy: RequestPolicy | None = None,
        groups: Sequence[Group] = ONE_GROUP,
    ) -> None:
        """``tenant``: the tag of the request's tenant, empty for none; ``policy``: what it may load
        and store, None for everything; ``groups``: the KV groups of the model."""
        self.request = request
        self.tenant = tenant
        self.policy = policy or RequestPolicy()
        #: For the blocks of its producer; None where it has none, and once that is over.
        self.wait = PublishWait(self.policy) if self.policy.wait_for else None
        self.chains = [Chain(group) for group in groups]
        self.keyable = True  # False: it has no keys and never will
        self.lookup: Lookup | None = None
        self.asked_again = 0  # lookups of a shorter hit
        self.stored = 0  # blocks before it are in the store, on every rank
        self.selectable = True  # its stored blocks may be selected from without being loaded
        #: Ordinal of the first key that no other request can have.
        self.private_at: int | None = None
        #: Blocks computed before a time, and that time: they wait for a later check of the adapter.
        self.confirming: tuple[int, float] | None = None
        self.decided_hit = range(0)  # ordinals of the hit that was decided about last
        self.decided_tiers = b""  # of its blocks
        self.load_end = 0  # ordinal of the first that is not to be loaded
        self.verdict = Verdict.LOAD  # of that decision
        self.banned_from = FAR  # ordinal of the first block that failed to load
        self.local = 0  # tokens on the device at vLLM's last call
        self.loading = range(0)  # ordinals of a load, from its admission to the last rank's report
        self.failures: dict[int, MissReason] = {}  # of this load, by ordinal
        self.holds = 0  # most device blocks from its load to the end of its prompt
        self.counted = False  # with ``debug``: its hit was counted
        self.asked = False  # its blocks were counted since it was new or preempted
        #: Why all its blocks were missed, None where its lookup says that. Admitted before that:
        #: another connector was first.
        self.reason: MissReason | None = MissReason.NOT_TAKEN
        self.unanswered = False  # a hit was not worth waiting for the store's answer
        self.may_blend = False  # vLLM's last question got to an answer, and may load
        self.tally = Tally()
        self.preemptions = request.num_preemptions
        #: Tokens at the beginning of its first step since it was admitted; None before.
        self.ran_from: int | None = None
        self.wrong_from = FAR  # first block that must not be stored: not filled, or other weights
        self.touched_at = NEVER  # when the store was last sent that its blocks are in use
        self.waits_since: float | None = None  # first call while a rank's health was not known

    @property
    def keys(self) -> list[bytes]:
        """The keys of its blocks, which are those of their parts in the first group."""
        return self.chains[0].keys

    @property
    def cursor(self) -> int:
        """Blocks before it were offered in every group, or are in the store."""
        if len(self.chains) == 1:  # read several times for each block offered
            return self.chains[0].cursor
        return min(chain.cursor for chain in self.chains)

    def _rewind(self, ordinal: int) -> None:
        """Offer the blocks from this one on again."""
        for chain in self.chains:
            chain.cursor = min(chain.cursor, ordinal)

    def _name(self) -> None:
        """The keys of its blocks have changed, or there are more."""
        named = len(self.keys)
        for chain in self.chains[1:]:
            del chain.keys[named:]
            chain.keys += record_ids(self.keys[len(chain.keys) :], chain.group.mask)

    def may_wait(self, now: float, allowance: float) -> bool:
        """Whether less than ``allowance`` seconds have passed since the first call."""
        if self.waits_since is None:
            self.waits_since = now
        return now - self.waits_since < allowance

    def restart(self) -> None:
        """Preempted: its blocks were freed. It will be looked up again, perhaps with output."""
        self.preemptions = self.request.num_preemptions
        self.lookup, self.waits_since, self.asked_again = None, None, 0
        self.asked, self.reason = False, MissReason.NOT_TAKEN
        self.decided_hit = range(0)
        self._rewind(0)
        self.stored = 0
        if self.private_at is not None:
            del self.keys[self.private_at :]
            self.private_at = None
        self.confirming = None
        self.touched_at = NEVER

    def rekey(self) -> None:
        """The identity has changed: keys and lookup are those of the one before."""
        self.chains = [Chain(chain.group) for chain in self.chains]
        self.keyable, self.lookup, self.waits_since, self.asked_again = True, None, None, 0
        self.decided_hit = range(0)
        self.banned_from, self.confirming = FAR, None
        self.stored, self.private_at = 0, None
        self.touched_at = NEVER

    def invalidate(self) -> None:
        """The weights may have changed: no block that it holds now is stored."""
        self.rekey()
        if self.request.num_computed_tokens > 0:
            self.wrong_from = 0  # until it is admitted again

    def adopt(self, block_tracker: BlockTracker) -> bool:
        """Process the results of the lookup; whether the store's answer was among them."""
        lookup = self.lookup
        if lookup is None or lookup.keys is None:
            return False
        if len(lookup.keys) > len(self.keys) and self.private_at is None:
            self.chains[0].keys = list(lookup.keys)
            self._name()
        if lookup.done and not lookup.adopted:
            lookup.adopted = True
            if lookup.answered:
                absent = lookup.reason in (MissReason.ABSENT, MissReason.OTHER_RANK)
                keys, hits, at = lookup.keys, lookup.hits, lookup.began
                if not lookup.tables:
                    block_tracker.found(keys, hits, asked_at=at, absent=absent, tenant=self.tenant)
                for chain, table in zip(self.chains, lookup.tables, strict=False):
                    block_tracker.located(chain.keys, table, at, self.tenant)
                return True
        return False

    def grow(
        self,
        upto: int,
        maker: KeyMaker,
        block_tracker: BlockTracker,
        private_from: int | None = None,
    ) -> int:
        """Make keys for ``upto`` blocks; returns how many are known (fewer while a thread hashes
        them).

        ``private_from``: from this block on, keys that no other request can have, because the KV is
        not that of the tokens alone.
        """
        self.adopt(block_tracker)
        if private_from is not None and self.private_at is None:
            # Blocks offered until now were exact. Keys of the tokens may be known beyond it: a
            # lookup hashed them, or fewer blocks are exact since the break-even length is known.
            private_from = max(private_from, self.cursor)
            del self.keys[private_from:]
            self.stored = min(self.stored, private_from)
        if len(self.keys) < upto:
            if self.lookup is not None and self.lookup.hashing:
                return len(self.keys)
            try:
                self.keys.extend(maker.more(self.request, self._parents(private_from)))
                self._name()
                began = private_from is not None and self.private_at is None
                if began and len(self.keys) > (private_from or 0):
                    return self.grow(upto, maker, block_tracker, private_from)
            except UnkeyableError as error:
                self.keyable = error.pending
                return len(self.keys)
        return min(upto, len(self.keys))

    def _parents(self, private_from: int | None) -> list[bytes]:
        """The keys that further ones are chained to; where private keys begin, the last one is
        random."""
        if self.private_at is not None:
            private_from = self.private_at
        if private_from is None or len(self.keys) != private_from or not self.keys:
            return self.keys
        self.private_at = private_from
        return [*self.keys[:-1], os.urandom(len(self.keys[-1]))]

    def stored_keys(
        self, block_tracker: BlockTracker, private_from: int | None = None
    ) -> Sequence[bytes]:
        """Keys of its first blocks that every rank has stored. Beyond ``private_from`` the keys of
        the tokens do not name the blocks' content, though the store may have them too."""
        while self.stored < len(self.keys) and block_tracker.is_stored(self.keys[self.stored]):
            self.stored += 1
        if private_from is None or self.private_at is not None:
            return self.keys[: self.stored]
        return self.keys[: min(self.stored, max(private_from, self.cursor))]

    def withdrawn(self, keys: Collection[bytes]) -> None:
        """These blocks are no longer in the store."""
        first = (at for at, key in enumerate(self.keys[: self.stored]) if key in keys)
        self.stored = next(first, self.stored)

    def confirmed(self, upto: int, settled: int, maker: KeyMaker, now: float) -> int:
        """How many of the first ``upto`` blocks may be offered; steps that ended computed
        ``settled`` of them.

        An adapter may be replaced and loaded again before any step, so blocks computed with one are
        named only once the step has ended and the adapter's files were checked after that.
        """
        if self.request.lora_request is None:
            settled = upto
        if not self.keyable or settled <= self.cursor:
            return 0
        if self.confirming is None or self.confirming[0] <= self.cursor:
            self.confirming = settled, now
        blocks, since = self.confirming
        answer = maker.current(self.request, since)
        if answer is None:
            return 0
        self.keyable, self.confirming = answer, None
        if settled > blocks:  # the next check begins now rather than with the next step
            self.confirming = settled, now
            maker.current(self.request, now)
        return min(blocks, upto) if answer else 0

    def most_claimable(self, block_tokens: int) -> int:
        """Blocks that could be claimed if the store had all. Never all tokens: vLLM computes at
        least the last one, in a block of its own."""
        return self.claim_limit(block_tokens)[0]

    def claim_limit(self, block_tokens: int) -> tuple[int, MissReason]:
        """The same, and why no more."""
        limit = (int(self.request.num_tokens) - 1) // block_tokens
        if self.policy.max_load_tokens is not None:
            allowed = (self.local + self.policy.max_load_tokens) // block_tokens
            if allowed < limit:
                return allowed, self.policy.reason
        return limit, MissReason.LAST_TOKEN

    def claimable(self, block_tracker: BlockTracker, block_tokens: int) -> int:
        """Blocks of the prefix that may be claimed from the store now."""
        return self.claimable_and_why(block_tracker, block_tokens)[0]

    def claimable_and_why(
        self, block_tracker: BlockTracker, block_tokens: int
    ) -> tuple[int, MissReason]:
        """The same, and why no more of the stored blocks."""
        if self.lookup is None or self.lookup.keys is None:
            return 0, MissReason.INTERNAL
        limit, why = self.claim_limit(block_tokens)
        if self.lookup.tables:
            return self._claimable_in_groups(block_tracker, limit, why)
        hits = min(self.lookup.hits, limit, len(self.lookup.keys))
        if self.banned_from < hits:
            hits, why = self.banned_from, MissReason.LOAD_FAILED
        trusted = block_tracker.trusted(self.lookup.keys, hits)
        return (trusted, MissReason.REFUSED) if trusted < hits else (hits, why)

    def _claimable_in_groups(
        self, block_tracker: BlockTracker, limit: int, why: MissReason
    ) -> tuple[int, MissReason]:
        assert self.lookup is not None
        tables, refused = self._claim_tables(block_tracker)
        hits = known_hit(self.groups, tables, min(limit, self.banned_from, len(tables[0])))
        if hits >= min(limit, self.lookup.hits):
            return hits, why
        return hits, MissReason.REFUSED if refused else MissReason.LOAD_FAILED

    def _claim_tables(self, block_tracker: BlockTracker) -> tuple[list[bytearray], bool]:
        """The tables of the lookup without refused blocks, and whether there are any."""
        tables, refused = [bytearray(table) for table in self.lookup_tables], False
        for chain, table in zip(self.chains, tables, strict=True):
            for at in block_tracker.refused_of(chain.keys[: len(table)]):
                table[at], refused = ABSENT, True
        return tables, refused

    def to_ask(
        self, block_tracker: BlockTracker, block_tokens: int
    ) -> tuple[int, MissReason] | None:
        """The length of a hit that may be claimed, and why no more, where it is not known whether
        every group can serve it: the lookup was about another length. None: it is known, or was
        looked up often enough."""
        if not self.lookup_tables or self.asked_again >= ASKED_AGAIN:
            return None
        limit, why = self.claim_limit(block_tokens)
        tables, refused = self._claim_tables(block_tracker)
        for group, table in zip(self.groups, tables, strict=True):
            if not group.frees_early:  # a prefix is known as far as it can be
                table[:] = table.replace(bytes((UNKNOWN,)), bytes((ABSENT,)))
        hit, unknown = longest_hit(
            self.groups, tables, min(limit, self.banned_from, len(tables[0]))
        )
        if not unknown or hit * block_tokens <= self.local:
            return None
        self.asked_again += 1
        if hit < limit:
            why = MissReason.REFUSED if refused else MissReason.LOAD_FAILED
        return hit, why

    def served(self, block_tracker: BlockTracker, end: int) -> int:
        """The longest hit of at most ``end`` blocks that every group can serve."""
        if not self.lookup_tables:
            return end
        return known_hit(self.groups, self._claim_tables(block_tracker)[0], end)

    @property
    def groups(self) -> list[Group]:
        """The KV groups of the model."""
        return [chain.group for chain in self.chains]

    @property
    def lookup_tables(self) -> Sequence[bytes]:
        """The tiers of its blocks by group; empty where a prefix is all that counts."""
        return () if self.lookup is None else self.lookup.tables

    def tiers(self, first: int, end: int) -> bytes:
        """The tier of each block of a hit from ``first`` to ``end``; the top one for those that the
        lookup does not name."""
        lookup = self.lookup
        if lookup is None:
            return bytes(end - first)
        if lookup.tables and end:
            return hit_tiers(self.groups, lookup.tables, end)[first:]
        return lookup.tiers[first:end].ljust(end - first, b"\0")

    def failed_at(self, ordinal: int) -> None:
        """A load failed at the block ``ordinal``: nothing from there on is claimed again."""
        self.banned_from = min(self.banned_from, ordinal)
        self._rewind(ordinal)
        self.confirming = None  # they are computed again

    def failed_because(self, first: int, reasons: Iterable[MissReason]) -> None:
        """Why a rank's load failed from block ``first`` on; a block's own reason has precedence."""
        self.failures.setdefault(first, MissReason.LOAD_FAILED)
        for ordinal, reason in enumerate(reasons, first):
            if self.failures.get(ordinal, MissReason.LOAD_FAILED) == MissReason.LOAD_FAILED:
                self.failures[ordinal] = reason


class HitPolicy:
    """One engine's decisions about hits, one for each hit of a request however often vLLM calls."""

    def __init__(
        self,
        admission: Admission,
        block_tracker: BlockTracker,
        block_tokens: int,
        block_bytes: Callable[[], int],
        min_hit_tokens: int = 0,
        group_bytes: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """``block_bytes``: of all ranks; ``min_hit_tokens``: the shortest load; ``group_bytes``: of
        a block, by KV group."""
        self._admission, self._block_tracker = admission, block_tracker
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._min_hit_tokens = min_hit_tokens
        self._group_bytes = group_bytes

    def taken(self, tracker: RequestTracker, first: int, end: int) -> tuple[int, MissReason | None]:
        """The end of the blocks to load, of those from ``first`` to ``end``, and why not all; None:
        all."""
        tiers, hit = tracker.tiers(first, end), range(first, end)
        again = tracker.decided_hit == hit
        if not again or tracker.decided_tiers != tiers:
            tracker.decided_hit, tracker.decided_tiers = hit, tiers
            rest = tracker.request.num_tokens - end * self._block_tokens
            cuts = self._cuts(tracker, first, end, tiers)
            cut, tracker.verdict = self._admission.decide(cuts, rest, again=again)
            tracker.load_end = first + (0 if cut is None else cut.tokens // self._block_tokens)
        return tracker.load_end, None if tracker.load_end == end else MissReason.DECLINED

    def begin_load(
        self, tracker: RequestTracker, tokens: int, chunks: Cut | None = None, learns: bool = False
    ) -> float:
        """A load of ``tokens`` tokens of the prefix is planned, and of ``chunks`` behind it, to
        measure (``learns``) or not; returns the seconds it may take."""
        first = tracker.local // self._block_tokens
        end = first + tokens // self._block_tokens
        whole = self._cut(tracker, first, end)
        learns = learns or (tokens > 0 and tracker.verdict == Verdict.LEARN)
        if chunks is not None:
            sizes = Counter(whole.sizes) + Counter(chunks.sizes)
            whole = Cut(whole.tokens + chunks.tokens, dict(sizes))
        rest = tracker.request.num_tokens - tracker.local - whole.tokens
        return self._admission.began(tracker.request.request_id, whole, rest, learns=learns)

    def _cuts(self, tracker: RequestTracker, first: int, end: int, tiers: bytes) -> list[Cut]:
        """The possible loads of a hit: up to the first block below each tier, or somewhat before
        where every group can serve that, and all of it."""
        ends = {end}
        for length in shorter_hits(tiers):
            at = tracker.served(self._block_tracker, first + length)
            if (at - first) * self._block_tokens >= max(self._min_hit_tokens, 1):
                ends.add(at)
        return [self._cut(tracker, first, at) for at in sorted(ends)]

    def _cut(self, tracker: RequestTracker, first: int, end: int) -> Cut:
        """A load from ``first`` to ``end``: of each group what such a hit needs."""
        sizes, tables = Counter[int](), tracker.lookup_tables
        if not tables:
            for tier, count in Counter(tracker.tiers(first, end)).items():
                sizes[tier] = count * max(self._block_bytes(), 1)
        for group, table, size in zip(tracker.groups, tables, self._group_bytes(), strict=False):
            for tier in table[max(first, group.first_needed(end)) : end]:
                sizes[tier if tier < UNKNOWN else 0] += size
        return Cut((end - first) * self._block_tokens, dict(sizes))


def hit_media(
    tracker: RequestTracker, tokens: int, block_tokens: int, media: Sequence[str]
) -> Counter[str]:
    """Tokens of a planned load of ``tokens`` by the medium in which the lookup found their blocks;
    empty for an unknown one. ``media``: of each tier."""
    load, found = tracker.loading, Counter[str]()
    for tier in tracker.tiers(load.start, load.stop)[: tokens // block_tokens]:
        found[media[tier] if tier < len(media) else ""] += block_tokens
    found[""] += tokens - found.total()
    return found


def misses(
    tracker: RequestTracker,
    hit: int,
    block_tracker: BlockTracker,
    block_tokens: int,
    min_hit_tokens: int,
) -> dict[MissReason, int]:
    """Why the full blocks of a request beyond those on the device and the ``hit`` ones are no hits.

    Where the store's prefix ends, its reason holds for all that follows, which are of no use
    without the block before. Stored blocks that were not claimed have the reason of that. Where the
    answer was not worth waiting for, every hit was too short.
    """
    full = tracker.request.num_tokens // block_tokens
    local = tracker.local // block_tokens
    at, found = local + hit, Counter[MissReason]()
    if at >= full:
        return {}
    lookup = tracker.lookup
    if tracker.unanswered and not tracker.reason:
        most, why = tracker.claim_limit(block_tokens)
        most = max(most, at)
        found[MissReason.TOO_SHORT], found[why] = most - at, full - most
        return {reason: count for reason, count in found.items() if count > 0}
    chosen = MissReason.DECLINED if tracker.reason is MissReason.DECLINED else None
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
