"""Evaluates alternating pairs of an old and a new measurement: the ratio and its confidence.

A *ratio* is computed within a pair, so that other load affects both sides. It is above 1 if the new
one is better, whether more or less is better. The median of the ratios is reported. Its interval is
that of the *sign test*: the k-th lowest and the k-th highest ratio, with the largest k for which a
fair coin falls to one side fewer than k times in n throws in at most 5 of 100 cases, both sides
together. It is valid for every distribution and uses no random numbers; with fewer than six pairs
there is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: A row fails if it is certainly below this.
FLOOR = 0.95
CONFIDENCE = 0.95

Better = Literal["more", "less"]
Verdict = Literal["holds", "unsure", "fails", "not judged"]


def ratio(old: float, new: float, better: Better) -> float:
    """The ratio of the new one to the old one, above 1 if better; 1 if both are zero."""
    above, below = (new, old) if better == "more" else (old, new)
    if below == 0:
        return 1.0 if above == 0 else math.inf
    return above / below


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The interval of the distribution's median with at least that confidence; None with too few
    values."""
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
    """The verdict on a row's ratios: *fails* if the interval is below the floor, *unsure* if only
    the median is."""
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
    """In Markdown; failing rows are bold."""
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
