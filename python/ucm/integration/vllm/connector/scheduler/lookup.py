"""Asks the store how much of a prompt it has, without making a step wait.

A :class:`Lookup` starts when a request arrives: it hashes the tokens, asks for every part and keeps
the shortest prefix. Hashing runs in the scheduler's thread, and so does the lookup where the store
answers from memory: waking another thread, which would have to wait for the interpreter, takes
longer. A store that has to ask a medium does so on a thread of its own, which does not need the
interpreter, and is polled for its answer. Everything slower (files of adapters, long prompts,
stores written in Python) runs on a background thread. Until there is an answer, or it is late, vLLM
is told "not known yet".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import partial

from ucm.integration.vllm.connector.background import IDLE, Background
from ucm.integration.vllm.connector.guard import info_once, throttle
from ucm.integration.vllm.connector.identity.unkeyable import UnkeyableError
from ucm.integration.vllm.connector.scheduler.locally_visible import LocallyVisible
from ucm.reasons import MissReason, named, reason_of
from ucm.store import record_ids
from ucm.store.ucmstore_v1 import Asked, UcmKVStoreBaseV1

#: Longest prompt that is hashed and looked up at once, in tokens.
AT_ONCE_TOKENS = 1 << 15
#: Runs of published and of locally visible blocks that one lookup follows in turn.
ALTERNATIONS = 4

#: What is found: blocks of the prefix that every part has, why there are no more, and the tier of
#: each.
Found = tuple[int, MissReason, bytes]
#: A lookup in steps: yields record ids, is sent what ``locate_on_prefix`` says of them, returns
#: what is found.
Prefix = Generator[list[bytes], tuple[bytes, str], Found]


def _reason_of(error: Exception) -> MissReason:
    reason = reason_of(error)
    return MissReason.LOOKUP_LATE if reason == MissReason.TIMEOUT else reason


class Lookup:
    """One question to the store and its answer; written by one thread, read by the scheduler."""

    __slots__ = (
        "_asked",
        "_clock",
        "_done",
        "_hits",
        "_keys",
        "_look",
        "_reason",
        "adopted",
        "answered",
        "began",
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
        self._done = False  # the answer is final
        self._look: Callable[[Lookup], None] | None = (
            None  # polls the store for its answer; None: nothing to poll
        )
        self.answered = False  # and it is the store's
        self.tiers = b""  # that each of the hits would be loaded from, a byte each
        self.located_at = clock()  # when they were last asked for
        self.adopted = False  # and its findings were taken over

    @property
    def done(self) -> bool:
        """Whether the answer is final."""
        if not self._done and self._look is not None:
            self._look(self)
        return self._done

    def age(self) -> float:
        """Seconds since it began."""
        return self._clock() - self.began

    def followed(self, look: Callable[[Lookup], None]) -> None:
        """The store was asked, and ``look`` looks whether it has answered."""
        self._look = look

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
        """Whether the answer is final: known, or ``allowance`` seconds have passed since this was
        first asked."""
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
        self._done, self._look = True, None

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

    def answer(self, found: Found, took: float | None = None) -> None:
        """The store answered; ignored once the lookup has ended. ``took``: seconds until it
        answered, None for until now."""
        if not self._done:
            self._hits, self._reason, self.tiers = found
            self.answered = True
            self.seconds = self.age() if took is None else took
            self._done, self._look = True, None


def _failed(lookup: Lookup, error: Exception) -> None:
    throttle.warning("lookup", "a lookup failed, treated as a miss: %s", error)
    lookup.give_up(_reason_of(error))


def _of_blocks(tiers: bytes | bytearray, blocks: int, parts: int) -> bytes:
    """The tier that each block comes from: the lowest of its parts', which lie side by side."""
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
    ) -> None:
        """``masks``: of the parts a block has; ``locally_visible``: what the ranks can read before
        ``store`` sees it."""
        self._background = background
        self._locally_visible = locally_visible or LocallyVisible()
        self._store = store
        self._masks = list(masks)
        # Such a block is in an open file, or in memory that is not announced: taken for the slower
        # of both.
        self._locally_visible_tier = max(len(store.tier_names) - 1, 0)

    def start(
        self,
        hash_tokens: Callable[[], list[bytes]],
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once: bool = False,
    ) -> Lookup:
        """Begin; ``hash_tokens`` runs here if it takes little (``at_once``), else on the background
        thread."""
        lookup = Lookup(clock)
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
        except (
            Exception
        ):  # closed, or a bug of the store: what it does on a thread of ours cannot hurt
            return False

    def relocate(self, lookup: Lookup) -> None:
        """Ask again which tier each hit of an answered lookup is in; what is no hit any more stays
        as it was."""
        if lookup.answered and not self._background.stalled():
            self._background.submit(lambda: self._relocate(lookup), IDLE)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Tell the store that these blocks were used; dropped when there is more urgent work than
        fits."""
        if keys and not self._background.stalled():
            chain = list(keys)
            self._background.submit(lambda: self._touch(chain), IDLE)

    def _run(self, lookup: Lookup, hash_tokens: Callable[[], list[bytes]]) -> None:
        keys = self._hashed(lookup, hash_tokens)
        if keys is not None:
            self._ask(lookup, keys)

    def _hashed(self, lookup: Lookup, hash_tokens: Callable[[], list[bytes]]) -> list[bytes] | None:
        """The keys, which the lookup knows from here on; None where there are none."""
        try:
            keys = hash_tokens()
        except UnkeyableError as error:
            lookup.hashed(None)
            lookup.give_up(error.reason)
            info_once("some requests are not cached: %s", error.message)
            return None
        except Exception as error:
            throttle.warning("hash", "a prompt could not be hashed: %r", error)
            lookup.hashed(None)
            lookup.give_up(MissReason.INTERNAL)
            return None
        lookup.hashed(keys)
        return keys

    def _ask(self, lookup: Lookup, keys: list[bytes]) -> None:
        """Wait for the store's answer."""
        if lookup.done:
            return  # the request went on without it
        prefix = self._prefix(keys)
        try:
            ids = next(prefix)
            while True:
                ids = prefix.send(self._store.locate_on_prefix(ids))
        except StopIteration as end:
            lookup.answer(end.value)
        except Exception as error:
            _failed(lookup, error)

    def _follow(self, lookup: Lookup, keys: list[bytes]) -> bool:
        """The same on a thread of the store, where it has one: the lookup looks for its answers.
        False where it has none."""
        return self._begin(self._prefix(keys), None, lookup.age(), lookup)

    def _begin(
        self, prefix: Prefix, answer: tuple[bytes, str] | None, took: float, lookup: Lookup
    ) -> bool:
        """Go on with ``answer`` (None at the beginning) and begin the next question; False if the
        store begins none."""
        try:
            asked = self._store.begin_locate_on_prefix(
                next(prefix) if answer is None else prefix.send(answer)
            )
        except StopIteration as end:
            lookup.answer(end.value, took)
        except Exception as error:
            _failed(lookup, error)
        else:
            if asked is None:
                return False
            lookup.followed(partial(self._look, prefix, asked, took))
        return True

    def _look(self, prefix: Prefix, asked: Asked, before: float, lookup: Lookup) -> None:
        """Whether the store has answered; ``before``: seconds that hashing and its earlier answers
        took."""
        try:
            answer = asked.answer()
        except Exception as error:
            return _failed(lookup, error)
        if answer is not None:
            tiers, reason, took = answer
            if not self._begin(prefix, (tiers, reason), before + took, lookup):
                lookup.give_up(MissReason.INTERNAL)

    def _prefix(self, keys: list[bytes]) -> Prefix:
        """Mostly one question, the parts of a block side by side. It does not know its lookup: one
        that is dropped ends what it began."""
        if not keys:
            return 0, MissReason.ABSENT, b""
        parts = len(self._masks)
        ids = self._records(keys)
        tiers = bytearray()
        for _ in range(ALTERNATIONS):
            found, name = yield ids[len(tiers) :] if tiers else ids
            reason = named(name, MissReason.ABSENT)
            tiers += found
            run = self._locally_visible.run(ids, len(tiers)) if reason == MissReason.ABSENT else 0
            tiers += bytes((self._locally_visible_tier,)) * run
            if not run or len(tiers) == len(ids):
                break
        hits, ahead = divmod(len(tiers), parts)
        if ahead and reason == MissReason.ABSENT:
            # some parts of the block were found before one that is not there
            reason = MissReason.OTHER_RANK
        return hits, reason, _of_blocks(tiers, hits, parts)

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
