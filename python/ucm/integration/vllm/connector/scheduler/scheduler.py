"""The scheduler half: which blocks a request may load, which of its blocks are offered to the store, and when.

It owns hashing, lookups, admission and plans, and never touches a tensor. vLLM calls it from one thread; what may take
long runs on :class:`~.background.Background`. Everything per step is proportional to what changed in the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.integration.vllm.connector.admission.admission import Admission
from ucm.integration.vllm.connector.admission.rate_memory import RateMemory
from ucm.integration.vllm.connector.guard import harmless, logger, throttle
from ucm.integration.vllm.connector.identity.keys import KeyMaker
from ucm.integration.vllm.connector.metadata import (
    VERSION,
    Dump,
    Handshake,
    Load,
    StepPlan,
    WorkerReport,
    join_keys,
    split_keys,
)
from ucm.integration.vllm.connector.miss_stats import Account
from ucm.integration.vllm.connector.scheduler.block_tracker import Presence
from ucm.integration.vllm.connector.scheduler.deferred_dumps import Holds
from ucm.integration.vllm.connector.scheduler.dump_planner import DumpPlanner
from ucm.integration.vllm.connector.scheduler.hit_policy import Hits
from ucm.integration.vllm.connector.scheduler.locally_visible import EarlyHits
from ucm.integration.vllm.connector.scheduler.lookup import AT_ONCE_TOKENS, Lookup, Lookups
from ucm.integration.vllm.connector.scheduler.miss_reasons import misses
from ucm.integration.vllm.connector.scheduler.other_connectors import Others
from ucm.integration.vllm.connector.scheduler.rank_health import RanksHealth
from ucm.integration.vllm.connector.scheduler.rank_hints import RankMemory
from ucm.integration.vllm.connector.scheduler.readiness import OFF, OPEN, Gate
from ucm.integration.vllm.connector.scheduler.request_tracker import FAR, Tracked
from ucm.integration.vllm.connector.tier_counts import TierCounts
from ucm.reasons import MissReason, named

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

#: Sent in every step with nothing to do.
NOTHING = StepPlan()

#: A step that computes nothing waits for an answer, a load or a dump, and leaves the processor and the interpreter to
#: those who are at it, for so many seconds: vLLM steps again at once, thousands of times until then.
YIELD_S = 0.0005
#: A live request tells the store that its blocks are in use at most so often, in seconds.
TOUCH_S = 60.0


class SchedulerHalf:
    """One engine's scheduler half."""

    def __init__(
        self,
        gate: Gate,
        *,
        make_keys: Callable[[str], KeyMaker],
        make_lookups: Callable[[Any, list[bytes], EarlyHits], Lookups],
        block_tokens: int,
        min_hit_tokens: int,
        dump_output: bool,
        lookup_allowance: float,
        admission: Admission,
        rates: RateMemory | None = None,
        may_load: bool = True,
        audit_one_in: int = 0,
        items_used: Callable[[Any, int], None] | None = None,
        closers: Sequence[Callable[[], None]] = (),
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """``block_tokens``: tokens of one device block; ``lookup_allowance``: seconds from vLLM's first question;
        ``rates``: where the measured speeds are kept; ``may_load``: whether vLLM hands out only blocks that no step
        under way still writes; ``audit_one_in``: one hit in so many is computed and compared, 0 for none;
        ``items_used``: told which requests a step begins with, and how many tokens of each were computed before."""
        self.gate = gate
        self._make_keys = make_keys
        self._make_lookups = make_lookups
        self._block_tokens = block_tokens
        self._min_hit_tokens = min_hit_tokens
        self._dump_output = dump_output
        self._allowance = lookup_allowance
        self.admission = admission
        self._rates = rates
        self._may_load = may_load
        self._items_used = items_used
        self._hits = Hits(admission, audit_one_in, block_tokens, lambda: gate.block_bytes, min_hit_tokens)
        self._closers = closers
        self._clock, self._pause = clock, pause
        self._presence = Presence()
        self.health = RanksHealth(clock)
        self._early = EarlyHits()
        self._others = Others(block_tokens)
        self.dumps = DumpPlanner(self._presence, self.health, clock)
        self._holds = Holds(self.dumps)
        self._manager: KVCacheManager | None = None
        self._pool: BlockPool | None = None
        self._device_cache: object = None  # vLLM's table of cached blocks, a new one whenever it was emptied
        self._keys: KeyMaker | None = None
        self._lookups: Lookups | None = None
        self._opened: object = None  # the store and the identity that these are for
        self._live: dict[str, Tracked] = {}
        self._due: dict[str, int] = {}  # request -> computed tokens at which its next block can be offered
        self._loads: list[Load] = []
        self.put_off = 0  # steps that requests lost by waiting for an answer
        self._late_dumps: list[Dump] = []  # planned when their request ended, sent with the next step
        self.account = Account(block_tokens, clock(), admission.rates)
        self._tiers = TierCounts(clock, "scheduler")
        self._memory = RankMemory(self._relocate, block_tokens, clock)

    # What vLLM binds ----------------------------------------------------------------------------------------

    def bind_manager(self, manager: KVCacheManager) -> None:
        """The block tables of the requests."""
        self._manager = manager

    def bind_pool(self, pool: BlockPool) -> None:
        """The pool alone."""
        self.dumps.bind(pool)
        self._pool, self._device_cache = pool, getattr(pool, "cached_block_hash_to_block", None)
        if self._device_cache is None:
            self.gate.off("this vLLM does not tell when its prefix cache is emptied", MissReason.UNSUPPORTED)

    # Requests -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Hash and look up, or begin to: the answer is usually there when vLLM asks."""
        self.gate.recheck()
        self._notice_reset()
        if self.gate.phase == OFF or request.resumable:  # a streaming session rewrites its own tokens: not cached
            reason = self.gate.reason if self.gate.phase == OFF else MissReason.UNSUPPORTED
            return self.account.left_alone(request, reason)
        tracked = self._live[request.request_id] = Tracked(request)
        self._due[request.request_id] = self._block_tokens
        self._memory.waits(tracked)
        if self._open() and self.gate.sure:
            self._start_lookup(tracked)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the ``computed`` ones found on the device; asked again at every step."""
        tracked = self._live.get(request.request_id)
        if tracked is None:
            return 0, False
        if tracked.preemptions != request.num_preemptions:
            tracked.restart()
            self._due[request.request_id] = self._block_tokens
        tracked.local = computed
        tracked.reason, tracked.unanswered = MissReason.INTERNAL, False  # unless this gets to its end
        self._notice_reset()
        self.gate.ask()
        is_open = self._open()
        if is_open and (request.skip_reading_prefix_cache or not self._may_load):
            tracked.reason = MissReason.UNSUPPORTED
            return 0, False
        if not (is_open and self.gate.sure):
            if self.gate.worth_waiting() and self._worth_waiting(tracked):
                return self._put_off(tracked)
            tracked.reason = MissReason.IDENTITY_PENDING if is_open else self.gate.reason
            return 0, False
        if tracked.lookup is None:
            self._start_lookup(tracked)
        assert tracked.lookup is not None  # just started
        if not self.health.all_healthy:
            stale = self.health.stale and self._worth_waiting(tracked)
            if stale and tracked.may_wait(self._clock(), self._allowance):
                return self._put_off(tracked)
            tracked.reason = MissReason.UNHEALTHY
            return 0, False
        if not tracked.lookup.done and not self._worth_waiting(tracked):
            tracked.reason, tracked.unanswered = None, True
            return 0, False
        if not tracked.lookup.settled(self._allowance):
            return self._put_off(tracked)
        if tracked.adopt(self._presence):
            self.account.looked_up(tracked.lookup.seconds)
        tokens = tracked.claimable(self._presence, self._block_tokens) * self._block_tokens - computed
        if tokens < max(self._min_hit_tokens, 1):
            tracked.reason = None
            return 0, False
        first, end = computed // self._block_tokens, (computed + tokens) // self._block_tokens
        end, tracked.reason = self._hits.taken(tracked, first, end)
        return ((end - first) * self._block_tokens, end > first)

    def admitted(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks were allocated; with ``external`` > 0 that many tokens are to be loaded into them."""
        tracked = self._live.get(request.request_id)
        if tracked is None:
            return
        self._memory.gone(request.request_id)
        first, count = tracked.local // self._block_tokens, external // self._block_tokens
        if external > 0:
            table = blocks.blocks[0]
            keys = tracked.keys[first : first + count]
            self._loads.append(
                Load(
                    request=request.request_id,
                    first=first,
                    keys=join_keys(keys),
                    blocks=np.fromiter((b.block_id for b in table[first : first + count]), np.int64, count),
                    timeout=self._may_take(tracked, external),
                )
            )
            tracked.loading, tracked.failures = range(first, first + count), {}
        self._others.admitted(tracked, blocks.blocks[0])
        self._count_asked(tracked, count)
        used = (
            tracked.judged_hit.stop if tracked.reason == MissReason.DECLINED else 0
        )  # declined, and in use all the same
        self._touch(tracked, max((tracked.local + external) // self._block_tokens, used))

    def _put_off(self, tracked: Tracked) -> tuple[None, bool]:
        """vLLM is to ask again: the request loses a step."""
        tracked.reason = MissReason.NOT_TAKEN
        self.put_off += 1
        return None, False

    def _worth_waiting(self, tracked: Tracked) -> bool:
        """Whether all that the store could have for a request is worth the step that it loses by waiting for that."""
        request = tracked.request
        tokens = tracked.most_claimable(self._block_tokens) * self._block_tokens - tracked.local
        if tokens < max(self._min_hit_tokens, 1):
            return False
        return self.admission.worth_waiting(tokens, request.num_tokens - tracked.local - tokens)

    @harmless(None)
    def _may_take(self, tracked: Tracked, tokens: int) -> float | None:
        """Seconds a load may take. vLLM waits for it by now: whatever goes wrong here, it is sent."""
        return self._hits.begins(tracked, tokens)

    @harmless(None)
    def _count_asked(self, tracked: Tracked, hit: int) -> None:
        """A request is admitted: count its blocks, once. It may be again: when its load has ended, or has failed."""
        missed: dict[MissReason, int] = {}
        if not tracked.asked:
            missed = misses(tracked, hit, self._presence, self._block_tokens, self._min_hit_tokens)
        tracked.asked = True
        if hit or missed:
            self.account.asked(tracked.tally, hit, missed)
            self.account.declined(missed.get(MissReason.DECLINED, 0))

    def finished(self, request: Request) -> None:
        """The request ends; what it holds and was not offered yet is offered now, and sent with the next step.

        A load of it that is under way goes on: vLLM keeps the blocks until every rank reported it, and what they
        hold until then is nobody's business.
        """
        tracked = self._live.pop(request.request_id, None)
        self._memory.gone(request.request_id)
        self._others.finished(request.request_id)
        self._due.pop(request.request_id, None)
        if tracked is None:
            return
        if not tracked.asked:
            tracked.reason = MissReason.ABORTED
            self._count_asked(tracked, 0)
        self.account.missed(tracked.tally, MissReason.ABORTED, len(tracked.loading))
        self._notice_reset()
        try:
            if not tracked.loading and self._open() and self.gate.sure:
                computed = self._others.computed(tracked)
                self._late_dumps += self._offer(tracked, computed, computed, self.dumps.room())
                self._hold(tracked, computed)
        finally:
            self.account.told(request, tracked.tally)
            if not self._live and self._device_cache_is_empty():
                self.gate.doubt(emptied=False)  # vLLM would be right about other weights without a word

    # Steps --------------------------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """What the workers do in this step. Whatever goes wrong in here: the loads that vLLM waits for are sent, and
        what others are about to overwrite is read before."""
        settle = self.dumps.overtaken(self._live)
        try:
            plan = self._plan(output)
        except Exception as error:
            throttle.warning("plan", "a step could not be planned: %r", error)
            plan = StepPlan(loads=self._loads)
            self._loads = []
        if settle:
            plan = replace(plan, settle=settle)
        return plan

    def _plan(self, output: SchedulerOutput) -> StepPlan:
        self._notice_reset()
        is_open = self._open()
        self._others.planned(output, self._live)
        now = self._clock()
        self.admission.pace.planned(output.num_scheduled_tokens, output.total_num_scheduled_tokens, now)
        if now >= self.account.next_summary:
            self.account.summary(now, self.gate.block_bytes)
        if self._rates is not None and now >= self._rates.due:
            self._rates.keep(now)
        setup = self.gate.take_setup()
        dumps, self._late_dumps = self._late_dumps, []
        self._tell_items(output)
        if self._holds:
            self._end_holds(is_open, dumps, now)
        is_open = is_open and self.gate.sure
        if is_open:
            try:
                self._plan_dumps(output, dumps)
            except Exception as error:
                throttle.warning("offers", "blocks of a step could not be offered: %r", error)
        loads, judge = self._loads, self.gate.take_question()
        touched, prefetch = self._memory.take() if is_open else ([], None)
        if not output.total_num_scheduled_tokens:
            self._pause(YIELD_S)
        if not (setup or dumps or loads or touched or prefetch) and judge is None:
            return NOTHING
        self._loads = []
        return StepPlan(setup=setup, loads=loads, dumps=dumps, touched=touched, prefetch=prefetch, judge=judge)

    @harmless(None)
    def _tell_items(self, output: SchedulerOutput) -> None:
        """Tell of every request that begins, of those that are left alone too: vLLM keeps what it makes of them."""
        for new in output.scheduled_new_reqs:
            if not new.mm_features or self._items_used is None:
                continue
            if tracked := self._live.get(new.req_id):
                self._items_used(tracked.request, 0)  # vLLM tells the ranks only of the data that they need
            else:
                self._items_used(new, new.num_computed_tokens)

    def _relocate(self, lookup: Lookup) -> None:
        if self._lookups is not None:
            self._lookups.relocate(lookup)

    def _plan_dumps(self, output: SchedulerOutput, dumps: list[Dump]) -> None:
        scheduled, due, live = output.num_scheduled_tokens, self._due, self._live
        cached = output.scheduled_cached_reqs
        if self._others.load_in_steps:  # what this step computes may be found to be wrong after it
            known = ((name, self._others.computed(live[name])) for name in cached.req_ids if name in live)
            ready = [(name, computed, computed) for name, computed in known if computed >= due.get(name, FAR)]
        else:
            ready = [
                (name, computed + scheduled[name], computed)
                for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
                if computed + scheduled[name] >= due.get(name, FAR)
            ]
            news = (new for new in output.scheduled_new_reqs if new.req_id in live)
            ready += [
                (new.req_id, new.num_computed_tokens + scheduled[new.req_id], new.num_computed_tokens) for new in news
            ]
        room = self.dumps.room() if ready else 0
        if room == 0:
            return
        for name, computed, before in ready:
            lookup = live[name].lookup
            if lookup is not None and not lookup.settled(self._allowance):
                continue  # the next step offers what the store turns out not to have
            try:
                settled = before - getattr(live[name].request, "num_in_flight_tokens", 0)
                plans = self._offer(live[name], computed, settled, room)
            except Exception as error:
                throttle.warning("offer", "blocks of a request could not be offered: %r", error)
                due[name] = FAR
                continue
            room -= sum(len(plan.blocks) for plan in plans)
            dumps += plans

    def _limit(self, request: Request) -> int:
        """Tokens of which blocks may be offered; only final ones count."""
        limit: int = request.num_tokens if self._dump_output else request.num_prompt_tokens
        return limit

    def _offer(self, tracked: Tracked, computed: int, settled: int, room: int) -> list[Dump]:
        """Offer the full blocks of the first ``computed`` tokens, at most ``room``; steps that have ended computed
        ``settled`` of them."""
        request, size = tracked.request, self._block_tokens
        limit = self._limit(request)
        upto = min(min(computed, limit) // size, tracked.wrong_from)
        if self._manager is None or self._keys is None:
            return []
        plans: list[Dump] = []
        if upto > tracked.cursor and room > 0:
            upto = tracked.confirmed(upto, min(settled, limit) // size, self._keys, self._clock())
            if not tracked.keyable:
                self._due.pop(request.request_id, None)
                return []
            upto = tracked.grow(upto, self._keys, self._presence)
            blocks: Any = self._manager.get_blocks(request.request_id).blocks[0]
            plans = self.dumps.plan(tracked, upto, blocks, room)
            self.account.offered(tracked.tally, sum(len(plan.blocks) for plan in plans))
            self._touch(tracked, tracked.cursor)
        if request.request_id in self._due:
            ended = not self._dump_output and tracked.cursor >= limit // size
            ended = ended or tracked.cursor >= tracked.wrong_from
            self._due[request.request_id] = FAR if ended else (tracked.cursor + 1) * size
        return plans

    def _hold(self, tracked: Tracked, computed: int) -> None:
        """The request ends: keep what is not confirmed yet, and begin to find out."""
        request = tracked.request
        upto = min(min(computed, self._limit(request)) // self._block_tokens, tracked.wrong_from)
        if self._manager is None or self._keys is None or not tracked.keyable or upto <= tracked.cursor:
            return
        now = self._clock()
        if self._keys.current(request, now) is not None:
            return  # what could be offered was
        upto = tracked.grow(upto, self._keys, self._presence)
        self._holds.add(tracked, upto, self._manager.get_blocks(request.request_id).blocks[0], now)

    @harmless(None)
    def _end_holds(self, is_open: bool, dumps: list[Dump], now: float) -> None:
        if not is_open or self._keys is None:
            return self._holds.drop()
        for tracked, plans in self._holds.take(self._keys, now):
            self.account.offered(tracked.tally, sum(len(plan.blocks) for plan in plans))
            dumps += plans

    @harmless(None)
    def _touch(self, tracked: Tracked, blocks: int) -> None:
        """Tell the store that a prefix is in use: ancestors of what is dumped count as used later than that."""
        now = self._clock()
        if blocks and self._lookups is not None and now - tracked.touched_at >= TOUCH_S:
            tracked.touched_at = now
            self._lookups.touch(tracked.keys[:blocks])
            self._memory.used(tracked.keys[:blocks])

    def worker_output(self, output: KVConnectorOutput) -> None:
        """What the ranks did: stores opened, dumps staged and ended, loads failed."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport) and report.version == VERSION:
            self._reported(report)
        elif report is not None:
            self.gate.off("the workers run another version of ucm than the scheduler")
        self._others.reported(output.invalid_block_ids, self._live.values(), self._manager)
        if output.finished_recving:
            for name in self.admission.oldest_first(output.finished_recving):
                self.admission.ended(name)
                if tracked := self._live.get(name):
                    self._load_ended(tracked)

    def step_ended(self) -> None:
        """vLLM is done with a step: what its workers did was told before."""
        self.admission.step_ended()

    def _shaken(self, shakes: Sequence[Handshake]) -> None:
        """The workers have answered."""
        try:
            self.gate.shake(shakes)
        except Exception as error:
            self.gate.off(f"the handshake with the workers failed: {error!r}")
        if why := next((shake.only_stores for shake in shakes if shake.only_stores), ""):
            self._may_load = False
            logger.warning("blocks are stored, and none are loaded: %s", why)

    def _reported(self, report: WorkerReport) -> None:
        if shakes := [rank.handshake for rank in report.ranks if rank.handshake is not None]:
            self._shaken(shakes)
        published, failed = self.dumps.published_blocks, self.dumps.failed_blocks
        for rank in report.ranks:
            self.gate.report(rank)
            self.health.report(rank.rank, rank.healthy)
            self._early.report(rank.rank, rank.gained, rank.lost)
            self._memory.report(rank)
            for served in rank.served:
                self.admission.served(served.request, served.tiers)
            for failure in rank.load_failures:
                self.admission.failed(failure.request, MissReason.TIMEOUT in failure.reasons)
                for key in split_keys(failure.refused):
                    self._presence.refuse(key)
                for key in split_keys(failure.newer):
                    self._presence.leave(key)
                if tracked := self._live.get(failure.request):
                    tracked.failed_at(failure.first)
                    reasons = (named(name, MissReason.INTERNAL) for name in failure.reasons)
                    tracked.failed_because(failure.first, reasons)
                    self._rewound(tracked)
                throttle.warning("load failed", "request %s: a load failed, computing instead", failure.request)
            self.dumps.report(rank, self._live.values())
            if any(result.failed for result in rank.done):
                for tracked in self._live.values():
                    self._rewound(tracked)
        self.account.dumped(self.dumps.published_blocks - published, self.dumps.failed_blocks - failed)

    @harmless(None)
    def _load_ended(self, tracked: Tracked) -> None:
        """Every rank reported the load: what lies before the first failed block arrived everywhere."""
        load, failures, tally = tracked.loading, tracked.failures, tracked.tally
        tracked.loading, tracked.failures = range(0), {}
        end = max(min(failures, default=load.stop), load.start)
        self.account.loaded(tally, max(min(end, load.stop) - load.start, 0))
        for ordinal in range(end, load.stop):
            self.account.missed(tally, failures.get(ordinal, MissReason.LOAD_FAILED), 1)

    def _rewound(self, tracked: Tracked) -> None:
        """The cursor may have moved back: look at the request again in its next step."""
        name = tracked.request.request_id
        self._due[name] = min(self._due.get(name, FAR), (tracked.cursor + 1) * self._block_tokens)

    def reset(self) -> None:
        """vLLM wants no connector to serve what was computed before, as after a change of the weights in memory."""
        self._device_cache = getattr(self._pool, "cached_block_hash_to_block", None)
        self._begin_generation()

    def _notice_reset(self) -> None:
        """vLLM does not tell connectors when it empties its prefix cache, unless asked to; but then its pool has a new
        table."""
        if self._pool is not None and self._pool.cached_block_hash_to_block is not self._device_cache:
            self._device_cache = self._pool.cached_block_hash_to_block
            self._begin_generation()

    def _begin_generation(self) -> None:
        """The weights in memory may be others from here on. What was computed before is not offered any more."""
        late, self._late_dumps = self._late_dumps, []
        self.dumps.drop(late)
        self._holds.drop()
        self.gate.doubt(emptied=True)
        for name, tracked in self._live.items():
            tracked.doubt()
            self._due[name] = self._block_tokens
        logger.info("vLLM emptied its prefix cache: the weights in memory are looked at before it is used again")

    def _device_cache_is_empty(self) -> bool:
        return self._pool is not None and not len(self._pool.cached_block_hash_to_block)

    @property
    def wants_steps(self) -> bool:
        """Whether an idle engine should take a step: stores are being opened, or something is still to be sent."""
        return self.gate.busy() or bool(self._late_dumps) or bool(self._holds)

    def take_tiers(self) -> dict[str, Any]:
        """What the tiers of this half's store did since they were last told of, about once a second."""
        return self._tiers.take(self.gate.store)

    def stats(self) -> Mapping[str, Any]:
        """Counters of this half."""
        total = self.account.total
        return {
            "phase": self.gate.phase,
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

    def close(self) -> None:
        """Close the scheduler's own store and end the background threads; joins none of them."""
        logger.info("scheduler half: %s", self.stats())
        if self.gate.store is not None:
            self.gate.store.close()
        for close in self._closers:
            close()

    # Inside -------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        if self.gate.phase != OPEN:
            self.gate.poll()
            if self.gate.phase != OPEN:
                return False
        opened = (self.gate.store, self.gate.identity_text)
        if self._opened != opened:  # the first, or another identity
            self._opened = opened
            for tracked in self._live.values():
                tracked.rekey()
            self._keys = self._make_keys(self.gate.identity_text)
            self._early.open(self.gate.readers)
            self._lookups = self._make_lookups(self.gate.store, self.gate.masks, self._early)
            self.dumps.open(self.gate.ranks)
            if self._rates is not None:
                self._rates.open(self.gate.identity_text, self.gate.store_label)
        return True

    def _start_lookup(self, tracked: Tracked) -> None:
        assert self._lookups is not None and self._keys is not None  # the gate is open
        maker, request = self._keys, tracked.request
        at_once = maker.at_once(request, AT_ONCE_TOKENS)
        tracked.lookup = self._lookups.start(lambda: maker.first(request), self._clock, at_once=at_once)
