"""Evaluates alternating pairs of an old and a new measurement: the ratio and its confidence.

The median of the ratios is reported, with the interval of :func:`ucm.bench.metrics.interval`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ucm.bench.metrics import Better, interval, ratio

#: A row fails if it is certainly below this.
FLOOR = 0.95

Verdict = Literal["holds", "unsure", "fails", "not judged"]


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
