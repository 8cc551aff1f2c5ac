"""The interface of a measured store.

Each arm of the comparison is a class (``peer_*.py``) that implements :class:`Peer` over an
installed store. It runs in a process of its own (``child.py``), so arms share no threads,
allocators or crashes.
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

#: Threads of every arm, if configurable: the number used for vLLM's own file tier.
THREADS = 4


class UnavailableError(Exception):
    """This arm cannot run here; the text has the reason."""


class Peer(abc.ABC):
    """One store, opened below an empty directory for every round.

    Only ``dump``, ``load`` and ``lookup`` are timed. Work that a user does once and not for every
    block (names, descriptors, registration of memory) belongs into ``name_blocks`` and ``wrap``.
    """

    #: The threads of this arm, for the report.
    threads = f"{THREADS}"

    #: The figures of a round to report; the others are left out.
    figures: Sequence[str] = ("dump", "load", "lookup_present", "lookup_absent")

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take the arm's options of ``arms.py``; raises :class:`UnavailableError` if it is not
        installed."""
        self.options = dict(options)

    @abc.abstractmethod
    def version(self) -> str:
        """The measured version."""

    @abc.abstractmethod
    def prepare(self, directory: str, block_bytes: int, count: int, direct: bool) -> None:
        """Open a store below an empty directory, with room for twice ``count`` blocks.

        ``direct`` requests O_DIRECT. Raises :class:`UnavailableError` if the store does not support
        it.
        """

    def name_blocks(self, ids: Sequence[bytes]) -> Any:
        """The store's names of blocks; ``ids`` have 16 bytes."""
        return ids

    def wrap(self, blocks: Blocks) -> Any:
        """The store's form of memory."""
        return blocks

    @abc.abstractmethod
    def dump(self, names: Any, memory: Any) -> None:
        """Store every block; returns when others can read all of them. Raises if one could not be
        stored."""

    @abc.abstractmethod
    def load(self, names: Any, memory: Any) -> None:
        """Load every block into ``memory``; raises if one could not be read."""

    def fetch(self, names: Any, memory: Any) -> None:
        """Copy blocks that ``load`` left elsewhere into ``memory``, not timed, to compare them with
        the dumped ones."""

    def lookup(self, names: Any) -> Sequence[bool]:
        """For each block, true if it is stored."""
        raise UnavailableError("it has no lookup")

    def after_lookup(self, names: Any) -> None:
        """Cleanup after a lookup, not timed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the directory, which is removed next."""


def split(count: int, parts: int) -> list[slice]:
    """``count`` items in at most ``parts`` ranges of nearly equal length."""
    parts = max(1, min(parts, count))
    edges = [count * number // parts for number in range(parts + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(edges)]
