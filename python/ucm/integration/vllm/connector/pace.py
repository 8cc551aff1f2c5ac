"""How fast this engine computes prompts, and so how long a load may take before computing would have been quicker."""

from __future__ import annotations

#: A step with fewer scheduled tokens says nothing about the speed of computing prompts.
MIN_TOKENS = 64
#: A step that seems to have taken longer was an idle engine, in seconds.
MAX_STEP_S = 60.0
#: Weight of the newest step in the running average.
WEIGHT = 0.2
#: A load may take so many times the time that computing its tokens would take.
FACTOR = 2.0


class Pace:
    """A running average of tokens per second over the steps that compute prompts.

    A step's time is what lies between its plan and the next one; an engine that idled in between looks slower than it
    is, and its loads get more time, never less.
    """

    def __init__(self, min_s: float, max_s: float) -> None:
        """A load gets at least ``min_s`` and at most ``max_s`` seconds."""
        self._min_s, self._max_s = min_s, max_s
        self._rate: float | None = None
        self._tokens = 0
        self._since = 0.0

    def step(self, tokens: int, now: float) -> None:
        """A step that computes ``tokens`` was planned at ``now`` (seconds)."""
        took = now - self._since
        if self._tokens >= MIN_TOKENS and 0 < took < MAX_STEP_S:
            sample = self._tokens / took
            self._rate = sample if self._rate is None else (1 - WEIGHT) * self._rate + WEIGHT * sample
        self._tokens, self._since = tokens, now

    def allowance(self, tokens: int) -> float | None:
        """Seconds a load of ``tokens`` may take; None while the speed is not known."""
        if self._rate is None:
            return None
        return min(max(FACTOR * tokens / self._rate, self._min_s), self._max_s)
