"""Tells the ranks which blocks are in use: the scheduler side's own touch does not reach their
memory and segments.

A request touches its whole prefix, including what it found on the device. A step carries a bounded
number of keys; the rest goes with the next steps, and what exceeds that limit is dropped: the
request touches again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ucm.integration.vllm.connector.metadata import join_keys

#: Most keys of one step, and most that wait.
STEP, WAITING = 1024, 1 << 15


class TouchQueue:
    """Chains that wait to be told, from their first blocks on."""

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
        """What the ranks are told in this step: pieces of chains, with the ordinals at which they
        begin."""
        told: list[tuple[int, bytes]] = []
        room = STEP
        while self._chains and room > 0:
            first, chain = self._chains.popleft()
            told.append((first, join_keys(chain[:room])))
            if len(chain) > room:
                self._chains.appendleft((first + room, chain[room:]))
            self._waiting -= min(len(chain), room)
            room -= len(chain)
        return told
