"""Draws what ``retrieval.py --json LAYER`` and ``sparse.py --json STEPS`` measured, and prints the
same as tables: ``plot_sparse.py LAYER STEPS docs/sparse-speed.svg``.

Left one layer's decode attention over the length of a request, right whole decode steps of vLLM,
dense and sparse, both axes logarithmic. Lines are single requests, marks without a line several
requests beside each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

Row = dict[str, Any]

#: Name of each line, and its colour.
LAYER_LINES = {
    "dense": ("dense: vLLM's kernel over all tokens", "#8a8f98"),
    "vLLM": ("vLLM's kernel over the chosen blocks", "#d97706"),
    "step": ("choosing and ucm's kernel over the chosen blocks", "#2563eb"),
    "choose": ("choosing alone", "#059669"),
}
STEP_LINES = {
    "dense": ("dense", "#8a8f98"),
    "hash-128": ("hash-128, 4096 tokens kept", "#2563eb"),
    "mean-K": ("mean-K, 4096 tokens kept", "#059669"),
}


def line(
    axes: Axes, rows: Sequence[Row], name: tuple[str, str], value: Callable[[Row], float]
) -> None:
    """One line of a panel, and its marks."""
    label, colour = name
    single = sorted(
        (row for row in rows if row["requests"] == 1), key=lambda row: int(row["tokens"])
    )
    axes.plot(
        [row["tokens"] for row in single],
        [value(row) for row in single],
        "o-",
        color=colour,
        label=label,
    )
    for row in rows:
        if row["requests"] > 1:
            axes.plot([row["tokens"]], [value(row)], "s", color=colour, fillstyle="none")
            note = f"   {row['requests']} requests"
            axes.annotate(note, (row["tokens"], value(row)), color=colour, fontsize=7, va="center")


def panel(axes: Axes, title: str, tokens: Sequence[int]) -> None:
    """What both panels have."""
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(tokens), [f"{count // 1024} K" for count in tokens])
    axes.set_xlabel("tokens of a request")
    axes.set_ylabel("ms")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="both", color="#e5e7eb", linewidth=0.6)
    axes.legend(fontsize=7, frameon=False, loc="upper left")


def draw(layer: dict[str, Any], steps: dict[str, Any], picture: Path) -> None:
    """Both panels into one picture."""
    # Ids that do not change from one drawing to the next, and text as text.
    mpl.rcParams |= {"svg.hashsalt": "ucm", "svg.fonttype": "none"}
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for key, name in LAYER_LINES.items():
        line(left, layer["rows"], name, lambda row, key=key: float(row["ms"][key]))  # type: ignore[misc]
    for method, name in STEP_LINES.items():
        mine = [row for row in steps["rows"] if row["method"] == method]
        line(right, mine, name, lambda row: statistics.median(row["step_ms"]))
    tokens = sorted({int(row["tokens"]) for row in [*layer["rows"], *steps["rows"]]})
    about = layer["machine"]
    panel(
        left,
        f"One layer (32 query, 8 KV heads of 128), {about['isa']}, {about['threads']} threads",
        tokens,
    )
    panel(right, "A whole decode step of vLLM, 8 such layers", tokens)
    figure.savefig(picture, metadata={"Date": None})


def layer_table(layer: dict[str, Any]) -> str:
    """One layer's figures in Markdown."""
    columns = ("dense", "vLLM", "ours", "choose", "step")
    lines = [
        f"| tokens | requests | tokens kept | {' | '.join(columns)} | dense : step |",
        "|---" * 9 + "|",
    ]
    for row in layer["rows"]:
        ms = row["ms"]
        cells = [
            row["tokens"],
            row["requests"],
            row["kept"],
            *(f"{ms[name]:.2f}" for name in columns),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {ms['dense'] / ms['step']:.1f} |")
    return "\n".join(lines)


def step_table(steps: dict[str, Any]) -> str:
    """Whole steps in Markdown: ms, ratio to the dense step of the same round, share of choosing."""
    known = {(row["tokens"], row["requests"], row["method"]): row for row in steps["rows"]}
    lines = [
        f"| tokens | requests | {' | '.join(STEP_LINES)} |",
        "|---" * (2 + len(STEP_LINES)) + "|",
    ]
    for tokens, requests in dict.fromkeys(
        (row["tokens"], row["requests"]) for row in steps["rows"]
    ):
        cells, dense = [], known[tokens, requests, "dense"]["step_ms"]
        for method in STEP_LINES:
            row = known[tokens, requests, method]
            cell = f"{statistics.median(row['step_ms']):.1f}"
            if method != "dense":
                ratios = [mine / other for mine, other in zip(row["step_ms"], dense, strict=True)]
                cell += f" ({statistics.median(ratios):.2f}"
                if row["selection_ms"]:
                    share = statistics.median(row["selection_ms"]) / statistics.median(
                        row["step_ms"]
                    )
                    cell += f", {100 * share:.0f} %"
                cell += ")"
            cells.append(cell)
        lines.append(f"| {tokens} | {requests} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Reads the figures, writes the picture, prints the tables."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("layer", type=Path)
    arguments.add_argument("steps", type=Path)
    arguments.add_argument("picture", type=Path)
    chosen = arguments.parse_args()
    layer, steps = json.loads(chosen.layer.read_text()), json.loads(chosen.steps.read_text())
    draw(layer, steps, chosen.picture)
    print(layer_table(layer), step_table(steps), sep="\n\n")


if __name__ == "__main__":
    main()
