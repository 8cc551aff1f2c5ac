"""Blocks in use, told to the ranks: each has memory of its own, and segments it merges, which no touch of the scheduler
half reaches.

A request touches its whole prefix, also what it found on the device. A step carries a bounded number of keys; what is
too much for one goes with the next, and what is too much for that is not told: the request touches again in a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ucm.integration.vllm.connector.metadata import join_keys

#: Most keys of one step, and most that wait.
STEP, WAITING = 1024, 1 << 15


class Touches:
    """Chains that wait to be told, from their first blocks on."""

    def __init__(self) -> None:
        self._wanted = False
        self._chains: deque[tuple[int, Sequence[bytes]]] = deque()  # each from that ordinal on
        self._waiting = 0

    def report(self, wanted: bool) -> None:
        """A rank's store is open; whether it goes by what it is told."""
        self._wanted = self._wanted or wanted

    def add(self, chain: Sequence[bytes]) -> None:
        """A request uses these blocks, the first ones of its chain."""
        if self._wanted and chain and self._waiting + len(chain) <= WAITING:
            self._chains.append((0, chain))
            self._waiting += len(chain)

    def take(self) -> list[tuple[int, bytes]]:
        """What the ranks are told in this step: pieces of chains, with the ordinals at which they begin."""
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
