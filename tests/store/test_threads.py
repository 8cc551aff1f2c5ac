"""Number of a store's threads: few after opening, never more than in docs/store-threads.md.

Counted by name in a process of its own. No store is closed before it is counted: idle threads do
not end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blocks import BLOCK, PIECES

pytest.importorskip("ucm._core", reason="the core is not compiled here")

#: Most threads that read and write by default, and those that look up.
IO, LOOKUP = 16, 8

#: As in the table of docs/store-threads.md: name, keys, most threads of a store that moves blocks,
#: and of one that looks up.
KINDS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "files": ("UcmPosixStore", {}, IO + 13, LOOKUP + 6),
    "segments": ("UcmPosixStore", {"layout": "segment"}, IO + 17, LOOKUP + 10),
    "memory": ("UcmCacheStore", {"cache_size": "4MiB"}, 13, 6),
    "memory above files": (
        "UcmPipelineStore",
        {"store_pipeline": "Cache|Posix", "cache_size": "4MiB"},
        IO + 21,
        LOOKUP + 11,
    ),
    "memory above segments": (
        "UcmPipelineStore",
        {"store_pipeline": "Cache|Pc", "cache_size": "4MiB"},
        IO + 25,
        LOOKUP + 15,
    ),
}

#: On two processors, on which memory has two threads that copy.
CHILD = """
import json, os, sys, threading
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from ucm.store import UcmConnectorFactoryV1
from blocks import Memory, await_room, ids

def names(but):
    found = []
    for task in set(os.listdir("/proc/self/task")) - but:
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                found.append(file.read())
        except FileNotFoundError:
            pass
    return found

def threads():
    # A new thread has the name of this process until it runs, and then gives itself its own.
    while (found := names(before)) and own in found:
        pass
    return sum(name.startswith("ucm") for name in found)

name, config, blocks = json.loads(sys.argv[1])
before = set(os.listdir("/proc/self/task"))
with open("/proc/self/comm") as file:
    own = file.read()
counts = [sum(name.startswith("ucm") for name in names(set()))]
store = UcmConnectorFactoryV1.create_connector(name, config)
counts.append(threads())
if config["device_id"] < 0:
    store.lookup(ids(blocks) * 20)
    hits = store.lookup_on_prefix(ids(blocks)) + 1
    for begun in [store.begin_locate_on_prefix(ids(blocks)) for _ in range(12)]:
        while begun.answer() is None:
            threading.Event().wait(0.001)
else:
    memory = Memory(blocks)
    await_room(store)
    store.wait(store.dump_data(ids(blocks), [0] * blocks, memory.rows(*range(blocks))))
    store.wait(store.load_data(ids(blocks), [0] * blocks, memory.rows(*range(blocks))))
    hits = blocks
counts.append(threads())
store.close()
print(json.dumps([*counts, hits]))
"""


def count(name: str, config: dict[str, Any]) -> tuple[int, int, int]:
    """Threads of a store after opening and after use, and the blocks that it found."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([name, config, 48])],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    before, opened, used, hits = json.loads(child.stdout.splitlines()[-1])
    assert before == 0
    return opened, used, hits


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_than_stated(kind: str, common: dict[str, Any]) -> None:
    name, keys, most, most_looking = KINDS[kind]
    config = {
        **common,
        "tensor_size_list": PIECES,
        "shard_size": BLOCK,
        "block_size": BLOCK,
        **keys,
    }
    if name == "UcmCacheStore":
        del config["storage_backends"]
    opened, used, _ = count(name, config | {"device_id": 0})
    # Threads start with the work: an idle open store has only those of its housekeeping.
    assert 1 <= opened <= max(most - IO, 1)
    assert opened <= used <= most
    opened, used, hits = count(name, config | {"device_id": -1})
    assert opened <= used <= most_looking
    assert hits == (0 if name == "UcmCacheStore" else 48), (
        "blocks in memory only are lost with their process"
    )
