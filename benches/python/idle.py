"""Cost of an idle open store: CPU, wake-ups, threads, descriptors, memory.

For each preset a process of its own opens a store, moves a few blocks so that all threads exist,
and then does nothing. CPU time is that of the whole process, including Python's own threads. Prints
a table; ``--json FILE`` writes the figures. Run: ``PYTHONPATH=python python
benches/python/idle.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Bytes of a block, and how many are moved before.
BLOCK, MOVED = 1 << 20, 32
#: Preset -> the store and its keys beside directory and sizes.
PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Posix, files": ("UcmPosixStore", {"layout": "file"}),
    "Posix, files, lookups only": ("UcmPosixStore", {"layout": "file", "device_id": -1}),
    "Posix, segments": ("UcmPosixStore", {"layout": "segment"}),
    "Posix, segments, lookups only": ("UcmPosixStore", {"layout": "segment", "device_id": -1}),
    "Cache|Posix": (
        "UcmPipelineStore",
        {"store_pipeline": "Cache|Posix", "layout": "file", "cache_size": "256MiB"},
    ),
    "Cache|Pc": ("UcmPipelineStore", {"store_pipeline": "Cache|Pc", "cache_size": "256MiB"}),
    "Cache|Empty": ("UcmPipelineStore", {"store_pipeline": "Cache|Empty", "cache_size": "256MiB"}),
}
#: Time before the measurement: segments are sealed, and the root was counted, also once more 5 s
#: after the last write if that fell into the first count.
SETTLE_S = 8.0


def status(path: str) -> dict[str, str]:
    """The lines of a ``status`` file of ``/proc``."""
    with open(path) as file:
        return {name: rest.strip() for name, _, rest in (line.partition(":") for line in file)}


def threads() -> dict[str, tuple[float, int]]:
    """Each thread: CPU seconds, number of sleeps."""
    found = {}
    for number in os.listdir("/proc/self/task"):
        try:
            about = status(f"/proc/self/task/{number}/status")
            with open(f"/proc/self/task/{number}/schedstat") as file:
                seconds = int(file.read().split()[0]) / 1e9
        except FileNotFoundError:
            continue  # it has ended
        found[number] = (seconds, int(about["voluntary_ctxt_switches"]))
    return found


def footprint() -> dict[str, int]:
    """Descriptors, and bytes of memory: private, and shared (such as the regions of the memory
    tier)."""
    about = status("/proc/self/status")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "anonymous_bytes": int(about["RssAnon"].split()[0]) * 1024,
        "shared_bytes": int(about["RssShmem"].split()[0]) * 1024,
    }


def measure(preset: str, root: str, seconds: float) -> dict[str, Any]:
    """One row: the additional use of a process with this store open."""
    import numpy as np

    from ucm.store import UcmConnectorFactoryV1

    name, keys = PRESETS[preset]
    sizes = {"tensor_size": BLOCK, "shard_size": BLOCK, "block_size": BLOCK, "identity": "idle"}
    memory = np.full((MOVED, BLOCK), 7, np.uint8)  # exists before the measurement
    addresses = np.array([[row.ctypes.data] for row in memory], np.uint64)
    ids = [bytes([number]) * 16 for number in range(MOVED)]
    before, threads_before = footprint(), set(threads())
    config = {"storage_backends": root, "storage_capacity": "1GiB", **sizes, **keys}
    if "Empty" in str(keys):
        config.pop("storage_backends")
    with UcmConnectorFactoryV1.create_connector(name, config) as store:
        if keys.get("device_id") != -1:
            store.wait(store.dump_data(ids, [0] * MOVED, addresses))
            store.wait(store.load_data(ids, [0] * MOVED, addresses))
        store.lookup(ids)
        time.sleep(SETTLE_S)
        at_first, started = threads(), time.monotonic()
        time.sleep(seconds)
        took, at_last = time.monotonic() - started, threads()
        after = footprint()
    pairs = [(now, at_first.get(number, (0.0, 0))) for number, now in at_last.items()]
    return {
        "preset": preset,
        "seconds": took,
        "cpu_percent": 100 * sum(now[0] - then[0] for now, then in pairs) / took,
        "wake_ups_per_second": sum(now[1] - then[1] for now, then in pairs) / took,
        "threads": len(at_last) - len(threads_before & set(at_last)),
        "descriptors": after["descriptors"] - before["descriptors"],
        "anonymous_bytes": after["anonymous_bytes"] - before["anonymous_bytes"],
        "shared_bytes": after["shared_bytes"] - before["shared_bytes"],
    }


def show(row: Mapping[str, Any]) -> str:
    """A line of the table."""
    cells = [
        row["preset"].replace("|", "\\|"),
        f"{row['cpu_percent']:.2f} %",
        f"{row['wake_ups_per_second']:.1f}",
    ]
    cells += [str(row["threads"]), str(row["descriptors"])]
    cells += [f"{row[name] / (1 << 20):.0f} MiB" for name in ("anonymous_bytes", "shared_bytes")]
    return "| " + " | ".join(cells) + " |"


def in_child(
    preset: str, root: str, seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The same in a process of its own, with this one's environment unless one is given."""
    options = [f"--child={preset}", f"--root={root}", f"--seconds={seconds}"]
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{preset}: {done.stderr.strip()[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Prints the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--seconds", type=float, default=20.0, help="how long each store is idle"
    )
    arguments.add_argument("--presets", nargs="*", choices=list(PRESETS), default=list(PRESETS))
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--child", choices=list(PRESETS), help=argparse.SUPPRESS)
    arguments.add_argument("--root", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.child:
        print(json.dumps(measure(chosen.child, chosen.root, chosen.seconds)))
        return
    rows = []
    print(
        "| store | CPU of a core | wake-ups a second | threads | descriptors | memory | shared"
        " memory |"
    )
    print("|---|---|---|---|---|---|---|")
    for preset in chosen.presets:
        with tempfile.TemporaryDirectory() as place:
            rows.append(in_child(preset, str(Path(place) / "root"), chosen.seconds))
        print(show(rows[-1]), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
