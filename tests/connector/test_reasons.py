"""Every block a request asked for is loaded, or missed for exactly one reason; the sums of both
sides agree."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig
from vllm.v1.request import Request

from ucm.errors import BusyError, DeadlineError, StoreIOError, UnhealthyError
from ucm.integration.vllm.connector.identity.keys import UnkeyableError
from ucm.integration.vllm.connector.metadata import LoadFailure, RankReport
from ucm.integration.vllm.connector.scheduler.lookup import Lookups
from ucm.integration.vllm.connector.stats import SUMMARY_S
from ucm.reasons import MissReason
from ucm.store import part_mask, record_ids


def admit(rig: Rig, request: Request, computed: int = 0) -> int:
    """vLLM calls the lookup and admits; returns the blocks that are to be loaded."""
    rig.later.run()
    tokens, _ = rig.scheduler.get_num_new_matched_tokens(request, computed)
    assert tokens is not None
    rig.scheduler.update_state_after_alloc(
        request, rig.tables.allocate(request, request.num_tokens // BLOCK + 4), tokens
    )
    rig.scheduler.miss_stats.admitted(request, computed)  # by the connector
    return tokens // BLOCK


def balance(rig: Rig) -> dict[str, int]:
    """The misses by reason, after a check that every block asked for is accounted for."""
    total = rig.scheduler.miss_stats.total
    assert total.asked == total.loaded + sum(total.missed.values())
    return dict(total.missed)


def fail_lookup(error: Exception) -> Callable[[Rig], None]:
    """A store whose lookups raise."""

    def prepare(rig: Rig) -> None:
        def lookup(ids: Any) -> list[bool]:
            raise error

        rig.store.lookup = lookup  # type: ignore[method-assign]

    return prepare


def explain(reason: str) -> Callable[[Rig], None]:
    """A store that says why the first block is no hit."""

    def prepare(rig: Rig) -> None:
        rig.store.explain_on_prefix = lambda ids: (-1, reason)  # type: ignore[method-assign]

    return prepare


def refuse_background(rig: Rig) -> None:
    """A queue that is full."""
    rig.later.submit = lambda job, priority=0: False  # type: ignore[method-assign]


def stall_background(rig: Rig) -> None:
    """Threads that are all stuck."""
    rig.later.stalled = lambda: True  # type: ignore[method-assign]


def unkeyable(reason: MissReason) -> Callable[[Rig], None]:
    """Requests without keys."""

    def prepare(rig: Rig) -> None:
        def first(request: Any) -> list[bytes]:
            raise UnkeyableError("the adapter has no name", reason=reason)

        assert rig.scheduler._keys is not None
        rig.scheduler._keys.first = first  # type: ignore[method-assign]

    return prepare


def break_hashing(rig: Rig) -> None:
    """A bug of ours."""
    assert rig.scheduler._keys is not None
    rig.scheduler._keys.first = lambda request: 1 / 0  # type: ignore[method-assign, return-value, assignment]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda rig: None, "absent"),
        (fail_lookup(StoreIOError("broken")), "io_error"),
        (fail_lookup(OSError("broken")), "io_error"),
        (fail_lookup(DeadlineError("late")), "lookup_late"),
        (fail_lookup(BusyError("full")), "busy"),
        (fail_lookup(UnhealthyError("open")), "unhealthy"),
        (fail_lookup(ValueError("a bug of the store")), "internal"),
        (explain("refused"), "refused"),
        (explain("unhealthy"), "unhealthy"),
        (explain("no reason of ours"), "absent"),
        (refuse_background, "busy"),
        (stall_background, "unhealthy"),
        (unkeyable(MissReason.UNKEYABLE), "unkeyable"),
        (unkeyable(MissReason.IDENTITY_PENDING), "identity_pending"),
        (unkeyable(MissReason.UNSUPPORTED), "unsupported"),
        (break_hashing, "internal"),
    ],
)
def test_a_lookup_without_a_hit(prepare: Callable[[Rig], None], reason: str) -> None:
    rig = Rig()
    prepare(rig)
    request = rig.request("a", 4 * BLOCK + 1)
    assert admit(rig, request) == 0
    assert balance(rig) == {reason: 4}
    # vLLM says so again after a load
    rig.scheduler.update_state_after_alloc(request, rig.tables.get_blocks("a"), 0)
    assert balance(rig) == {reason: 4}


@pytest.mark.parametrize(
    ("switch_off", "reason"),
    [
        (lambda rig: rig.readiness.off("the user's wish"), "disabled"),
        (
            lambda rig: rig.readiness.off("no weights to be read", MissReason.IDENTITY_UNKNOWN),
            "identity_unknown",
        ),
        (lambda rig: rig.report(RankReport(0, broken="disk on fire")), "disabled"),
    ],
)
def test_an_engine_that_is_off(switch_off: Callable[[Rig], None], reason: str) -> None:
    rig = Rig()
    early = rig.request("early", 3 * BLOCK)
    switch_off(rig)
    assert admit(rig, early) == 0
    late = rig.request("late", 2 * BLOCK)
    assert admit(rig, late) == 0
    rig.scheduler.request_finished(late)
    assert balance(rig) == {reason: 5}


def test_an_engine_that_is_not_open_yet() -> None:
    rig = Rig(opened=False)
    rig.named.now = None
    rig.shake()
    assert admit(rig, rig.request("a", 2 * BLOCK)) == 0
    rig.named.now = '{"weights":"w"}'
    assert rig.scheduler.get_num_new_matched_tokens(rig.request("b", 3 * BLOCK), 0) == (None, False)
    rig.clock.now += 10.0  # and does not open
    assert admit(rig, rig.request("c", 3 * BLOCK)) == 0
    assert balance(rig) == {"identity_pending": 2, "unhealthy": 3}


def test_an_identity_that_cannot_be_known() -> None:
    rig = Rig(opened=False)
    rig.readiness._identity = lambda: 1 / 0  # type: ignore[assignment, return-value]
    rig.shake()
    assert admit(rig, rig.request("a", 2 * BLOCK)) == 0
    assert balance(rig) == {"identity_unknown": 2}


def test_requests_and_engines_that_are_not_cached() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK)
    request.skip_reading_prefix_cache = True
    assert admit(rig, request) == 0
    session = SimpleNamespace(
        request_id="s", resumable=True, num_tokens=3 * BLOCK, num_prompt_tokens=3 * BLOCK
    )
    rig.scheduler.on_new_request(session)  # type: ignore[arg-type]
    rig.scheduler.miss_stats.admitted(session, 0)  # type: ignore[arg-type]
    assert balance(rig) == {"unsupported": 5}
    rig = Rig()
    rig.shake(only_stores="steps overlap")
    assert admit(rig, rig.request("a", 2 * BLOCK)) == 0
    assert balance(rig) == {"unsupported": 2}


def test_a_request_that_may_not_read_is_stored_for_others() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK)
    request.skip_reading_prefix_cache = True
    assert admit(rig, request) == 0
    assert [(dump.first, len(dump.blocks)) for dump in rig.step(request).dumps] == [(0, 2)]


def test_the_block_of_the_last_token() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK)
    rig.stored(request, 3)
    assert admit(rig, request) == 2
    rig.report(RankReport(0, ready=True), recved={"a"})
    assert balance(rig) == {"last_token": 1}
    assert (request.num_tokens // BLOCK, rig.scheduler.miss_stats.total.loaded) == (3, 2)


def test_a_hit_that_is_too_short_and_the_blocks_behind_it() -> None:
    rig = Rig(min_hit_tokens=3 * BLOCK)
    request = rig.request("a", 5 * BLOCK + 1)
    rig.stored(request, 2)
    assert admit(rig, request) == 0
    assert balance(rig) == {"too_short": 2, "absent": 3}


def test_blocks_on_the_device_are_not_looked_up() -> None:
    rig = Rig()
    request = rig.request("a", 5 * BLOCK + 1)
    rig.stored(request, 4)
    assert admit(rig, request, computed=2 * BLOCK) == 2
    rig.report(RankReport(0, ready=True), recved={"a"})
    assert balance(rig) == {"absent": 1}
    assert rig.scheduler.miss_stats.total.asked == 3
    other = rig.request("b", 5 * BLOCK + 1, seed=1)
    assert admit(rig, other, computed=5 * BLOCK) == 0
    assert rig.scheduler.miss_stats.total.asked == 3


@pytest.mark.parametrize(("ranks", "reason"), [([0], "other_rank"), ([], "absent")])
def test_a_block_that_another_rank_lacks(ranks: list[int], reason: str) -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 5 * BLOCK + 1)
    rig.stored(request, 2)
    rig.stored(request, 4, ranks=ranks)
    assert admit(rig, request) == 2
    rig.report(RankReport(0, ready=True), recved={"a"})
    assert balance(rig) == {reason: 3}


def test_a_hit_that_vllm_does_not_take() -> None:
    rig = Rig()
    request = rig.request("a", 5 * BLOCK + 1)
    rig.stored(request, 4)
    rig.no_room(request, 4)
    assert balance(rig) == {"not_taken": 4, "absent": 1}
    unasked = rig.request("b", 2 * BLOCK, seed=1)
    rig.scheduler.update_state_after_alloc(unasked, rig.tables.allocate(unasked, 2), 0)
    assert balance(rig) == {"not_taken": 6, "absent": 1}


def test_an_answer_that_fails_inside_is_counted() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK)
    rig.later.run()
    rig.scheduler._block_tracker.trusted = lambda keys, upto: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):  # the connector answers no hit
        rig.scheduler.get_num_new_matched_tokens(request, 0)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 4), 0)
    assert balance(rig) == {"internal": 2}


# By medium
# --------------------------------------------------------------------------------------------------


def test_a_hit_is_divided_by_the_tiers_in_which_the_lookup_found_it() -> None:
    rig = Rig()
    rig.store.tier_names, rig.store.tier_media = ("memory", "disk"), ("host", "disk")
    request = rig.request("a", 7 * BLOCK + 1)
    rig.stored(request, 6)
    rig.store.lower = set(record_ids(rig.keys_of(request)[4:6], part_mask(0, 0, 0)))
    assert admit(rig, request, computed=BLOCK) == 5
    media = rig.scheduler.hit_media
    assert media(request, 5 * BLOCK) == {"host": 3 * BLOCK, "disk": 2 * BLOCK, "": 0}
    assert media(request, 4 * BLOCK) == {"host": 3 * BLOCK, "disk": BLOCK, "": 0}  # fewer taken
    assert media(request, 5 * BLOCK - 1) == {"host": 3 * BLOCK, "disk": BLOCK, "": BLOCK - 1}
    assert [media(request, tokens)[""] for tokens in (0, 1, 7 * BLOCK)] == [0, 1, 2 * BLOCK]
    assert all(sum(media(request, tokens).values()) == tokens for tokens in range(8 * BLOCK))


def test_stores_that_name_no_media_and_requests_that_are_unknown() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK + 1)
    rig.stored(request, 3)
    assert admit(rig, request) == 3
    assert rig.scheduler.hit_media(request, 3 * BLOCK) == {"": 3 * BLOCK}
    rig.scheduler.request_finished(request)
    assert rig.scheduler.hit_media(request, 3 * BLOCK) == {"": 3 * BLOCK}


# Loads
# --------------------------------------------------------------------------------------------------


def test_a_failed_load_counts_each_block_once_over_ranks() -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 6 * BLOCK + 1)
    rig.stored(request, 6)
    assert admit(rig, request) == 6
    rig.report(
        RankReport(
            0,
            ready=True,
            load_failures=[LoadFailure("a", 3, b"", ("bad_checksum",) + ("load_failed",) * 2)],
        )
    )
    assert rig.scheduler.miss_stats.total.loaded == 0  # the other rank has not reported
    late = LoadFailure("a", 2, b"", ("timeout",) * 4)
    rig.report(RankReport(1, ready=True, load_failures=[late]), recved={"a"})
    assert balance(rig) == {"bad_checksum": 1, "timeout": 3}
    assert rig.scheduler.miss_stats.total.loaded == 2
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (2 * BLOCK, True)
    rig.scheduler.update_state_after_alloc(request, rig.tables.get_blocks("a"), 0)
    assert balance(rig) == {"bad_checksum": 1, "timeout": 3}


def test_a_worker_that_names_no_reasons_or_unknown_ones() -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK + 1)
    rig.stored(request, 4)
    assert admit(rig, request) == 4
    rig.report(RankReport(0, ready=True, load_failures=[LoadFailure("a", 1, b"")]), recved={"a"})
    assert balance(rig) == {"load_failed": 3}
    other = rig.request("b", 2 * BLOCK + 1, seed=1)
    rig.stored(other, 2)
    assert admit(rig, other) == 2
    rig.report(
        RankReport(0, ready=True, load_failures=[LoadFailure("b", 1, b"", ("new",))]), recved={"b"}
    )
    assert balance(rig) == {"load_failed": 3, "internal": 1}


def test_a_refused_record_is_no_hit_for_others() -> None:
    rig = Rig()
    request, other = rig.request("a", 5 * BLOCK + 1), rig.request("b", 5 * BLOCK + 1)
    rig.stored(request, 4)
    assert admit(rig, request) == 4
    bad = rig.keys(rig.readiness.identity_text).first(request)[1]
    rig.report(
        RankReport(
            0,
            ready=True,
            load_failures=[LoadFailure("a", 1, bad, ("foreign_id", "load_failed", "load_failed"))],
        ),
        recved={"a"},
    )
    assert admit(rig, other) == 1
    rig.report(RankReport(0, ready=True), recved={"b"})
    assert balance(rig) == {"foreign_id": 1, "load_failed": 2, "refused": 3, "absent": 2}


def test_after_a_preemption_blocks_are_looked_up_again_and_a_failed_load_counts() -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK + 1)
    rig.stored(request, 4)
    assert admit(rig, request) == 4
    rig.report(
        RankReport(0, ready=True, load_failures=[LoadFailure("a", 1, b"", ("busy",) * 3)]),
        recved={"a"},
    )
    rig.tables.free(request)
    request.num_preemptions = 1
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert admit(rig, request) == 1
    rig.report(RankReport(0, ready=True), recved={"a"})
    assert balance(rig) == {"busy": 3, "load_failed": 3}
    assert rig.scheduler.miss_stats.total.asked == 8


@pytest.mark.parametrize("loading", [False, True])
def test_a_request_that_ends_first(loading: bool) -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK + 1)
    rig.stored(request, 3)
    if loading:
        assert admit(rig, request) == 3
    rig.scheduler.request_finished(request)
    assert balance(rig) == ({"aborted": 3, "absent": 1} if loading else {"aborted": 4})
    rig.report(
        RankReport(0, ready=True, load_failures=[LoadFailure("a", 0, b"", ("timeout",) * 3)]),
        recved={"a"},
    )
    assert sum(balance(rig).values()) == 4


# What is logged and counted
# -------------------------------------------------------------------------------------------------


def test_one_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    request = rig.request("a", 5 * BLOCK)
    rig.stored(request, 3)
    assert admit(rig, request) == 3
    rig.report(
        RankReport(0, ready=True, load_failures=[LoadFailure("a", 2, b"", ("truncated",))]),
        recved={"a"},
    )
    request.num_computed_tokens = 2 * BLOCK
    rig.step(request)
    with caplog.at_level(logging.DEBUG, "ucm.vllm"):
        rig.scheduler.request_finished(request)
    said = (
        "request a: 20 prompt tokens, 5 blocks looked up, 3 hit, 2 loaded, missed: 2 absent,"
        " 1 truncated; 2 offered"
    )
    assert [record.message for record in caplog.records if record.levelno == logging.DEBUG] == [
        said
    ]


def test_one_line_per_request_of_an_engine_that_is_off(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.readiness.off("the user's wish")
    with caplog.at_level(logging.DEBUG, "ucm.vllm"):
        rig.scheduler.miss_stats.admitted(rig.request("a", 5 * BLOCK), 0)
    said = (
        "request a: 20 prompt tokens, 5 blocks looked up, 0 hit, 0 loaded, missed: 5 disabled;"
        " 0 offered"
    )
    assert [record.message for record in caplog.records if record.levelno == logging.DEBUG] == [
        said
    ]


def test_a_summary_now_and_then_when_something_happened(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.readiness.block_bytes = 1 << 20
    request = rig.request("a", 4 * BLOCK + 1)
    rig.stored(request, 2)
    assert admit(rig, request) == 2
    rig.report(RankReport(0, ready=True), recved={"a"})
    request.num_computed_tokens = 2 * BLOCK
    rig.report(rig.ended(rig.step(request)))

    def said() -> list[str]:
        lines = [record.message for record in caplog.records if "looked up" in record.message]
        caplog.clear()
        return lines

    with caplog.at_level(logging.INFO, "ucm.vllm"):
        rig.step()
        assert said() == []  # not yet
        rig.clock.now += SUMMARY_S
        rig.step()
        (line,) = said()
        assert (
            line == "4 blocks looked up, 2 hit, 2 loaded (2.0 MiB); missed: 2 absent;"
            " 2 published (2.0 MiB), 0 not"
        )
        rig.clock.now += SUMMARY_S
        rig.step()
        assert said() == []  # nothing happened


def test_the_lookups_of_several_parts_are_one_call() -> None:
    rig = Rig(ranks=2)
    asked: list[int] = []

    def explained(ids: Any) -> tuple[int, str]:
        asked.append(len(ids))
        return 4, "absent"

    rig.store.explain_on_prefix = explained  # type: ignore[method-assign]
    lookups = Lookups(rig.later, rig.store, rig.readiness.masks)
    lookup = lookups.start(lambda: [bytes([n]) * 16 for n in range(4)])
    rig.later.run()
    assert (lookup.hits, lookup.reason, asked) == (2, MissReason.OTHER_RANK, [8])
