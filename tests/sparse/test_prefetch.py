"""Blocks brought ahead: the order, the bounds, and what a wait says."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import PATIENT, await_room

from ucm.errors import ConfigError, StoreIOError
from ucm.sparse.residency import PrefetchEngine, PrefetchPriority, store_loader

#: A wait that fails the test instead of hanging it.
LONG = 60.0


def names(*numbers: int) -> list[str]:
    return [f"{number:032x}" for number in numbers]


class Held:
    """A loader that works on one request at a time, and each time when it is let."""

    def __init__(self) -> None:
        self.order: list[tuple[str, ...]] = []
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, block_hashes: Sequence[Any]) -> Any:
        self.order.append(tuple(block_hashes))
        self.started.release()
        assert self.go.acquire(timeout=LONG)
        return list(block_hashes)


@pytest.mark.parametrize(
    ("position", "priority"), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 2), (17, 3), (1000, 3)]
)
def test_priority_by_place_in_the_queue(position: int, priority: int) -> None:
    assert PrefetchPriority.compute_priority(None, 7, position) == priority
    assert (
        PrefetchPriority.URGENT,
        PrefetchPriority.HIGH,
        PrefetchPriority.NORMAL,
        PrefetchPriority.LOW,
    ) == (
        0,
        1,
        2,
        3,
    )


def test_prefetched_blocks_are_returned() -> None:
    engine = PrefetchEngine(
        {"prefetch_workers": 2}, load=lambda blocks: [block.upper() for block in blocks]
    )
    handle = engine.submit_prefetch("a", names(10, 11), PrefetchPriority.HIGH)
    assert engine.wait_for_completion("a", LONG) and handle.wait(LONG) and handle.state == "done"
    assert engine.get_prefetched_kv("a") == [name.upper() for name in names(10, 11)]
    assert engine.wait_for_completion("nobody", 0) is True  # nothing of it is to come
    assert engine.get_prefetched_kv("nobody") is None
    engine.shutdown()


def test_the_most_urgent_goes_first_and_of_equals_the_first() -> None:
    held = Held()
    engine = PrefetchEngine({"prefetch_workers": 1}, load=held)
    engine.submit_prefetch("busy", names(0))
    assert held.started.acquire(timeout=LONG)
    for number, priority in ((1, 2), (2, 3), (3, 0), (4, 2), (5, 1)):
        engine.submit_prefetch(f"r{number}", names(number), priority)
    for _ in range(6):
        held.go.release()
    assert all(engine.wait_for_completion(f"r{number}", LONG) for number in range(1, 6))
    assert held.order == [tuple(names(number)) for number in (0, 3, 5, 1, 4, 2)]
    engine.shutdown()


def test_a_full_queue_drops_a_less_urgent_prefetch_or_refuses() -> None:
    held = Held()
    engine = PrefetchEngine({"prefetch_workers": 1, "max_pending_prefetch": 2}, load=held)
    engine.submit_prefetch("busy", names(0))
    assert held.started.acquire(timeout=LONG)
    low, normal = (
        engine.submit_prefetch("low", names(1), 3),
        engine.submit_prefetch("normal", names(2), 2),
    )
    late = engine.submit_prefetch("late", names(3), 3)
    assert late.state == "refused" and not late.wait(0)
    urgent = engine.submit_prefetch("urgent", names(4), 0)
    assert (low.state, normal.state, urgent.state) == ("refused", "waiting", "waiting")
    for _ in range(3):
        held.go.release()
    assert urgent.wait(LONG) and normal.wait(LONG)
    assert held.order[1:] == [tuple(names(4)), tuple(names(2))]
    engine.shutdown()


def test_a_second_prefetch_of_a_request_replaces_the_first() -> None:
    held = Held()
    engine = PrefetchEngine({"prefetch_workers": 1}, load=held)
    first = engine.submit_prefetch("a", names(1))
    assert held.started.acquire(timeout=LONG)
    second = engine.submit_prefetch("a", names(2))
    held.go.release()
    held.go.release()
    assert second.wait(LONG)
    assert first.state == "cancelled" and not first.wait(0)
    assert engine.get_prefetched_kv("a") == names(2)
    engine.shutdown()


def test_a_cancelled_prefetch_is_not_loaded_or_kept() -> None:
    held = Held()
    engine = PrefetchEngine({"prefetch_workers": 1}, load=held)
    running, waiting = engine.submit_prefetch("a", names(1)), engine.submit_prefetch("b", names(2))
    assert held.started.acquire(timeout=LONG)
    running.cancel()
    engine.cancel("b")
    held.go.release()
    last = engine.submit_prefetch("c", names(3))
    held.go.release()
    assert last.wait(LONG)
    assert (running.state, waiting.state) == ("cancelled", "cancelled")
    assert held.order == [tuple(names(1)), tuple(names(3))]
    assert engine.get_prefetched_kv("a") is None
    engine.shutdown()


def test_the_number_of_kept_prefetches_is_bounded() -> None:
    engine = PrefetchEngine({"prefetch_workers": 1, "prefetch_cache_size": 4}, load=list)
    for request, count in (("a", 2), ("b", 2)):
        assert engine.submit_prefetch(request, names(*range(count))).wait(LONG)
    assert engine.get_prefetched_kv("a") is not None  # used: "b" is the longest unused now
    assert engine.submit_prefetch("c", names(7)).wait(LONG)
    assert engine.get_prefetched_kv("b") is None
    assert engine.get_prefetched_kv("a") is not None and engine.get_prefetched_kv("c") is not None
    assert engine.submit_prefetch("d", names(*range(5))).state == "refused"
    engine.shutdown()


def test_a_failure_is_reported_and_the_thread_continues(caplog: pytest.LogCaptureFixture) -> None:
    def load(blocks: Sequence[Any]) -> Any:
        if blocks[0] == names(1)[0]:
            raise StoreIOError("the disk is gone")
        return list(blocks)

    engine = PrefetchEngine({"prefetch_workers": 1}, load=load)
    failed = engine.submit_prefetch("a", names(1))
    assert not failed.wait(LONG)
    assert failed.state == "failed" and isinstance(failed.error, StoreIOError)
    assert not engine.wait_for_completion("a", 0)
    assert engine.submit_prefetch("b", names(2)).wait(LONG)
    assert caplog.text == ""  # a store logs its own errors
    engine.shutdown()


def test_no_wait_is_without_a_bound() -> None:
    held = Held()
    engine = PrefetchEngine({"prefetch_workers": 1}, load=held)
    handle = engine.submit_prefetch("a", names(1))
    assert not handle.wait(0) and not engine.wait_for_completion("a", 0)
    engine.shutdown()  # does not wait for the thread
    assert handle.state == "cancelled"
    assert engine.submit_prefetch("b", names(2)).state == "refused"
    held.go.release()


def test_without_a_source_everything_is_refused() -> None:
    """Document 002 makes the engine from its configuration alone."""
    engine = PrefetchEngine({"prefetch_workers": 1})
    assert engine.submit_prefetch("a", names(1)).state == "refused"
    assert engine.get_prefetched_kv("a") is None
    engine.shutdown()
    with pytest.raises(ConfigError, match="prefetch_workers"):
        PrefetchEngine({"prefetch_worker": 3})


@pytest.mark.parametrize("sizes", [{"tensor_size_list": [256, 512]}, {"tensor_size": 384}])
def test_blocks_come_from_a_store(tmp_path: Path, sizes: dict[str, Any]) -> None:
    pytest.importorskip("ucm._core")
    from ucm.store.factory_v1 import UcmConnectorFactoryV1

    config = {
        "storage_backends": str(tmp_path),
        "identity": "x",
        "shard_size": 768,
        "block_size": 1536,
        **sizes,
    }
    config |= {"deadlines": PATIENT, "storage_capacity": "64MiB", "free_space_floor": 0}
    with UcmConnectorFactoryV1.create_connector("UcmPosixStore", config) as store:
        await_room(store)  # type: ignore[arg-type]
        blocks = np.random.default_rng(1).integers(0, 256, (3, 1536), dtype=np.uint8)
        ids = [bytes([number]) * 16 for number in range(3)]
        pieces = sizes.get("tensor_size_list") or [384, 384]
        starts = np.cumsum([0, *pieces])[:-1].astype(np.uint64)
        rows = (
            np.uint64(blocks.ctypes.data)
            + np.arange(6, dtype=np.uint64)[:, None] * np.uint64(768)
            + starts
        )
        store.wait(store.dump_data([name for name in ids for _ in range(2)], [0, 1] * 3, rows))
        engine = PrefetchEngine(store=store)
        assert engine.submit_prefetch("a", [ids[2], ids[0].hex()]).wait(LONG)
        assert np.array_equal(engine.get_prefetched_kv("a"), blocks[[2, 0]])
        absent = engine.submit_prefetch("b", [b"9" * 16])
        assert not absent.wait(LONG) and absent.state == "failed"
        engine.shutdown()
        assert np.array_equal(store_loader(store)([ids[1]])[0], blocks[1])


def test_the_memory_of_unused_prefetches_is_bounded() -> None:
    """Of requests that are not cancelled; the last ones still differ from those that were never
    asked for."""

    def fails(_blocks: Any) -> Any:
        raise StoreIOError("gone")

    for load in (None, fails, lambda blocks: blocks):
        engine = PrefetchEngine({"max_pending_prefetch": 8, "prefetch_cache_size": 16}, load=load)
        for number in range(100):
            engine.submit_prefetch(f"r{number}", []).wait(LONG)
        assert engine.wait_for_completion("r99", LONG) is (load not in (None, fails))
        assert len(engine._tasks) <= 16
        engine.shutdown()
