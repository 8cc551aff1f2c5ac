"""What the demo leaves behind: one table on the terminal and the same timings as a small SVG."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from html import escape


@dataclasses.dataclass(frozen=True)
class Run:
    """Figures of one engine run."""

    title: str
    prompt_tokens: int
    reused_tokens: int
    first_token_s: float
    stored_bytes: int
    loaded_bytes: int
    output: tuple[int, ...]


def identical(runs: Sequence[Run]) -> bool:
    """Whether all runs produced the same tokens."""
    return len({run.output for run in runs}) == 1


def table(runs: Sequence[Run]) -> str:
    """The figures of all runs; the first is the one the others are compared with."""
    cold = runs[0].first_token_s
    rows = [
        ("", [run.title for run in runs]),
        ("prompt tokens", [str(run.prompt_tokens) for run in runs]),
        ("tokens reused", [str(run.reused_tokens) for run in runs]),
        ("time to first token", [f"{run.first_token_s:.2f} s" for run in runs]),
        ("cold / this run", [f"{cold / run.first_token_s:.1f} x" for run in runs]),
        ("bytes stored", [_size(run.stored_bytes) for run in runs]),
        ("bytes loaded", [_size(run.loaded_bytes) for run in runs]),
    ]
    widths = [max(len(row[1][column]) for row in rows) for column in range(len(runs))]
    label = max(len(row[0]) for row in rows)
    lines = [
        f"  {name:<{label}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows
    ]
    lines.insert(1, "  " + "-" * (len(lines[0]) - 2))
    lines.append(f"  outputs identical: {'yes' if identical(runs) else 'NO'}")
    return "\n".join(lines)


def write_svg(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Time to first token of every run as horizontal bars."""
    left, width, bar, gap, top = 150, 380, 26, 16, 44
    longest = max(run.first_token_s for run in runs)
    height = top + len(runs) * (bar + gap) + 22
    total = left + width + 150
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}"'
            f' width="{total}" height="{height}">'
        ),
        "<style>text { font: 14px system-ui, sans-serif; fill: #222222 }</style>",
        f'<rect width="{total}" height="{height}" fill="#ffffff"/>',
        (
            f'<text x="16" y="28">Time to first token, {runs[0].prompt_tokens} prompt tokens, each'
            " in a new process</text>"
        ),
    ]
    for row, run in enumerate(runs):
        y = top + row * (bar + gap) + gap // 2
        length = max(2.0, width * run.first_token_s / longest)
        label = f"{run.first_token_s:.2f} s, {run.reused_tokens} reused"
        colour = "#b0b7c3" if row == 0 else "#2f6fdf"
        parts += [
            f'<text x="{left - 10}" y="{y + 18}" text-anchor="end">{escape(run.title)}</text>',
            (
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar}" rx="3"'
                f' fill="{colour}"/>'
            ),
            f'<text x="{left + length + 8:.1f}" y="{y + 18}">{label}</text>',
        ]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count else "0"
