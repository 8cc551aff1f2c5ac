"""Chooses one of several configured stores: the first that all processes of the engine can open and
that answers.

The scheduler side decides. It opens a store for itself, then has every rank open the same one, and
takes the next when any of them cannot; so all use one store or none. A single store is used without
a trial: it retries by itself when it does not answer, and answers with misses meanwhile. When none
of several is available they are tried again, every :data:`RETRY_S`, as long as there are requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ucm.integration.vllm.connector.background import IDLE, Background
from ucm.integration.vllm.connector.configured_stores import ConfiguredStore
from ucm.integration.vllm.connector.guard import logger, throttle
from ucm.integration.vllm.connector.metadata import RankReport, StoreSetup
from ucm.store.factory import why_unavailable
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

#: Between two rounds through all stores when none was available, in seconds.
RETRY_S = 10.0


class StoreSelection:
    """The choice of the scheduler side. Never waits; :meth:`poll` moves on when it can."""

    def __init__(
        self,
        stores: Sequence[ConfiguredStore],
        world: int,
        background: Background,
        allowance: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``allowance``: seconds in which a store is opened, here and again on the ranks (twice
        that is waited for)."""
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
        self._opening: set[int] = set()  # numbers of stores whose constructor has not returned
        self._result: tuple[int, UcmKVStoreBaseV1 | None, str] | None = None
        self._setup: StoreSetup | None = None
        self._ready: set[int] = set()
        self.store: UcmKVStoreBaseV1 | None = None  # the scheduler side's own, for lookups
        self.failed = (
            ""  # why there will never be a store: there is but one, and it cannot be opened
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The stores' names, which every rank's must equal."""
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
        """What the chosen store is, in words that are the same after a restart; the configured path
        is not in it."""
        tiers = self.store.tier_names if self.store is not None else ()
        return " ".join([f"{self._choice}: {self._stores[self._choice].name}", *tiers])

    @property
    def trying(self) -> bool:
        """Whether an answer is on its way for which an idle engine should go on stepping."""
        return (
            self.several
            and self._choice >= 0
            and not self.chosen
            and self._clock() - self._since <= self._limit
        )

    def begin(self, identity: str, shapes: Mapping[str, Any]) -> None:
        """Start with the first, also anew for another identity. ``shapes``: what this half's store
        is told beside its configuration."""
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
                why = why_unavailable(store) if self.several else ""
            except BaseException as error:  # told by the next poll
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
        """What the ranks open now: once for each attempt."""
        setup, self._setup = self._setup, None
        if setup is not None:
            self._since = self._clock()
        return setup

    def poll(self) -> None:
        """Move on if something has become known, or has taken too long."""
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
            who = (
                "the scheduler side" if self.store is None else f"of {self._world} ranks {missing}"
            )
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
                before = "; ".join(
                    f"not {self._stores[at].where}: {self._why[at]}" for at in range(self._choice)
                )
                where = self._stores[self._choice].where
                logger.info(
                    "of %d stores the first available is used: %s%s",
                    len(self._stores),
                    where,
                    f" ({before})" if before else "",
                )

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
        self._retry_at = self._clock() + RETRY_S
        whys = "; ".join(f"{each.where}: {self._why[at]}" for at, each in enumerate(self._stores))
        throttle.warning(
            "no store", "no store is available, requests are computed; tried again soon: %s", whys
        )
