"""A trace of the blocks that requests ask for, and what a store of any size would have hit of it.

An engine appends one line of JSON for each request that it looks up: seconds, and the blocks of its
prompt in order. A block is named by a hash of its key under a random number that only the engine's
process has: equal blocks have equal names within one life of an engine, and no name leads back to
tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from ucm.errors import ConfigError

#: Bytes of a block's name.
NAME = 8
#: What a store that is full evicts: the block that was used longest ago, or written first, or whose
#: next use is farthest, which no store knows: the most that any policy can hit.
POLICIES = ("lru", "fifo", "best")
#: The next use of a block that is not used again.
_NEVER = 1 << 62

_log = logging.getLogger("ucm.trace")


class BlockTrace:
    """The trace of one engine."""

    def __init__(self, path: str) -> None:
        """Appends to a file; one that cannot be opened is a warning, and there is no trace."""
        self._secret = os.urandom(16)
        try:
            how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(path, how, 0o600)
        except OSError as error:
            self._file = -1
            _log.warning("no trace of blocks is written: %s: %s", path, error.strerror)

    def add(self, now: float, keys: Sequence[bytes]) -> None:
        """A request asked for the blocks with these keys."""
        if self._file < 0:
            return
        names = [
            hashlib.blake2b(key, key=self._secret, digest_size=NAME).hexdigest() for key in keys
        ]
        line = json.dumps({"t": round(now, 3), "blocks": names}, separators=(",", ":"))
        try:
            os.write(self._file, f"{line}\n".encode())
        except OSError as error:
            _log.warning("the trace of blocks ends here: %s", error.strerror)
            self.close()

    def close(self) -> None:
        """Write nothing more. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def read_trace(lines: Iterable[str]) -> list[list[int]]:
    """The blocks of each request, numbered in the order in which they first occur. The last line
    may be cut off. Raises :class:`~ucm.errors.ConfigError` for what is no trace."""
    numbers: dict[str, int] = {}
    requests, wrong = [], ""
    for at, line in enumerate(lines, 1):
        if wrong:
            raise ConfigError(wrong)
        try:
            blocks = json.loads(line)["blocks"]
            requests.append([numbers.setdefault(str(name), len(numbers)) for name in blocks])
        except (ValueError, KeyError, TypeError):
            wrong = f"line {at} is no request of a trace of blocks"
    if wrong and not requests:
        raise ConfigError(wrong)
    return requests


def hit_rate(requests: Sequence[Sequence[int]], capacity: int, policy: str = "lru") -> float:
    """The share of blocks that a store of ``capacity`` blocks hits: of each request the longest
    prefix that is there. All its blocks are there afterwards, as far as they fit."""
    asked = sum(map(len, requests))
    hits = _best(requests, capacity) if policy == "best" else _queue(requests, capacity, policy)
    return hits / asked if asked else 0.0


def _prefix(blocks: Sequence[int], there: OrderedDict[int, None] | dict[int, int]) -> int:
    return next((at for at, block in enumerate(blocks) if block not in there), len(blocks))


def _queue(requests: Sequence[Sequence[int]], capacity: int, policy: str) -> int:
    there: OrderedDict[int, None] = OrderedDict()  # what is evicted first stands first
    hits = 0
    for blocks in requests:
        hits += _prefix(blocks, there)
        for block in reversed(blocks):  # a beginning counts as used later than what follows it
            if block not in there or policy == "lru":
                there.pop(block, None)
                there[block] = None
        while len(there) > capacity:
            there.popitem(last=False)
    return hits


def _best(requests: Sequence[Sequence[int]], capacity: int) -> int:
    uses: dict[int, list[int]] = {}
    for at in reversed(range(len(requests))):
        for block in requests[at]:
            uses.setdefault(block, []).append(at)
    there: dict[int, int] = {}  # and when each is used next
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for blocks in requests:
        hits += _prefix(blocks, there)
        for depth, block in enumerate(blocks):
            uses[block].pop()
            there[block] = after = uses[block][-1] if uses[block] else _NEVER
            heappush(farthest, (-after, -depth, block))
        while len(there) > capacity:
            after, _, block = heappop(farthest)
            if there.get(block) == -after:  # not outdated
                del there[block]
    return hits


def capacities(requests: Sequence[Sequence[int]], points: int = 8) -> list[int]:
    """Sizes worth a look: all blocks of a trace, half of them and so on; ascending."""
    every = len(Counter(block for blocks in requests for block in blocks))
    return sorted({max(every >> at, 1) for at in range(points)}) if every else []
