"""How fast this engine computes prompts: what a hit saves, and how long its load may take.

A step's time is modelled as ``overhead + tokens * cost``: the overhead is the time of steps with
few tokens, the cost is what each token of larger steps adds to it. The tokens of a hit, added to a
prompt that is computed anyway, cost their part and the steps they add, not a step of their own. The
estimate is a low quartile of the last samples: compilation, a busy machine and long contexts make
steps slower and nothing makes them faster, and one slow step must not make a hit look cheap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

#: A step with fewer tokens of prompts says nothing about the speed of computing them, only about
#: the overhead.
MIN_TOKENS = 64
#: A request with fewer tokens in a step decodes, perhaps with guessed tokens.
CHUNK_TOKENS = 16
#: Steps of each kind that are remembered.
SAMPLES = 16
#: The first steps that compute a prompt are not counted: kernels are compiled and caches are cold.
SKIPPED = 1
#: At least so much of a step's time is its tokens', however large the overhead seems.
LEAST_PART = 0.05
#: A step that ended longer ago is followed by an idle time, in seconds.
IDLE_S = 0.005
#: A load may take so many times the time that computing its tokens would take.
FACTOR = 2.0
#: Nothing that serves computes prompts more slowly, in tokens a second: 40 s to the first token of
#: a prompt of 4000.
FLOOR = 100.0


class ComputeSpeed(NamedTuple):
    """A speed of computing, as it is remembered."""

    overhead: float  # seconds of a step
    cost: float  # seconds of a token
    tokens: int  # of a step that computes prompts, by which this was measured

    def plausible(self) -> bool:
        """Whether it can have been measured."""
        return self.tokens >= MIN_TOKENS and self.cost > 0

    def per_token(self) -> float:
        """Seconds of a token in the steps by which it was measured."""
        return self.overhead / self.tokens + self.cost


class ComputeRate:
    """What the last steps took. Every method is cheap enough for each step or each request."""

    def __init__(self, min_s: float, max_s: float, step_tokens: int = 0, overlap: int = 1) -> None:
        """A load gets at least ``min_s`` and at most ``max_s`` seconds; ``step_tokens``: most
        tokens of one step; ``overlap``: most steps that are planned and have not ended, the next
        one included."""
        self._min_s = min_s
        self._max_s, self._step_tokens = max_s, step_tokens
        # planned at, prompts' tokens, all
        self._in_flight: deque[tuple[float, int, int]] = deque(maxlen=overlap)
        self._small: deque[float] = deque(maxlen=SAMPLES)
        self._large: deque[tuple[float, int]] = deque(maxlen=SAMPLES)  # seconds, tokens
        # seconds for each token of a step, of whatever kind
        self._shown: deque[float] = deque(maxlen=SAMPLES)
        self._skip = SKIPPED
        self._ended_at = float("-inf")
        self._last = (
            0.0  # seconds of the last step that computed something, 0 when it computed nothing
        )
        self._known: tuple[float, float] | None = None  # overhead, cost; None: to be worked out
        self._borrowed: ComputeSpeed | None = None  # of another engine, used while _large is empty

    # What is seen
    # -------------------------------------------------------------------------------------------

    def planned(self, scheduled: Mapping[str, int], total: int, now: float) -> None:
        """A step was planned at ``now`` (seconds) that computes so many tokens of each request,
        ``total`` of all."""
        prompts = 0
        if total >= len(scheduled) + MIN_TOKENS:
            prompts = sum(tokens for tokens in scheduled.values() if tokens >= CHUNK_TOKENS)
        self._in_flight.append((now, prompts, total))

    def ended(self, now: float) -> None:
        """The step planned longest ago has ended. Idle time does not count, overlapping steps share
        theirs."""
        if not self._in_flight:
            return
        planned, prompts, total = self._in_flight.popleft()
        took = now - max(planned, self._ended_at)
        self._ended_at = now
        self._last = took if total else 0.0
        if took <= 0 or total == 0:
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

    # What follows
    # -------------------------------------------------------------------------------------------

    def seconds(self, tokens: int, rest: int = 1) -> float | None:
        """What computing ``tokens`` more of a prompt takes, of which ``rest`` are computed anyway;
        None: not known."""
        return self._estimate(tokens, rest, *self._model()) if self._large else None

    def _estimate(self, tokens: int, rest: int, overhead: float, cost: float) -> float:
        steps = 0
        if self._step_tokens > 0:
            steps = -(-(tokens + rest) // self._step_tokens) + (-rest // self._step_tokens)
        return tokens * cost + steps * overhead

    def at_most(self, tokens: int) -> float:
        """More than what computing ``tokens`` of a prompt can plausibly take, in seconds, also
        while the speed is not known: at :data:`FLOOR`, or at the rate that steps of any kind have
        shown where that is higher.

        Those are steps with a token for each request that decodes, or with the rest of a prompt of
        which the store had nearly all. A step with few tokens is paid for with the overhead of a
        whole one, and its tokens look back on the longest context: no device computes a prompt more
        slowly than by steps of that kind, and all but the poorest are many times faster.
        """
        return tokens * min([1 / FLOOR, *([_lower_quartile(self._shown)] if self._shown else [])])

    def allowance(self, tokens: int, rest: int = 1) -> float | None:
        """Seconds a load of ``tokens`` may take; None while the speed is not known."""
        compute = self.seconds(tokens, rest)
        return None if compute is None else self._allowed(compute)

    def borrowed_allowance(self, tokens: int, rest: int = 1) -> float | None:
        """The same by what another engine showed on this machine; None where that is unknown."""
        other = self._borrowed
        if other is None:
            return None
        return self._allowed(self._estimate(tokens, rest, other.overhead, other.cost))

    def _allowed(self, compute: float) -> float:
        return min(max(FACTOR * compute, self._min_s), self._max_s)

    def step_under_way(self, now: float) -> float:
        """What the step takes that is planned now if others compute in it, in seconds: a load is
        not seen to end before the step does. 0 on an engine that computes nothing else."""
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

    # What is remembered
    # --------------------------------------------------------------------------------------

    def known(self) -> ComputeSpeed | None:
        """What another process of this engine may start with; None: nothing is known."""
        if not self._large:
            return None
        sizes = sorted(tokens for _, tokens in self._large)
        return ComputeSpeed(*self._model(), sizes[len(sizes) // 2])

    def recall(self, known: ComputeSpeed) -> None:
        """Start with what an earlier process knew. It counts as one step of each kind, so the next
        few outweigh it; nothing if steps were measured already."""
        if self._large or not known.plausible():
            return
        if known.overhead > 0:
            self._small.append(known.overhead)
        self._large.append((known.overhead + known.tokens * known.cost, known.tokens))
        self._known = None

    def borrow(self, known: ComputeSpeed) -> None:
        """Until a step of this engine is measured, the deadlines of loads follow from what another
        engine showed on this machine. Nothing is declined because of it: it may be the speed of a
        smaller model."""
        if known.plausible():
            self._borrowed = known

    def _model(self) -> tuple[float, float]:
        if self._known is None:
            overhead = _lower_quartile(self._small) if self._small else 0.0
            cost = _lower_quartile(
                [max(took - overhead, LEAST_PART * took) / tokens for took, tokens in self._large]
            )
            self._known = overhead, cost
        return self._known


def _lower_quartile(values: deque[float] | list[float]) -> float:
    """The lower quartile."""
    return sorted(values)[(len(values) - 1) // 4]
