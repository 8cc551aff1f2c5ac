"""Asking the store how much of a prompt it has, without ever making a step wait.

A :class:`Lookup` is made when a request arrives and answered on a background thread: hash the tokens, ask for every
part, keep the shortest prefix. vLLM's question is answered "not known yet" until it is, or until it is late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ucm.integration.vllm.connector.adapters import UnkeyableError
from ucm.integration.vllm.connector.background import IDLE, Background
from ucm.integration.vllm.connector.guard import say_once, throttle
from ucm.store import record_ids
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

#: Reasons of a miss, spelled as in ``ucm_core::MissReason``.
ABSENT, LATE, BUSY, UNHEALTHY, IO_ERROR = "absent", "lookup_late", "busy", "unhealthy", "io_error"
UNKEYABLE = "identity_unknown"

#: Reason of a miss by the kind of the store's error; any other is an I/O error.
_BY_KIND = {"timeout": LATE, "busy": BUSY, "unhealthy": UNHEALTHY}


def _reason_of(error: Exception) -> str:
    return _BY_KIND.get(getattr(error, "kind", ""), IO_ERROR)


class Lookup:
    """One question to the store and its answer; written by one background thread, read by the scheduler."""

    __slots__ = ("_asked", "_clock", "_hits", "_keys", "_reason", "adopted", "answered", "done", "hashing")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: float | None = None
        self._keys: list[bytes] | None = None
        self._hits = 0
        self._reason = ABSENT
        self.hashing = True  # a thread computes the keys, or will
        self.done = False  # the answer is final
        self.answered = False  # and it is the store's
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
    def reason(self) -> str:
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
        self.give_up(LATE)
        return True

    def give_up(self, reason: str) -> None:
        """End it without hits; what is still being hashed may be used for dumps."""
        self._reason = reason
        self.done = True

    def not_started(self, reason: str) -> None:
        """No thread will work on it."""
        self.hashing = False
        self.give_up(reason)

    def hashed(self, keys: list[bytes] | None) -> None:
        """The keys are known, or could not be computed."""
        self._keys = keys
        self.hashing = False

    def answer(self, hits: int) -> None:
        """The store answered; too late is too late."""
        if not self.done:
            self._hits, self.answered = hits, True
            self.done = True


class Lookups:
    """Runs lookups and touches of one scheduler half on its background threads."""

    def __init__(self, background: Background, store: UcmKVStoreBaseV1, masks: Sequence[bytes]) -> None:
        self._background = background
        self._store = store
        self._masks = list(masks)

    def start(self, hash_tokens: Callable[[], list[bytes]], clock: Callable[[], float] = time.monotonic) -> Lookup:
        """Begin; ``hash_tokens`` runs on the background thread."""
        lookup = Lookup(clock)
        if self._background.stalled():
            lookup.not_started(UNHEALTHY)
        elif not self._background.submit(lambda: self._run(lookup, hash_tokens)):
            lookup.not_started(BUSY)
        return lookup

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
            lookup.give_up(UNKEYABLE)
            say_once("some requests are not cached: %s", error.message)
            return
        except Exception as error:
            throttle.warning("hash", "a prompt could not be hashed: %r", error)
            lookup.hashed(None)
            lookup.give_up(IO_ERROR)
            return
        lookup.hashed(keys)
        if lookup.done:
            return  # nobody waits any more
        try:
            lookup.answer(self._prefix(keys) if keys else 0)
        except Exception as error:
            throttle.warning("lookup", "a lookup failed, treated as a miss: %s", error)
            lookup.give_up(_reason_of(error))

    def _prefix(self, keys: list[bytes]) -> int:
        """Blocks of the prefix that every part has: one call, the parts of a block side by side."""
        parts = len(self._masks)
        if parts == 1:
            return self._store.lookup_on_prefix(record_ids(keys, self._masks[0])) + 1
        ids = [b""] * (len(keys) * parts)
        for index, mask in enumerate(self._masks):
            ids[index::parts] = record_ids(keys, mask)
        return (self._store.lookup_on_prefix(ids) + 1) // parts

    def _touch(self, keys: list[bytes]) -> None:
        for mask in self._masks:
            self._store.touch(record_ids(keys, mask))
