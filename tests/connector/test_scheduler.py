"""The scheduler side without an engine: what it claims, what it offers, what it pins, and for how
long."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig

from ucm.integration.vllm.connector.metadata import (
    DumpResult,
    LoadFailure,
    RankReport,
    join_keys,
    split_keys,
)
from ucm.integration.vllm.connector.scheduler import scheduler as scheduler_side
from ucm.integration.vllm.connector.scheduler.dumps import JOB_BLOCKS, KNOWN_S
from ucm.store import part_mask, record_ids


def blocks_of(plan: object) -> list[tuple[int, int]]:
    """(first ordinal, number of blocks) of every dump of a plan."""
    return [(dump.first, len(dump.blocks)) for dump in plan.dumps]  # type: ignore[attr-defined]


# Claiming
# --------------------------------------------------------------------------------------------------


def test_the_stored_prefix_is_claimed_and_loaded_into_the_blocks_allocated() -> None:
    rig = Rig()
    request = rig.request("a", 5 * BLOCK + 2)
    rig.stored(request, 3)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (
        None,
        False,
    )  # not looked up yet, and no wait
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)
    # one is on the device
    assert rig.scheduler.get_num_new_matched_tokens(request, BLOCK) == (
        2 * BLOCK,
        True,
    )
    table = rig.tables.allocate(request, 6)
    rig.scheduler.update_state_after_alloc(request, table, 2 * BLOCK)
    (load,) = rig.step().loads
    assert (load.first, load.blocks.tolist()) == (1, [b.block_id for b in table.blocks[0][1:3]])
    assert split_keys(load.keys) == rig.keys(rig.readiness.identity_text).first(request)[1:3]
    rig.later.run()
    assert len(rig.store.touched) == 3  # also the one found on the device


def test_all_tokens_are_never_claimed() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK)
    rig.stored(request, 3)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (2 * BLOCK, True)
    assert rig.scheduler.get_num_new_matched_tokens(request, 2 * BLOCK) == (0, False)


def test_a_request_does_not_wait_for_a_lookup_that_cannot_help() -> None:
    rig = Rig(min_hit_tokens=2 * BLOCK)
    request = rig.request("a", 4 * BLOCK)
    assert rig.scheduler.get_num_new_matched_tokens(request, 3 * BLOCK) == (
        0,
        False,
    )  # the last block holds the last token
    assert rig.scheduler.get_num_new_matched_tokens(request, 2 * BLOCK) == (
        0,
        False,
    )  # a block of the two that would be worth it
    assert rig.scheduler.get_num_new_matched_tokens(request, BLOCK) == (None, False)
    rig.scheduler.get_num_new_matched_tokens(request, 2 * BLOCK)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 5), 0)
    assert rig.scheduler.miss_stats.total.missed == {"too_short": 1, "last_token": 1}


def test_a_request_does_not_wait_a_step_for_a_small_hit() -> None:
    rig = Rig()
    rig.admission.compute_rate.seconds = lambda tokens, rest=1: 0.001 * tokens  # type: ignore[method-assign]
    request = rig.request("a", 8 * BLOCK + 1)
    rig.stored(request, 8)
    # no other request computes
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (
        None,
        False,
    )
    rig.admission.compute_rate.step_under_way = lambda now: 0.01  # type: ignore[method-assign]
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (
        None,
        False,
    )  # 26 ms that a load may take, for the two steps it takes
    assert rig.scheduler.get_num_new_matched_tokens(request, 2 * BLOCK) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 9), 0)
    assert rig.scheduler.miss_stats.total.missed == {"too_short": 6}
    assert blocks_of(rig.step(request)) == []  # what the store has is not known yet
    rig.later.run()
    assert blocks_of(rig.step(request)) == []  # and it has all


def test_blocks_are_offered_when_the_store_does_not_answer() -> None:
    rig = Rig()
    request = rig.request("a", BLOCK)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 2), 0)
    assert blocks_of(rig.step(request)) == []
    rig.clock.now += 0.051
    rig.later.run()
    assert blocks_of(rig.step(request)) == [(0, 1)]


def test_a_step_that_computes_nothing_leaves_the_processor_to_others() -> None:
    rig = Rig()
    other = rig.request("b", BLOCK)
    before = len(rig.pauses)
    rig.step(other)
    assert len(rig.pauses) == before, "somebody computes"
    rig.step()
    assert len(rig.pauses) == before + 1


def test_a_late_lookup_is_a_miss_for_good() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK)
    rig.stored(request, 2)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    rig.clock.now += 0.049
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    rig.clock.now += 0.002
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 3), 0)
    assert rig.scheduler.miss_stats.total.missed == {"lookup_late": 3}


def test_a_failing_lookup_is_a_miss() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK)
    rig.store.lookup = lambda ids: 1 / 0  # type: ignore[assignment, method-assign]
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_hit_counts_only_if_every_rank_has_it() -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 5 * BLOCK)
    rig.stored(request, 4, ranks=[0])
    rig.stored(request, 2, ranks=[1])
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (2 * BLOCK, True)


def test_short_hits_are_declined() -> None:
    rig = Rig(min_hit_tokens=2 * BLOCK + 1)
    request = rig.request("a", 5 * BLOCK)
    rig.stored(request, 2)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 5), 0)
    assert rig.scheduler.miss_stats.total.missed == {"too_short": 2, "absent": 3}


def test_after_a_failed_load_nothing_at_or_past_the_block_is_claimed_and_it_is_written_again() -> (
    None
):
    rig = Rig()
    request = rig.request("a", 5 * BLOCK)
    rig.stored(request, 4)
    rig.later.run()
    keys = rig.keys(rig.readiness.identity_text).first(request)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), 4 * BLOCK)
    rig.step()
    rig.report(
        RankReport(0, ready=True, load_failures=[LoadFailure("a", 1, join_keys(keys[1:2]))]),
        recved={"a"},
    )
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (BLOCK, True)
    other = rig.request("b", 5 * BLOCK)  # the same tokens: the record is bad for everyone
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(other, 0) == (BLOCK, True)
    request.num_computed_tokens = BLOCK
    plan = rig.step(request)
    assert (1, 1) in blocks_of(plan)
    rig.report(rig.ended(plan))
    third = rig.request("c", 5 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(third, 0) == (4 * BLOCK, True)


def failed_load(rig: Rig, **failure: bytes) -> list[bytes]:
    """A request whose load of four stored blocks fails at the second; its keys."""
    request = rig.request("a", 5 * BLOCK)
    rig.stored(request, 4)
    rig.later.run()
    keys = rig.keys(rig.readiness.identity_text).first(request)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), 4 * BLOCK)
    rig.step()
    told = {"refused": b""} | dict.fromkeys(failure, keys[1])
    rig.report(RankReport(0, ready=True, load_failures=[LoadFailure("a", 1, **told)]), recved={"a"})
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (BLOCK, True)
    request.num_computed_tokens = BLOCK
    plan = rig.step(request)
    assert [(dump.first, dump.refused) for dump in plan.dumps] == (
        [(1, (0,)), (4, ())] if "refused" in failure else [(4, ())]
    )
    rig.report(rig.ended(plan))
    return keys


def test_a_record_refused_by_one_rank_is_replaced_by_all() -> None:
    rig = Rig()
    failed_load(rig, refused=b"")
    other = rig.request("b", 5 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(other, 0) == (4 * BLOCK, True)


def test_a_record_of_a_newer_version_is_no_hit_and_not_offered_while_it_is_there() -> None:
    rig = Rig()
    keys = failed_load(rig, newer=b"")
    other = rig.request("b", 5 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(other, 0) == (
        BLOCK,
        True,
    ), "no dump has replaced it"
    rig.store.ids -= set(record_ids(keys[1:2], part_mask(0, 0, 0)))  # by its age
    third = rig.request("c", 5 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(third, 0) == (BLOCK, True)
    rig.scheduler.update_state_after_alloc(third, rig.tables.allocate(third, 8), 0)
    plan = rig.step(third, new=True)
    assert 1 in [dump.first for dump in plan.dumps]
    rig.report(rig.ended(plan))
    rig.store.ids |= set(record_ids(keys[:4], part_mask(0, 0, 0)))
    fourth = rig.request("d", 5 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(fourth, 0) == (4 * BLOCK, True)


def test_a_block_that_a_record_is_in_the_way_of_is_not_offered_at_every_request() -> None:
    rig = Rig()
    first = rig.request("a", 3 * BLOCK + 1)
    rig.admit(first)
    plan = rig.step(first)
    done = [DumpResult(dump.job, left_alone=(0, 1)) for dump in plan.dumps]
    rig.report(RankReport(0, ready=True, last_job=plan.dumps[-1].job, done=done))
    assert (rig.scheduler.dumps.published_blocks, rig.scheduler.dumps.failed_blocks) == (1, 2)
    # The store has all three, by its lookup: two of them cannot be read.
    rig.stored(first, 3)
    second = rig.request("b", 5 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(second, rig.tables.allocate(second, 8), 0)
    plan = rig.step(second, new=True)
    offered = [(dump.first, len(dump.blocks)) for dump in plan.dumps]
    assert offered == [(3, 2)], "others are stored as ever"
    rig.report(rig.ended(plan))
    # It was evicted, oldest first: the blocks behind it are offered again too.
    rig.store.ids.clear()
    third = rig.request("c", 3 * BLOCK + 1)
    rig.admit(third)
    assert [(dump.first, len(dump.blocks)) for dump in rig.step(third).dumps] == [(0, 3)]


def test_a_load_that_vllm_waits_for_is_sent_whatever_fails_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    request = rig.request("a", 5 * BLOCK)
    rig.stored(request, 4)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)

    def fails(*_: Any, **__: Any) -> None:
        raise ArithmeticError("a bug of ours")

    monkeypatch.setattr(rig.admission, "began", fails)
    monkeypatch.setattr(rig.scheduler._lookups, "touch", fails)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), 4 * BLOCK)
    (load,) = rig.step().loads
    assert (load.request, len(load.blocks), load.timeout) == ("a", 4, None)


def test_a_preempted_request_is_looked_up_again_with_its_output() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK + 1)
    rig.admit(request)
    rig.step(request)
    request.append_output_token_ids([7] * (2 * BLOCK))
    rig.tables.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    rig.stored(request, 4)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("owner", ["miss_stats", "scheduler", "job"])
def test_jobs_that_were_planned_are_sent_whatever_fails_after_them(
    monkeypatch: pytest.MonkeyPatch, owner: str, ends: bool
) -> None:
    """Offering blocks fails behind the first job: in a counter, in a hint, or in the next job. The
    job is sent and ends, so its blocks are neither lost nor taken for being written for good."""
    rig = Rig(blocks=256)
    request = rig.request("a", (JOB_BLOCKS + 2) * BLOCK)
    rig.admit(request)
    rig.step(request, most=1)

    def fails(*args: Any) -> Any:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        if owner == "job":
            real, made = rig.scheduler.dumps._job, []

            def second_fails(*args: Any) -> Any:
                made.append(args)
                return real(*args) if len(made) == 1 else fails()

            patch.setattr(rig.scheduler.dumps, "_job", second_fails)
        elif owner == "scheduler":
            patch.setattr(rig.scheduler, "_touch", fails)
        else:
            patch.setattr(rig.scheduler.miss_stats, "offered", fails)
        if ends:
            request.num_computed_tokens = request.num_tokens
            with pytest.raises(RuntimeError, match="planted"):
                rig.scheduler.request_finished(request)
            plan = rig.step()
        else:
            plan = rig.step(request)
    assert plan.dumps, "what was planned before it failed is sent"
    rig.report(rig.ended(plan))
    assert not rig.scheduler._block_tracker._writing
    keys = split_keys(b"".join(dump.keys for dump in plan.dumps))
    assert all(rig.scheduler._block_tracker.is_stored(key) for key in keys)


def test_stored_blocks_are_not_offered() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK + 2)
    rig.stored(request, 2)
    rig.no_room(request, 2)
    (dump,) = rig.step(request).dumps
    assert (dump.first, len(dump.blocks)) == (2, 1)


# Offering
# --------------------------------------------------------------------------------------------------


def test_every_full_block_is_offered_once_prompt_and_output() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK + 1)
    rig.admit(request)
    plan = rig.step(request)
    assert blocks_of(plan) == [(0, 2)]
    assert plan.dumps[0].parent == b""
    rig.report(rig.ended(plan))
    request.append_output_token_ids([1] * (BLOCK - 1))
    plan = rig.step(request)
    assert blocks_of(plan) == [(2, 1)]
    assert plan.dumps[0].parent == rig.keys(rig.readiness.identity_text).first(request)[1]
    assert blocks_of(rig.step(request)) == []


def test_only_confirmed_tokens_are_offered() -> None:
    rig = Rig()
    request = rig.request("a", BLOCK + 1)
    rig.admit(request)
    rig.step(request)
    request.num_computed_tokens = 2 * BLOCK  # asynchronous scheduling runs ahead of what is known
    assert blocks_of(rig.step(request)) == []


def test_prompt_only() -> None:
    rig = Rig(dump="prompt")
    request = rig.request("a", BLOCK)
    rig.admit(request)
    assert blocks_of(rig.step(request)) == [(0, 1)]
    request.append_output_token_ids([1] * (2 * BLOCK))
    assert blocks_of(rig.step(request)) == []


def test_blocks_that_are_stored_or_being_stored_are_not_offered() -> None:
    rig = Rig()
    first = rig.request("a", 4 * BLOCK)
    rig.stored(first, 2)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(first, 2 * BLOCK)
    rig.scheduler.update_state_after_alloc(first, rig.tables.allocate(first, 4), 0)
    assert blocks_of(rig.step(first)) == [(2, 2)]
    second = rig.request("b", 4 * BLOCK)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(second, 3 * BLOCK)
    rig.scheduler.update_state_after_alloc(second, rig.tables.allocate(second, 4), 0)
    assert blocks_of(rig.step(second)) == []


def test_a_dump_holds_no_block_of_vllms_and_is_followed_until_every_rank_has_ended_it() -> None:
    rig = Rig(ranks=2)
    free = rig.tables.block_pool.get_num_free_blocks()
    request = rig.request("a", 2 * BLOCK)
    rig.admit(request)
    plan = rig.step(request)
    rig.scheduler.request_finished(request)
    rig.tables.free(request)
    assert rig.tables.block_pool.get_num_free_blocks() == free
    assert not rig.scheduler.has_pending_push_work, (
        "how it ends is told with the next request's steps"
    )
    job = plan.dumps[0].job
    rig.report(RankReport(0, ready=True, staged=[job]), RankReport(1, ready=True, staged=[job]))
    assert rig.scheduler.dumps.under_way == 1
    rig.report(rig.ended(plan, 0), rig.ended(plan, 1))
    assert rig.scheduler.dumps.under_way == 0


@pytest.mark.parametrize("cached", [True, False], ids=["prefix caching", "no prefix caching"])
def test_blocks_that_vllm_hands_to_others_are_read_before_the_step_writes_them(
    cached: bool,
) -> None:
    rig = Rig(ranks=2, blocks=4)
    pool = rig.tables.block_pool
    first = rig.request("a", 2 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(first, rig.tables.allocate(first, 2), 0)
    sources = rig.tables.get_blocks("a").blocks[0]
    if cached:
        for block in sources:
            block.set_block_hash(b"hash of a")
    plan = rig.step(first)
    job = plan.dumps[0].job
    assert rig.step().jobs_to_flush == []  # its owner lives
    rig.scheduler.request_finished(first)
    rig.tables.free(first)
    assert rig.step().jobs_to_flush == []  # they are free
    if cached:
        pool.touch([sources[0]])
        assert rig.step().jobs_to_flush == []  # found by another request for what is in it
        pool.free_blocks([sources[0]])
    rig.report(RankReport(0, ready=True, staged=[job]))  # and the other rank has not
    second = rig.request("b", 4 * BLOCK, seed=1)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(second, rig.tables.allocate(second, 4), 0)
    if cached:
        for block in sources:
            block.set_block_hash(bytes(bytearray(b"hash of a")))  # of the same text, computed anew
    step = rig.step(second)
    assert step.jobs_to_flush == [job]
    assert rig.step().jobs_to_flush == [], "once"
    rig.report(rig.ended(plan, 0), rig.ended(plan, 1))
    assert rig.scheduler.dumps.published_blocks == 2


def test_blocks_that_vllm_reuses_are_read_first_if_another_part_of_the_step_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(blocks=2)
    first = rig.request("a", 2 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(first, rig.tables.allocate(first, 2), 0)
    job = rig.step(first).dumps[0].job
    rig.scheduler.request_finished(first)
    rig.tables.free(first)
    second = rig.request("b", 2 * BLOCK, seed=1)
    rig.tables.allocate(second, 2)
    monkeypatch.setattr(rig.readiness, "take_setup", lambda: 1 / 0)
    assert rig.step(second).jobs_to_flush == [job]


def test_the_last_dump_of_a_request_is_sent_and_read_in_the_step_that_reuses_its_blocks() -> None:
    rig = Rig(blocks=2)
    first = rig.request("a", 2 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(first, rig.tables.allocate(first, 2), 0)
    first.num_computed_tokens = 2 * BLOCK
    rig.scheduler.request_finished(first)
    rig.tables.free(first)
    second = rig.request("b", 2 * BLOCK, seed=1)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(second, 0)
    rig.scheduler.update_state_after_alloc(second, rig.tables.allocate(second, 2), 0)
    plan = rig.step(second)
    assert plan.jobs_to_flush == [dump.job for dump in plan.dumps if dump.request == "a"]


@pytest.mark.parametrize("busy", [True, False])
def test_a_refused_dump_is_offered_again_after_a_pause(busy: bool) -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 3 * BLOCK)
    rig.admit(request)
    plan = rig.step(request)
    rig.report(rig.ended(plan, 0), rig.ended(plan, 1, failed=(1, 2), busy=busy))
    assert blocks_of(rig.step(request)) == []
    rig.clock.now += 1.0
    assert blocks_of(rig.step(request)) == [(1, 2)]


def test_dumps_that_fail_together_make_one_pause_and_a_failure_after_it_a_longer_one() -> None:
    rig = Rig()
    requests = [rig.request(name, 2 * BLOCK, seed) for seed, name in enumerate("abc")]
    for request in requests:
        rig.admit(request)
    plan = rig.step(*requests)
    assert len(plan.dumps) == 3
    rig.report(rig.ended(plan, failed=(0, 1)))
    rig.clock.now += 1.0
    plan = rig.step(*requests)
    assert len(plan.dumps) == 3
    rig.report(rig.ended(plan, failed=(0, 1)))
    rig.clock.now += 1.0
    assert rig.step(*requests).dumps == []
    rig.clock.now += 1.0
    assert len(rig.step(*requests).dumps) == 3


def test_a_block_one_rank_could_not_publish_is_no_hit() -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 3 * BLOCK)
    rig.admit(request)
    plan = rig.step(request)
    rig.stored(request, 3)
    rig.report(rig.ended(plan, 0), rig.ended(plan, 1, failed=(1,)))
    other = rig.request("b", 3 * BLOCK + 1)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(other, 0) == (BLOCK, True)


@pytest.mark.parametrize(("busy", "hit"), [(True, 3), (False, 1)])
def test_a_block_that_was_not_published_is_offered_again_even_if_it_is_in_memory(
    busy: bool, hit: int
) -> None:
    rig = Rig()
    first = rig.request("a", 3 * BLOCK)
    rig.admit(first)
    plan = rig.step(first)
    rig.stored(first, 3)  # in memory: the medium below it failed
    rig.report(rig.ended(plan, failed=(1, 2), busy=busy))
    rig.scheduler.request_finished(first)
    rig.clock.now += 1.0
    again = rig.request("b", 3 * BLOCK + 1)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(again, 0) == (hit * BLOCK, True)
    rig.scheduler.update_state_after_alloc(again, rig.tables.allocate(again, 6), hit * BLOCK)
    again.num_computed_tokens = hit * BLOCK
    plan = rig.step(again)
    assert blocks_of(plan) == [(1, 2)]
    rig.report(rig.ended(plan))
    third = rig.request("c", 3 * BLOCK + 1)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(third, 0) == (3 * BLOCK, True)
    rig.scheduler.update_state_after_alloc(third, rig.tables.allocate(third, 6), 3 * BLOCK)
    third.num_computed_tokens = 3 * BLOCK
    assert blocks_of(rig.step(third)) == []


def test_the_budget_is_the_least_any_rank_can_take() -> None:
    rig = Rig(ranks=2)
    rig.report(RankReport(0, ready=True, free_slots=5), RankReport(1, ready=True, free_slots=2))
    request = rig.request("a", 4 * BLOCK)
    rig.admit(request)
    plan = rig.step(request)
    assert blocks_of(plan) == [(0, 2)]
    assert blocks_of(rig.step(request)) == []
    report = rig.ended(plan, 1)
    report.free_slots = 9
    rig.report(report, rig.ended(plan, 0))
    assert blocks_of(rig.step(request)) == [(2, 2)]


def test_a_report_of_full_ranks_expires_while_an_engine_is_idle() -> None:
    rig = Rig()
    first = rig.request("a", 2 * BLOCK)
    rig.admit(first)
    rig.report(RankReport(0, ready=True, free_slots=2))
    plan = rig.step(first)
    assert blocks_of(plan) == [(0, 2)]
    rig.report(RankReport(0, ready=True, free_slots=0, last_job=plan.dumps[0].job))
    rig.scheduler.request_finished(first)
    second = rig.request("b", 2 * BLOCK, seed=1)
    rig.admit(second)
    assert blocks_of(rig.step(second)) == [], "it was told so a moment ago"
    rig.clock.now += 2 * KNOWN_S
    assert blocks_of(rig.step(second)) == [(0, 2)]


def test_blocks_of_a_finished_request_are_offered_with_the_next_step() -> None:
    rig = Rig()
    request = rig.request("a", BLOCK + 1)
    rig.admit(request)
    rig.report(rig.ended(rig.step(request)))
    request.append_output_token_ids([3] * BLOCK)
    request.num_computed_tokens = 2 * BLOCK
    rig.scheduler.request_finished(request)
    rig.tables.free(request)
    assert rig.scheduler.has_pending_push_work
    assert blocks_of(rig.step()) == [(1, 1)]


def test_a_request_that_ends_while_loading_offers_nothing() -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK)
    rig.stored(request, 2)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 4), 2 * BLOCK)
    rig.step()
    request.num_computed_tokens = 2 * BLOCK
    rig.scheduler.request_finished(request)
    assert blocks_of(rig.step()) == []


def test_an_error_in_planning_a_step_loses_no_planned_load_or_dump(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    request, other = rig.request("a", BLOCK + 1), rig.request("b", 4 * BLOCK, seed=1)
    rig.stored(other, 2)
    rig.admit(request)
    rig.report(rig.ended(rig.step(request)))
    request.append_output_token_ids([3] * BLOCK)
    request.num_computed_tokens = 2 * BLOCK
    rig.scheduler.request_finished(request)
    assert rig.scheduler.get_num_new_matched_tokens(other, 0) == (2 * BLOCK, True)
    rig.scheduler.update_state_after_alloc(other, rig.tables.allocate(other, 4), 2 * BLOCK)
    monkeypatch.setattr(rig.scheduler, "_plan_dumps", lambda output, dumps: 1 / 0)
    plan = rig.step()
    assert [load.request for load in plan.loads] == ["b"]
    assert blocks_of(plan) == [(1, 1)]


# Opening
# --------------------------------------------------------------------------------------------------


def test_until_the_weights_are_known_requests_miss_and_are_offered_afterwards() -> None:
    rig = Rig(opened=False)
    rig.named.now = None
    rig.shake()
    request = rig.request("a", 2 * BLOCK + 1)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), 0)
    assert rig.scheduler.miss_stats.total.missed == {"identity_pending": 2}
    first = rig.step(request)
    assert blocks_of(first) == []
    rig.weights_checked(first)
    assert not rig.scheduler.has_pending_push_work  # hashing takes as long as it takes
    rig.named.now = '{"weights":"now"}'
    plan = rig.step(request)
    assert plan.setup is not None
    assert plan.setup.identity == rig.named.now
    rig.later.run()
    rig.ready()
    request.append_output_token_ids([1])
    assert blocks_of(rig.step(request)) == [(0, 2)]


def test_requests_wait_for_the_store_to_open_within_a_bound() -> None:
    rig = Rig(opened=False)
    rig.shake()
    request = rig.request("a", 2 * BLOCK)
    assert rig.scheduler.has_pending_push_work
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    rig.clock.now += 5.1
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not rig.scheduler.has_pending_push_work


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identity": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"problem": "no such layout"}, "no such layout"),
    ],
)
def test_a_worker_with_another_identity_disables_the_cache(
    changes: dict[str, object], said: str
) -> None:
    rig = Rig(opened=False)
    rig.shake(**changes)
    assert rig.readiness.phase == "off"
    assert said in rig.readiness.why_off
    request = rig.request("a", 2 * BLOCK)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert rig.step().setup is None


def test_a_rank_whose_store_does_not_open_disables_the_cache() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK)
    rig.report(RankReport(0, broken="disk on fire"))
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert "disk on fire" in rig.readiness.why_off


def test_salted_requests_share_nothing() -> None:
    rig = Rig()
    plain, salted = rig.request("a", 3 * BLOCK), rig.request("b", 3 * BLOCK)
    salted.cache_salt = "tenant"
    keys = rig.keys(rig.readiness.identity_text)
    assert not set(keys.first(plain)) & set(keys.first(salted))
    assert record_ids(keys.first(plain), part_mask(0, 0, 0)) != record_ids(
        keys.first(plain), part_mask(0, 0, 1)
    )


# Debug
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_debug_checks_that_the_counts_of_a_request_add_up(
    lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(debug=True)
    request = rig.request("a", 3 * BLOCK + 1)
    rig.admit(request)
    rig.scheduler._live["a"].tally.asked += lost
    rig.scheduler.request_finished(request)
    assert ("its counts do not add up" in caplog.text) == bool(lost)


def test_debug_computes_one_hit_in_n_and_compares_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_side, "COMPARED", 2)
    rig = Rig(debug=True)
    requests = [rig.request(name, 5 * BLOCK + 1, seed) for seed, name in enumerate("abc")]
    for request in requests:
        rig.stored(request, 4)
    rig.later.run()
    for request in requests * 2:  # vLLM queries at every step until there is room
        hit = (0, False) if request.request_id == "b" else (4 * BLOCK, True)
        assert rig.scheduler.get_num_new_matched_tokens(request, 0) == hit
    request = requests[1]
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 6), 0)
    plan = rig.step(request)
    jobs = [(dump.first, len(dump.blocks), dump.compare) for dump in plan.dumps]
    assert jobs == [(0, 4, True), (4, 1, False)]
    assert split_keys(plan.dumps[0].keys) == rig.keys_of(request)[:4]
    rig.report(rig.ended(plan))
    assert rig.scheduler.dumps.published_blocks == 1
    assert rig.scheduler.miss_stats.total.missed == {"not_taken": 4, "absent": 1}
    # Preempted: what was compared is loaded.
    request.num_preemptions, request.num_computed_tokens = 1, 0
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (4 * BLOCK, True)
