"""Whether the cache may be used: the phases from the start of an engine until its stores are open.

*pending*: the workers have not answered, or the weights' digest is not known. *opening*: the
identity is known, the stores of the scheduler side and of every rank are being opened in the
background. *open*: lookups, loads and dumps are possible. *off*: the cache stays unused, for a
reason that was logged. Nothing here blocks: :meth:`Readiness.poll` is called once per step and
moves on when it can.

When vLLM's own prefix cache is emptied, a new *generation* begins: the weights in memory may have
been replaced. With the next request every rank compares its weights with what it knew. If they are
unchanged, the cache is used as before; otherwise the identity is computed again and the phase is
pending once more. Until then nothing is looked up, loaded or dumped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ucm.integration.vllm.connector.guard import logger
from ucm.integration.vllm.connector.identity.engine_identity import difference
from ucm.integration.vllm.connector.identity.weights_report import WeightsReport
from ucm.integration.vllm.connector.metadata import Handshake, RankReport, StoreSetup
from ucm.integration.vllm.connector.scheduler.store_selection import StoreSelection
from ucm.reasons import MissReason
from ucm.store import part_mask
from ucm.store.factory import why_unavailable
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

PENDING, OPENING, OPEN, OFF = "pending", "opening", "open", "off"

#: Seconds between two looks at the files the identity was made from.
RECHECK_S = 10.0
#: Seconds that requests may wait for the ranks' report about their weights and what follows from
#: it.
WEIGHTS_CHECK_S = 2.0


class Identity(Protocol):
    """What readiness needs of the engine's identity."""

    def text(self) -> str | None:
        """As JSON, None while it is not known; raises when it never will be."""

    def why_invalid(self) -> str:
        """Why it no longer holds, or nothing; does not wait."""

    def forget(self) -> None:
        """Be another one from the next :meth:`update` on, for the life of this engine."""

    def update(self, reports: list[WeightsReport]) -> bool:
        """Every rank has compared the weights in its memory: whether the identity is another one
        now."""


class Readiness:
    """The phase of one engine's cache."""

    def __init__(
        self,
        *,
        own_identity: Mapping[str, Any],
        identity: Identity,
        selection: StoreSelection,
        world: int,
        open_allowance: float,
        why_not_reusable: Callable[[bool], str] = lambda _workers: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``own_identity`` is without weights; ``open_allowance`` (seconds) is how long requests
        may wait for the workers' first answer and for *opening*; ``why_not_reusable``: why no
        request may continue from stored blocks, given whether every worker caches prefixes."""
        self._own_identity = own_identity
        self._identity = identity
        self._checked = clock()
        self._selection = selection
        self._world = world
        self._allowance = open_allowance
        self._why_not_reusable = why_not_reusable
        self._clock = clock
        self._pending_since: float | None = None  # the first step, or the first request
        self._opening_since = 0.0
        self._unusable: set[int] = set()  # ranks whose store reports that it fails for now
        self._open_logged = False  # since the stores were opened last
        self._handshakes: Sequence[Handshake] | None = None
        self.phase = PENDING
        self.generation = 0
        self.weights_confirmed = (
            False  # whether the weights in memory are those of the identity, in this generation
        )
        self._emptied = False  # vLLM's cache, at its beginning
        self._weights_reports: dict[int, WeightsReport] = {}  # of this generation, by rank
        self._check_wanted = False  # the ranks are to be asked with the next plan
        self._check_asked_at: float | None = None
        self.why_off = ""
        self.reason = MissReason.IDENTITY_PENDING  # of the misses, while it is not open
        self.identity_text = ""
        self.masks: list[bytes] = []
        self.ranks: list[int] = []
        self.readers: list[list[int]] = []  # ranks that hold each part, in the order of masks
        self.block_bytes = 0  # KV of one block, of all parts together

    @property
    def store(self) -> UcmKVStoreBaseV1 | None:
        """The scheduler side's store, for lookups only."""
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

    def handshake(self, handshakes: Sequence[Handshake]) -> None:
        """The handshakes of all workers, from their first reports: parts, shapes, identities that
        must agree."""
        handshakes = sorted(handshakes, key=lambda handshake: handshake.rank)
        if len(handshakes) != self._world:
            return self.off(f"{len(handshakes)} of {self._world} workers answered the handshake")
        for handshake in handshakes:
            where = f"rank {handshake.rank}"
            if handshake.problem:
                return self.off(f"{where}: {handshake.problem}")
            if tuple(handshake.stores) != self._selection.names:
                theirs, ours = ", ".join(handshake.stores), ", ".join(self._selection.names)
                return self.off(
                    f"{where} is configured for other stores ({theirs}) than the scheduler ({ours})"
                )
            if differing := difference(self._own_identity, handshake.identity):
                return self.off(
                    f"{where} and the scheduler disagree on the identity: {'; '.join(differing)}"
                )
        if why := self._why_not_reusable(all(handshake.prefix_caching for handshake in handshakes)):
            return self.off(why, MissReason.UNSUPPORTED)
        self._handshakes = handshakes
        self.ranks = [handshake.rank for handshake in handshakes]
        parts = {handshake.part: handshake for handshake in handshakes}
        self.masks = [part_mask(*part) for part in parts]
        self.readers = [
            [handshake.rank for handshake in handshakes if handshake.part == part] for part in parts
        ]
        self.block_bytes = sum(
            int(handshake.shapes.get("block_size", 0)) for handshake in parts.values()
        )
        self.poll()

    def begin_generation(self, emptied: bool, *, forget: bool = False) -> None:
        """A new generation: from here on the weights in memory may have been replaced.

        ``emptied``: vLLM emptied its cache, as it is told to when weights are replaced; otherwise
        it was empty. ``forget``: nothing that was stored before is found in the new generation, nor
        later in this engine's life.
        """
        if forget:
            self._identity.forget()
        self.generation += 1
        self._emptied = emptied
        self.weights_confirmed, self._weights_reports, self._check_wanted, self._check_asked_at = (
            False,
            {},
            False,
            None,
        )
        # it may become known again
        if self.phase == OFF and self.reason == MissReason.IDENTITY_UNKNOWN:
            self.phase = PENDING
        if self.phase == PENDING:
            self.reason = MissReason.IDENTITY_PENDING

    def request_weights_check(self) -> None:
        """A request is about to be computed: have the ranks look at their weights, if they have
        not."""
        if not self.weights_confirmed and self._check_asked_at is None:
            self._check_wanted, self._check_asked_at = True, self._clock()

    def take_weights_check(self) -> int | None:
        """The generation that the ranks are to be asked about in this plan, once."""
        wanted, self._check_wanted = self._check_wanted, False
        return self.generation if wanted else None

    def _on_weights_report(self, rank: int, report: WeightsReport) -> None:
        if report.generation != self.generation or self.weights_confirmed:
            return
        if report.unchanged is None:  # then only a reset counts as a change
            report = replace(report, unchanged=not self._emptied)
        self._weights_reports[rank] = report
        if len(self._weights_reports) < self._world:
            return
        self.weights_confirmed = True
        if (
            self._identity.update(
                [self._weights_reports[rank] for rank in sorted(self._weights_reports)]
            )
            and self.phase != OFF
        ):
            self.phase, self.reason = PENDING, MissReason.IDENTITY_PENDING
        self.poll()

    def poll(self) -> None:
        """Move on if something has become known."""
        if self._pending_since is None:
            self._pending_since = self._clock()
        if (
            self.phase == PENDING
            and self._handshakes is not None
            and (self.weights_confirmed or self.generation == 0)
        ):
            try:
                text = self._identity.text()
            except Exception as error:
                return self.off(
                    f"the identity cannot be known: {error}", MissReason.IDENTITY_UNKNOWN
                )
            if text is not None:
                self._open(text, self._handshakes)
        if self.phase == OPENING:
            self._selection.poll()
            if self._selection.failed:
                self.off(f"the store: {self._selection.failed}")
            elif self._selection.chosen:
                self.phase = OPEN
                self._log_open()

    def _log_open(self) -> None:
        """Log once that the cache is open: when every store can be used. Another one logs why
        not."""
        store = self._selection.store
        if self._open_logged or self._unusable or store is None or why_unavailable(store):
            return
        self._open_logged = True
        took = self._clock() - self._opening_since
        logger.info("the cache is open on %d rank(s), after %.0f ms", self._world, took * 1e3)

    def recheck(self) -> None:
        """Now and then: whether the identity still holds. Does not wait."""
        now = self._clock()
        if self.phase in (OPENING, OPEN) and now - self._checked > RECHECK_S:
            self._checked = now
            if why := self._identity.why_invalid():
                self.off(why, MissReason.IDENTITY_UNKNOWN)

    def _open(self, text: str, handshakes: Sequence[Handshake]) -> None:
        self.phase, self.identity_text, self._opening_since = OPENING, text, self._clock()
        self._open_logged = False
        self.reason = MissReason.UNHEALTHY  # if it takes too long
        first = handshakes[0]
        setup = first.shapes | {"identity": text, "part": first.part, "device_id": -1}
        if others := _other_sizes(handshakes):
            setup["parts"] = others
        self._selection.begin(text, setup)

    def take_setup(self) -> StoreSetup | None:
        """What the workers open their stores with: once, in the first plan after it is known, and
        again for every further store that is tried."""
        return self._selection.take_setup() if self.phase == OPENING else None

    def report(self, rank: RankReport) -> None:
        """A rank's news about its weights and its store."""
        if rank.weights is not None:
            self._on_weights_report(rank.rank, rank.weights)
        if rank.broken:
            self.off(f"rank {rank.rank}: {rank.broken}")
            return
        (self._unusable.discard if rank.healthy else self._unusable.add)(rank.rank)
        if self.phase == OPENING:
            self._selection.report(rank)
        elif self.phase == OPEN:
            self._log_open()

    def worth_waiting(self) -> bool:
        """Whether the workers' first answer is still to come, the ranks are looking at their
        weights, or the stores are being opened, and it has not taken too long: requests wait for
        that, once."""
        now = self._clock()
        if self.phase == PENDING and self._handshakes is None:
            return self._pending_since is None or now - self._pending_since < self._allowance
        if self.phase == OPENING:
            return now - self._opening_since < self._allowance
        checking = (self.phase == OPEN and not self.weights_confirmed) or (
            self.phase == PENDING and self.generation > 0
        )
        return (
            checking
            and self._check_asked_at is not None
            and now - self._check_asked_at < WEIGHTS_CHECK_S
        )

    def busy(self) -> bool:
        """Whether an idle engine should go on stepping: workers answer in steps, and stores are
        being opened."""
        if self.phase == PENDING:
            return self._handshakes is None and self.worth_waiting()
        return self.phase == OPENING and (self.worth_waiting() or self._selection.trying)


def _other_sizes(handshakes: Sequence[Handshake]) -> list[dict[str, Any]]:
    """The sizes of the ranks' blocks other than those of the first, each once, with a part that has
    them."""
    keys = ("tensor_size", "tensor_size_list", "shard_size", "block_size")
    found: list[tuple[dict[str, Any], tuple[int, int, int]]] = []
    for handshake in handshakes:
        sizes = {key: handshake.shapes[key] for key in keys if key in handshake.shapes}
        if all(sizes != known for known, _ in found):
            found.append((sizes, handshake.part))
    return [sizes | {"part": part} for sizes, part in found[1:]]
