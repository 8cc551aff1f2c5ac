"""Several processes on one root: one counts for all, and another takes over when it is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ucm.store.posix.connector import UcmPosixStore

_BLOCK = 32768


def _config(root: Path) -> dict[str, Any]:
    return {
        "storage_backends": str(root),
        "identity": "tests",
        "layout": "file",
        "storage_capacity": 64 * _BLOCK,
        "free_space_floor": 0,
        "staging_capacity": "1MiB",
        "tensor_size": _BLOCK // 8,
        "shard_size": _BLOCK // 2,
        "block_size": _BLOCK // 2,
    }


def _dump(store: UcmPosixStore, number: int) -> bool:
    data = np.full(_BLOCK // 2, number % 251, np.uint8)
    pieces = [[data.ctypes.data + at for at in range(0, data.nbytes, _BLOCK // 8)]]
    try:
        store.wait(store.dump_data([number.to_bytes(16, "big")], [0], np.array(pieces, np.uint64)))
    except Exception:  # refused: busy, or no space
        return False
    return True


def _eventually(what: str, so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not so():
        assert time.monotonic() < end, f"never happened: {what}"


def _write_until_killed(root: Path, send: Connection) -> None:
    store = UcmPosixStore(_config(root))
    _eventually("something is stored", lambda: _dump(store, 0))
    send.send(store.stats()["storage_collector"])
    number = 0
    while True:
        number += 1
        _dump(store, number)


def _stored(root: Path) -> int:
    total = 0
    for path in root.glob("*/blocks/*/*.bin"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # removed since
            continue
    return total


def test_a_killed_collector_is_followed_and_the_limit_holds(tmp_path: Path) -> None:
    root, context = tmp_path / "root", multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_write_until_killed, args=(root, send), daemon=True)
    child.start()
    assert receive.poll(60) and receive.recv() == 1, "the first one is collector"
    store = UcmPosixStore(_config(root))
    try:
        assert store.stats()["storage_collector"] == 0
        for number in range(1000, 1020):
            _dump(store, number)
            assert _stored(root) <= 64 * _BLOCK
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        _eventually("the other one follows", lambda: store.stats()["storage_collector"] == 1)
        for number in range(2000, 2100):
            _eventually("it stores", partial(_dump, store, number))
            assert _stored(root) <= 64 * _BLOCK
    finally:
        store.close()
