"""Calls of vLLM's own threads in every step keep the interpreter: on a busy machine, taking it
again can take far longer than the call."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import BLOCK, KV, PIECES, Memory, ids

from ucm.store import BlockHasher
from ucm.store.posix import UcmPosixStore

COUNT = 8


class Other:
    """A thread that takes the interpreter whenever it is free."""

    def __init__(self) -> None:
        self.turns = 0
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over:
            self.turns += 1
            time.sleep(0)  # gives it back

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """It waits for the interpreter, and gets it only when another thread releases it."""
        before = sys.getswitchinterval()
        gc.collect()
        gc.disable()  # its drop may release the interpreter
        sys.setswitchinterval(1000)
        self._thread.start()
        try:
            yield
        finally:
            self._over = True
            sys.setswitchinterval(before)
            gc.enable()
            self._thread.join()


@pytest.mark.parametrize("layout", ["file", "segment"])
def test_calls_of_every_step_keep_the_interpreter(
    common: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    shape = {"tensor_size_list": PIECES, "shard_size": BLOCK, "block_size": BLOCK, "layout": layout}
    memory, blocks, hasher = Memory(COUNT), ids(COUNT), BlockHasher(bytes(32), 32)
    rows = memory.rows(*range(COUNT))
    other, taken = Other(), {}
    kv = KV(COUNT)
    numbers = np.arange(COUNT, dtype=np.int64)
    with UcmPosixStore({**common, **shape, "identity": str(tmp_path)}) as store, other.waiting():
        store.register_kv_tensors(kv.tensors)
        store.wait(store.dump_data(blocks, [0] * COUNT, rows))
        calls = {
            "hash": lambda: hasher.hash_blocks([1] * 4096),
            "describe": lambda: store.describe(blocks, ordinals=list(range(COUNT))),
            "dump": lambda: tasks.append(store.dump_data(blocks, [0] * COUNT, rows)),
            "load": lambda: tasks.append(store.load_data(blocks, [0] * COUNT, rows)),
            "dump by number": lambda: tasks.append(store.dump_blocks(blocks, numbers)),
            "load by number": lambda: tasks.append(store.load_blocks(blocks, numbers)),
            "check": lambda: [store.check(task, "staged") for task in tasks],
            "early": store.early,
            "slots": store.free_dump_slots,
            "touch": lambda: store.touch_own(blocks),
            "begin": lambda: asked.append(store.begin_locate_on_prefix(blocks)),
            "answer": lambda: [question.answer() for question in asked],
        }
        if store.answers_at_once:
            calls["lookup"] = lambda: store.locate_on_prefix(blocks)
        for _ in range(50):
            tasks: list[Any] = []
            asked: list[Any] = []
            for name, call in calls.items():
                turns = other.turns
                call()
                taken[name] = taken.get(name, 0) + other.turns - turns
            for task in tasks:
                store.wait(task)
    assert {name for name, turns in taken.items() if turns} == set()
    assert other.turns, "it ran during the wait for the store"
