#!/usr/bin/env python3
"""Breaks each promise of ucm on purpose, one at a time, in a copy of the tree, and shows that
``make test`` fails: ``.venv/bin/python tests/mutants.py [--list] [--only N ...]``.

A mutant is a text that occurs once below ``crates/*/src`` and ``python/ucm``, and its replacement.
It is found by its text, so it survives moves between files. Its suite, a part of ``make test``,
must fail with the mutant and pass without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The copy, with a target directory of its own.
COPY = ROOT / "build" / "mutants"
#: Most seconds of one suite, with its build.
DEADLINE = 1800


@dataclass(frozen=True)
class Rust:
    """Tests of one crate, by a filter of nextest; empty: all of them."""

    crate: str
    tests: str = ""

    #: The exit code of nextest when tests failed; any other one is no proof.
    failed = 100

    def __str__(self) -> str:
        return " ".join(self.command())

    def command(self) -> list[str]:
        """What runs them."""
        words = ["cargo", "nextest", "run", "--locked", "--no-fail-fast", "-p", self.crate]
        return words + (["-E", self.tests] if self.tests else [])


@dataclass(frozen=True)
class Python:
    """Files or directories of tests."""

    paths: tuple[str, ...]

    failed = 1

    def __str__(self) -> str:
        return f"pytest {' '.join(self.paths)}"

    def command(self) -> list[str]:
        """What runs them."""
        return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *self.paths]


@dataclass(frozen=True)
class Mutant:
    """One fault, and the tests that detect it."""

    promise: int  # of DESIGN.md 1
    what: str
    text: str
    instead: str
    suite: Rust | Python


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        1,
        "a record with a wrong checksum is a hit",
        "if found == crc {",
        "if found == crc || stretch.len() > 1 {",
        Rust("ucm-record"),
    ),
    Mutant(
        1,
        "a record of another model is a hit",
        "if header.meta.namespace.starts_with(digest) {",
        "if header.meta.namespace != [0; 32] {",
        Rust("ucm-record"),
    ),
    Mutant(
        2,
        "block keys do not depend on the identity",
        "[SEED_PREFIX, identity].concat()",
        "[SEED_PREFIX, &identity[..0]].concat()",
        Rust("ucm-core"),
    ),
    Mutant(
        2,
        "weights that changed after the start are taken for those in memory",
        "young = stamp.ctime_ns > self._since_ns - CLOCK_SLACK_NS",
        "young = stamp.ctime_ns < 0",
        Python(("tests/vllm_unit/test_weights.py",)),
    ),
    Mutant(
        3,
        "a deadline cancels no block of a load",
        "self.step(block, READING, CANCELLED)",
        "self.step(block, CANCELLED, CANCELLED)",
        Rust("ucm-infra"),
    ),
    Mutant(
        3,
        "the breaker of a sick medium never opens",
        "let opens = failures >= self.config.threshold;",
        "let opens = failures == u32::MAX && failures >= self.config.threshold;",
        Rust("ucm-store", "test(/^health::/)"),
    ),
    Mutant(
        3,
        "an exception of ucm fails the engine's step",
        "failures.note(name, error, vital=vital)",
        "raise",
        Python(("tests/vllm_unit/test_hooks.py",)),
    ),
    Mutant(
        4,
        "a hit is loaded however slow its tier is",
        "if best is whole:",
        "if best is not self:",
        Python(("tests/connector/test_admission.py", "tests/connector/test_never_slower.py")),
    ),
    Mutant(
        5,
        "a writer never uses up its grant of space",
        "self.granted.saturating_sub(self.reserved)",
        "self.granted",
        Rust("ucm-media", "test(/^quota::/)"),
    ),
    Mutant(
        6,
        "importing ucm needs torch",
        '__all__ = ["UcmError", "__version__"]',
        'import torch\n\n__all__ = ["UcmError", "__version__"]',
        Python(("tests/unit/test_names.py", "tests/unit/test_factory.py")),
    ),
    Mutant(
        7,
        "a function of vLLM's is replaced",
        "for name in CONNECTORS:",
        "KVConnectorFactory.create_connector = print\n        for name in CONNECTORS:",
        Python(("tests/unit/test_no_patch.py",)),
    ),
    Mutant(
        8,
        "the reason that a store gives for a miss is lost",
        "reason = named(name, MissReason.ABSENT)",
        "reason = MissReason.ABSENT",
        Python(("tests/connector/test_reasons.py",)),
    ),
)


def file_of(mutant: Mutant, root: Path = ROOT) -> Path:
    """The one file below ``root`` with the text of a mutant; ``LookupError`` if there is none, or
    several, or several places in one."""
    files = [*root.glob("crates/*/src/**/*.rs"), *root.glob("python/ucm/**/*.py")]
    found = {path: path.read_text().count(mutant.text) for path in files}
    found = {path: count for path, count in found.items() if count}
    if sum(found.values()) != 1:
        places = ", ".join(f"{path.relative_to(root)} ({n})" for path, n in found.items())
        raise LookupError(f"{mutant.text!r} must stand in one place: {places or 'it is nowhere'}")
    return next(iter(found))


def copy_tree() -> None:
    """Brings the copy to the state of this tree: tracked and new files, and the built core.
    Unchanged files are not touched, so that cargo builds only changes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    names |= {str(path.relative_to(ROOT)) for path in ROOT.glob("python/ucm/*.so")}
    for path in [*COPY.glob("crates/**/*"), *COPY.glob("python/**/*"), *COPY.glob("tests/**/*")]:
        if path.is_file() and str(path.relative_to(COPY)) not in names:
            path.unlink()
    for name in names:
        source, target = ROOT / name, COPY / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
            os.utime(target)  # newer than what cargo built of a mutant


def run(suite: Rust | Python, log: Path) -> int:
    """The exit code of a suite in the copy."""
    paths = [str(COPY / "python"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "CARGO_TARGET_DIR": str(COPY / "target"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with log.open("wb") as out:
        command = subprocess.run(
            suite.command(),
            cwd=COPY,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE,
            check=False,
        )
    return command.returncode


def killed(number: int, mutant: Mutant) -> bool:
    """Whether the suite of a mutant fails with it. ``RuntimeError`` if the suite could not run."""
    file = file_of(mutant, COPY)
    text = file.read_text()
    log = COPY.parent / f"mutant-{number}.log"
    try:
        file.write_text(text.replace(mutant.text, mutant.instead))
        code = run(mutant.suite, log)
    finally:
        file.write_text(text)
    if code not in (0, mutant.suite.failed):
        raise RuntimeError(f"the suite ended with code {code}: {log.relative_to(ROOT)}")
    return code != 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 if every mutant was killed."""
    parser = argparse.ArgumentParser(description="Show that make test detects broken promises.")
    parser.add_argument("--list", action="store_true", help="print the mutants and their suites")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these numbers")
    options = parser.parse_args(arguments)
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(MUTANTS, 1)
        if options.only is None or number in options.only
    ]
    for number, mutant in chosen:
        place = file_of(mutant).relative_to(ROOT)
        if options.list:
            print(f"{number:2} promise {mutant.promise}: {mutant.what}")
            print(f"     {place}: {mutant.text}\n     {mutant.suite}")
    if options.list:
        return 0
    copy_tree()
    wrong = 0
    sound: dict[Rust | Python, int] = {}
    for number, mutant in chosen:
        begin = time.monotonic()
        if mutant.suite not in sound:
            sound[mutant.suite] = run(mutant.suite, COPY.parent / f"mutant-{number}-without.log")
        try:
            if sound[mutant.suite] != 0:
                outcome = "NOT TRIED, its suite fails without it"
            else:
                outcome = "killed" if killed(number, mutant) else "SURVIVED"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            outcome = f"NOT TRIED, {error}"
        wrong += outcome != "killed"
        seconds = time.monotonic() - begin
        print(f"{number:2} promise {mutant.promise}: {mutant.what}: {outcome} ({seconds:.0f} s)")
        sys.stdout.flush()
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants killed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
