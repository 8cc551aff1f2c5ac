"""The part of a prompt in the store, looked up without making a step wait, and what this engine
remembers of blocks in the store.

A :class:`Lookup` starts when a request arrives: it hashes the tokens, looks up every part and keeps
the shortest prefix. Hashing runs in the scheduler's thread, and so does the lookup where the store
answers from memory: waking another thread, which would wait for the interpreter, takes longer. A
store that reads a medium looks up on a thread of its own, without the interpreter, and is polled.
Everything slower (files of adapters, long prompts, stores written in Python) runs on a background
thread. Until there is an answer, or it is late, the answer to vLLM is "not known yet".

The scheduler side looks up in a store of its own, which sees only published records.
:class:`LocallyVisible` continues such a prefix with the record ids that the ranks of this engine
can read before others: in an open segment, in memory. They count for this engine alone, and only if
every rank that would read the record has listed it. A rank keeps a published record in its list
until the scheduler side's store, which lists a directory from time to time, must have found it.

:class:`BlockTracker` remembers the reports of lookups and ranks: blocks present, evicted, being
written, or refused by a rank. Present blocks are not offered, and a block does not count as a hit
after a rank found its record bad or could not publish it.

:class:`Turnover` keeps a working set above the store's limit from rewriting the store for ever.
Where more blocks are requested again and again than the store holds, each is evicted before it is
requested: everything is written in every round, and nothing is hit. It compares, for about as many
blocks as the store holds, how many of those stored before were hits and how many were evicted.
While more than half were evicted, an evicted chain is stored again only now and then, and only its
beginning, so that stored blocks stay long enough to be hits. Where tenants have a quota, the same
is compared for each tenant, with as many blocks as its quota holds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ucm.integration.vllm.connector.groups import (
    ABSENT,
    ONE_GROUP,
    UNKNOWN,
    Group,
    fails_whole,
    hit_tiers,
    known_hit,
    longest_hit,
    shorter_hits,
)
from ucm.integration.vllm.connector.guard import IDLE, Background, info_once, logger, throttle
from ucm.integration.vllm.connector.identity.keys import UnkeyableError
from ucm.integration.vllm.connector.metadata import StoreRoom, split_keys
from ucm.reasons import MissReason, named, reason_of
from ucm.store import record_ids
from ucm.store.ucmstore_v1 import Asked, UcmKVStoreBaseV1

# Blocks that only the ranks see
# --------------------------------------------------------------------------------------------------

#: Most ids remembered of one rank; a further one costs a hit until it is published.
VISIBLE_LIMIT = 1 << 18


class LocallyVisible:
    """Written by the scheduler's thread, read by the lookups' threads."""

    def __init__(self, limit: int = VISIBLE_LIMIT) -> None:
        """``limit``: most ids remembered of one rank."""
        self._limit = limit
        self._ranks: dict[int, set[bytes]] = {}
        self._readers: list[list[int]] = []

    def open(self, readers: Sequence[Sequence[int]]) -> None:
        """``readers[p]``: the ranks that read part *p*, in the order of the parts in lookups."""
        self._readers = [list(ranks) for ranks in readers]

    def report(self, rank: int, added: bytes, removed: bytes) -> None:
        """A rank's report: the record ids it can read from now on, and those now published or
        removed."""
        if not (added or removed):
            return
        known = self._ranks.setdefault(rank, set())
        known.update(split_keys(added)[: max(0, self._limit - len(known))])
        known.difference_update(split_keys(removed))

    def run(self, ids: Sequence[bytes], start: int, parts: Sequence[int] = ()) -> int:
        """How many record ids from ``start`` on are locally visible; ``ids`` holds these parts
        (none: all) of each block side by side."""
        if not any(self._ranks.values()):
            return 0
        parts = parts or range(len(self._readers))
        for at in range(start, len(ids)):
            if not self.has(ids[at], parts[at % len(parts)]):
                return at - start
        return len(ids) - start

    def has(self, record_id: bytes, part: int) -> bool:
        """Whether every rank that reads this part can read the record."""
        readers = self._readers[part]
        return bool(readers) and all(record_id in self._ranks.get(rank, ()) for rank in readers)


# Working sets above the limit
# --------------------------------------------------------------------------------------------------

#: An evicted chain is stored again with this probability.
CHANCE = 1 / 16
#: It is stored again up to this share of the limit, counted from its first block.
SHARE = 2
#: Most blocks over which hits and evictions are compared.
WINDOW = 1 << 17
#: Most tenants whose hits and evictions are counted, least recently counted first out.
MOST_TENANTS = 4096
#: What sets the limit of a tier, by its name; of all others the key ``storage_capacity``.
LIMIT_KEYS = {
    "memory": "cache_size",
    "redis": "maxmemory of the server",
    "mooncake": "global_segment_size",
}


@dataclass(frozen=True)
class StoreLimit:
    """How much a store holds: the limit of its largest tier."""

    tier: str
    key: str  # sets it
    blocks: int
    block_bytes: int  # of all parts of a block, on the medium
    full: bool  # at least half of it is in use
    quota: int | None = None  # blocks of one tenant, where that is less
    quota_removed: int = 0  # blocks above a quota that were removed since the store was opened
    expire_after: float | None = None  # seconds without use after which a block is removed


def limit_of(rooms: Collection[StoreRoom], parts: int) -> StoreLimit | None:
    """The limit for blocks of ``parts`` parts, None until each rank that writes one has reported.
    Memory holds the parts of its rank, any other tier those of all."""
    if len(rooms) < max(parts, 1):
        return None
    least = min(rooms, key=lambda room: room.capacity // room.record)
    name, block_bytes = least.tier.rstrip("0123456789"), sum(room.record for room in rooms)
    blocks = least.capacity // (least.record if name == "memory" else block_bytes)
    quota = None if least.quota is None else least.quota // block_bytes
    return StoreLimit(
        tier=least.tier,
        key=LIMIT_KEYS.get(name, "storage_capacity"),
        blocks=blocks,
        block_bytes=block_bytes,
        full=any(2 * room.used >= room.capacity for room in rooms),
        quota=quota if quota is not None and quota < blocks else None,
        quota_removed=sum(room.quota_removed for room in rooms) // len(rooms),
        expire_after=least.expire_after,
    )


@dataclass(slots=True)
class _Counts:
    """Of the last blocks that were stored before and requested again."""

    total: float = 0.0
    evicted: float = 0.0

    def add(self, blocks: int, evicted: bool, window: int) -> None:
        """Count blocks; those before count less, so that the total stays within ``window``."""
        blocks = min(blocks, window)
        if self.total + blocks > window:
            self.evicted *= (window - blocks) / self.total
            self.total = window - blocks
        self.total += blocks
        self.evicted += blocks * evicted


class Turnover:
    """Counts what happened to blocks that were stored before and are requested again."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        """``chance`` draws a number from [0, 1)."""
        self._chance = chance
        self._limit: StoreLimit | None = None
        self._counts: dict[bytes, _Counts] = {}  # by tenant; empty for all that share the store
        self.evicted = 0  # requested blocks that had been evicted, since the start
        self._unexplained = 0  # blocks removed above a quota, not counted as evicted yet
        self._warned: set[int] = set()  # the limits in blocks of which a warning was logged

    def limited(self, limit: StoreLimit | None) -> None:
        """Set the store's limit and use."""
        if limit is not None:
            before = 0 if self._limit is None else self._limit.quota_removed
            self._unexplained += max(limit.quota_removed - before, 0)
        self._limit = limit

    @property
    def expire_after(self) -> float | None:
        """Seconds without use after which the store removes a block, None for never."""
        return None if self._limit is None else self._limit.expire_after

    def asked_again(self, hits: int, evicted: int, tenant: bytes = b"") -> None:
        """A request requested blocks that were stored before: ``hits`` are there, ``evicted`` are
        absent. Absent blocks of a store with room were removed for another reason: only those
        removed above their tenant's quota count."""
        limit = self._limit
        if limit is None or not hits + evicted:
            return
        capacity, tenant = self._capacity(limit, tenant)
        if not limit.full:
            evicted = 0 if not tenant else min(evicted, self._unexplained)
        self.evicted += evicted
        if tenant:
            self._unexplained -= min(evicted, self._unexplained)
        counts = self._counts.pop(tenant) if tenant in self._counts else _Counts()
        self._counts[tenant] = counts
        if len(self._counts) > MOST_TENANTS:
            del self._counts[next(iter(self._counts))]
        window = min(capacity, WINDOW)
        counts.add(hits, False, window)
        counts.add(evicted, True, window)
        if self.exceeded(tenant) and capacity not in self._warned:
            self._warned.add(capacity)
            self._warn(limit, capacity, counts)

    def exceeded(self, tenant: bytes = b"") -> bool:
        """Whether the working set of this tenant is above its part of the store."""
        if self._limit is None:
            return False
        capacity, tenant = self._capacity(self._limit, tenant)
        counts, window = self._counts.get(tenant), min(capacity, WINDOW)
        if counts is None or not (tenant or self._limit.full):
            return False
        return 2 * counts.evicted > counts.total >= window > 0

    def offered_below(self, tenant: bytes = b"") -> int:
        """Draws, for an evicted chain, the number of its first blocks that may be stored again."""
        if self._limit is None or self._chance() >= CHANCE:
            return 0
        return self._capacity(self._limit, tenant)[0] // SHARE

    @staticmethod
    def _capacity(limit: StoreLimit, tenant: bytes) -> tuple[int, bytes]:
        """The blocks that are kept of a tenant, and the tenant under which it is counted: blocks
        without a tag have no quota, and without a quota all tenants share the store."""
        if tenant and limit.quota is not None:
            return limit.quota, tenant
        return limit.blocks, b""

    @staticmethod
    def _warn(limit: StoreLimit, capacity: int, counts: _Counts) -> None:
        of_tenant = capacity != limit.blocks
        logger.warning(
            "the working set%s is larger than %s: of the last %d blocks that were stored"
            " before and requested again, %d had been evicted. %s %s holds %d blocks of %d bytes"
            " each. While that is so, an evicted prompt is stored again in one of %d cases, and at"
            " most %d blocks of it; raise %s to store all",
            " of a tenant" if of_tenant else "",
            "its quota" if of_tenant else "the store",
            round(counts.total),
            round(counts.evicted),
            "The quota of each tenant in tier" if of_tenant else "Tier",
            limit.tier,
            capacity,
            limit.block_bytes,
            round(1 / CHANCE),
            capacity // SHARE,
            "tenant_quota" if of_tenant else limit.key,
        )


# Known blocks
# --------------------------------------------------------------------------------------------------

#: Most keys remembered of each kind, oldest first out; a forgotten one costs a useless offer.
PRESENT_LIMIT = 1 << 17
REFUSED_LIMIT = 1 << 16
#: Before any time.
NEVER = float("-inf")


class BlockTracker:
    """Bounded sets of block keys."""

    def __init__(
        self,
        present_limit: int = PRESENT_LIMIT,
        refused_limit: int = REFUSED_LIMIT,
        turnover: Turnover | None = None,
    ) -> None:
        self.turnover = turnover or Turnover()
        self._present: dict[bytes, float] = {}  # and since when, as far as is known
        self._evicted: dict[bytes, float] = {}  # and when it was looked up last
        self._refused: dict[bytes, None] = {}
        self._newer: dict[bytes, None] = {}
        self._unpublished: dict[bytes, None] = {}
        self._writing: dict[bytes, int] = {}
        self._present_limit = present_limit
        self._refused_limit = refused_limit

    def found(
        self,
        keys: Sequence[bytes],
        hits: int,
        *,
        asked_at: float = NEVER,
        absent: bool = False,
        tenant: bytes = b"",
    ) -> None:
        """A lookup of a request of this tenant answered that began at ``asked_at``: the first
        ``hits`` keys are there. The rest is unknown; with ``absent``, the next one is absent and
        the others are of no use.

        A block that was not looked up in ``expire_after`` would have expired in any store: it was
        not evicted for want of space.
        """
        evicted, life = 0, self.turnover.expire_after
        for key in keys[:hits]:
            self._evicted.pop(key, None)
            self._add_present(key, asked_at)
        for key in keys[hits:]:
            since = self._present.pop(key, None)
            if not absent:
                continue
            self._newer.pop(key, None)  # the next one is absent, so all are offered again
            last = self._evicted.pop(key, None) if since is None else since
            if last is None or (since is not None and since >= asked_at):
                continue  # never stored before
            if life is None or asked_at - last < life:
                self._remember(self._evicted, key, self._present_limit, asked_at)
                evicted += 1
        self.turnover.asked_again(hits, evicted, tenant)

    def located(
        self, keys: Sequence[bytes], tiers: bytes, asked_at: float, tenant: bytes = b""
    ) -> None:
        """A lookup that began at ``asked_at`` found the records of one KV group in these tiers, or
        they are absent; of some it does not know."""
        there = [key for key, tier in zip(keys, tiers, strict=False) if tier < UNKNOWN]
        absent = [key for key, tier in zip(keys, tiers, strict=False) if tier == ABSENT]
        self.found(there + absent, len(there), asked_at=asked_at, absent=True, tenant=tenant)

    def refused_of(self, keys: Sequence[bytes]) -> list[int]:
        """Which of these keys may not be claimed."""
        if not (self._refused or self._newer):
            return []
        return [at for at, key in enumerate(keys) if self.is_refused(key)]

    def is_evicted(self, key: bytes) -> bool:
        """Whether this block was in the store once and was absent at the last lookup."""
        return key in self._evicted

    def offerable(self, key: bytes) -> bool:
        """Whether offering this block makes sense now."""
        return (
            key not in self._writing
            and key not in self._newer
            and (key not in self._present or key in self._refused or key in self._unpublished)
        )

    def is_stored(self, key: bytes) -> bool:
        """Whether every rank has this block in the store, as far as is known, and none refused
        it."""
        there = key in self._present and key not in self._refused and key not in self._newer
        # a block that is written again is still read from the device
        return there and key not in self._writing

    def is_expected(self, key: bytes) -> bool:
        """Whether this block is in the store or on its way to it, as far as is known."""
        return key in self._writing or self.is_stored(key)

    def writing(self, keys: Iterable[bytes], job: int) -> None:
        """These blocks are being written by ``job``."""
        for key in keys:
            self._writing[key] = job

    def written(self, key: bytes, now: float = NEVER) -> None:
        """Every rank published its part: a hit from now on."""
        self._writing.pop(key, None)
        self._evicted.pop(key, None)
        self._refused.pop(key, None)
        self._unpublished.pop(key, None)
        self._newer.pop(key, None)
        self._add_present(key, now)

    def not_written(self, key: bytes, refuse: bool) -> None:
        """Some rank did not publish its part. ``refuse``: an older record of that name is no hit
        either. The block is offered again even if a lookup finds it by then: memory can have a copy
        that the medium below lacks."""
        self._writing.pop(key, None)
        if refuse:
            self.refuse(key)
        else:
            self._present.pop(key, None)
            self._remember(self._unpublished, key, self._refused_limit)

    def refuse(self, key: bytes) -> None:
        """A rank found the record bad or missing: no hit until the block was written again."""
        self._present.pop(key, None)
        self._remember(self._refused, key, self._refused_limit)

    def mark_newer(self, key: bytes) -> None:
        """A rank found a record of a newer version or another key: no hit, and not offered while it
        is there, because no dump replaces it."""
        self._writing.pop(key, None)
        self._refused.pop(key, None)
        self._unpublished.pop(key, None)
        self._remember(self._newer, key, self._refused_limit)
        self._add_present(key, float("inf"))

    def trusted(self, keys: Sequence[bytes], upto: int) -> int:
        """How many of the first ``upto`` keys may be claimed: all before the first refused one."""
        if self._refused or self._newer:
            for index in range(upto):
                if self.is_refused(keys[index]):
                    return index
        return upto

    def is_refused(self, key: bytes) -> bool:
        """Whether this key was refused and not written since."""
        return key in self._refused or key in self._newer

    def _add_present(self, key: bytes, since: float) -> None:
        self._remember(self._present, key, self._present_limit, since)

    @staticmethod
    def _remember(kept: dict[bytes, Any], key: bytes, limit: int, value: Any = None) -> None:
        kept.pop(key, None)
        kept[key] = value
        if len(kept) > limit:
            del kept[next(iter(kept))]


# Lookups
# --------------------------------------------------------------------------------------------------

#: Longest prompt that is hashed and looked up at once, in tokens.
AT_ONCE_TOKENS = 1 << 15
#: Runs of published and of locally visible blocks that one lookup follows in turn.
ALTERNATIONS = 4

#: Most questions about the blocks of windows in one lookup. What is not known then is no hit.
QUESTIONS = 12
#: Blocks before those of a window that the second question is about; each further one doubles it.
FURTHER = 16


@dataclass(frozen=True)
class Found:
    """What a lookup found."""

    hits: int  # blocks of the longest hit
    reason: MissReason  # why there are no more
    tiers: bytes  # of each of these
    #: For each KV group the tier of each block, where a prefix is not all that counts.
    tables: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Question:
    """Record ids to be looked up: those of a prefix, up to the first absent one, or each."""

    ids: list[bytes]
    prefix: bool = True


#: A lookup in steps: yields questions, is sent the tiers and why the first absent one is, returns
#: what is found.
Steps = Generator[Question, tuple[bytes, str], Found]


class Lookup:
    """One lookup and its answer; written by one thread, read by the scheduler."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: float | None = None
        self._keys: list[bytes] | None = None
        self._hits = 0
        self._reason = MissReason.ABSENT
        self.began, self.seconds = clock(), 0.0  # and how long it took until it was answered
        self.hashing = True  # a thread computes the keys, or will
        self._done = False  # the answer is final
        self._poll: Callable[[Lookup], None] | None = None  # polls the store for its answer
        self.limit = 1 << 62  # most blocks of a hit
        self.why = MissReason.LAST_TOKEN  # no more
        self.each = False  # every block is looked up, not a prefix
        self.answered = False  # by the store
        self.tiers = b""  # that each of the hits would be loaded from, a byte each
        self.tables: tuple[bytes, ...] = ()  # the same by KV group, with absent ones; mostly none
        self.located_at = clock()  # when the tiers were last requested
        self.adopted = False  # its findings were processed

    @property
    def done(self) -> bool:
        """Whether the answer is final."""
        if not self._done and self._poll is not None:
            self._poll(self)
        return self._done

    def age(self) -> float:
        """Seconds since it began."""
        return self._clock() - self.began

    def followed(self, poll: Callable[[Lookup], None]) -> None:
        """The store looks up, and ``poll`` checks for its answer."""
        self._poll = poll

    @property
    def keys(self) -> list[bytes] | None:
        """Block keys, as soon as they are computed."""
        return self._keys

    @property
    def hits(self) -> int:
        """Blocks of the prefix that every part has, 0 until known."""
        return self._hits

    @property
    def reason(self) -> MissReason:
        """Why there are no more hits than that."""
        return self._reason

    def settled(self, allowance: float) -> bool:
        """Whether the answer is final: known, or ``allowance`` seconds have passed since the first
        call."""
        if self.done:
            return True
        now = self._clock()
        if self._asked is None:
            self._asked = now
        if now - self._asked < allowance:
            return False
        self.give_up(MissReason.LOOKUP_LATE)
        return True

    def give_up(self, reason: MissReason) -> None:
        """End it without hits; keys that are still being hashed may be used for dumps."""
        self._reason = reason
        self._done, self._poll = True, None

    def not_started(self, reason: MissReason) -> None:
        """No thread will work on it."""
        self.hashing = False
        self.give_up(reason)

    def hashed(self, keys: list[bytes] | None) -> None:
        """The keys are known, or could not be computed."""
        self._keys = keys
        self.hashing = False

    def answer(self, found: Found, took: float | None = None) -> None:
        """The store answered after ``took`` seconds (None: now); ignored once the lookup has
        ended."""
        if not self._done:
            self._hits, self._reason, self.tiers = found.hits, found.reason, found.tiers
            self.tables = found.tables
            self.answered = True
            self.seconds = self.age() if took is None else took
            self._done, self._poll = True, None


def _failed(lookup: Lookup, error: Exception) -> None:
    throttle.warning("lookup", "a lookup failed, treated as a miss: %s", error)
    reason = reason_of(error)
    lookup.give_up(MissReason.LOOKUP_LATE if reason == MissReason.TIMEOUT else reason)


def _of_blocks(tiers: bytes | bytearray, blocks: int, parts: int) -> bytes:
    """The tier of each block: the lowest of its parts', which lie side by side."""
    if parts == 1:
        return bytes(tiers[:blocks])
    return bytes(map(max, *(tiers[part : blocks * parts : parts] for part in range(parts))))


class Lookups:
    """Runs lookups and touches of one scheduler side on its background threads."""

    def __init__(
        self,
        background: Background,
        store: UcmKVStoreBaseV1,
        masks: Sequence[bytes],
        locally_visible: LocallyVisible | None = None,
        groups: Sequence[Group] = ONE_GROUP,
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        """``masks``: of the parts of a block; ``locally_visible``: records that the ranks can read
        before ``store``; ``parts``: which of the masks are those of each KV group."""
        self._background = background
        self._groups = list(groups)
        self._parts = [list(own) for own in parts] or [list(range(len(masks)))]
        # The parts of whole prefixes are looked up side by side.
        of_groups = zip(self._groups, self._parts, strict=True)
        self._whole = [part for group, own in of_groups if not group.frees_early for part in own]
        self._needs_tables = fails_whole(self._groups) or any(group.draft for group in groups)
        self._locally_visible = locally_visible or LocallyVisible()
        self._store = store
        self._masks = list(masks)
        # Such a block is in an open file or in memory: the slower of both is assumed.
        self._locally_visible_tier = max(len(store.tier_names) - 1, 0)

    def start(
        self,
        hash_tokens: Callable[[], list[bytes]],
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once: bool = False,
        limit: int = 1 << 62,
        why: MissReason = MissReason.LAST_TOKEN,
        each: bool = False,
    ) -> Lookup:
        """Begin; ``hash_tokens`` runs here if it is quick (``at_once``), else on the background
        thread. ``limit``: most blocks of a hit, and ``why`` no more. ``each``: the blocks are no
        prefix; the answer is the tier of each, :data:`~..groups.ABSENT` for one that is none."""
        lookup = Lookup(clock)
        lookup.limit, lookup.why, lookup.each = limit, why, each
        if not at_once:
            self._submit(lookup, lambda: self._run(lookup, hash_tokens))
        elif (keys := self._hashed(lookup, hash_tokens)) is not None:
            if self._answers_at_once():
                self._ask(lookup, keys)
            elif not self._follow(lookup, keys):
                self._submit(lookup, lambda: self._ask(lookup, keys))
        return lookup

    def _submit(self, lookup: Lookup, job: Callable[[], None]) -> None:
        if self._background.stalled():
            lookup.not_started(MissReason.UNHEALTHY)
        elif not self._background.submit(job):
            lookup.not_started(MissReason.BUSY)

    def _answers_at_once(self) -> bool:
        try:
            return self._store.answers_at_once
        except Exception:
            # closed, or a bug of the store: a background thread calls it
            return False

    def complete(self, lookup: Lookup, end: int, *, seen: bool) -> bool:
        """Whether a lookup found all that another engine stores of a prompt of ``end`` blocks, as
        far as a hit of its limit can use it. ``seen``: the last of these blocks was there before
        it, so of groups with few records no others will come."""
        limit, tables = min(end, lookup.limit), [bytes(end)] * len(self._groups)
        for at, (group, found) in enumerate(zip(self._groups, lookup.tables, strict=False)):
            if seen and group.only_cached:
                tables[at] = found[:end]
            elif not group.frees_early and ABSENT in found[:limit]:
                return False
        return lookup.hits >= known_hit(self._groups, tables, limit)

    def relocate(self, lookup: Lookup) -> None:
        """Locate the hits of an answered lookup again; a tier that is not found stays as it was."""
        if lookup.answered and not self._background.stalled():
            self._background.submit(lambda: self._relocate(lookup), IDLE)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Touch these blocks in the store; dropped when there is too much urgent work."""
        if keys and not self._background.stalled():
            chain = list(keys)
            self._background.submit(lambda: self._touch(chain), IDLE)

    def _run(self, lookup: Lookup, hash_tokens: Callable[[], list[bytes]]) -> None:
        if (keys := self._hashed(lookup, hash_tokens)) is not None:
            self._ask(lookup, keys)

    def _hashed(self, lookup: Lookup, hash_tokens: Callable[[], list[bytes]]) -> list[bytes] | None:
        """The keys, which the lookup has from here on; None without any."""
        keys: list[bytes] | None = None
        try:
            keys = hash_tokens()
        except UnkeyableError as error:
            lookup.give_up(error.reason)
            info_once("some requests are not cached: %s", error.message)
        except Exception as error:
            throttle.warning("hash", "a prompt could not be hashed: %r", error)
            lookup.give_up(MissReason.INTERNAL)
        lookup.hashed(keys)
        return keys

    def _ask(self, lookup: Lookup, keys: list[bytes]) -> None:
        """Wait for the store's answer."""
        if lookup.done:
            return  # the request went on without it
        steps = self._steps(keys, lookup)
        try:
            question = next(steps)
            while True:
                question = steps.send(self._answer(question))
        except StopIteration as end:
            lookup.answer(end.value)
        except Exception as error:
            _failed(lookup, error)

    def _answer(self, question: Question) -> tuple[bytes, str]:
        if question.prefix:
            return self._store.locate_on_prefix(question.ids)
        return self._store.locate(question.ids), MissReason.ABSENT

    def _follow(self, lookup: Lookup, keys: list[bytes]) -> bool:
        """The same on a thread of the store; the lookup polls for its answers. False without such a
        thread."""
        return self._begin(self._steps(keys, lookup), None, lookup.age(), lookup)

    def _begin(
        self, steps: Steps, answer: tuple[bytes, str] | None, took: float, lookup: Lookup
    ) -> bool:
        """Go on with ``answer`` (None at the beginning) and begin the next lookup; False if the
        store begins none."""
        try:
            question = next(steps) if answer is None else steps.send(answer)
            store = self._store
            begin = store.begin_locate_on_prefix if question.prefix else store.begin_locate
            pending = begin(question.ids)
        except StopIteration as end:
            lookup.answer(end.value, took)
        except Exception as error:
            _failed(lookup, error)
        else:
            if pending is None:
                return False
            lookup.followed(partial(self._poll, steps, pending, took))
        return True

    def _poll(self, steps: Steps, pending: Asked, before: float, lookup: Lookup) -> None:
        """Process the store's answer, if there is one; ``before``: seconds of hashing and of its
        earlier answers."""
        try:
            answer = pending.answer()
        except Exception as error:
            return _failed(lookup, error)
        if answer is not None:
            tiers, reason, took = answer
            if not self._begin(steps, (tiers, reason), before + took, lookup):
                lookup.give_up(MissReason.INTERNAL)

    def _steps(self, keys: list[bytes], of: Lookup) -> Steps:
        """The steps of a lookup, without a reference to it: one that is dropped ends its steps."""
        return self._each(keys) if of.each else self._of_hit(keys, of.limit, of.why)

    def _each(self, keys: list[bytes]) -> Steps:
        """The tier of each block, where one KV group is all that there is."""
        own = self._parts[0]
        ids = self._records(keys, own)
        found, _ = yield Question(ids, prefix=False)
        tiers = bytearray(found)
        for at, tier in enumerate(tiers):
            if tier >= UNKNOWN and self._locally_visible.has(ids[at], own[at % len(own)]):
                tiers[at] = self._locally_visible_tier
        return Found(0, MissReason.ABSENT, _of_blocks(tiers, len(keys), len(own)))

    def _of_hit(self, keys: list[bytes], limit: int, why: MissReason) -> Steps:
        """Mostly one question, with the parts of a block side by side."""
        if not keys:
            return Found(0, MissReason.ABSENT, b"")
        found = Found(len(keys), MissReason.LAST_TOKEN, bytes(len(keys)))
        if self._whole:
            found = yield from self._prefix(keys)
        if self._needs_tables:
            return (yield from self._in_groups(keys, found, min(limit, len(keys)), why))
        return found

    def _in_groups(self, keys: list[bytes], prefix: Found, limit: int, why: MissReason) -> Steps:
        """The longest hit of all groups, given the one of those that need a whole ``prefix``. Where
        lower tiers begin in it, it may be cut: then what the shorter ones need is looked up too."""
        tables: list[bytearray] = []
        for group in self._groups:
            known = bytes((UNKNOWN,)) * len(keys) if group.frees_early else prefix.tiers
            tables.append(bytearray(known.ljust(len(keys), bytes((ABSENT,)))))
        yield from self._longest(keys, tables, [limit], QUESTIONS, 0)
        hit = known_hit(self._groups, tables, limit)
        ends = shorter_hits(hit_tiers(self._groups, tables, hit))
        # What is not known after one question is not cut to.
        yield from self._longest(keys, tables, ends, 1, FURTHER)
        reason = prefix.reason if hit == prefix.hits else MissReason.ABSENT
        if hit == limit < prefix.hits:
            reason = why
        if prefix.reason not in (MissReason.ABSENT, MissReason.OTHER_RANK):
            for group, table in zip(self._groups, tables, strict=True):
                if not group.frees_early:  # blocks behind the prefix were not looked up
                    table[prefix.hits :] = bytes((UNKNOWN,)) * (len(keys) - prefix.hits)
        tiers = prefix.tiers[:hit] if self._whole else bytes(hit)
        return Found(hit, reason, tiers, tuple(map(bytes, tables)))

    def _longest(
        self,
        keys: list[bytes],
        tables: list[bytearray],
        limits: Sequence[int],
        questions: int,
        further: int,
    ) -> Generator[Question, tuple[bytes, str], None]:
        """Look up what the ``tables`` do not know of the longest hits within each of ``limits``,
        from the end on, and only what counts and ``further`` blocks before it: those of all
        limits in the same questions."""
        for _ in range(questions):
            unknown = [one for end in limits for one in longest_hit(self._groups, tables, end)[1]]
            if not unknown:
                break
            wanted = sorted(
                {
                    (at, block)
                    for at, blocks in unknown
                    for block in range(max(blocks.start - further, 0), blocks.stop)
                    if tables[at][block] == UNKNOWN
                }
            )
            further = max(2 * further, FURTHER)
            parts = [(at, block, part) for at, block in wanted for part in self._parts[at]]
            ids = [record_ids([keys[block]], self._masks[part])[0] for _, block, part in parts]
            tiers, _ = yield Question(ids, prefix=False)
            for at, block in wanted:
                tables[at][block] = 0
            for (at, block, part), record_id, tier in zip(parts, ids, tiers, strict=True):
                if tier >= UNKNOWN and self._locally_visible.has(record_id, part):
                    tier = self._locally_visible_tier
                tables[at][block] = max(tables[at][block], tier)

    def _prefix(self, keys: list[bytes]) -> Steps:
        """The prefix that all parts of whole prefixes have."""
        parts = len(self._whole)
        ids = self._records(keys, self._whole)
        tiers = bytearray()
        for _ in range(ALTERNATIONS):
            found, name = yield Question(ids[len(tiers) :] if tiers else ids)
            reason = named(name, MissReason.ABSENT)
            tiers += found
            absent, whole = reason == MissReason.ABSENT, self._whole
            run = self._locally_visible.run(ids, len(tiers), whole) if absent else 0
            tiers += bytes((self._locally_visible_tier,)) * run
            if not run or len(tiers) == len(ids):
                break
        hits, ahead = divmod(len(tiers), parts)
        if ahead and reason == MissReason.ABSENT:  # some parts of the block are there
            reason = MissReason.OTHER_RANK
        return Found(hits, reason, _of_blocks(tiers, hits, parts))

    def _records(self, keys: Sequence[bytes], parts: Sequence[int]) -> list[bytes]:
        """The record ids of blocks, these parts of a block side by side."""
        ids, count = record_ids(keys, self._masks[parts[0]]), len(parts)
        if count > 1:
            ids, first = [b""] * (len(keys) * count), ids
            ids[::count] = first
            for index, part in enumerate(parts[1:], 1):
                ids[index::count] = record_ids(keys, self._masks[part])
        return ids

    def _relocate(self, lookup: Lookup) -> None:
        parts, hits, found = len(self._whole), lookup.hits, b""
        keys = (lookup.keys or [])[:hits]
        if parts:
            tiers, _ = self._store.locate_on_prefix(self._records(keys, self._whole))
            found = _of_blocks(tiers, min(len(tiers) // parts, hits), parts)
            lookup.tiers = found + lookup.tiers[len(found) :]
        tables = []
        for group, own, table in zip(self._groups, self._parts, lookup.tables, strict=False):
            first, now = 0, found
            if group.frees_early:
                first, now = group.first_needed(hits), b""
            if first < hits and group.frees_early:
                tiers = self._store.locate(self._records(keys[first:], own))
                now = _of_blocks(tiers, hits - first, len(own))
            end = first + len(now)
            known = zip(table[first:end], now, strict=True)
            kept = bytes(was if tier >= UNKNOWN else tier for was, tier in known)
            tables.append(table[:first] + kept + table[end:])
        lookup.tables = tuple(tables)

    def _touch(self, keys: list[bytes]) -> None:
        for mask in self._masks:
            self._store.touch(record_ids(keys, mask))
