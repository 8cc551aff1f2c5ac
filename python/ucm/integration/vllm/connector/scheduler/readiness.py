"""Whether the cache may be used: the phases from the start of an engine until its stores are open.

*pending*: the workers have not answered, or the weights' digest is not known. *opening*: the
identity is known, the stores of the scheduler side and of every rank are being opened in the
background. *open*: lookups, loads and dumps are possible. *off*: the cache stays unused, for a
reason that was logged. Nothing here blocks: :meth:`Readiness.poll` is called once per step.

When vLLM's own prefix cache is emptied, a new *generation* begins: the weights in memory may have
been replaced. With the next request every rank compares its weights with its fingerprint. If they
are unchanged, the cache is used as before; otherwise the identity is computed again and the phase
is pending once more. Until then nothing is looked up, loaded or dumped.

:class:`StoreSelection` chooses one of several configured stores: the first that all processes of
the engine can open and that answers. The scheduler side opens a store for itself, then has every
rank open the same one, and takes the next when any of them cannot. A single store is used without a
trial: it retries by itself when it does not answer, and answers with misses until then. When none
of several is available they are tried again, every :data:`RETRY_S`, as long as there are requests.

:class:`RankHealth` holds whether the ranks' stores are healthy. The scheduler side's own store may
answer while a rank's breaker is open. A hit claimed then is a load that fails and a detour for its
request, so while any rank is unhealthy no hit is claimed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ucm import __version__
from ucm.integration.vllm.connector.guard import IDLE, Background, logger, throttle
from ucm.integration.vllm.connector.identity.engine_identity import differences
from ucm.integration.vllm.connector.identity.weights import WeightsReport
from ucm.integration.vllm.connector.metadata import Handshake, RankReport, StoreSetup
from ucm.integration.vllm.connector.stores import ConfiguredStore, layout_and_tiers
from ucm.reasons import MissReason
from ucm.store import part_mask
from ucm.store.factory import remedy, why_unavailable
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

# Health of the ranks' stores
# --------------------------------------------------------------------------------------------------

#: Seconds for which a report of an unhealthy rank counts: an idle engine gets no other.
STALE_S = 1.0


class RankHealth:
    """What the scheduler side knows of the ranks' stores."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unhealthy: dict[int, float] = {}  # rank -> time of its last report

    def report(self, rank: int, healthy: bool) -> None:
        """A rank reports whether its store is healthy."""
        if healthy:
            if self._unhealthy.pop(rank, None) is not None:
                logger.info("rank %d: its store can be used", rank)
            return
        if rank not in self._unhealthy:
            logger.warning(
                "rank %d: its store cannot be used (its own message says why), so every request is "
                "computed and nothing is stored until it can",
                rank,
            )
        self._unhealthy[rank] = self._clock()

    @property
    def all_healthy(self) -> bool:
        """Whether every rank's store is healthy, as far as is known."""
        return not self._unhealthy

    @property
    def stale(self) -> bool:
        """Whether the last report of some unhealthy rank is old: the next step brings a new one."""
        return any(self._clock() - at > STALE_S for at in self._unhealthy.values())


# Choice of the store
# --------------------------------------------------------------------------------------------------

#: Between two rounds through all stores when none was available, in seconds; the second where each
#: has a directory that only its owner can mend.
RETRY_S, UNUSABLE_S = 10.0, 60.0


class StoreSelection:
    """The choice of the scheduler side. Never waits."""

    def __init__(
        self,
        stores: Sequence[ConfiguredStore],
        world: int,
        background: Background,
        allowance: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``allowance``: seconds to open a store, here and again on the ranks (the limit is twice
        that)."""
        self._stores = list(stores)
        self._world = world
        self._background = background
        self._limit = 2 * allowance
        self._clock = clock
        self._identity = ""
        self._shapes: dict[str, Any] = {}
        self._attempt = 0
        self._choice = -1  # none is being tried
        self._since = 0.0
        self._retry_at = 0.0
        self._why: dict[int, str] = {}
        self._opening: set[int] = set()  # stores whose constructor has not returned
        self._result: tuple[int, UcmKVStoreBaseV1 | None, str] | None = None
        self._setup: StoreSetup | None = None
        self._ready: set[int] = set()
        self.store: UcmKVStoreBaseV1 | None = None  # the scheduler side's own, for lookups
        self.layout_and_tiers = ("", "")  # how blocks lie on it, and its tiers
        self.failed = ""  # why there will never be a store: the only one cannot be opened

    @property
    def names(self) -> tuple[str, ...]:
        """The stores' names, which must be the same on every rank."""
        return tuple(each.name for each in self._stores)

    @property
    def several(self) -> bool:
        """Whether there is a choice."""
        return len(self._stores) > 1

    @property
    def chosen(self) -> bool:
        """Whether every process of the engine has opened the same store."""
        return self.store is not None and len(self._ready) == self._world

    @property
    def label(self) -> str:
        """The chosen store, in words that are the same after a restart; without the configured
        path."""
        tiers = self.store.tier_names if self.store is not None else ()
        return " ".join([f"{self._choice}: {self._stores[self._choice].name}", *tiers])

    @property
    def where(self) -> str:
        """The chosen store as it is configured, with its tiers, for the log."""
        tiers = ", ".join(self.store.tier_names) if self.store is not None else ""
        where = self._stores[self._choice].where
        return f"{where} ({tiers})" if tiers else where

    @property
    def trying(self) -> bool:
        """Whether an idle engine should go on stepping for an answer."""
        trying = self.several and self._choice >= 0 and not self.chosen
        return trying and self._clock() - self._since <= self._limit

    def begin(self, identity: str, shapes: Mapping[str, Any]) -> None:
        """Start with the first, also again for another identity. ``shapes``: keys of this side's
        store beside its configuration."""
        self._close(self.store)
        self._identity, self._shapes, self.failed = identity, dict(shapes), ""
        self._try(0)

    def _try(self, choice: int) -> None:
        while choice < len(self._stores) and choice in self._opening:
            self._why[choice] = "an earlier attempt to open it has not returned"
            choice += 1
        self.store, self._setup, self._ready, self._choice = None, None, set(), -1
        if choice == len(self._stores):
            return self._none()
        configured = self._stores[choice]
        self._attempt, self._choice, self._since = self._attempt + 1, choice, self._clock()
        attempt, config = self._attempt, dict(configured.config) | self._shapes
        if not self.several:
            self._offer()
        self._opening.add(choice)

        def work() -> None:
            store, why = None, ""
            try:
                store = configured.make(config)
                self.layout_and_tiers = layout_and_tiers(config, store)
                why = why_unavailable(store) if self.several else ""
            except BaseException as error:  # reported by the next poll
                why = f"it cannot be opened: {error}"
            self._opening.discard(choice)
            if attempt == self._attempt:
                self._result = (attempt, store, why)
            elif store is not None:
                store.close()

        if not self._background.submit(work):
            self._opening.discard(choice)
            self._result = (attempt, None, "no background thread is free to open it")

    def _offer(self) -> None:
        """Have the ranks open the same one."""
        config = dict(self._stores[self._choice].config)
        self._setup = StoreSetup(self._identity, config, self._choice, self._attempt, self.several)

    def take_setup(self) -> StoreSetup | None:
        """The setup for the ranks: once for each attempt."""
        setup, self._setup = self._setup, None
        if setup is not None:
            self._since = self._clock()
        return setup

    def poll(self) -> None:
        """Go on if a result is there, or an attempt takes too long."""
        if self._choice < 0:
            if self._attempt and self._clock() >= self._retry_at:
                self._try(0)
            return None
        result, self._result = self._result, None
        if result is not None and result[0] != self._attempt:
            self._close(result[1])
        elif result is not None:
            _, store, why = result
            if why or store is None:
                return self._reject(why, store)
            self.store = store
            if self.several:
                self._offer()
        elif self.several and not self.chosen and self._clock() - self._since > self._limit:
            missing = sorted(set(range(self._world)) - self._ready)
            own = self.store is None
            who = "the scheduler side" if own else f"of {self._world} ranks {missing}"
            self._reject(f"{who} did not open it within {self._limit:g} s", self.store)

    def report(self, rank: RankReport) -> None:
        """A rank's news of its store."""
        if self._choice < 0 or rank.attempt != self._attempt:
            return None
        if rank.unavailable:
            return self._reject(f"rank {rank.rank}: {rank.unavailable}", self.store)
        if rank.ready and rank.rank not in self._ready:
            self._ready.add(rank.rank)
            if self.several and self.chosen:
                tried, chosen = self._stores[: self._choice], self._stores[self._choice].where
                whys = "; ".join(
                    f"not {one.where}: {self._why[at]}" for at, one in enumerate(tried)
                )
                text, before = "of %d stores the first available is used: %s%s", f" ({whys})"
                logger.info(text, len(self._stores), chosen, before if whys else "")

    def _close(self, store: UcmKVStoreBaseV1 | None) -> None:
        if store is not None:
            self._background.submit(store.close, IDLE)

    def _reject(self, why: str, store: UcmKVStoreBaseV1 | None) -> None:
        self._close(store)
        if not self.several:
            self.failed, self._choice = why, -1
            self._retry_at = float("inf")
            return
        self._why[self._choice] = why
        self._try(self._choice + 1)

    def _none(self) -> None:
        lasting = all(remedy(self._why[at]) for at in range(len(self._stores)))
        self._retry_at = self._clock() + (UNUSABLE_S if lasting else RETRY_S)
        whys = "; ".join(f"{each.where}: {self._why[at]}" for at, each in enumerate(self._stores))
        throttle.warning(
            "no store", "no store is available, requests are computed; tried again: %s", whys
        )


# Phases
# --------------------------------------------------------------------------------------------------

PENDING, OPENING, OPEN, OFF = "pending", "opening", "open", "off"

#: Seconds between two checks of the files of the identity.
RECHECK_S = 10.0


class Identity(Protocol):
    """What readiness needs of the engine's identity."""

    def text(self) -> str | None:
        """As JSON, None while it is not known; raises when it cannot be known."""

    def why_invalid(self) -> str:
        """Why it no longer holds, else empty; does not wait."""

    def forget(self) -> None:
        """Be another one from the next :meth:`update` on, for the life of this engine."""

    def update(self, reports: list[WeightsReport]) -> bool:
        """Every rank has compared the weights in its memory: whether the identity has changed."""


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
        """``own_identity`` is without weights; ``open_allowance``: seconds that requests may wait
        for the workers, for their weights' check and for *opening*; ``why_not_reusable``: why no
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
        # whether the weights in memory are those of the identity, in this generation
        self.weights_confirmed = False
        self._emptied = False  # vLLM's cache, at its beginning
        self._weights_reports: dict[int, WeightsReport] = {}  # of this generation, by rank
        self._check_wanted = False  # the next plan requests a check of the ranks
        self._check_asked_at: float | None = None
        self.why_off = ""
        self.reason = MissReason.IDENTITY_PENDING  # of the misses, while it is not open
        self.identity_text = ""
        self.info = ""  # of the stores, while they are open: values of the labels of ``ucm_info``
        self.masks: list[bytes] = []
        self.ranks: list[int] = []
        self.readers: list[list[int]] = []  # ranks that hold each part, in the order of masks
        self.block_bytes = 0  # KV of one block, of all parts together
        self.group_bytes: list[int] = []  # by KV group
        self.writers = 0  # ranks that write
        self._parts: dict[tuple[int, int, int], dict[str, Any]] = {}  # with their shapes

    @property
    def store(self) -> UcmKVStoreBaseV1 | None:
        """The scheduler side's store, for lookups only."""
        return self._selection.store

    @property
    def store_label(self) -> str:
        """Which of the configured stores that is, and its tiers."""
        return self._selection.label

    def off(self, why: str, reason: MissReason = MissReason.DISABLED) -> None:
        """Switch the cache off for the life of this engine."""
        if self.phase != OFF:
            self.phase, self.why_off, self.reason, self.info = OFF, why, reason, ""
            logger.warning("the cache is off: %s", why)

    def handshake(self, handshakes: Sequence[Handshake]) -> None:
        """The handshakes of all workers, from their first reports: parts, shapes, identities must
        agree."""
        handshakes = sorted(handshakes, key=lambda handshake: handshake.rank)
        if len(handshakes) != self._world:
            return self.off(f"{len(handshakes)} of {self._world} workers answered the handshake")
        for handshake in handshakes:
            where = f"rank {handshake.rank}"
            if handshake.problem:
                return self.off(f"{where}: {handshake.problem}")
            if tuple(handshake.stores) != self._selection.names:
                theirs, ours = ", ".join(handshake.stores), ", ".join(self._selection.names)
                others = f"other stores ({theirs}) than the scheduler ({ours})"
                return self.off(f"{where} is configured for {others}")
            if differing := "; ".join(differences(self._own_identity, handshake.identity)):
                return self.off(f"{where} and the scheduler disagree on the identity: {differing}")
        if why := self._why_not_reusable(all(handshake.prefix_caching for handshake in handshakes)):
            return self.off(why, MissReason.UNSUPPORTED)
        self._handshakes = handshakes
        self.ranks = [handshake.rank for handshake in handshakes]
        readers: dict[tuple[int, int, int], list[int]] = {}
        self._parts = {}
        for handshake in handshakes:
            for part, shapes in ((handshake.part, handshake.shapes), *handshake.rest):
                self._parts[part] = shapes
                readers.setdefault(part, []).append(handshake.rank)
        self.masks = [part_mask(*part) for part in self._parts]
        self.readers = list(readers.values())
        self.writers = sum(handshake.writer for handshake in handshakes)
        sizes = {part: int(shapes.get("block_size", 0)) for part, shapes in self._parts.items()}
        self.block_bytes = sum(sizes.values())
        self.group_bytes = [0] * (1 + max(group for group, _, _ in sizes))
        for (group, _, _), size in sizes.items():
            self.group_bytes[group] += size
        self.poll()

    def parts_of_groups(self, groups: int) -> list[list[int]]:
        """For each KV group, which of the masks are those of its parts."""
        parts = list(self._parts)
        return [[at for at, part in enumerate(parts) if part[0] == one] for one in range(groups)]

    def begin_generation(self, emptied: bool, *, forget: bool = False) -> None:
        """A new generation: from here on the weights in memory may have been replaced.

        ``emptied``: vLLM emptied its cache, as after an order to replace weights; otherwise it was
        empty. ``forget``: nothing that was stored before is found in the new generation, nor later
        in this engine's life.
        """
        if forget:
            self._identity.forget()
        self.generation += 1
        self._emptied = emptied
        self.weights_confirmed, self._weights_reports = False, {}
        self._check_wanted, self._check_asked_at = False, None
        # it may become known again
        if self.phase == OFF and self.reason == MissReason.IDENTITY_UNKNOWN:
            self.phase = PENDING
        if self.phase == PENDING:
            self.reason = MissReason.IDENTITY_PENDING

    def request_weights_check(self) -> None:
        """A request is about to be computed: have the ranks check their weights, once in a
        generation."""
        if not self.weights_confirmed and self._check_asked_at is None:
            self._check_wanted, self._check_asked_at = True, self._clock()

    def take_weights_check(self) -> int | None:
        """The generation that the ranks are to check with this plan, once."""
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
        reports = [self._weights_reports[rank] for rank in sorted(self._weights_reports)]
        if self._identity.update(reports) and self.phase != OFF:
            self.phase, self.reason = PENDING, MissReason.IDENTITY_PENDING
        self.poll()

    def poll(self) -> None:
        """Go on to the next phase if possible."""
        if self._pending_since is None:
            self._pending_since = self._clock()
        confirmed = self.weights_confirmed or self.generation == 0
        if self.phase == PENDING and self._handshakes is not None and confirmed:
            try:
                text = self._identity.text()
            except Exception as error:
                why = f"the identity cannot be known: {error}"
                return self.off(why, MissReason.IDENTITY_UNKNOWN)
            if text is not None:
                self._open(text, self._handshakes)
        if self.phase == OPENING:
            self._selection.poll()
            if self._selection.failed:
                self.off(f"the store: {self._selection.failed}")
            elif self._selection.chosen:
                self.phase = OPEN
                digest = hashlib.sha256(self.identity_text.encode()).hexdigest()[:32]
                self.info = "|".join([__version__, digest, *self._selection.layout_and_tiers])
                self._log_open()

    def _log_open(self) -> None:
        """Log once that the cache is open: when every store can be used. Another one logs why
        not."""
        store = self._selection.store
        if self._open_logged or self._unusable or store is None or why_unavailable(store):
            return
        self._open_logged = True
        took = self._clock() - self._opening_since
        text = "the cache is open on %d rank(s), after %.0f ms: %s"
        logger.info(text, self._world, took * 1e3, self._selection.where)

    def recheck(self) -> None:
        """Now and then: whether the identity still holds. Does not wait."""
        now = self._clock()
        if self.phase in (OPENING, OPEN) and now - self._checked > RECHECK_S:
            self._checked = now
            if why := self._identity.why_invalid():
                self.off(why, MissReason.IDENTITY_UNKNOWN)

    def _open(self, text: str, handshakes: Sequence[Handshake]) -> None:
        self.phase, self.identity_text, self._opening_since = OPENING, text, self._clock()
        self.info = ""
        self._open_logged = False
        self.reason = MissReason.UNHEALTHY  # if it takes too long
        first = handshakes[0]
        setup = first.shapes | {"identity": text, "part": first.part, "device_id": -1}
        if others := _other_sizes(self._parts):
            setup["parts"] = others
        self._selection.begin(text, setup)

    def take_setup(self) -> StoreSetup | None:
        """The setup of the workers' stores: once when it is known, and for every further store that
        is tried."""
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
        """Whether the workers' first answer, the ranks' check of their weights or the opening of
        the stores is under way, and not for too long: requests wait for that, once."""
        now = self._clock()
        if self.phase == PENDING and self._handshakes is None:
            return self._pending_since is None or now - self._pending_since < self._allowance
        if self.phase == OPENING:
            return now - self._opening_since < self._allowance
        by_check = self.phase == PENDING and self.generation > 0
        checking = by_check or (self.phase == OPEN and not self.weights_confirmed)
        began = self._check_asked_at
        return checking and began is not None and now - began < self._allowance

    def busy(self) -> bool:
        """Whether an idle engine should go on stepping: workers answer in steps, and stores are
        opened."""
        if self.phase == PENDING:
            return self._handshakes is None and self.worth_waiting()
        return self.phase == OPENING and (self.worth_waiting() or self._selection.trying)


def _other_sizes(parts: Mapping[tuple[int, int, int], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sizes of parts other than those of the first, each once, with its part."""
    keys = ("tensor_size", "tensor_size_list", "shard_size", "block_size")
    found: list[tuple[dict[str, Any], tuple[int, int, int]]] = []
    for part, shapes in parts.items():
        sizes = {key: shapes[key] for key in keys if key in shapes}
        if all(sizes != known for known, _ in found):
            found.append((sizes, part))
    return [sizes | {"part": part} for sizes, part in found[1:]]
