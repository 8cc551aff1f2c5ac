"""Time to the first token with the cache relative to that without it, over the speeds of a tier, on
a real vLLM.

One engine, one store behind a thread that moves its loads at a given speed
(``tests/vllm/throttled.py``). Speeds are multiples of the one at which loading a prompt takes as
long as computing it, measured first. For each speed what the engine knew of the tier is forgotten,
then every round asks each prompt once for every mode, in alternating order: ``never`` (computing,
the yardstick), ``measured`` and ``always``. vLLM's own cache is emptied before each question.
Prints a table; ``--json FILE`` keeps it. Run: ``PYTHONPATH=python python
benches/python/admission.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

from harness import Engine
from lives import Disk
from models import llama_config, write_model
from specs import BLOCK, PATIENT, Ask, EngineSpec, StoreSpec, prompt
from throttled import Throttle

MODES = ("never", "measured", "always")
SPEEDS = (0.05, 0.5, 0.9, 1.0, 1.1, 2.0, 10.0, float("inf"))
#: Tokens of the prompts: the last block and a bit are computed.
LENGTHS = (200, 500, 1000)
ADMISSION = "connector._scheduler.admission"


class Bench:
    """One engine and its throttled tier."""

    def __init__(self, engine: Engine, throttle: Throttle) -> None:
        self.engine, self.throttle = engine, throttle
        self.prompts = [prompt(70 + number, length) for number, length in enumerate(LENGTHS)]

    def mode(self, mode: str) -> None:
        """From the next request on."""
        self.engine.scheduler_eval(f"setattr({ADMISSION}, '_mode', {mode!r})")

    def forget(self) -> None:
        """Nothing is known of the tier, and its ledger is as at the start."""
        self.engine.scheduler_eval(f"{ADMISSION}._tiers.clear()")

    def ask(self, tokens: list[int]) -> float:
        """Seconds to the first token, from nothing on the device."""
        self.engine.wait_idle()
        self.engine.reset()
        first = self.engine.generate(Ask(tokens, 4))[0].first
        assert first is not None
        return first

    def counts(self) -> tuple[int, int]:
        """Blocks loaded and blocks declined so far."""
        found = self.engine.scheduler_eval(
            "[connector._scheduler.miss_stats.total.loaded,"
            " connector._scheduler.miss_stats.total.missed['declined']]"
        )
        loaded, declined = json.loads(found)
        return loaded, declined

    def warm_up(self) -> float:
        """Stores the prompts; the bytes a second at which loading would take as long as
        computing."""
        self.throttle.clear()
        self.mode("never")
        for _ in range(2):
            for tokens in self.prompts:
                self.ask(tokens)
        longest = self.prompts[-1]
        took = statistics.median(self.ask(longest) for _ in range(3))
        block_bytes = int(self.engine.scheduler_eval("connector._scheduler.readiness.block_bytes"))
        return (len(longest) - 1) // BLOCK * block_bytes / took

    def at(self, speed: float, rounds: int) -> dict[str, Any]:
        """One row of the table."""
        if speed == float("inf"):
            self.throttle.clear()
        else:
            self.throttle.set(speed)
        self.forget()
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        loaded = declined = 0
        orders = itertools.cycle(itertools.permutations(MODES))
        for _ in range(rounds):
            for tokens in self.prompts:
                for mode in next(orders):
                    self.mode(mode)
                    before = self.counts()
                    times[mode].append(self.ask(tokens))
                    if mode == "measured":
                        after = self.counts()
                        loaded, declined = (
                            loaded + after[0] - before[0],
                            declined + after[1] - before[1],
                        )
        row: dict[str, Any] = {"loaded_blocks": loaded, "declined_blocks": declined}
        for mode in MODES:
            row[mode] = {
                "mean": statistics.fmean(times[mode]),
                "median": statistics.median(times[mode]),
            }
        return row


def show(factor: float, row: dict[str, Any]) -> str:
    """A line of the table."""

    def ratio(mode: str, kind: str) -> str:
        return f"{row[mode][kind] / row['never'][kind]:.2f}"

    name = "as fast as the store" if factor == float("inf") else f"{factor:g}"
    cells = [name, f"{row['never']['mean'] * 1e3:.0f} ms"]
    cells += [ratio(mode, kind) for mode in ("measured", "always") for kind in ("mean", "median")]
    cells += [str(row["loaded_blocks"]), str(row["declined_blocks"])]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--rounds", type=int, default=20, help="questions of each prompt, mode and speed"
    )
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--runner", choices=["v1", "v2"], default="v1")
    arguments.add_argument("--speeds", type=float, nargs="*", default=list(SPEEDS))
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        disk = Disk(work / "root")
        disk.root.mkdir()
        control = disk.faults.control
        store = StoreSpec(disk.root, "ThrottledStore", "throttled", {"control": str(control)})
        deadlines = PATIENT | {"load_min_ms": 200, "load_max_s": 30.0, "load_unknown_s": 5.0}
        extra = {"admission": "measured", "deadlines": deadlines, "log": {"level": "ERROR"}}
        model = write_model(work / "model", llama_config(chosen.layers))
        rows = {}
        with Engine(
            EngineSpec(model, chosen.runner, store, extra_config=extra, fork=False), work / "log"
        ) as engine:
            bench = Bench(engine, Throttle(control))
            even = bench.warm_up()
            print(
                f"break-even: {even / 1e6:.2f} MB/s; {chosen.rounds} rounds of {len(LENGTHS)}"
                " prompts\n"
            )
            print(
                "| speed, break-even = 1 | without | measured, mean | median | always, mean |"
                " median | loaded | not |"
            )
            print("|---|---|---|---|---|---|---|---|")
            for factor in chosen.speeds:
                rows[str(factor)] = bench.at(factor * even, chosen.rounds)
                print(show(factor, rows[str(factor)]), flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps({"break_even": even, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
