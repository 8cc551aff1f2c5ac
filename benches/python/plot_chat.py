"""Draws what ``chat.py --json FILE`` measured: ``plot_chat.py FILE PICTURE``.

One panel each for time to first token, memory and descriptors of the server, by turn; one line for
each variant. Around the line of the time to first token lies what the clients of that turn saw,
from the fastest to the slowest.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, GAP, TOP = 420, 220, 60, 40, 46
COLOURS = ("#8a8f98", "#2563eb", "#d97706", "#059669")
PANELS = (
    ("time to first token, s (median, and all clients)", "first_token_s"),
    ("memory of the server, MiB", "memory_mib"),
    ("descriptors of the server", "descriptors"),
)


def values(turn: dict[str, Any], key: str) -> list[float]:
    """One turn's value, or one for each client."""
    found = turn[key]
    return [float(value) for value in found] if isinstance(found, list) else [float(found)]


def panel(title: str, key: str, runs: list[dict[str, Any]], left: float) -> list[str]:
    """One panel, all variants in it."""
    most = max(max(values(turn, key)) for run in runs for turn in run["turns"]) or 1.0
    last = max(turn["turn"] for run in runs for turn in run["turns"])

    def x(turn: int) -> float:
        return left + (WIDTH * (turn - 1) / (last - 1) if last > 1 else WIDTH / 2)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / most)

    parts = [f'<text x="{left}" y="{TOP - 12}">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        height = y(most * share)
        parts.append(
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{height:.1f}" y2="{height:.1f}"'
            ' stroke="#e5e7eb"/>'
        )
        parts.append(
            f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">{most * share:.3g}</text>'
        )
    marks = sorted({1, (last + 1) // 2, last})
    parts += [
        f'<text x="{x(turn):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{turn}</text>'
        for turn in marks
    ]
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        turns = run["turns"]
        upper = [f"{x(turn['turn']):.1f},{y(max(values(turn, key))):.1f}" for turn in turns]
        lower = [
            f"{x(turn['turn']):.1f},{y(min(values(turn, key))):.1f}" for turn in reversed(turns)
        ]
        middle = [
            f"{x(turn['turn']):.1f},{y(statistics.median(values(turn, key))):.1f}" for turn in turns
        ]
        parts.append(
            f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.15"/>'
        )
        parts.append(
            f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}"'
            ' stroke-width="2"/>'
        )
    return parts


def draw(figures: dict[str, Any]) -> str:
    """The picture."""
    runs = [run for run in figures["runs"] if run.get("turns")]
    width = LEFT + len(PANELS) * (WIDTH + LEFT + GAP)
    box = f"0 0 {width} {TOP + HEIGHT + 50}"
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif"'
            ' font-size="12">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    if runs:
        for number, (title, key) in enumerate(PANELS):
            parts += panel(title, key, runs, LEFT + number * (WIDTH + LEFT + GAP))
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        left, base = LEFT + number * 120, TOP + HEIGHT + 38
        parts.append(f'<rect x="{left}" y="{base - 9}" width="16" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 22}" y="{base}">{escape(run["variant"])}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Reads the figures, writes the picture."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("figures", type=pathlib.Path)
    arguments.add_argument("picture", type=pathlib.Path)
    chosen = arguments.parse_args()
    chosen.picture.write_text(draw(json.loads(chosen.figures.read_text())))


if __name__ == "__main__":
    main()
