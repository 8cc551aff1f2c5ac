"""Draws the panels of a dashboard as one SVG, from the answers of a Prometheus.

Grafana is not needed: ``python tools/panels.py http://localhost:9090 panels.svg``. Each panel has
its place in Grafana's grid, its expressions over the last minutes, its unit and its series.
``make picture`` makes the one in ``docs/monitor.md``, with a server and requests of its own.

The SVG has no scripts and no fonts, and its ground is opaque: it is read on a light and on a dark
page.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
OVERVIEW = ROOT / "python" / "ucm" / "metrics" / "overview.json"

#: Pixels of a column and a row of Grafana's grid, and between panels.
COLUMN, ROW, GAP = 34, 20, 8
COLUMNS = 24
#: Points of a line; more are not seen at this size.
POINTS = 80
#: Each has a contrast of at least 4.5 to the ground.
COLOURS = (
    *("#0969da", "#bc4c00", "#1a7f37", "#8250df"),
    *("#9a6700", "#0f7683", "#bf3989", "#57606a"),
)
INK, PALE, LINE, GROUND, PAGE = "#1f2328", "#57606a", "#d8dee4", "#ffffff", "#eef1f4"
#: Pixels of a letter of 11 pixels, on average, and of a line of text.
LETTER, TEXT = 6.6, 14
#: For each unit of Grafana the base of its names, and these. Others are numbers without a name.
SCALES = {
    "bytes": (1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "Bps": (1000, ("B/s", "kB/s", "MB/s", "GB/s")),
    "cps": (1000, ("c/s", "K c/s", "M c/s")),
    "short": (1000, ("", "K", "Mil", "Bil")),
    "s": (1000, ("ns", "µs", "ms", "s")),
}


@dataclass(frozen=True)
class Series:
    """One series of an answer: seconds and values, and the time between two of them."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Mapping[str, str] = field(default_factory=dict)
    step: float = math.inf

    @property
    def last(self) -> float:
        """The newest value."""
        return self.points[-1][1]

    def pieces(self) -> Iterator[list[tuple[float, float]]]:
        """The points that a line connects: a missing one ends it."""
        piece: list[tuple[float, float]] = []
        for point in self.points:
            if piece and point[0] - piece[-1][0] > 1.5 * self.step:
                yield piece
                piece = []
            piece.append(point)
        yield piece


@dataclass(frozen=True)
class Answers:
    """The series of each panel, by its id, and the time that the lines show."""

    begin: float
    end: float
    series: Mapping[int, Sequence[Series]]


def ask(url: str, board: Mapping[str, Any], minutes: float, window: str) -> Answers:
    """Evaluates the expressions of a dashboard. ``window`` replaces ``$__rate_interval``."""
    end = time.time()
    begin, step = end - 60 * minutes, 60 * minutes / POINTS
    found: dict[int, list[Series]] = {}
    with httpx.Client(base_url=f"{url}/api/v1/", trust_env=False, timeout=60) as client:
        for panel in board["panels"]:
            found[panel["id"]] = []
            for target in panel["targets"]:
                text = target["expr"].replace("$__rate_interval", window).replace("$model", ".*")
                if target["instant"]:
                    path, times = "query", {"time": end}
                else:
                    path, times = "query_range", {"start": begin, "end": end, "step": step}
                answer = client.get(path, params={"query": text, **times})
                if answer.is_error:
                    raise ValueError(f"{panel['title']}: {answer.text.strip()}")
                for one in answer.json()["data"]["result"]:
                    points = [(float(at), float(value)) for at, value in _points(one)]
                    points = [point for point in points if math.isfinite(point[1])]
                    if points:
                        name = _name(target["legendFormat"], one["metric"])
                        found[panel["id"]].append(Series(name, points, one["metric"], step))
    return Answers(begin, end, found)


def _points(one: Mapping[str, Any]) -> list[tuple[float, str]]:
    return one["values"] if "values" in one else [one["value"]]


def _name(legend: str, labels: Mapping[str, str]) -> str:
    if legend == "__auto":
        return ", ".join(labels.values())
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), legend)


def written(value: float, unit: str) -> str:
    """A value as Grafana writes it: three digits and a unit."""
    if unit in ("percentunit", "percent"):
        return f"{_digits(value * 100 if unit == 'percentunit' else value)} %"
    base, names = SCALES.get(unit, SCALES["short"])
    if value == 0:
        return f"0 {names[-1] if unit == 's' else names[0]}".strip()
    if unit == "s":
        value *= 1e9
    power = 0
    while abs(value) >= base * 0.9995 and power + 1 < len(names):
        value, power = value / base, power + 1
    return f"{_digits(value)} {names[power]}".strip()


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def picture(board: Mapping[str, Any], answers: Answers) -> str:
    """The SVG of a dashboard."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    width, height = COLUMNS * COLUMN + GAP, rows * ROW + GAP
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    text = f'font-family="sans-serif" font-size="11" fill="{INK}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {text}>',
            f"<title>{escape(board['title'])}</title>",
            f'<rect width="{width}" height="{height}" fill="{PAGE}"/>',
            *(line for panel in board["panels"] for line in _panel(panel, answers)),
            "</svg>\n",
        ]
    )


def _panel(panel: Mapping[str, Any], answers: Answers) -> Iterator[str]:
    place, series = panel["gridPos"], answers.series[panel["id"]]
    width, height = place["w"] * COLUMN - GAP, place["h"] * ROW - GAP
    corner = f"{place['x'] * COLUMN + GAP} {place['y'] * ROW + GAP}"
    yield f'<g transform="translate({corner})" data-panel="{panel["id"]}">'
    yield f'<rect width="{width}" height="{height}" rx="3" fill="{GROUND}" stroke="{LINE}"/>'
    yield _text(10, 19, panel["title"], size=13)
    if series:
        yield from DRAWN[panel["type"]](panel, series, answers, width, height)
    else:
        yield _text(width / 2, height / 2, "No data", "middle", PALE)
        yield _text(width / 2, height / 2 + 18, panel["description"], "middle", PALE)
    yield "</g>"


def _text(
    x: float, y: float, text: str, anchor: str = "start", fill: str = INK, size: int = 11
) -> str:
    more = f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' fill="{fill}"' if fill != INK else ""
    more += f' font-size="{size}"' if size != 11 else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{more}>{escape(text)}</text>'


# Lines
# --------------------------------------------------------------------------------------------------


def _lines(
    panel: Mapping[str, Any], series: Sequence[Series], answers: Answers, width: int, height: int
) -> Iterator[str]:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = "stacking" in defaults["custom"]
    sums = list(_sums(series)) if stacked else list(series)
    top = defaults.get("max") or max(value for one in sums for _, value in one.points) or 1.0
    step = _nice(top / 4)
    top = step * math.ceil(top / step - 1e-9)
    legend, rows = _legend([one.name for one in series], width)
    left, right, upper, lower = 58, width - 12, 30, height - 26 - rows * TEXT

    def x(at: float) -> float:
        return left + (right - left) * (at - answers.begin) / (answers.end - answers.begin)

    def y(value: float) -> float:
        return lower - (lower - upper) * value / top

    for number in range(round(top / step) + 1):
        yield f'<path d="M{left} {y(number * step):.1f}H{right}" stroke="{LINE}"/>'
        label = written(number * step, defaults["unit"])
        yield _text(left - 6, y(number * step) + 4, label, "end", PALE)
    whole = (answers.end - answers.begin) / 60
    every = _nice(whole / 5)
    for number in range(math.floor(whole / every + 1e-9) + 1):
        label = f"-{_digits(number * every)} min" if number else "now"
        yield _text(x(answers.end - 60 * number * every), lower + 15, label, "middle", PALE)
    for number, one in reversed(list(enumerate(sums))):
        colour = COLOURS[number % len(COLOURS)]
        for piece in one.pieces():
            path = _path([(x(at), y(value)) for at, value in piece])
            if stacked:
                area = f"{path}L{x(piece[-1][0]):.0f} {lower}L{x(piece[0][0]):.0f} {lower}Z"
                yield f'<path d="{area}" fill="{colour}" fill-opacity=".3"/>'
            yield (
                f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" '
                'stroke-linecap="round"/>'
            )
    for number, (row, at, name) in enumerate(legend):
        base = height - 8 - TEXT * (rows - 1 - row)
        colour = COLOURS[number % len(COLOURS)]
        yield f'<path d="M{10 + at:.0f} {base - 4}h12" stroke="{colour}" stroke-width="3"/>'
        yield _text(26 + at, base, name)


def _sums(series: Iterable[Series]) -> Iterator[Series]:
    """Each series on top of those before it."""
    below: dict[float, float] = {}
    for one in series:
        for at, value in one.points:
            below[at] = below.get(at, 0.0) + value
        yield Series(one.name, [(at, below[at]) for at, _ in one.points], one.labels, one.step)


def _nice(least: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(one * power for one in (1, 2, 2.5, 5, 10) if one * power >= least * (1 - 1e-9))


def _path(points: Iterable[tuple[float, float]]) -> str:
    """A line through points, without those between two of the same height."""
    places = [(round(x), round(y, 1)) for x, y in points]
    level = [y for _, y in places]
    kept = [
        place
        for number, place in enumerate(places)
        if number in (0, len(places) - 1) or level[number - 1 : number + 2] != 3 * [place[1]]
    ]
    line = "L".join(f"{x} {y:g}" for x, y in kept)
    return f"M{line}" if len(kept) > 1 else f"M{line}h1"


def _legend(names: Sequence[str], width: int) -> tuple[list[tuple[int, float, str]], int]:
    """The row and place of each name, and the number of rows."""
    placed, row, at = [], 0, 0.0
    for name in names:
        needed = 28 + LETTER * len(name)
        if at and at + needed > width - 10:
            row, at = row + 1, 0.0
        placed.append((row, at, name))
        at += needed
    return placed, row + 1


# Values
# --------------------------------------------------------------------------------------------------


def _arc(x: float, y: float, radius: float, begin: float, end: float) -> str:
    """A part of a circle; shares of a turn, from the top, clockwise."""
    (x1, y1), (x2, y2) = (
        (x + radius * math.sin(2 * math.pi * at), y - radius * math.cos(2 * math.pi * at))
        for at in (begin, end)
    )
    large = int(end - begin > 0.5)
    return f"M{x1:.1f} {y1:.1f}A{radius} {radius} 0 {large} 1 {x2:.1f} {y2:.1f}"


def _gauge(
    panel: Mapping[str, Any], series: Sequence[Series], _: Answers, width: int, height: int
) -> Iterator[str]:
    defaults = panel["fieldConfig"]["defaults"]
    value, most = series[0].last, defaults.get("max", 100.0)
    x, y, radius = width / 2, height / 2 + 24, height / 2 - 28
    share = min(max(value / most, 0.0), 1.0)
    for colour, end in ((LINE, 1.0), (COLOURS[0], share)):
        arc = _arc(x, y, radius, -1 / 3, -1 / 3 + end * 2 / 3)
        yield f'<path d="{arc}" fill="none" stroke="{colour}" stroke-width="14"/>'
    yield _text(x, y + 8, written(value, defaults["unit"]), "middle", size=20)


def _stat(
    panel: Mapping[str, Any], series: Sequence[Series], _: Answers, width: int, height: int
) -> Iterator[str]:
    space = (height - 30) / len(series)
    for number, one in enumerate(series):
        y = 30 + space * (number + 0.5)
        value = written(one.last, panel["fieldConfig"]["defaults"]["unit"])
        if one.name:
            yield _text(width / 2, y - 16, one.name, "middle", PALE)
        size = 26 if len(series) < 3 else 16
        yield _text(width / 2, y + 10, value, "middle", COLOURS[0], size)


def _pie(
    panel: Mapping[str, Any], series: Sequence[Series], _: Answers, width: int, height: int
) -> Iterator[str]:
    radius = (height - 36 - TEXT * len(series)) / 2 - 4
    x, y, begin = width / 2, 30 + radius, 0.0
    total = sum(one.last for one in series) or 1.0
    for number, one in enumerate(series):
        colour, share = COLOURS[number % len(COLOURS)], one.last / total
        if share > 0.999:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"/>'
        elif share > 0:
            arc = _arc(x, y, radius, begin, begin + share)
            yield f'<path d="{arc}L{x:.1f} {y:.1f}Z" fill="{colour}" stroke="{GROUND}"/>'
        begin += share
        base = height - 8 - TEXT * (len(series) - 1 - number)
        value = written(one.last, panel["fieldConfig"]["defaults"]["unit"])
        yield f'<path d="M10 {base - 4}h12" stroke="{colour}" stroke-width="3"/>'
        yield _text(26, base, one.name)
        yield _text(width - 10, base, value, "end")


def _table(
    panel: Mapping[str, Any], series: Sequence[Series], _: Answers, width: int, height: int
) -> Iterator[str]:
    names = sorted({name for one in series for name in one.labels})
    unit = panel["fieldConfig"]["defaults"]["unit"]
    rows = [
        [*names, "Value"],
        *(
            [*(one.labels.get(name, "") for name in names), written(one.last, unit)]
            for one in series
        ),
    ]
    lengths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(lengths) + len(lengths) > (width - 20) / LETTER:
        # Names of columns are the last that are shortened.
        more = [length - len(name) for length, name in zip(lengths, rows[0], strict=True)]
        lengths[more.index(max(more))] -= 1
    for number, row in enumerate(rows[: (height - 30) // (TEXT + 6)]):
        x, y = 10.0, 44 + number * (TEXT + 6)
        for cell, length in zip(row, lengths, strict=True):
            text = cell if len(cell) <= length else cell[: length - 1] + "…"
            yield _text(x, y, text, fill=INK if number else PALE)
            x += LETTER * (length + 1)
        yield f'<path d="M10 {y + 6}H{width - 10}" stroke="{LINE}"/>'


#: What draws each type of panel.
DRAWN = {
    "timeseries": _lines,
    "gauge": _gauge,
    "stat": _stat,
    "bargauge": _stat,
    "piechart": _pie,
    "table": _table,
}


def main(words: Sequence[str] | None = None) -> int:
    """Writes the picture, and prints the panels without data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("url", help="address of Prometheus")
    parser.add_argument("picture", type=Path, help="the SVG that is written")
    parser.add_argument("--dashboard", type=Path, default=OVERVIEW, help="JSON of Grafana")
    parser.add_argument("--minutes", type=float, default=60.0, help="time of the lines (60)")
    parser.add_argument("--window", default="1m", help="for $__rate_interval (1m)")
    given = parser.parse_args(words)
    board = json.loads(given.dashboard.read_text())
    try:
        answers = ask(given.url.rstrip("/"), board, given.minutes, given.window)
    except (httpx.HTTPError, ValueError) as error:
        print(f"{given.url}: {error}", file=sys.stderr)
        return 1
    given.picture.write_text(picture(board, answers))
    empty = [panel["title"] for panel in board["panels"] if not answers.series[panel["id"]]]
    print(f"{given.picture}: {len(board['panels'])} panels, without data: {empty or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
