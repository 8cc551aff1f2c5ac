"""Whether a hit is worth loading: only if that is quicker than computing, as far as both speeds are known.

A hit is declined when ``queue wait + fixed + bytes / rate``, with what the loads given up of late cost on top, exceeds
a share of what computing its tokens takes. What is not known accepts. Both sides grow with the length of the hit, so a
part of a hit pays only where the whole does, and short hits are declined by the same rule.

Nothing is learnt from hits that are declined, so one in a while is loaded all the same. What that may cost is kept in a
ledger in seconds: it gains :data:`LEARNING` of what computing each hit takes and what loads saved, and pays for loads
that took longer than computing. A hit is tried only when the ledger can pay for what its load is expected to lose, so
in the long run the cache costs no more than that part, at whatever speed of the tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from ucm.integration.vllm.connector.load_rate import LoadRate
from ucm.integration.vllm.connector.pace import Pace

#: Part of the time that computing the hits takes which may be spent on learning.
LEARNING = 0.01
#: What the ledger begins with, in seconds.
FIRST_S = 0.5
#: Hits of a tier without a load of it that ended, before one is loaded to learn.
UNLEARNT = 8
#: The ledger is kept within so many times what the load at hand may take.
LEDGER = 4.0
#: A load is behind when it has taken so many times what was expected, counted from the end of the step by which it had
#: begun for certain: the first that ends may have been planned before it.
BEHIND, BEGUN = 2.0, 2
#: Tiers told apart; more are one.
TIERS = 8


class Verdict(Enum):
    """What becomes of a hit."""

    LOAD = "load"
    LEARN = "learn"  # would be declined, and is loaded to learn the rates anew
    DECLINE = "decline"


@dataclass(slots=True)
class _Tier:
    rate: LoadRate = field(default_factory=LoadRate)
    waiting: int = 0  # bytes of loads under way
    moved: int = 0  # bytes of loads ended
    unlearnt: int = 0  # hits since the last load that ended


@dataclass(slots=True)
class _Load:
    tier: _Tier
    size: int  # bytes
    compute: float | None  # seconds that computing its tokens would have taken
    allowance: float | None  # seconds it may take
    expected: float | None  # seconds
    learns: bool
    began: float
    moved: int  # bytes of the tier's loads ended before it began
    steps: int = 0  # ended since then
    begun: float = 0.0  # when it had begun for certain
    failed: bool = False
    late: bool = False


class Admission:
    """One engine's judgement of hits, and what it knows of its loads."""

    def __init__(self, mode: str, share: float, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        """``mode``: measured, always or never; ``share`` of the time to compute that a load may take."""
        self._mode, self._share, self.pace, self._clock = mode, share, pace, clock
        self._tiers: dict[str, _Tier] = {}
        self._newest: _Tier | None = None
        self._loads: dict[str, _Load] = {}
        self._ledger = FIRST_S
        self._seen = float("-inf")  # when the workers' reports were last looked at
        self.learning_loads = 0

    # Judging ------------------------------------------------------------------------------------------------

    def judge(self, tokens: int, rest: int, size: int, tier: str = "") -> Verdict:
        """Whether to load ``tokens`` of ``size`` bytes for a request that computes ``rest`` more anyway. Once per hit:
        each adds to the ledger."""
        if self._mode != "measured":
            return Verdict.LOAD if self._mode == "always" else Verdict.DECLINE
        now, compute, allowance = self._clock(), self.pace.seconds(tokens, rest), self.pace.allowance(tokens, rest)
        known = self._tier(tier)
        behind = self._behind(known, now)
        if compute is None or allowance is None:
            return Verdict.LOAD if behind < self.pace.least_allowance else Verdict.DECLINE
        known.unlearnt += 1
        self._book(LEARNING * (self.pace.seconds(tokens + rest, 0) or 0.0), allowance)
        size += known.waiting
        step = self.pace.step_under_way(now)
        expected = known.rate.seconds(size)
        if expected is None and not behind:
            return Verdict.LOAD
        load = max(expected or 0.0, behind)
        load = max(load + step / 2, step)
        late = allowance + compute  # what a load given up costs, with computing after it
        if load + known.rate.given_up * max(late - load, 0.0) <= self._share * compute:
            return Verdict.LOAD
        if known.waiting or self._ledger < 0:
            return Verdict.DECLINE
        if max(known.rate.at_best(size) + step / 2, step) <= self._share * compute:
            return Verdict.LEARN
        loss = max(load - compute, 0.0) if load <= allowance else allowance
        return Verdict.DECLINE if known.unlearnt < UNLEARNT or loss > self._ledger else Verdict.LEARN

    def _tier(self, name: str) -> _Tier:
        if name not in self._tiers and len(self._tiers) >= TIERS:
            name = next(iter(self._tiers))
        return self._tiers.setdefault(name, _Tier())

    def _behind(self, tier: _Tier, now: float) -> float:
        """How long the oldest load of a tier has taken that is behind what was expected of it; 0: none is."""
        return max(
            (
                now - load.begun
                for load in self._loads.values()
                if load.tier is tier and load.steps > BEGUN and now - load.begun > BEHIND * (load.expected or 0.0)
            ),
            default=0.0,
        )

    # Loads --------------------------------------------------------------------------------------------------

    def began(
        self, request: str, tokens: int, rest: int, size: int, tier: str = "", *, learns: bool = False
    ) -> float | None:
        """A load was planned; the seconds it may take, None for the store's own deadline."""
        self.forget(request)  # never two of one request
        known, now = self._tier(tier), self._clock()
        self._loads[request] = _Load(
            known,
            size,
            self.pace.seconds(tokens, rest),
            self.pace.allowance(tokens, rest),
            known.rate.seconds(known.waiting + size),
            learns,
            now,
            known.moved,
        )
        known.waiting += size
        self.learning_loads += learns
        return self._loads[request].allowance

    def forget(self, request: str) -> None:
        """A load of which nothing more will be heard."""
        if load := self._loads.pop(request, None):
            load.tier.waiting -= load.size

    def oldest_first(self, requests: Iterable[str]) -> list[str]:
        """Requests whose loads ended, in the order in which these began."""
        far = float("inf")
        return sorted(requests, key=lambda name: (self._loads[name].began if name in self._loads else far, name))

    def failed(self, request: str, late: bool) -> None:
        """A rank reported that its part of a load failed; ``late``: given up for its time."""
        if load := self._loads.get(request):
            load.failed, load.late = True, load.late or late

    def ended(self, request: str) -> None:
        """Every rank has reported a load: the slowest was the last. One that failed tells about the speed only if it
        was given up."""
        load = self._loads.pop(request, None)
        if load is None:
            return
        tier, now, late = load.tier, self._clock(), load.late
        tier.waiting -= load.size
        if load.failed and not late:
            return
        high = max(now - load.began, 0.0)
        low = min(max(self._seen - load.began, 0.0), high)
        tier.unlearnt, self._newest = 0, tier
        if late:
            tier.rate.learn(tier.moved - load.moved + load.size, high, float("inf"), late=True, sure=load.learns)
        else:
            tier.moved += load.size
            tier.rate.learn(tier.moved - load.moved, low, high, sure=load.learns)
        if load.compute is not None and load.allowance is not None:
            self._book(-high if late else load.compute - (low + high) / 2, load.allowance)

    def step_ended(self) -> None:
        """A step has ended and its reports were looked at."""
        self._seen = now = self._clock()
        self.pace.ended(now)
        for load in self._loads.values():
            load.steps += 1
            if load.steps == BEGUN:
                load.begun = now

    def _book(self, seconds: float, allowance: float) -> None:
        self._ledger = min(max(self._ledger + seconds, -LEDGER * allowance), LEDGER * allowance)

    # What is told -------------------------------------------------------------------------------------------

    def rates(self) -> dict[str, float]:
        """The speeds that are known, by name and unit; those of loads are of the tier that was loaded from last."""
        found = {"prefill_tokens_per_second": self.pace.tokens_per_second}
        if self._newest is not None:
            rate = self._newest.rate
            found |= {"load_bytes_per_second": rate.bytes_per_second, "load_fixed_seconds": rate.fixed}
        return {name: value for name, value in found.items() if value is not None}
