"""A working set above the store's limit: what is written and what is hit, counted at the scheduler
side."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Memory, Rig, configured_store, eventually, small_store
from parts import dump as dump_real

from ucm.errors import UcmError
from ucm.integration.vllm.connector.metadata import StoreRoom, UCMConnectorMetadata, split_keys
from ucm.integration.vllm.connector.scheduler.turnover import WINDOW, StoreLimit, Turnover, limit_of
from ucm.integration.vllm.connector.worker.store_hints import store_room
from ucm.store import UcmConnectorFactoryV1, part_mask, record_ids
from ucm.store.posix import UcmPosixStore

KV, RECORD = 4096, 8192


class Limited(Memory):
    """A store that holds ``records`` records and evicts by oldest use, the end of a chain first."""

    record_len = RECORD

    def __init__(self, records: int, reports: bool = True) -> None:
        """``reports``: whether it says how much it holds."""
        super().__init__()
        self.records, self.reports = records, reports
        self.used: dict[bytes, float] = {}
        self.now = self.written = 0

    def write(self, block_ids: Sequence[bytes], first: int) -> None:
        """A dump of blocks from this ordinal on."""
        self.now += 1
        for ordinal, block in enumerate(block_ids, first):
            self.written += block not in self.used
            self.used[block] = self.now - ordinal * 1e-6
            if len(self.used) > self.records:
                del self.used[min(self.used, key=lambda each: self.used[each])]
        self.ids = set(self.used)

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self.now += 1
        for ordinal, block in enumerate(block_ids):
            if block in self.used:
                self.used[block] = self.now - ordinal * 1e-6

    def stats(self) -> dict[str, Any]:
        if not self.reports:
            return {}
        tier = {"name": "model", "memory": False}
        capacity, used = self.records * RECORD, len(self.used) * RECORD
        return {"tiers": [tier | {"capacity_bytes": capacity, "used_bytes": used}]}


class Engine:
    """Prompts, one after the other, over such a store."""

    def __init__(self, store: Any, write: Any, ranks: int = 1) -> None:
        """``write(ids, first)`` stores blocks, of which the first has this ordinal."""
        self.rig = Rig(
            ranks,
            stores=[configured_store("Memory", lambda config: store)],
            blocks=256,
            admission="always",
            chance=random.Random(1).random,
        )
        self.store, self.write, self.served, self.hits = store, write, 0, 0

    def serve(self, prompt: int, blocks: int) -> None:
        """A request with this prompt, to its end, four blocks in a step."""
        rig, name = self.rig, f"r{self.served}"
        self.served += 1
        request = rig.request(name, blocks * BLOCK + 1, seed=prompt)
        rig.later.run()
        tokens: int | None = None

        def answered() -> bool:
            nonlocal tokens
            tokens, _ = rig.scheduler.get_num_new_matched_tokens(request, 0)
            return tokens is not None

        eventually("the store answers", answered)
        assert tokens is not None
        self.hits += tokens // BLOCK
        table = rig.tables.allocate(request, blocks + 1)
        rig.scheduler.update_state_after_alloc(request, table, tokens)
        if tokens:
            self.ended(rig.step(), name)
            request.num_computed_tokens = tokens
        while request.num_computed_tokens < request.num_tokens:
            self.ended(rig.step(request, most=4 * BLOCK))
        rig.scheduler.request_finished(request)
        rig.tables.free(request)
        self.ended(rig.step())

    def ended(self, plan: UCMConnectorMetadata, loaded: str = "") -> None:
        """A step has ended: every rank has stored its part of the step's dumps."""
        rig = self.rig
        for rank in range(rig.ranks):
            for dump in plan.dumps:
                self.write(record_ids(split_keys(dump.keys), part_mask(0, 0, rank)), dump.first)
        rig.clock.now += 1.0
        reports = [
            replace(rig.ended(plan, rank), room=store_room(self.store, KV))
            for rank in range(rig.ranks)
        ]
        rig.report(*reports, recved={loaded} if loaded else None)
        rig.scheduler.step_ended()
        rig.later.run()


def run(
    limit: int, prompts: Sequence[int], blocks: int, ranks: int = 1, rule: bool = True
) -> tuple[int, int]:
    """Blocks written and hit where ``limit`` blocks fit; each prompt has ``blocks`` blocks."""
    store = Limited(limit * ranks, reports=rule)
    engine = Engine(store, store.write, ranks)
    for prompt in prompts:
        engine.serve(prompt, blocks)
    return store.written // ranks, engine.hits


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("limit", [24, 25])
def test_a_prompt_longer_than_the_store_is_not_written_again_and_again(
    limit: int, ranks: int
) -> None:
    """46 blocks where 25 fit: the beginning stays in the store, and is hit."""
    prompts = [0] * 100
    written, hits = run(limit, prompts, 46, ranks)
    without, none = run(limit, prompts, 46, ranks, rule=False)
    assert (without, none) == (46 * len(prompts), 0)
    assert 10 * written <= without
    assert hits > 0


def test_prompts_that_do_not_fit_together_are_not_written_again_and_again() -> None:
    """Ten prompts in turn of which two fit."""
    prompts = [number % 10 for number in range(400)]
    written, hits = run(25, prompts, 10)
    without, none = run(25, prompts, 10, rule=False)
    assert (without, none) == (10 * len(prompts), 0)
    assert 5 * written <= without
    assert hits > len(prompts)


@pytest.mark.parametrize(("limit", "blocks", "prompts"), [(50, 5, 9), (25, 11, 2), (50, 45, 1)])
def test_a_working_set_that_fits_hits_as_without_the_rule(
    limit: int, blocks: int, prompts: int
) -> None:
    """At .9 of the limit, in turn and at random."""
    source = random.Random(3)
    for order in (
        [number % prompts for number in range(120)],
        [source.randrange(prompts) for _ in range(120)],
    ):
        assert run(limit, order, blocks) == run(limit, order, blocks, rule=False)


def test_what_is_asked_for_most_is_hit_as_without_the_rule() -> None:
    """Some prompts come often and fit, others are evicted between their turns."""
    source = random.Random(5)
    order = [min(int(source.paretovariate(0.7)) - 1, 99) for _ in range(600)]
    written, hits = run(100, order, 5)
    without, as_before = run(100, order, 5, rule=False)
    assert hits >= as_before
    assert written <= without


def test_a_working_set_that_shrinks_is_stored_again() -> None:
    store = Limited(100)
    engine = Engine(store, store.write)
    for number in range(300):
        engine.serve(number % 40, 5)
    for number in range(300):
        engine.serve(number % 15, 5)
    before = engine.hits
    for number in range(15):
        engine.serve(number, 5)
    assert engine.hits - before == 15 * 5


def test_a_store_that_was_emptied_is_filled_again_at_once() -> None:
    """Its blocks are absent because an operator removed them: there is room for all."""
    store = Limited(50)
    engine = Engine(store, store.write)
    for number in range(27):
        engine.serve(number % 9, 5)
    store.used.clear()
    store.ids.clear()
    engine.serve(100, 1)  # time passes
    for number in range(18):
        engine.serve(number % 9, 5)
    assert store.written == 2 * 45 + 1
    assert engine.hits == 18 * 5 + 9 * 5


def test_a_block_stored_after_the_lookup_began_was_not_evicted() -> None:
    """Two requests with one prompt: the second waits in line while the first is computed and
    stored."""
    store = Limited(50)
    engine = Engine(store, store.write)
    rig = engine.rig
    store.write([bytes([number]) * 16 for number in range(30)], 0)  # so it is more than half full
    first = rig.request("first", 10 * BLOCK + 1)
    second = rig.request("second", 10 * BLOCK + 1)
    rig.admit(first)
    plan = rig.step(first)
    engine.ended(plan)
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    keys = rig.keys_of(second)
    assert not any(rig.scheduler._block_tracker.is_evicted(key) for key in keys)


def test_the_log_says_how_much_is_asked_for_and_how_much_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Limited(25)
    engine = Engine(store, store.write)
    with caplog.at_level(logging.WARNING, "ucm"):
        for _ in range(4):
            engine.serve(0, 46)
    (line,) = [
        record.getMessage() for record in caplog.records if "working set" in record.getMessage()
    ]
    assert (
        line
        == "the working set is larger than the store: of the last 25 blocks that were stored before"
        " and asked for again, 25 had been evicted. Tier model holds 25 blocks of 8192 bytes"
        " each. While that is so, an evicted prompt is stored again in one of 16 cases, and at"
        " most 12 blocks of it; raise storage_capacity to store all"
    )


def test_what_is_remembered_is_bounded() -> None:
    turnover = Turnover(lambda: 0.0)
    turnover.limited(StoreLimit("model", "storage_capacity", 1 << 40, RECORD, full=True))
    for _ in range(64):
        turnover.asked_again(1, WINDOW // 8)
    assert turnover._total == WINDOW
    assert len(turnover._outcomes) <= 2 * 9
    assert turnover.exceeded  # in what is remembered, which is less than the store holds
    turnover.limited(None)
    assert not turnover.exceeded


def test_the_limit_is_that_of_all_parts_once_each_has_been_reported() -> None:
    disk = StoreRoom("posix2", 1000, 400, 10), StoreRoom("posix2", 1000, 600, 15)
    assert limit_of(disk[:1], 2) is None
    assert limit_of(disk, 2) == StoreLimit("posix2", "storage_capacity", 40, 25, full=True)
    memory = StoreRoom("memory", 1000, 400, 10), StoreRoom("memory", 600, 0, 10)
    assert limit_of(memory, 2) == StoreLimit("memory", "cache_size", 60, 20, full=False)


def test_a_rank_reports_the_limit_that_a_store_for_lookups_does_not_know(tmp_path: Path) -> None:
    keys = small_store(tmp_path) | {"storage_capacity": 25 * RECORD}
    rank = UcmConnectorFactoryV1.create_connector("UcmPosixStore", keys)
    lookups = UcmConnectorFactoryV1.create_connector("UcmPosixStore", keys | {"device_id": -1})
    assert isinstance(rank, UcmPosixStore)
    dump_real(rank, [bytes(16)])
    eventually(
        "the use is counted", lambda: (found := store_room(rank, KV)) is not None and found.used > 0
    )
    found = store_room(rank, KV)
    assert found is not None
    assert (found.tier, found.capacity, found.record) == ("posix", 25 * RECORD, RECORD)
    assert store_room(lookups, KV) is None
    assert store_room(Memory(), KV) is None  # a store of a user's own
    rank.close()
    lookups.close()


def test_over_a_real_store(tmp_path: Path) -> None:
    """In segments. The collector of the core evicts, and a dump waits until it has made room."""
    keys = small_store(tmp_path) | {"storage_capacity": 25 * RECORD}
    store = UcmConnectorFactoryV1.create_connector("UcmPosixStore", keys)
    assert isinstance(store, UcmPosixStore)

    def write(ids: list[bytes], first: int) -> None:
        store.describe(ids, ordinals=range(first, first + len(ids)))

        def stored() -> bool:
            with contextlib.suppress(UcmError):
                dump_real(store, ids)
                return True
            return False

        eventually("there is room", stored)

    def written() -> int:
        return int(store.stats()["tiers"][0]["blocks_written"])

    engine, counted = Engine(store, write), 0
    request = engine.rig.request("names the blocks", 46 * BLOCK)
    ids = record_ids(engine.rig.keys_of(request), part_mask(0, 0, 0))
    for _ in range(60):
        engine.serve(0, 46)
        if written() > counted:
            counted = written()
            eventually("the collector has made room", lambda: sum(store.lookup(ids)) <= 25)
    assert 46 < counted <= 60 * 46 / 10
    assert engine.hits > 0
    store.close()
