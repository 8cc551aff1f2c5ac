"""The worker side: the KV tensors of one rank, its store, and the transfers between the two. No
request logic.

vLLM calls it from the model's thread, every step: loads start, the model runs, dumps start, and
what ended is reported. Nothing here waits: the store is opened on a thread of its own, and
transfers are polled.

Beside the transfers the store is sent hints: of ranks that hold the same bytes, the one that writes
them touches what is used and brings up what will be; the others read its memory, and touch what
they hold in memory of their own. An exception of such a call is logged and the hint is dropped.
Whether the store is healthy (:class:`StoreHealth`) and how much it holds goes with the rank's
report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ucm.config.fields import MAX_SIZE, Capacity
from ucm.errors import ConfigError, InvalidInputError
from ucm.integration.vllm.connector.guard import Failures, logger, throttle
from ucm.integration.vllm.connector.identity.weights import ModelMemory, WeightsReport
from ucm.integration.vllm.connector.metadata import (
    VERSION,
    Handshake,
    RankReport,
    StoreRoom,
    StoreSetup,
    UCMConnectorMetadata,
    UCMConnectorWorkerMetadata,
    join_keys,
)
from ucm.integration.vllm.connector.platforms import Platform
from ucm.integration.vllm.connector.stats import (
    DUMP_SECONDS,
    LOAD_SECONDS,
    LOADED_BYTES,
    PUBLISHED_BYTES,
    TierCounts,
)
from ucm.integration.vllm.connector.stores import ConfiguredStore
from ucm.integration.vllm.connector.worker.transfers import Dumps, LayeredStore, Loads, layer_bytes
from ucm.store import part_mask, record_ids
from ucm.store.factory import why_unavailable
from ucm.store.kv_layout import KVLayout
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.worker.sparse import SparseWorker


R = TypeVar("R")

#: Of the shutdown allowance, the seconds kept for closing the store.
CLOSE_S = 0.5
#: Below this many free slots every change is reported to the scheduler side.
_FEW_SLOTS = 256
#: Seconds between two reports of how much the store holds.
ROOM_S = 1.0


class UCMConnectorWorker:
    """One rank's worker side."""

    def __init__(
        self,
        *,
        rank: int,
        part: tuple[int, int, int],
        writer: bool,
        layers: Sequence[str],
        block_tokens: int,
        wanted_block_size: int | None,
        identity: Callable[[], dict[str, Any]],
        platform: Platform,
        stores: Sequence[ConfiguredStore],
        memory: ModelMemory | None = None,
        only_stores: str = "",
        prefix_caching: bool = True,
        sparse: SparseWorker | None = None,
        shutdown_allowance: float = 3.0,
        health: StoreHealth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wanted_block_size``: what the user wrote, tokens or bytes; ``identity`` gives this
        rank's identity without weights; ``memory``: the weights in memory, None where they cannot
        be reached; ``only_stores`` says why nothing may be loaded, if so; ``prefix_caching``:
        vLLM's flag in this process; ``sparse``: sparse attention on this rank;
        ``shutdown_allowance`` is in seconds."""
        self.rank = rank
        self.failures = Failures(f"rank {rank}", lambda _why: self.drop_step())
        self._memory = memory
        self._weights: WeightsReport | None = None  # to be reported
        self._part = part
        self._mask = part_mask(*part)
        self._writer = writer
        self._layers = layers
        self._block_tokens = block_tokens
        self._wanted_block_size = wanted_block_size
        self._identity = identity
        self._platform = platform
        self._stores = list(stores)
        self._only_stores = only_stores
        self._prefix_caching = prefix_caching
        self._shutdown_allowance = shutdown_allowance
        self._clock = clock
        self._layout: KVLayout | None = None
        self._problem = "vLLM registered no KV cache"
        self._store: UcmKVStoreBaseV1 | None = None
        self._opened: tuple[int, UcmKVStoreBaseV1] | None = None  # by the attempt it was opened for
        self._unavailable: tuple[int, str] = (0, "")
        self._attempt = 0
        self._broken = ""
        self._told_handshake = False
        self._told_ready = False
        self._told_healthy = True
        self._told_slots: int | None = -1
        self._told_blocks = (0, 0)
        self._prefetch_room = 0
        self._room_due = float("-inf")  # when the store's limit is to be reported
        self._plan: UCMConnectorMetadata | None = None
        self._closed = False
        self._sparse = sparse
        if sparse is not None:
            sparse.bind_store(lambda: self._store, self._mask)
        self.loads = Loads(clock)
        self.dumps = Dumps(clock)
        self.health = health or StoreHealth()
        self._tiers = TierCounts(clock, str(rank))

    # Start
    # ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where the KV lies, and how the weights look that were just loaded.

        Raises :class:`~ucm.errors.ConfigError` when the user wrote another block size.
        """
        if self._memory is not None:
            self._memory.remember()
        try:
            self._layout = KVLayout(caches, self._layers)
            self._problem = ""
        except InvalidInputError as error:
            self._problem = f"this KV layout cannot be addressed: {error}"
            return
        if (there := self._layout.device_type) != self._platform.device:
            self._problem = (
                f"the KV lies on {there}, not on {self._platform.device} as for"
                f" {self._platform.word}"
            )
            return
        wanted, size = self._wanted_block_size, self._layout.block_bytes
        if wanted not in (None, self._block_tokens, size):
            raise ConfigError(
                f"block_size is {wanted}, but a block of this engine has {self._block_tokens}"
                f" tokens and {size} bytes per rank; remove the key, or write one of the two"
            )

    def handshake(self) -> Handshake:
        """What the scheduler side must know of this rank."""
        shapes: dict[str, Any] = {}
        identity: dict[str, Any] = {}
        if self._layout is not None:
            shapes = self._layout.sizes() | {
                "block_tokens": self._block_tokens,
                "dtype": str(self._layout.dtype).removeprefix("torch."),
            }
            identity = self._identity()
        stores = tuple(store.name for store in self._stores)
        return Handshake(
            part=self._part,
            rank=self.rank,
            writer=self._writer,
            identity=identity,
            shapes=shapes,
            problem=self._problem,
            stores=stores,
            only_stores=self._only_stores,
            prefix_caching=self._prefix_caching,
        )

    def _open(self, setup: StoreSetup) -> None:
        layout = self._layout
        if layout is None:
            self._broken = self._problem
            return
        device = layout.device
        config = (
            setup.config
            | self.handshake().shapes
            | {
                "identity": setup.identity,
                "part": self._part,
            }
        )
        config["device_id"] = getattr(device, "index", None) or 0
        if self._sparse is not None and self._sparse.representations is not None:
            self.loads.representations = self._sparse.representations
            config["sides"] = self._sparse.representations.sides
        by_layer = self._sparse is not None and self._sparse.offload is not None
        if by_layer:
            config["shard_size"] = layer_bytes(layout)
        attempt, make = setup.attempt, self._stores[setup.choice].make
        # Another store was tried before this one, perhaps opened since the last step, or served
        # until the weights were replaced: what is under way on that one ends with it.
        self._take_opened()
        before, self._store, self._attempt = self._store, None, attempt
        self._told_ready = False

        def work() -> None:
            if before is not None:
                before.close()
            try:
                store = make(config)
                try:
                    store.register_kv(layout)
                    # It does all that a store does, as far as this side uses it.
                    served: Any = LayeredStore(store, layout) if by_layer else store
                except BaseException:
                    store.close()
                    raise
            except BaseException as error:
                # reported to the scheduler side, which switches off or takes the next
                if setup.trial:
                    self._unavailable = (attempt, f"it cannot be opened: {error}")
                else:
                    self._broken = f"the store cannot be opened: {error}"
                return
            if setup.trial and (why := why_unavailable(store)):
                self._unavailable = (attempt, why)
                store.close()
                return
            self._opened = (attempt, served)
            if self._closed or attempt != self._attempt:
                store.close()

        threading.Thread(target=work, name="ucm-open", daemon=True).start()

    def _take_opened(self) -> None:
        """Use the store that was opened, if it is the one that was asked for last."""
        opened = self._opened
        if self._store is None and opened is not None and opened[0] == self._attempt:
            self._store = opened[1]
            self._prefetch_room = prefetch_room(opened[1])

    # Steps
    # ----------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, plan: UCMConnectorMetadata) -> None:
        """The plan of the step that begins. What is left of the one before, begins first: with
        speculative decoding vLLM does not ask every pipeline rank to save, and a dump that no rank
        answers for is never over."""
        self.start_load_kv()
        self.start_dumps()
        if plan.flush_all:
            self.dumps.flush(None)
        self._plan = plan
        if plan.version != VERSION:
            self._broken = f"the scheduler speaks version {plan.version}, this rank {VERSION}"
            return
        if plan.jobs_to_flush:
            self._flush(plan)
        if plan.check_weights is not None:
            self._weights = self._compare_weights(plan.check_weights)
        if plan.setup is not None:
            self._open(plan.setup)
        self._take_opened()
        if self._store is not None:
            pass_hints(plan, self._store, self._mask, self._writer)

    def _flush(self, plan: UCMConnectorMetadata) -> None:
        """Have blocks read that vLLM has given to others, before this step writes them."""
        dumps = plan.dumps
        plan.dumps = [dump for dump in dumps if dump.job in plan.jobs_to_flush]
        self.start_dumps()
        plan.dumps = [dump for dump in dumps if dump.job not in plan.jobs_to_flush]
        self.dumps.flush(plan.jobs_to_flush)

    def drop_step(self) -> None:
        """Begin nothing more of the steps so far, and have the blocks of all dumps under way read:
        after an error it is not known which of them this step writes."""
        self._plan = None
        self.dumps.flush(None)

    def loads_under_way(self, *, look: bool) -> set[str]:
        """Requests whose loads are begun and may still write to device blocks, or are to begin; see
        :meth:`.transfers.Loads.under_way`."""
        planned = self._plan.loads if self._plan is not None else []
        return self.loads.under_way(look=look) | {load.request for load in planned}

    def _compare_weights(self, generation: int) -> WeightsReport:
        if self._memory is not None:
            return self._memory.compare(generation)
        return WeightsReport(generation, None, None, 0)

    def start_load_kv(self) -> None:
        """Begin this step's loads."""
        if self._plan is not None and self._plan.loads:
            loads, self._plan.loads = self._plan.loads, []
            for load in loads:
                self.loads.start(load, self._store, self._mask)

    def start_dumps(self) -> None:
        """Begin this step's dumps; the model's work of the step has been given to the device."""
        if self._plan is None or not self._plan.dumps:
            return
        dumps, self._plan.dumps = self._plan.dumps, []
        if not self._writer:
            for dump in dumps:
                self.dumps.skip(dump, self._store, self._mask)
            return
        store, event = self._store, (0, None)
        if store is not None and self._layout is not None:
            try:
                event = self._platform.mark(self._layout.device)
            except Exception as error:
                # it is not known when the blocks are written: none is stored
                throttle.warning("event", "no event was recorded, so nothing is stored: %r", error)
                store = None
        representations = None if self._sparse is None else self._sparse.representations
        self.dumps.start(dumps, store, self._mask, event, self._block_tokens, representations)

    def take_ended_loads(self) -> set[str]:
        """Requests whose load ended, each named once, failed ones too."""
        self.loads.poll()
        return self.loads.take_ended()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Device blocks a load did not fill."""
        return self.loads.take_bad_blocks()

    def build_connector_worker_meta(self) -> UCMConnectorWorkerMetadata | None:
        """News for the scheduler side, None when there are none."""
        self.dumps.poll()
        self._take_opened()
        unavailable = self._unavailable[1] if self._unavailable[0] == self._attempt else ""
        failures, served = self.loads.take_failures(), self.loads.take_served()
        ready = self._store is not None
        slots_changed, slots = self._slots()
        if self._store is not None and (
            failures or self.dumps.failed or not self.health.healthy or ready != self._told_ready
        ):
            self.health.check(self._store)
        healthy = self.health.healthy
        gained, lost = (b"", b"") if self._store is None else take_locally_visible(self._store)
        # While it is not, every step says so: the scheduler side goes by the age of the last
        # report.
        changed = (
            gained
            or lost
            or slots_changed
            or ready != self._told_ready
            or not (healthy and self._told_healthy)
        )
        weights, self._weights = self._weights, None
        handshake = None if self._told_handshake else self.handshake()
        news = failures or served or self.dumps.news or changed or weights
        if not (handshake or news or self._broken or unavailable):
            return None
        self._told_handshake = True
        staged, done = self.dumps.take()
        self._told_ready, self._told_slots, self._told_healthy = ready, slots, healthy
        broken, self._broken = self._broken, ""
        if unavailable:
            self._unavailable = (0, "")
        return UCMConnectorWorkerMetadata(
            ranks=[
                RankReport(
                    rank=self.rank,
                    handshake=handshake,
                    ready=ready,
                    broken=broken,
                    attempt=self._attempt,
                    unavailable=unavailable,
                    healthy=healthy,
                    last_job=self.dumps.last_job,
                    free_slots=slots,
                    staged=staged,
                    done=done,
                    load_failures=failures,
                    gained=gained,
                    lost=lost,
                    wants_touches=self._store is not None and wants_touches(self._store),
                    prefetch_room=self._prefetch_room,
                    served=served,
                    weights=weights,
                    room=self._take_room(),
                )
            ]
        )

    def _take_room(self) -> StoreRoom | None:
        """The limit of the store on a rank that writes, at most every :data:`ROOM_S`."""
        now = self._clock()
        if self._store is None or self._layout is None or not self._writer or now < self._room_due:
            return None
        self._room_due = now + ROOM_S
        return store_room(self._store, self._layout.block_bytes)

    def take_bytes(self) -> dict[str, int] | None:
        """Bytes of KV loaded and published on this rank since the last call, None when there were
        none."""
        now = (self.loads.blocks, self.dumps.blocks)
        if now == self._told_blocks or self._layout is None:
            return None
        (loaded, published), self._told_blocks = self._told_blocks, now
        size = self._layout.block_bytes
        return {
            LOADED_BYTES: (now[0] - loaded) * size,
            PUBLISHED_BYTES: (now[1] - published) * size,
        }

    def take_seconds(self) -> dict[str, list[float]]:
        """How long the loads and dumps took that ended on this rank since the last call; no names
        without any."""
        taken = {LOAD_SECONDS: self.loads.times.take(), DUMP_SECONDS: self.dumps.times.take()}
        return {name: seconds for name, seconds in taken.items() if seconds}

    def take_tiers(self) -> dict[str, Any]:
        """What the tiers of this rank's store did since the last call, about once a
        second."""
        return self._tiers.take(self._store)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank's store."""
        store = {} if self._store is None else self._store.stats()
        sparse = {} if self._sparse is None else {"sparse": self._sparse.stats()}
        return store | {"rank": self.rank} | sparse

    def _slots(self) -> tuple[bool, int | None]:
        store, reported = self._store, self._told_slots
        if store is None or not self._writer:
            return False, None
        if not self.dumps.news and reported is not None and reported >= _FEW_SLOTS:
            return False, reported
        try:
            free = store.free_dump_slots()
        except Exception:
            free = None
        return free != reported, free

    # End
    # ----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Let dumps publish, then close the store; returns after the allowance, whatever hangs."""
        self._closed = True
        self.health.close()
        self._take_opened()
        store = self._store
        if store is None:
            return
        began = self._clock()
        deadline = began + self._shutdown_allowance

        def drain() -> None:
            while len(self.dumps) and self._clock() < deadline - CLOSE_S:
                self.dumps.poll()
                pause.wait(0.002)
            store.close()

        pause = threading.Event()
        thread = threading.Thread(target=drain, name="ucm-drain", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - self._clock()))
        if thread.is_alive():
            logger.warning(
                "%d dumps were not finished within %.1f s",
                len(self.dumps),
                self._shutdown_allowance,
            )
        else:
            logger.info(
                "rank %d: the store is closed, after %.1f s", self.rank, self._clock() - began
            )


# The store's health
# --------------------------------------------------------------------------------------------------

#: Between two looks at a store that is unhealthy, in seconds. The store's breaker decides how soon
#: it is tried.
LOOK_S = 0.5
#: Asked for to see whether a store answers; no block has this id.
_NO_BLOCK = bytes(16)


def _thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="ucm-health", daemon=True).start()


class StoreHealth:
    """One rank's store. Asked when something failed; while it is unhealthy a thread polls it.

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
        self.healthy = is_healthy(store)
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
        self.healthy = is_healthy(store)
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


# Hints and reports
# --------------------------------------------------------------------------------------------------


def _answer(call: str, ask: Callable[[], R], default: R) -> R:
    """What a call of the store returns; ``default`` where it raises, because the store is closed or
    has a bug. Its loads and dumps fail with reasons of their own."""
    try:
        return ask()
    except Exception as error:
        throttle.warning(call, "the store's %s failed: %r", call, error)
        return default


def is_healthy(store: UcmKVStoreBaseV1) -> bool:
    """Whether this rank's store says that it is healthy."""
    return _answer("healthy()", lambda: bool(store.healthy()), True)


def wants_touches(store: UcmKVStoreBaseV1) -> bool:
    """Whether this rank's store uses hints about blocks in use."""
    return _answer("wants_touch_own", lambda: bool(store.wants_touch_own), False)


def prefetch_room(store: UcmKVStoreBaseV1) -> int:
    """Blocks that may be brought up in this rank's memory ahead of need."""
    return _answer("prefetch_room()", lambda: max(int(store.prefetch_room()), 0), 0)


def take_locally_visible(store: UcmKVStoreBaseV1) -> tuple[bytes, bytes]:
    """The record ids that a rank's store gained and lost since the last call, joined for the
    report."""
    nothing: tuple[list[bytes], list[bytes]] = ([], [])
    gained, lost = _answer("early()", store.early, nothing)
    return join_keys(gained), join_keys(lost)


def store_room(store: UcmKVStoreBaseV1, block_bytes: int) -> StoreRoom | None:
    """How much this rank's store holds, for blocks with ``block_bytes`` of KV; None where it
    reports no limit and has no quota of tenants in bytes. A store for lookups alone does not know
    the limit, so the scheduler side cannot read it from its own."""
    return _answer("stats()", lambda: _room(store, block_bytes), None)


def _room(store: UcmKVStoreBaseV1, block_bytes: int) -> StoreRoom | None:
    tiers = store.stats().get("tiers")
    if not isinstance(tiers, list) or not tiers:
        return None
    largest = max(tiers, key=lambda tier: int(tier["capacity_bytes"]))
    quota: Capacity | None = getattr(store, "tenant_quota", None)
    if not tiers[-1]["capacity_bytes"]:
        if quota is None or quota.bytes is None:
            return None
        largest = tiers[-1] | {"capacity_bytes": MAX_SIZE}
    capacity = int(largest["capacity_bytes"])
    return StoreRoom(
        tier=str(largest["name"]),
        capacity=capacity,
        used=int(largest["used_bytes"]),
        record=max(int(getattr(store, "record_len", block_bytes)), 1),
        quota=None if quota is None or largest.get("memory") else quota.of(capacity),
        quota_removed=int(largest.get("quota_removed", 0)),
        expire_after=getattr(store, "expire_after", None),
    )


def pass_hints(
    plan: UCMConnectorMetadata, store: UcmKVStoreBaseV1, mask: bytes, writer: bool
) -> None:
    """Tell the store of this rank, whose part has this mask."""
    try:
        for first, keys in plan.touched if writer or store.has_own_memory else ():
            store.touch_own(record_ids(keys, mask), first)
        if plan.prefetch is None or not writer:
            return
        if plan.prefetch.cancelled:
            store.cancel_prefetch(record_ids(plan.prefetch.cancelled, mask))
        for priority, keys in plan.prefetch.wanted:
            store.prefetch(record_ids(keys, mask), priority)
    except Exception as error:  # closed, or a bug of the store: hints are optional
        throttle.warning("hints", "the store could not be sent hints: %r", error)
