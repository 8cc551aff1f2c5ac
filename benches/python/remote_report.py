"""From the rounds of ``remote.py`` to rows, ratios and tables. Needs no store and no server.

A ratio says how many times as fast ucm is as another arm, round by round, of which the median
counts; above 1 ucm is faster, for times too.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paired import Better, interval, ratio

#: What is promised beside the client library alone.
GOAL = 0.9
#: Figure of a round -> what it is called, its unit, and what is better.
FIGURES: Mapping[str, tuple[str, str, Better]] = {
    "dump": ("put", "GB/s", "more"),
    "load": ("get", "GB/s", "more"),
    "lookup_present": ("exists, all there", "us per id", "less"),
    "lookup_absent": ("exists, none there", "us per id", "less"),
    "dump_one": ("put, one block", "ms", "less"),
    "load_one": ("get, one block", "ms", "less"),
}
#: Those for which there is a goal: the others are times of a single block, which is for the table
#: of stores.
PROMISED = ("dump", "load", "lookup_present", "lookup_absent")

#: (KiB of a block, arm) -> figures of each round; None where an arm has none.
Rounds = Mapping[tuple[int, str], Sequence[Mapping[str, float | None]]]


@dataclass(frozen=True)
class Row:
    """One figure of one arm over one server."""

    medium: str
    kib: int
    figure: str
    unit: str
    arm: str
    #: ucm itself, with which the others are compared.
    own: bool
    median: float
    rounds: list[float]
    #: Of ucm to this arm, and where it lies.
    ratio: float | None
    interval: tuple[float, float] | None
    #: The ratio that was promised.
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
    """The figure of every round; none where one has none."""
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
    """What ucm's stores did, in Markdown: a line for each store and size of block."""
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
