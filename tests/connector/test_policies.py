"""What a configuration and a request allow: which blocks are loaded for it, and which of its blocks
are offered."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig
from vllm.v1.request import Request

from ucm.config import UcmConfig
from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.metadata import RankReport
from ucm.integration.vllm.connector.scheduler.policies import RequestPolicies, RequestPolicy
from ucm.mode import Mode, ModeWatch
from ucm.reasons import MissReason


def offered(rig: Rig, request: Request) -> int:
    """The blocks of a request that one step offers."""
    return sum(len(dump.blocks) for dump in rig.step(request).dumps)


def claimed(rig: Rig, request: Request, local: int = 0) -> int:
    """The blocks that are loaded for a new request when vLLM admits it."""
    rig.later.run()
    tokens, _ = rig.scheduler.get_num_new_matched_tokens(request, local)
    assert tokens is not None
    blocks = rig.tables.allocate(request, request.num_tokens // BLOCK + 8)
    rig.scheduler.update_state_after_alloc(request, blocks, tokens)
    rig.scheduler.miss_stats.admitted(request, local)  # by the connector
    request.num_computed_tokens = local + tokens
    rig.report(RankReport(0, ready=True), recved={request.request_id} if tokens else None)
    return tokens // BLOCK


def answer(request: Request, tokens: int) -> None:
    """The model has produced tokens."""
    request.append_output_token_ids([7] * tokens)


@pytest.fixture(autouse=True)
def _talkative() -> None:
    throttle._last.clear()


# By request
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "loaded", "stored"),
    [
        (None, 3, 2),
        ({}, 3, 2),
        ({"other": 1}, 3, 2),
        ({"ucm": None}, 3, 2),
        ({"ucm": {}}, 3, 2),
        ({"ucm": {"load": True, "dump": True, "max_load_tokens": None}}, 3, 2),
        ({"ucm": {"dump": False}}, 3, 0),
        ({"ucm": {"skip_save": True}}, 3, 0),
        ({"ucm": {"skip_save": False}}, 3, 2),
        ({"skip_save": True}, 3, 0),
        ({"skip_save": "of another connector"}, 3, 2),
        ({"ucm": {"max_load_tokens": 2 * BLOCK}}, 2, 2),
        ({"ucm": {"max_load_tokens": 3 * BLOCK - 1}}, 2, 2),
        ({"ucm": {"max_load_tokens": BLOCK - 1}}, 0, 2),
        ({"ucm": {"max_load_tokens": 100 * BLOCK}}, 3, 2),
    ],
)
def test_a_request_restricts_its_loads_and_dumps(params: Any, loaded: int, stored: int) -> None:
    rig = Rig()
    request = rig.request("a", 5 * BLOCK + 1, params=params)
    rig.stored(request, 3)
    assert (claimed(rig, request), offered(rig, request)) == (loaded, stored)
    total = rig.scheduler.miss_stats.total
    assert total.missed == {"absent": 2} | ({"disabled": 3 - loaded} if loaded < 3 else {})


@pytest.mark.parametrize("keys", [{"load": False}, {"max_load_tokens": 0}])
def test_a_request_that_loads_nothing_is_stored_for_others(keys: dict[str, Any]) -> None:
    rig = Rig()
    request = rig.request("a", 5 * BLOCK + 1, params={"ucm": keys})
    rig.stored(request, 3)
    assert claimed(rig, request) == 0
    assert rig.scheduler.miss_stats.total.missed == {"disabled": 5}
    assert offered(rig, request) == 2  # the others are there
    rig.scheduler.request_finished(request)
    assert not rig.step().loads


def test_a_request_without_either_is_not_looked_up() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK, params={"ucm": {"load": False, "dump": False}})
    assert rig.later.jobs == []
    assert (claimed(rig, request), offered(rig, request)) == (0, 0)
    assert rig.scheduler.miss_stats.total.missed == {"disabled": 3}


def test_the_limit_counts_from_the_blocks_on_the_device() -> None:
    rig = Rig()
    request = rig.request("a", 6 * BLOCK + 1, params={"ucm": {"max_load_tokens": 2 * BLOCK}})
    rig.stored(request, 6)
    assert claimed(rig, request, local=3 * BLOCK) == 2
    assert rig.scheduler.miss_stats.total.missed == {"disabled": 1}


def test_nothing_is_stored_after_the_end_of_a_request_that_dumps_nothing() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK, params={"ucm": {"dump": False}})
    assert (claimed(rig, request), offered(rig, request)) == (0, 0)
    answer(request, 2 * BLOCK)
    assert offered(rig, request) == 0
    rig.scheduler.request_finished(request)
    assert (rig.step().dumps, rig.scheduler.has_pending_push_work) == ([], False)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"lod": False}, "ucm.lod is not known (known keys: load, dump, skip_save, max_load_tok"),
        ({"load": False, "dump": False, "wait": 1}, "ucm.wait is not known"),
        ({"load": "perhaps"}, "ucm.load: "),
        ({"max_load_tokens": -1}, "ucm.max_load_tokens: "),
        ({"max_load_tokens": True}, "ucm.max_load_tokens: "),
        ("off", "ucm: "),
        ([1], "ucm: "),
    ],
)
def test_wrong_keys_refuse_the_use_of_the_cache_and_not_the_request(
    section: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    with caplog.at_level(logging.WARNING, "ucm.vllm"):
        first = rig.request("secret", 3 * BLOCK, params={"ucm": section})
        second = rig.request("b", 3 * BLOCK, params={"ucm": section})
    rig.stored(first, 2)
    assert [claimed(rig, first), offered(rig, first)] == [0, 0]
    assert [claimed(rig, second), offered(rig, second)] == [0, 0]
    (message,) = [line.message for line in caplog.records if line.levelno == logging.WARNING]
    assert named in message
    assert "request secret does not use the cache" in message
    assert rig.scheduler.miss_stats.total.missed == {"unsupported": 6}


# By configuration
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dump", "blocks"), [("all", [3, 2]), ("prompt", [3, 0]), ("none", [0, 0])]
)
def test_which_blocks_are_stored(dump: str, blocks: list[int]) -> None:
    rig = Rig(dump=dump)
    request = rig.request("a", 4 * BLOCK + 1)
    rig.stored(request, 1)
    assert claimed(rig, request) == 1  # loads are as ever
    first = offered(rig, request)
    answer(request, 2 * BLOCK)
    assert [first, offered(rig, request)] == blocks


@pytest.mark.parametrize(("least", "blocks"), [(0, 3), (3 * BLOCK, 3), (3 * BLOCK + 1, 0)])
def test_a_short_prompt_is_not_stored_however_long_its_answer(least: int, blocks: int) -> None:
    rig = Rig(min_dump_tokens=least)
    request = rig.request("a", 3 * BLOCK)
    assert (claimed(rig, request), offered(rig, request)) == (0, blocks)
    answer(request, 4 * BLOCK)
    assert bool(offered(rig, request)) == bool(blocks)


def test_a_request_cannot_ask_for_more_than_the_configuration() -> None:
    policies = RequestPolicies(UcmConfig(dump="none"))
    request = Rig().request("a", BLOCK, params={"ucm": {"dump": True}})
    assert policies.of(request) == RequestPolicy(None, "none", MissReason.DISABLED)


# By the mode of run time
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "loaded", "stored"),
    [("read-write", 3, 2), ("read-only", 3, 0), ("write-only", 0, 2), ("off", 0, 0)],
)
def test_the_mode_restricts_loads_and_dumps(mode: str, loaded: int, stored: int) -> None:
    watch = ModeWatch(())
    watch.now = Mode(mode)
    rig = Rig(mode=watch)
    request = rig.request("a", 5 * BLOCK + 1)
    assert (rig.later.jobs == []) == (mode == "off")  # else it is looked up
    if mode != "off":
        rig.stored(request, 3)
    assert (claimed(rig, request), offered(rig, request)) == (loaded, stored)
    missed = rig.scheduler.miss_stats.total.missed
    assert missed == ({"absent": 2} if loaded else {"disabled": 5})


def test_blocks_of_a_running_request_are_offered_once_the_mode_allows_it() -> None:
    watch = ModeWatch(())
    watch.now = Mode.READ_ONLY
    rig = Rig(mode=watch)
    request = rig.request("a", 3 * BLOCK + 1)
    assert (claimed(rig, request), offered(rig, request)) == (0, 0)
    watch.now = Mode.READ_WRITE
    answer(request, BLOCK)
    assert offered(rig, request) == 4


def test_the_blocks_of_a_request_that_ends_are_not_stored_in_read_only() -> None:
    watch = ModeWatch(())
    rig = Rig(mode=watch)
    request = rig.request("a", 3 * BLOCK + 1)
    assert (claimed(rig, request), offered(rig, request)) == (0, 3)
    answer(request, BLOCK)
    request.num_computed_tokens = 4 * BLOCK
    watch.now = Mode.OFF
    rig.scheduler.request_finished(request)
    assert rig.step().dumps == []
