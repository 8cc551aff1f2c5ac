"""What this engine knows about blocks in the store: present, evicted, being written, or refused by
one of its ranks.

This is a cache; lookups ask the store. It avoids offering a block that is present already, and it
keeps a block from counting as a hit after a rank found its record bad or could not publish it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ucm.integration.vllm.connector.scheduler.turnover import Turnover

#: Most keys remembered of each kind; the oldest are forgotten (a forgotten one costs an offer the
#: store ignores).
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
        """``turnover`` counts hits and evictions of blocks that were stored before."""
        self.turnover = turnover or Turnover()
        self._present: dict[bytes, float] = {}  # and since when, as far as is known
        self._evicted: dict[bytes, float] = {}  # and when it was asked for last
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
        ``hits`` keys are there. What follows is unknown; with ``absent``, the next one is absent
        and the others are of no use.

        A block that nobody asked for in ``expire_after`` would have expired in any store: it was
        not evicted for want of space."""
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
                continue  # it was never stored before
            if life is None or asked_at - last < life:
                self._remember(self._evicted, key, self._present_limit, asked_at)
                evicted += 1
        self.turnover.asked_again(hits, evicted, tenant)

    def is_evicted(self, key: bytes) -> bool:
        """Whether this block was in the store once and was absent when it was last asked for."""
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
        # what is written again is still to be read from the device
        return there and key not in self._writing

    def is_writing(self, key: bytes) -> bool:
        """Whether a job is writing this block."""
        return key in self._writing

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
        """Some rank did not publish its part. ``refuse``: and none must trust an older record of
        that name.

        It is offered again although a lookup may find it by then: memory can have a copy that the
        medium below lacks.
        """
        self._writing.pop(key, None)
        if refuse:
            self.refuse(key)
        else:
            self._present.pop(key, None)
            self._remember(self._unpublished, key, self._refused_limit)

    def refuse(self, key: bytes) -> None:
        """A rank found the record bad or gone: no hit until the block was written again."""
        self._present.pop(key, None)
        self._remember(self._refused, key, self._refused_limit)

    def mark_newer(self, key: bytes) -> None:
        """A rank found a record of a newer version or another key: no hit, and not offered while it
        is there, for no dump replaces it."""
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
        self._present.pop(key, None)
        self._present[key] = since
        if len(self._present) > self._present_limit:
            del self._present[next(iter(self._present))]

    @staticmethod
    def _remember(kept: dict[bytes, Any], key: bytes, limit: int, value: Any = None) -> None:
        kept.pop(key, None)
        kept[key] = value
        if len(kept) > limit:
            del kept[next(iter(kept))]
