"""Computes rows, ratios, goals and tables from the rounds of every arm. Needs no peer and no store.

A ratio is the speed of an arm relative to another. It is computed round by round (the two were
measured one after the other), and the median is reported: above 1 is faster, also for lookups,
whose figure is a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Figures of a round: title, and whether more is better.
OPERATIONS = {
    "dump": ("Dump until published", True),
    "load": ("Load into host memory", True),
    "lookup_present": ("Lookup, all present", False),
    "lookup_absent": ("Lookup, none present", False),
}

#: One measured case: bytes of a block, and ``buffered`` or ``direct``.
Case = tuple[int, str]
#: Figures: (case, arm) -> rounds, None for a round without a figure.
Rounds = Mapping[tuple[Case, str], Sequence[Mapping[str, float | None]]]


@dataclass(frozen=True)
class Row:
    """One arm in one case: GB/s, or microseconds per id for lookups."""

    operation: str
    block_bytes: int
    mode: str
    arm: str
    rounds: list[float]
    #: Speed relative to ucm's first arm.
    to_ours: float | None
    #: Speed relative to the best peer of this case, and that peer.
    to_best: float | None
    best: str | None

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Goal:
    """A goal and its figure: ``met`` is None if it could not be measured."""

    text: str
    case: str
    value: float | None
    met: bool | None


def _figures(rounds: Sequence[Mapping[str, float | None]], operation: str) -> list[float]:
    """The figure of every round, or none if one is missing."""
    values = [value for entry in rounds if (value := entry.get(operation)) is not None]
    return values if len(values) == len(rounds) else []


def _ratio(mine: Sequence[float], other: Sequence[float] | None, more: bool) -> float | None:
    """The median ratio of the rounds; None if there is no other arm."""
    if other is None:
        return None
    pairs = zip(mine, other, strict=False)
    return statistics.median(a / b if more else b / a for a, b in pairs)


def rows(rounds: Rounds, own: Sequence[str], names: Sequence[str]) -> list[Row]:
    """Every arm in every case, in the order of ``names``; ``own`` are ucm's, the reference
    first."""
    result = []
    for case in cases(case for case, _ in rounds):
        for operation, (_, more) in OPERATIONS.items():
            measured = {
                name: figures
                for name in names
                if (figures := _figures(rounds.get((case, name), []), operation))
            }
            peers = [name for name in measured if name not in own]
            peers.sort(key=lambda name: statistics.median(measured[name]), reverse=more)
            best = next(iter(peers), None)
            ours = next((name for name in own if name in measured), None)
            for name, figures in measured.items():
                to_ours = _ratio(figures, measured.get(ours or ""), more)
                to_best = _ratio(figures, measured.get(best or ""), more)
                result.append(Row(operation, *case, name, figures, to_ours, to_best, best))
    return result


def cases(found: Any) -> list[Case]:
    """Each case once, those through the page cache first."""
    return sorted(set(found), key=lambda case: (case[1] != "buffered", case[0]))


def goals(measured: Sequence[Row], files: str, segments: str, to_slot: Sequence[str]) -> list[Goal]:
    """The goals of this comparison, one line for each case with the needed figures.

    ``to_slot``: the arms whose loads end in the verified slot, like the peers'.
    """
    found = {(row.operation, row.block_bytes, row.mode, row.arm): row for row in measured}
    result = []
    for case in cases((row.block_bytes, row.mode) for row in measured):
        text = f"{size(case[0])} {case[1]}"
        judged = [("dump", segments), ("dump", files), *(("load", arm) for arm in to_slot)]
        for operation, arm in judged:
            row = found.get((operation, *case, arm))
            value = None if row is None else row.to_best
            met = None if value is None else value >= 1.0
            goal = f"{operation} not below the best peer ({arm})"
            result.append(Goal(goal, text, value, met))
        for operation in ("lookup_present", "lookup_absent"):
            row = found.get((operation, *case, segments))
            value = None if row is None else row.median
            met = None if value is None else value <= 0.3
            goal = f"{OPERATIONS[operation][0].lower()}: at most 0.3 us per id (segments)"
            result.append(Goal(goal, text, value, met))
    return result


def size(count: int) -> str:
    """Bytes in the largest unit without a remainder."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(measured: Sequence[Row], operation: str) -> list[str]:
    """One operation in Markdown; the best peer of a case in bold."""
    unit = "GB/s" if OPERATIONS[operation][1] else "us per id"
    figure = f"{unit}, median (lowest to highest)"
    lines = [
        f"| mode | block | arm | {figure} | times ucm, files | times the best peer |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured:
        if row.operation == operation:
            name = f"**{row.arm}**" if row.arm == row.best else row.arm
            lines.append(
                f"| {row.mode} | {size(row.block_bytes)} | {name} | {row.median:.2f}"
                f" ({min(row.rounds):.2f} to {max(row.rounds):.2f}) | {_number(row.to_ours)} |"
                f" {_number(row.to_best)} |"
            )
    return lines


def markdown(
    sentence: str, head: Mapping[str, Any], measured: Sequence[Row], judged: Sequence[Goal]
) -> str:
    """The whole report; ``sentence`` describes the machine, ``head`` has arms and notes."""
    lines = [sentence, "", "| arm | version | threads | state |", "|---|---|---|---|"]
    lines += [
        f"| {arm['name']} | {arm['version'] or '-'} | {arm['threads'] or '-'} | {arm['state']} |"
        for arm in head["arms"]
    ]
    for operation, (title, _) in OPERATIONS.items():
        lines += ["", f"{title}:", "", *table(measured, operation)]
    if judged:
        lines += ["", "| goal | case | value | met |", "|---|---|---|---|"]
    for goal in judged:
        met = {True: "yes", False: "no", None: "not measured"}[goal.met]
        lines.append(f"| {goal.text} | {goal.case} | {_number(goal.value)} | {met} |")
    lines += ["", *(f"- {note}" for note in head["notes"])] if head["notes"] else []
    return "\n".join(lines) + "\n"
