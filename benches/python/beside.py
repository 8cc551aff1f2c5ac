"""Compares this tree with another revision, in turns: ``python benches/python/beside.py b12cd8ba
--json beside.json``.

Both are built the same way in the same run (``builds.py``) and measured by the same programs
through the public API, in processes of their own: old and new, then new and old, and so on, at
least seven pairs. Rows are ``load`` and ``dump`` (GB/s of blocks of three sizes, through the page
cache and past it, as files and in segments), ``lookup`` (1000 present ids, 1000 absent ones),
``ttft`` (first token of a vLLM engine on blocks of an earlier one) and ``idle`` (an idle store).
For each row: the median of the pairs' ratios, its interval (``paired.py``), and whether the row
fails: its whole interval is below 0.95. The exit status is 1 if a row fails, 2 if something could
not be measured. Measure only on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from variants import BLOCK, ROOT, engine  # isort: split

sys.path.insert(0, str(ROOT / "benches" / "peers"))

import idle
import machine
import paired
from arm_process import ArmProcess
from arms import Arm
from builds import Build, BuildError, of_revision, of_this_tree
from contest import hollow
from harness import Engine, EngineError
from specs import prompt

import model as demo_model
from ucm.bench.metrics import Better, ratio

ROWS = ("load", "dump", "lookup", "ttft", "idle")
LAYOUTS = {"file": "files", "segment": "segments"}
MODES = {"buffered": "page cache", "direct": "O_DIRECT"}
BLOCKS_KIB = (256, 1024, 2048)
#: Most prompts sent to a restarted engine until it finds one of them.
EARLY = 6
#: Blocks of the lookup rows: their size does not affect a lookup, and small ones are dumped fast.
SMALL = 4096
#: The stores of idle.py to compare; lookup-only ones use too little.
PRESETS = ("Posix, files", "Posix, segments", "Cache|Posix")
#: With fewer pairs an interval is hardly narrower than the whole range.
LEAST_PAIRS = 7

Figures = Mapping[str, float]


class FailedError(Exception):
    """A failed measurement, with its reason."""


class Case(ABC):
    """One program with several measurements: its rows, as (name, unit, better direction), and its
    call."""

    label: str
    rows: Sequence[tuple[str, str, Better]]

    @abstractmethod
    def turn(self, build: Build, work: Path) -> Figures:
        """One measurement of one build, in an empty directory: the figure of every row."""


class StoreCase(Case):
    """``benches/peers/child.py`` over ``UcmPosixStore``, in a process of its own for each turn."""

    def __init__(
        self, layout: str, block: int, count: int, mode: str, rows: Sequence[str], repeats: int
    ) -> None:
        self.arm = Arm("ucm", "peer_ucm", "Ucm", {"config": {"layout": layout}}, own=True)
        self.request = {"block_bytes": block, "count": count, "direct": mode == "direct"}
        self.repeats = repeats
        #: Name of a row -> the figure of the child.
        self.figures = {name: name.replace(", ", "_") for name in rows}
        if "lookup" in "".join(rows):
            self.label = f"{LAYOUTS[layout]}, {count} ids"
        else:
            self.label = f"{LAYOUTS[layout]}, {block >> 10} KiB, {MODES[mode]}"
        self.rows = [
            (name, "us an id", "less") if name.startswith("lookup") else (name, "GB/s", "more")
            for name in rows
        ]

    def turn(self, build: Build, work: Path) -> Figures:
        process = ArmProcess(self.arm, sys.executable, build.environment(), work)
        answers = []
        try:
            process.greet()
            for number in range(self.repeats):
                folder = work / str(number)
                folder.mkdir()
                answers.append(
                    process.round(self.request | {"directory": str(folder), "seed": number}, 300.0)
                )
                hollow(folder)
                os.sync()
        finally:
            process.stop()
        for answer in answers:
            if reason := answer.get("failed") or answer.get("unavailable"):
                raise FailedError(reason)
        return {
            name: statistics.median(answer[figure] for answer in answers)
            for name, figure in self.figures.items()
        }


class IdleCase(Case):
    """``idle.py``: processor time and wake-ups of an idle store."""

    rows = (("idle, processor", "% of a core", "less"), ("idle, wake-ups", "a second", "less"))

    def __init__(self, preset: str, seconds: float) -> None:
        self.label, self.preset, self.seconds = preset, preset, seconds

    def turn(self, build: Build, work: Path) -> Figures:
        try:
            row = idle.in_child(self.preset, str(work / "root"), self.seconds, build.environment())
        except SystemExit as error:
            raise FailedError(str(error)) from error
        return {"idle, processor": row["cpu_percent"], "idle, wake-ups": row["wake_ups_per_second"]}


class RestartCase(Case):
    """An engine of vLLM on the blocks of an earlier one; each side has its own root, filled
    once."""

    def __init__(self, layout: str, tokens: int, prompts: int, kept: Path) -> None:
        self.label = f"restarted, {LAYOUTS[layout]}"
        self.rows = [("ttft", "s", "less")]
        self.layout, self.tokens, self.kept = layout, tokens, kept / layout
        self.early = [prompt(999 - index, tokens) for index in range(EARLY)]
        self.prompts = [prompt(1000 + index, tokens) for index in range(prompts)]

    def turn(self, build: Build, work: Path) -> Figures:
        root = self.kept / build.site.parent.name / "blocks"
        if not root.exists():
            root.mkdir(parents=True)
            told(f"{self.label}: {build.name} computes and stores the prompts first")
            self._life(build, root, work / "filling.log", stored=False)
        answers = self._life(build, root, work / "engine.log", stored=True)
        reused = [tokens for _, tokens in answers]
        missed = sum(tokens < self.tokens - 2 * BLOCK for tokens in reused)
        if 4 * missed > len(reused):  # the median tolerates a prompt that was not found in time
            raise FailedError(f"the restarted engine reused {reused} of {self.tokens} tokens each")
        return {"ttft": statistics.median(first for first, _ in answers)}

    def _life(
        self, build: Build, root: Path, log: Path, *, stored: bool
    ) -> list[tuple[float, int]]:
        """One engine's life: for each prompt the seconds to its first token, and the reused
        tokens."""
        model = self.kept.parent / "model"
        if not model.exists():
            demo_model.write(model)
        blocks = 2 * (self.tokens // BLOCK + 2)
        answers = []
        with engine(self.layout, model, root, blocks, self.tokens + BLOCK) as spec:
            state = {"UCM_STATE_DIR": str(root.with_name("state"))}
            spec = spec.but(pythonpath=(str(build.site),), env={**spec.env, **state})
            with Engine(spec, log) as running:
                seen = running.scheduler_eval("__import__('ucm').__file__")
                if str(build.site) not in seen:
                    raise FailedError(f"the engine runs {seen}, not the build in {build.site}")
                running.ask(prompt(1, BLOCK // 2), 1)
                if stored:
                    self._await_opened(running)
                for tokens in self.prompts if stored else self.early + self.prompts:
                    answer = running.ask(tokens, 1)
                    if answer.first is None:
                        raise FailedError(f"no token for a prompt; {log}")
                    answers.append((answer.first, answer.cached))
                    running.wait_idle()
        return answers

    def _await_opened(self, running: Engine) -> None:
        """Sends other stored prompts, each once, until one is found.

        A cache opens in the background, and until then an engine misses. A repeated prompt may hit
        the engine's own cache; and emptying that begins a new generation of ucm's cache, which must
        open again.
        """
        for tokens in self.early:
            found = running.ask(tokens, 1).cached > 0
            running.wait_idle()
            if found:
                return
        raise FailedError(f"the restarted engine reused nothing of {len(self.early)} prompts")


def cases(chosen: argparse.Namespace, kept: Path) -> Iterator[Case]:
    """The measurements, in order."""
    if moves := [row for row in ("load", "dump") if row in chosen.rows]:
        for layout in LAYOUTS:
            for kib in BLOCKS_KIB:
                for mode in MODES:
                    count = max(1, (chosen.mib << 20) // (kib << 10))
                    yield StoreCase(layout, kib << 10, count, mode, moves, chosen.repeats)
    if "lookup" in chosen.rows:
        for layout in LAYOUTS:
            rows = ("lookup, present", "lookup, absent")
            yield StoreCase(layout, SMALL, chosen.ids, "buffered", rows, chosen.repeats)
    if "idle" in chosen.rows:
        for preset in PRESETS:
            yield IdleCase(preset, chosen.seconds)
    if "ttft" in chosen.rows:
        for layout in chosen.ttft_layouts:
            yield RestartCase(layout, chosen.tokens, chosen.prompts, kept)


def told(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def measured(
    case: Case, builds: Mapping[str, Build], pairs: int, scratch: Path
) -> list[paired.Row]:
    """All pairs of a case; the order of the sides changes with every pair."""
    figures: dict[str, list[Figures]] = defaultdict(list)
    for number in range(pairs):
        for side in ("old", "new") if number % 2 == 0 else ("new", "old"):
            work = Path(tempfile.mkdtemp(prefix=f"{side}-", dir=scratch))
            try:
                figures[side].append(case.turn(builds[side], work))
            except (FailedError, EngineError) as error:
                raise FailedError(f"{case.label}, {side} ({builds[side].name}): {error}") from error
        ratios = (
            f"{name} {ratio(figures['old'][-1][name], figures['new'][-1][name], better):.3f}"
            for name, _, better in case.rows
        )
        told(f"{case.label}, pair {number + 1} of {pairs}: " + ", ".join(ratios))
    return [
        paired.Row(
            name,
            case.label,
            unit,
            better,
            tuple(turn[name] for turn in figures["old"]),
            tuple(turn[name] for turn in figures["new"]),
        )
        for name, unit, better in case.rows
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("revision", help="of Git, with which this tree is compared")
    parser.add_argument(
        "--rows", default=",".join(ROWS), help=f"some of {','.join(ROWS)}, with commas (all)"
    )
    parser.add_argument(
        "--pairs", type=int, default=LEAST_PAIRS, help=f"of each case, at least {LEAST_PAIRS}"
    )
    parser.add_argument(
        "--mib", type=int, default=128, help="MiB that one dump or load moves (128)"
    )
    parser.add_argument("--ids", type=int, default=1000, help="of a lookup (1000)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="dumps and loads of a turn, whose median counts (3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="for which a store is idle (10)"
    )
    parser.add_argument("--tokens", type=int, default=4005, help="of a prompt (4005)")
    parser.add_argument("--prompts", type=int, default=8, help="for each engine (8)")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="where directories are made (build/)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=("two pairs of tiny sizes, and engines over files only: checks that everything runs"),
    )
    chosen = parser.parse_args()
    chosen.rows = [row.strip() for row in chosen.rows.split(",") if row.strip()]
    if unknown := sorted(set(chosen.rows) - set(ROWS)):
        parser.error(f"--rows: {', '.join(unknown)}: there are {', '.join(ROWS)}")
    chosen.ttft_layouts = list(LAYOUTS)
    if chosen.quick:
        chosen.pairs, chosen.mib, chosen.ids, chosen.repeats, chosen.seconds = 2, 2, 50, 1, 1.0
        chosen.tokens, chosen.prompts, chosen.ttft_layouts = 301, 1, ["file"]
    elif chosen.pairs < LEAST_PAIRS:
        parser.error(f"--pairs: at least {LEAST_PAIRS}, or --quick")
    return chosen


def run(chosen: argparse.Namespace) -> int:
    """Builds, measures, prints, writes."""
    chosen.dir.mkdir(parents=True, exist_ok=True)
    told(f"building {chosen.revision}")
    builds = {"old": of_revision(chosen.revision)}
    told("building this tree")
    builds["new"] = of_this_tree()
    names = {side: build.name for side, build in builds.items()}
    settings = {
        key: getattr(chosen, key) for key in ("rows", "pairs", "mib", "ids", "repeats", "seconds")
    }
    settings |= {key: getattr(chosen, key) for key in ("tokens", "prompts", "quick")}
    about = machine.describe(chosen.dir)
    document: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "machine": about,
    }
    document |= {"builds": names, "settings": settings}
    rows: list[paired.Row] = []
    missing: list[str] = []
    with tempfile.TemporaryDirectory(prefix="beside-", dir=chosen.dir) as folder:
        for case in cases(chosen, Path(folder) / "kept"):
            try:
                rows += measured(case, builds, chosen.pairs, Path(folder))
            except FailedError as error:
                missing.append(str(error))
                told(missing[-1])
            # after every case: an hour's figures are not lost with the last of them
            if chosen.json:
                document |= {"rows": [row.as_json() for row in rows], "missing": missing}
                chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"old: {names['old']}, new: {names['new']}; {chosen.pairs} pairs, load average"
        f" {about['load_before']} before."
    )
    print(
        f"{about['cores']} cores, {about['processor']}, Linux {about['kernel']},"
        f" {about['file_system']}.\n"
    )
    print(paired.table(rows))
    failed = [row for row in rows if paired.judged(row.ratios) == "fails"]
    if chosen.quick:
        print("\nA quick run: it checks that everything runs; its speeds mean nothing.")
    else:
        print(
            f"\n{len(failed)} of {len(rows)} rows fail: certainly below {paired.FLOOR} of the old"
            " build."
        )
    if missing:
        print("\nNot measured:\n" + "\n".join(f"- {reason}" for reason in missing))
    return 1 if failed else 2 if missing else 0


def main() -> None:
    """Prints the reason if it cannot be measured."""
    chosen = arguments()
    try:
        status = run(chosen)
    except BuildError as error:
        told(f"beside.py: {error}")
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
