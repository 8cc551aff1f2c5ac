"""From the start of an engine to the moment its cache may be used, seen from the scheduler half.

*pending*: the weights' digest is not known. *opening*: the identity is known, the stores of the scheduler and of every
rank are being opened in the background. *open*: lookups, loads and dumps. *off*: never, for a reason that was logged.
Nothing here blocks: :meth:`Gate.poll` is called once per step and moves on when it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ucm.integration.vllm.connector.candidates import Selection
from ucm.integration.vllm.connector.guard import logger
from ucm.integration.vllm.connector.identity import difference
from ucm.integration.vllm.connector.metadata import VERSION, Handshake, RankReport, StoreSetup
from ucm.reasons import MissReason
from ucm.store import part_mask
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

PENDING, OPENING, OPEN, OFF = "pending", "opening", "open", "off"

#: Seconds between two looks at the files the identity was made from.
RECHECK_S = 10.0


class Gate:
    """The phase of one engine's cache."""

    def __init__(
        self,
        *,
        own_identity: Mapping[str, Any],
        identity: Callable[[], str | None],
        trouble: Callable[[], str],
        selection: Selection,
        world: int,
        open_allowance: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``own_identity`` is without weights; ``identity`` gives the whole as JSON text, None while it is not known
        and raises when it never will be; ``trouble`` says why it no longer holds, without waiting, or nothing;
        ``open_allowance`` (seconds) is how long requests may wait for *opening*."""
        self._own_identity = own_identity
        self._identity = identity
        self._trouble = trouble
        self._checked = clock()
        self._selection = selection
        self._world = world
        self._allowance = open_allowance
        self._clock = clock
        self._opening_since = 0.0
        self._shakes: list[Handshake] | None = None
        self.phase = PENDING
        self.why_off = ""
        self.reason = MissReason.IDENTITY_PENDING  # of the misses, while it is not open
        self.identity_text = ""
        self.masks: list[bytes] = []
        self.ranks: list[int] = []
        self.readers: list[list[int]] = []  # ranks that hold each part, in the order of masks
        self.block_bytes = 0  # KV of one block, of all parts together

    @property
    def store(self) -> UcmKVStoreBaseV1 | None:
        """The scheduler half's store, for lookups only."""
        return self._selection.store

    @property
    def store_label(self) -> str:
        """Which of the configured stores that is, and of which tiers."""
        return self._selection.label

    def off(self, why: str, reason: MissReason = MissReason.DISABLED) -> None:
        """Switch the cache off for the life of this engine."""
        if self.phase != OFF:
            self.phase, self.why_off, self.reason = OFF, why, reason
            logger.warning("the cache is off: %s", why)

    def shake(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Every worker's word, keyed by (pipeline rank, tensor rank): parts, shapes, identities that must agree."""
        shakes = [metadata[rank] for rank in sorted(metadata)]
        if any(not isinstance(shake, Handshake) or shake.version != VERSION for shake in shakes):
            return self.off("the workers run another version of ucm than the scheduler")
        if len(shakes) != self._world:
            return self.off(f"{len(shakes)} of {self._world} workers answered the handshake")
        for rank, shake in zip(sorted(metadata), shakes, strict=True):
            where = f"rank pp{rank[0]} tp{rank[1]}"
            if shake.problem:
                return self.off(f"{where}: {shake.problem}")
            if tuple(shake.stores) != self._selection.names:
                theirs, ours = ", ".join(shake.stores), ", ".join(self._selection.names)
                return self.off(f"{where} is configured for other stores ({theirs}) than the scheduler ({ours})")
            if differing := difference(self._own_identity, shake.identity):
                return self.off(f"{where} and the scheduler disagree on the identity: {'; '.join(differing)}")
        self._shakes = shakes
        self.ranks = [shake.rank for shake in shakes]
        parts = {shake.part: shake for shake in shakes}
        self.masks = [part_mask(*part) for part in parts]
        self.readers = [[shake.rank for shake in shakes if shake.part == part] for part in parts]
        self.block_bytes = sum(int(shake.shapes.get("block_size", 0)) for shake in parts.values())
        self.poll()

    def poll(self) -> None:
        """Move on if something has become known."""
        if self.phase == PENDING and self._shakes is not None:
            try:
                text = self._identity()
            except Exception as error:
                return self.off(f"the identity cannot be known: {error}", MissReason.IDENTITY_UNKNOWN)
            if text is not None:
                self._open(text, self._shakes[0])
        if self.phase == OPENING:
            self._selection.poll()
            if self._selection.failed:
                self.off(f"the store: {self._selection.failed}")
            elif self._selection.chosen:
                self.phase = OPEN
                took = self._clock() - self._opening_since
                logger.info("the cache is open on %d rank(s), after %.0f ms", self._world, took * 1e3)

    def recheck(self) -> None:
        """Now and then: whether the identity still holds. Does not wait."""
        now = self._clock()
        if self.phase in (OPENING, OPEN) and now - self._checked > RECHECK_S:
            self._checked = now
            if trouble := self._trouble():
                self.off(trouble, MissReason.IDENTITY_UNKNOWN)

    def _open(self, text: str, shake: Handshake) -> None:
        self.phase, self.identity_text, self._opening_since = OPENING, text, self._clock()
        self.reason = MissReason.UNHEALTHY  # if it takes too long
        self._selection.begin(text, shake.shapes | {"identity": text, "part": shake.part, "device_id": -1})

    def take_setup(self) -> StoreSetup | None:
        """What the workers open their stores with: once, in the first plan after it is known, and again for every
        further store that is tried."""
        return self._selection.take_setup() if self.phase == OPENING else None

    def report(self, rank: RankReport) -> None:
        """A rank's news about its store."""
        if rank.broken:
            self.off(f"rank {rank.rank}: {rank.broken}")
        elif self.phase == OPENING:
            self._selection.report(rank)

    def worth_waiting(self) -> bool:
        """Whether the stores are being opened and have not taken too long: requests wait for that, once."""
        return self.phase == OPENING and self._clock() - self._opening_since < self._allowance

    def busy(self) -> bool:
        """Whether an idle engine should go on stepping, because the stores are being opened."""
        return self.worth_waiting() or (self.phase == OPENING and self._selection.trying)
