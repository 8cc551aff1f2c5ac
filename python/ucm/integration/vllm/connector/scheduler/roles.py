"""Prefill and decode on separate engines over one store: how the request of a decode engine waits
for the blocks that a prefill engine publishes.

The role belongs to the request. A producer's request (``do_remote_decode``) is answered with the
key of the last full block of its prompt, as soon as vLLM ends it: its blocks may still be on their
way. A request with that key (``kv_transfer_params.ucm.wait_for``) is a consumer's. It waits until
a lookup finds the block in every KV group, at most ``pd_wait_ms``, then it is computed. Its own hit
may be shorter: it never has the last token, and then ends where every group can serve it. A store
that answers from a list of the blocks that others have published refreshes it while a request
waits. If several waits in a row fail, as with a prefill engine on another store, only one request
waits now and then.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.guard import IDLE, Background, logger, throttle
from ucm.integration.vllm.connector.identity.engine_identity import differences

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.scheduler.lookup import Lookup, Lookups
    from ucm.integration.vllm.connector.scheduler.policies import RequestPolicy
    from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

#: Seconds between two lookups for one request, and between two refreshes of the store.
POLL_S, REFRESH_S = 0.01, 0.02
#: Waits in a row that end without the block, after which one request waits in this many seconds.
MOST_FAILED, TRIAL_S = 4, 10.0
#: Most identities of prefill engines that are compared with the own one in the log.
MOST_IDENTITIES = 8
#: Longest manifest in bytes.
LONGEST = 16 << 20


def digest_of(identity: str) -> str:
    """The digest of an identity's text, whose first 32 digits name its directory below a root."""
    return hashlib.sha256(identity.encode("ascii")).hexdigest()


def answer(key: bytes, tokens: int, identity: str) -> dict[str, Any]:
    """The ``kv_transfer_params`` of a producer's answer; the proxy passes them on to the consumer.
    ``key``: of the last full block of the prompt, which ends after ``tokens`` tokens."""
    section = {"wait_for": key.hex(), "tokens": tokens, "identity": digest_of(identity)}
    return {"do_remote_prefill": True, "ucm": section}


class PublishWait:
    """The wait of one consumer's request."""

    __slots__ = ("began", "end", "is_late", "key", "lookup", "producer", "seen", "until")

    def __init__(self, policy: RequestPolicy) -> None:
        self.key, self.producer = policy.wait_for, policy.producer
        self.began: float | None = None
        self.until = 0.0
        self.is_late = False  # it ended without the block
        self.seen = False  # the block was there once
        self.end = 0  # ordinal behind the block, 0 until the request's keys are known
        self.lookup: Lookup | None = None  # of this block alone

    def found(self) -> bool:
        """Whether the block is there now, once: all blocks are to be looked up again then."""
        found = self.lookup is not None and self.lookup.done and self.lookup.hits > 0
        if found:
            self.lookup, self.seen = None, True
        return found


class PublishWaits:
    """The waits of one engine's requests. Each request holds its own."""

    def __init__(
        self,
        wait_ms: int,
        roots: Sequence[str],
        background: Background,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``roots``: the directories that may have manifests of other identities."""
        self._limit_s = wait_ms / 1000
        self._roots, self._background, self._clock = roots, background, clock
        self._refreshed_at = self._trial_at = float("-inf")
        self._failed = 0  # the last waits in a row
        self._compared: set[str] = set()

    def go_on(
        self,
        wait: PublishWait,
        whole: Lookup,
        lookups: Lookups,
        store: UcmKVStoreBaseV1,
        identity: str,
    ) -> bool:
        """Whether a request waits longer. ``whole``: the last lookup of all its blocks, which has
        ended; ``identity``: the text of the own one."""
        now = self._clock()
        if wait.began is None:
            if wait.producer and wait.producer != digest_of(identity):
                self._compare(wait.producer, identity)
                return False
            wait.began, wait.until = now, now + self._allowance(now)
        if whole.keys is not None and not wait.end:
            if wait.key not in whole.keys:
                throttle.warning(
                    "another prompt",
                    "a prefill server stored another prompt than the request has here (other"
                    " tokens, salt, adapter or items), so the request is computed",
                )
                return False
            wait.end = whole.keys.index(wait.key) + 1
        if wait.end and lookups.complete(whole, wait.end, seen=wait.seen):
            self._failed = 0
            return False
        if now >= wait.until:
            wait.is_late = True
            self._failed += 1
            throttle.warning(
                "pd_wait_ms",
                "the blocks of a prefill server were not found within pd_wait_ms (%.0f ms), so the"
                " request is computed: are both servers on one store, and did the prefill server"
                " log an error?",
                self._limit_s * 1e3,
            )
            return False
        if whole.keys is None:
            return whole.hashing
        last, key = wait.lookup or whole, wait.key
        if last.done and now - last.began >= POLL_S:
            # twice: layers of a draft model need the block behind a hit, too
            twice = [key, key]
            wait.lookup = lookups.start(lambda: twice, self._clock, at_once=True, limit=1)
        if now - self._refreshed_at >= REFRESH_S:
            self._refreshed_at = now
            store.refresh()
        return True

    def _allowance(self, now: float) -> float:
        """Seconds that a request may wait: none after several failed waits, except for a trial."""
        if self._failed >= MOST_FAILED and now < self._trial_at:
            return 0.0
        self._trial_at = now + TRIAL_S
        return self._limit_s

    def _compare(self, producer: str, identity: str) -> None:
        """Log once where the identity of a producer differs from the own one."""
        if producer in self._compared or len(self._compared) >= MOST_IDENTITIES:
            return
        self._compared.add(producer)
        self._background.submit(lambda: self._log_differences(producer, identity), IDLE)

    def _log_differences(self, producer: str, identity: str) -> None:
        text = (
            "the prefill server's blocks have another identity than those of this engine, so its"
            " requests are computed here without a wait: %s"
        )
        for root in self._roots:
            try:
                path = os.path.join(root, producer[:32], "manifest.json")
                with open(path, encoding="ascii") as file:
                    theirs = json.loads(file.read(LONGEST))["identity"]
                differing = differences(json.loads(identity), theirs)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
            return logger.warning(text, "; ".join(differing))
        logger.warning(text, f"digest {digest_of(identity)} here and {producer} there")
