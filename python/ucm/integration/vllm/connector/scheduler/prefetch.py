"""Chooses blocks of waiting requests that the ranks bring into memory, so that their loads are
quick.

A load begins when its request is admitted. While a request waits behind others, its blocks in lower
tiers can be brought into memory: those of the requests next in line, as many as the ranks have room
for. This is a hint: nothing waits for it, loads go before it, and the ranks' stores limit it as
well. The tiers of a waiting request's blocks are looked up again from time to time, so that its hit
is decided by where they are then.

Requests are taken in the order of arrival; vLLM's own order may differ, by priorities.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ucm.integration.vllm.connector.metadata import Prefetch, join_keys
from ucm.integration.vllm.connector.scheduler.lookup import Lookup
from ucm.integration.vllm.connector.scheduler.request_tracker import RequestTracker
from ucm.store.ucmstore_v1 import Priority

#: Requests next in line that are looked at, and how often, in seconds.
IN_LINE, EVERY_S = 16, 0.02
#: Where the blocks of a request are is asked for again after so long, in seconds.
RELOCATE_S = 1.0
#: Most urgent first, with the place in line up to which it holds.
_PLACES: tuple[tuple[int, Priority], ...] = ((1, "urgent"), (4, "next_batch"), (IN_LINE, "normal"))


@dataclass(slots=True)
class _Hinted:
    keys: list[bytes] = field(default_factory=list)
    level: int = len(_PLACES)
    tiers: bytes = b""  # where its blocks were when that was last looked at
    whole: bool = False  # everything was asked for


class PrefetchPlanner:
    """What the ranks were asked to bring up, for one engine."""

    def __init__(
        self,
        relocate: Callable[[Lookup], None],
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``relocate`` asks, in the background, where the blocks of a lookup are now."""
        self._relocate = relocate
        self._block_tokens = block_tokens
        self._clock = clock
        self._rooms: dict[int, int] = {}
        self._line: dict[str, RequestTracker] = {}
        self._hinted: dict[str, _Hinted] = {}
        self._held: Counter[bytes] = Counter()  # requests that want a key which was asked for
        self._cancelled: list[bytes] = []
        self._next = float("-inf")

    def report(self, rank: int, room: int) -> None:
        """Blocks that a rank may be asked to bring up, 0 where its store has no use for that."""
        self._rooms[rank] = room

    def waits(self, tracker: RequestTracker) -> None:
        """A request has come."""
        self._line[tracker.request.request_id] = tracker

    def gone(self, name: str) -> None:
        """A request waits no more: it was admitted (then its load reads what it needs) or has
        ended."""
        self._line.pop(name, None)
        if hinted := self._hinted.pop(name, None):
            self._cancelled += self._drop(hinted.keys)

    def take(self) -> Prefetch | None:
        """What is new for the ranks; None when nothing is, as in most steps."""
        room = min(self._rooms.values(), default=0)
        if not room:
            return None
        wanted: dict[Priority, list[bytes]] = {}
        now = self._clock()
        if self._line and now >= self._next:
            self._next = now + EVERY_S
            for place, tracker in enumerate(islice(self._line.values(), IN_LINE)):
                level = next(at for at, (end, _) in enumerate(_PLACES) if place < end)
                if keys := self._news(tracker, level, room - len(self._held), now):
                    wanted.setdefault(_PLACES[level][1], []).extend(keys)
        cancelled, self._cancelled = [key for key in self._cancelled if key not in self._held], []
        if not (wanted or cancelled):
            return None
        return Prefetch(
            join_keys(cancelled), [(priority, join_keys(keys)) for priority, keys in wanted.items()]
        )

    def _news(self, tracker: RequestTracker, level: int, room: int, now: float) -> Sequence[bytes]:
        """The keys of a request to be asked for now, with this urgency."""
        lookup = tracker.lookup
        if lookup is None or not lookup.done or not lookup.answered or lookup.keys is None:
            return ()
        name = tracker.request.request_id
        hinted = self._hinted.get(name)
        if hinted is None and not lookup.tiers.strip(b"\0"):
            return ()
        hinted = self._hinted.setdefault(name, _Hinted())
        sooner = level < hinted.level
        if (sooner and hinted.keys) or now - lookup.located_at >= RELOCATE_S:
            lookup.located_at = now
            self._relocate(lookup)
        hinted.level = min(level, hinted.level)
        new: list[bytes] = []
        if hinted.tiers is not lookup.tiers or not (hinted.whole or room <= 0):
            hinted.tiers = lookup.tiers
            below = dict.fromkeys(self._below(tracker, lookup))
            # they have come up
            room += len(self._drop([key for key in hinted.keys if key not in below]))
            hinted.keys = [key for key in hinted.keys if key in below]
            asked = set(hinted.keys)
            for key in below:
                if key not in asked and (key in self._held or room > 0):
                    room -= key not in self._held
                    self._held[key] += 1
                    new.append(key)
            hinted.keys += new
            hinted.whole = len(hinted.keys) == len(below)
        return hinted.keys if sooner else new

    def _below(self, tracker: RequestTracker, lookup: Lookup) -> Iterator[bytes]:
        """Keys of the hits that lie further down, but for those a request never loads."""
        keys = lookup.keys or []
        most = min(
            (tracker.request.num_tokens - 1) // self._block_tokens, tracker.banned_from, len(keys)
        )
        return (key for key, tier in zip(keys[:most], lookup.tiers, strict=False) if tier)

    def _drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """A request wants these no more; returns those that no request wants now."""
        for key in keys:
            self._held[key] -= 1
        unwanted = [key for key in keys if self._held[key] <= 0]
        for key in unwanted:
            del self._held[key]
        return unwanted
