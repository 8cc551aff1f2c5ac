"""The speed at which this engine computes prompts, and at which each tier loads.

:class:`ComputeRate` models the time of a step as ``overhead + tokens * cost``: the overhead is the
time of steps with few tokens, the cost is the addition of each token of larger steps. The tokens of
a hit, added to a prompt that is computed anyway, cost their part and the steps they add, not a step
of their own. The estimate is a low quartile of the last samples: compilation, a busy machine and
long contexts make steps slower and nothing makes them faster, and one slow step must not make a hit
look cheap.

:class:`LoadRate` models the time of a load from one tier as ``fixed + bytes / rate``, fitted to the
last loads. The bytes of a sample are those the tier had to move until the load was done, including
the loads ahead of it. The end of a load is known up to one step of vLLM, so a sample is an
interval; one that contains the expected time changes nothing. A single sample that is far off is
treated as an outlier and limited to twice or half the expected time; a second one in the same
direction means that the tier has changed, and the samples before are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

# Computing
# --------------------------------------------------------------------------------------------------

#: Fewest prompt tokens of a step that counts for the speed of computing; others show the overhead.
MIN_TOKENS = 64
#: A request with fewer tokens in a step decodes, perhaps with guessed tokens.
CHUNK_TOKENS = 16
#: Steps of each kind that are remembered.
STEPS = 16
#: First prompt steps that are not counted: kernels are compiled and caches are cold.
SKIPPED = 1
#: Least part of a step's time that counts as its tokens', however large the overhead seems.
LEAST_PART = 0.05
#: Seconds after the end of a step after which the engine counts as idle.
IDLE_S = 0.005
#: A load may take this many times as long as computing its tokens.
FACTOR = 2.0
#: Least plausible speed of computing prompts, in tokens a second.
FLOOR = 100.0


class ComputeSpeed(NamedTuple):
    """A speed of computing, as it is remembered."""

    overhead: float  # seconds of a step
    cost: float  # seconds of a token
    tokens: int  # of a prompt step by which this was measured

    def plausible(self) -> bool:
        """Whether it can be a measurement."""
        return self.tokens >= MIN_TOKENS and self.cost > 0

    def per_token(self) -> float:
        """Seconds of a token in the steps by which it was measured."""
        return self.overhead / self.tokens + self.cost


class ComputeRate:
    """The times of the last steps. Every method is cheap enough for each step or each request."""

    def __init__(self, min_s: float, max_s: float, step_tokens: int = 0, overlap: int = 1) -> None:
        """A load gets at least ``min_s`` and at most ``max_s`` seconds; ``step_tokens``: most
        tokens of one step; ``overlap``: most steps that are planned and have not ended."""
        self._min_s = min_s
        self._max_s, self._step_tokens = max_s, step_tokens
        # planned at, prompts' tokens, all, and those that Blend computes before the step
        self._in_flight: deque[tuple[float, int, int, int | None]] = deque(maxlen=overlap)
        self._blends: deque[float] = deque(maxlen=STEPS)  # seconds for each of these
        self._small: deque[float] = deque(maxlen=STEPS)
        self._large: deque[tuple[float, int]] = deque(maxlen=STEPS)  # seconds, tokens
        self._shown: deque[float] = deque(maxlen=STEPS)  # seconds for each token, of any step
        self._skip = SKIPPED
        self._ended_at = float("-inf")
        self._last = 0.0  # seconds of the last step, 0 when it computed nothing
        self._known: tuple[float, float] | None = None  # overhead, cost; None: to be computed
        self._borrowed: ComputeSpeed | None = None  # of another engine, used while _large is empty

    # Samples
    # -------------------------------------------------------------------------------------------

    def planned(
        self, scheduled: Mapping[str, int], total: int, now: float, blended: int | None = None
    ) -> None:
        """A step was planned at ``now`` (seconds) with these tokens of each request, ``total`` of
        all. ``blended``: tokens that Blend computes before it, None where nothing is blended."""
        prompts = 0
        if total >= len(scheduled) + MIN_TOKENS:
            prompts = sum(tokens for tokens in scheduled.values() if tokens >= CHUNK_TOKENS)
        self._in_flight.append((now, prompts, total, blended))

    def ended(self, now: float) -> None:
        """The oldest planned step has ended. Idle time does not count, overlapping steps share
        theirs."""
        if not self._in_flight:
            return
        planned, prompts, total, blended = self._in_flight.popleft()
        took = now - max(planned, self._ended_at)
        self._ended_at = now
        self._last = took if total else 0.0
        if took <= 0 or total == 0:
            return
        if blended is not None:  # it says nothing of other steps
            if blended >= MIN_TOKENS:
                overhead, cost = self._model() if self._large else (0.0, 0.0)
                alone = max(took - overhead - total * cost, LEAST_PART * took)
                self._blends.append(alone / blended)
            return
        self._shown.append(took / total)
        if total < MIN_TOKENS:
            self._small.append(took)
            self._known = None
        elif prompts >= max(MIN_TOKENS, total / 2):
            if self._skip:
                self._skip -= 1
                return
            self._large.append((took, prompts))
            self._known = None

    # Estimates
    # -------------------------------------------------------------------------------------------

    def seconds(self, tokens: int, rest: int = 1) -> float | None:
        """Seconds of computing ``tokens`` more of a prompt, of which ``rest`` are computed anyway;
        None: not known."""
        return self._estimate(tokens, rest, *self._model()) if self._large else None

    def blend_seconds(self, tokens: int) -> float | None:
        """Seconds in which Blend computes this many tokens; None: not known. The first time alone
        does not count: the model is prepared in it."""
        return tokens * _lower_quartile(self._blends) if len(self._blends) > 1 else None

    def _estimate(self, tokens: int, rest: int, overhead: float, cost: float) -> float:
        steps = 0
        if self._step_tokens > 0:
            steps = -(-(tokens + rest) // self._step_tokens) + (-rest // self._step_tokens)
        return tokens * cost + steps * overhead

    def at_most(self, tokens: int) -> float:
        """Upper bound of the seconds to compute ``tokens`` of a prompt, also while the speed is not
        known: at :data:`FLOOR`, or at the higher rate that steps of any kind have shown. Those are
        steps with a token for each decoding request, or with the rest of a prompt of which the
        store had nearly all. They have the overhead of a whole step for few tokens and the longest
        context, so prompts are computed faster than by them."""
        return tokens * min([1 / FLOOR, *([_lower_quartile(self._shown)] if self._shown else [])])

    def allowance(self, tokens: int, rest: int = 1) -> float | None:
        """Seconds that a load of ``tokens`` may take; None while the speed is not known."""
        compute = self.seconds(tokens, rest)
        return None if compute is None else self._allowed(compute)

    def borrowed_allowance(self, tokens: int, rest: int = 1) -> float | None:
        """The same by another engine's speed on this machine; None without one."""
        other = self._borrowed
        if other is None:
            return None
        return self._allowed(self._estimate(tokens, rest, other.overhead, other.cost))

    def _allowed(self, compute: float) -> float:
        return min(max(FACTOR * compute, self._min_s), self._max_s)

    def step_under_way(self, now: float) -> float:
        """Seconds of a step that is planned now if others compute in it: the end of a load is not
        seen before the step ends. 0 on an engine that computes nothing else."""
        if not (self._last and self._small) or now - self._ended_at > IDLE_S:
            return 0.0
        return min(self._last, _lower_quartile(self._small))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of prompts computed in a second when steps are full; None: not known."""
        tokens = self._step_tokens or max((tokens for _, tokens in self._large), default=0)
        if not self._large or not tokens:
            return None
        overhead, cost = self._model()
        return tokens / (overhead + tokens * cost)

    # Memory
    # --------------------------------------------------------------------------------------

    def known(self) -> ComputeSpeed | None:
        """The speed for another process of this engine; None: nothing is known."""
        if not self._large:
            return None
        sizes = sorted(tokens for _, tokens in self._large)
        return ComputeSpeed(*self._model(), sizes[len(sizes) // 2])

    def recall(self, known: ComputeSpeed) -> None:
        """Start with the speed of an earlier process: as one step of each kind, so the next few
        outweigh it; ignored if steps were measured already."""
        if self._large or not known.plausible():
            return
        if known.overhead > 0:
            self._small.append(known.overhead)
        self._large.append((known.overhead + known.tokens * known.cost, known.tokens))
        self._known = None

    def borrow(self, known: ComputeSpeed) -> None:
        """Until a step of this engine is measured, the deadlines of loads follow from another
        engine's speed on this machine. Nothing is declined because of it: it may be that of a
        smaller model."""
        if known.plausible():
            self._borrowed = known

    def _model(self) -> tuple[float, float]:
        if self._known is None:
            overhead = _lower_quartile(self._small) if self._small else 0.0
            costs = [max(took - overhead, LEAST_PART * took) / n for took, n in self._large]
            cost = _lower_quartile(costs)
            self._known = overhead, cost
        return self._known


def _lower_quartile(values: deque[float] | list[float]) -> float:
    """The lower quartile."""
    return sorted(values)[(len(values) - 1) // 4]


# Loading
# --------------------------------------------------------------------------------------------------

#: Loads remembered, and the weight of each relative to the next newer one.
LOADS, DECAY = 16, 0.9
#: A sample off by this factor, and by this many seconds, is an outlier.
OUTLIER, SLACK_S = 2.0, 0.003
#: Least variance of sizes (relative to the square of the mean) that separates fixed part and rate.
SPREAD = 0.02
#: A load longer or shorter by this factor than all remembered is no outlier, only new.
REACH = 1.25
#: Weight of the newest load in the share of those given up.
FAIL_WEIGHT = 0.1


class LoadSpeed(NamedTuple):
    """The speed of a tier's loads, as it is remembered."""

    fixed: float  # seconds
    per_byte: float  # seconds
    least: int  # bytes of the smallest and of the largest measured load
    most: int
    given_up: float  # share of loads that did not end in time

    def seconds(self, size: int) -> float:
        """Seconds that a load of ``size`` bytes takes."""
        return self.fixed + size * self.per_byte


class LoadRate:
    """A running fit over the loads of one tier."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=LOADS)  # bytes, seconds
        self._outlier: tuple[int, float, bool] | None = None  # the newest sample; whether slower
        self._least = self._most = 0  # bytes of the samples
        self.fixed = 0.0  # seconds
        self._per_byte = 0.0  # seconds
        self.given_up = 0.0  # share of loads that did not end in time

    @property
    def bytes_per_second(self) -> float | None:
        """None while unknown, or when the size makes no difference."""
        return 1 / self._per_byte if self._per_byte > 0 else None

    def seconds(self, size: int) -> float | None:
        """Seconds until ``size`` bytes were moved; None while nothing is known."""
        return self.fixed + size * self._per_byte if self._samples else None

    def at_best(self, size: int) -> float:
        """Least seconds: a load longer than those measured may take no longer, and a shorter one
        less in proportion."""
        if not self._samples:
            return 0.0
        seen = min(max(size, self._least), self._most)
        return (self.fixed + seen * self._per_byte) * min(size / max(seen, 1), 1.0)

    def add_sample(
        self,
        size: int,
        low: float,
        high: float,
        *,
        late: bool = False,
        accept_outlier: bool = False,
    ) -> None:
        """A load ended after between ``low`` and ``high`` seconds. ``late``: it was given up, so
        that ``high`` is infinity. ``accept_outlier``: an outlier counts at once, as there are few
        samples."""
        expected = self.seconds(size)
        guess = expected if expected is not None else low if late else (low + high) / 2
        took = min(max(guess, low), high)
        self.given_up += FAIL_WEIGHT * (late - self.given_up)
        before, self._outlier = self._outlier, None
        seen = self._least / REACH <= size <= self._most * REACH
        if expected is not None and seen and self._is_outlier(took, expected):
            slower = took > expected
            self._outlier = (size, took, slower)
            again = before is not None and before[2] == slower
            if accept_outlier or again:
                self._samples.clear()
                self.fixed = self.given_up = 0.0
                if before is not None and again:
                    self._samples.append(before[:2])
            else:
                took = expected * OUTLIER + SLACK_S if slower else expected / OUTLIER
        self._samples.append((size, took))
        self._fit()

    def known(self) -> LoadSpeed | None:
        """The speed for another process of this engine; None: nothing is known."""
        if not self._samples:
            return None
        return LoadSpeed(self.fixed, self._per_byte, self._least, self._most, self.given_up)

    def recall(self, known: LoadSpeed) -> None:
        """Start with the speed of an earlier process: as one or two loads, so the next few outweigh
        it, and two that are far off end it; ignored if loads were measured already."""
        if self._samples:
            return
        self.fixed, self.given_up = known.fixed, min(known.given_up, 1.0)
        for size in sorted({known.least, known.most}):
            self._samples.append((size, known.seconds(size)))
        self._fit()

    @staticmethod
    def _is_outlier(took: float, expected: float) -> bool:
        return took > expected * OUTLIER + SLACK_S or took < expected / OUTLIER - SLACK_S

    def _fit(self) -> None:
        weight = x = y = xx = xy = 0.0
        for size, took in self._samples:
            weight, x, y = DECAY * weight + 1, DECAY * x + size, DECAY * y + took
            xx, xy = DECAY * xx + size * size, DECAY * xy + size * took
        x, y = x / weight, y / weight
        spread = xx / weight - x * x
        sizes = [size for size, _ in self._samples]
        self._least, self._most = min(sizes), max(sizes)
        if spread > SPREAD * x * x:
            slope = (xy / weight - x * y) / spread
            self._per_byte = min(max(slope, 0.0), y / x)
            self.fixed = y - self._per_byte * x
        else:
            self.fixed = min(self.fixed, y)
            self._per_byte = (y - self.fixed) / x if x > 0 else 0.0
