"""Whether a rank's store is healthy: checked on the rank, sent with its report (see
:mod:`..scheduler.rank_health`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ucm.integration.vllm.connector.guard import throttle
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

#: Between two looks at a store that is unhealthy, in seconds. The store's breaker decides how soon
#: it is tried.
LOOK_S = 0.5
#: Asked for to see whether a store answers; no block has this id.
_NO_BLOCK = bytes(16)


def _thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="ucm-health", daemon=True).start()


class StoreHealth:
    """One rank's store. Asked when something failed; while it is unhealthy a thread looks again and
    again.

    Only a request to the store can close its breaker, and no others arrive: no loads are planned
    for this rank, and an idle engine does nothing at all.
    """

    def __init__(
        self, pause: float = LOOK_S, spawn: Callable[[Callable[[], None]], None] = _thread
    ) -> None:
        """``pause``: seconds between two looks; ``spawn`` runs a function that takes long."""
        self._pause, self._spawn = pause, spawn
        self._stop = threading.Event()
        self._watching = False
        self.healthy = True

    def check(self, store: UcmKVStoreBaseV1) -> None:
        """Something failed, or it was unhealthy before: ask the store, without waiting. Never
        raises."""
        if self._watching or self._stop.is_set():
            return
        self.healthy = _says(store)
        if self.healthy:
            return
        self._watching = True
        try:
            self._spawn(lambda: self._watch(store))
        except Exception as error:  # no thread to be had: tried again with the next step
            self._watching = False
            throttle.warning("health", "an unhealthy store cannot be watched: %r", error)

    def look(self, store: UcmKVStoreBaseV1) -> bool:
        """Ask the store for something, as its breaker wants it, and whether it is healthy now. May
        wait."""
        try:
            store.lookup([_NO_BLOCK])
        except Exception as error:
            throttle.warning("health", "an unhealthy store was asked again: %s", error)
        self.healthy = _says(store)
        return self.healthy

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._stop.set()

    def _watch(self, store: UcmKVStoreBaseV1) -> None:
        try:
            while not self._stop.wait(self._pause) and not self.look(store):
                pass
        finally:
            self._watching = False


def _says(store: UcmKVStoreBaseV1) -> bool:
    try:
        return bool(store.healthy())
    except (
        Exception
    ) as error:  # closed, or a bug of the store: its loads fail with reasons of their own
        throttle.warning("health", "the store's healthy() failed: %r", error)
        return True
