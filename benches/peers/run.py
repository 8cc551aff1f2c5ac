"""ucm beside its alternatives, in one run: ``make bench-peers`` (README.md has the method).

Every arm of ``arms.py`` runs in a process of its own. They take turns round by round, in a random
order each round, so that other load on the machine affects all of them. Prints the tables, and
writes them and every figure to ``--json`` and beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import machine
import results
from arm_process import HERE, ArmProcess
from arms import ARMS, Arm
from contest import Contest

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
        "--quick", action="store_true", help="2 MiB, one round: checks that everything runs"
    )
    chosen = parser.parse_args()
    if chosen.python312:  # not resolved: the link's target is not the environment
        chosen.python312 = os.path.abspath(chosen.python312)
    if chosen.quick:
        chosen.mib, chosen.rounds = 2, 1
    return chosen


def environment(arm: Arm) -> dict[str, str]:
    """The environment of an arm's process: ucm from this source tree, the others only as
    installed."""
    values = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UCM_"))
    }
    if arm.own:
        values["PYTHONPATH"] = str(ROOT / "python")
    return values


def main() -> None:
    """Measures and reports."""
    chosen = arguments()
    chosen.dir.mkdir(parents=True, exist_ok=True)
    head = machine.head(chosen.dir, chosen)
    wanted = [arm for arm in ARMS if not chosen.arm or any(text in arm.name for text in chosen.arm)]
    with tempfile.TemporaryDirectory(
        prefix="peers-", dir=chosen.dir, ignore_cleanup_errors=True
    ) as folder:
        scratch = Path(folder)
        arms = []
        for arm in wanted:
            python = chosen.python312 if arm.python312 else sys.executable
            arms.append(ArmProcess(arm, python, environment(arm), scratch))
        contest = Contest(arms, scratch, chosen.timeout)
        try:
            contest.greet()
            for mode in chosen.mode:
                for kib in chosen.block_kib:
                    print(f"{kib} KiB, {mode}", flush=True)
                    block = kib << 10
                    request = {
                        "block_bytes": block,
                        "count": max(1, (chosen.mib << 20) // block),
                        "direct": mode == "direct",
                    }
                    text = f"{results.size(block)} {mode}"
                    at = lambda directory: contextlib.nullcontext(str(directory))  # noqa: E731
                    contest.case((block, mode), text, chosen.rounds, request, at)
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
    measured = results.rows(contest.rounds, own, names)
    judged = [] if chosen.quick else results.goals(measured, own[0], own[1], own[2:])
    figures = head | {
        "rows": [asdict(row) | {"median": row.median} for row in measured],
        "goals": [asdict(goal) for goal in judged],
    }
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(figures, indent=1) + "\n")
    text = results.markdown(machine.sentence(head), head, measured, judged)
    chosen.json.with_suffix(".md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
