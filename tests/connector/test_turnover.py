"""A working set above the store's limit: what is written and what is hit, counted at the scheduler
side."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Memory, Rig, configured_store, eventually, small_store
from parts import dump as dump_real

from ucm.config.fields import Capacity
from ucm.errors import UcmError
from ucm.integration.vllm.connector.metadata import StoreRoom, UCMConnectorMetadata, split_keys
from ucm.integration.vllm.connector.scheduler.lookup import (
    MOST_TENANTS,
    WINDOW,
    StoreLimit,
    Turnover,
    limit_of,
)
from ucm.integration.vllm.connector.worker.worker import store_room
from ucm.store import UcmConnectorFactoryV1, part_mask, record_ids
from ucm.store.engine import read_pipeline_settings
from ucm.store.posix import UcmPosixStore

KV, RECORD = 4096, 8192


class Limited(Memory):
    """A store that holds ``records`` records and evicts by oldest use, the end of a chain first."""

    record_len = RECORD

    def __init__(
        self,
        records: int | None,
        reports: bool = True,
        quota: int | None = None,
        expire_after: float | None = None,
    ) -> None:
        """``records``: None for no limit; ``reports``: whether it reports how much it holds;
        ``quota``: records of one tenant; ``expire_after``: seconds."""
        super().__init__()
        self.records, self.reports, self.quota = records, reports, quota
        self.expire_after = expire_after if reports else None
        self.life = expire_after
        self.tenant_quota = None if quota is None else Capacity(bytes=quota * RECORD)
        self.used: dict[bytes, float] = {}
        self.owner: dict[bytes, bytes] = {}
        self.clock: Callable[[], float] = lambda: 0.0
        self.uses = self.written = self.quota_removed = 0

    def write(self, block_ids: Sequence[bytes], first: int, tenant: bytes) -> None:
        """A dump of blocks from this ordinal on."""
        for ordinal, block in enumerate(block_ids, first):
            self.written += block not in self.used
            self.owner[block] = tenant
            self._use(block, ordinal)
            mine = [each for each in self.used if self.owner[each] == tenant]
            if tenant and self.quota is not None and len(mine) > self.quota:
                self._remove_oldest(mine)
                self.quota_removed += 1
            if self.records is not None and len(self.used) > self.records:
                self._remove_oldest(self.used)
        self.ids = set(self.used)

    def _use(self, block: bytes, ordinal: int) -> None:
        self.uses += 1
        self.used[block] = self.clock() + self.uses * 1e-9 - ordinal * 1e-6

    def _remove_oldest(self, blocks: Iterable[bytes]) -> None:
        del self.used[min(blocks, key=lambda each: self.used[each])]

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        if self.life is not None:
            oldest = self.clock() - self.life
            self.used = {block: used for block, used in self.used.items() if used > oldest}
            self.ids = set(self.used)
        return super().lookup(block_ids)

    def touch(self, block_ids: Sequence[bytes]) -> None:
        for ordinal, block in enumerate(block_ids):
            if block in self.used:
                self._use(block, ordinal)

    def stats(self) -> dict[str, Any]:
        if not self.reports:
            return {}
        tier = {
            "name": "model",
            "memory": False,
            "capacity_bytes": (self.records or 0) * RECORD,
            "used_bytes": len(self.used) * RECORD,
            "quota_removed": self.quota_removed,
        }
        return {"tiers": [tier]}


class Engine:
    """Prompts, one after the other, over such a store."""

    def __init__(self, store: Any, write: Any, ranks: int = 1) -> None:
        """``write(ids, first, tenant)`` stores blocks, of which the first has this ordinal."""
        self.rig = Rig(
            ranks,
            stores=[configured_store("Memory", lambda config: store)],
            blocks=256,
            admission="always",
            chance=random.Random(1).random,
        )
        self.store, self.write, self.served, self.hits = store, write, 0, 0
        store.clock = self.rig.clock

    def serve(self, prompt: int, blocks: int, salt: str | None = None) -> None:
        """A request with this prompt, to its end, four blocks in a step."""
        rig, name = self.rig, f"r{self.served}"
        self.served += 1
        request = rig.request(name, blocks * BLOCK + 1, seed=prompt, salt=salt)
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
                ids = record_ids(split_keys(dump.keys), part_mask(0, 0, rank))
                self.write(ids, dump.first, dump.tenant)
        rig.clock.now += 1.0
        reports = [
            replace(rig.ended(plan, rank), room=store_room([(self.store, KV)]))
            for rank in range(rig.ranks)
        ]
        rig.report(*reports, recved={loaded} if loaded else None)
        rig.scheduler.step_ended()
        rig.later.run()


def run(
    limit: int,
    prompts: Sequence[int],
    blocks: int,
    ranks: int = 1,
    rule: bool = True,
    expire_after: float | None = None,
) -> tuple[int, int]:
    """Blocks written and hit where ``limit`` blocks fit; each prompt has ``blocks`` blocks."""
    store = Limited(limit * ranks, rule, expire_after=expire_after)
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


def test_the_most_requested_prompts_hit_as_without_the_rule() -> None:
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
    store.write(
        [bytes([number]) * 16 for number in range(30)], 0, b""
    )  # so it is more than half full
    first = rig.request("first", 10 * BLOCK + 1)
    second = rig.request("second", 10 * BLOCK + 1)
    rig.admit(first)
    plan = rig.step(first)
    engine.ended(plan)
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    keys = rig.keys_of(second)
    assert not any(rig.scheduler._block_tracker.is_evicted(key) for key in keys)


def test_the_log_names_the_working_set_and_the_limit(
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
        " and requested again, 25 had been evicted. Tier model holds 25 blocks of 8192 bytes"
        " each. While that is so, an evicted prompt is stored again in one of 16 cases, and at"
        " most 12 blocks of it; raise storage_capacity to store all"
    )


def run_tenants(
    tenants: dict[str, int], rounds: int, quota: int, limit: int | None = 400, rule: bool = True
) -> tuple[Limited, dict[str, int]]:
    """The store and the hits of each tenant. ``tenants``: the blocks of the one prompt of each."""
    store = Limited(limit, rule, quota)
    engine, hits = Engine(store, store.write), dict.fromkeys(tenants, 0)
    for _ in range(rounds):
        for prompt, (salt, blocks) in enumerate(tenants.items()):
            before = engine.hits
            engine.serve(prompt, blocks, salt)
            hits[salt] += engine.hits - before
    return store, hits


@pytest.mark.parametrize("limit", [400, 60, None])
def test_a_tenant_above_its_quota_is_not_written_again_and_again(limit: int | None) -> None:
    """In a store with room, a full one, and one without a limit of its own. A tenant that keeps to
    its quota hits as without the rule."""
    tenants, rounds = {"large": 46, "small": 20}, 100
    store, hits = run_tenants(tenants, rounds, 25, limit)
    without, as_before = run_tenants(tenants, rounds, 25, limit, rule=False)
    assert without.written == 46 * rounds + 20
    assert 10 * (store.written - 20) <= without.written - 20
    assert hits["large"] > 0 == as_before["large"]
    assert hits["small"] == as_before["small"] == 20 * (rounds - 1)


def test_blocks_without_a_tag_have_no_quota() -> None:
    store = Limited(400, quota=25)
    engine = Engine(store, store.write)
    for _ in range(20):
        engine.serve(0, 46)
        engine.serve(1, 46, "large")
    assert engine.hits >= 46 * 19


def test_a_store_of_tenants_that_was_emptied_is_filled_again_at_once() -> None:
    """What was removed is above no quota."""
    store = Limited(400, quota=50)
    engine = Engine(store, store.write)
    for number in range(27):
        engine.serve(number % 9, 5, "tenant")
    store.used.clear()
    store.ids.clear()
    for number in range(18):
        engine.serve(number % 9, 5, "tenant")
    assert store.written == 2 * 45
    assert engine.hits == 18 * 5 + 9 * 5


def test_the_log_names_the_quota(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ucm"):
        run_tenants({"large": 46, "larger": 50}, 20, 25)
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "working set" in line]
    assert line.startswith("the working set of a tenant is larger than its quota: of the last 25")
    assert "The quota of each tenant in tier model holds 25 blocks of 8192 bytes each" in line
    assert line.endswith("at most 12 blocks of it; raise tenant_quota to store all")


def test_expired_blocks_are_no_sign_of_a_store_too_small() -> None:
    """Nine prompts that fit, each asked for after it has expired."""
    order = [number % 9 for number in range(90)]
    assert run(50, order, 5, expire_after=20.0) == (450, 0)


def test_the_rule_holds_beside_expire_after() -> None:
    """Blocks are evicted long before they expire."""
    prompts = [0] * 100
    written, hits = run(25, prompts, 46, expire_after=3600.0)
    assert 10 * written <= 46 * len(prompts)
    assert hits > 0


def test_the_number_of_remembered_blocks_is_bounded() -> None:
    turnover = Turnover(lambda: 0.0)
    limit = StoreLimit("model", "storage_capacity", 1 << 40, RECORD, full=True)
    turnover.limited(limit)
    for _ in range(64):
        turnover.asked_again(1, WINDOW // 8)
    assert turnover._counts[b""].total == WINDOW
    assert turnover.evicted == 64 * (WINDOW // 8)
    assert turnover.exceeded()  # in what is remembered, which is less than the store holds
    turnover.limited(None)
    assert not turnover.exceeded()
    turnover.limited(replace(limit, quota=10))
    for number in range(MOST_TENANTS + 5):
        turnover.asked_again(0, 10, number.to_bytes(32, "little"))
    assert len(turnover._counts) == MOST_TENANTS
    assert turnover.exceeded(number.to_bytes(32, "little"))
    assert not turnover.exceeded(bytes(32))


def test_evicted_blocks_are_reported_once() -> None:
    scheduler = Rig().scheduler
    scheduler.take_tiers()
    scheduler._turnover.limited(StoreLimit("model", "storage_capacity", 100, RECORD, full=True))
    scheduler._turnover.asked_again(1, 3)
    assert scheduler.take_tiers() == {"evicted": 3}
    assert scheduler.take_tiers() == {}


def test_the_limit_is_that_of_all_parts_once_each_has_been_reported() -> None:
    disk = StoreRoom("posix2", 1000, 400, 10), StoreRoom("posix2", 1000, 600, 15)
    assert limit_of(disk[:1], 2) is None
    assert limit_of(disk, 2) == StoreLimit("posix2", "storage_capacity", 40, 25, full=True)
    memory = StoreRoom("memory", 1000, 400, 10), StoreRoom("memory", 600, 0, 10)
    assert limit_of(memory, 2) == StoreLimit("memory", "cache_size", 60, 20, full=False)


HERE = {"type": "posix", "storage_backends": "/here"}
THERE = {"type": "posix", "storage_backends": "/there"}
SERVER = {"type": "redis", "storage_backends": "redis://localhost"}


@pytest.mark.parametrize(
    ("stages", "life"),
    [
        ([{"type": "cache"}, HERE], None),
        ([{"type": "cache"}, HERE | {"expire_after": "2h"}], 7200),
        ([HERE | {"expire_after": "2h"}, THERE | {"expire_after": "1h"}], 7200),
        ([HERE | {"expire_after": "2h"}, THERE], None),
        ([HERE | {"expire_after": "2h"}, SERVER], 86400),
    ],
)
def test_a_block_lives_as_long_as_in_the_stage_that_keeps_it_longest(
    stages: list[dict[str, str]], life: int | None
) -> None:
    """A value of a server lives a day where nothing else is configured."""
    sizes = {"tensor_size": 4096, "shard_size": 4096, "block_size": 4096}
    settings = read_pipeline_settings(sizes | {"store_pipeline": stages})
    assert settings.longest_life() == life


def test_a_rank_reports_the_limit_that_a_store_for_lookups_does_not_know(tmp_path: Path) -> None:
    keys = small_store(tmp_path) | {
        "storage_capacity": 25 * RECORD,
        "tenant_quota": "20%",
        "expire_after": "2h",
    }
    rank = UcmConnectorFactoryV1.create_connector("UcmPosixStore", keys)
    lookups = UcmConnectorFactoryV1.create_connector("UcmPosixStore", keys | {"device_id": -1})
    assert isinstance(rank, UcmPosixStore)
    dump_real(rank, [bytes(16)])
    eventually(
        "the use is counted",
        lambda: (found := store_room([(rank, KV)])) is not None and found.used > 0,
    )
    found = store_room([(rank, KV)])
    assert found is not None
    assert (found.tier, found.capacity, found.record) == ("posix", 25 * RECORD, RECORD)
    assert (found.quota, found.quota_removed, found.expire_after) == (5 * RECORD, 0, 7200)
    assert store_room([(lookups, KV)]) is None
    assert store_room([(Memory(), KV)]) is None  # a store of a user's own
    rank.close()
    lookups.close()


def test_over_a_real_store(tmp_path: Path) -> None:
    """In segments. The collector of the core evicts, and a dump waits until it has made room."""
    keys = small_store(tmp_path) | {"storage_capacity": 25 * RECORD}
    store = UcmConnectorFactoryV1.create_connector("UcmPosixStore", keys)
    assert isinstance(store, UcmPosixStore)

    def write(ids: list[bytes], first: int, tenant: bytes) -> None:
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
