"""ucm beside what a user would use instead, in one run: ``make bench-peers`` (README.md says how it
is measured).

Every arm of ``arms.py`` runs in a process of its own. They take turns round by round, in a random
order each round, so that what else happens on the machine falls on all of them. Prints the tables,
and writes them and every figure to ``--json`` and beside it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import results
from arm_process import HERE, ArmProcess
from arms import ARMS, Arm
from scratch import hollow

ROOT = HERE.parent.parent
BLOCKS_KIB = (256, 1024, 2048)
MODES = ("buffered", "direct")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=128, help="MiB in each round (128)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (5)")
    parser.add_argument(
        "--block-kib", type=int, nargs="+", default=list(BLOCKS_KIB), help="sizes of blocks in KiB"
    )
    parser.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--arm", nargs="+", help="only arms whose name contains one of these texts")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="where directories are made (build/)"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "peers.json")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds that a round of one arm may take"
    )
    parser.add_argument(
        "--python312", default="", help="interpreter of the environment with UCM's wheel"
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 MiB, one round: shows that everything runs"
    )
    chosen = parser.parse_args()
    if chosen.python312:  # not resolved: what lies behind the link is not the environment
        chosen.python312 = os.path.abspath(chosen.python312)
    if chosen.quick:
        chosen.mib, chosen.rounds = 2, 1
    return chosen


def environment(arm: Arm) -> dict[str, str]:
    """What the process of an arm sees: ucm from this source tree, the others from what is installed
    alone."""
    values = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UCM_"))
    }
    if arm.own:
        values["PYTHONPATH"] = str(ROOT / "python")
    return values


class Contest:
    """The arms, their rounds and what went wrong."""

    def __init__(self, chosen: argparse.Namespace, scratch: Path) -> None:
        self.chosen = chosen
        self.scratch = scratch
        self.rounds: results.Rounds = {}
        #: (arm, reason) -> the cases that it kept the arm out of.
        self.out: dict[tuple[str, str], list[str]] = {}
        wanted = [
            arm for arm in ARMS if not chosen.arm or any(text in arm.name for text in chosen.arm)
        ]
        self.arms = [
            ArmProcess(
                arm,
                chosen.python312 if arm.python312 else sys.executable,
                environment(arm),
                scratch,
            )
            for arm in wanted
        ]

    def greet(self) -> None:
        """Say which arms run, and why others do not."""
        for arm in self.arms:
            arm.greet()
            print(
                f"{arm.arm.name:22} {arm.version or 'cannot run here: ' + arm.reason}", flush=True
            )

    def case(self, block_bytes: int, mode: str) -> None:
        """All rounds of one case; an arm that fails in one sits out the rest of it."""
        count = max(1, (self.chosen.mib << 20) // block_bytes)
        running = [arm for arm in self.arms if not arm.reason]
        for number in range(self.chosen.rounds):
            for arm in random.Random(number).sample(running, len(running)):
                figures = self._one(arm, block_bytes, count, mode, number)
                reason = figures.get("unavailable") or figures.get("failed")
                if reason:
                    print(f"  {arm.arm.name}: {reason}", flush=True)
                    self.out.setdefault((arm.arm.name, reason), []).append(
                        f"{results.size(block_bytes)} {mode}"
                    )
                    self.rounds.pop(((block_bytes, mode), arm.arm.name), None)
                    running.remove(arm)
                else:
                    self.rounds.setdefault(((block_bytes, mode), arm.arm.name), []).append(figures)

    def _one(
        self, arm: ArmProcess, block_bytes: int, count: int, mode: str, number: int
    ) -> dict[str, Any]:
        """One round of one arm in a directory of its own, which takes no space afterwards."""
        directory = tempfile.mkdtemp(prefix="round-", dir=self.scratch)
        request = {
            "directory": directory,
            "block_bytes": block_bytes,
            "count": count,
            "direct": mode == "direct",
            "seed": number,
        }
        try:
            return arm.round(request, self.chosen.timeout)
        finally:
            hollow(directory)
            os.sync()  # the next one finds a file system at rest

    def state(self, arm: ArmProcess) -> str:
        """Of an arm, in the results."""
        if any(name == arm.arm.name for _, name in self.rounds):
            return "measured"
        return arm.reason or next(
            (reason for name, reason in self.out if name == arm.arm.name), "not asked"
        )

    def notes(self) -> list[str]:
        """Which arms are missing from which cases, and why."""
        return [
            f"{name}: {reason} ({', '.join(cases)})" for (name, reason), cases in self.out.items()
        ]

    def stop(self) -> None:
        """End every process."""
        for arm in self.arms:
            arm.stop()


def main() -> None:
    """Measures and reports."""
    chosen = arguments()
    chosen.dir.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "machine": machine.describe(chosen.dir),
        "settings": {"mib": chosen.mib, "rounds": chosen.rounds, "quick": chosen.quick},
    }
    with tempfile.TemporaryDirectory(
        prefix="peers-", dir=chosen.dir, ignore_cleanup_errors=True
    ) as scratch:
        contest = Contest(chosen, Path(scratch))
        try:
            contest.greet()
            for mode in chosen.mode:
                for kib in chosen.block_kib:
                    print(f"{kib} KiB, {mode}", flush=True)
                    contest.case(kib << 10, mode)
        finally:
            contest.stop()
    names = [arm.arm.name for arm in contest.arms]
    own = [arm.name for arm in ARMS if arm.own]
    head["arms"] = [
        {
            "name": arm.arm.name,
            "version": arm.version,
            "threads": arm.threads,
            "state": contest.state(arm),
        }
        for arm in contest.arms
    ]
    head["notes"] = contest.notes()
    movers = [arm.name for arm in ARMS if not arm.store]
    measured = results.rows(contest.rounds, own, names, movers)
    judged = [] if chosen.quick else results.goals(measured, own[0], own[1], own[2:])
    figures = results.document(head, measured, judged)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(figures, indent=1) + "\n")
    text = results.markdown(figures)
    chosen.json.with_suffix(".md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
