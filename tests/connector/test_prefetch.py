"""Hints: waiting blocks are prefetched, used ones are reported, bounded, and nothing depends on
it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from blocks import await_room
from parts import BLOCK, Memory, Rig, dump, eventually, small_store
from vllm.v1.request import Request

from ucm.integration.vllm.connector.metadata import (
    Prefetch,
    RankReport,
    UCMConnectorMetadata,
    join_keys,
    split_keys,
)
from ucm.integration.vllm.connector.scheduler.hints import (
    EVERY_S,
    IN_LINE,
    RELOCATE_S,
    STEP,
    WAITING,
    TouchQueue,
)
from ucm.integration.vllm.connector.worker.worker import (
    pass_hints,
    prefetch_room,
    wants_touches,
)
from ucm.store import part_mask, record_ids

MASK = part_mask(0, 0, 0)


class Recorder(Memory):
    """A store that records its hints."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def touch_own(self, block_ids: Sequence[bytes], first: int = 0) -> None:
        self.calls.append(("touch", list(block_ids), first))

    def prefetch(self, block_ids: Sequence[bytes], priority: Any = "normal") -> int:
        self.calls.append((priority, list(block_ids)))
        return len(block_ids)

    def cancel_prefetch(self, block_ids: Sequence[bytes]) -> int:
        self.calls.append(("cancel", list(block_ids)))
        return len(block_ids)


def tiered(room: int = 100, wanted: bool = True, ranks: int = 1) -> Rig:
    """An engine over a store of two tiers, whose ranks take hints for ``room`` blocks."""
    rig = Rig(ranks=ranks)
    rig.store.tier_names = ("memory", "disk")
    rig.report(
        *(
            RankReport(rank, ready=True, wants_touches=wanted, prefetch_room=room)
            for rank in range(ranks)
        )
    )
    return rig


def waiting(
    rig: Rig, name: str, blocks: int, seed: int, below: int | None = None, length: int = 0
) -> Request:
    """A request in line of which ``blocks`` are stored, the last ``below`` of them (or all) on disk
    alone."""
    request = rig.request(name, length or blocks * BLOCK + 1, seed)
    rig.stored(request, blocks)
    first = 0 if below is None else blocks - below
    rig.store.lower.update(record_ids(rig.keys_of(request)[first:blocks], MASK))
    rig.later.run()
    return request


def hints(rig: Rig) -> Prefetch | None:
    """Those of the next step."""
    rig.clock.now += EVERY_S
    return rig.step().prefetch


def wanted(prefetch: Prefetch | None) -> list[tuple[str, list[bytes]]]:
    """Priorities with their keys."""
    assert prefetch is not None
    return [(priority, split_keys(keys)) for priority, keys in prefetch.wanted]


def test_a_waiting_request_is_looked_up_before_vllm_requests_it() -> None:
    rig = tiered()
    rig.store.questions = []
    request = waiting(rig, "a", 3, seed=1)
    assert hints(rig) is None
    rig.store.questions[-1].answered = True
    assert wanted(hints(rig)) == [("urgent", rig.keys_of(request))]


def test_waiting_requests_are_prefetched_once_in_their_order() -> None:
    rig = tiered()
    line = [waiting(rig, f"r{number}", 3, number + 1, below=2) for number in range(6)]
    below = [rig.keys_of(request)[1:3] for request in line]
    assert wanted(hints(rig)) == [
        ("urgent", below[0]),
        ("next_batch", below[1] + below[2] + below[3]),
        ("normal", below[4] + below[5]),
    ]
    assert hints(rig) is None
    # Those behind one that leaves move up; what is asked for more urgently is asked for again.
    rig.scheduler.request_finished(line[0])
    news = hints(rig)
    assert wanted(news) == [("urgent", below[1]), ("next_batch", below[4])]
    assert news is not None
    assert split_keys(news.cancelled) == below[0]


def test_a_request_that_is_admitted_reads_for_itself() -> None:
    rig = tiered()
    request = waiting(rig, "a", 3, 1)
    keys = rig.keys_of(request)[:3]
    assert wanted(hints(rig)) == [("urgent", keys)]
    tokens, _ = rig.scheduler.get_num_new_matched_tokens(request, 0)
    assert tokens == 3 * BLOCK
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), tokens)
    rig.clock.now += EVERY_S
    plan = rig.step()
    assert len(plan.loads) == 1
    assert plan.prefetch is not None
    assert (split_keys(plan.prefetch.cancelled), plan.prefetch.wanted) == (keys, [])


def test_a_shared_prefetch_lasts_until_its_last_request() -> None:
    rig = tiered()
    one, other = waiting(rig, "a", 3, 1), waiting(rig, "b", 3, 1)
    keys = rig.keys_of(one)[:3]
    assert wanted(hints(rig)) == [("urgent", keys), ("next_batch", keys)]
    assert len(rig.scheduler._rank_hints.prefetches._held) == 3
    rig.scheduler.request_finished(one)
    news = hints(rig)
    assert news is not None
    assert news.cancelled == b""
    rig.scheduler.request_finished(other)
    news = hints(rig)
    assert news is not None
    assert (split_keys(news.cancelled), news.wanted) == (keys, [])
    assert not rig.scheduler._rank_hints.prefetches._held
    assert not rig.scheduler._rank_hints.prefetches._hinted


def test_never_more_than_every_rank_has_room_for() -> None:
    rig = tiered(room=100, ranks=2)
    rig.report(RankReport(1, ready=True, wants_touches=True, prefetch_room=5))
    requests = [waiting(rig, f"r{number}", 4, number + 1) for number in range(3)]
    keys = [rig.keys_of(request)[:4] for request in requests]
    assert wanted(hints(rig)) == [("urgent", keys[0]), ("next_batch", keys[1][:1])]
    assert hints(rig) is None
    # A completed prefetch makes room for the next.
    rig.store.lower -= set(record_ids(keys[0], MASK))
    rig.clock.now += RELOCATE_S
    hints(rig)
    rig.later.run()
    assert wanted(hints(rig)) == [("next_batch", keys[1][1:] + keys[2][:1])]
    assert len(rig.scheduler._rank_hints.prefetches._held) == 5


def test_only_the_next_requests_are_prefetched() -> None:
    rig = tiered(room=1000)
    for number in range(IN_LINE + 3):
        waiting(rig, f"r{number}", 1, number + 1)
    assert sum(len(keys) for _, keys in wanted(hints(rig))) == IN_LINE


@pytest.mark.parametrize("room", [0, 100])
def test_a_store_of_one_tier_gets_no_prefetch(room: int) -> None:
    rig = Rig()
    rig.report(RankReport(0, ready=True, prefetch_room=room))
    request = rig.request("a", 4 * BLOCK)
    rig.stored(request, 3)
    rig.later.run()
    assert hints(rig) is None
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)


def test_ranks_without_room_get_no_prefetch() -> None:
    rig = tiered(room=0)
    waiting(rig, "a", 3, 1)
    assert hints(rig) is None


def test_the_block_of_the_last_token_and_failed_blocks_are_not_prefetched() -> None:
    rig = tiered()
    request = waiting(rig, "a", 3, 1, length=3 * BLOCK)
    assert wanted(hints(rig)) == [("urgent", rig.keys_of(request)[:2])]
    rig = tiered()
    request = rig.request("b", 4 * BLOCK + 1)
    rig.scheduler._live["b"].failed_at(1)
    rig.stored(request, 4)
    rig.store.lower.update(rig.store.ids)
    rig.later.run()
    assert wanted(hints(rig)) == [("urgent", rig.keys_of(request)[:1])]


def test_the_tiers_of_blocks_are_read_again_while_a_request_waits() -> None:
    rig = tiered()
    request = waiting(rig, "a", 3, 1)
    hints(rig)
    tracker = rig.scheduler._live["a"]
    assert tracker.lookup is not None
    assert tracker.lookup.tiers == b"\1\1\1"
    rig.store.lower.clear()
    rig.clock.now += RELOCATE_S
    hints(rig)
    rig.later.run()
    assert tracker.lookup.tiers == b"\0\0\0"
    # A block removed by then is not promoted: its load fails as usual.
    rig.store.ids.clear()
    rig.clock.now += RELOCATE_S
    hints(rig)
    rig.later.run()
    assert tracker.lookup.tiers == b"\0\0\0"
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)


# Touches
# --------------------------------------------------------------------------------------------------


def test_a_request_touches_its_whole_prefix_in_every_ranks_memory() -> None:
    rig = tiered()
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 2 * BLOCK) == (3 * BLOCK, True)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), 3 * BLOCK)
    plan = rig.step()
    assert [(first, split_keys(keys)) for first, keys in plan.touched] == [
        (0, rig.keys_of(request)[:5])
    ]
    assert rig.step().touched == []


def test_ranks_whose_stores_use_no_touches_get_none() -> None:
    rig = tiered(wanted=False)
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 5)
    rig.later.run()
    tokens, _ = rig.scheduler.get_num_new_matched_tokens(request, 0)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), tokens or 0)
    assert rig.step().touched == []
    rig.later.run()
    assert len(rig.store.touched) == 5, "the scheduler side's own store is told as ever"


def test_a_step_sends_a_bounded_number_of_hints() -> None:
    touches = TouchQueue()
    chain = [number.to_bytes(16, "little") for number in range(STEP + 5)]
    touches.add(chain)
    assert touches.take() == [], "nobody wants it yet"
    touches.report(True)
    touches.report(False)
    touches.add(chain)
    touches.add(chain[:3])
    assert [(first, len(keys) // 16) for first, keys in touches.take()] == [(0, STEP)]
    told = touches.take()
    assert [(first, split_keys(keys)) for first, keys in told] == [
        (STEP, chain[STEP:]),
        (0, chain[:3]),
    ]
    assert touches.take() == []
    for _ in range(WAITING):
        touches.add(chain)
    assert touches._waiting <= WAITING
    steps = 0
    while touches.take():
        steps += 1
    assert (touches._waiting, steps) == (0, WAITING // len(chain) * len(chain) // STEP + 1)


# On a rank
# --------------------------------------------------------------------------------------------------


def test_a_rank_forwards_hints_with_its_own_record_ids() -> None:
    store, mask = Recorder(), part_mask(0, 1, 2)
    store.has_own_memory = True
    keys = [bytes([number]) * 16 for number in range(6)]
    ids = record_ids(keys, mask)
    prefetch = Prefetch(
        join_keys(keys[:1]), [("urgent", join_keys(keys[1:3])), ("normal", join_keys(keys[3:]))]
    )
    plan = UCMConnectorMetadata(touched=[(7, join_keys(keys[:2]))], prefetch=prefetch)
    pass_hints(plan, store, {mask: True}, writer=True)
    touched = ("touch", ids[:2], 7)
    assert store.calls == [touched, ("cancel", ids[:1]), ("urgent", ids[1:3]), ("normal", ids[3:])]
    store.calls.clear()
    pass_hints(plan, store, {mask: True}, writer=False)
    assert store.calls == [touched], (
        "the rank that writes these bytes brings them up, the others read its memory"
    )
    store.calls.clear()
    store.has_own_memory = False
    pass_hints(plan, store, {mask: True}, writer=False)
    assert store.calls == [], "and it says what of its segments is in use"
    pass_hints(UCMConnectorMetadata(), store, {mask: True}, writer=True)
    assert store.calls == []


def test_a_failing_store_does_not_affect_hints_of_others() -> None:
    class Odd(Memory):
        def touch_own(self, block_ids: Sequence[bytes], first: int = 0) -> None:
            raise RuntimeError("no")

        def prefetch_room(self) -> int:
            raise RuntimeError("no")

    pass_hints(UCMConnectorMetadata(touched=[(0, bytes(16))]), Odd(), {MASK: True}, writer=True)
    assert prefetch_room(Odd()) == 0
    assert prefetch_room(Memory()) == 0

    class Closed(Memory):
        @property
        def wants_touch_own(self) -> bool:
            raise RuntimeError("no")

    assert not wants_touches(Closed())
    assert not wants_touches(Memory())


def test_touches_of_the_scheduler_side_reach_the_segments_of_a_rank(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ucm._core", reason="the core is not compiled here")
    from ucm.store.pc import UcmPcStore

    # one segment, which is sealed because it is waited for
    config = small_store(tmp_path) | {"segment_age": 60}
    rig = Rig()
    request = rig.request("a", 6 * BLOCK + 1)
    ids = record_ids(rig.keys_of(request)[:6], MASK)
    with UcmPcStore(config) as rank:
        dump(rank, ids)
    (segment,) = (tmp_path / "root").rglob("*.seg")
    old = segment.stat().st_mtime - 7200
    os.utime(segment, (old, old))
    with UcmPcStore(config | {"device_id": -1}) as scheduler, UcmPcStore(config) as rank:
        rig.report(RankReport(0, ready=True, wants_touches=wants_touches(rank)))
        rig.stored(request, 6)
        rig.later.run()
        assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (6 * BLOCK, True)
        rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), 6 * BLOCK)
        scheduler.touch(ids)
        pass_hints(rig.step(), rank, {MASK: True}, writer=True)
        eventually("the rank counts them as used", lambda: rank.stats()["blocks_touched"] == 6)
        assert scheduler.stats()["blocks_touched"] == 0
    assert segment.stat().st_mtime > old + 3600


def test_blocks_of_waiting_requests_are_prefetched_into_the_memory_of_a_pipeline(
    tmp_path: Path,
) -> None:
    core = pytest.importorskip("ucm._core", reason="the core is not compiled here")
    assert core is not None
    import numpy as np

    from ucm.store.pipeline import UcmPipelineStore

    config = small_store(tmp_path) | {
        "store_pipeline": "Cache|Posix",
        "cache_size": "4MiB",
        "identity": str(tmp_path),
    }
    memory = np.arange(8 * 4096, dtype=np.uint8).reshape(8, 4096)
    rows = np.array([[row.ctypes.data] for row in memory], dtype=np.uint64)
    rig = tiered()
    request = waiting(rig, "a", 8, 1, length=8 * BLOCK + 1)
    keys = rig.keys_of(request)[:8]
    ids = record_ids(keys, MASK)
    with UcmPipelineStore(config) as store:
        await_room(store)
        store.wait(store.dump_data(ids, [0] * 8, rows))
    with UcmPipelineStore(config) as store:
        assert store.locate_on_prefix(ids) == (b"\1" * 8, "absent")
        rig.report(
            RankReport(
                0,
                ready=True,
                wants_touches=wants_touches(store),
                prefetch_room=prefetch_room(store),
            )
        )
        rig.clock.now += EVERY_S
        pass_hints(rig.step(), store, {MASK: True}, writer=True)
        comes_up(store, ids)
        memory.fill(0)
        task = store.load_data(ids, [0] * 8, rows)
        store.wait(task)
        assert list(store.served(task)) == [8, 0]
        assert np.array_equal(memory.reshape(-1), np.arange(8 * 4096, dtype=np.uint8))


def comes_up(store: Any, ids: list[bytes]) -> None:
    """Returns when all of these are in the top tier: what the store counts changes with each."""
    eventually("they come up", lambda: not any(store.locate_on_prefix(ids)[0]))
