"""An engine and a tier that exist in virtual time only, around the real scheduler side.

The engine is vLLM's: first come first served, chunked prefill within a budget of tokens, one token
a step for each request that decodes, loads beside the steps and noticed at their end. A step takes
``overhead + tokens * cost``. The tier moves the bytes of its loads one after the other, after a
latency, at a bandwidth that may change with time; a load past its deadline is given up. Nothing
depends on the machine: two runs give the same figures.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parts import BLOCK, Rig
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import Request

from ucm.integration.vllm.connector.admission.admission import UNKNOWN_LOAD_S
from ucm.integration.vllm.connector.admission.rates import ComputeSpeed, LoadSpeed
from ucm.integration.vllm.connector.metadata import Load, LoadFailure, LoadServed, RankReport
from ucm.store import part_mask, record_ids

#: Bytes of one block in these tests, of all ranks.
BLOCK_BYTES = 1 << 20
#: Seconds after which a load is given up that begins while the speed of computing is unknown.
UNKNOWN_S = UNKNOWN_LOAD_S


@dataclass
class Tier:
    """A medium: seconds before the first byte, and bytes a second, both as functions of the
    time."""

    latency: Callable[[float], float]
    bandwidth: Callable[[float], float]
    free_at: float = 0.0

    def begin(self, now: float, size: int) -> float:
        """When a load of that size will have ended, unless it is given up; loads queue for the
        bandwidth."""
        start = max(now + self.latency(now), self.free_at)
        self.free_at = start + size / self.bandwidth(start)
        return self.free_at

    def given_up(self, now: float) -> None:
        """What was still to be moved of the oldest load is not moved any more."""
        self.free_at = min(self.free_at, now)


def steady(latency: float, bandwidth: float) -> Tier:
    """A tier that is always as fast."""
    return Tier(lambda now: latency, lambda now: bandwidth)


@dataclass
class Engine:
    """What computing takes: seconds of a step, seconds of a token, most tokens of a step."""

    overhead: float = 0.010
    cost: float = 0.0004
    budget: int = 256
    noise: float = 0.0
    first_steps: float = (
        0.0  # seconds more that each of the first steps takes, as with kernels that are compiled
    )
    cold_steps: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, of how many blocks the store has how many, and how many tokens it
    produces."""

    at: float
    blocks: int
    stored: int
    output: int = 1
    below: int = 0  # of the stored blocks, the last ones that only the lower tier has


def traffic(count: int, gap: float, seed: int = 0, output: int = 4) -> list[Arrival]:
    """Requests of several lengths, ``gap`` seconds apart on average, of which the store has more or
    less."""
    source, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += source.expovariate(1 / gap)
        blocks = source.choice([15, 30, 60, 120])
        made.append(
            Arrival(
                at, blocks, int(blocks * source.choice([0.2, 0.5, 0.9])), source.randint(1, output)
            )
        )
    return made


def spread(arrivals: Sequence[Arrival], seed: int = 0) -> list[Arrival]:
    """The same requests, with all, some or none of what is stored in the lower tier alone."""
    source = random.Random(seed)
    return [
        replace(each, below=int(each.stored * source.choice([0, 0, 0.3, 0.7, 1])))
        for each in arrivals
    ]


@dataclass
class Outcome:
    """Times to the first token in order of arrival, and the outcome of the hits."""

    first: list[float]
    loaded: int
    declined: int
    learning: int
    unknown: int  # loads that began while the speed of computing was unknown

    def mean(self, since: int = 0) -> float:
        """Mean time to the first token of the requests from ``since`` on, in seconds."""
        return statistics.fmean(self.first[since:])


@dataclass
class _Live:
    request: Request
    arrival: Arrival
    number: int
    computed: int = 0
    load: Load | None = None
    ends: float = 0.0
    deadline: float = 0.0
    produced: int = 0
    admitted: bool = False
    above: int = 0  # blocks of its load that the upper tier has
    below: int = 0  # and those that only the lower one has


@dataclass
class Simulation:
    """One run. ``mode`` is the connector's ``admission``; never is the engine without a cache.
    ``lower``: a second tier below the first; a load reads from both at once. ``known``: the speeds
    that an earlier life of the engine left."""

    engine: Engine
    tier: Tier
    arrivals: Sequence[Arrival]
    mode: str = "measured"
    seed: int = 0
    lower: Tier | None = None
    known: tuple[ComputeSpeed | None, dict[int, LoadSpeed]] = (None, {})
    steps: int = 0
    unknown: int = 0
    waiting: list[_Live] = field(default_factory=list)
    loading: list[_Live] = field(default_factory=list)
    running: list[_Live] = field(default_factory=list)

    def run(self) -> Outcome:
        """All requests, to their last token."""
        self.random = random.Random(self.seed)
        # Enough for all requests that run at once.
        blocks = min(sum(arrival.blocks + 2 for arrival in self.arrivals), 1 << 12)
        # Nothing is dumped here.
        settings = {"step_tokens": self.engine.budget, "blocks": blocks, "dump": "none"}
        self.rig = Rig(admission=self.mode, **settings)
        self.rig.readiness.block_bytes = BLOCK_BYTES
        self.rig.report(RankReport(0, ready=True))
        self.rig.scheduler.step_ended()
        self.rig.admission.recall(*self.known)
        if self.lower is not None:
            self.rig.store.tier_names = ("memory", "disk")
        start = self.rig.clock.now
        coming = [replace(arrival, at=start + arrival.at) for arrival in self.arrivals]
        first: dict[int, float] = {}
        arrived = 0
        while arrived < len(coming) or self.waiting or self.loading or self.running:
            now = self.rig.clock.now
            if not (self.waiting or self.loading or self.running):
                now = self.rig.clock.now = max(now, coming[arrived].at)
            while arrived < len(coming) and coming[arrived].at <= now:
                self._arrive(coming[arrived], arrived)
                arrived += 1
            self._step(first)
        account = self.rig.scheduler.miss_stats.total
        return Outcome(
            [first[n] for n in range(len(coming))],
            account.loaded,
            account.missed["declined"],
            self.rig.admission.learning_loads,
            self.unknown,
        )

    def _arrive(self, arrival: Arrival, number: int) -> None:
        tokens = arrival.blocks * BLOCK + 1
        request = self.rig.request(f"r{number}", tokens, seed=number + 1, hashed=False)
        self.rig.stored(request, arrival.stored)
        if arrival.below:
            keys = self.rig.keys_of(request)[arrival.stored - arrival.below : arrival.stored]
            self.rig.store.lower.update(record_ids(keys, part_mask(0, 0, 0)))
        self.rig.later.run()
        self.waiting.append(_Live(request, arrival, number))

    def _schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        budget, scheduler = self.engine.budget, self.rig.scheduler
        for live in self.running:
            tokens = min(budget, live.request.num_tokens - live.computed)
            if tokens > 0:
                scheduled[live.request.request_id] = tokens
                budget -= tokens
        while self.waiting and budget > 0:
            live = self.waiting[0]
            if not live.admitted or live.computed == 0:
                hit, _ = scheduler.get_num_new_matched_tokens(live.request, 0)
                assert hit is not None  # lookups are answered at once
                blocks = (
                    self.rig.tables.get_blocks(live.request.request_id)
                    if live.admitted
                    else self.rig.tables.allocate(live.request, live.arrival.blocks + 2)
                )
                scheduler.update_state_after_alloc(live.request, blocks, hit)
                live.admitted = True
                if hit:
                    self.waiting.pop(0)
                    self.loading.append(live)
                    continue
            else:
                scheduler.update_state_after_alloc(
                    live.request, self.rig.tables.get_blocks(live.request.request_id), 0
                )
            self.waiting.pop(0)
            self.running.append(live)
            tokens = min(budget, live.request.num_tokens - live.computed)
            scheduled[live.request.request_id] = tokens
            budget -= tokens
        return scheduled

    def _step(self, first: dict[int, float]) -> None:
        clock, scheduler = self.rig.clock, self.rig.scheduler
        scheduled = self._schedule()
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.scheduled_cached_reqs = CachedRequestData.make_empty()
        plan = scheduler.build_connector_meta(output)
        by_name = {live.request.request_id: live for live in self.loading}
        for load in plan.loads:
            live = by_name[load.request]
            live.load = load
            live.above = min(len(load.blocks), live.arrival.stored - live.arrival.below)
            live.below = len(load.blocks) - live.above
            live.ends = max(
                tier.begin(clock.now, blocks * BLOCK_BYTES) for tier, blocks in self._parts(live)
            )
            assert load.timeout is not None
            self.unknown += load.timeout == UNKNOWN_S
            live.deadline = clock.now + load.timeout
        clock.now += self._seconds(output.total_num_scheduled_tokens)
        self._loads_end()
        scheduler.step_ended()
        for live in list(self.running):
            tokens = scheduled.get(live.request.request_id, 0)
            live.computed += tokens
            if tokens and live.computed >= live.request.num_tokens:
                first.setdefault(live.number, clock.now - live.arrival.at)
                live.produced += 1
                live.request.append_output_token_ids([7])
            live.request.num_computed_tokens = live.computed
            if live.produced >= live.arrival.output:
                self.running.remove(live)
                scheduler.request_finished(live.request)
                self.rig.tables.free(live.request)

    def _parts(self, live: _Live) -> list[tuple[Tier, int]]:
        """What a load reads from each tier."""
        parts = [(self.tier, live.above)] if live.above else []
        return parts + ([(self.lower, live.below)] if live.below and self.lower is not None else [])

    def _seconds(self, tokens: int) -> float:
        """A step's time. One that only polls for the end of loads lasts until the next event, at
        least 1 ms."""
        if not tokens:
            soonest = min((min(live.ends, live.deadline) for live in self.loading), default=0.0)
            return min(max(soonest - self.rig.clock.now, 0.001), 0.010)
        self.steps += 1
        took = self.engine.overhead + tokens * self.engine.cost
        took *= 1 + self.engine.noise * self.random.random()
        return took + (self.engine.first_steps if self.steps <= self.engine.cold_steps else 0.0)

    def _loads_end(self) -> None:
        now, failures, ended, served = self.rig.clock.now, [], set(), []
        for live in list(self.loading):
            assert live.load is not None
            if min(live.ends, live.deadline) > now:
                continue
            self.loading.remove(live)
            ended.add(live.request.request_id)
            if live.ends <= live.deadline:
                live.computed = len(live.load.blocks) * BLOCK
                if self.lower is not None:
                    served.append(LoadServed(live.request.request_id, (live.above, live.below)))
            else:
                for tier, _ in self._parts(live):
                    tier.given_up(now)
                names = ("timeout",) * len(live.load.blocks)
                failures.append(LoadFailure(live.request.request_id, live.load.first, b"", names))
            live.request.num_computed_tokens = live.computed
            self.waiting.insert(0, live)
        if ended:
            report = RankReport(0, ready=True, free_slots=0, load_failures=failures, served=served)
            self.rig.report(report, recved=ended)


_without: dict[str, Outcome] = {}


def compare(
    engine: Engine,
    make_tier: Callable[[], Tier],
    arrivals: Sequence[Arrival],
    seed: int = 0,
    make_lower: Callable[[], Tier] | None = None,
    known: tuple[ComputeSpeed | None, dict[int, LoadSpeed]] = (None, {}),
) -> Any:
    """The outcome with measured admission, and that of the same engine without a cache, which is
    kept."""
    key = f"{engine} {seed} {hash(tuple(arrivals))}"
    lower = None if make_lower is None else make_lower()
    if key not in _without:
        _without[key] = Simulation(engine, steady(0.0, 1.0), arrivals, "never", seed).run()
    return Simulation(
        engine, make_tier(), arrivals, "measured", seed, lower, known
    ).run(), _without[key]
