"""How long loads from one tier take: ``fixed + bytes / rate``, fitted to the last ones.

Bytes are those the tier had to move until the load was done, so the loads ahead of it count. When a load ended is known
up to a step of vLLM only, so a sample is an interval, and one that agrees with what was expected changes nothing. One
sample that is far off is an accident and counts up to twice or half the expected; a second one in the same direction is
a tier that has changed, and what was known before is forgotten.
"""

from __future__ import annotations

#: Weight of all older samples when a new one comes.
KEPT = 0.9
#: A sample off by this factor, and by so many seconds, is a surprise.
SURPRISE, SLACK_S = 2.0, 0.003
#: Samples whose sizes vary less (variance relative to the square of the mean) do not tell the fixed part apart.
SPREAD = 0.02
#: Weight of the newest load in the share of those given up.
FAIL_WEIGHT = 0.1


class LoadRate:
    """A running fit over the loads of one tier."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums
        self._surprise: tuple[float, float, bool] | None = None
        self.fixed = 0.0  # seconds
        self._per_byte = 0.0  # seconds
        self.given_up = 0.0  # share of loads that did not end in time

    @property
    def known(self) -> bool:
        """Whether some load has ended."""
        return self._weight > 0

    @property
    def bytes_per_second(self) -> float | None:
        """None while unknown, or when the size makes no difference."""
        return 1 / self._per_byte if self._per_byte > 0 else None

    def seconds(self, size: int) -> float | None:
        """What a load takes that ends when ``size`` bytes were moved; None while nothing is known."""
        return self.fixed + size * self._per_byte if self.known else None

    def learn(self, size: int, low: float, high: float, *, late: bool = False, sure: bool = False) -> None:
        """A load ended after between ``low`` and ``high`` seconds. ``late``: it was given up, so that ``high`` is
        infinity. ``sure``: a surprise is believed at once, as there are few samples."""
        expected = self.seconds(size)
        guess = expected if expected is not None else low if late else (low + high) / 2
        took = min(max(guess, low), high)
        self.given_up += FAIL_WEIGHT * (late - self.given_up)
        if expected is not None and self._surprises(took, expected):
            slower, before = took > expected, self._surprise
            self._surprise = (size, took, slower)
            if sure or (before is not None and before[2] == slower):
                self._forget()
                if before is not None and before[2] == slower:
                    self._add(before[0], before[1])
            else:
                took = expected * SURPRISE + SLACK_S if slower else expected / SURPRISE
        else:
            self._surprise = None
        self._add(size, took)
        self._fit()

    @staticmethod
    def _surprises(took: float, expected: float) -> bool:
        return took > expected * SURPRISE + SLACK_S or took < expected / SURPRISE - SLACK_S

    def _forget(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.given_up = 0.0
        self.fixed = 0.0

    def _add(self, size: float, took: float) -> None:
        for name, value in (("_weight", 1.0), ("_x", size), ("_y", took), ("_xx", size * size), ("_xy", size * took)):
            setattr(self, name, KEPT * getattr(self, name) + value)

    def _fit(self) -> None:
        x, y = self._x / self._weight, self._y / self._weight
        if x <= 0:
            self.fixed, self._per_byte = y, 0.0
            return
        spread = self._xx / self._weight - x * x
        if spread > SPREAD * x * x:
            slope = (self._xy / self._weight - x * y) / spread
            self._per_byte = min(max(slope, 0.0), y / x)
            self.fixed = y - self._per_byte * x
        else:
            self.fixed = min(self.fixed, y)
            self._per_byte = (y - self.fixed) / x
