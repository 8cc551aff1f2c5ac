"""Lookups in the store: at once, on a thread of its own, or on one of
ours."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Later, Memory, Rig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from ucm.errors import BusyError, ClosedError
from ucm.integration.vllm.connector.groups import (
    ABSENT,
    UNKNOWN,
    Group,
    Reach,
    shorter_hits,
)
from ucm.integration.vllm.connector.metadata import LoadFailure, RankReport, join_keys
from ucm.integration.vllm.connector.scheduler.lookup import (
    AT_ONCE_TOKENS,
    LocallyVisible,
    Lookup,
    Lookups,
)
from ucm.reasons import MissReason
from ucm.store import part_mask, record_ids


def test_a_store_that_answers_from_memory_is_called_at_once() -> None:
    rig = Rig()
    rig.store.at_once = True
    stored = rig.request("a", 3 * BLOCK + 1)
    rig.stored(stored, 3)
    again = rig.request("b", 3 * BLOCK + 1)
    assert rig.later.jobs == []  # no thread wakes up
    assert rig.scheduler.get_num_new_matched_tokens(again, 0) == (3 * BLOCK, True)
    assert rig.scheduler.stats()["put_off"] == 0


def test_a_store_with_a_thread_is_called_there() -> None:
    rig = Rig()
    rig.store.questions = []
    request = rig.request("a", 3 * BLOCK + 1)
    rig.stored(request, 3)
    assert rig.later.jobs == []  # no thread of Python's
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    (question,) = rig.store.questions
    question.answered = True
    rig.clock.now += 0.01
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)
    assert rig.store.questions == [question]
    assert rig.scheduler.miss_stats.take()["lookup_seconds"] == [0.25], (
        "as the store says, not until somebody looked"
    )


def test_an_answer_of_the_stores_thread_may_be_late_or_an_error() -> None:
    rig = Rig()
    rig.store.questions = []
    late, wrong = rig.request("late", 3 * BLOCK + 1), rig.request("wrong", 3 * BLOCK + 1, seed=1)
    rig.stored(late, 3)
    rig.stored(wrong, 3)
    assert (
        rig.scheduler.get_num_new_matched_tokens(late, 0)
        == rig.scheduler.get_num_new_matched_tokens(wrong, 0)
        == (None, False)
    )

    def closed() -> tuple[bytes, str]:
        raise ClosedError("the store is closed")

    rig.store.questions[1].ask = closed
    rig.store.questions[1].answered = True
    assert rig.scheduler.get_num_new_matched_tokens(wrong, 0) == (0, False)
    rig.clock.now += 1
    assert rig.scheduler.get_num_new_matched_tokens(late, 0) == (0, False)
    rig.store.questions[0].answered = True
    assert rig.scheduler.get_num_new_matched_tokens(late, 0) == (0, False), "too late is too late"
    for request in (late, wrong):
        rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 4), 0)
    assert rig.scheduler.miss_stats.total.missed["lookup_late"] == 3


def test_a_lookup_ends_with_its_request() -> None:
    rig = Rig()
    rig.store.questions = []
    request = rig.request("a", 3 * BLOCK + 1)
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    question = weakref.ref(rig.store.questions.pop())
    gc.collect()
    gc.disable()
    try:
        assert question() is not None
        rig.scheduler.request_finished(request)
        assert question() is None, "nothing keeps it, and the store looks no further"
    finally:
        gc.enable()


def test_a_refused_lookup_is_a_miss_at_once() -> None:
    rig = Rig()

    def busy(block_ids: Any) -> None:
        raise BusyError("too many wait")

    rig.store.begin_locate_on_prefix = busy  # type: ignore[method-assign]
    request = rig.request("a", 3 * BLOCK + 1)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert rig.later.jobs == []


def test_a_long_lookup_runs_on_a_thread() -> None:
    rig = Rig()
    rig.store.at_once = True
    long = Request("long", [1] * (AT_ONCE_TOKENS + 1), SamplingParams(max_tokens=1), None)
    rig.scheduler.on_new_request(long)
    adapter = Request(
        "adapter",
        [1] * BLOCK,
        SamplingParams(max_tokens=1),
        None,
        lora_request=LoRARequest("a", 1, "/nowhere"),
    )
    rig.scheduler.on_new_request(adapter)
    assert len(rig.later.jobs) == 2
    rig.store.at_once = False
    rig.request("c", BLOCK)
    assert len(rig.later.jobs) == 3


def test_a_lookup_of_several_groups_says_why_it_is_no_longer() -> None:
    """And what it does not know of a group it does not call absent."""
    groups = (Group(0, 0, BLOCK), Group(1, 1, BLOCK, reach=Reach("window", BLOCK + 1)))
    masks = [part_mask(0, 0, 0), part_mask(1, 0, 0)]
    store, later = Memory(), Later()
    seen = LocallyVisible()
    seen.open([[0], [0]])
    lookups = Lookups(later, store, masks, seen, groups, [[0], [1]])
    keys = [bytes([at + 1]) * 16 for at in range(4)]

    def found(limit: int) -> Lookup:
        lookup = lookups.start(lambda: keys, limit=limit)
        later.run()
        return lookup

    whole, window = (record_ids(keys, mask) for mask in masks)
    store.ids = {*whole[:3], window[1]}
    lookup = found(4)
    assert (lookup.hits, lookup.reason) == (2, MissReason.ABSENT)
    assert lookup.tables == (bytes((0, 0, 0, ABSENT)), bytes((ABSENT, 0, ABSENT, UNKNOWN)))
    store.ids = {*whole, *window}
    lookup = found(3)
    assert (lookup.hits, lookup.reason) == (3, MissReason.LAST_TOKEN)
    store.locate_on_prefix = lambda ids: (bytes(2), "unhealthy")  # type: ignore[method-assign]
    lookup = found(4)
    assert (lookup.hits, lookup.reason) == (2, MissReason.UNHEALTHY)
    assert lookup.tables[0] == bytes((0, 0, UNKNOWN, UNKNOWN))


def test_blocks_for_shorter_hits_are_looked_up_in_one_further_call() -> None:
    """Of the lengths that the policy considers, whatever lies in which tier behind them."""
    groups = (Group(0, 0, BLOCK), Group(1, 1, BLOCK, reach=Reach("window", BLOCK)))
    masks = [part_mask(0, 0, 0), part_mask(1, 0, 0)]
    store, later, asked = Memory(), Later(), list[int]()
    lookups = Lookups(later, store, masks, None, groups, [[0], [1]])
    keys = [bytes([at + 1]) * 16 for at in range(20)]
    whole, window = (record_ids(keys, mask) for mask in masks)
    store.ids = {*whole, *window}
    store.lower = {one for at, one in enumerate(whole) if at % 4 > 1}  # 0, 0, 1, 1 five times
    locate = store.locate

    def noting(ids: Sequence[bytes]) -> bytes:
        asked.append(len(ids))
        return locate(ids)

    store.locate = noting  # type: ignore[method-assign]
    lookup = lookups.start(lambda: keys)
    later.run()
    assert lookup.hits == 20
    assert asked == [1, 2], "the windows of the hit, then those of its cuts and before them"
    assert [at for at, tier in enumerate(lookup.tables[1]) if tier < UNKNOWN] == [0, 1, 19]
    assert shorter_hits(lookup.tiers) == [2]
    assert shorter_hits(bytes((0, 1, 0, 2, 1, 3))) == [1, 3, 5]
    assert shorter_hits(bytes((2, 1, 0))) == []


def test_blocks_of_a_shorter_hit_are_looked_up_again() -> None:
    """The store has a refused block. Without it the hit is shorter, and its window another."""
    window = Reach("window", BLOCK)  # it sees the last block of a hit
    rig = Rig(groups=(Group(0, 0, BLOCK), Group(1, 1, BLOCK, reach=window)))
    request = rig.request("a", 5 * BLOCK + 1)
    keys = rig.keys_of(request)
    windows = record_ids(keys, part_mask(1, 0, 0))
    rig.stored(request, 5)
    rig.store.ids.update(windows)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (5 * BLOCK, True)
    for refused, hit in (([windows[4]], 4), ([windows[3], keys[2]], 2), ([keys[0]], 0)):
        failure = LoadFailure("other", 0, join_keys(refused), ("bad_checksum",))
        rig.report(RankReport(0, ready=True, load_failures=[failure]))
        found = rig.scheduler.get_num_new_matched_tokens(request, 0)
        while found[0] is None:
            rig.later.run()
            found = rig.scheduler.get_num_new_matched_tokens(request, 0)
        assert found == (hit * BLOCK, hit > 0)
    rig.scheduler.update_state_after_alloc(request, KVCacheBlocks(([], [])), 0)
    assert rig.scheduler.miss_stats.total.missed == {"refused": 5}


def test_tiers_of_every_group_are_located_again() -> None:
    groups = (Group(0, 0, BLOCK), Group(1, 1, BLOCK, reach=Reach("window", BLOCK + 1)))
    masks = [part_mask(0, 0, 0), part_mask(1, 0, 0)]
    store, later = Memory(), Later()
    lookups = Lookups(later, store, masks, None, groups, [[0], [1]])
    keys = [bytes([at + 1]) * 16 for at in range(3)]
    whole, window = (record_ids(keys, mask) for mask in masks)
    store.ids = {*whole, *window}
    store.lower = {*whole, window[2]}
    store.locate = lambda ids: bytes(block in store.lower for block in ids)  # type: ignore[method-assign]
    lookup = lookups.start(lambda: keys)
    later.run()
    assert (lookup.tiers, lookup.tables) == (b"\1\1\1", (b"\1\1\1", bytes((UNKNOWN,)) * 2 + b"\1"))
    store.lower = {whole[2]}
    lookups.relocate(lookup)
    later.run()
    assert (lookup.tiers, lookup.tables) == (b"\0\0\1", (b"\0\0\1", bytes((UNKNOWN,)) * 2 + b"\0"))
    store.locate = lambda ids: bytes((ABSENT,)) * len(ids)  # type: ignore[method-assign]
    store.ids = set()
    lookups.relocate(lookup)
    later.run()
    assert lookup.tables[1][2] == 0, "what is not found stays as it was"


def test_looked_up_requests_are_traced(tmp_path: Path) -> None:
    rig = Rig(block_trace=str(tmp_path / "trace"))
    for name in ("a", "b"):
        rig.admit(rig.request(name, 3 * BLOCK + 1))
    (first, second) = [
        json.loads(line)["blocks"] for line in (tmp_path / "trace").read_text().splitlines()
    ]
    assert len(first) == 3
    assert first == second, "both requests have the same tokens"
