"""The plot of ``ucm bench vllm``: quantiles of the time to the first token and of further tokens.

One small SVG without scripts or fonts of its own. Values go up, the share of requests to the
right; each server is a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ucm.bench.metrics import percentile

WIDTH, HEIGHT, LEFT, TOP, GAP = 320, 200, 70, 50, 110
COLOURS = ("#2a6fbb", "#d1495b", "#3a9d5d")
#: Lines across a panel, and points of a curve.
GRID, POINTS = 4, 100


def svg(title: str, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """``panels``: for each title the values (s) of each series; one without values is left out."""
    whole = LEFT + len(panels) * (WIDTH + GAP)
    size = f'width="{whole}" height="{TOP + HEIGHT + 70}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(whole / 2, 20, title, "middle"),
    ]
    for number, (name, series) in enumerate(panels.items()):
        parts += _panel(LEFT + number * (WIDTH + GAP), name, series)
    names = dict.fromkeys(name for series in panels.values() for name in series)
    for number, name in enumerate(names):
        y, colour = TOP + HEIGHT + 50 + 16 * number - 8, COLOURS[number % len(COLOURS)]
        parts.append(f'<path d="M{LEFT} {y - 4}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(LEFT + 26, y, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, name: str, series: Mapping[str, Sequence[float]]) -> list[str]:
    most = max((value for values in series.values() for value in values), default=0.0) or 1.0
    parts = [_text(left + WIDTH / 2, TOP - 10, f"{name} (ms)", "middle")]
    for line in range(GRID + 1):
        share = line / GRID
        y, x = TOP + HEIGHT * (1 - share), left + WIDTH * share
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(_text(left - 6, y + 4, f"{1000 * most * share:.4g}", "end"))
        parts.append(_text(x, TOP + HEIGHT + 16, f"{100 * share:.0f} %", "middle"))
    for number, values in enumerate(series.values()):
        if values:
            points = " ".join(
                f"{left + WIDTH * at / POINTS:.1f},"
                f"{TOP + HEIGHT * (1 - percentile(values, 100 * at / POINTS) / most):.1f}"
                for at in range(POINTS + 1)
            )
            colour = COLOURS[number % len(COLOURS)]
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
