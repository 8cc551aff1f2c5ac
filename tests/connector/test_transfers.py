"""The worker side without an engine: every transfer is reported exactly once, whatever the store
does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from parts import BLOCK, Clock, configured_store  # noqa: E402
from plain_profile import events_of  # noqa: E402

from ucm.errors import (  # noqa: E402
    BusyError,
    ClosedError,
    ConfigError,
    CorruptError,
    DeadlineError,
    ForeignError,
    NotFoundError,
    StoreIOError,
    TaskError,
    UcmError,
)
from ucm.integration.vllm.connector.groups import Group  # noqa: E402
from ucm.integration.vllm.connector.identity.weights import WeightsReport  # noqa: E402
from ucm.integration.vllm.connector.metadata import (  # noqa: E402
    Dump,
    GroupBlocks,
    Load,
    StoreRoom,
    StoreSetup,
    UCMConnectorMetadata,
    UCMConnectorWorkerMetadata,
    join_keys,
    split_keys,
)
from ucm.integration.vllm.connector.platforms import PLATFORMS, Platform  # noqa: E402
from ucm.integration.vllm.connector.worker.worker import ROOM_S, Rank, UCMConnectorWorker  # noqa: E402
from ucm.profiling import profile  # noqa: E402
from ucm.store import part_mask, record_ids  # noqa: E402
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1  # noqa: E402

KEYS = [bytes([number]) * 16 for number in range(4)]
TOKENS, SIZE, BLOCKS = BLOCK, 8, 6


class Scripted(UcmKVStoreBaseV1):
    """Keeps blocks in memory; a test sets when tasks end, how, and what is refused."""

    has_staged_level = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kept: dict[bytes, bytes] = {}
        self.tasks: list[Task] = []
        self.refusal: Exception | None = None
        self.check_error: Exception | None = None
        self.described: dict[bytes, tuple[bytes, int]] = {}
        self.marked_bad: list[bytes] = []
        self.cleared: list[bytes] = []
        self.slots: int | None = None
        self.events: list[int] = []
        self.sizes = config["tensor_size_list"] * (
            config["shard_size"] // sum(config["tensor_size_list"])
        )

    def _task(self, failures: dict[int, Any] | None = None) -> Task:
        task = Task({"staged": False, "published": False})
        task.error = TaskError("scripted", failures=failures) if failures else None
        self.tasks.append(task)
        return task

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return [block in self.kept for block in block_ids]

    def load_data(self, block_ids: Sequence[bytes], shard_index: Any, addrs: Any) -> Task:
        if self.refusal:
            raise self.refusal
        failures: dict[int, Any] = {}
        for row, (block, pieces) in enumerate(zip(block_ids, addrs, strict=True)):
            data = self.kept.get(block)
            if data is None:
                failures[row] = CorruptError("not as it was")
                continue
            for address, size in zip(pieces, self.sizes, strict=True):
                ctypes.memmove(int(address), data[:size], size)
                data = data[size:]
        return self._task(failures)

    def dump_data(
        self, block_ids: Sequence[bytes], shard_index: Any, addrs: Any, prerequisite_handle: int = 0
    ) -> Task:
        if self.refusal:
            raise self.refusal
        self.events.append(prerequisite_handle)
        for block, pieces in zip(block_ids, addrs, strict=True):
            self.kept[block] = b"".join(
                ctypes.string_at(int(a), n) for a, n in zip(pieces, self.sizes, strict=True)
            )
        return self._task()

    def check(self, task: Any, until: Any = "published") -> bool:
        if self.check_error:
            raise self.check_error
        return bool(task.handle[until])

    def wait(self, task: Any, timeout: float | None = None, until: Any = "published") -> None:
        if task.error:
            raise task.error

    def describe(
        self, block_ids: Any, *, parents: Any = None, ordinals: Any = None, tokens: Any = None
    ) -> None:
        self.described.update(zip(block_ids, zip(parents, ordinals, strict=True), strict=True))

    def mark_bad(self, block_ids: Sequence[bytes]) -> None:
        self.marked_bad += block_ids

    def clear_bad(self, block_ids: Sequence[bytes]) -> None:
        self.cleared += block_ids

    def free_dump_slots(self) -> int | None:
        return self.slots

    def end(self, *levels: str) -> None:
        """All tasks reach these levels."""
        for task in self.tasks:
            task.handle.update(dict.fromkeys(levels, True))


class Worker:
    """A worker side with two layers of KV and a store that opens at once."""

    def __init__(self, writer: bool = True, **settings: Any) -> None:
        self.caches = {
            f"layers.{i}": torch.zeros(BLOCKS, 1, TOKENS, SIZE, dtype=torch.float32)
            for i in range(2)
        }
        self.store: Scripted | None = None
        self.kind: type[Scripted] = settings.pop("kind", Scripted)
        rank = Rank(
            number=0,
            part=(0, 0, 0),
            writer=writer,
            layers=list(self.caches),
            block_tokens=BLOCK,
            identity=lambda: {"dtype": "float32"},
            wanted_block_size=settings.pop("wanted_block_size", None),
        )
        rank = replace(rank, **settings.pop("rank", {}))
        self.connector = UCMConnectorWorker(
            rank,
            settings.pop("platform", PLATFORMS[0]),
            settings.pop("stores", None) or [configured_store("Scripted", self.make)],
            health=settings.pop("health", None),
            clock=Clock(),
        )
        self.connector.register_kv_caches(self.caches)

    def make(self, config: dict[str, Any]) -> Scripted:
        """The store."""
        return self.make_kind(self.kind, config)

    def make_kind(self, kind: type[Scripted], config: dict[str, Any]) -> Scripted:
        """The store, of this class."""
        self.store = kind(config)
        return self.store

    def open(self) -> Scripted:
        """The setup arrives; the thread that opens the store is waited for by asking."""
        report = self.step(setup=StoreSetup("{}", {"storage_backends": ["/nowhere"]}))[2]
        while report is None or not report.ranks[0].ready:
            report = self.step()[2]
        assert self.store is not None
        return self.store

    def step(self, **plan: Any) -> tuple[set[str], set[int], UCMConnectorWorkerMetadata | None]:
        """One step as vLLM drives it: requests whose load ended, bad blocks, the report."""
        self.connector.bind_connector_metadata(UCMConnectorMetadata(**plan))
        self.connector.start_load_kv()
        self.connector.start_dumps()
        return (
            self.connector.take_ended_loads(),
            self.connector.get_block_ids_with_load_errors(),
            self.connector.build_connector_worker_meta(),
        )


def load(name: str, blocks: Sequence[int], keys: Sequence[bytes] = KEYS, first: int = 0) -> Load:
    return Load(name, first, join_keys(keys[: len(blocks)]), np.array(blocks, dtype=np.int64))


def dump(job: int, blocks: Sequence[int], first: int = 0, name: str = "a") -> Dump:
    parent = KEYS[first - 1] if first else b""
    return Dump(
        job, name, first, parent, join_keys(KEYS[first : first + len(blocks)]), np.array(blocks)
    )


def test_a_pipeline_rank_without_layers_of_a_group_leaves_its_blocks_alone() -> None:
    """Its first part is that of another group: numbers of device blocks mean that group's."""
    second = Group(1, 1, TOKENS)
    worker = Worker(rank={"group": second, "part": (1, 1, 0), "fails_whole": True})
    store = worker.open()
    # as the scheduler side sends them
    mine = record_ids(KEYS, second.mask)
    record = record_ids(KEYS, part_mask(1, 1, 0))[0]
    for cache in worker.caches.values():
        cache[3] = torch.randn(1, TOKENS, SIZE)
    before = {name: cache.clone() for name, cache in worker.caches.items()}
    other = dump(1, [2])
    own = replace(dump(2, [3]), keys=mine[0], group=1)
    reports = [worker.step(dumps=[other, own])[2]]
    store.end("staged", "published")
    reports.append(worker.step()[2])
    done = [result for one in reports if one is not None for result in one.ranks[0].done]
    assert {result.job: result.failed for result in done} == {1: (), 2: ()}
    assert list(store.kept) == [record]
    worker.caches["layers.0"][4] = 0
    rest = [GroupBlocks(1, 0, mine[0], np.array([4], dtype=np.int64))]
    worker.step(loads=[replace(load("a", [2]), rest=rest)])
    store.end("published")
    assert worker.step()[0] == {"a"}
    for name, cache in worker.caches.items():
        assert torch.equal(cache[4], before[name][3]), "the group that it has is loaded"
        assert torch.equal(cache[2], before[name][2]), "and nothing of the other one"


def test_a_block_goes_out_and_comes_back_bit_for_bit() -> None:
    worker = Worker()
    store = worker.open()
    for cache in worker.caches.values():
        cache[2] = torch.randn(1, TOKENS, SIZE)
    worker.step(dumps=[dump(1, [2], first=1)])
    ids = record_ids(KEYS, part_mask(0, 0, 0))
    assert store.described == {ids[1]: (ids[0], 1)}
    store.end("staged")
    report = worker.step()[2]
    assert report is not None
    assert (report.ranks[0].staged, report.ranks[0].done) == ([1], [])
    store.end("published")
    report = worker.step()[2]
    assert report is not None
    assert [result.job for result in report.ranks[0].done] == [1]
    worker.step(loads=[load("r", [5], KEYS[1:])])
    assert worker.step()[0] == set()
    store.end("staged", "published")
    assert worker.step()[:2] == ({"r"}, set())
    assert worker.step() == (set(), set(), None)  # once
    assert all(torch.equal(cache[5], cache[2]) for cache in worker.caches.values())


def test_dumps_wait_for_the_event_of_the_platform_and_are_refused_without_one() -> None:
    marks: list[tuple[int, Any] | Exception] = [(7, "kept"), RuntimeError("a device that failed")]

    def mark(device: torch.device) -> tuple[int, Any]:
        assert device.type == "cpu"
        made = marks.pop(0)
        if isinstance(made, Exception):
            raise made
        return made

    worker = Worker(platform=Platform("toy", (), "cpu", mark))
    store = worker.open()
    worker.step(dumps=[dump(1, [2], first=1)])
    assert store.events == [7]
    store.end("staged", "published")
    worker.step()
    report = worker.step(dumps=[dump(2, [2], first=1)])[2]
    assert report is not None
    assert [(result.job, result.failed) for result in report.ranks[0].done] == [(2, (0,))]
    assert store.events == [7]


def test_kv_on_another_device_than_the_platforms_is_reported() -> None:
    worker = Worker(platform=Platform("toy", (), "cuda", PLATFORMS[0].mark))
    assert worker.connector.handshake().problem == "the KV lies on cpu, not on cuda as for toy"


@pytest.mark.parametrize("answer", [(1, 2), None])
def test_the_end_of_a_load_reports_the_tiers_of_its_blocks(
    answer: tuple[int, ...] | None,
) -> None:
    worker = Worker()
    store = worker.open()

    def served(task: Any) -> tuple[int, ...]:
        assert task is store.tasks[-1]
        if answer is None:
            raise RuntimeError("a bug of the store")
        return answer

    worker.step(dumps=[dump(1, [1, 2, 3])])
    store.end("staged", "published")
    worker.step(loads=[load("one tier", [3, 4, 5])])
    store.end("staged", "published")
    ended, _, report = worker.step()
    assert ended == {"one tier"}
    assert report is None or not report.ranks[0].served
    store.tier_names, store.served = ("memory", "disk"), served  # type: ignore[method-assign]
    worker.step(loads=[load("r", [3, 4, 5])])
    store.end("staged", "published")
    ended, _, report = worker.step()
    assert ended == {"r"}
    told = [] if report is None else report.ranks[0].served
    assert [(each.request, each.tiers) for each in told] == ([("r", answer)] if answer else [])
    assert worker.step()[2] is None


def test_the_profile_has_the_stages_that_a_store_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"read": (0.25, 1.0, 1.5), "verify": (0.5, 1.25, 0.125), "scatter": (1.0, 1.5, 0.25)}
    worker = Worker()
    store = worker.open()
    monkeypatch.setattr(store, "stages", lambda task: times if task in store.tasks[1:] else {})
    path = tmp_path / "profile.json"
    profile.open(str(path), "rank")
    try:
        worker.step(dumps=[dump(1, [2], first=1)])
        store.end("staged", "published")
        worker.step(loads=[load("r", [5], KEYS[1:])])
        store.end("staged", "published")
        assert worker.step()[0] == {"r"}
        monkeypatch.setattr(store, "stages", None)
        worker.step(loads=[load("s", [5], KEYS[1:])])
        store.end("staged", "published")
        assert worker.step()[0] == {"s"}, "a profile costs no load"
    finally:
        profile.close()
    events = events_of(path)
    begun = {one["name"]: one for one in events if one["ph"] == "b"}
    ends = {one["id"]: one["ts"] for one in events if one["ph"] == "e"}
    stages = ("queue", "read", "verify", "scatter")
    assert set(begun) == {"gather", "publish", "load", *(f"load {stage}" for stage in stages)}
    of = [begun[f"load {stage}"] for stage in stages]
    spans = [(one["ts"], ends[one["id"]]) for one in of]
    start = spans[0][0]
    micros = [(0, 250_000), (250_000, 1_000_000), (500_000, 1_250_000), (1_000_000, 1_500_000)]
    assert spans == [(start + begin, start + end) for begin, end in micros]
    shared = {"request": "r", "group": 0, "blocks": 1}
    busy = [{}, {"busy_ms": 1500.0}, {"busy_ms": 125.0}, {"busy_ms": 250.0}]
    assert [one["args"] for one in of] == [shared | more for more in busy]


def test_a_rank_reports_whether_it_uses_touches_and_forwards_hints() -> None:
    class Told(Scripted):
        has_own_memory = True

        def prefetch_room(self) -> int:
            return 7

        def touch_own(self, block_ids: Sequence[bytes], first: int = 0) -> None:
            self.described[b"touched"] = (block_ids[0], first)

    worker = Worker(
        stores=[configured_store("Told", lambda config: worker.make_kind(Told, config))]
    )
    report = worker.step(setup=StoreSetup("{}", {"storage_backends": ["/nowhere"]}))[2]
    while report is None or not report.ranks[0].ready:
        report = worker.step()[2]
    assert (report.ranks[0].wants_touches, report.ranks[0].prefetch_room) == (True, 7)
    worker.step(touched=[(3, KEYS[0])])
    assert worker.store is not None
    assert worker.store.described[b"touched"] == (record_ids(KEYS[:1], part_mask(0, 0, 0))[0], 3)


@pytest.mark.parametrize("writer", [True, False])
def test_what_a_rank_refused_is_replaced_where_it_is_written_and_read_again_elsewhere(
    writer: bool,
) -> None:
    worker = Worker(writer=writer)
    store = worker.open()
    again = dump(1, [2, 3])
    again.refused = (1,)
    worker.step(dumps=[again, dump(2, [4], first=3)])
    (refused,) = record_ids(KEYS[1:2], part_mask(0, 0, 0))
    assert (store.marked_bad, store.cleared) == (([refused], []) if writer else ([], [refused]))
    assert len(store.tasks) == (2 if writer else 0)


def test_a_store_with_the_older_names_of_marking_is_still_called() -> None:
    class Older(Scripted):
        mark_bad = UcmKVStoreBaseV1.mark_bad
        clear_bad = UcmKVStoreBaseV1.clear_bad

        def distrust(self, block_ids: Sequence[bytes]) -> None:
            self.marked_bad += block_ids

        def trust(self, block_ids: Sequence[bytes]) -> None:
            self.cleared += block_ids

    store = Older({"tensor_size_list": [8], "shard_size": 8})
    store.mark_bad([b"bad"])
    store.clear_bad([b"good"])
    assert (store.marked_bad, store.cleared) == ([b"bad"], [b"good"])


def test_the_tag_of_a_tenant_goes_to_a_store_that_takes_one() -> None:
    class Taking(Scripted):
        def describe(self, block_ids: Any, *, tenant: bytes | None = None, **hints: Any) -> None:
            super().describe(block_ids, **hints)
            self.tenants = {**getattr(self, "tenants", {}), **dict.fromkeys(block_ids, tenant)}

    ids = record_ids(KEYS, part_mask(0, 0, 0))
    for kind in (Taking, Scripted):  # the second one's hint is from before tenants
        worker = Worker(kind=kind)
        store = worker.open()
        salted = dump(1, [2])
        salted.tenant = b"t" * 32
        worker.step(dumps=[salted, dump(2, [3], first=1)])
        assert list(store.described) == ids[:2]
        assert getattr(store, "tenants", {}) == (
            {ids[0]: b"t" * 32, ids[1]: None} if kind is Taking else {}
        )


def test_a_record_of_a_newer_version_or_another_key_is_distinguished() -> None:
    worker = Worker()
    store = worker.open()
    worker.step(loads=[load("r", [2, 3, 4])])
    failures = {
        0: ForeignError("newer", context={"reason": "newer_version"}),
        1: CorruptError("bad", context={"reason": "bad_checksum"}),
        2: ForeignError("locked", context={"reason": "wrong_key"}),
    }
    store.tasks[-1].error = TaskError("scripted", failures=failures)
    store.end("staged", "published")
    report = worker.step()[2]
    assert report is not None
    (failure,) = report.ranks[0].load_failures
    assert (split_keys(failure.newer), split_keys(failure.refused)) == (
        [KEYS[0], KEYS[2]],
        KEYS[1:2],
    )


def test_a_dump_that_a_record_is_in_the_way_of_is_no_failure_of_the_store() -> None:
    worker = Worker()
    store = worker.open()
    worker.step(dumps=[dump(1, [2, 3, 4])])
    failures = {
        0: ForeignError("in the way", context={"reason": "wrong_key"}),
        1: CorruptError("bad", context={"reason": "bad_checksum"}),
    }
    store.tasks[-1].error = TaskError("scripted", failures=failures)
    store.end("staged", "published")
    report = worker.step()[2]
    assert report is not None
    (result,) = report.ranks[0].done
    assert (result.failed, result.left_alone, result.busy) == ((1,), (0,), False)


def test_a_store_that_was_opened_and_not_yet_used_is_closed_when_another_is_tried() -> None:
    made: list[Scripted] = []

    def make(config: dict[str, Any]) -> Scripted:
        made.append(Scripted(config))
        return made[-1]

    worker = Worker(stores=[configured_store("A", make), configured_store("B", make)])

    def trial(number: int) -> StoreSetup:
        return StoreSetup("{}", {"storage_backends": ["/nowhere"]}, number, number + 1, trial=True)

    worker.connector.bind_connector_metadata(UCMConnectorMetadata(setup=trial(0)))
    while worker.connector._opened is None:
        pass
    worker.connector.bind_connector_metadata(UCMConnectorMetadata(setup=trial(1)))
    while not made[0]._closed:
        pass
    while worker.connector._store is None:
        worker.connector.build_connector_worker_meta()
    assert worker.connector._store is made[1] and not made[1]._closed


def test_a_store_that_rejects_the_kv_layout_is_closed_and_skipped() -> None:
    class Blind(Scripted):
        def register_kv(self, layout: Any) -> None:
            raise ValueError("no such pieces")

    made: list[Blind] = []

    def make(config: dict[str, Any]) -> Blind:
        made.append(Blind(config))
        return made[-1]

    worker = Worker(stores=[configured_store("A", make)])
    report = worker.step(
        setup=StoreSetup("{}", {"storage_backends": ["/nowhere"]}, 0, 1, trial=True)
    )[2]
    while report is None or not report.ranks[0].unavailable:
        report = worker.step()[2]
    assert "no such pieces" in report.ranks[0].unavailable
    assert [store._closed for store in made] == [True]


def test_failed_rows_and_all_behind_them_are_bad_and_reported_with_the_request() -> None:
    worker = Worker()
    store = worker.open()
    worker.step(dumps=[dump(1, [1])])
    store.end("staged", "published")
    worker.step(loads=[load("r", [3, 4, 5], first=7)])
    store.end("staged", "published")
    ended, bad, report = worker.step()
    assert (ended, bad) == ({"r"}, {4, 5})
    assert report is not None
    (failure,) = report.ranks[0].load_failures
    assert (failure.request, failure.first, split_keys(failure.refused)) == ("r", 8, KEYS[1:3])
    assert failure.reasons == ("bad_checksum", "bad_checksum")
    assert worker.step() == (set(), set(), None)


def test_a_load_of_chunks_that_lacks_a_block_is_bad_from_its_first_block_on() -> None:
    """Its blocks are not at the places of their tokens: what lies before the missing one is no
    prefix."""
    worker = Worker()
    store = worker.open()
    worker.step(dumps=[dump(1, [1])])
    store.end("staged", "published")
    worker.step(loads=[replace(load("r", [3, 4, 5], first=7), whole=True)])
    store.end("staged", "published")
    ended, bad, report = worker.step()
    assert (ended, bad) == ({"r"}, {3, 4, 5})
    assert report is not None
    (failure,) = report.ranks[0].load_failures
    assert (failure.first, split_keys(failure.refused)) == (7, KEYS[1:3])
    assert failure.reasons == ("load_failed", "bad_checksum", "bad_checksum")


@pytest.mark.parametrize("error", [ClosedError("closed"), ValueError("a store's own bug")])
def test_a_store_that_raises_ends_the_load(error: Exception) -> None:
    worker = Worker()
    worker.open().refusal = error
    ended, bad, _ = worker.step(loads=[load("r", [3, 4])])
    assert (ended, bad) == ({"r"}, {3, 4})


@pytest.mark.parametrize(
    "failures",
    [
        {"row": DeadlineError("late")},
        {7: DeadlineError("late")},
        {-1: DeadlineError("late")},
        {1: "late"},
        [1],
        None,
    ],
)
def test_a_store_that_names_its_failures_wrongly_ends_the_load(failures: Any) -> None:
    worker = Worker()
    store = worker.open()
    worker.step(loads=[load("r", [3, 4])])
    store.tasks[-1].error = TaskError("scripted", failures=failures)
    store.end("staged", "published")
    ended, bad, report = worker.step()
    assert (ended, bad) == ({"r"}, {3, 4})
    assert report is not None
    assert len(report.ranks[0].load_failures) == 1
    assert worker.step() == (set(), set(), None)


def test_check_is_called_again_after_a_temporary_failure_only() -> None:
    worker = Worker()
    store = worker.open()
    worker.step(dumps=[dump(1, [1])])
    worker.step(loads=[load("r", [3])])
    store.check_error = BusyError("ask again")
    assert worker.step()[0] == set()
    store.check_error = ClosedError("closed")
    assert worker.step()[0] == {"r"}


def test_a_late_load_says_nothing_about_the_record() -> None:
    worker = Worker()
    store = worker.open()
    worker.step(loads=[load("r", [3])])
    store.tasks[-1].error = DeadlineError("late")
    store.end("staged", "published")
    report = worker.step()[2]
    assert report is not None
    assert report.ranks[0].load_failures[0].refused == b""
    assert report.ranks[0].load_failures[0].reasons == ("timeout",)


def test_every_block_from_the_first_failed_one_on_has_a_reason() -> None:
    worker = Worker()
    store = worker.open()
    worker.step(loads=[load("r", [2, 3, 4, 5])])
    failures: dict[int, UcmError] = {
        1: ForeignError("another's", context={"reason": "foreign_id"}),
        2: BusyError("given up", context={"reason": "load_failed"}),
    }
    store.tasks[-1].error = TaskError("scripted", failures=failures)
    store.end("staged", "published")
    report = worker.step()[2]
    assert report is not None
    (failure,) = report.ranks[0].load_failures
    assert (failure.first, failure.reasons) == (1, ("foreign_id", "load_failed", "load_failed"))
    assert worker.connector.loads.blocks == 2  # the first and the last of four


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotFoundError("gone"), "absent"),
        (ClosedError("closed"), "unhealthy"),
        (StoreIOError("broken"), "io_error"),
        (OSError("broken"), "io_error"),
        (ForeignError("another's"), "foreign_identity"),
        (CorruptError("known", context={"reason": "refused"}), "refused"),
        (ValueError("a bug of the store"), "internal"),
    ],
)
def test_a_load_that_is_refused_at_once_says_why(error: Exception, reason: str) -> None:
    worker = Worker()
    worker.open().refusal = error
    report = worker.step(loads=[load("r", [3, 4])])[2]
    assert report is not None
    assert report.ranks[0].load_failures[0].reasons == (reason, reason)


def test_bytes_of_this_rank_are_reported_once() -> None:
    worker = Worker()
    store = worker.open()
    worker.step(dumps=[dump(1, [1, 2])])
    assert worker.connector.take_bytes() is None
    store.end("staged", "published")
    worker.step()
    size = 2 * TOKENS * SIZE * 4
    assert worker.connector.take_bytes() == {"loaded_bytes": 0, "published_bytes": 2 * size}
    worker.step(loads=[load("r", [5])])
    store.end("staged", "published")
    worker.step()
    assert worker.connector.take_bytes() == {"loaded_bytes": size, "published_bytes": 0}
    assert worker.connector.take_bytes() is None
    assert worker.connector.stats()["rank"] == 0


def test_before_the_store_is_open_loads_fail_and_dumps_are_refused() -> None:
    worker = Worker()
    ended, bad, report = worker.step(loads=[load("r", [3])], dumps=[dump(1, [1, 2])])
    assert (ended, bad) == ({"r"}, {3})
    assert report is not None
    assert report.ranks[0].load_failures[0].reasons == ("unhealthy",)
    (result,) = report.ranks[0].done
    assert (result.job, result.failed, result.busy) == (1, (0, 1), True)


def test_a_refusal_ends_the_chain_for_the_step() -> None:
    worker = Worker()
    store = worker.open()
    store.refusal = BusyError("full")
    report = worker.step(dumps=[dump(1, [1]), dump(2, [2], first=1)])[2]
    assert report is not None
    assert [(result.job, result.busy) for result in report.ranks[0].done] == [(1, True), (2, True)]
    assert (report.ranks[0].last_job, store.tasks) == (2, [])


def test_a_rank_with_replicated_kv_writes_nothing_and_agrees() -> None:
    worker = Worker(writer=False)
    store = worker.open()
    report = worker.step(dumps=[dump(1, [1])])[2]
    assert report is not None
    assert [(result.job, result.failed) for result in report.ranks[0].done] == [(1, ())]
    assert store.kept == {}


def test_dumps_vllm_did_not_ask_for_in_their_step_begin_with_the_next_one() -> None:
    worker = Worker()
    store = worker.open()
    worker.connector.bind_connector_metadata(
        UCMConnectorMetadata(dumps=[dump(1, [1])])
    )  # a pipeline rank before the last, with speculative decoding
    worker.connector.start_load_kv()
    assert worker.connector.build_connector_worker_meta() is None
    worker.connector.bind_connector_metadata(UCMConnectorMetadata(dumps=[dump(2, [2], first=1)]))
    assert list(store.kept) == record_ids(KEYS[:1], part_mask(0, 0, 0))
    worker.connector.bind_connector_metadata(UCMConnectorMetadata())
    store.end("staged", "published")
    report = worker.connector.build_connector_worker_meta()
    assert report is not None
    assert [(result.job, result.failed) for result in report.ranks[0].done] == [(1, ()), (2, ())]


def test_free_slots_are_reported_while_few() -> None:
    worker = Worker()
    store = worker.open()
    store.slots = 3
    report = worker.step()[2]
    assert report is not None
    assert report.ranks[0].free_slots == 3
    assert worker.step()[2] is None


def test_a_store_that_does_not_open_is_reported() -> None:
    worker = Worker(stores=[configured_store("Broken", lambda config: 1 / 0)])
    report = worker.step(setup=StoreSetup("{}", {}))[2]
    # the first one is the handshake, with it or without
    while report is None or not report.ranks[0].broken:
        report = worker.step()[2]
    assert "division by zero" in report.ranks[0].broken


@pytest.mark.parametrize("wanted", [BLOCK, 2 * TOKENS * SIZE * 4])
def test_block_size_may_be_given_in_tokens_or_bytes(wanted: int) -> None:
    assert (
        Worker(wanted_block_size=wanted).connector.handshake().shapes["block_size"]
        == 2 * TOKENS * SIZE * 4
    )


def test_another_block_size_is_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=f"{BLOCK} tokens and {2 * TOKENS * SIZE * 4} bytes"):
        Worker(wanted_block_size=17)


def test_shutdown_lets_dumps_end_and_closes_the_store() -> None:
    worker = Worker()
    store = worker.open()
    worker.step(dumps=[dump(1, [1])])
    store.end("staged", "published")
    worker.connector.shutdown()
    assert store._closed
    assert len(worker.connector.dumps) == 0


def test_dumps_that_are_overtaken_are_read_before_the_step_begins() -> None:
    worker = Worker()
    store = worker.open()
    waited: list[tuple[Task, str]] = []

    def wait(task: Any, timeout: float | None = None, until: Any = "published") -> None:
        waited.append((task, until))
        raise StoreIOError("told when it is polled")

    store.wait = wait  # type: ignore[method-assign]
    worker.step(dumps=[dump(1, [1])])
    worker.caches["layers.0"][2] = 7.0
    late = dump(2, [2], first=1)
    worker.connector.bind_connector_metadata(
        UCMConnectorMetadata(dumps=[late, dump(3, [3], first=2)], jobs_to_flush=[1, 2])
    )
    assert waited == [(store.tasks[0], "staged"), (store.tasks[1], "staged")]
    worker.caches["layers.0"][2] = 9.0  # the step writes
    worker.connector.start_dumps()
    ids = record_ids(KEYS, part_mask(0, 0, 0))
    assert list(store.kept) == ids[:3]
    assert np.frombuffer(store.kept[ids[1]][:4], dtype=np.float32)[0] == 7.0
    store.end("staged", "published")
    report = worker.step()[2]
    assert report is not None
    assert sorted(result.job for result in report.ranks[0].done) == [1, 2, 3]


def test_a_rank_answers_a_weights_check_with_the_step() -> None:
    worker = Worker()
    worker.open()
    report = worker.step(check_weights=3)[2]
    assert report is not None
    assert report.ranks[0].weights == WeightsReport(3, None, None, 0), (
        "there is no model to look at"
    )
    assert worker.step()[2] is None


def test_what_is_under_way_on_a_store_ends_with_it_when_another_is_opened() -> None:
    worker = Worker()
    first = worker.open()
    worker.step(dumps=[dump(1, [1])], loads=[load("r", [2], KEYS[1:])])
    first.check_error = ClosedError("closed")
    first.wait = lambda *_, **__: (_ for _ in ()).throw(ClosedError("closed"))  # type: ignore[method-assign]
    ended, bad, report = worker.step(
        setup=StoreSetup("{}", {"storage_backends": ["/nowhere"]}, attempt=2)
    )
    assert (ended, bad) == ({"r"}, {2})
    while report is None or not (report.ranks[0].ready and report.ranks[0].attempt == 2):
        report = worker.step()[2]
    assert worker.store is not first
    worker.step(dumps=[dump(2, [3])])
    assert worker.store is not None
    assert len(worker.store.kept) == 1


@pytest.mark.parametrize("writer", [True, False])
def test_a_rank_that_writes_reports_now_and_then_how_much_its_store_holds(writer: bool) -> None:
    class Bounded(Scripted):
        def stats(self) -> dict[str, Any]:
            return {
                "tiers": [
                    {"name": "posix", "capacity_bytes": 1000, "used_bytes": 10 * len(self.tasks)}
                ]
            }

    worker = Worker(writer, kind=Bounded)
    clock = worker.connector._clock
    assert isinstance(clock, Clock)
    worker.open()
    rooms = []
    for job in range(1, 5):
        clock.now += ROOM_S / 2
        worker.step(dumps=[dump(job, [2])])
        assert worker.store is not None
        worker.store.end("staged", "published")
        report = worker.step()[2]
        rooms.append(None if report is None else report.ranks[0].room)
    record = 2 * TOKENS * SIZE * 4
    reported = [StoreRoom("posix", 1000, 10 * tasks, record) for tasks in (2, 4)]
    assert [room for room in rooms if room] == (reported if writer else [])


class Making:
    """Representations that take as long as a test wants."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.forgotten: list[str] = []

    def begin_load(self, *_: Any) -> None:
        """They are to be made."""

    def arrived(self, request: str, blocks: Any) -> bool:
        return False

    def work(self) -> list[str]:
        made, self.made = self.made, []
        return made

    def forget(self, request: str) -> None:
        self.forgotten.append(request)


def test_a_load_is_under_way_until_what_is_selected_from_is_made() -> None:
    """After an exception all that is not under way counts as lost."""
    worker = Worker()
    store = worker.open()
    making: Any = Making()
    worker.connector.loads.representations = making
    store.kept.update(dict.fromkeys(record_ids(KEYS[0], part_mask(0, 0, 0)), bytes(8192)))
    worker.step(loads=[load("a", [3])])
    store.end("staged", "published")
    assert worker.step()[0] == set()
    assert worker.connector.loads_under_way(poll=False) == {"a"}
    making.made = ["a"]
    assert worker.step()[:2] == ({"a"}, set())
    assert worker.connector.loads_under_way(poll=False) == set()


def test_a_load_that_is_lost_is_reported_as_failed_once() -> None:
    worker = Worker()
    store = worker.open()
    making: Any = Making()
    worker.connector.loads.representations = making
    store.kept.update(dict.fromkeys(record_ids(KEYS[0], part_mask(0, 0, 0)), bytes(8192)))
    lost = load("a", [3], first=2)
    worker.step(loads=[lost])
    store.end("staged", "published")
    worker.step()
    # As the end of the load, and again where the bad blocks could not be reported.
    for _ in range(2):
        worker.connector.loads.forget(lost)
    assert "a" in making.forgotten, "nothing is made of its blocks, which may be others' by now"
    ended, bad, report = worker.step()
    assert (ended, bad) == (set(), set())
    assert report is not None
    (failure,) = report.ranks[0].load_failures
    assert (failure.request, failure.first, failure.refused, failure.reasons) == (
        "a",
        2,
        b"",
        ("internal",),
    )
    assert report.ranks[0].served == []
    assert worker.connector.loads_under_way(poll=False) == set()
