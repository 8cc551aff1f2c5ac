"""Hints for the ranks' own stores, sent with each step: blocks in use, and blocks that will be
needed. Both are bounded and optional: a rank that ignores them serves every request as well, only
later.

The scheduler side's own touch does not reach the memory and segments of the ranks, so
:class:`TouchQueue` passes on the blocks in use. A request touches its whole prefix, including
blocks on the device. A step carries a bounded number of keys; the rest goes with the next steps,
and chains beyond the limit are dropped: the request touches again later.

A load begins when its request is admitted. While a request waits behind others, its blocks in lower
tiers can be brought into memory: :class:`PrefetchPlanner` chooses those of the requests next in
line, as many as the ranks have room for. Loads have precedence, and the ranks' stores limit
prefetches too. The tiers of a waiting request's blocks are looked up again from time to time.
Requests are taken in the order of arrival; vLLM's own order may differ, by priorities.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.metadata import Prefetch, RankReport, join_keys
from ucm.integration.vllm.connector.scheduler.lookup import Lookup
from ucm.integration.vllm.connector.scheduler.requests import RequestTracker
from ucm.store.ucmstore_v1 import Priority

# Blocks in use
# --------------------------------------------------------------------------------------------------

#: Most keys of one step, and most that wait.
STEP, WAITING = 1024, 1 << 15


class TouchQueue:
    """Chains that wait to be sent, from their first blocks on."""

    def __init__(self) -> None:
        self._wanted = False
        self._chains: deque[tuple[int, Sequence[bytes]]] = deque()  # each from that ordinal on
        self._waiting = 0

    def report(self, wanted: bool) -> None:
        """A rank's store is open; ``wanted``: it uses hints about blocks in use."""
        self._wanted = self._wanted or wanted

    def add(self, chain: Sequence[bytes]) -> None:
        """A request uses these blocks, the first ones of its chain."""
        if self._wanted and chain and self._waiting + len(chain) <= WAITING:
            self._chains.append((0, chain))
            self._waiting += len(chain)

    def take(self) -> list[tuple[int, bytes]]:
        """The pieces of chains for this step, with the ordinals at which they begin."""
        sent: list[tuple[int, bytes]] = []
        room = STEP
        while self._chains and room > 0:
            first, chain = self._chains.popleft()
            sent.append((first, join_keys(chain[:room])))
            if len(chain) > room:
                self._chains.appendleft((first + room, chain[room:]))
            self._waiting -= min(len(chain), room)
            room -= len(chain)
        return sent


# Blocks that will be needed
# --------------------------------------------------------------------------------------------------

#: Requests next in line that are considered, and the seconds between two rounds.
IN_LINE, EVERY_S = 16, 0.02
#: Seconds after which the tiers of a request's blocks are looked up again.
RELOCATE_S = 1.0
#: Most urgent first, with the end of its places in line.
_PLACES: tuple[tuple[int, Priority], ...] = ((1, "urgent"), (4, "next_batch"), (IN_LINE, "normal"))


@dataclass(slots=True)
class _Hinted:
    keys: list[bytes] = field(default_factory=list)
    level: int = len(_PLACES)
    tiers: bytes = b""  # of its blocks when they were last considered
    whole: bool = False  # all blocks were requested


class PrefetchPlanner:
    """The prefetches of one engine."""

    def __init__(
        self,
        relocate: Callable[[Lookup], None],
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``relocate`` looks up, in the background, the tiers of a lookup's blocks."""
        self._relocate = relocate
        self._block_tokens = block_tokens
        self._clock = clock
        self._rooms: dict[int, int] = {}
        self._line: dict[str, RequestTracker] = {}
        self._hinted: dict[str, _Hinted] = {}
        self._held: Counter[bytes] = Counter()  # requests that want a key which was requested
        self._cancelled: list[bytes] = []
        self._next = float("-inf")

    def report(self, rank: int, room: int) -> None:
        """Blocks that a rank may prefetch, 0 where its store has no use for that."""
        self._rooms[rank] = room

    def add(self, tracker: RequestTracker) -> None:
        """A request arrived."""
        self._line[tracker.request.request_id] = tracker

    def remove(self, name: str) -> None:
        """A request waits no more: it was admitted (then its load reads its blocks) or has
        ended."""
        self._line.pop(name, None)
        if hinted := self._hinted.pop(name, None):
            self._cancelled += self._drop(hinted.keys)

    def take(self) -> Prefetch | None:
        """News for the ranks; None without any, as in most steps."""
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
        joined = [(priority, join_keys(keys)) for priority, keys in wanted.items()]
        return Prefetch(join_keys(cancelled), joined)

    def _news(self, tracker: RequestTracker, level: int, room: int, now: float) -> Sequence[bytes]:
        """The keys of a request to be requested now, with this urgency."""
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
            # those that are no longer below were brought up
            room += len(self._drop([key for key in hinted.keys if key not in below]))
            hinted.keys = [key for key in hinted.keys if key in below]
            hinted_keys = set(hinted.keys)
            for key in below:
                if key not in hinted_keys and (key in self._held or room > 0):
                    room -= key not in self._held
                    self._held[key] += 1
                    new.append(key)
            hinted.keys += new
            hinted.whole = len(hinted.keys) == len(below)
        return hinted.keys if sooner else new

    def _below(self, tracker: RequestTracker, lookup: Lookup) -> Iterator[bytes]:
        """Keys of the hits in lower tiers, but for those a request never loads."""
        keys = lookup.keys or []
        limit = (tracker.request.num_tokens - 1) // self._block_tokens
        most = min(limit, tracker.banned_from, len(keys))
        return (key for key, tier in zip(keys[:most], lookup.tiers, strict=False) if tier)

    def _drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """A request wants these no more; returns those that no request wants now."""
        for key in keys:
            self._held[key] -= 1
        unwanted = [key for key in keys if self._held[key] <= 0]
        for key in unwanted:
            del self._held[key]
        return unwanted


# Both
# --------------------------------------------------------------------------------------------------


class RankHints:
    """The hints of one engine."""

    def __init__(
        self,
        relocate: Callable[[Lookup], None],
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``relocate`` looks up, in the background, the tiers of a lookup's blocks."""
        self.touches = TouchQueue()
        self.prefetches = PrefetchPlanner(relocate, block_tokens, clock)

    def report(self, rank: RankReport) -> None:
        """Whether a rank uses hints about blocks in use, and the room in its own memory."""
        if rank.ready:
            self.touches.report(rank.wants_touches)
            self.prefetches.report(rank.rank, rank.prefetch_room)

    def take(self) -> tuple[list[tuple[int, bytes]], Prefetch | None]:
        """The hints for the next plan. Never raises."""
        try:
            return self.touches.take(), self.prefetches.take()
        except Exception as error:
            throttle.warning("hints", "the hints for the ranks could not be made: %r", error)
            return [], None
