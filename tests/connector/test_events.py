"""Events of stored blocks: a router that follows them knows which blocks this engine can load."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.request import Request

from ucm.integration.vllm.connector.groups import ABSENT, UNKNOWN, Group, Reach
from ucm.integration.vllm.connector.metadata import (
    LoadFailure,
    RankReport,
    UCMConnectorMetadata,
    join_keys,
    split_keys,
)
from ucm.integration.vllm.connector.scheduler.events import BlockEvents
from ucm.integration.vllm.connector.scheduler.lookup import Found, Lookup
from ucm.reasons import MissReason
from ucm.store import part_mask, record_ids


def external(request: Request) -> list[Any]:
    """The hashes of a request's blocks as events have them."""
    return list(map(maybe_convert_block_hash, request.block_hashes))


class Router:
    """The blocks that are stored, by vLLM's hashes, as the events say."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.index = rig, set[Any]()
        self.events: list[Any] = []

    def update(self) -> list[Any]:
        """Read the events of a step."""
        events = self.rig.scheduler.take_events()
        for event in events:
            if isinstance(event, BlockStored):
                self.index.update(event.block_hashes)
            else:
                assert isinstance(event, BlockRemoved)
                assert set(event.block_hashes) <= self.index, "only what was reported is removed"
                self.index.difference_update(event.block_hashes)
        self.events += events
        return events

    def knows(self, request: Request) -> list[bool]:
        """Whether each full block of a request is in the index."""
        self.update()
        return [known in self.index for known in external(request)]


def rig_with_events(limit: int = 1 << 10, **settings: Any) -> tuple[Rig, Router]:
    """A scheduler side that makes events, and a router that reads them."""
    events = BlockEvents((Group(0, 0, BLOCK),), lambda: rig.clock.now, limit=limit)
    rig = Rig(events=events, **settings)
    return rig, Router(rig)


def computed(rig: Rig, request: Request) -> UCMConnectorMetadata:
    """vLLM admits a request, loads its hit, and computes the rest; returns the plan of that
    step."""
    rig.later.run()
    tokens, _ = rig.scheduler.get_num_new_matched_tokens(request, 0)
    assert tokens is not None
    table = rig.tables.allocate(request, request.num_tokens // BLOCK + 1)
    rig.scheduler.update_state_after_alloc(request, table, tokens)
    rig.report(RankReport(0, ready=True), recved={request.request_id} if tokens else None)
    request.num_computed_tokens = tokens
    return rig.step(request)


def published(rig: Rig, plan: UCMConnectorMetadata) -> None:
    """Every rank has published the blocks of a plan."""
    for dump in plan.dumps:
        for rank in range(rig.ranks):
            rig.store.ids.update(record_ids(split_keys(dump.keys), part_mask(0, 0, rank)))
    rig.clock.now += 1
    rig.report(*(rig.ended(plan, rank) for rank in range(rig.ranks)))


def stored_by_itself(rig: Rig, request: Request) -> None:
    """A request computes and dumps its blocks."""
    published(rig, computed(rig, request))


def looked_up(rig: Rig, name: str, *args: Any, **options: Any) -> Request:
    """A new request whose lookup has its answer."""
    rig.clock.now += 1
    request = rig.request(name, *args, **options)
    rig.later.run()
    return request


def evict(rig: Rig, request: Request, first: int, end: int) -> None:
    """The store removes these blocks of a request."""
    keys = rig.keys_of(request)[first:end]
    rig.store.ids.difference_update(record_ids(keys, part_mask(0, 0, 0)))


def test_a_stored_block_is_reported_when_every_rank_has_published_it() -> None:
    rig, router = rig_with_events(ranks=2)
    request = rig.request("a", 3 * BLOCK + 1)
    plan = computed(rig, request)
    rig.report(rig.ended(plan, rank=0))
    assert router.update() == []
    rig.report(rig.ended(plan, rank=1))
    (event,) = router.update()
    assert event == BlockStored(
        block_hashes=external(request),
        parent_block_hash=None,
        token_ids=list(request.all_token_ids[: 3 * BLOCK]),
        block_size=BLOCK,
        lora_id=None,
        medium=MEDIUM_STORAGE,
        lora_name=None,
        extra_keys=[None] * 3,
        group_idx=0,
    )
    assert router.update() == []


def test_blocks_that_follow_name_their_parent_and_their_own_tokens() -> None:
    rig, _ = rig_with_events()
    request = rig.request("a", 2 * BLOCK, salt="red", adapter=LoRARequest("fine", 3, "/nowhere"))
    hashes, size = external(request), BLOCK
    assert len(hashes) == 2
    group = Group(0, 2, BLOCK)
    events = BlockEvents((group,), rig.clock, {2: {"kv_cache_spec_kind": "mla"}})
    events.bind(rig.tables.block_pool)
    events.open(("host",))
    events.stored(request, group, {1: b"second"})
    events.stored(request, group, {0: b"first", 1: b"second"})
    second, first = events.take(lambda keys: ())
    assert (second.block_hashes, second.parent_block_hash) == (hashes[1:], hashes[0])
    assert list(second.token_ids) == list(request.all_token_ids[size:])
    assert (first.block_hashes, first.parent_block_hash) == (hashes[:1], None)
    shown = getattr(kv_cache_utils, "to_event_extra_keys", list)  # older vLLMs have none
    extra = [
        generate_block_hash_extra_keys(request, at * size, at * size + size, 0)[0] for at in (0, 1)
    ]
    assert [*first.extra_keys, *second.extra_keys] == shown(extra)
    assert first.extra_keys != second.extra_keys  # the salt is of the first block
    for event in (first, second):
        assert (event.lora_id, event.lora_name, event.group_idx) == (3, "fine", 2)
        assert (event.medium, event.kv_cache_spec_kind) == (MEDIUM_CPU, "mla")
    events.removed([b"first", b"first", b"unknown"])
    assert events.take(lambda keys: ()) == [
        BlockRemoved(block_hashes=hashes[:1], medium=MEDIUM_CPU, group_idx=2)
    ]


def test_a_block_has_the_last_of_its_hashes_where_hashes_are_finer() -> None:
    rig, _ = rig_with_events()
    request = rig.request("a", 4 * BLOCK)
    group = Group(0, 0, 2 * BLOCK)
    events = BlockEvents((group,), rig.clock)
    events.bind(rig.tables.block_pool)
    events.stored(request, group, {0: b"0", 1: b"1"})
    (event,) = events.take(lambda keys: ())
    assert event.block_hashes == external(request)[1::2]
    assert (event.block_size, len(event.token_ids)) == (2 * BLOCK, 4 * BLOCK)


def test_blocks_that_a_lookup_finds_are_reported_once() -> None:
    rig, router = rig_with_events()
    request = rig.request("a", 5 * BLOCK + 1)
    rig.stored(request, 3)
    assert router.update() == []  # no answer yet
    rig.later.run()
    assert router.knows(request) == [True] * 3 + [False] * 2
    looked_up(rig, "b", 5 * BLOCK + 1)
    assert router.update() == []
    assert len(router.events) == 1


def test_evicted_blocks_are_removed_when_the_next_lookup_does_not_find_them() -> None:
    rig, router = rig_with_events()
    request = rig.request("a", 4 * BLOCK)
    stored_by_itself(rig, request)
    assert router.knows(request) == [True] * 4
    evict(rig, request, 1, 2)
    assert router.knows(request) == [True] * 4  # nothing says so yet
    again = looked_up(rig, "b", 4 * BLOCK)
    assert router.knows(again) == [True, False, False, False]  # blocks behind a gap are no hits
    assert isinstance(router.events[-1], BlockRemoved)
    assert router.events[-1].group_idx == 0
    stored_by_itself(rig, again)
    assert router.knows(again) == [True] * 4


def test_a_lookup_from_before_a_dump_removes_nothing() -> None:
    rig, router = rig_with_events()
    first = rig.request("a", 3 * BLOCK)
    rig.clock.now += 1
    second = rig.request("b", 3 * BLOCK)
    published(rig, computed(rig, first))  # the answer to both was that nothing is there
    assert router.knows(second) == [True] * 3


@pytest.mark.parametrize("reason", ["io_error", "unhealthy", "timeout"])
def test_a_store_that_does_not_work_removes_nothing(reason: str) -> None:
    rig, router = rig_with_events()
    request = rig.request("a", 3 * BLOCK)
    stored_by_itself(rig, request)
    rig.store.explain_on_prefix = lambda ids: (-1, reason)  # type: ignore[method-assign]
    looked_up(rig, "b", 3 * BLOCK)
    assert router.knows(request) == [True] * 3


def test_a_refused_record_is_removed_and_found_again_only_when_it_was_written() -> None:
    rig, router = rig_with_events()
    request = rig.request("a", 3 * BLOCK + 1)
    rig.stored(request, 3)
    rig.later.run()
    assert router.knows(request) == [True] * 3
    bad = rig.keys_of(request)[1]
    failure = LoadFailure("a", 1, join_keys([bad]), ("bad_checksum",))
    rig.report(RankReport(0, ready=True, load_failures=[failure]))
    assert router.knows(request) == [True, False, True]
    again = looked_up(rig, "b", 3 * BLOCK + 1)  # the store's lookup finds it, as it is there
    assert router.knows(again) == [True, False, True]
    stored_by_itself(rig, again)
    assert router.knows(again) == [True] * 3


def test_a_reset_removes_everything_until_it_is_found_again() -> None:
    rig, router = rig_with_events()
    request = rig.request("a", 3 * BLOCK)
    plan = computed(rig, request)  # published after the reset, under an identity of before it
    other = rig.request("b", 2 * BLOCK, seed=1)
    rig.stored(other, 2)
    rig.later.run()
    assert router.knows(other) == [True] * 2
    rig.tables.block_pool.cached_block_hash_to_block = BlockHashToBlockMap()
    rig.step()
    assert router.knows(other) == [False] * 2
    published(rig, plan)
    assert router.knows(request) == [False] * 3
    rig.readiness.request_weights_check()
    rig.weights_checked(rig.step())
    found = looked_up(rig, "c", 2 * BLOCK, seed=1)
    assert router.knows(found) == [True] * 2


def test_the_oldest_are_removed_at_the_limit() -> None:
    rig, router = rig_with_events(limit=4)
    first = rig.request("a", 3 * BLOCK)
    stored_by_itself(rig, first)
    second = rig.request("b", 3 * BLOCK, seed=1)
    stored_by_itself(rig, second)
    assert router.knows(second) == [True] * 3
    assert sum(router.knows(first)) == 1
    assert len(router.index) == 4


def test_an_engine_without_events_builds_none() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK)
    stored_by_itself(rig, request)
    looked_up(rig, "b", 3 * BLOCK)
    assert rig.scheduler.take_events() == []
    assert not rig.scheduler._events._lookups


@pytest.mark.parametrize("seed", range(40))
def test_after_each_lookup_the_router_knows_what_is_a_hit(seed: int) -> None:
    """Random prompts with common beginnings, dumps and evictions."""
    source = random.Random(seed)
    rig, router = rig_with_events(blocks=400)
    for number in range(12):
        length, family = source.randrange(1, 8) * BLOCK, source.randrange(3)
        request = looked_up(rig, f"r{number}", length, seed=family)
        ids = record_ids(rig.keys_of(request), part_mask(0, 0, 0))
        hits = rig.store.lookup_on_prefix(ids) + 1
        assert router.knows(request) == [at < hits for at in range(length // BLOCK)]
        if source.random() < 0.6:
            stored_by_itself(rig, request)
            assert router.knows(request) == [True] * (length // BLOCK)
        if rig.store.ids and source.random() < 0.5:
            rig.store.ids.discard(source.choice(sorted(rig.store.ids)))
        rig.scheduler.request_finished(request)


# Several groups
# --------------------------------------------------------------------------------------------------

#: Full attention, and windows whose blocks are half as large: two of them in a block of the store.
WHOLE = Group(0, 0, 2 * BLOCK)
WINDOWS = tuple(Group(1 + at, 1, BLOCK, at, 2, Reach("window", 9)) for at in (0, 1))


def test_every_groups_blocks_have_its_size_and_number() -> None:
    rig, _ = rig_with_events()
    request = rig.request("a", 6 * BLOCK)
    events = BlockEvents((WHOLE, *WINDOWS), rig.clock, {1: {"kv_cache_spec_sliding_window": 9}})
    events.bind(rig.tables.block_pool)
    hashes, tokens = external(request), list(request.all_token_ids)
    events.stored(request, WHOLE, {1: b"whole"})
    events.stored(request, WINDOWS[0], {1: b"even"})
    events.stored(request, WINDOWS[1], {1: b"odd"})
    whole, even, odd = events.take(lambda keys: ())
    shown = [(one.group_idx, one.block_size, one.block_hashes) for one in (whole, even, odd)]
    assert shown == [
        (0, 2 * BLOCK, [hashes[3]]),
        (1, BLOCK, [hashes[2]]),
        (1, BLOCK, [hashes[3]]),
    ]
    parents = [hashes[1], hashes[1], hashes[2]]
    assert [one.parent_block_hash for one in (whole, even, odd)] == parents
    assert list(whole.token_ids) == tokens[2 * BLOCK : 4 * BLOCK]
    assert list(odd.token_ids) == tokens[3 * BLOCK : 4 * BLOCK]
    assert (whole.kv_cache_spec_sliding_window, odd.kv_cache_spec_sliding_window) == (None, 9)
    events.removed([b"even", b"whole", b"odd"])
    assert events.take(lambda keys: ()) == [
        BlockRemoved([hashes[2], hashes[3]], MEDIUM_STORAGE, group_idx=1),
        BlockRemoved([hashes[3]], MEDIUM_STORAGE, group_idx=0),
    ]


def test_a_lookup_returns_the_blocks_of_each_group() -> None:
    """Of a whole prefix up to a refused block; of windows each block; nothing of what it did not
    look up."""
    rig, _ = rig_with_events()
    request = rig.request("a", 8 * BLOCK)
    groups = (WHOLE, *WINDOWS)
    events = BlockEvents(groups, rig.clock)
    events.bind(rig.tables.block_pool)
    keys = [bytes([at]) * 16 for at in range(4)]
    parts = [record_ids(keys, group.mask) if group.mask else keys for group in groups]
    for group, part in zip(groups, parts, strict=True):
        events.stored(request, group, {0: part[0], 3: part[3]})
    events.take(lambda keys: ())
    rig.clock.now += 1
    lookup = Lookup(rig.clock)
    lookup.hashed(keys)
    events.follow(request, lookup)
    assert events.take(lambda keys: ()) == []
    there, gone, silent = 0, ABSENT, UNKNOWN
    tables = (
        bytes((there, there, there, gone)),
        bytes((gone, there, there, silent)),
        bytes((silent, there, there, gone)),
    )
    lookup.answer(Found(2, MissReason.ABSENT, bytes(2), tables))
    bad = {parts[0][1], parts[1][1]}
    news = events.take(lambda keys: [at for at, key in enumerate(keys) if key in bad])
    hashes = external(request)
    removed = [(one.group_idx, one.block_hashes) for one in news if isinstance(one, BlockRemoved)]
    assert sorted(removed) == sorted([(0, [hashes[7]]), (1, [hashes[0]]), (1, [hashes[7]])])
    stored = [(one.group_idx, one.block_hashes) for one in news if isinstance(one, BlockStored)]
    # the window's blocks behind the refused one are of use without it
    assert sorted(stored) == sorted([(1, [hashes[3]]), (1, [hashes[4]]), (1, [hashes[5]])])
