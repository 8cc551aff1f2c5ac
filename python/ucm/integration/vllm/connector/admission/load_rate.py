"""How long loads from one tier take: ``fixed + bytes / rate``, fitted to the last loads.

The bytes of a sample are those the tier had to move until the load was done, including the loads
ahead of it. The end of a load is known up to one step of vLLM, so a sample is an interval; one that
contains the expected time changes nothing. A single sample that is far off is treated as an outlier
and limited to twice or half the expected time; a second one in the same direction means that the
tier has changed, and the samples before are dropped.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: Loads remembered, and the weight of each relative to the next newer one.
SAMPLES, DECAY = 16, 0.9
#: A sample off by this factor, and by so many seconds, is an outlier.
OUTLIER, SLACK_S = 2.0, 0.003
#: Sizes that vary less (variance relative to the square of the mean) do not tell the fixed part
#: from the rate.
SPREAD = 0.02
#: A load longer or shorter by this factor than all remembered is no outlier, only something new.
REACH = 1.25
#: Weight of the newest load in the share of those given up.
FAIL_WEIGHT = 0.1


class LoadSpeed(NamedTuple):
    """What is known of a tier's loads, as it is remembered."""

    fixed: float  # seconds
    per_byte: float  # seconds
    least: int  # bytes of the smallest and of the largest load by which this was measured
    most: int
    given_up: float  # share of loads that did not end in time

    def seconds(self, size: int) -> float:
        """Seconds that a load of ``size`` bytes takes."""
        return self.fixed + size * self.per_byte


class LoadRate:
    """A running fit over the loads of one tier."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES)  # bytes, seconds
        self._outlier: tuple[int, float, bool] | None = (
            None  # the newest sample if it was one, and whether slower
        )
        self._least = self._most = 0  # bytes of the samples
        self.fixed = 0.0  # seconds
        self._per_byte = 0.0  # seconds
        self.given_up = 0.0  # share of loads that did not end in time

    @property
    def bytes_per_second(self) -> float | None:
        """None while unknown, or when the size makes no difference."""
        return 1 / self._per_byte if self._per_byte > 0 else None

    def seconds(self, size: int) -> float | None:
        """What a load takes that ends when ``size`` bytes were moved; None while nothing is
        known."""
        return self.fixed + size * self._per_byte if self._samples else None

    def at_best(self, size: int) -> float:
        """The least it can take by what is known: a load longer than those seen may take no longer,
        and a shorter one less in proportion."""
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
        that ``high`` is infinity. ``accept_outlier``: an outlier is accepted at once, as there are
        few samples."""
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
        """What another process of this engine may start with; None: nothing is known."""
        if not self._samples:
            return None
        return LoadSpeed(self.fixed, self._per_byte, self._least, self._most, self.given_up)

    def recall(self, known: LoadSpeed) -> None:
        """Start with what an earlier process knew. It counts as one or two loads, so the next few
        outweigh it, and two that are far off end it; nothing if loads were measured already."""
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
        self._least, self._most = (
            min(size for size, _ in self._samples),
            max(size for size, _ in self._samples),
        )
        if spread > SPREAD * x * x:
            slope = (xy / weight - x * y) / spread
            self._per_byte = min(max(slope, 0.0), y / x)
            self.fixed = y - self._per_byte * x
        else:
            self.fixed = min(self.fixed, y)
            self._per_byte = (y - self.fixed) / x if x > 0 else 0.0
