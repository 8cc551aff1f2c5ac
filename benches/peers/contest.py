"""Arms take turns, round by round and in a random order each round, so that other load on the
machine affects all of them."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from arm_process import ArmProcess

#: Makes the location of a round from a new directory: the directory, or the address of a server.
At = Callable[[Path], contextlib.AbstractContextManager[str]]


class Contest:
    """The arms, the figures of their rounds, and the reasons of missing ones."""

    def __init__(self, arms: Sequence[ArmProcess], scratch: Path, seconds: float) -> None:
        self.arms, self.scratch, self.seconds = arms, scratch, seconds
        #: (case, arm) -> figures of each round.
        self.rounds: dict[Any, list[dict[str, Any]]] = {}
        #: (arm, reason) -> the cases without it.
        self.out: dict[tuple[str, str], list[str]] = {}

    def greet(self) -> None:
        """Start the arms; print the running ones, and why others do not run."""
        for arm in self.arms:
            arm.greet()
            state = arm.version or "cannot run here: " + arm.reason
            print(f"{arm.arm.name:22} {state}", flush=True)

    def case(self, case: Hashable, text: str, rounds: int, request: dict[str, Any], at: At) -> None:
        """All rounds of one case; an arm that fails in one skips the rest of it."""
        running = [arm for arm in self.arms if not arm.reason]
        for number in range(rounds):
            for arm in random.Random(number).sample(running, len(running)):
                figures = self._one(arm, request | {"seed": number}, at)
                if reason := figures.get("unavailable") or figures.get("failed"):
                    print(f"  {arm.arm.name}: {reason}", flush=True)
                    self.out.setdefault((arm.arm.name, reason), []).append(text)
                    self.rounds.pop((case, arm.arm.name), None)
                    running.remove(arm)
                else:
                    self.rounds.setdefault((case, arm.arm.name), []).append(figures)

    def _one(self, arm: ArmProcess, request: dict[str, Any], at: At) -> dict[str, Any]:
        """One round of one arm in a directory of its own, which is emptied afterwards."""
        directory = Path(tempfile.mkdtemp(prefix="round-", dir=self.scratch))
        try:
            with at(directory) as place:
                return arm.round(request | {"directory": place}, self.seconds)
        finally:
            hollow(directory)
            os.sync()  # so that the file system is idle for the next one

    def state(self, arm: ArmProcess) -> str:
        """An arm's entry in the results."""
        if any(name == arm.arm.name for _, name in self.rounds):
            return "measured"
        return arm.reason or next(
            (reason for name, reason in self.out if name == arm.arm.name), "not measured"
        )

    def notes(self) -> list[str]:
        """The missing arms, their cases and reasons."""
        missing = [f"{arm.arm.name}: {arm.reason}" for arm in self.arms if arm.reason]
        return missing + [
            f"{name}: {reason} ({', '.join(cases)})" for (name, reason), cases in self.out.items()
        ]

    def stop(self) -> None:
        """End every process."""
        for arm in self.arms:
            arm.stop()


def hollow(directory: Path) -> None:
    """Truncate all files, but do not remove them before the end of the run.

    ext4 skips every inode that was freed in the last minutes, so creating files is many times
    slower where others were just removed: the next arm would be slowed down.
    """
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path) and os.path.isfile(path):
                os.truncate(path, 0)
