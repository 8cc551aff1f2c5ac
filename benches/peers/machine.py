"""The machine of a measurement: cores, processor, kernel and file system, without host names and
paths."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def file_system(directory: Path) -> str:
    """The type of a directory's file system, ``unknown`` if the kernel does not report it."""
    command = ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


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
    """The measured revision, by Git's name."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def describe(directory: Path) -> dict[str, Any]:
    """The machine's entry in the report."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "file_system": file_system(directory),
        "load_before": round(os.getloadavg()[0], 1),
    }


def head(directory: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """The head of a run's results: date, revision, machine and amount."""
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": describe(directory),
        "settings": {"mib": chosen.mib, "rounds": chosen.rounds, "quick": chosen.quick},
    }


def sentence(head: Mapping[str, Any]) -> str:
    """The same for people."""
    about, settings = head["machine"], head["settings"]
    text = (
        f"Measured {head['date']} at commit {head['commit']}: {about['cores']} cores"
        f" ({about['processor']}), {about['memory_gib']} GiB, Linux {about['kernel']},"
        f" {about['file_system']}; {settings['mib']} MiB in each of {settings['rounds']} rounds,"
        f" load average {about['load_before']} before."
    )
    quick = " A quick run: it checks that every arm runs; its speeds mean nothing."
    return text + quick if settings["quick"] else text
