"""The scheduler side when the weights in memory may have changed: it checks, forgets and
continues."""

from __future__ import annotations

import logging

import pytest
from parts import BLOCK, Rig
from vllm.v1.core.block_pool import BlockHashToBlockMap

from ucm.integration.vllm.connector.identity.weights import WeightSource, WeightsReport
from ucm.integration.vllm.connector.metadata import RankReport, UCMConnectorMetadata

A, B = '{"weights":"w"}', '{"weights":"b"}'


def empty(rig: Rig) -> None:
    """vLLM's pool is reset."""
    rig.tables.block_pool.cached_block_hash_to_block = BlockHashToBlockMap()


def asked(rig: Rig, name: str, blocks: int = 3, seed: int = 0) -> UCMConnectorMetadata:
    """A request comes; the plan of the step in which it has to wait."""
    request = rig.request(name, blocks * BLOCK, seed)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    return rig.step()


@pytest.mark.parametrize("told", [True, False], ids=["with the connector", "vLLM's alone"])
def test_unchanged_weights_hit_again_after_one_round(told: bool) -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 3 * BLOCK)
    rig.stored(request, 2)
    empty(rig)
    if told:
        rig.scheduler.reset_cache()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    plan = rig.step()
    assert plan.check_weights == 1
    assert plan.setup is None
    assert rig.step().check_weights is None, "asked once"
    word = WeightsReport(1, True, None, 0)
    rig.report(RankReport(0, ready=True, weights=word))
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False), (
        "one rank has not looked"
    )
    rig.report(RankReport(1, ready=True, weights=word))
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False), "looked up anew"
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (2 * BLOCK, True)


@pytest.mark.parametrize("forget", [False, True], ids=["keep", "forget"])
def test_a_reset_together_with_the_connector_keeps_or_forgets(
    forget: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(on_reset="forget" if forget else "keep")
    request = rig.request("a", 3 * BLOCK)
    rig.stored(request, 2)
    rig.scheduler.request_finished(request)
    empty(rig)
    with caplog.at_level(logging.INFO, "ucm"):
        assert rig.scheduler.reset_cache() is True
    kept = "stored blocks stay; the weights are checked before they are used again"
    assert (kept in caplog.text) == (not forget)
    assert ("is forgotten" in caplog.text) == forget
    rig.weights_checked(asked(rig, "b"))
    if forget:
        setup = rig.step().setup
        assert setup is not None
        assert setup.identity != A
        rig.later.run()
        rig.ready(2)
    again = rig.request("c", 3 * BLOCK)
    rig.later.run()
    found = (0, False) if forget else (2 * BLOCK, True)
    assert rig.scheduler.get_num_new_matched_tokens(again, 0) == found


def test_vllms_own_reset_forgets_nothing() -> None:
    rig = Rig(on_reset="forget")
    empty(rig)
    rig.weights_checked(asked(rig, "a"))
    assert rig.readiness.phase == "open"
    assert rig.readiness.identity_text == A


@pytest.mark.parametrize("forget", [False, True])
def test_a_reset_fails_only_where_forgetting_failed(forget: bool) -> None:
    rig = Rig(on_reset="forget" if forget else "keep")
    rig.named.forget = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    assert rig.scheduler.reset_cache() is not forget


def test_reports_of_an_earlier_generation_are_ignored() -> None:
    rig = Rig()
    empty(rig)
    plan = asked(rig, "a")
    empty(rig)
    asked(rig, "b")
    rig.weights_checked(plan)
    assert not rig.readiness.weights_confirmed


def test_an_identity_follows_the_files_of_the_weights() -> None:
    rig = Rig()
    stored = rig.request("a", 3 * BLOCK)
    rig.stored(stored, 2)
    rig.scheduler.request_finished(stored)
    for attempt, (before, after, hit) in enumerate([(A, B, 0), (B, A, 2)], start=2):
        rig.named.after = {before: after}
        empty(rig)
        files = WeightSource(after)
        early = rig.request(f"r{attempt}", 3 * BLOCK)
        rig.later.run()
        assert rig.scheduler.get_num_new_matched_tokens(early, 0) == (None, False)
        rig.weights_checked(rig.step(), unchanged=False, named=files)
        assert [word.named for word in rig.named.words] == [files]
        plan = rig.step()
        assert plan.setup is not None
        assert plan.setup.identity == after
        assert rig.readiness.phase == "opening"
        rig.later.run()
        rig.ready(attempt - 1)  # a word about the store before
        assert rig.readiness.phase == "opening"
        rig.ready(attempt)
        assert rig.scheduler.get_num_new_matched_tokens(early, 0) == (None, False), "looked up anew"
        for request in (early, rig.request(f"s{attempt}", 3 * BLOCK)):
            rig.later.run()
            assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (hit * BLOCK, hit > 0)
            rig.scheduler.request_finished(request)


def test_blocks_of_an_earlier_generation_are_never_offered() -> None:
    """One request ended before vLLM emptied its cache and one was preempted by it; a third kept
    what it has."""
    rig = Rig()
    ended, preempted, kept = (rig.request(name, 2 * BLOCK, seed) for seed, name in enumerate("epk"))
    for request in (ended, preempted, kept):
        rig.admit(request)
        request.num_computed_tokens = 2 * BLOCK
    rig.scheduler.request_finished(ended)
    empty(rig)
    rig.scheduler.reset_cache()
    plan = asked(rig, "new", seed=9)
    assert plan.dumps == []
    rig.weights_checked(plan)
    preempted.num_computed_tokens, preempted.num_preemptions = 0, 1
    for request in (preempted, kept):
        request.append_output_token_ids([1] * BLOCK)
    assert rig.scheduler.get_num_new_matched_tokens(preempted, 0)[0] in (0, None)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(preempted, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(preempted, rig.tables.get_blocks("p"), 0)
    assert {dump.request for dump in rig.step(preempted, kept).dumps} == {"p"}


def test_nothing_is_offered_before_the_ranks_checked_their_weights() -> None:
    rig = Rig()
    empty(rig)
    short = rig.request("a", BLOCK)  # nothing to load, so it does not wait
    assert rig.scheduler.get_num_new_matched_tokens(short, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(short, rig.tables.allocate(short, 4), 0)
    plan = rig.step(short)
    assert (plan.check_weights, plan.dumps) == (1, [])
    rig.weights_checked(plan)
    rig.later.run()
    short.append_output_token_ids([1])
    assert [dump.request for dump in rig.step(short).dumps] == ["a"]


def test_an_idle_engine_with_an_empty_cache_is_checked_again() -> None:
    """vLLM needs no reset to be right then."""
    rig = Rig()
    empty(rig)
    plan = asked(rig, "a")
    rig.weights_checked(plan)
    rig.scheduler.request_finished(rig.scheduler._live["a"].request)
    assert not rig.readiness.weights_confirmed
    plan = asked(rig, "b")
    rig.weights_checked(plan, unchanged=None)
    assert rig.readiness.weights_confirmed, (
        "where memory cannot be looked at, only a reset counts as a change"
    )
    assert all(word.unchanged for word in rig.named.words)


def test_without_readable_memory_a_reset_is_a_change() -> None:
    rig = Rig()
    rig.named.after = {A: B}
    empty(rig)
    rig.weights_checked(asked(rig, "a"), unchanged=None)
    assert rig.readiness.phase == "opening"
    assert rig.readiness.identity_text == B


def test_requests_do_not_wait_for_ranks_that_do_not_answer() -> None:
    rig = Rig()
    empty(rig)
    request = rig.request("a", 3 * BLOCK)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    rig.clock.now += 5.1
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 4), 0)
    assert rig.scheduler.miss_stats.total.missed == {"identity_pending": 3}


def test_blocks_loaded_before_a_change_of_the_weights_are_never_offered() -> None:
    """vLLM keeps the blocks of a request that waits for its load through a reset of its caches, and
    names them again when the load has ended."""
    rig = Rig()
    stored, waits = rig.request("a", 4 * BLOCK), rig.request("w", 4 * BLOCK)
    rig.stored(stored, 2)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(waits, 0) == (2 * BLOCK, True)
    table = rig.tables.allocate(waits, 5)
    rig.scheduler.update_state_after_alloc(waits, table, 2 * BLOCK)
    waits.num_computed_tokens = 2 * BLOCK
    assert rig.step().loads
    rig.named.after = {A: B}
    rig.scheduler.request_finished(stored)
    rig.scheduler.reset_cache()
    plan = asked(rig, "new", seed=9)
    rig.report(RankReport(0, ready=True, free_slots=64), recved={"w"})
    rig.weights_checked(plan, unchanged=False, named=WeightSource(B))
    rig.step()
    rig.later.run()
    rig.ready(2)
    assert rig.readiness.identity_text == B
    rig.scheduler.update_state_after_alloc(waits, rig.tables.get_blocks("w"), 0)
    plans = [rig.step(waits)]
    waits.append_output_token_ids([1])
    plans.append(rig.step(waits))
    rig.scheduler.request_finished(waits)
    plans.append(rig.step())
    assert [dump for plan in plans for dump in plan.dumps if dump.request == "w"] == []
