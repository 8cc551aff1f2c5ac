"""What a store has to offer to be measured here: the one interface behind which each of them
stands.

An arm of the comparison is a class of its own (``peer_*.py``) that implements :class:`Peer` over a
store as its users have it. It runs in a process of its own (``child.py``), so no two of them share
threads, allocators or a crash.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: Blocks in host memory, one a row, each on a page boundary.
Blocks = npt.NDArray[np.uint8]

#: Threads that every arm is given, where it can be told: as many as vLLM's own file tier is driven
#: with here.
THREADS = 4


class UnavailableError(Exception):
    """This arm cannot run here; the text says why."""


class Peer(abc.ABC):
    """One store, opened afresh below an empty directory for every round.

    Only ``dump``, ``load`` and ``lookup`` are timed. Whatever a user of the store does once and not
    for every block (names, descriptors, registration of memory) belongs into ``name_blocks`` and
    ``wrap``.
    """

    #: Where the threads of this arm come from, for the report.
    threads = f"{THREADS}"

    #: The figures of a round that are this arm's own; the others are left out.
    figures: Sequence[str] = ("dump", "load", "lookup_present", "lookup_absent")

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take the arm's options of ``arms.py``; raises :class:`UnavailableError` where it is not
        installed."""
        self.options = dict(options)

    @abc.abstractmethod
    def version(self) -> str:
        """The version of what is measured."""

    @abc.abstractmethod
    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        """Open a store below an empty directory, with room for twice ``count`` blocks.

        ``direct`` asks for O_DIRECT. Raises :class:`UnavailableError` where the store has no such
        way.
        """

    def name_blocks(self, ids: Sequence[bytes]) -> Any:
        """The names of blocks as the store takes them; ``ids`` have 16 bytes."""
        return ids

    def wrap(self, blocks: Blocks) -> Any:
        """Memory as the store takes it."""
        return blocks

    @abc.abstractmethod
    def dump(self, names: Any, memory: Any) -> None:
        """Store every block; returns when others could read all of them. Raises when one could not
        be stored."""

    @abc.abstractmethod
    def load(self, names: Any, memory: Any) -> None:
        """Bring every block into ``memory``; raises when one could not be read."""

    def fetch(self, names: Any, memory: Any) -> None:
        """Bring into ``memory`` what ``load`` left elsewhere, not timed: it is compared with what
        was dumped."""

    def lookup(self, names: Any) -> Sequence[bool]:
        """Which of the blocks are there, one answer for each."""
        raise UnavailableError("it has no lookup")

    def after_lookup(self, names: Any) -> None:
        """What a lookup leaves to be undone, not timed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the directory, which is removed next."""


def split(count: int, parts: int) -> list[slice]:
    """``count`` things in at most ``parts`` pieces of nearly equal length."""
    parts = max(1, min(parts, count))
    edges = [count * number // parts for number in range(parts + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(edges)]
