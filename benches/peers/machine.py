"""On what was measured, without naming it: cores, processor, kernel and file system, no host and no
path."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def file_system(directory: Path) -> str:
    """The type of the file system that holds a directory, ``unknown`` where the kernel does not
    say."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            if left.split()[2] == wanted:
                return right.split()[0]
    except (OSError, IndexError):
        pass
    return "unknown"


def processor() -> str:
    """The model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def commit() -> str:
    """What is measured, as Git names it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def describe(directory: Path) -> dict[str, Any]:
    """What the report says of the machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "file_system": file_system(directory),
        "load_before": round(os.getloadavg()[0], 1),
    }
