"""Asking the store how much of a prompt it has, without ever making a step wait.

A :class:`Lookup` is made when a request arrives: hash the tokens, ask for every part, keep the shortest prefix. Where
the store answers from memory that is done at once, in the scheduler's thread: another one would have to be woken, and
to wait for the interpreter while the engine has it, which takes longer. Otherwise it is done on a background thread;
vLLM's question is answered "not known yet" until it is, or until it is late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ucm.integration.vllm.connector.adapters import UnkeyableError
from ucm.integration.vllm.connector.background import IDLE, Background
from ucm.integration.vllm.connector.early import EarlyHits
from ucm.integration.vllm.connector.guard import say_once, throttle
from ucm.reasons import MissReason, named, reason_of
from ucm.store import record_ids
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

#: Longest prompt that is hashed and looked up at once, in tokens.
AT_ONCE_TOKENS = 1 << 15
#: Runs of published blocks and of early ones that one lookup follows in turn.
ALTERNATIONS = 4


def _reason_of(error: Exception) -> MissReason:
    reason = reason_of(error)
    return MissReason.LOOKUP_LATE if reason == MissReason.TIMEOUT else reason


class Lookup:
    """One question to the store and its answer; written by one thread, read by the scheduler."""

    __slots__ = (
        "_asked",
        "_clock",
        "_hits",
        "_keys",
        "_reason",
        "adopted",
        "answered",
        "began",
        "done",
        "hashing",
        "located_at",
        "seconds",
        "tiers",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: float | None = None
        self._keys: list[bytes] | None = None
        self._hits = 0
        self._reason = MissReason.ABSENT
        self.began, self.seconds = clock(), 0.0  # and how long it took until it was answered
        self.hashing = True  # a thread computes the keys, or will
        self.done = False  # the answer is final
        self.answered = False  # and it is the store's
        self.tiers = b""  # that each of the hits would be loaded from, a byte each
        self.located_at = clock()  # when they were last asked for
        self.adopted = False  # and its findings were taken over

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
        """Whether the answer is final: known, or ``allowance`` seconds have passed since this was first asked."""
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
        """End it without hits; what is still being hashed may be used for dumps."""
        self._reason = reason
        self.done = True

    def not_started(self, reason: MissReason) -> None:
        """No thread will work on it."""
        self.hashing = False
        self.give_up(reason)

    def hashed(self, keys: list[bytes] | None) -> None:
        """The keys are known, or could not be computed."""
        self._keys = keys
        self.hashing = False

    def relocated(self, tiers: bytes) -> None:
        """Where the first of the hits are now."""
        now = tiers + self.tiers[len(tiers) :]
        if now != self.tiers:
            self.tiers = now

    def answer(self, hits: int, reason: MissReason = MissReason.ABSENT) -> None:
        """The store answered, with the reason why it has no more; too late is too late."""
        if not self.done:
            self._hits, self._reason, self.answered = hits, reason, True
            self.seconds = self._clock() - self.began
            self.done = True


def _of_blocks(tiers: bytes | bytearray, blocks: int, parts: int) -> bytes:
    """The tier that each block comes from: the lowest of its parts', which lie side by side."""
    if parts == 1:
        return bytes(tiers[:blocks])
    return bytes(map(max, *(tiers[part : blocks * parts : parts] for part in range(parts))))


class Lookups:
    """Runs lookups and touches of one scheduler half on its background threads."""

    def __init__(
        self,
        background: Background,
        store: UcmKVStoreBaseV1,
        masks: Sequence[bytes],
        early: EarlyHits | None = None,
    ) -> None:
        """``masks``: of the parts a block has; ``early``: what the ranks can read before ``store`` sees it."""
        self._background = background
        self._early = early or EarlyHits()
        self._store = store
        self._masks = list(masks)
        # What is early is in an open file, or in memory that is not announced: taken for the slower of both.
        self._early_tier = max(len(store.tier_names) - 1, 0)

    def start(
        self,
        hash_tokens: Callable[[], list[bytes]],
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once: bool = False,
    ) -> Lookup:
        """Begin; ``hash_tokens`` runs on the background thread, or here if it and the store answer ``at_once``."""
        lookup = Lookup(clock)
        if at_once and self._answers_at_once():
            self._run(lookup, hash_tokens)
        elif self._background.stalled():
            lookup.not_started(MissReason.UNHEALTHY)
        elif not self._background.submit(lambda: self._run(lookup, hash_tokens)):
            lookup.not_started(MissReason.BUSY)
        return lookup

    def _answers_at_once(self) -> bool:
        try:
            return self._store.answers_at_once
        except Exception:  # closed, or a bug of the store: what it does on a thread of ours cannot hurt
            return False

    def relocate(self, lookup: Lookup) -> None:
        """Ask again which tier each hit of an answered lookup is in; what is no hit any more stays as it was."""
        if lookup.answered and not self._background.stalled():
            self._background.submit(lambda: self._relocate(lookup), IDLE)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Tell the store that these blocks were used; dropped when there is more urgent work than fits."""
        if keys and not self._background.stalled():
            chain = list(keys)
            self._background.submit(lambda: self._touch(chain), IDLE)

    def _run(self, lookup: Lookup, hash_tokens: Callable[[], list[bytes]]) -> None:
        try:
            keys = hash_tokens()
        except UnkeyableError as error:
            lookup.hashed(None)
            lookup.give_up(error.reason)
            say_once("some requests are not cached: %s", error.message)
            return
        except Exception as error:
            throttle.warning("hash", "a prompt could not be hashed: %r", error)
            lookup.hashed(None)
            lookup.give_up(MissReason.INTERNAL)
            return
        lookup.hashed(keys)
        if lookup.done:
            return  # nobody waits any more
        try:
            lookup.answer(*(self._prefix(keys, lookup) if keys else (0, MissReason.ABSENT)))
        except Exception as error:
            throttle.warning("lookup", "a lookup failed, treated as a miss: %s", error)
            lookup.give_up(_reason_of(error))

    def _prefix(self, keys: list[bytes], lookup: Lookup) -> tuple[int, MissReason]:
        """Blocks of the prefix that every part has, and why the next one is no hit: one call, the parts of a block
        side by side. ``lookup`` learns which tier they come from."""
        parts = len(self._masks)
        ids = self._records(keys)
        tiers = bytearray()
        for _ in range(ALTERNATIONS):
            found, name = self._store.locate_on_prefix(ids[len(tiers) :] if tiers else ids)
            reason = named(name, MissReason.ABSENT)
            tiers += found
            run = self._early.run(ids, len(tiers)) if reason == MissReason.ABSENT else 0
            tiers += bytes((self._early_tier,)) * run
            if not run or len(tiers) == len(ids):
                break
        hits, ahead = divmod(len(tiers), parts)
        lookup.tiers = _of_blocks(tiers, hits, parts)
        # Some parts of the block were found before one that is not there.
        return hits, MissReason.OTHER_RANK if ahead and reason == MissReason.ABSENT else reason

    def _records(self, keys: Sequence[bytes]) -> list[bytes]:
        """The record ids of blocks, the parts of a block side by side."""
        parts, ids = len(self._masks), record_ids(keys, self._masks[0])
        if parts > 1:
            ids, first = [b""] * (len(keys) * parts), ids
            ids[::parts] = first
            for index, mask in enumerate(self._masks[1:], 1):
                ids[index::parts] = record_ids(keys, mask)
        return ids

    def _relocate(self, lookup: Lookup) -> None:
        parts, hits = len(self._masks), lookup.hits
        tiers, _ = self._store.locate_on_prefix(self._records((lookup.keys or [])[:hits]))
        found = _of_blocks(tiers, min(len(tiers) // parts, hits), parts)
        lookup.relocated(found)

    def _touch(self, keys: list[bytes]) -> None:
        for mask in self._masks:
            self._store.touch(record_ids(keys, mask))
