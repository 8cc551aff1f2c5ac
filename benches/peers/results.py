"""From the rounds of every arm to rows, ratios, goals and tables. Needs no peer and no store.

A ratio says how many times as fast an arm is as another, taken round by round (the two were
measured right after each other) and then the median: above 1 is faster, for lookups too, where the
figure itself is a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Figures of a round: whether more is better.
OPERATIONS = {"dump": True, "load": True, "lookup_present": False, "lookup_absent": False}

TITLES = {
    "dump": "Dump until published",
    "load": "Load into host memory",
    "lookup_present": "Lookup, all present",
    "lookup_absent": "Lookup, none present",
}

#: One measured case: bytes of a block, and ``buffered`` or ``direct``.
Case = tuple[int, str]


@dataclass(frozen=True)
class Row:
    """One arm in one case: GB/s, or microseconds per id for lookups."""

    operation: str
    block_bytes: int
    mode: str
    arm: str
    own: bool
    median: float
    low: float
    high: float
    rounds: list[float]
    #: Times as fast as ucm's first arm.
    to_ours: float | None
    #: Times as fast as the best peer of this case, and which that is.
    to_best_peer: float | None
    best_peer: str | None
    #: The same among those that are stores.
    to_best_store: float | None
    best_store: str | None


@dataclass(frozen=True)
class Goal:
    """What was promised, and what came out: ``met`` is None where it could not be measured."""

    text: str
    case: str
    value: float | None
    #: The same beside stores alone, where the goal is a ratio.
    beside_stores: float | None
    met: bool | None


#: Figures: (case, arm) -> rounds, None for a round without a figure.
Rounds = dict[tuple[Case, str], list[dict[str, float | None]]]


def _figures(rounds: Iterable[dict[str, float | None]], operation: str) -> list[float] | None:
    """The figure of every round, or None where one is missing."""
    found = [entry.get(operation) for entry in rounds]
    values = [value for value in found if value is not None]
    return values if values and len(values) == len(found) else None


def _ratio(mine: Sequence[float], other: Sequence[float], more_is_better: bool) -> float:
    """How many times as fast, the median of the rounds."""
    pairs = zip(mine, other, strict=False)
    return statistics.median(a / b if more_is_better else b / a for a, b in pairs)


def rows(
    rounds: Rounds, own: Sequence[str], names: Sequence[str], movers: Container[str] = ()
) -> list[Row]:
    """Every arm in every case, in the order of ``names``.

    ``own`` are ucm's arms, the reference first; ``movers`` are peers that only move bytes and are
    no stores.
    """
    result = []
    for case in sorted(
        {case for case, _ in rounds}, key=lambda case: (case[1] != "buffered", case[0])
    ):
        for operation, more in OPERATIONS.items():
            measured = {
                name: figures
                for name in names
                if (figures := _figures(rounds.get((case, name), []), operation)) is not None
            }
            peers = [name for name in measured if name not in own]
            ranked = sorted(peers, key=lambda name: statistics.median(measured[name]), reverse=more)
            best = next(iter(ranked), None)
            store = next((name for name in ranked if name not in movers), None)
            ours = next((name for name in own if name in measured), None)
            for name, figures in measured.items():
                result.append(
                    Row(
                        operation=operation,
                        block_bytes=case[0],
                        mode=case[1],
                        arm=name,
                        own=name in own,
                        median=statistics.median(figures),
                        low=min(figures),
                        high=max(figures),
                        rounds=figures,
                        to_ours=None if ours is None else _ratio(figures, measured[ours], more),
                        to_best_peer=(
                            None if best is None else _ratio(figures, measured[best], more)
                        ),
                        best_peer=best,
                        to_best_store=(
                            None if store is None else _ratio(figures, measured[store], more)
                        ),
                        best_store=store,
                    )
                )
    return result


def goals(measured: Sequence[Row], files: str, segments: str, to_slot: Sequence[str]) -> list[Goal]:
    """The goals for this comparison, one line for each case in which they can be judged.

    ``to_slot``: the arms whose loads end in the verified slot, where the peers' end.
    """
    found = {(row.operation, row.block_bytes, row.mode, row.arm): row for row in measured}
    cases = sorted(
        {(row.block_bytes, row.mode) for row in measured},
        key=lambda case: (case[1] != "buffered", case[0]),
    )
    result = []

    def judge(operation: str, case: Case, arm: str) -> None:
        row = found.get((operation, *case, arm))
        value = None if row is None else row.to_best_peer
        stores = None if row is None else row.to_best_store
        met = None if stores is None else stores >= 1.0
        text = f"{operation} not below the best store ({arm})"
        result.append(Goal(text, f"{size(case[0])} {case[1]}", value, stores, met))

    for case in cases:
        judge("dump", case, segments)
        judge("dump", case, files)
        for arm in to_slot:
            judge("load", case, arm)
    for case in cases:
        for operation in ("lookup_present", "lookup_absent"):
            row = found.get((operation, *case, segments))
            text = f"{TITLES[operation].lower()}: at most 0.3 us per id (segments)"
            value = None if row is None else row.median
            met = None if value is None else value <= 0.3
            result.append(Goal(text, f"{size(case[0])} {case[1]}", value, None, met))
    return result


def size(count: int) -> str:
    """Bytes in the largest unit that leaves no rest."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(measured: Sequence[Row], operation: str) -> list[str]:
    """One operation in Markdown; the best peer of a case in bold."""
    unit = "GB/s" if OPERATIONS[operation] else "us per id"
    heads = ("mode", "block", "arm", f"{unit}, median (lowest to highest)")
    ratios = ("times ucm, files", "times the best peer", "times the best store")
    lines = [
        f"| {' | '.join(heads + ratios)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in measured:
        if row.operation != operation:
            continue
        name = f"**{row.arm}**" if row.arm == row.best_peer else row.arm
        lines.append(
            f"| {row.mode} | {size(row.block_bytes)} | {name} | {_number(row.median)}"
            f" ({_number(row.low)} to {_number(row.high)}) | {_number(row.to_ours)} |"
            f" {_number(row.to_best_peer)} | {_number(row.to_best_store)} |"
        )
    return lines


def markdown(figures: dict[str, Any]) -> str:
    """The whole report; ``figures`` is what :func:`document` returns."""
    machine, settings = figures["machine"], figures["settings"]
    lines = [
        (
            f"Measured {figures['date']} at commit {figures['commit']}: {machine['cores']} cores"
            f" ({machine['processor']}),"
        ),
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, {machine['file_system']}.",
        (
            f"{settings['mib']} MiB in each of {settings['rounds']} rounds, load average"
            f" {machine['load_before']} before."
        ),
        "",
    ]
    if settings["quick"]:
        lines += ["A quick run: it shows that every arm runs, and no speed.", ""]
    lines += ["| arm | version | threads | state |", "|---|---|---|---|"]
    for arm in figures["arms"]:
        lines.append(
            f"| {arm['name']} | {arm['version'] or '-'} | {arm['threads'] or '-'} |"
            f" {arm['state']} |"
        )
    measured = [Row(**row) for row in figures["rows"]]
    for operation in OPERATIONS:
        lines += ["", f"{TITLES[operation]}:", "", *table(measured, operation)]
    if figures["goals"]:
        lines += [
            "",
            "| goal | case | value | beside stores alone | met |",
            "|---|---|---|---|---|",
        ]
        for goal in figures["goals"]:
            met = {True: "yes", False: "no", None: "not measured"}[goal["met"]]
            value, stores = _number(goal["value"]), _number(goal["beside_stores"])
            lines.append(f"| {goal['text']} | {goal['case']} | {value} | {stores} | {met} |")
    if figures["notes"]:
        lines += ["", *(f"- {note}" for note in figures["notes"])]
    return "\n".join(lines) + "\n"


def document(
    head: dict[str, Any], measured: Sequence[Row], judged: Sequence[Goal]
) -> dict[str, Any]:
    """What is written as JSON: ``head`` (date, machine, settings, arms, notes), rows and goals."""
    return head | {
        "rows": [asdict(row) for row in measured],
        "goals": [asdict(goal) for goal in judged],
    }
