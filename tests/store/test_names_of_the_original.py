"""Uses of the original's names by its programs: polled tasks, spellings, ids, keys."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blocks import BLOCK, PATIENT, PIECES, Memory, ids
from other_stores import UsersV0

from ucm.config import parse
from ucm.errors import (
    BusyError,
    ConfigError,
    InvalidInputError,
    StoreIOError,
    TaskError,
    UnknownConnectorError,
)
from ucm.store import (
    BlockHasher,
    BlockId,
    RequestHasher,
    Task,
    UcmConnectorFactory,
    UcmConnectorFactoryV1,
    UcmKVStoreBaseV1,
    V0ToV1Adapter,
    compute_block_hash,
    select_storage,
)
from ucm.store.cache import UcmCacheStore
from ucm.store.pc import UcmPcStore
from ucm.store.pipeline import UcmPipelineStore
from ucm.store.posix import UcmPosixStore
from ucm.store.posix.connector import PosixTask
from ucm.store.v1_over_v0 import V1OverV0

SIZES: dict[str, Any] = {"tensor_size_list": PIECES, "shard_size": BLOCK, "block_size": BLOCK}


def roomy(root: Path) -> dict[str, Any]:
    room = {"storage_capacity": "64MiB", "free_space_floor": 0, "staging_capacity": "1MiB"}
    return {**SIZES, **room, "storage_backends": str(root), "deadlines": PATIENT}


# Tasks that are polled
# ----------------------------------------------------------------------------------------


class Threaded(UcmKVStoreBaseV1):
    """A user's store that can only wait; its tasks have their store, like those of the original."""

    def __init__(self, *, told: bool = True) -> None:
        super().__init__({})
        self.told = told
        self.go = threading.Event()
        self.fails = False
        self._pool = ThreadPoolExecutor(1)

    def _work(self) -> None:
        assert self.go.wait(60)
        if self.fails:
            raise StoreIOError("told to")

    def lookup(self, block_ids: Any) -> list[bool]:
        return [False for _ in block_ids]

    def load_data(self, block_ids: Any, shard_index: Any, addrs: Any) -> Task:
        return Task(self._pool.submit(self._work), self if self.told else None)

    def dump_data(
        self, block_ids: Any, shard_index: Any, addrs: Any, prerequisite_handle: int = 0
    ) -> Task:
        return self.load_data(block_ids, shard_index, addrs)

    def wait(self, task: Any, timeout: float | None = None, until: Any = "published") -> None:
        handle: Future[None] = task.handle
        handle.result()


def polled(task: Any) -> None:
    while not task.completed:
        pass


@pytest.mark.timeout(60)
def test_a_task_of_the_core_completes_by_itself(tmp_path: Path) -> None:
    with UcmPosixStore(roomy(tmp_path)) as store:
        source, copy = Memory(2), Memory(2, fill=0)
        polled(store.dump_data(ids(2), [0, 0], source.rows(0, 1)))
        assert store.lookup(ids(2)) == [True, True]
        task = store.load_data(ids(2), [0, 0], copy.rows(0, 1))
        polled(task)
        assert copy.equals(source, 0)
        assert copy.equals(source, 1)
        store.wait(task)
        polled(missing := store.load_data(ids(3)[2:], [0], copy.rows(0)))
        with pytest.raises(TaskError):
            store.wait(missing)
        late = store.dump_data([b"l" * 16], [0], source.rows(0))
    assert late.completed, "closing ends what is under way"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("told", [True, False])
def test_a_task_of_a_users_store_asks_its_store(told: bool, fails: bool) -> None:
    store = Threaded(told=told)
    store.fails = fails
    # one made without its store gets it from `load` and `dump`
    task = store.load_data([], [], None) if told else store.dump([b"a" * 16], [0], [[np.zeros(1)]])
    assert not task.completed
    assert not task.completed
    store.go.set()
    polled(task)
    assert store.check(task)
    store.close()
    assert task.completed


def test_a_store_that_answers_by_the_attribute_itself_is_not_asked_in_a_circle() -> None:
    class Mine(Threaded):
        def check(self, task: Any, until: Any = "published") -> bool:
            return bool(task.completed)

    task = Task(None, Mine())
    assert not task.completed
    task.completed = True
    assert task.completed


def test_a_store_that_is_busy_has_not_said_yes_and_one_that_is_closed_has() -> None:
    class Busy(Threaded):
        def check(self, task: Any, until: Any = "published") -> bool:
            raise BusyError("not now") if not self._closed else StoreIOError("gone")

    store = Busy()
    task = Task(None, store)
    assert not task.completed
    store.close()
    assert not task.completed, "an error that may pass"
    assert Task().completed is False


@pytest.mark.timeout(60)
def test_tasks_of_the_v0_adapters_complete_by_themselves(tmp_path: Path) -> None:
    names = [block.hex() for block in ids(2)]
    source, copy = np.arange(2 * BLOCK, dtype=np.uint8), np.zeros(2 * BLOCK, np.uint8)
    with UcmConnectorFactory.create_connector("UcmNfsStore", roomy(tmp_path)) as store:  # type: ignore[attr-defined]
        assert list(store.create(names)) == [0, 0]
        polled(store.dump(names, [0, 0], [source[:BLOCK], source[BLOCK:]]))
        store.commit(names)
        polled(task := store.load(names, [0, 0], [copy[:BLOCK], copy[BLOCK:]]))
        assert store.wait(task) == 0
    assert np.array_equal(source, copy)

    with V1OverV0(UsersV0({}), SIZES) as over:
        memory = Memory(1)
        polled(dumped := over.dump_data(ids(1), [0], memory.rows(0)))
        over.wait(dumped)
        polled(over.load_data(ids(1), [0], memory.rows(0)))


@pytest.mark.timeout(60)
def test_a_v0_task_that_nobody_ends_completes_at_its_deadline() -> None:
    now = [0.0]
    slow = UsersV0({})
    slow.go.clear()
    with V1OverV0(slow, SIZES, clock=lambda: now[0]) as over:
        task = over.load_data(ids(1), [0], Memory(1).rows(0), timeout=5.0)
        assert slow.at_wait.wait(30)
        assert not task.completed
        now[0] = 6.0
        assert task.completed
        slow.go.set()


def test_polling_is_one_question_each() -> None:
    asked: list[str] = []
    handle: Any = SimpleNamespace(check=lambda level: asked.append(level) or len(asked) > 1)
    task = PosixTask(handle, "dump")
    assert [task.completed for _ in range(4)] == [False, True, True, True]
    assert asked == ["published", "published"]


# Spellings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelled", ["storage_backends", "storage_path", "path"])
def test_a_store_that_is_made_directly_knows_the_spellings_of_files(
    tmp_path: Path, spelled: str
) -> None:
    written: dict[str, Any] = {
        **SIZES,
        spelled: str(tmp_path),
        "device": 0,
        "use_direct": False,
        "posix_capacity_gb": 1,
    }
    for kind in (UcmPosixStore, UcmPcStore):
        with kind(written) as store:
            assert store.settings.storage_backends == (str(tmp_path),)
            assert store.settings.device_id == 0
            assert store.settings.storage_capacity is not None
            assert store.settings.storage_capacity.bytes == 1 << 30


def test_device_minus_one_is_for_lookups_only(tmp_path: Path) -> None:
    for kind, more in (
        (UcmPosixStore, {"path": str(tmp_path)}),
        (UcmPipelineStore, {"pipeline": "Cache|Posix"}),
    ):
        with kind({**SIZES, "storage_backends": str(tmp_path), **more, "device": -1}) as store:
            assert store.settings.device_id == -1


def test_two_spellings_that_differ_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="differ"):
        UcmPosixStore({**SIZES, "path": str(tmp_path), "storage_path": "/other"})
    with pytest.raises(ConfigError, match="did you mean 'storage_backends'"):
        UcmPosixStore({**SIZES, "storage_bakends": str(tmp_path)})


def test_what_means_nothing_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucm.config.loading._said", set())
    tuned = {"stream_number": 8, "scatter_gather_enable": True, "unique_id": "x"}
    with caplog.at_level(logging.WARNING, "ucm.config"):
        for _ in range(2):
            UcmPcStore({**roomy(tmp_path), **tuned}).close()
    assert [
        sum(f'.{key}"' in record.getMessage() for record in caplog.records) for key in tuned
    ] == [1, 1, 1]


@pytest.mark.parametrize("extra", [{}, {"pipeline": "Cache|Posix"}, {"storage_backend": "pc"}])
def test_what_the_connector_tells_a_store_of_ours_is_no_reason_to_warn(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, str],
) -> None:
    monkeypatch.setattr("ucm.config.loading._said", set())
    config = parse({**extra, "storage_path": str(tmp_path), "storage_capacity": "64MiB"}, {})
    with caplog.at_level(logging.WARNING, "ucm.config"):
        UcmConnectorFactoryV1.create_connector(
            config.ucm_connector_name, config.store_config() | SIZES
        ).close()
    assert caplog.records == []


def test_a_cache_above_another_store_made_directly(tmp_path: Path) -> None:
    room = {"storage_path": str(tmp_path), "storage_capacity": "64MiB", "free_space_floor": 0}
    backend = {"name": "UcmPosixStore", "config": room}
    small = {**SIZES, "staging_capacity": "1MiB", "device": 0, "deadlines": PATIENT}
    with UcmCacheStore({**small, "cache_size": 1 << 20, "backend": backend}) as store:
        assert store.tier_names == ("memory", "posix")
        store.wait(store.dump_data(ids(1), [0], Memory(1).rows(0)))
    with UcmPosixStore(roomy(tmp_path)) as below:
        assert below.lookup(ids(1)) == [True]
    with UcmCacheStore({**small, "size_gb": 0.25}) as alone:
        assert (alone.tier_names, alone.tier_media) == ((), ("host",))


def test_the_factory_takes_its_arguments_by_name_and_by_place(tmp_path: Path) -> None:
    for make in (
        lambda: UcmConnectorFactoryV1.create_connector(
            connector_name="UcmPosixStore", config=roomy(tmp_path)
        ),
        lambda: UcmConnectorFactoryV1.create_connector("UcmPosixStore", roomy(tmp_path), None),
    ):
        make().close()


# Choosing
# --------------------------------------------------------------------------------------------------


def entry(name: str, **config: Any) -> dict[str, Any]:
    return {"ucm_connector_name": name, "ucm_connector_config": config}


def test_the_first_store_that_answers_is_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = tmp_path / "good"
    no_directory = tmp_path / "a file"
    no_directory.write_text("x")
    sick = entry("UcmPosixStore", **roomy(no_directory / "below"))
    wrong = entry("UcmPosixStore", **(SIZES | {"no_such_key": 1}))
    with caplog.at_level(logging.WARNING, "ucm.store"):
        store: Any = select_storage(
            {"ucm_connectors": [sick, wrong, entry("UcmPosixStore", **roomy(good)), sick]}
        )
    with store:
        assert store.settings.storage_backends == (str(good),)
        assert store.healthy()
    assert "not available" in caplog.text
    assert "no_such_key" in caplog.text


def test_where_none_answers_it_is_the_first_and_it_misses(tmp_path: Path) -> None:
    no_directory = tmp_path / "a file"
    no_directory.write_text("x")
    first, second = (
        entry("UcmPosixStore", **roomy(no_directory / name)) for name in ("one", "two")
    )
    with select_storage({"ucm_connectors": [first, second]}) as store:
        assert store.settings.storage_backends == (str(no_directory / "one"),)  # type: ignore[attr-defined]
        assert store.lookup(ids(1)) == [False]


def test_one_entry_at_the_top_and_none_at_all(tmp_path: Path) -> None:
    select_storage(entry("UcmPosixStore", **roomy(tmp_path))).close()
    select_storage({"ucm_connectors": entry("UcmEmptyStore")}).close()
    for nothing in ({}, {"ucm_connectors": []}):
        with pytest.raises(ConfigError, match="no store is configured"):
            select_storage(nothing)
    with pytest.raises(ConfigError, match="UcmNoStore"):
        select_storage({"ucm_connectors": [entry("UcmNoStore")]})
    assert issubclass(UnknownConnectorError, ConfigError)


# Ids and keys
# -------------------------------------------------------------------------------------------------


def test_an_id_and_its_hexadecimal_digits(tmp_path: Path) -> None:
    block = BlockId(ids(2)[1])
    assert (
        BlockId.from_hex(block.to_hex())
        == BlockId.from_hex(block.to_hex().upper())
        == block
        == ids(2)[1]
    )
    assert (len(block.to_hex()), BlockId.SIZE, type(block.bytes)) == (32, 16, bytes)
    assert {block: 1}[BlockId(block.bytes)] == 1
    wrong: list[Callable[[], BlockId]] = [
        lambda: BlockId(b"short"),
        lambda: BlockId(16),  # type: ignore[arg-type]
        lambda: BlockId.from_hex("abc"),
        lambda: BlockId.from_hex("x" * 32),
    ]
    for make in wrong:
        with pytest.raises(InvalidInputError):
            make()
    with UcmPosixStore(roomy(tmp_path)) as store:
        store.wait(store.dump_data([block], [0], Memory(1).rows(0)))
        assert store.lookup([block, BlockId(b"n" * 16)]) == [True, False]


def test_keys_of_a_request_are_those_of_the_block_hasher() -> None:
    tokens = list(range(40))
    plain = RequestHasher({"block_size": 8, "hash_method": "md5"})
    assert plain.generate_block_hashes(tokens) == BlockHasher(b"", 8, "md5").hash_blocks(
        np.array(tokens, np.uint32)
    )
    assert plain.generate_block_hashes(tokens, 16) == BlockHasher(b"", 16, "md5").hash_blocks(
        tokens
    )
    assert len(RequestHasher({}).generate_block_hashes(tokens)) == 2, "what is left over has no key"

    old = SimpleNamespace(model="m", tensor_parallel_size=2, dtype="bfloat16")
    new = SimpleNamespace(
        model_config=SimpleNamespace(model="m", dtype="bfloat16"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        cache_config=SimpleNamespace(block_size=8),
    )
    expected = BlockHasher(b"m:2:bfloat16:1", 8).hash_blocks(tokens)
    assert RequestHasher(old, 1).compute_block_hashes(tokens, 8) == expected
    assert RequestHasher(new, rank_id=1).compute_block_hashes(tokens) == expected
    assert RequestHasher(new, 0).compute_block_hashes(tokens) != expected


# One block, and stores in the form of document 001
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sha256", "md5"])
def test_one_block_has_the_key_that_the_chain_gives_it(method: str) -> None:
    tokens = [70_000 + at for at in range(12)]
    chain = BlockHasher(b"", 4, method).hash_blocks(tokens)
    first = compute_block_hash(tokens[:4], 4, hash_method=method)
    assert first == chain[0].hex()
    second = compute_block_hash(tokens[4:8], 4, first, hash_method=method)  # type: ignore[arg-type]
    assert second == chain[1].hex()
    assert compute_block_hash(chain[1], tokens[8:], hash_method=method) == chain[2]
    assert RequestHasher().compute_block_hashes(tokens, 4) == BlockHasher(b"", 4).hash_blocks(
        tokens
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (bytes(16), 4),
        ([1, 2, 3], 4),
        (bytes(3), [1]),
        ([1], [2]),
        (bytes(16), [1 << 32]),
        (bytes(16), ["a"]),
    ],
)
def test_one_block_is_hashed_in_two_forms_only(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInputError):
        compute_block_hash(*arguments)


def test_a_store_is_made_from_a_configuration_and_a_rank(tmp_path: Path) -> None:
    own = roomy(tmp_path)
    whole = {
        "ucm_connectors": [{"ucm_connector_name": "UcmPosixStore", "ucm_connector_config": own}]
    }
    for config in (whole, whole["ucm_connectors"][0]):
        store = UcmConnectorFactory.create_connector(config, 0)
        assert store.lookup([bytes(16).hex()]) == [False]
        store.close()
    with pytest.raises(ConfigError, match="names no store"):
        UcmConnectorFactory.create_connector({}, 0)
    with pytest.raises(ConfigError, match="from \\(ucm_config, local_rank\\)"):
        UcmConnectorFactory.create_connector(parse({"storage_path": str(tmp_path)}, {}), 0)
    assert V0ToV1Adapter is V1OverV0
