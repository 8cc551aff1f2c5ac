"""The scheduler side: which blocks a request may load, which of its blocks are offered to the
store, and when.

It owns hashing, lookups, admission and the metadata of each step, under vLLM's own method names.
vLLM calls it from one thread; work that may take long runs on :class:`~..guard.Background`. A step
costs time in proportion to its changes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.block_trace import BlockTrace
from ucm.config import UcmConfig
from ucm.integration.vllm.connector.admission.admission import Admission, Cut, RateMemory
from ucm.integration.vllm.connector.groups import ONE_GROUP, Group, fails_whole
from ucm.integration.vllm.connector.guard import Background, Failures, harmless, logger, throttle
from ucm.integration.vllm.connector.identity.keys import ExtraKeys, KeyMaker, TenantTags
from ucm.integration.vllm.connector.metadata import (
    VERSION,
    Dump,
    GroupBlocks,
    Handshake,
    Load,
    StoreRoom,
    UCMConnectorMetadata,
    UCMConnectorWorkerMetadata,
    join_keys,
    split_keys,
)
from ucm.integration.vllm.connector.scheduler.dumps import (
    DeferredDumps,
    DumpPlanner,
    OtherConnectors,
    Tables,
    Written,
)
from ucm.integration.vllm.connector.scheduler.events import BlockEvents
from ucm.integration.vllm.connector.scheduler.hints import RankHints
from ucm.integration.vllm.connector.scheduler.lookup import (
    AT_ONCE_TOKENS,
    BlockTracker,
    LocallyVisible,
    Lookup,
    Lookups,
    Turnover,
    limit_of,
)
from ucm.integration.vllm.connector.scheduler.policies import RequestPolicies
from ucm.integration.vllm.connector.scheduler.readiness import (
    OFF,
    OPEN,
    OPENING,
    RankHealth,
    Readiness,
)
from ucm.integration.vllm.connector.scheduler.requests import (
    FAR,
    Chain,
    HitPolicy,
    RequestTracker,
    hit_media,
    misses,
)
from ucm.integration.vllm.connector.scheduler.roles import PublishWaits, answer
from ucm.integration.vllm.connector.stats import SCHEDULER, MissStats, StoreInfo, TierCounts
from ucm.metrics.names import BUSY, EVICTED, MEMORY_NOW
from ucm.mode import Mode, ModeWatch
from ucm.profiling import span
from ucm.reasons import MissReason, named

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ucm.integration.vllm.connector.scheduler.blend import BlendPlanner, Claim
    from ucm.integration.vllm.connector.scheduler.sparse import SparseScheduler

#: Sent in every step with nothing to do.
NOTHING = UCMConnectorMetadata()

#: Seconds that a step which computes nothing sleeps: it waits for threads, which need the processor
#: and the interpreter. vLLM would step again at once.
YIELD_S = 0.0005
#: Seconds between two touches of a live request's blocks in the store.
TOUCH_S = 60.0
#: With ``debug``, one of this many hits is computed, and compared with the stored blocks.
COMPARED = 16


class UCMConnectorScheduler:
    """One engine's scheduler side."""

    def __init__(
        self,
        config: UcmConfig,
        readiness: Readiness,
        admission: Admission,
        extra_keys: ExtraKeys,
        background: Background,
        block_tokens: int,
        *,
        step_tokens: int = 0,
        rates: RateMemory | None = None,
        groups: Sequence[Group] = ONE_GROUP,
        sparse: SparseScheduler | None = None,
        blend: BlendPlanner | None = None,
        events: BlockEvents | None = None,
        mode: ModeWatch | None = None,
        closers: Sequence[Callable[[], None]] = (),
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """``extra_keys``: the inputs of a request's KV beside its tokens; ``background`` runs
        lookups; ``block_tokens``: tokens of one device block; ``step_tokens``: most tokens of a
        step, 0 where that is not known; ``rates`` keeps the measured speeds; ``groups``: the KV
        groups of the model; ``sparse``: sparse attention, ``blend``: Blend, where that is
        configured; ``events``: those of stored blocks, where they are published; ``mode``: whether
        blocks are loaded and stored now; ``closers`` are called at the end; ``chance`` draws
        numbers from [0, 1). Raises :class:`~ucm.errors.ConfigError` for a key of tenants' tags that
        cannot be used."""
        self._config = config
        self.readiness = readiness
        self.failures = Failures("scheduler side", self._abandon)
        self._extra_keys = extra_keys
        self._background = background
        self._block_tokens = block_tokens
        self._min_hit_tokens = config.min_hit_tokens
        self._policies = RequestPolicies(config)
        self._mode = mode or ModeWatch(())
        self._waits = PublishWaits(config.pd_wait_ms, config.roots, background, clock)
        self._publish = False  # the next plan has the ranks flush their stores
        self._answers = False  # beside other connectors these answer for producers' requests
        self._allowance = config.deadlines.lookup_ms / 1000  # from vLLM's first call
        self.admission = admission
        self._rates = rates
        self._may_load = True
        self._groups, self._whole = tuple(groups), fails_whole(groups)
        self._frees_early = any(group.frees_early for group in groups)
        # What vLLM may take away in the next step is offered first.
        self._order = sorted(range(len(groups)), key=lambda at: not groups[at].frees_early)
        self._forget_on_reset = config.on_reset == "forget"
        approximate, self._blend = sparse or blend, blend
        self._exact_tokens = None if approximate is None else approximate.exact_tokens
        self._offload = None if sparse is None else sparse.offload
        if self._offload is not None:
            self._offload.stored = self._stored_keys
        self._closers = closers
        self._trace = BlockTrace(config.block_trace) if config.block_trace else None
        self._clock, self._pause = clock, pause
        self._turnover = Turnover(chance)
        self._rooms: dict[int, StoreRoom] = {}  # of each rank that writes
        self._block_tracker = BlockTracker(turnover=self._turnover)
        self._hit_policy = HitPolicy(
            admission,
            self._block_tracker,
            block_tokens,
            lambda: readiness.block_bytes,
            config.min_hit_tokens,
            lambda: readiness.group_bytes,
        )
        self.health = RankHealth(clock)
        self._locally_visible = LocallyVisible()
        self._others = OtherConnectors(block_tokens)
        self._tenants = TenantTags.configured(config.tenant_key_file)
        self.dumps = DumpPlanner(self._block_tracker, self.health, clock, self._tables)
        self._deferred = DeferredDumps(self.dumps, config.deadlines.dump_s, self._in_tables)
        self._step_tokens, self._hold_share = step_tokens, config.hold_share
        self._computes = False  # the last step computed something
        self._events = events or BlockEvents(groups, clock, enabled=False)
        self._manager: KVCacheManager | None = None
        self._pool: BlockPool | None = None
        # vLLM's table of cached blocks, a new one whenever it was emptied
        self._device_cache: object = None
        self._keys: KeyMaker | None = None
        self._lookups: Lookups | None = None
        self._opened: object = None  # the store and the identity that these are for
        self._live: dict[str, RequestTracker] = {}
        self._due: dict[str, int] = {}  # request -> tokens at which its next block can be offered
        self._loads: list[Load] = []
        self.put_off = 0  # steps that requests lost by waiting for an answer
        self._hits = 0  # counted with ``debug``
        self._late_dumps: list[Dump] = []  # of ended requests, sent with the next step
        self.miss_stats = MissStats(block_tokens, clock(), admission.rates)
        self._tiers = TierCounts(clock, SCHEDULER)
        self._info, self._held_bytes, self._evicted = StoreInfo(), 0, 0
        self._rank_hints = RankHints(self._relocate, block_tokens, clock)

    # What vLLM binds
    # ----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Bind the block tables of the requests."""
        self._manager = manager

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Bind the pool of blocks."""
        self.dumps.bind(pool)
        self._events.bind(pool)
        self._pool, self._device_cache = pool, getattr(pool, "cached_block_hash_to_block", None)
        if self._device_cache is None:
            self.readiness.off(
                "this vLLM does not report when its prefix cache is emptied", MissReason.UNSUPPORTED
            )

    # Requests
    # ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Hash and look up, or begin to: the answer is usually there at vLLM's first call."""
        self.readiness.recheck()
        self._notice_reset()
        off = self.readiness.phase == OFF
        if off or request.resumable:  # a streaming session rewrites its own tokens: not cached
            reason = self.readiness.reason if off else MissReason.UNSUPPORTED
            return self.miss_stats.bypassed(request, reason)
        policy = self._policies.of(request)
        if not (policy.loads or policy.dumps):
            return self.miss_stats.bypassed(request, policy.reason)
        if self._mode.now is Mode.OFF:
            return self.miss_stats.bypassed(request, MissReason.DISABLED)
        tracker = RequestTracker(request, self._tenants.of(request), policy, self._groups)
        self._live[request.request_id] = tracker
        self._due[request.request_id] = self._block_tokens
        if policy.loads and self._mode.now.loads:
            self._rank_hints.prefetches.add(tracker)
        if self._open() and self.readiness.weights_confirmed:
            self._start_lookup(tracker)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those on the device; vLLM calls this again at every
        step, before it allocates blocks for a request that does not run."""
        tokens, loads = self._matched(request, num_computed_tokens)
        tracker = self._live.get(request.request_id)
        if self._blend is None or tokens is None or tracker is None or not tracker.may_blend:
            return tokens, loads
        end = self._with_chunks(tracker, num_computed_tokens + tokens)
        return (None, False) if end is None else (end - tracker.local, end > tracker.local)

    def _matched(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The same of the prefix alone."""
        self._spare(request.num_tokens, 1, pins=self._computes)
        tracker = self._live.get(request.request_id)
        if self._offload is not None:
            self._offload.forget(request.request_id)
        if tracker is None:
            return 0, False
        if tracker.preemptions != request.num_preemptions:
            tracker.restart()
            self._due[request.request_id] = self._block_tokens
        tracker.local, tracker.holds, tracker.may_blend = num_computed_tokens, 0, False
        tracker.reason, tracker.unanswered = MissReason.INTERNAL, False  # unless this succeeds
        self._notice_reset()
        self.readiness.request_weights_check()
        is_open = self._open()
        if is_open and (request.skip_reading_prefix_cache or not self._may_load):
            tracker.reason = MissReason.UNSUPPORTED
            return 0, False
        if not tracker.policy.loads:
            tracker.reason = tracker.policy.reason
            return 0, False
        if not self._mode.now.loads:
            tracker.reason = MissReason.DISABLED
            return 0, False
        if not (is_open and self.readiness.weights_confirmed):
            if self.readiness.worth_waiting() and self._worth_waiting(tracker):
                return self._postpone(tracker)
            tracker.reason = MissReason.IDENTITY_PENDING if is_open else self.readiness.reason
            return 0, False
        if tracker.lookup is None:
            self._start_lookup(tracker)
        assert tracker.lookup is not None  # just started
        if tracker.wait is not None and tracker.wait.found():
            self._start_lookup(tracker, tracker.lookup.keys)
        if not self.health.all_healthy:
            stale = self.health.stale and self._worth_waiting(tracker)
            if stale and tracker.may_wait(self._clock(), self._allowance):
                return self._postpone(tracker)
            tracker.reason = MissReason.UNHEALTHY
            return 0, False
        if not tracker.lookup.done and not self._worth_waiting(tracker):
            tracker.reason, tracker.unanswered = None, True
            return 0, False
        if not tracker.lookup.settled(self._allowance) or self._waits_on(tracker):
            return self._postpone(tracker)
        if tracker.adopt(self._block_tracker):
            lookup = tracker.lookup
            self.miss_stats.looked_up(lookup.seconds)
            ended, name = lookup.began + lookup.seconds, request.request_id
            span("lookup", lookup.began, ended, request=name, hits=lookup.hits)
            if self._trace is not None:
                self._trace.add(self._clock(), lookup.keys or ())
            self._remember_chunks(tracker, lookup.hits)
        size = self._block_tokens
        if not self._claim_is_known(tracker):
            return self._postpone(tracker)
        tracker.may_blend = True
        tokens = tracker.claimable(self._block_tracker, size) * size - num_computed_tokens
        if tokens < max(self._min_hit_tokens, 1):
            tracker.reason = None
            return 0, False
        first, end = num_computed_tokens // size, (num_computed_tokens + tokens) // size
        end, tracker.reason = self._hit_policy.taken(tracker, first, end)
        if end > first and self._compares(tracker, first, end):
            tracker.reason, tracker.may_blend = None, False
            return 0, False
        if end > first and not self._fits_beside_others(tracker, end):
            return self._postpone(tracker)
        if self._offload is not None and end > first:
            if tracker.selectable:
                self._offload.consider(request, first, end)
            elif not self._fits_twice(request):
                tracker.reason = MissReason.LOAD_FAILED
                return 0, False
        return (end - first) * size, end > first

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were allocated; ``num_external_tokens`` of them are to be loaded."""
        tracker = self._live.get(request.request_id)
        if tracker is None:
            return
        self._rank_hints.prefetches.remove(request.request_id)
        size = self._block_tokens
        first, count = tracker.local // size, num_external_tokens // size
        claim = None if self._blend is None else self._blend.admitted(request, num_external_tokens)
        if claim is not None:
            count = self._load_chunks(tracker, blocks, claim)
        elif num_external_tokens > 0:
            unread = range(0) if self._offload is None else self._offload.admitted(request)
            read = [at for at in range(0 if unread else first, first + count) if at not in unread]
            timeout = self._load_timeout(tracker, len(read) * size)
            parts = [_to_load(chain, blocks.blocks, read) for chain in tracker.chains]
            load = Load(
                request=request.request_id,
                first=parts[0].first,
                keys=parts[0].keys,
                blocks=parts[0].blocks,
                timeout=timeout,
                unread=join_keys(tracker.keys[unread.start : unread.stop]),
                rest=[part for part in parts[1:] if part.keys],
            )
            self._loads.append(load)
            if tracker.lookup is not None:
                span("queue", tracker.lookup.began, self._clock(), request=load.request)
            tracker.holds = self._blocks_of(tracker, first + count)
            tracker.loading, tracker.failures = range(first, first + count), {}
        self._others.admitted(tracker, blocks.blocks)
        self._count_asked(tracker, count)
        # a declined hit is in use too
        declined = tracker.decided_hit.stop if tracker.reason == MissReason.DECLINED else 0
        self._touch(tracker, max((tracker.local + num_external_tokens) // size, declined))

    # Chunks (Blend)

    def _chunks(self, tracker: RequestTracker) -> Lookup | None:
        """The lookup of a request's chunks; None without any, and before its keys are known."""
        own, lookups = tracker.lookup, self._lookups
        if self._blend is None or lookups is None or own is None or own.keys is None:
            return None
        # Another engine is to go on with a producer's KV, and gets none that is approximate.
        if tracker.policy.max_load_tokens is not None or tracker.policy.produces:
            return None
        new = (at for at, key in enumerate(own.keys) if not self._block_tracker.is_stored(key))
        first = next(new, len(own.keys)) * self._block_tokens
        return self._blend.look_up(tracker.request, lookups, self._extra_keys, self._clock, first)

    def _with_chunks(self, tracker: RequestTracker, exact: int) -> int | None:
        """The end of what a request loads, chunks behind the ``exact`` tokens of its prefix
        included; None while their records are looked up."""
        lookup, size = self._chunks(tracker), self._block_tokens
        if self._blend is None or lookup is None or len(tracker.keys) * size < exact:
            return exact
        if not lookup.done and not self._worth_waiting(tracker):
            return exact
        if not lookup.settled(self._allowance):
            return self._postpone(tracker)[0]
        prefix, size = tracker.keys[: exact // size], self.readiness.block_bytes
        known = self._block_tracker, self.admission, size
        return self._blend.claim(tracker.request, tracker.local, prefix, *known)

    def _load_chunks(self, tracker: RequestTracker, blocks: KVCacheBlocks, claim: Claim) -> int:
        """Plan the load of an exact prefix, with the records of chunks one after the other behind
        it; returns the blocks of the prefix. The connector has a load fail that is not planned."""
        if not claim.hits:
            return 0
        first, exact = tracker.local // self._block_tokens, claim.exact // self._block_tokens
        keys = [*tracker.keys[first:exact], *claim.keys]
        table = blocks.blocks[0][first : first + len(keys)]
        name, prefix = tracker.request.request_id, claim.exact - tracker.local
        load = Load(
            request=name,
            first=first,
            keys=join_keys(keys),
            blocks=np.array([block.block_id for block in table], dtype=np.int64),
            timeout=self._load_timeout(tracker, prefix, claim.cut, claim.learns),
            whole=True,
        )
        self._loads.append(load)
        tracker.loading, tracker.failures = range(first, exact), {}
        return exact - first

    def _remember_chunks(self, tracker: RequestTracker, stored: int) -> None:
        """The first blocks of a request are stored: those of its prompt have chunks for others."""
        if self._blend is not None:
            stored = min(stored, tracker.request.num_prompt_tokens // self._block_tokens)
            self._blend.stored(tracker.request, tracker.keys[:stored], self._extra_keys)

    def hit_media(self, request: Request, tokens: int) -> Mapping[str, int]:
        """The tokens of a load that was just planned, by the medium of the tiers in which their
        blocks were found."""
        tracker, store = self._live.get(request.request_id), self.readiness.store
        if tracker is None or store is None:
            return {"": tokens}
        return hit_media(tracker, tokens, self._block_tokens, store.tier_media)

    def _claim_is_known(self, tracker: RequestTracker) -> bool:
        """Whether the groups' rule has its answer for the hit that may be claimed. A policy, a
        failed load and a refused block make it shorter than the one that was looked up, and it then
        needs other blocks: these are looked up, if that is worth a step."""
        if not tracker.lookup_tables or not self._worth_waiting(tracker):
            return True
        while to_ask := tracker.to_ask(self._block_tracker, self._block_tokens):
            lookup = self._start_lookup(tracker, list(tracker.keys), to_ask)
            if not lookup.settled(self._allowance):
                return False
            tracker.adopt(self._block_tracker)
        return True

    def _compares(self, tracker: RequestTracker, first: int, end: int) -> bool:
        """Whether this hit is not loaded: with ``debug``, the blocks of one in :data:`COMPARED` are
        computed, and compared with the stored ones when they would be offered."""
        debug = self._config.debug and self._mode.now.dumps and self._offload is None
        if debug and not tracker.counted and self._limit(tracker) // self._block_tokens > first:
            tracker.counted, self._hits = True, self._hits + 1
            for chain in () if self._hits % COMPARED else tracker.chains:
                chain.compared = range(first, end)
        return any(chain.compared for chain in tracker.chains)

    def _fits_twice(self, request: Request) -> bool:
        """Whether a request whose load has failed may load again: until it runs, vLLM keeps the
        blocks of the failed load reserved, and grants a further load only the rest."""
        blocks = -(-request.num_tokens // self._block_tokens)
        spared = getattr(self._manager, "watermark_blocks", 0)
        return self._pool is not None and 2 * blocks + spared < self._pool.num_gpu_blocks

    def _fits_beside_others(self, tracker: RequestTracker, hit: int) -> bool:
        """Whether a request with this hit, and all that were loaded and do not run yet, fit on the
        device with their whole prompts: vLLM cannot preempt these. It leaves room for them, but
        counts freed blocks of a window as if they were still held; such requests would wait for
        each other's blocks, for ever."""
        if self._pool is None or not self._frees_early:
            return True
        others = sum(one.holds for one in self._live.values() if one.ran_from is None)
        return not others or others + self._blocks_of(tracker, hit) < self._pool.num_gpu_blocks

    def _blocks_of(self, tracker: RequestTracker, hit: int) -> int:
        """The most device blocks of a request with this hit until its prompt is computed."""
        blocks = -(-tracker.request.num_tokens // self._block_tokens) + 1
        return sum(blocks - group.first_needed(hit) for group in self._groups)

    def _postpone(self, tracker: RequestTracker) -> tuple[None, bool]:
        """Have vLLM call again: the request loses a step."""
        tracker.reason = MissReason.NOT_TAKEN
        self.put_off += 1
        return None, False

    def _worth_waiting(self, tracker: RequestTracker) -> bool:
        """Whether the largest possible hit is worth the step that the request loses by waiting."""
        request = tracker.request
        tokens = tracker.most_claimable(self._block_tokens) * self._block_tokens - tracker.local
        if tokens < max(self._min_hit_tokens, 1):
            return False
        return self.admission.worth_waiting(tokens, request.num_tokens - tracker.local - tokens)

    def _waits_on(self, tracker: RequestTracker) -> bool:
        """Whether a request waits longer for the blocks of its producer."""
        wait, whole, lookups = tracker.wait, tracker.lookup, self._lookups
        store = self.readiness.store
        if wait is None or whole is None or lookups is None or store is None:
            return False
        identity = self.readiness.identity_text
        if self._worth_waiting(tracker) and self._waits.go_on(
            wait, whole, lookups, store, identity
        ):
            return True
        tracker.wait = None
        if wait.began is not None:
            self.miss_stats.waited(self._clock() - wait.began)
        if not (wait.is_late and whole.keys):
            return False
        # Blocks before that one may be there by now.
        whole = self._start_lookup(tracker, whole.keys)
        return not whole.settled(self._allowance)

    @harmless(None)
    def _load_timeout(
        self, tracker: RequestTracker, tokens: int, chunks: Cut | None = None, learns: bool = False
    ) -> float | None:
        """Seconds a load may take. vLLM waits for it by now, so it is sent whatever fails here."""
        return self._hit_policy.begin_load(tracker, tokens, chunks, learns)

    @harmless(None)
    def _count_asked(self, tracker: RequestTracker, hit: int) -> None:
        """Count the blocks of an admitted request, once. After a load it is admitted again."""
        missed: dict[MissReason, int] = {}
        if not tracker.asked:
            known, size = self._block_tracker, self._block_tokens
            missed = misses(tracker, hit, known, size, self._min_hit_tokens)
        tracker.asked = True
        if hit or missed:
            self.miss_stats.asked(tracker.tally, hit, missed)
            self.miss_stats.declined(missed.get(MissReason.DECLINED, 0))

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """The request ends; its blocks that were not offered yet are offered now, and sent with the
        next step. A load of it under way goes on: vLLM keeps the blocks until every rank reported
        it. Returns what a consumer of its blocks needs, None for none."""
        tracker = self._live.pop(request.request_id, None)
        self._rank_hints.prefetches.remove(request.request_id)
        self._others.finished(request.request_id)
        self._due.pop(request.request_id, None)
        if tracker is None:
            return None
        if not tracker.asked:
            tracker.reason = MissReason.ABORTED
            self._count_asked(tracker, 0)
        self.miss_stats.missed(tracker.tally, MissReason.ABORTED, len(tracker.loading))
        self._notice_reset()
        try:
            if not tracker.loading and self._open() and self.readiness.weights_confirmed:
                computed = self._others.computed(tracker)
                room, late = self.dumps.room(), self._late_dumps
                if self._mode.now.dumps:
                    self._offer(tracker, computed, computed, room, late, lives=False)
                    self._defer(tracker, computed)
                return self._answer(tracker, computed)
            return None
        finally:
            self.miss_stats.ended(request, tracker.tally)
            if self._config.debug:
                self._check_counts(tracker)
            empty = self._pool is not None and not len(self._pool.cached_block_hash_to_block)
            if empty and not self._live:
                # vLLM's cache is empty, so other weights need no reset of it.
                self.readiness.begin_generation(emptied=False)

    @staticmethod
    def _check_counts(tracker: RequestTracker) -> None:
        """With ``debug``: each block of an ended request was loaded, or missed for one reason."""
        tally, name = tracker.tally, tracker.request.request_id
        if tally.asked != tally.loaded + sum(tally.missed.values()):
            text = "request %s: its counts do not add up (%s): a bug in ucm, please report it"
            throttle.warning("counts", text, name, tally)

    def _answer(self, tracker: RequestTracker, computed: int) -> dict[str, Any] | None:
        """The answer of a producer's request: the last block that every group will have stored."""
        end = min(self._prompt_end(tracker), computed // self._block_tokens, tracker.wrong_from)
        if not (self._answers and 0 < end <= len(tracker.keys) and self.health.all_healthy):
            return None
        expected, waiting = self._block_tracker.is_expected, self._deferred.keys_of(tracker)
        for last in range(end - 1, -1, -1):  # of states not every block is stored
            keys = (chain.keys[last] for chain in tracker.chains)
            if all(key in waiting or expected(key) for key in keys):
                key, tokens = tracker.keys[last], (last + 1) * self._block_tokens
                return answer(key, tokens, self.readiness.identity_text)
        return None

    def _prompt_end(self, tracker: RequestTracker) -> int:
        """Blocks of the prompt of a producer's request that are stored; 0 for other requests."""
        if not tracker.policy.produces:
            return 0
        prompt: int = tracker.request.num_prompt_tokens
        return min(self._limit(tracker), prompt) // self._block_tokens

    # Steps
    # ----------------------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> UCMConnectorMetadata:
        """What the workers do in this step. After any failure in here, the loads that vLLM waits
        for are sent, and blocks that others are about to overwrite are read before."""
        self._deferred.unpin()
        to_flush = self.dumps.jobs_to_flush(self._live)
        try:
            plan = self._plan(output)
        except Exception as error:
            # While the stores are being opened, a plan has metadata that are sent once.
            self.failures.note("planning a step", error, vital=self.readiness.phase == OPENING)
            self.drop_unsent()
            plan = UCMConnectorMetadata(loads=self._loads)
            self._loads = []
        if to_flush:
            plan = replace(plan, jobs_to_flush=to_flush)
        scheduled = output.total_num_scheduled_tokens
        self._computes = scheduled > 0
        self._spare(max(scheduled, self._step_tokens), len(output.num_scheduled_tokens))
        return plan

    @harmless(None)
    def _spare(self, tokens: int, requests: int, *, pins: bool = False) -> None:
        """vLLM may allocate blocks for this number of tokens: it is to take as few as it can of
        the blocks that wait for the store. ``pins``: it may have to wait for others instead, unless
        it computes nothing then, or the store has failed."""
        if self._deferred and self._pool is not None:
            blocks = (tokens // self._block_tokens + requests) * len(self._groups)
            share = self._hold_share if pins and self.health.all_healthy else 0
            self._deferred.spare(blocks, int(share * self._pool.num_gpu_blocks))

    def drop_unsent(self) -> None:
        """A step goes to the workers without the planned dumps. It may write the blocks of ended
        requests, so none of these is stored any more."""
        unsent, self._late_dumps = self._late_dumps, []
        self._deferred.drop()
        self.dumps.drop(unsent)

    def _plan(self, output: SchedulerOutput) -> UCMConnectorMetadata:
        self._notice_reset()
        is_open, now, scheduled = self._open(), self._clock(), output.num_scheduled_tokens
        self._others.planned(output, self._live)
        blended = None if self._blend is None else self._blend.computed_in(scheduled)
        total = output.total_num_scheduled_tokens
        self.admission.compute_rate.planned(scheduled, total, now, blended)
        if now >= self.miss_stats.next_summary:
            self.miss_stats.summary(now, self.readiness.block_bytes)
        if self._rates is not None and now >= self._rates.due:
            self._rates.keep(now)
        setup = self.readiness.take_setup()
        dumps = self._late_dumps  # and those of this step: dropped together after a failure
        self._note_items(output)
        if self._deferred:
            self._plan_deferred(is_open, dumps, now)
        is_open = is_open and self.readiness.weights_confirmed
        if is_open:
            try:
                self._plan_dumps(output, dumps)
            except Exception as error:
                self.failures.note("offering blocks of a step", error)
        loads, check_weights = self._loads, self.readiness.take_weights_check()
        touched, prefetch = self._rank_hints.take() if is_open else ([], None)
        if not output.total_num_scheduled_tokens:
            self._pause(YIELD_S)
        work = setup or dumps or loads or touched or prefetch or self._publish
        if not work and check_weights is None:
            return NOTHING
        self._loads, self._late_dumps = [], []
        publish, self._publish = self._publish, False
        return UCMConnectorMetadata(
            setup=setup,
            loads=loads,
            dumps=dumps,
            touched=touched,
            prefetch=prefetch,
            publish=publish,
            check_weights=check_weights,
        )

    @harmless(None)
    def _note_items(self, output: SchedulerOutput) -> None:
        """Note the items of every request that begins: vLLM keeps the encoder's output of each."""
        for new in output.scheduled_new_reqs:
            if not new.mm_features:
                continue
            if tracker := self._live.get(new.req_id):
                # vLLM sends the ranks only the data that they use
                self._extra_keys.used(tracker.request)
            else:
                self._extra_keys.used(new, new.num_computed_tokens)

    def _relocate(self, lookup: Lookup) -> None:
        if self._lookups is not None:
            self._lookups.relocate(lookup)

    def _plan_dumps(self, output: SchedulerOutput, dumps: list[Dump]) -> None:
        if not self._mode.now.dumps:  # offered once it allows that again
            return
        scheduled, due, live = output.num_scheduled_tokens, self._due, self._live
        cached = output.scheduled_cached_reqs
        if self._others.load_in_steps:  # what this step computes may be found to be wrong after it
            names = [name for name in cached.req_ids if name in live]
            known = [(name, self._others.computed(live[name])) for name in names]
            ready = [one for one in known if one[1] >= due.get(one[0], FAR)]
        else:
            next_due = due.get
            ready = [  # runs in every step, over all requests: one pass
                (name, computed)
                for name, seen in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
                if (computed := seen + scheduled[name]) >= next_due(name, FAR)
            ]
            ready += [
                (new.req_id, new.num_computed_tokens + scheduled[new.req_id])
                for new in output.scheduled_new_reqs
                if new.req_id in live
            ]
        room = self.dumps.room() if ready else 0
        if room == 0 and not self._frees_early:
            return
        for name, computed in ready:
            lookup = live[name].lookup
            if lookup is not None and not lookup.settled(self._allowance):
                continue  # the next step offers what the store turns out not to have
            try:
                # An earlier step may compute what vLLM's prefix cache had: it has ended once one of
                # this request has.
                settled = self._others.computed(live[name])
                room -= self._offer(live[name], computed, settled, room, dumps)
            except Exception as error:
                self.failures.note("offering blocks of a request", error)
                due[name] = FAR

    def _limit(self, tracker: RequestTracker) -> int:
        """Tokens of which blocks may be offered to others: final ones, with exact KV."""
        limit = tracker.policy.dump_limit(tracker.request)
        exact = self._exact_tokens
        return limit if exact is None else min(limit, exact(tracker.request))

    def _private_from(self, tracker: RequestTracker) -> int | None:
        """Ordinal of the first block that is stored for its own request alone, None without one:
        blocks with KV that was computed under a selection may leave the device too, under keys that
        no other request can have."""
        if self._offload is None or self._exact_tokens is None or not tracker.policy.dumps:
            return None
        return self._exact_tokens(tracker.request) // self._block_tokens or None

    def _stored_keys(self, request: Request) -> Sequence[bytes]:
        """Keys of the first blocks of a request that every rank has stored."""
        tracker = self._live.get(request.request_id)
        if tracker is None:
            return ()
        return tracker.stored_keys(self._block_tracker, self._private_from(tracker))

    def _offer(
        self,
        tracker: RequestTracker,
        computed: int,
        settled: int,
        room: int,
        dumps: list[Dump],
        *,
        lives: bool = True,
    ) -> int:
        """Offer the full blocks of the first ``computed`` tokens, at most ``room``: the jobs are
        added to ``dumps``. Steps that have ended computed ``settled`` of the tokens. ``lives``: the
        request goes on, so blocks stored for it alone are of use. Returns the number of blocks
        offered."""
        request, size = tracker.request, self._block_tokens
        private_from = self._private_from(tracker) if lives else None
        limit = self._limit(tracker) if private_from is None else request.num_tokens
        upto = min(min(computed, limit) // size, tracker.wrong_from)
        if self._manager is None or self._keys is None:
            return 0
        offered = 0
        if upto > tracker.cursor and (room > 0 or self._frees_early):
            last, now = upto, self._clock()
            upto = tracker.confirmed(upto, min(settled, limit) // size, self._keys, now)
            if not tracker.keyable:
                self._due.pop(request.request_id, None)
                return 0
            named = last if self._frees_early else upto
            named = tracker.grow(named, self._keys, self._block_tracker, private_from)
            upto = min(upto, named)
            tables, before = self._tables(tracker), tracker.cursor
            for at in self._order:
                chain = tracker.chains[at]
                blocks = chain.group.device_blocks(tables[chain.group.table])
                offered += self.dumps.plan(tracker, chain, upto, blocks, room - offered, dumps)
                if lives and chain.group.frees_early:
                    leaving = min(chain.group.first_seen(computed), named)
                    adapted = request.lora_request is not None and leaving > upto
                    settles = computed if adapted else 0
                    self._deferred.leaving(tracker, chain, leaving, blocks, now, settles)
            self._publish |= before < self._prompt_end(tracker) <= tracker.cursor
            self.miss_stats.offered(tracker.tally, offered)
            self._touch(tracker, tracker.cursor)
        if request.request_id in self._due:
            output = private_from is not None or tracker.policy.dump == "all"
            ended = not output and tracker.cursor >= limit // size
            ended = ended or tracker.cursor >= tracker.wrong_from
            self._due[request.request_id] = FAR if ended else (tracker.cursor + 1) * size
        return offered

    def _defer(self, tracker: RequestTracker, computed: int) -> None:
        """The request ends: keep blocks that are to be checked, or found no room."""
        request = tracker.request
        upto = min(min(computed, self._limit(tracker)) // self._block_tokens, tracker.wrong_from)
        keys, manager = self._keys, self._manager
        if manager is None or keys is None or not tracker.keyable or upto <= tracker.cursor:
            return
        now = self._clock()
        if keys.current(request, now) is False:
            return
        upto = tracker.grow(upto, keys, self._block_tracker)
        tables = self._tables(tracker)
        for at in self._order:
            chain = tracker.chains[at]
            blocks = chain.group.device_blocks(tables[chain.group.table])
            self._deferred.add(tracker, chain, upto, blocks, now)

    def _tables(self, tracker: RequestTracker) -> Tables:
        """The blocks of a live request, by vLLM's groups."""
        assert self._manager is not None  # nothing is planned without
        tables: Tables = self._manager.get_blocks(tracker.request.request_id).blocks
        return tables

    def _in_tables(self) -> set[int]:
        """The device blocks in any request's table, and its hot ones. No block is in use elsewhere:
        states that vLLM copies for partial hits would be, and these are refused (factory.py)."""
        assert self._manager is not None  # nothing is planned without
        managers = self._manager.coordinator.single_type_managers
        every = (of for one in managers for of in (one.req_to_blocks, getattr(one, "hot", {})))
        return {block.block_id for of in every for table in of.values() for block in table}

    def _plan_deferred(self, is_open: bool, dumps: list[Dump], now: float) -> None:
        if not is_open or self._keys is None or not self._mode.now.dumps:
            return self._deferred.drop()
        try:
            for tracker, offered in self._deferred.take(self._keys, now, dumps, self._live):
                self._publish |= 0 < self._prompt_end(tracker) <= tracker.cursor
                self.miss_stats.offered(tracker.tally, offered)
        except Exception as error:  # the blocks of the others were not compared in this step
            self.failures.note("offering blocks of ended requests", error)
            self._deferred.drop()
        for reason, blocks in self._deferred.take_lost().items():
            self.miss_stats.unstored(reason, blocks)
            if blocks:
                text = "%d blocks that left their request are not stored (%s): see staging_capacity"
                throttle.warning(f"lost {reason}", text, blocks, reason)

    @harmless(None)
    def _touch(self, tracker: RequestTracker, blocks: int) -> None:
        """Touch a prefix that is in use: ancestors of dumped blocks then count as used later than
        these."""
        now = self._clock()
        if blocks and self._lookups is not None and now - tracker.touched_at >= TOUCH_S:
            tracker.touched_at = now
            self._lookups.touch(tracker.keys[:blocks])
            self._rank_hints.touches.add(tracker.keys[:blocks])

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """The ranks' reports: stores opened, dumps staged and ended, loads failed."""
        report = output.kv_connector_worker_meta
        if isinstance(report, UCMConnectorWorkerMetadata) and report.version == VERSION:
            self._on_rank_reports(report)
        elif report is not None:
            self.readiness.off("the workers run another version of ucm than the scheduler")
        self._others.reported(output.invalid_block_ids, self._live.values(), self._manager)
        if output.finished_recving:
            for name in self.admission.oldest_first(output.finished_recving):
                self.admission.ended(name)
                if tracker := self._live.get(name):
                    self._load_ended(tracker)

    def step_ended(self) -> None:
        """vLLM has processed a step and its workers' reports."""
        self.admission.step_ended()

    def _on_handshakes(self, handshakes: Sequence[Handshake]) -> None:
        """The workers have answered."""
        try:
            self.readiness.handshake(handshakes)
        except Exception as error:
            self.readiness.off(f"the handshake with the workers failed: {error!r}")
        whys = (handshake.only_stores for handshake in handshakes if handshake.only_stores)
        self._answers = not any(handshake.beside for handshake in handshakes)
        if self._blend is not None:
            others = "it works alone, and not beside other connectors in a MultiConnector"
            whys_not = [handshake.no_blend for handshake in handshakes]
            self._blend.refuse(next(filter(None, whys_not), "" if self._answers else others))
        if why := next(whys, ""):
            self._may_load = False
            logger.warning("blocks are stored, and none are loaded: %s", why)

    def _on_rank_reports(self, report: UCMConnectorWorkerMetadata) -> None:
        if handshakes := [rank.handshake for rank in report.ranks if rank.handshake is not None]:
            self._on_handshakes(handshakes)
        published, failed = self.dumps.published_blocks, self.dumps.failed_blocks
        busy = self.dumps.busy_blocks
        self._on_lost_blocks(report.lost)
        for done in report.blended:
            self.miss_stats.blended(done.reused, done.computed, done.missed)
        for rank in report.ranks:
            self.readiness.report(rank)
            self.health.report(rank.rank, rank.healthy)
            self._locally_visible.report(rank.rank, rank.added, rank.removed)
            self._rank_hints.report(rank)
            if rank.room is not None and self._offload is None:  # offloaded ones are always stored
                self._rooms[rank.rank] = rank.room
                self._turnover.limited(limit_of(self._rooms.values(), self.readiness.writers))
            for served in rank.served:
                self.admission.served(served.request, served.tiers)
            for failure in rank.load_failures:
                self.admission.failed(failure.request, MissReason.TIMEOUT in failure.reasons)
                self._refuse(split_keys(failure.refused))
                for key in split_keys(failure.newer):
                    self._block_tracker.mark_newer(key)
                    self._report_removed([key])
                if (tracker := self._live.get(failure.request)) and failure.unselectable:
                    tracker.selectable, tracker.loading = False, range(0)
                elif tracker:
                    tracker.failed_at(failure.first)
                    reasons = (named(name, MissReason.INTERNAL) for name in failure.reasons)
                    tracker.failed_because(failure.first, reasons)
                    self._rewound(tracker)
                if self._blend is not None:
                    self._blend.failed(failure.request)
                text = "request %s: a load failed, computing instead"
                throttle.warning("load failed", text, failure.request)
            self._report_stored(
                self.dumps.report(rank, [*self._live.values(), *self._deferred.trackers])
            )
            for job in self.dumps.take_refused():
                self._deferred.again(job, self._clock())
            if any(result.failed for result in rank.done):
                for tracker in self._live.values():
                    self._rewound(tracker)
        dumps = self.dumps
        self.miss_stats.dumped(dumps.published_blocks - published, dumps.failed_blocks - failed)
        self.miss_stats.unstored(BUSY, self.dumps.busy_blocks - busy)

    def _refuse(self, keys: Sequence[bytes]) -> None:
        """The records of these blocks are bad or missing: no hits, and they stay on the device."""
        for key in keys:
            self._block_tracker.refuse(key)
        self._report_removed(keys)
        if keys and self._offload is not None:
            for tracker in self._live.values():
                tracker.withdrawn(set(keys))

    @harmless(None)
    def _report_stored(self, written: Sequence[Written]) -> None:
        """Publish events of blocks that every rank has published, not of those that serve their own
        request alone, and remember chunks."""
        for tracker, group, blocks in written:
            if self._blend is not None:  # all of its prompt is, or all that will ever be
                stored = len(tracker.stored_keys(self._block_tracker))
                whole = stored >= tracker.request.num_prompt_tokens // self._block_tokens
                if whole or tracker.request.request_id not in self._live:
                    self._remember_chunks(tracker, stored)
            last = FAR if tracker.private_at is None else tracker.private_at
            shared = {at: key for at, key in blocks.items() if at < last}
            self._events.stored(tracker.request, group, shared)

    @harmless(None)
    def _report_removed(self, keys: Sequence[bytes]) -> None:
        self._events.removed(keys)

    def take_events(self) -> list[KVCacheEvent]:
        """The events of stored blocks since vLLM's last call."""
        return self._events.take(self._block_tracker.refused_of)

    def _on_lost_blocks(self, lost: Sequence[tuple[str, int]]) -> None:
        """Blocks of running requests are neither on the device nor in the store."""
        for name, ordinal in lost:
            tracker = self._live.get(name)
            if tracker is not None and self._offload is not None and ordinal < len(tracker.keys):
                self._refuse([tracker.keys[ordinal]])
                self._offload.lost(tracker.request)

    @harmless(None)
    def _load_ended(self, tracker: RequestTracker) -> None:
        """Every rank reported the load: blocks before the first failed one are loaded everywhere,
        and kept where they are of use without the others."""
        load, failures, tally = tracker.loading, tracker.failures, tracker.tally
        tracker.loading, tracker.failures = range(0), {}
        kept = load.stop if not failures else load.start if self._whole else min(failures)
        end = max(kept, load.start)
        self.miss_stats.loaded(tally, max(min(end, load.stop) - load.start, 0))
        for ordinal in range(end, load.stop):
            self.miss_stats.missed(tally, failures.get(ordinal, MissReason.LOAD_FAILED), 1)

    def _rewound(self, tracker: RequestTracker) -> None:
        """The cursor may have moved back: offer the request's blocks again in its next step."""
        name = tracker.request.request_id
        self._due[name] = min(self._due.get(name, FAR), (tracker.cursor + 1) * self._block_tokens)

    def reset_cache(self) -> bool:
        """vLLM resets its caches together with this one, as after a change of the weights in
        memory. False where stored blocks should be forgotten and were not: vLLM then reports the
        reset as failed."""
        self._device_cache = getattr(self._pool, "cached_block_hash_to_block", None)
        try:
            self._begin_generation(forget=self._forget_on_reset)
        except Exception as error:
            self.failures.note("a reset of the cache", error, vital=True)
            return not self._forget_on_reset
        if self._forget_on_reset:
            then = "what this engine stored is forgotten, until it is started again"
        else:
            then = "stored blocks stay; the weights are checked before they are used again"
        logger.info("vLLM reset the cache: %s", then)
        return True

    def _notice_reset(self) -> None:
        """vLLM may empty its prefix cache without a call; its pool then has a new table."""
        if self._pool is None or self._pool.cached_block_hash_to_block is self._device_cache:
            return
        self._device_cache = self._pool.cached_block_hash_to_block
        self._begin_generation()
        logger.info(
            "vLLM emptied its prefix cache: the weights in memory are checked before it is used"
            " again"
        )

    def _begin_generation(self, *, forget: bool = False) -> None:
        """The weights in memory may be others from here on: earlier blocks are offered no more."""
        self.readiness.begin_generation(emptied=True, forget=forget)
        late, self._late_dumps = self._late_dumps, []
        self.dumps.generation += 1
        self.dumps.drop(late)
        self._deferred.drop()
        for name, tracker in self._live.items():
            tracker.invalidate()
            self._due[name] = self._block_tokens
        self._events.forget()

    @property
    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should step: stores are being opened, or dumps are to be sent."""
        if self.readiness.busy() or self._late_dumps or self._publish:
            return True
        # vLLM calls this where no request can run; where there are some, it is paused.
        return not self._live and self._deferred.wants_steps(self._clock())

    def _abandon(self, why: str) -> None:
        """Given up: nothing is claimed, offered or held any more."""
        self.readiness.off(f"the scheduler side failed: {why}", MissReason.INTERNAL)
        self._live, self._due = {}, {}
        self._loads, self._late_dumps = [], []
        self.dumps.forget()
        self._deferred.drop()
        self._events.forget()

    def take_tiers(self) -> dict[str, Any]:
        """News of the tiers of this side's store, about once a second, and of the device."""
        info = self.readiness.info and f"{self.readiness.info}|{self._mode.now}"
        news = self._tiers.take(self.readiness.store) | self._info.take(info)
        if evicted := self._turnover.evicted - self._evicted:
            self._evicted += evicted
            news[EVICTED] = evicted
        if self._pool is not None and self.readiness.group_bytes:
            # vLLM's null block is no request's
            blocks = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
            held = blocks * max(self.readiness.group_bytes)
            if held != self._held_bytes:
                self._held_bytes = held
                news[f"{MEMORY_NOW}gpu.{SCHEDULER}"] = held
        return news

    def stats(self) -> Mapping[str, Any]:
        """Counters of this side."""
        total = self.miss_stats.total
        return {
            "phase": self.readiness.phase,
            "asked_blocks": total.asked,
            "hit_blocks": total.hit,
            "loaded_blocks": total.loaded,
            "missed_blocks": dict(total.missed),
            "published_blocks": self.dumps.published_blocks,
            "failed_blocks": self.dumps.failed_blocks,
            "learning_loads": self.admission.learning_loads,
            "put_off": self.put_off,
            **self.admission.rates(),
        }

    def shutdown(self) -> None:
        """Close the scheduler's own store and end the background threads; joins none of them."""
        logger.info(
            "in all: %s; %d published, %d not",
            self.miss_stats.total,
            self.dumps.published_blocks,
            self.dumps.failed_blocks,
        )
        if self.readiness.store is not None:
            self.readiness.store.close()
        if self._trace is not None:
            self._trace.close()
        for close in self._closers:
            close()

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        if self.readiness.phase != OPEN:
            self.readiness.poll()
            if self.readiness.phase != OPEN:
                return False
        opened = (self.readiness.store, self.readiness.identity_text)
        if self._opened != opened:  # the first, or another identity
            self._opened = opened
            if self._blend is not None:
                self._blend.forget()
            for tracker in self._live.values():
                tracker.rekey()
            identity, method = self.readiness.identity_text, self._config.hash_method
            self._keys = KeyMaker(identity, self._block_tokens, method, self._extra_keys)
            self._locally_visible.open(self.readiness.readers)
            store, masks = self.readiness.store, self.readiness.masks
            assert store is not None  # the phase is open
            self._lookups = Lookups(
                self._background,
                store,
                masks,
                self._locally_visible,
                self._groups,
                self.readiness.parts_of_groups(len(self._groups)),
            )
            self._events.open(store.tier_media)
            self.dumps.open(self.readiness.ranks)
            if self._rates is not None:
                self._rates.open(self.readiness.identity_text, self.readiness.store_label)
        return True

    def _start_lookup(
        self,
        tracker: RequestTracker,
        keys: list[bytes] | None = None,
        limit: tuple[int, MissReason] | None = None,
    ) -> Lookup:
        """Begin the lookup of its blocks, whose ``keys`` may be known. ``limit``: most blocks of a
        hit, and why no more; None: as many as it may claim."""
        assert self._lookups is not None and self._keys is not None  # the phase is open
        maker, request = self._keys, tracker.request
        at_once = keys is not None or maker.at_once(request, AT_ONCE_TOKENS)
        most, why = limit or tracker.claim_limit(self._block_tokens)
        tracker.lookup = self._lookups.start(
            lambda: maker.first(request) if keys is None else keys,
            self._clock,
            at_once=at_once,
            limit=most,
            why=why,
        )
        self._events.follow(request, tracker.lookup)
        self._chunks(tracker)
        return tracker.lookup


def _to_load(chain: Chain, tables: Tables, wanted: Sequence[int]) -> GroupBlocks:
    """Of the ``wanted`` blocks those that vLLM has in this group: of a window the last ones."""
    table = chain.group.device_blocks(tables[chain.group.table])
    there = [at for at in wanted if at < len(table) and not table[at].is_null]
    return GroupBlocks(
        group=chain.group.number,
        first=there[0] if there else wanted[-1] + 1,
        keys=join_keys([chain.keys[at] for at in there]),
        blocks=np.fromiter((table[at].block_id for at in there), np.int64, len(there)),
    )
