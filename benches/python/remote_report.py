"""Computes rows, ratios and tables from the rounds of ``remote.py``. Needs no store and no server.

A ratio is ucm's speed relative to another arm, computed round by round; the median counts. Above 1
ucm is faster, also for times.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ucm.bench.metrics import Better, interval, ratio

#: The goal relative to the client library alone.
GOAL = 0.9
#: Figure of a round -> its title, its unit, and the better direction.
FIGURES: Mapping[str, tuple[str, str, Better]] = {
    "dump": ("put", "GB/s", "more"),
    "load": ("get", "GB/s", "more"),
    "lookup_present": ("exists, all there", "us per id", "less"),
    "lookup_absent": ("exists, none there", "us per id", "less"),
    "dump_one": ("put, one block", "ms", "less"),
    "load_one": ("get, one block", "ms", "less"),
}
#: Figures with a goal; the others are times of a single block, for the table of stores.
PROMISED = ("dump", "load", "lookup_present", "lookup_absent")

#: (KiB of a block, arm) -> figures of each round; None if an arm has none.
Rounds = Mapping[tuple[int, str], Sequence[Mapping[str, float | None]]]


@dataclass(frozen=True)
class Row:
    """One figure of one arm over one server."""

    medium: str
    kib: int
    figure: str
    unit: str
    arm: str
    #: ucm itself, the reference.
    own: bool
    median: float
    rounds: list[float]
    #: Ratio of ucm to this arm, and its interval.
    ratio: float | None
    interval: tuple[float, float] | None
    #: The goal of the ratio.
    goal: float | None


def rows(medium: str, kib: int, arms: Sequence[str], rounds: Rounds) -> list[Row]:
    """Every figure of every arm; ``arms``: ucm first, then the client library alone."""
    found = []
    for figure, (title, unit, better) in FIGURES.items():
        measured = {
            arm: values for arm in arms if (values := _values(rounds.get((kib, arm), []), figure))
        }
        ours = measured.get(arms[0], [])
        for arm, values in measured.items():
            pairs = [] if arm == arms[0] else list(zip(values, ours, strict=False))
            ratios = [ratio(other, mine, better) for other, mine in pairs]
            promised = bool(ratios) and arm == arms[1] and figure in PROMISED
            found.append(
                Row(
                    medium,
                    kib,
                    title,
                    unit,
                    arm,
                    arm == arms[0],
                    statistics.median(values),
                    values,
                    statistics.median(ratios) if ratios else None,
                    interval(ratios),
                    GOAL if promised else None,
                )
            )
    return found


def _values(rounds: Sequence[Mapping[str, float | None]], figure: str) -> list[float]:
    """The figure of every round; none if one is missing."""
    found = [value for entry in rounds if (value := entry.get(figure)) is not None]
    return found if len(found) == len(rounds) else []


def table(rows: Sequence[Row], judged: bool) -> str:
    """In Markdown: a line for each arm."""
    lines = [
        "| server | block | | arm | median | ucm to it | 95 % interval | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = "" if row.ratio is None else f"{row.ratio:.2f}"
        bounds = f"{row.interval[0]:.2f} to {row.interval[1]:.2f}" if row.interval else ""
        met = ""
        if judged and row.goal is not None and row.ratio is not None:
            met = f"{row.goal}: {'met' if row.ratio >= row.goal else '**missed**'}"
        lines.append(
            f"| {row.medium} | {row.kib} KiB | {row.figure} | {row.arm} |"
            f" {row.median:.3g} {row.unit} | {times} | {bounds} | {met} |"
        )
    return "\n".join(lines)


def own_figures(rows: Sequence[Row]) -> list[str]:
    """The figures of ucm's stores in Markdown: a line for each store and size of block."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row.own:
            found.setdefault((row.medium, row.kib), {})[row.figure] = row.median
    figures = ("get, one block", "put, one block", "get", "put")
    lines = [
        "| store | block | read, one block, ms | write, one block, ms | read, GB/s | write, GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for (medium, kib), values in found.items():
        lines.append(
            f"| {medium} | {kib} KiB |"
            f" {' | '.join(f'{values[figure]:.2f}' for figure in figures)} |"
        )
    return lines


def write(document: Path, lines: Sequence[str]) -> None:
    """Puts lines between the marks of a document."""
    marks = re.compile(r"(<!-- bench-remote[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
    text, done = marks.subn(
        lambda found: found[1] + "\n".join(lines) + "\n" + found[2], document.read_text()
    )
    if done != 1:
        raise SystemExit(
            f"{document} has no <!-- bench-remote --> ... <!-- end --> to write between"
        )
    document.write_text(text)
