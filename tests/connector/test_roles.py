"""Prefill and decode on separate engines, on the scheduler side: what the request of a prefill
engine is answered, and how long one of a decode engine waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig
from vllm.v1.request import Request

from ucm.integration.vllm.connector.groups import Group
from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.metadata import RankReport
from ucm.integration.vllm.connector.scheduler.roles import (
    MOST_FAILED,
    POLL_S,
    REFRESH_S,
    TRIAL_S,
    digest_of,
)
from ucm.reasons import MissReason
from ucm.store import part_mask, record_ids

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
WAIT_S = 2.0


@pytest.fixture(autouse=True)
def _talkative() -> None:
    throttle._last.clear()


class Store:
    """Counts how often the store of a rig lists what others have published."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refreshed: list[float] = []
        rig.store.at_once = True
        monkeypatch.setattr(
            rig.store, "refresh", lambda: self.refreshed.append(rig.clock.now), raising=True
        )


# The prefill engine
# --------------------------------------------------------------------------------------------------


def prefilled(rig: Rig, tokens: int, params: Any = PREFILL) -> tuple[Request, Any, Any]:
    """A request that computed its prompt in one step, the plan of the step, and its answer."""
    request = rig.request("p", tokens, params=params)
    rig.admit(request)
    plan = rig.step(request)
    request.append_output_token_ids([7])
    return request, plan, rig.scheduler.request_finished(request)


@pytest.mark.parametrize("tokens", [BLOCK, 3 * BLOCK, 3 * BLOCK + 2])
def test_a_producers_request_is_answered_with_its_last_full_block(tokens: int) -> None:
    rig = Rig()
    request, plan, answer = prefilled(rig, tokens)
    keys, blocks = rig.keys_of(request), tokens // BLOCK
    digest = digest_of(rig.readiness.identity_text)
    section = {"wait_for": keys[blocks - 1].hex(), "tokens": blocks * BLOCK, "identity": digest}
    assert answer == {"do_remote_prefill": True, "ucm": section}
    assert (len(plan.dumps), plan.publish) == (1, True)
    assert not rig.scheduler.has_pending_push_work


@pytest.mark.parametrize(
    ("tokens", "params"),
    [
        (BLOCK - 1, PREFILL),
        (3 * BLOCK, None),
        (3 * BLOCK, {"do_remote_decode": False}),
        (3 * BLOCK, {"do_remote_decode": "yes"}),
        (3 * BLOCK, {**PREFILL, "ucm": {"dump": False}}),
        (3 * BLOCK, {**PREFILL, "ucm": {"unknown": 1}}),
    ],
)
def test_no_answer_without_blocks_or_for_other_requests(tokens: int, params: Any) -> None:
    _, plan, answer = prefilled(Rig(), tokens, params)
    assert (answer, plan.publish) == (None, False)


def test_the_store_is_flushed_once_the_whole_prompt_is_offered() -> None:
    rig = Rig()
    request = rig.request("p", 4 * BLOCK + 1, params=PREFILL)
    rig.admit(request)
    plans = [rig.step(request, most=2 * BLOCK) for _ in range(3)]
    assert [plan.publish for plan in plans] == [False, True, False]
    request.append_output_token_ids([7] * BLOCK)
    assert not rig.step(request).publish, "output is not waited for"


def test_blocks_that_another_request_is_storing_are_flushed_too() -> None:
    rig = Rig()
    first = rig.request("first", 3 * BLOCK)
    rig.admit(first)
    assert not rig.step(first).publish
    _, plan, answer = prefilled(rig, 3 * BLOCK)
    assert (plan.dumps, plan.publish) == ([], True)
    assert answer is not None


def test_blocks_without_room_are_flushed_when_they_are_offered() -> None:
    rig = Rig()
    rig.report(RankReport(0, ready=True, free_slots=0))
    request, plan, answer = prefilled(rig, 3 * BLOCK)
    assert (plan.dumps, plan.publish) == ([], False)
    assert answer is not None, "they are still kept"
    rig.tables.free(request)
    assert rig.scheduler.has_pending_push_work
    rig.report(RankReport(0, ready=True, free_slots=8))
    plan = rig.step()
    assert ([len(dump.blocks) for dump in plan.dumps], plan.publish) == ([3], True)


def test_no_answer_where_the_store_takes_nothing() -> None:
    rig = Rig()
    rig.report(RankReport(0, ready=True, healthy=False))
    request = rig.request("p", 3 * BLOCK, params=PREFILL)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 8), 0)
    rig.step(request)
    assert rig.scheduler.request_finished(request) is None


def test_no_answer_of_an_aborted_request_without_computed_blocks() -> None:
    rig = Rig()
    request = rig.request("p", 3 * BLOCK, params=PREFILL)
    rig.admit(request)
    assert rig.scheduler.request_finished(request) is None


def test_other_connectors_answer_where_there_are_several() -> None:
    """vLLM's MultiConnector raises where two of its connectors answer with the same key."""
    rig = Rig(opened=False)
    rig.shake(beside=True)
    rig.later.run()
    rig.ready()
    rig.readiness.request_weights_check()
    rig.weights_checked(rig.step())
    assert prefilled(rig, 3 * BLOCK)[2] is None


# The decode engine
# --------------------------------------------------------------------------------------------------


def consumer(rig: Rig, tokens: int, **section: Any) -> Request:
    """A request whose prompt another engine computes; its lookup has ended."""
    twin = rig.request("twin", tokens)
    rig.scheduler.request_finished(twin)
    keys = {"wait_for": rig.keys_of(twin)[-1].hex(), **section}
    request = rig.request("d", tokens, params={"do_remote_prefill": True, "ucm": keys})
    rig.later.run()
    return request


def asked(rig: Rig, request: Request) -> tuple[int | None, bool]:
    """vLLM's call in one step."""
    found: tuple[int | None, bool] = rig.scheduler.get_num_new_matched_tokens(request, 0)
    rig.later.run()
    return found


def test_a_consumer_waits_for_the_block_and_loads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    store = Store(rig, monkeypatch)
    request = consumer(rig, 5 * BLOCK + 1)
    start = rig.clock.now
    while rig.clock.now < start + WAIT_S / 2:
        assert asked(rig, request) == (None, False)
        rig.clock.now += 0.001
    gaps = [b - a for a, b in zip(store.refreshed, store.refreshed[1:], strict=False)]
    assert store.refreshed[0] == start
    assert REFRESH_S <= min(gaps) <= max(gaps) < REFRESH_S + 0.002
    rig.stored(request, 5)
    found = asked(rig, request)
    while found[0] is None:
        rig.clock.now += 0.001
        found = asked(rig, request)
    assert found == (5 * BLOCK, True)
    assert rig.clock.now < start + WAIT_S / 2 + POLL_S + 0.004
    (waited,) = (rig.scheduler.miss_stats.take() or {})["pd_wait_seconds"]
    assert waited == rig.clock.now - start
    refreshed = len(store.refreshed)
    rig.clock.now += 1.0
    assert asked(rig, request) == (5 * BLOCK, True), "asked again, it does not wait again"
    assert len(store.refreshed) == refreshed


def test_a_consumer_waits_while_an_earlier_block_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    Store(rig, monkeypatch)
    request = consumer(rig, 5 * BLOCK + 1)
    ids = record_ids(rig.keys_of(request), part_mask(0, 0, 0))
    rig.store.ids.update({*ids[:2], *ids[3:]})
    for _ in range(100):
        assert asked(rig, request) == (None, False)
        rig.clock.now += 0.001
    rig.store.ids.update(ids)
    for _ in range(30):
        rig.clock.now += 0.001
        if (found := asked(rig, request))[0] is not None:
            break
    assert found == (5 * BLOCK, True)


def test_without_the_block_it_is_computed_after_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    Store(rig, monkeypatch)
    request = consumer(rig, 5 * BLOCK + 1)
    rig.stored(request, 2)
    assert asked(rig, request) == (None, False)
    rig.clock.now += WAIT_S - 0.001
    assert asked(rig, request) == (None, False)
    rig.clock.now += 0.001
    assert asked(rig, request) == (2 * BLOCK, True), "what is there is loaded"
    assert "within pd_wait_ms (2000 ms)" in caplog.text


def test_after_several_failed_waits_one_request_waits_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    Store(rig, monkeypatch)

    def waits(found: bool = False) -> bool:
        """Whether a further request waits; to its end, which may be with its blocks."""
        request = consumer(rig, 5 * BLOCK + 1)
        if waited := asked(rig, request)[0] is None:
            if found:
                rig.stored(request, 5)
            rig.clock.now += 0.5 if found else WAIT_S
            while asked(rig, request)[0] is None:
                rig.clock.now += 0.001
        rig.scheduler.request_finished(request)
        rig.store.ids.clear()
        return waited

    assert [waits() for _ in range(MOST_FAILED + 3)] == [True] * MOST_FAILED + [False] * 3
    rig.clock.now += TRIAL_S
    assert [waits() for _ in range(3)] == [True, False, False]
    rig.clock.now += TRIAL_S
    assert [waits(found=True) for _ in range(6)] == [True] * 6


def test_pd_wait_ms_of_0_waits_for_nothing() -> None:
    rig = Rig(pd_wait_ms=0)
    request = consumer(rig, 5 * BLOCK + 1)
    assert asked(rig, request) == (0, False)


def test_the_clock_starts_with_vllms_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    Store(rig, monkeypatch)
    request = consumer(rig, 5 * BLOCK + 1)
    rig.clock.now += 100.0
    assert asked(rig, request) == (None, False)


def test_a_prompt_of_whole_blocks_waits_for_its_last_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM computes the last token, so its block is not loaded; the others are."""
    rig = Rig()
    Store(rig, monkeypatch)
    request = consumer(rig, 4 * BLOCK)
    assert asked(rig, request) == (None, False)
    rig.stored(request, 4)
    for _ in range(30):
        rig.clock.now += 0.001
        if (found := asked(rig, request))[0] is not None:
            break
    assert found == (3 * BLOCK, True)


def test_with_a_draft_model_the_hit_that_is_waited_for_is_one_block_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(groups=(Group(0, 0, BLOCK, draft=True),))
    Store(rig, monkeypatch)
    request = consumer(rig, 5 * BLOCK + 1)
    assert asked(rig, request) == (None, False)
    rig.stored(request, 4)
    for _ in range(30):
        rig.clock.now += 0.001
        assert asked(rig, request) == (None, False)
    rig.stored(request, 5)
    for _ in range(30):
        rig.clock.now += 0.001
        if (found := asked(rig, request))[0] is not None:
            break
    assert found == (4 * BLOCK, True)


def test_blocks_on_the_device_are_not_waited_for() -> None:
    rig = Rig()
    request = consumer(rig, 4 * BLOCK + 1)
    local = 4 * BLOCK
    assert rig.scheduler.get_num_new_matched_tokens(request, local) == (0, False)


def test_a_request_that_may_not_load_does_not_wait() -> None:
    for section in ({"load": False}, {"max_load_tokens": BLOCK - 1}):
        rig = Rig(consumer_dump=True)
        request = consumer(rig, 4 * BLOCK + 1, **section)
        assert asked(rig, request) == (0, False)


def test_an_aborted_request_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    store = Store(rig, monkeypatch)
    request = consumer(rig, 5 * BLOCK + 1)
    assert asked(rig, request) == (None, False)
    assert rig.scheduler.request_finished(request) is None
    rig.clock.now += 1.0
    rig.later.run()
    assert not rig.step().loads
    assert (rig.scheduler._live, len(store.refreshed)) == ({}, 1)
    assert not rig.scheduler.has_pending_push_work


@pytest.mark.parametrize(("consumer_dump", "dumped"), [(False, 0), (True, 5)])
def test_a_consumer_stores_its_blocks_if_the_configuration_says_so(
    consumer_dump: bool, dumped: int
) -> None:
    rig = Rig(consumer_dump=consumer_dump, pd_wait_ms=0)
    request = consumer(rig, 4 * BLOCK + 1)
    rig.admit(request)
    plan = rig.step(request)
    request.append_output_token_ids([7] * BLOCK)
    plans = [plan, rig.step(request)]
    assert sum(len(dump.blocks) for plan in plans for dump in plan.dumps) == dumped


@pytest.mark.parametrize(
    "section",
    [{"wait_for": "ab"}, {"wait_for": 7}, {"wait_for": "z" * 32}, {"wait_for": "A" * 32}],
)
def test_a_wrong_wait_for_key_disables_the_cache_for_its_request(
    section: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK, params={"ucm": section})
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.miss_stats.admitted(request, 0)  # by the connector
    assert rig.scheduler.miss_stats.total.missed == {MissReason.UNSUPPORTED: 4}
    assert "ucm.wait_for" in caplog.text


def test_another_prompt_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    request = consumer(rig, 4 * BLOCK + 1, wait_for="0" * 32)
    assert asked(rig, request) == (0, False)
    assert "another prompt" in caplog.text


def test_the_fields_of_another_identity_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = '{"weights":"other"}'
    digest = digest_of(theirs)
    (tmp_path / digest[:32]).mkdir()
    manifest = {"format": 1, "digest": digest, "identity": json.loads(theirs)}
    (tmp_path / digest[:32] / "manifest.json").write_text(json.dumps(manifest))
    rig = Rig(roots=(str(tmp_path),))
    for _ in range(3):
        request = consumer(rig, 4 * BLOCK + 1, identity=digest)
        assert asked(rig, request) == (0, False)
        rig.scheduler.request_finished(request)
    (line,) = [one for one in caplog.messages if "another identity" in one]
    assert 'weights is "w" here and "other" there' in line


def test_without_its_manifest_another_identity_is_logged_by_digest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(roots=("/nowhere",))
    request = consumer(rig, 4 * BLOCK + 1, identity="12" * 32)
    assert asked(rig, request) == (0, False)
    (line,) = [one for one in caplog.messages if "another identity" in one]
    assert f"{digest_of(rig.readiness.identity_text)} here and {'12' * 32} there" in line


def test_the_own_identity_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    Store(rig, monkeypatch)
    own = digest_of(rig.readiness.identity_text)
    assert asked(rig, consumer(rig, 4 * BLOCK + 1, identity=own)) == (None, False)


def test_a_store_that_reads_a_medium_gets_one_lookup_at_a_time() -> None:
    """A store that reads a medium: one lookup at a time, at most every ``POLL_S``."""
    rig = Rig()
    request = consumer(rig, 5 * BLOCK + 1)
    rig.store.questions = []
    for _ in range(40):
        assert asked(rig, request) == (None, False)
        rig.clock.now += 0.001
    assert len(rig.store.questions) == 1, "the first one is not answered"
    rig.store.questions[0].answered = True
    for _ in range(25):
        assert asked(rig, request) == (None, False)
        rig.clock.now += 0.001
    assert len(rig.store.questions) == 2
