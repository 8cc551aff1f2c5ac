"""The worker side: the KV tensors of one rank, its store, and the transfers between the two. No
request logic.

vLLM calls it from the model's thread, every step: loads start, the model runs, dumps start, and
what ended is reported. Nothing here waits: the store is opened on a thread of its own, and
transfers are polled.

The store is sent hints too: of ranks that hold the same bytes, the one that writes them touches
blocks in use and prefetches; the others read its memory, and touch what they hold in memory of
their own. An exception of such a call is logged and the hint is dropped. The rank's report says
whether the store is healthy (:class:`StoreHealth`) and how much it holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ucm.config.fields import MAX_SIZE, Capacity
from ucm.errors import ConfigError, InvalidInputError
from ucm.integration.vllm.connector.groups import ONE_GROUP, Group
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
from ucm.integration.vllm.connector.stats import TierCounts
from ucm.integration.vllm.connector.stores import ConfiguredStore
from ucm.integration.vllm.connector.worker.transfers import (
    Dumps,
    GroupStore,
    LayeredStore,
    Loads,
    layer_bytes,
)
from ucm.metrics.names import DUMP_SECONDS, LOAD_SECONDS, LOADED_BYTES, PUBLISHED_BYTES
from ucm.profiling import step
from ucm.store import part_mask, record_ids
from ucm.store.factory import remedy, why_unavailable
from ucm.store.kv_layout import KVLayout
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.worker.sparse import SparseWorker


R = TypeVar("R")

#: Of the shutdown allowance, the seconds kept for closing the store.
CLOSE_S = 0.5
#: Below this many free slots every change is reported to the scheduler side.
_FEW_SLOTS = 256
#: Operation -> names of its bytes and of its times.
_OPERATIONS = {"load": (LOADED_BYTES, LOAD_SECONDS), "dump": (PUBLISHED_BYTES, DUMP_SECONDS)}
#: Seconds between two reports of how much the store holds.
ROOM_S = 1.0


@dataclass(frozen=True)
class RankPart:
    """The KV of one more group on a rank."""

    group: Group
    #: KV group, pipeline rank, tensor rank.
    part: tuple[int, int, int]
    layers: Sequence[str]


@dataclass(frozen=True)
class Rank:
    """A rank: what it is, and which KV it keeps."""

    number: int
    #: KV group, pipeline rank, tensor rank.
    part: tuple[int, int, int]
    #: Whether it writes its part; else another rank with the same bytes does.
    writer: bool
    layers: Sequence[str]
    #: Tokens of one block.
    block_tokens: int
    #: Returns its identity without weights.
    identity: Callable[[], dict[str, Any]]
    #: Blocks that vLLM manages on this rank; None: as many as the tensors have.
    num_blocks: int | None = None
    #: The configured ``block_size``, in tokens or bytes.
    wanted_block_size: int | None = None
    #: Why nothing may be loaded, if so.
    only_stores: str = ""
    #: vLLM's ``enable_prefix_caching`` in this process.
    prefix_caching: bool = True
    #: The KV group of ``part``.
    group: Group = ONE_GROUP[0]
    #: Those of the other groups that have layers here.
    rest: Sequence[RankPart] = ()
    #: Whether a load that lacks a block is of no use.
    fails_whole: bool = False
    #: Whether this is one connector of several in a MultiConnector.
    beside: bool = False
    #: Whether vLLM zeroes blocks before it hands them out, which it does before a step is planned
    #: here: with states, and with numbers of several kinds.
    zeroes: bool = False


def record_mask(group: Group, part: tuple[int, int, int]) -> bytes:
    """Between the keys of blocks in a group, as they are sent, and the ids of a part's records."""
    mask = part_mask(*part)
    return record_ids([group.mask], mask)[0] if group.mask else mask


def _shapes(layout: KVLayout, block_tokens: int) -> dict[str, Any]:
    dtype = str(layout.dtype).removeprefix("torch.")
    return layout.sizes() | {"block_tokens": block_tokens, "dtype": dtype}


class UCMConnectorWorker:
    """One rank's worker side."""

    def __init__(
        self,
        rank: Rank,
        platform: Platform,
        stores: Sequence[ConfiguredStore],
        *,
        memory: ModelMemory | None = None,
        sparse: SparseWorker | None = None,
        shutdown_allowance: float = 3.0,
        health: StoreHealth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``memory``: the weights in memory, None where they cannot be reached; ``sparse``: sparse
        attention on this rank; ``shutdown_allowance`` in seconds."""
        self.rank = rank
        self.failures = Failures(f"rank {rank.number}", lambda _why: self.drop_step())
        self._memory = memory
        self._weights: WeightsReport | None = None  # to be reported
        self._mask = record_mask(rank.group, rank.part)
        parts = [(rank.group, rank.part), *((one.group, one.part) for one in rank.rest)]
        # of the records that hints are about, and whether they are part of a whole prefix
        self._hinted = {part_mask(*part): not group.frees_early for group, part in parts}
        self._platform = platform
        self._stores = list(stores)
        self._shutdown_allowance = shutdown_allowance
        self._clock = clock
        self._layout: KVLayout | None = None
        self._unmapped: KVLayout | None = None  # while vLLM sleeps
        self._layouts: list[KVLayout] = []  # of the other groups
        self._views: dict[int, GroupStore] = {}  # the store, by KV group
        self._problem = "vLLM registered no KV cache"
        #: Why chunks of other prompts cannot be reused here.
        self.no_blend = ""
        self._store: UcmKVStoreBaseV1 | None = None
        # by the attempt it was opened for, with its views for the other groups
        self._opened: tuple[int, UcmKVStoreBaseV1, list[UcmKVStoreBaseV1]] | None = None
        self._unavailable: tuple[int, str] = (0, "")
        self._attempt = 0
        self._broken = ""
        # what the scheduler side knows by earlier reports
        self._reported_handshake = self._reported_ready = False
        self._reported_healthy = True
        self._reported_slots: int | None = -1
        self._reported_bytes = (0, 0)
        self._prefetch_room = 0
        self._room_due = float("-inf")  # when the store's limit is to be reported
        self._plan: UCMConnectorMetadata | None = None
        self._step_began = clock()
        self._closed = False
        self._sparse = sparse
        if sparse is not None:
            sparse.bind_store(lambda: self._store, self._mask)
        self.loads = Loads(clock, whole=rank.fails_whole)
        self.dumps = Dumps(clock)
        self.health = health or StoreHealth()
        self._tiers = TierCounts(clock, str(rank.number))
        self._moved = {operation: [0.0, 0.0] for operation in _OPERATIONS}

    # Start
    # ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Register where the KV lies, and the weights that were just loaded. Raises
        :class:`~ucm.errors.ConfigError` when the user wrote another block size."""
        if self._memory is not None:
            self._memory.remember()
        try:
            blocks = self.rank.num_blocks
            self._layout = KVLayout(caches, self.rank.layers, blocks)
            self._layouts = [KVLayout(caches, part.layers, blocks) for part in self.rank.rest]
            self._problem = ""
        except InvalidInputError as error:
            self._problem = f"this KV layout cannot be addressed: {error}"
            return
        if (there := self._layout.device_type) != (platform := self._platform).device:
            expected = f"not on {platform.device} as for {platform.word}"
            self._problem = f"the KV lies on {there}, {expected}"
            return
        wanted, tokens = self.rank.wanted_block_size, self.rank.block_tokens
        if wanted not in (None, tokens, size := self._layout.block_bytes):
            raise ConfigError(
                f"block_size is {wanted}, but a block of this engine has {tokens} tokens and {size}"
                " bytes per rank; remove the key, or write one of the two"
            )

    def unregister_kv_caches(self) -> None:
        """vLLM is about to sleep, and unmaps the KV. When this returns, no transfer accesses it.
        None begins before :meth:`restore_kv_caches`. The blocks of loads that were not reported
        are lost; the caller reports them."""
        self.drop_step()
        self.loads.drain()
        if self._layout is not None:
            self._layout, self._unmapped = None, self._layout

    def restore_kv_caches(self) -> None:
        """vLLM has woken up: the KV is mapped again at the same addresses, with any content."""
        if self._unmapped is not None:
            self._layout, self._unmapped = self._unmapped, None

    def handshake(self) -> Handshake:
        """The facts of this rank that the scheduler side needs."""
        rank, shapes, identity = self.rank, dict[str, Any](), dict[str, Any]()
        rest: list[tuple[tuple[int, int, int], dict[str, Any]]] = []
        if self._layout is not None:
            shapes = _shapes(self._layout, rank.block_tokens)
            identity = rank.identity()
            for part, layout in zip(rank.rest, self._layouts, strict=True):
                rest.append((part.part, _shapes(layout, part.group.tokens)))
        return Handshake(
            part=rank.part,
            rank=rank.number,
            writer=rank.writer,
            identity=identity,
            shapes=shapes,
            problem=self._problem,
            stores=tuple(store.name for store in self._stores),
            only_stores=rank.only_stores,
            prefix_caching=rank.prefix_caching,
            beside=rank.beside,
            no_blend=self.no_blend,
            rest=tuple(rest),
        )

    def _open(self, setup: StoreSetup) -> None:
        layout = self._layout
        if layout is None:
            self._broken = self._problem
            return
        facts = self.handshake()
        config = setup.config | facts.shapes
        config |= {"identity": setup.identity, "part": self.rank.part}
        if facts.rest:
            config["own_parts"] = [shapes | {"part": part} for part, shapes in facts.rest]
        config["device_id"] = getattr(layout.device, "index", None) or 0
        if self._sparse is not None and self._sparse.representations is not None:
            self.loads.representations = self._sparse.representations
            config["sides"] = self._sparse.representations.sides
        by_layer = self._sparse is not None and self._sparse.offload is not None
        if by_layer:
            config["shard_size"] = layer_bytes(layout)
        attempt, make = setup.attempt, self._stores[setup.choice].make
        # Another store was tried before this one, or served until the weights were replaced: its
        # transfers under way end with it.
        self._take_opened()
        before, self._store, self._attempt = self._store, None, attempt
        self._views, layouts = {}, self._layouts
        self._reported_ready = False

        def work() -> None:
            if before is not None:
                before.close()
            try:
                store = make(config)
                try:
                    store.register_kv(layout)
                    views = [store.for_part(at) for at in range(1, 1 + len(layouts))]
                    for view, own in zip(views, layouts, strict=True):
                        view.register_kv(own)
                    # It has all methods of a store that this side calls.
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
            self._opened = (attempt, served, views)
            if self._closed or attempt != self._attempt:
                store.close()

        threading.Thread(target=work, name="ucm-open", daemon=True).start()

    def _take_opened(self) -> None:
        """Use the store that was opened, if it is that of the last setup."""
        opened = self._opened
        if self._store is None and opened is not None and opened[0] == self._attempt:
            self._store = opened[1]
            layout = self._layout or self._unmapped
            first = GroupStore(opened[1], self._mask, self.rank.block_tokens, layout)
            self._views = {self.rank.group.number: first}
            for part, view, own in zip(self.rank.rest, opened[2], self._layouts, strict=True):
                mask = record_mask(part.group, part.part)
                self._views[part.group.number] = GroupStore(view, mask, part.group.tokens, own)
            self._prefetch_room = prefetch_room(opened[1])

    # Steps
    # ----------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, plan: UCMConnectorMetadata) -> None:
        """The plan of the step that begins. Transfers left from the step before begin first: with
        speculative decoding vLLM does not have every pipeline rank save, and a dump that one rank
        does not report never ends."""
        self._step_began = self._clock()
        self.start_load_kv()
        self.start_dumps(late=True)
        if plan.flush_all:
            self.dumps.flush(None)
        self._plan = plan
        if plan.version != VERSION:
            self._broken = f"the scheduler speaks version {plan.version}, this rank {VERSION}"
            return
        if plan.jobs_to_flush:
            self._flush(plan)
        if (generation := plan.check_weights) is not None:
            unknown, memory = WeightsReport(generation, None, None, 0), self._memory
            self._weights = unknown if memory is None else memory.compare(generation)
        if plan.setup is not None:
            self._open(plan.setup)
        self._take_opened()
        if self._store is not None:
            pass_hints(plan, self._store, self._hinted, self.rank.writer)

    def _flush(self, plan: UCMConnectorMetadata) -> None:
        """Read blocks that vLLM has given to other requests, before this step writes them."""
        dumps = plan.dumps
        plan.dumps = [dump for dump in dumps if dump.job in plan.jobs_to_flush]
        self._begin_dumps(late=True)
        plan.dumps = [dump for dump in dumps if dump.job not in plan.jobs_to_flush]
        self.dumps.flush(plan.jobs_to_flush)

    def drop_step(self) -> None:
        """Begin nothing more of the steps so far, and have the blocks of all dumps under way read:
        after an error any of them may be written by this step."""
        self._plan = None
        self.dumps.flush(None)

    def loads_under_way(self, *, poll: bool) -> set[str]:
        """Requests whose loads may still write to device blocks, or are to begin; see
        :meth:`.transfers.Loads.under_way`."""
        planned = self._plan.loads if self._plan is not None else []
        return self.loads.under_way(poll=poll) | {load.request for load in planned}

    def start_load_kv(self) -> None:
        """Begin this step's loads."""
        if self._plan is not None and self._plan.loads:
            loads, self._plan.loads = self._plan.loads, []
            stores = self._views if self._layout is not None else {}
            for load in loads:
                self.loads.start(load, stores)

    def start_dumps(self, *, late: bool = False) -> None:
        """Begin this step's dumps; the device has the model's work of the step. ``late``: the next
        step has begun. Where vLLM zeroes blocks that it hands out, it does so before it says which,
        so they are read at once, and none is stored late."""
        self._begin_dumps(late)
        if self.rank.zeroes and not late:
            self.dumps.flush(None)
        if self._plan is not None and self._plan.publish:
            self._plan.publish = False
            if self._store is not None and self.rank.writer:
                _answer("flush()", self._store.flush, None)

    def _begin_dumps(self, late: bool) -> None:
        if self._plan is None or not self._plan.dumps:
            return
        dumps, self._plan.dumps = self._plan.dumps, []
        if not self.rank.writer:
            for dump in dumps:
                self.dumps.skip(dump, self._views.get(dump.group))
            return
        readable = self._layout is not None and not (late and self.rank.zeroes)
        store, event = self._store if readable else None, (0, None)
        if store is not None and self._layout is not None:
            try:
                event = self._platform.mark(self._layout.device)
            except Exception as error:
                # it is not known when the blocks are written: none is stored
                throttle.warning("event", "no event was recorded, so nothing is stored: %r", error)
                store = None
        representations = None if self._sparse is None else self._sparse.representations
        here = {self.rank.group.number, *(part.group.number for part in self.rank.rest)}
        for number in dict.fromkeys(dump.group for dump in dumps):
            ones = [dump for dump in dumps if dump.group == number]
            if number in here:
                own = None if store is None else self._views.get(number)
                self.dumps.start(ones, own, event, representations)
                continue
            for dump in ones:  # a pipeline rank without layers of that group
                self.dumps.skip(dump, None)

    def take_ended_loads(self) -> set[str]:
        """Requests whose load ended, each named once, failed ones too."""
        self.loads.poll()
        return self.loads.take_ended()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Device blocks a load did not fill."""
        return self.loads.take_bad_blocks()

    def build_connector_worker_meta(self) -> UCMConnectorWorkerMetadata | None:
        """News for the scheduler side, None when there are none."""
        began, rank = self._step_began, self.rank.number
        step("step", began, self._clock(), rank=rank, loads=len(self.loads), dumps=len(self.dumps))
        self.dumps.poll()
        self._take_opened()
        unavailable = self._unavailable[1] if self._unavailable[0] == self._attempt else ""
        failures, served = self.loads.take_news()
        ready = self._store is not None
        slots_changed, slots = self._slots()
        opened = ready != self._reported_ready
        trouble = failures or self.dumps.failed or not self.health.healthy
        if self._store is not None and (trouble or opened):
            self.health.check(self._store)
        healthy = self.health.healthy
        added, removed = (b"", b"") if self._store is None else take_locally_visible(self._store)
        # While it is not, every step says so: the age of the last report counts.
        unhealthy = not (healthy and self._reported_healthy)
        changed = added or removed or slots_changed or opened or unhealthy
        weights, self._weights = self._weights, None
        handshake = None if self._reported_handshake else self.handshake()
        news = failures or served or self.dumps.news or changed or weights
        if not (handshake or news or self._broken or unavailable):
            return None
        self._reported_handshake = True
        staged, done = self.dumps.take()
        self._reported_ready, self._reported_slots = ready, slots
        self._reported_healthy = healthy
        broken, self._broken = self._broken, ""
        if unavailable:
            self._unavailable = (0, "")
        report = RankReport(
            rank=self.rank.number,
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
            added=added,
            removed=removed,
            wants_touches=self._store is not None and wants_touches(self._store),
            prefetch_room=self._prefetch_room,
            served=served,
            weights=weights,
            room=self._take_room(),
        )
        return UCMConnectorWorkerMetadata(ranks=[report])

    def _take_room(self) -> StoreRoom | None:
        """The limit of the store on a rank that writes, at most every :data:`ROOM_S`."""
        store, layout, now = self._store, self._layout, self._clock()
        if store is None or layout is None or not self.rank.writer or now < self._room_due:
            return None
        self._room_due = now + ROOM_S
        sizes = [each.block_bytes for each in (layout, *self._layouts)]
        stores = (own.store for own in self._views.values())
        return store_room(list(zip(stores, sizes, strict=True)))

    def take_bytes(self) -> dict[str, int] | None:
        """Bytes of KV loaded and published on this rank since the last call, None without any."""
        if self._layout is None:
            return None
        sizes = {self.rank.group.number: self._layout.block_bytes}
        for part, layout in zip(self.rank.rest, self._layouts, strict=True):
            sizes[part.group.number] = layout.block_bytes
        blocks = (self.loads.loaded, self.dumps.published)
        now = tuple(sum(counts[group] * size for group, size in sizes.items()) for counts in blocks)
        if now == self._reported_bytes:
            return None
        (loaded, published), self._reported_bytes = self._reported_bytes, (now[0], now[1])
        return {LOADED_BYTES: now[0] - loaded, PUBLISHED_BYTES: now[1] - published}

    def take_transfers(self) -> dict[str, Any]:
        """Bytes and seconds since the last call, and the mean speeds since the start."""
        news: dict[str, Any] = self.take_bytes() or {}
        times = {LOAD_SECONDS: self.loads.times.take(), DUMP_SECONDS: self.dumps.times.take()}
        news |= {name: seconds for name, seconds in times.items() if seconds}
        for operation, (size, seconds) in _OPERATIONS.items():
            if size in news or seconds in news:
                moved = self._moved[operation]
                moved[0] += news.get(size, 0)
                moved[1] += sum(news.get(seconds, ()))
                if moved[1] > 0:
                    news[f"{operation}_gbps"] = moved[0] / moved[1] / 1e9
        return news

    def take_tiers(self) -> dict[str, Any]:
        """News of the tiers of this rank's store, about once a second."""
        return self._tiers.take(self._store)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank's store."""
        store = {} if self._store is None else self._store.stats()
        sparse = {} if self._sparse is None else {"sparse": self._sparse.stats()}
        return store | {"rank": self.rank.number} | sparse

    def _slots(self) -> tuple[bool, int | None]:
        store, reported = self._store, self._reported_slots
        if store is None or not self.rank.writer:
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
        """Let dumps publish, then close the store; returns after the allowance in any case."""
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
            text = "%d dumps were not finished within %.1f s"
            logger.warning(text, len(self.dumps), self._shutdown_allowance)
        else:
            took = self._clock() - began
            logger.info("rank %d: the store is closed, after %.1f s", self.rank.number, took)


# The store's health
# --------------------------------------------------------------------------------------------------

#: Seconds between two polls of an unhealthy store. Its breaker decides when it is tried again.
LOOK_S = 0.5
#: Seconds between two polls of a store whose directory only its owner can mend.
UNUSABLE_S = 60.0
#: The id of no block, looked up to poll an unhealthy store.
_NO_BLOCK = bytes(16)


def _thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="ucm-health", daemon=True).start()


class StoreHealth:
    """The health of one rank's store: polled by a thread while it is unhealthy.

    Only a call of the store can close its breaker, and there are no others: no loads are planned
    for this rank, and an idle engine does nothing at all.
    """

    def __init__(
        self, pause: float = LOOK_S, spawn: Callable[[Callable[[], None]], None] = _thread
    ) -> None:
        """``pause``: seconds between two polls; ``spawn`` runs a function that takes long."""
        self._pause, self._spawn = pause, spawn
        self._stop = threading.Event()
        self._watching = False
        self._unusable = ""  # the cause and the cure that were logged last
        self.healthy = True

    def check(self, store: UcmKVStoreBaseV1) -> None:
        """When it was opened, after a failure, or while it was unhealthy: read the store's health,
        without waiting. Never raises."""
        if self._watching or self._stop.is_set():
            return
        self.healthy = is_healthy(store)
        self._log_unusable(store)
        if self.healthy:
            return
        self._watching = True
        try:
            self._spawn(lambda: self._watch(store))
        except Exception as error:  # no thread could be started: tried again with the next step
            self._watching = False
            throttle.warning("health", "an unhealthy store cannot be watched: %r", error)

    def look(self, store: UcmKVStoreBaseV1) -> bool:
        """Look something up, for the store's breaker; whether it is healthy now. May wait."""
        try:
            store.lookup([_NO_BLOCK])
        except Exception as error:
            throttle.warning("health", "an unhealthy store was polled: %s", error)
        self.healthy = is_healthy(store)
        self._log_unusable(store)
        return self.healthy

    def _log_unusable(self, store: UcmKVStoreBaseV1) -> None:
        """Log once what only the owner of a directory can mend, and how."""
        cure = remedy(_answer("trouble()", store.trouble, ""))
        if cure and cure != self._unusable:
            which = "part of the store" if self.healthy else "the store"
            text = "%s is unusable: %s. It is tried again every %.0f s"
            logger.warning(text, which, cure, UNUSABLE_S)
        self._unusable = cure

    def close(self) -> None:
        """Stop polling. Idempotent."""
        self._stop.set()

    def _watch(self, store: UcmKVStoreBaseV1) -> None:
        try:
            while not self._stop.wait(UNUSABLE_S if self._unusable else self._pause):
                if self.look(store):
                    break
        finally:
            self._watching = False


# Hints and reports
# --------------------------------------------------------------------------------------------------


def _answer(call: str, method: Callable[[], R], default: R) -> R:
    """The result of a call of the store; ``default`` where it raises, because the store is closed
    or has a bug. Its loads and dumps fail with reasons of their own."""
    try:
        return method()
    except Exception as error:
        throttle.warning(call, "the store's %s failed: %r", call, error)
        return default


def is_healthy(store: UcmKVStoreBaseV1) -> bool:
    """Whether this rank's store is healthy."""
    return _answer("healthy()", lambda: bool(store.healthy()), True)


def wants_touches(store: UcmKVStoreBaseV1) -> bool:
    """Whether this rank's store uses hints about blocks in use."""
    return _answer("wants_touch_own", lambda: bool(store.wants_touch_own), False)


def prefetch_room(store: UcmKVStoreBaseV1) -> int:
    """Blocks that may be prefetched into this rank's memory."""
    return _answer("prefetch_room()", lambda: max(int(store.prefetch_room()), 0), 0)


def take_locally_visible(store: UcmKVStoreBaseV1) -> tuple[bytes, bytes]:
    """The record ids that became readable on this rank and those that are no longer listed, since
    the last call, joined for the report."""
    nothing: tuple[list[bytes], list[bytes]] = ([], [])
    added, removed = _answer("early()", store.early, nothing)
    return join_keys(added), join_keys(removed)


def store_room(views: Sequence[tuple[UcmKVStoreBaseV1, int]]) -> StoreRoom | None:
    """How much this rank's store holds; ``views``: the store as that of each KV group, and the
    bytes of KV of a block there. None where it reports no limit and has no quota of tenants in
    bytes. The scheduler side's own store, for lookups alone, does not know the limit."""
    return _answer("stats()", lambda: _room(views), None)


def _room(views: Sequence[tuple[UcmKVStoreBaseV1, int]]) -> StoreRoom | None:
    store = views[0][0]
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
        record=max(sum(int(getattr(view, "record_len", size)) for view, size in views), 1),
        quota=None if quota is None or largest.get("memory") else quota.of(capacity),
        quota_removed=int(largest.get("quota_removed", 0)),
        expire_after=getattr(store, "expire_after", None),
    )


def pass_hints(
    plan: UCMConnectorMetadata, store: UcmKVStoreBaseV1, masks: Mapping[bytes, bool], writer: bool
) -> None:
    """Pass the plan's hints to the store of this rank, whose parts have these ``masks``; True for
    those that are prefetched."""
    try:
        for first, keys in plan.touched if writer or store.has_own_memory else ():
            for mask in masks:
                store.touch_own(record_ids(keys, mask), first)
        if plan.prefetch is None or not writer:
            return
        for mask in (mask for mask, whole in masks.items() if whole):
            if plan.prefetch.cancelled:
                store.cancel_prefetch(record_ids(plan.prefetch.cancelled, mask))
            for priority, keys in plan.prefetch.wanted:
                store.prefetch(record_ids(keys, mask), priority)
    except Exception as error:  # closed, or a bug of the store: hints are optional
        throttle.warning("hints", "the store could not be sent hints: %r", error)
