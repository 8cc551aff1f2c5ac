"""Blocks of ended requests that wait: for a check of an adapter's files, or for staging."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

from ucm.config import UcmConfig
from ucm.integration.vllm.connector.groups import Group, Reach
from ucm.integration.vllm.connector.identity.keys import (
    RECHECK_S,
    AdapterDigests,
    ExtraKeys,
)
from ucm.integration.vllm.connector.metadata import RankReport, UCMConnectorMetadata
from ucm.integration.vllm.connector.scheduler import dumps
from ucm.integration.vllm.connector.scheduler.dumps import BUSY_PAUSE_S, ROOM_S, free_blocks
from ucm.metrics.names import UNSTORED


class Looks(AdapterDigests):
    """Adapters whose files are checked when a test requests it."""

    def __init__(self) -> None:
        self.looked: float | None = None
        self.changed = False

    def payload(self, lora_request: Any) -> bytes:
        return b"adapter"

    def current(self, lora_request: Any, since: float) -> bool | None:
        if self.changed:
            return False
        return True if self.looked is not None and self.looked > since else None


class AdapterRig(Rig):
    """A scheduler side whose requests have an adapter."""

    def __init__(self, **settings: Any) -> None:
        self.looks = Looks()
        super().__init__(extra_keys=ExtraKeys(BLOCK, self.looks), **settings)

    def request(
        self, name: str, length: int, seed: int = 0, adapter: LoRARequest | None = None
    ) -> Request:
        return super().request(name, length, seed, adapter or LoRARequest("x", 1, "/somewhere"))

    def look(self) -> None:
        """A look at the files, which finds them as they were."""
        self.clock.now += 0.001
        self.looks.looked = self.clock.now
        self.clock.now += 0.001

    def free_blocks(self) -> int:
        """Blocks that vLLM could give to others."""
        free: int = self.tables.block_pool.get_num_free_blocks()
        return free


def offered(plan: UCMConnectorMetadata) -> list[tuple[int, int]]:
    """(first ordinal, blocks) of each dump."""
    return [(dump.first, len(dump.blocks)) for dump in plan.dumps]


def test_blocks_are_offered_after_a_check_that_began_when_they_were_computed() -> None:
    rig = AdapterRig()
    request = rig.request("a", 4 * BLOCK)
    rig.admit(request)
    rig.look()
    assert offered(rig.step(request)) == [], "this step computes them"
    request.append_output_token_ids([1] * BLOCK)
    assert offered(rig.step(request)) == [], "no check of the files since"
    rig.look()
    request.append_output_token_ids([1] * BLOCK)
    assert offered(rig.step(request)) == [(0, 4)], (
        "of the two output blocks one was computed after the look began"
    )
    rig.look()
    request.append_output_token_ids([1])
    assert offered(rig.step(request)) == [(4, 1)]


def test_a_change_ends_the_offers_of_a_request() -> None:
    rig = AdapterRig()
    request = rig.request("a", 4 * BLOCK)
    rig.admit(request)
    rig.step(request)
    request.append_output_token_ids([1])
    rig.step(request)
    rig.looks.changed = True
    request.append_output_token_ids([1])
    assert offered(rig.step(request)) == []
    rig.looks.changed = False
    rig.look()
    request.append_output_token_ids([1] * BLOCK)
    assert offered(rig.step(request)) == []
    rig.scheduler.request_finished(request)
    rig.look()
    assert offered(rig.step()) == []


def ended_early(rig: AdapterRig) -> None:
    """A request that ends before anyone looked."""
    request = rig.request("a", 4 * BLOCK + 1)
    rig.admit(request)
    rig.step(request)
    rig.scheduler.request_finished(request)
    rig.tables.free(request)


def test_the_blocks_of_a_request_that_ended_are_held_and_offered() -> None:
    rig = AdapterRig()
    ended_early(rig)
    assert rig.free_blocks() == rig.tables.block_pool.num_gpu_blocks - 1, "they are vLLM's again"
    assert rig.scheduler.has_pending_push_work
    assert offered(rig.step()) == []
    rig.look()
    plan = rig.step()
    assert offered(plan) == [(0, 4)]
    rig.report(rig.ended(plan))
    assert not rig.scheduler.has_pending_push_work


@pytest.mark.parametrize("why", ["changed", "late", "reset", "off", "taken"])
def test_held_blocks_are_released(why: str) -> None:
    rig = AdapterRig()
    ended_early(rig)
    if why == "changed":
        rig.looks.changed = True
    elif why == "late":
        rig.clock.now += RECHECK_S
    elif why == "reset":
        rig.scheduler.reset_cache()
    elif why == "taken":
        rig.tables.tables["other"] = rig.tables.block_pool.get_new_blocks(rig.free_blocks())
    else:
        rig.readiness.off("the user's wish")
    assert offered(rig.step()) == []
    rig.looks.changed = False
    rig.look()
    assert offered(rig.step()) == []


def test_nothing_is_held_that_is_stored_already() -> None:
    rig = AdapterRig()
    ended_early(rig)
    rig.look()
    rig.report(rig.ended(rig.step()))
    again = rig.request("b", 4 * BLOCK + 1)
    rig.stored(again, 4)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(again, 0)
    rig.scheduler.update_state_after_alloc(again, rig.tables.allocate(again, 6), 0)
    rig.step(again)
    rig.scheduler.request_finished(again)
    rig.tables.free(again)
    assert not rig.scheduler.has_pending_push_work


WINDOW = (Group(0, 0, BLOCK, reach=Reach("window", 2 * BLOCK)),)


def slide(rig: AdapterRig, request: Request) -> UCMConnectorMetadata:
    """The next step of a request, before which vLLM takes the blocks that left its window: of at
    most three blocks of its prompt, or of one further token."""
    pool, table = rig.tables.block_pool, rig.tables.tables[request.request_id]
    if first := request.num_computed_tokens and WINDOW[0].first_seen(request.num_computed_tokens):
        left = [block for block in table[:first] if not block.is_null]
        table[:first] = [pool.null_block] * first
        pool.free_blocks(left)
    if request.num_computed_tokens == request.num_tokens:
        request.append_output_token_ids([1])
    return rig.step(request, most=3 * BLOCK)


def test_blocks_that_leave_a_window_before_a_check_are_offered_after_it() -> None:
    rig = AdapterRig(groups=WINDOW)
    request = rig.request("a", 7 * BLOCK)
    rig.admit(request)
    for _ in range(3):
        assert offered(slide(rig, request)) == [], "no check of the files"
    found = set[int]()
    for _ in range(4):
        rig.look()
        plan = slide(rig, request)
        for dump in plan.dumps:
            found |= set(range(dump.first, dump.first + len(dump.blocks)))
        rig.report(rig.ended(plan))
    assert found == set(range(7))
    assert not rig.scheduler._deferred


@pytest.mark.parametrize("then", ["looked", "changed", "aborted", "preempted"])
def test_a_check_before_the_end_of_the_step_does_not_count_for_blocks_that_leave_a_window(
    then: str,
) -> None:
    """Steps overlap, so the next one is planned before."""
    rig = AdapterRig(groups=WINDOW)
    request: Any = rig.request("a", 3 * BLOCK)
    rig.admit(request)
    slide(rig, request)
    for under_way in (3 * BLOCK, 3 * BLOCK + 1):
        request.num_in_flight_tokens = under_way
        rig.look()
        assert offered(slide(rig, request)) == []
    if then == "aborted":
        rig.scheduler.request_finished(request)
        rig.tables.free(request)
    elif then == "preempted":
        request.num_preemptions += 1
        request.num_computed_tokens, request.num_in_flight_tokens = 0, 0
    if then in ("aborted", "preempted"):
        for _ in range(2):
            rig.look()
            assert offered(rig.step()) == []
        assert not rig.scheduler._deferred
        return
    request.num_in_flight_tokens = 0
    assert offered(slide(rig, request)) == [], "no check of the files since"
    rig.looks.changed = then == "changed"
    rig.look()
    assert ((0, 1) in offered(slide(rig, request))) is (then == "looked")


def test_items_of_every_new_request_are_reported() -> None:
    """Also of those that are left alone, whose data before the first computed token play no
    part."""
    told: list[tuple[Any, int]] = []
    rig = Rig()
    rig.extra_keys.used = lambda request, computed=0: told.append((request, computed))
    request = rig.request("a", 2 * BLOCK)
    request.mm_features = [object()]
    stripped = NewRequestData("a", [], [object()], None, None, ([],), 3, None)  # type: ignore[list-item]
    stranger = NewRequestData("b", [], [object()], None, None, ([],), 5, None)  # type: ignore[list-item]
    plain = NewRequestData("c", [], [], None, None, ([],), 0, None)
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [stripped, stranger, plain]
    output.num_scheduled_tokens = {"a": 1, "b": 1, "c": 1}
    rig.scheduler.build_connector_meta(output)
    assert told == [(request, 0), (stranger, 5)]


def with_little_room(blocks: int) -> tuple[Rig, UCMConnectorMetadata]:
    """A request of ``blocks`` blocks whose one step found room for two of them."""
    rig = Rig()
    rig.report(RankReport(0, ready=True, attempt=1, free_slots=2))
    request = rig.request("a", blocks * BLOCK)
    rig.admit(request)
    plan = rig.step(request)
    assert offered(plan) == [(0, 2)]
    rig.scheduler.request_finished(request)
    rig.tables.free(request)
    return rig, plan


def stored(rig: Rig, plan: UCMConnectorMetadata, free: int, busy: bool = False) -> None:
    """A rank's dumps of a plan ended, or were refused; it has ``free`` free slots."""
    failed = tuple(range(len(plan.dumps[0].blocks))) if busy else ()
    rig.report(replace(rig.ended(plan, failed=failed, busy=busy), free_slots=free))


def unstored(rig: Rig) -> dict[str, int]:
    """Blocks that found no room, by reason."""
    counted = rig.scheduler.miss_stats.take() or {}
    mine = [name for name in counted if name.startswith(UNSTORED)]
    return {name.removeprefix(UNSTORED): counted[name] for name in mine}


def test_a_block_without_room_is_offered_after_its_request_ended() -> None:
    rig, plan = with_little_room(7)
    assert rig.scheduler.has_pending_push_work
    assert offered(rig.step()) == [], "there is no room yet"
    for first, blocks in [(2, 2), (4, 2)]:
        stored(rig, plan, free=2)
        plan = rig.step()
        assert offered(plan) == [(first, blocks)]
    stored(rig, plan, free=0, busy=True)
    assert unstored(rig) == {"busy": 2}
    assert rig.scheduler.has_pending_push_work
    rig.clock.now += BUSY_PAUSE_S
    rig.report(RankReport(0, ready=True, attempt=1, last_job=plan.dumps[0].job, free_slots=5))
    plan = rig.step()
    assert offered(plan) == [(4, 3)], "what was refused is offered again"
    stored(rig, plan, free=5)
    assert not rig.scheduler.has_pending_push_work
    assert rig.scheduler.dumps.published_blocks == 7
    assert unstored(rig) == {}


def test_blocks_that_vllm_reuses_before_there_is_room_are_not_offered() -> None:
    rig, plan = with_little_room(7)
    # Eight that the request did not use, and its last three.
    taken = rig.tables.tables["other"] = rig.tables.block_pool.get_new_blocks(8 + 3)
    stored(rig, plan, free=10)
    plan = rig.step()
    assert offered(plan) == [(2, 2)]
    assert {block.block_id for block in taken}.isdisjoint(plan.dumps[0].blocks.tolist())
    assert unstored(rig) == {"overwritten": 3}
    stored(rig, plan, free=10)
    assert not rig.scheduler.has_pending_push_work


@pytest.mark.parametrize("room", ["none", "late"])
def test_an_idle_engine_steps_no_longer_than_a_second_without_room(room: str) -> None:
    rig, plan = with_little_room(7)
    for _ in range(5):
        assert offered(rig.step()) == []
        rig.clock.now += ROOM_S / 5
        rig.report(RankReport(0, ready=True, attempt=1, last_job=plan.dumps[0].job, free_slots=0))
    assert not rig.scheduler.has_pending_push_work
    assert offered(rig.step()) == []
    if room == "late":  # for the next request, or the end of a dump
        stored(rig, plan, free=10)
        assert rig.scheduler.has_pending_push_work
        assert offered(rig.step()) == [(2, 5)]
        assert unstored(rig) == {}
        return
    rig.clock.now += UcmConfig().deadlines.dump_s
    rig.report(RankReport(0, ready=True, attempt=1, last_job=plan.dumps[0].job, free_slots=0))
    assert offered(rig.step()) == []
    assert unstored(rig) == {"ended": 5}
    stored(rig, plan, free=10)
    assert offered(rig.step()) == []


def test_vllm_reuses_held_blocks_last() -> None:
    """Those that wait are moved behind these before it reaches them, in their order."""
    rig, _ = with_little_room(7)
    pool = rig.tables.block_pool
    held = [block.block_id for block in rig.scheduler._deferred._blocks()]
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks() - len(held)))
    pool.touch([pool.blocks[at] for at in held])
    pool.free_blocks([pool.blocks[at] for at in held[::-1]])  # they stand first: without a hash
    assert [block.block_id for block in free_blocks(pool)][: len(held)] == held[::-1]
    for at in held:
        pool.blocks[at]._block_hash = object()  # type: ignore[assignment]
    rig.scheduler._deferred.spare(3, 0)
    order = [block.block_id for block in free_blocks(pool)]
    assert order[-len(held) :] == held[::-1]
    assert len(order) == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("most", [0, 2, 4, 9])
def test_no_more_than_the_allowed_blocks_are_kept(most: int) -> None:
    """The first ones, of which the others are of no use without; in the step alone."""
    rig, _ = with_little_room(7)
    pool, deferred = rig.tables.block_pool, rig.scheduler._deferred
    free, held = pool.get_num_free_blocks(), list(deferred._blocks())
    deferred.spare(free - len(held), most)
    assert pool.get_num_free_blocks() == free, "there are enough others"
    for _ in range(2):  # for two requests
        deferred.spare(free, most)
        assert [block.ref_cnt for block in held] == [1] * min(most, 5) + [0] * max(5 - most, 0)
    rig.step()
    assert pool.get_num_free_blocks() == free
    deferred.spare(free, most)
    rig.scheduler.reset_cache()
    assert pool.get_num_free_blocks() == free


def test_the_number_of_waiting_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "MOST_BLOCKS", 3)
    rig, plan = with_little_room(7)
    stored(rig, plan, free=10)
    assert offered(rig.step()) == [(2, 3)]
    assert unstored(rig) == {"ended": 2}


def test_blocks_that_are_refused_again_and_again_do_not_wait_for_ever() -> None:
    """By a store without room that says it has some, for fewer blocks than wait."""
    rig, plan = with_little_room(7)
    stored(rig, plan, free=2)
    for _ in range(int(2 * ROOM_S / BUSY_PAUSE_S)):
        if not rig.scheduler.has_pending_push_work:
            break
        plan = rig.step()
        if plan.dumps:
            stored(rig, plan, free=2, busy=True)
        rig.clock.now += BUSY_PAUSE_S
    assert not rig.scheduler.has_pending_push_work
    assert rig.scheduler.dumps.published_blocks == 2


# Two ranks, of which one has no room
# --------------------------------------------------------------------------------------------------


def half_refused(rig: Rig, room: int = 10) -> tuple[Request, UCMConnectorMetadata]:
    """A request of seven blocks and the step that offers ``room`` of them. One rank refuses the
    job, the other has read the blocks and not published them."""
    for rank in range(2):
        rig.report(RankReport(rank, ready=True, attempt=1, free_slots=room))
    request = rig.request("a", 7 * BLOCK)
    rig.admit(request)
    plan = rig.step(request)
    job, blocks = plan.dumps[0].job, min(room, 7)
    assert offered(plan) == [(0, blocks)]
    refused = rig.ended(plan, 0, failed=tuple(range(blocks)), busy=True)
    read = RankReport(1, ready=True, attempt=1, last_job=job, staged=[job])
    rig.report(replace(refused, free_slots=0), replace(read, free_slots=0))
    return request, plan


def published(rig: Rig, plan: UCMConnectorMetadata) -> UCMConnectorMetadata:
    """The other rank has published the blocks, and there is room again: the next step."""
    rig.report(rig.ended(plan, 1))
    rig.clock.now += BUSY_PAUSE_S
    for rank in range(2):
        rig.report(RankReport(rank, ready=True, attempt=1, free_slots=10, last_job=10))
    return rig.step()


@pytest.mark.parametrize("ends", [False, True])
def test_refused_blocks_of_a_window_are_compared_until_every_rank_has_published(ends: bool) -> None:
    """A step writes three of them, after every rank has read them or refused them, and gives them
    back."""
    rig = Rig(ranks=2, groups=WINDOW)
    request, plan = half_refused(rig)
    pool, table = rig.tables.block_pool, rig.tables.tables["a"]
    left, table[:3] = table[:3], [pool.null_block] * 3
    pool.free_blocks(left)
    if ends:
        rig.scheduler.request_finished(request)
        rig.tables.free(request)
    pool.touch(left)  # without a hash: it is no other request with the same text
    assert rig.step().jobs_to_flush == [], "every rank has read them or refused them"
    pool.free_blocks(left)
    assert offered(published(rig, plan)) == [(3, 4)]


def test_offered_blocks_of_an_ended_request_are_compared_while_they_may_be_offered_again() -> None:
    """A step writes the first one, which was offered and is refused."""
    rig = Rig(ranks=2)
    request, plan = half_refused(rig, room=2)
    first = rig.tables.tables["a"][:1]
    rig.scheduler.request_finished(request)
    rig.tables.free(request)
    rig.step()
    rig.tables.block_pool.touch(first)
    rig.step()
    rig.tables.block_pool.free_blocks(first)
    assert offered(published(rig, plan)) == [(1, 6)]


def test_blocks_refused_before_a_reset_are_not_offered_after_it() -> None:
    """The weights in memory may be others, and the blocks have the name of the new ones."""
    rig = Rig(ranks=2, groups=WINDOW)
    request, plan = half_refused(rig)
    rig.scheduler.request_finished(request)
    rig.tables.free(request)
    rig.scheduler.reset_cache()
    rig.readiness.request_weights_check()
    rig.weights_checked(rig.step())
    assert offered(published(rig, plan)) == []


def test_refused_blocks_that_their_preempted_request_gets_again_are_not_offered() -> None:
    """It computes or loads them anew, which may take some steps."""
    rig = Rig(ranks=2, groups=WINDOW)
    request, plan = half_refused(rig)
    table = rig.tables.tables["a"]
    rig.tables.free(request)
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    assert offered(rig.step()) == []
    rig.report(rig.ended(plan, 1))
    rig.tables.tables["a"] = table
    rig.tables.block_pool.touch(table)
    assert offered(published(rig, plan)) == []


def test_a_check_before_the_end_of_another_requests_step_does_not_count_for_its_prefix() -> None:
    """vLLM's prefix cache names blocks that an earlier step is still to compute."""
    rig = AdapterRig()
    first: Any = rig.request("a", 4 * BLOCK + 1)
    rig.admit(first)
    rig.step(first)
    first.num_in_flight_tokens = 4 * BLOCK + 1
    second: Any = rig.request("b", 5 * BLOCK + 1)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(second, 4 * BLOCK)
    blocks = rig.tables.tables["a"][:4]
    rig.tables.allocate(second, 6)
    rig.tables.tables["b"][:4] = blocks
    rig.tables.block_pool.touch(blocks)
    rig.scheduler.update_state_after_alloc(second, rig.tables.get_blocks("b"), 0)
    second.num_computed_tokens = 4 * BLOCK
    assert offered(rig.step(second)) == []
    second.num_in_flight_tokens = BLOCK + 1
    rig.look()  # before the step of the first has ended
    second.append_output_token_ids([1])
    assert offered(rig.step(second)) == []
    first.num_in_flight_tokens = 0
    second.num_in_flight_tokens = 1
    second.append_output_token_ids([1])
    assert offered(rig.step(second)) == [], "no check of the files since"
    rig.look()
    second.append_output_token_ids([1])
    second.num_in_flight_tokens = 1
    assert offered(rig.step(second)) == [(0, 5)]


@pytest.mark.parametrize("again", [False, True])
def test_blocks_that_their_preempted_request_gets_again_are_read_before_it_writes(
    again: bool,
) -> None:
    """They waited when it was preempted, and were offered after that. They may have their old
    places in its table, or others."""
    rig = AdapterRig(groups=WINDOW)
    request = rig.request("a", 7 * BLOCK)
    rig.admit(request)
    for _ in range(3):
        slide(rig, request)  # some blocks have left, and their step has ended
    rig.tables.free(request)
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    rig.look()
    plan = rig.step()
    assert plan.dumps
    dump, pool = plan.dumps[0], rig.tables.block_pool
    mine = [pool.blocks[at] for at in dump.blocks.tolist()]
    pool.touch(mine)  # without a hash: handed out to be written
    rig.tables.tables["a"] = [pool.null_block] * (dump.first + (not again)) + mine
    assert dump.job in rig.step().jobs_to_flush


def test_a_longer_prefix_of_a_preempted_request_does_not_end_the_step_of_its_blocks() -> None:
    rig = AdapterRig(groups=WINDOW)
    request: Any = rig.request("a", 7 * BLOCK)
    rig.admit(request)
    slide(rig, request)
    rig.tables.free(request)
    request.num_preemptions += 1
    request.num_computed_tokens, request.num_in_flight_tokens = 6 * BLOCK, 3 * BLOCK
    rig.step()
    rig.look()
    assert offered(rig.step()) == []
