"""``ucm trace``: records which blocks an engine's requests ask for, and replays it against stores
of other sizes and policies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ucm.cli import terminal

_WIDTH, _HEIGHT, _LEFT, _TOP = 480, 240, 60, 40
_COLOURS = ("#2a6fbb", "#d1495b", "#66a182")


@click.group()
def trace() -> None:
    """Record the blocks that requests ask for, and see what other stores would hit of them."""


@trace.command(context_settings={"ignore_unknown_options": True})
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(file: str, command: tuple[str, ...]) -> None:
    """Run COMMAND, an engine with ucm, with its trace in FILE: ucm trace record FILE vllm serve …

    The same as UCM_BLOCK_TRACE=FILE in its environment, or `block_trace` in its configuration. The
    trace has no tokens and no text; its names of blocks lead back to neither.
    """
    os.environ["UCM_BLOCK_TRACE"] = os.path.abspath(file)
    os.execvp(command[0], command)  # noqa: S606 - the user's own command


@trace.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--capacity", "sizes", multiple=True, type=click.IntRange(1), help="In blocks; repeatable."
)
@click.option("--block-bytes", help="Size of a block, for capacities in bytes (see ucm plan).")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write the curves (SVG) to a file.")
@terminal.json_output
def replay(
    file: str, sizes: tuple[int, ...], block_bytes: str | None, plot: str | None, as_json: bool
) -> None:
    """Show the share of blocks that stores of other sizes and policies would hit of a trace.

    lru evicts what was used longest ago, as ucm does, fifo what was written first; best knows the
    future: no policy hits more.
    """
    from ucm.block_trace import POLICIES, capacities, hit_rate, read_trace
    from ucm.config import parse_size

    with click.open_file(file) as trace:
        requests = read_trace(trace)
    try:
        width = None if block_bytes is None else parse_size(block_bytes)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--block-bytes") from None
    points = [
        {
            "blocks": size,
            **({} if width is None else {"bytes": size * width}),
            **{policy: round(hit_rate(requests, size, policy), 6) for policy in POLICIES},
        }
        for size in sorted(sizes) or capacities(requests)
    ]
    asked = sum(map(len, requests))
    document = {"command": "trace replay", "requests": len(requests), "asked": asked}
    document |= {"points": points}
    if plot:
        Path(plot).write_text(_svg(points, POLICIES))
    if as_json:
        terminal.document(document)
        return
    click.echo(f"{terminal.many(len(requests), 'request')}, {terminal.many(asked, 'block')}")
    rows = [
        [point["blocks"], *(f"{100 * point[policy]:.1f} %" for policy in POLICIES)]
        for point in points
    ]
    terminal.table(("blocks", *POLICIES), rows)


def _svg(points: list[dict[str, Any]], policies: tuple[str, ...]) -> str:
    """Share of hits by capacity, each capacity as wide as the next."""
    size = f'width="{_WIDTH + 2 * _LEFT}" height="{_HEIGHT + 3 * _TOP}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20">share of blocks hit, by blocks in the store</text>',
    ]
    step = _WIDTH / max(len(points) - 1, 1)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _TOP + _HEIGHT * (1 - share)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{y + 4:.1f}">{100 * share:.0f} %</text>')
    for at, point in enumerate(points):
        x, y = _LEFT + at * step, _TOP + _HEIGHT + 16
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{point["blocks"]}</text>')
    for number, policy in enumerate(policies):
        line = " ".join(
            f"{_LEFT + at * step:.1f},{_TOP + _HEIGHT * (1 - point[policy]):.1f}"
            for at, point in enumerate(points)
        )
        colour, x = _COLOURS[number], _LEFT + 100 * number
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x}" y="{_TOP + _HEIGHT + 40}" fill="{colour}">{policy}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
