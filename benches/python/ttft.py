"""Time to first token of a deep, tiny model, computed and loaded: ``python
benches/python/ttft.py``.

For each variant of ``variants.py`` an engine gets new prompts (*cold*) and, after vLLM's own prefix
cache was emptied, the same ones again (*warm*); with ``--restart`` the warm prompts go to a second
engine on the blocks of the first. Before each prompt the engine is idle, with every dump staged.
Variants take turns; their cold times compared with those without a connector are ucm's cost on
misses. ``make bench-ttft`` adds other projects' connectors. Prints a table; ``--json`` writes every
time.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from variants import BLOCK, USUAL, VARIANTS, engine, why  # isort: split

from harness import Engine, EngineError
from peer_connectors import UnavailableError
from specs import prompt

import model as demo_model


def ask_all(running: Engine, run: str, prompts: Sequence[Any], times: dict[str, Any]) -> None:
    """Sends the prompts one after the other, and records the times under the name of the run."""
    for tokens in prompts:
        answer = running.ask(tokens, 1)
        if answer.first is None:
            raise EngineError(f"a {run} prompt got no token: {answer.finish}")
        times[run].append(answer.first)
        if run == "warm":
            times["cached"].append(answer.cached)
        running.wait_idle()


def one_engine(
    variant: str, model: Path, work: Path, number: int, chosen: argparse.Namespace
) -> dict[str, Any]:
    """The times in seconds of one engine, or of one and its successor, or the reason of a
    failure."""
    root, log = work / f"blocks-{number}", work / f"{variant}-{number}.log"
    root.mkdir()
    blocks = 2 * (chosen.tokens // BLOCK + 2) * demo_model.GROUPS.get(chosen.model, 1)
    prompts = [prompt(1000 * number + index, chosen.tokens) for index in range(chosen.prompts)]
    times: dict[str, Any] = {"cold": [], "warm": [], "cached": []}
    lives = (("cold",), ("warm",)) if chosen.restart else (("cold", "warm"),)
    try:
        with engine(variant, model, root, blocks, chosen.tokens + BLOCK) as spec:
            for life in lives:
                with Engine(spec, log) as running:
                    running.ask(prompt(1, BLOCK // 2), 1)
                    for run in life:
                        ask_all(running, run, prompts, times)
                        running.reset()
    except UnavailableError as error:
        return {"failed": str(error)}
    except EngineError as error:
        return {
            "failed": why(str(error) + (log.read_text(errors="replace") if log.exists() else ""))
        }
    return times


def summary(rounds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each variant: medians, and ratios within a round."""
    rows = []
    for variant in rounds[0]:
        mine = [entry[variant] for entry in rounds]
        failed = next((entry["failed"] for entry in mine if "failed" in entry), None)
        if failed:
            rows.append({"variant": variant, "state": failed})
            continue

        def median(entries: list[dict[str, Any]], key: str) -> float:
            return float(statistics.median(value for entry in entries for value in entry[key]))

        bases = [entry.get("none", {}) for entry in rounds]
        pairs = [(entry, base) for entry, base in zip(mine, bases, strict=True) if base.get("cold")]
        added = [median([entry], "cold") / median([base], "cold") - 1 for entry, base in pairs]
        rows.append(
            {
                "variant": variant,
                "state": "measured",
                "cold_s": median(mine, "cold"),
                "warm_s": median(mine, "warm"),
                "warm_to_cold": statistics.median(
                    median([entry], "warm") / median([entry], "cold") for entry in mine
                ),
                "cached_tokens": median(mine, "cached"),
                "added_on_misses": (
                    statistics.median(added) if added and variant != "none" else None
                ),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| variant | cold, s | warm, s | warm, cold = 1 | tokens reused | added on misses |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["state"] != "measured":
            lines.append(f"| {row['variant']} | {row['state']} | | | | |")
            continue
        added = "-" if row["added_on_misses"] is None else f"{row['added_on_misses']:+.1%}"
        lines.append(
            f"| {row['variant']} | {row['cold_s']:.3f} | {row['warm_s']:.3f} |"
            f" {row['warm_to_cold']:.2f} | {row['cached_tokens']:.0f} | {added} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--variant", nargs="+", choices=VARIANTS, default=USUAL)
    arguments.add_argument("--tokens", type=int, default=4005, help="of a prompt")
    arguments.add_argument("--prompts", type=int, default=8, help="for each engine")
    arguments.add_argument("--rounds", type=int, default=3, help="engines for each variant")
    arguments.add_argument(
        "--restart", action="store_true", help="another engine is asked the second time"
    )
    arguments.add_argument(
        "--model", choices=demo_model.KINDS, default="llama", help="without, with some, all windows"
    )
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    missing: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="ttft-") as folder:
        work = Path(folder)
        demo_model.write(work / "model", chosen.model)
        for number in range(chosen.rounds):
            rounds.append({})
            for place, variant in enumerate(chosen.variant):
                print(f"round {number + 1}, {variant}", flush=True)
                times = missing.get(variant) or one_engine(
                    variant, work / "model", work, number * len(VARIANTS) + place, chosen
                )
                if "failed" in times:
                    missing[variant] = times  # it would not start the next time either
                rounds[-1][variant] = times
            rows = summary(rounds)
            if chosen.json:  # after every round, so that an early end keeps the results so far
                date = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d")
                settings = {
                    "model": chosen.model,
                    "tokens": chosen.tokens,
                    "prompts": chosen.prompts,
                    "rounds": number + 1,
                    "restart": chosen.restart,
                }
                document = {"date": date, "settings": settings, "rows": rows, "rounds": rounds}
                chosen.json.write_text(json.dumps(document, indent=1) + "\n")
            print(table(rows), flush=True)


if __name__ == "__main__":
    main()
