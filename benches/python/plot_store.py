"""Draws what ``cargo bench -p ucm-benches -- store --json FILE`` measured: ``plot_store.py FILE
docs/store.svg``.

One panel for each direction and way of reading or writing. In each, for every size of block and
number of threads, two pairs of bars: a plain loop of system calls (grey) and ucm with checksums
(blue), to or from the slot and to or from the caller's memory. A line over a group is what bounds
it, where that was measured and fits the panel. With ``--table`` the same figures are printed as the
tables of ``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from html import escape
from typing import Any

DIRECTIONS = {"load": "Load", "dump": "Dump until published"}
MODES = {
    ("load", "buffered"): "from the page cache",
    ("load", "synced"): "evicted from the page cache before",
    ("load", "direct"): "O_DIRECT",
    ("dump", "buffered"): "into the page cache",
    ("dump", "synced"): "up to the end of a syncfs",
    ("dump", "direct"): "O_DIRECT",
}
SIDES = ("slot", "memory")
PLAIN, OURS, LIMIT = "#b0b7c3", "#2f6fdf", "#c0392b"
BAR, GAP, GROUP_GAP = 11, 3, 14
LEFT, TOP, PLOT_HEIGHT, BELOW, BETWEEN = 44, 64, 150, 52, 34

Row = dict[str, Any]


def groups(rows: list[Row]) -> list[tuple[int, int]]:
    """The cases of a panel: bytes of a block, threads."""
    return sorted({(int(row["block_bytes"]), int(row["workers"])) for row in rows})


def panel_width(count: int) -> int:
    """Pixels that a panel of so many groups takes."""
    return LEFT + count * (4 * BAR + GAP + GROUP_GAP)


def panel(rows: list[Row], title: str, x: int, y: int) -> list[str]:
    """One panel with its upper left corner at (x, y)."""
    top = max((max(row["gbps"], row["yardstick_gbps"]) for row in rows), default=1.0) * 1.15
    base = y + PLOT_HEIGHT

    def height(gbps: float) -> float:
        return PLOT_HEIGHT * gbps / top

    cases = groups(rows)
    right = x + panel_width(len(cases))
    parts = [f'<text class="title" x="{x + LEFT}" y="{y - 10}">{escape(title)}</text>']
    for share in (0.25, 0.5, 0.75, 1.0):
        at = base - PLOT_HEIGHT * share
        parts += [
            f'<line x1="{x + LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#e6e8ec"/>',
            f'<text x="{x + LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{top * share:.1f}</text>',
        ]
    for number, case in enumerate(cases):
        left = x + LEFT + GROUP_GAP // 2 + number * (4 * BAR + GAP + GROUP_GAP)
        mine = [row for row in rows if (row["block_bytes"], row["workers"]) == case]
        for row in mine:
            at = left + SIDES.index(row["side"]) * (2 * BAR + GAP)
            for offset, key, colour in ((0, "yardstick_gbps", PLAIN), (BAR, "gbps", OURS)):
                tall = height(row[key])
                parts.append(
                    f'<rect x="{at + offset}" y="{base - tall:.1f}" width="{BAR - 1}"'
                    f' height="{tall:.1f}" fill="{colour}"><title>{row["side"]}: {row[key]:.2f}'
                    " GB/s</title></rect>"
                )
            ratio_at = base - height(max(row["gbps"], row["yardstick_gbps"])) - 3
            parts.append(
                f'<text class="ratio" x="{at + BAR}" y="{ratio_at:.1f}">{row["ratio"]:.2f}</text>'
            )
        limits = [row["limit_gbps"] for row in mine if row["limit_gbps"] is not None]
        if limits and limits[0] <= top:
            at = base - height(limits[0])
            parts.append(
                f'<line x1="{left - 4}" y1="{at:.1f}" x2="{left + 4 * BAR + GAP + 4}" y2="{at:.1f}"'
                f' stroke="{LIMIT}" stroke-width="2"/>'
            )
        middle = left + 2 * BAR
        block, workers = case
        parts += [
            f'<text x="{middle}" y="{base + 16}" text-anchor="middle">{block // 1024} K</text>',
            f'<text x="{middle}" y="{base + 30}" text-anchor="middle">x {workers}</text>',
        ]
    parts.append(f'<line x1="{x + LEFT}" y1="{base}" x2="{right}" y2="{base}" stroke="#222222"/>')
    return parts


def draw(figures: dict[str, Any]) -> str:
    """The whole picture."""
    rows = [row for row in figures["rows"] if row["checksums"]]
    machine = figures["machine"]
    width = 3 * (panel_width(len(groups(rows))) + BETWEEN)
    total = TOP + 2 * (PLOT_HEIGHT + BELOW + BETWEEN)
    where = f"{machine['cores']} cores of {machine['processor']}, {machine['file_system']}"
    style = (
        "text { font: 11px system-ui, sans-serif; fill: #222222 } .title { font-size: 13px }"
        " .ratio { font-size: 8px; text-anchor: middle }"
    )
    title = (
        f"GB/s of KV with checksums, {where}; below: size of a block, threads; above the bars: ucm"
        " / plain loop"
    )
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}"'
            f' height="{total}">'
        ),
        f"<style>{style}</style>",
        f'<rect width="{width}" height="{total}" fill="#ffffff"/>',
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
    ]
    x = LEFT
    for colour, name in (
        (PLAIN, "plain loop of system calls"),
        (OURS, "ucm (left pair: slot, right pair: caller's memory)"),
        (LIMIT, "limit: memcpy, or the device"),
    ):
        parts += [
            f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>',
            f'<text x="{x + 14}" y="37">{escape(name)}</text>',
        ]
        x += 30 + 6 * len(name)
    step = panel_width(len(groups(rows))) + BETWEEN
    for line, direction in enumerate(DIRECTIONS):
        y = TOP + 16 + line * (PLOT_HEIGHT + BELOW + BETWEEN)
        modes = [(way, title) for (where_to, way), title in MODES.items() if where_to == direction]
        for column, (mode, title) in enumerate(modes):
            mine = [row for row in rows if (row["direction"], row["mode"]) == (direction, mode)]
            if mine:
                parts += panel(mine, f"{DIRECTIONS[direction]}, {title}", column * step, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def tables(figures: dict[str, Any]) -> str:
    """Every figure in Markdown, one table for each direction."""
    head = {
        "load": (
            "| mode | block | threads | to the slot, GB/s: ucm, loop | ratio | ratio without"
            " checksums | to memory, GB/s: ucm, loop | ratio | limit, GB/s |"
        ),
        "dump": (
            "| mode | block | threads | from the slot, GB/s: ucm, loop | ratio | ratio without"
            " checksums | from memory, GB/s: ucm, loop | ratio | limit, GB/s |"
        ),
    }
    lines = []
    for direction, first in head.items():
        lines += [first, "|" + "---|" * 9]
        rows = [row for row in figures["rows"] if row["direction"] == direction]
        for mode in ("buffered", "synced", "direct"):
            mine = [row for row in rows if row["mode"] == mode]
            for case in groups(mine):
                lines.append(_line(MODES[(direction, mode)], case, mine))
        lines.append("")
    return "\n".join(lines)


def _line(mode: str, case: tuple[int, int], rows: list[Row]) -> str:
    """One line of a table: the three rows of a case."""

    def find(side: str, checksums: bool) -> Row:
        return next(
            row
            for row in rows
            if (row["block_bytes"], row["workers"], row["side"], row["checksums"])
            == (*case, side, checksums)
        )

    slot, bare, memory = find("slot", True), find("slot", False), find("memory", True)
    limit = "-" if slot["limit_gbps"] is None else f"{slot['limit']} {slot['limit_gbps']:.1f}"

    def ratio(row: Row) -> str:
        text = f"{row['ratio']:.2f}"
        return f"**{text}**" if row["goal"] is not None and row["ratio"] >= row["goal"] else text

    cells = (
        mode,
        f"{case[0] // 1024} KiB",
        str(case[1]),
        f"{slot['gbps']:.2f}, {slot['yardstick_gbps']:.2f}",
        ratio(slot),
        ratio(bare),
        f"{memory['gbps']:.2f}, {memory['yardstick_gbps']:.2f}",
        ratio(memory),
        limit,
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Reads the figures, writes the picture."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("figures", type=pathlib.Path)
    arguments.add_argument("picture", type=pathlib.Path)
    arguments.add_argument("--table", action="store_true", help="print the tables too")
    chosen = arguments.parse_args()
    figures = json.loads(chosen.figures.read_text())
    chosen.picture.write_text(draw(figures))
    if chosen.table:
        print(tables(figures))


if __name__ == "__main__":
    main()
