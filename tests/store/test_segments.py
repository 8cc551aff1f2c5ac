"""Behaviour of segments only: the time of publishing, and recovery after a killed process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import PATIENT, await_room

from ucm.errors import ConfigError
from ucm.store.posix import UcmPosixStore

BLOCK = 8192
IDS = [bytes([n * 7 % 256]) * 8 + n.to_bytes(8, "little") for n in range(40)]

#: Writes blocks for ever, and prints the published ones.
WRITER = """
import sys
from test_segments import IDS, Memory, opened
store, memory = opened(sys.argv[1], segment_age=float(sys.argv[2])), Memory()
print("open", flush=True)
for n, block in enumerate(IDS):
    task = store.dump_data([block], [0], memory.rows(n))
    if sys.argv[3] == "wait":
        store.wait(task)
        print(n, flush=True)
while not all(store.lookup(IDS)):
    pass
print("written", flush=True)
sys.stdin.read()
"""


class Memory:
    """The bytes of the blocks: one piece each."""

    def __init__(self) -> None:
        self.data = (
            np.arange(len(IDS) * BLOCK, dtype=np.uint32).astype(np.uint8).reshape(len(IDS), BLOCK)
        )
        self.data[:, 0] = range(len(IDS))

    def rows(self, *blocks: int) -> Any:
        return np.array([[self.data[n].ctypes.data] for n in blocks], dtype=np.uint64)


def opened(root: str | Path, **changes: Any) -> UcmPosixStore:
    config = {
        "storage_backends": str(root),
        "identity": "tests",
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
        "staging_capacity": "4MiB",
        "deadlines": PATIENT,
        "tensor_size": BLOCK,
        "shard_size": BLOCK,
        "block_size": BLOCK,
        "layout": "segment",
    }
    store = UcmPosixStore(config | changes)
    await_room(store)
    return store


def right(store: UcmPosixStore, blocks: list[int]) -> bool:
    """Loads blocks; true if every byte is right."""
    target, truth = Memory(), Memory()
    target.data[:] = 0xEE
    store.wait(store.load_data([IDS[n] for n in blocks], [0] * len(blocks), target.rows(*blocks)))
    return all(np.array_equal(target.data[n], truth.data[n]) for n in blocks)


def child(root: Path, age: float, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), str(age), how]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("after", [1, 7, 20])
def test_what_was_published_survives_a_kill(tmp_path: Path, after: int) -> None:
    process = child(tmp_path / "root", 0, "wait")
    assert process.stdout is not None
    published: list[int] = []
    for line in process.stdout:
        published += [int(line)] if line.strip().isdigit() else []
        if len(published) == after:
            break
    kill(process)
    with opened(tmp_path / "root") as store:
        assert all(store.lookup([IDS[n] for n in published]))
        assert right(store, published)


def test_what_a_killed_process_had_not_published_is_taken_over(tmp_path: Path) -> None:
    process = child(tmp_path / "root", 60, "go on")
    assert process.stdout is not None
    assert any(line == "written\n" for line in process.stdout)
    assert not list(tmp_path.glob("root/*/segments/*"))
    kill(process)
    with opened(tmp_path / "root") as store:
        # a late count happens soon after the opening
        while list(tmp_path.glob("root/*/tmp/*")):
            pass
        assert all(store.lookup(IDS))
        assert right(store, list(range(len(IDS))))
        assert len(list(tmp_path.glob("root/*/segments/*.seg"))) == 1


def _dumps(root: Path, block: int) -> None:
    memory = Memory()
    with opened(root) as store:
        store.wait(store.dump_data([IDS[block]], [0], memory.rows(block)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_processes_forked_from_one_that_had_a_store_are_writers_of_their_own(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    _dumps(root, 0)
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_dumps, args=(root, block)) for block in (1, 2)]
    for process in children:  # as vLLM starts its ranks
        process.start()
    for process in children:
        process.join(60)
    assert [process.exitcode for process in children] == [0, 0]
    writers = {path.name.split("-")[0] for path in root.glob("*/segments/*.seg")}
    assert len(writers) == 3
    with opened(root) as store:
        assert right(store, [0, 1, 2])


def test_closing_does_not_wait_for_more(tmp_path: Path) -> None:
    memory = Memory()
    with opened(tmp_path / "root", segment_age=60) as store:
        store.dump_data(IDS[:2], [0, 0], memory.rows(0, 1))
    with opened(tmp_path / "root") as store:
        assert store.lookup(IDS[:3]) == [True, True, False]


@pytest.mark.parametrize("ask", ["wait", "flush"])
def test_who_asks_for_it_is_not_kept_waiting_for_more_to_publish(tmp_path: Path, ask: str) -> None:
    memory = Memory()
    with opened(tmp_path / "root", segment_age=60) as store, opened(tmp_path / "root") as other:
        task = store.dump_data(IDS[:4], [0] * 4, memory.rows(0, 1, 2, 3))
        if ask == "flush":
            store.wait(task, until="staged")
            store.flush()
            while not store.check(task):
                pass
        else:
            store.wait(task)
        while not all(other.lookup(IDS[:4])):  # segments of others are looked for once a second
            pass


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layout", "segments"),
        ("segment_size", "2GiB"),
        ("segment_size", 4096),
        ("segment_age", -1),
        ("segment_age", True),
        ("segment_merge_rate", -1),
        ("segment_merge_rate", "1TiB"),
    ],
)
def test_values_that_make_no_sense_are_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        opened(tmp_path / "root", **{key: value})
