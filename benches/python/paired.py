"""What alternating pairs of an old and a new measurement say: how much better the new one is, and
how sure that is.

A *ratio* is taken within a pair, so that what else the machine does falls on both sides, and is
above 1 where the new one is better, whether more or less is. Of the ratios the median counts. Its
interval is that of the *sign test*: the k-th lowest and the k-th highest ratio, with the largest k
for which a fair coin falls to one side fewer than k times in n throws in at most 5 of 100 cases,
both sides together. It holds whatever the distribution is and draws nothing at random; with fewer
than six pairs there is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: A row fails when it is surely below this.
FLOOR = 0.95
CONFIDENCE = 0.95

Better = Literal["more", "less"]
Verdict = Literal["holds", "unsure", "fails", "not judged"]


def ratio(old: float, new: float, better: Better) -> float:
    """How many times as good as the old one the new one is; two that are nothing are as good as one
    another."""
    above, below = (new, old) if better == "more" else (old, new)
    if below == 0:
        return 1.0 if above == 0 else math.inf
    return above / below


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Where the median of the distribution lies with at least that confidence; None with too few
    values to say."""
    count = len(values)
    outside, rank = 0.0, 0
    # outside: that at most `rank` of the values lie on one side of the median, and on the other
    while rank < count:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - confidence:
            break
        rank += 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def judged(values: Sequence[float], floor: float = FLOOR) -> Verdict:
    """Of the ratios of a row: *fails* when the interval lies below the floor, *unsure* when only
    the median does."""
    bounds = interval(values)
    if bounds is None:
        return "not judged"
    if bounds[1] < floor:
        return "fails"
    return "unsure" if statistics.median(values) < floor else "holds"


@dataclass(frozen=True)
class Row:
    """One figure of one case, pair by pair."""

    name: str
    case: str
    unit: str
    better: Better
    old: tuple[float, ...]
    new: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """One for each pair."""
        return [ratio(old, new, self.better) for old, new in zip(self.old, self.new, strict=True)]

    def as_json(self) -> dict[str, object]:
        """Everything, for a file."""
        bounds = interval(self.ratios)
        return {
            "row": self.name,
            "case": self.case,
            "unit": self.unit,
            "better": self.better,
            "old": list(self.old),
            "new": list(self.new),
            "ratios": self.ratios,
            "median": statistics.median(self.ratios),
            "interval": list(bounds) if bounds else None,
            "verdict": judged(self.ratios),
        }


def table(rows: Sequence[Row]) -> str:
    """In Markdown; what fails is bold."""
    lines = [
        "| row | case | old | new | | new to old | 95 % interval | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict, bounds = judged(row.ratios), interval(row.ratios)
        cells = [row.name, row.case.replace("|", "\\|")]
        cells += [f"{statistics.median(side):.4g}" for side in (row.old, row.new)]
        cells += [row.unit, f"{statistics.median(row.ratios):.3f}"]
        cells += [f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "-"]
        cells += [f"**{verdict}**" if verdict == "fails" else verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
