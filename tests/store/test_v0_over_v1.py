"""The V0 interface: blocks are invisible before their commit, dropped ones leave nothing, results
are correct."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from other_stores import FailingV1, UsersV0

from ucm.errors import (
    ConfigError,
    InvalidInputError,
    NotFoundError,
    TaskError,
    UnknownConnectorError,
    UnsupportedError,
)
from ucm.store import UcmConnectorFactory, UcmKVStoreBase
from ucm.store.posix import UcmPosixStore
from ucm.store.ucmstore import DUPLICATE_KEY, block_id
from ucm.store.v0_over_v1 import FORGOTTEN_S, V0OverV1

PIECE = 4096
SHARDS = 3
BLOCK = PIECE * SHARDS

Bytes = npt.NDArray[np.uint8]


def names(count: int) -> list[str]:
    return [f"{number:032x}" for number in range(1, count + 1)]


def memory(blocks: int, seed: int = 0) -> list[Bytes]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, PIECE, dtype=np.uint8) for _ in range(blocks * SHARDS)]


def rows(ids: list[str]) -> tuple[list[str], list[int]]:
    """A row per shard of each block."""
    return [name for name in ids for _ in range(SHARDS)], [
        shard * PIECE for _ in ids for shard in range(SHARDS)
    ]


@pytest.fixture
def config(common: dict[str, Any]) -> dict[str, Any]:
    return common | {"kv_block_size": BLOCK, "io_size": PIECE}


@pytest.fixture
def store(config: dict[str, Any]) -> Iterator[V0OverV1]:
    made = UcmConnectorFactory.create_connector("UcmPosixStore", config)
    assert isinstance(made, V0OverV1)
    with made:
        yield made


@pytest.fixture
def failing() -> FailingV1:
    return FailingV1({"tensor_size": PIECE, "shard_size": PIECE, "block_size": BLOCK})


def stored(store: UcmKVStoreBase, ids: list[str], source: list[Bytes]) -> None:
    assert list(store.create(ids)) == [0] * len(ids)
    assert store.wait(store.dump(*rows(ids), source)) == 0
    store.commit(ids)


def test_a_block_is_there_when_it_was_committed_and_not_before(
    store: V0OverV1, config: dict[str, Any]
) -> None:
    ids, source, target = names(3), memory(3), memory(3, seed=9)
    other = UcmConnectorFactory.create_connector("UcmPosixStore", config)
    assert store.lookup(ids) == [False] * 3
    assert store.create(ids) == [0, 0, 0]
    task = store.dump(*rows(ids), source)
    assert store.check(task) == (0, True)
    assert store.wait(task) == store.wait(task) == 0
    assert store.lookup(ids) == other.lookup(ids) == [False] * 3, "not committed"
    store.commit(ids)
    assert store.lookup(ids) == [True] * 3
    assert other.lookup(ids) == [True] * 3
    task = other.load(*rows(ids), target)
    assert other.wait(task) == 0
    assert all(np.array_equal(a, b) for a, b in zip(source, target, strict=True))
    assert store.create(ids) == [DUPLICATE_KEY] * 3
    store.commit(ids)  # again: nothing to do
    other.close()  # type: ignore[attr-defined]


def test_the_source_is_free_when_dump_returned(store: V0OverV1) -> None:
    ids, source, target = names(1), memory(1), memory(1, seed=9)
    wanted = [part.copy() for part in source]
    store.create(ids)
    store.dump(*rows(ids), source)
    for part in source:
        part[:] = 0
    store.commit(ids)
    store.wait(store.load(*rows(ids), target))
    assert all(np.array_equal(a, b) for a, b in zip(wanted, target, strict=True))


def test_raw_addresses_in_any_order_and_many_shards_at_once(store: V0OverV1) -> None:
    ids = names(2)
    source, target = (
        np.arange(2 * BLOCK, dtype=np.uint64).astype(np.uint8),
        np.zeros(2 * BLOCK, np.uint8),
    )
    base, end = source.ctypes.data, target.ctypes.data
    store.create(ids)
    store.dump_data([ids[1]], [PIECE], [base + BLOCK + PIECE], [2 * PIECE])
    store.dump_data([ids[0], ids[1]], [0, 0], [base, base + BLOCK], [BLOCK, PIECE])
    store.commit(ids)
    task = store.fetch_data([ids[1], ids[0]], [0, 0], [end + BLOCK, end], [BLOCK, BLOCK])
    assert store.wait(task) == 0
    assert store.check(task) == (0, True)
    assert np.array_equal(source, target)


def test_what_is_dropped_leaves_nothing_behind(store: V0OverV1, tmp_path: Path) -> None:
    ids, wrong, right, target = names(1), memory(1), memory(1, seed=1), memory(1, seed=2)
    store.create(ids)
    store.dump(*rows(ids), wrong)
    store.commit(ids, False)
    assert store.lookup(ids) == [False]
    assert not list(tmp_path.rglob("*.bin"))
    assert store.create(ids) == [0]
    store.dump(*rows(ids), right)
    store.commit(ids)
    assert store.wait(store.load(*rows(ids), target)) == 0
    assert all(np.array_equal(a, b) for a, b in zip(right, target, strict=True)), (
        "not one byte of the first try"
    )


def test_one_answer_for_each_block(store: V0OverV1) -> None:
    ids = names(3)
    store.create(ids)
    store.dump(*rows(ids), memory(3))
    store.commit(ids, [True, False, True])
    assert store.lookup(ids) == [True, False, True]
    with pytest.raises(InvalidInputError, match="one answer for all"):
        store.commit(ids, [True])


def test_a_commit_says_which_blocks_it_could_not_publish(store: V0OverV1) -> None:
    ids = names(3)
    store.create(ids[:2])
    store.dump(*rows(ids[:1]), memory(1))
    part = memory(1)[0]
    store.dump([ids[1]], [PIECE], [part])
    with pytest.raises(TaskError, match="2 of 3 blocks were not published") as caught:
        store.commit(ids)
    assert isinstance(caught.value.failures[1], InvalidInputError)
    assert caught.value.failures[1].context == {"missing_shards": [0, 2]}
    assert isinstance(caught.value.failures[2], NotFoundError)
    assert store.lookup(ids) == [True, False, False]
    store.dump([ids[1], ids[1]], [0, 2 * PIECE], [part, part])
    store.commit([ids[1]])  # the rest was dumped, now it is complete
    assert store.lookup(ids) == [True, True, False]


def test_what_is_not_there_has_a_code(store: V0OverV1) -> None:
    ids, target = names(2), memory(2)
    stored(store, ids[:1], memory(1))
    task = store.load(*rows(ids), target)
    assert store.wait(task) == NotFoundError.code
    assert store.wait(task) == NotFoundError.code
    assert store.check(task) == (NotFoundError.code, True)
    assert isinstance(task.error, TaskError)
    assert set(task.error.failures) == {3, 4, 5}, "the block before it exists"
    assert store.wait([store.load(*rows(ids[:1]), target[:3]), task]) == NotFoundError.code


@pytest.mark.parametrize("wrong", ["ab", "g" * 32, b"short", "a" * 33, 7, " " + "a" * 31])
def test_ids_are_hexadecimal_or_sixteen_bytes(store: V0OverV1, wrong: Any) -> None:
    for call in (store.lookup, store.create, store.commit, store.prefetch):
        with pytest.raises(InvalidInputError, match="32 hexadecimal digits"):
            call([wrong])
    with pytest.raises(InvalidInputError, match="not one text"):
        store.lookup("a" * 32)
    assert block_id("AB" * 16) == block_id(b"\xab" * 16) == b"\xab" * 16


@pytest.mark.parametrize(
    ("offset", "size"), [(1, PIECE), (0, 1), (0, 0), (-PIECE, PIECE), (2 * PIECE, 2 * PIECE)]
)
def test_rows_cover_whole_shards_of_their_block(store: V0OverV1, offset: int, size: int) -> None:
    ids = names(1)
    store.create(ids)
    there = np.zeros(BLOCK, np.uint8)
    for call in (store.dump_data, store.fetch_data):
        with pytest.raises(InvalidInputError, match="whole shards"):
            call(ids, [offset], [there.ctypes.data], [size])


def test_calls_that_make_no_sense(store: V0OverV1) -> None:
    ids, part = names(1), memory(1)[0]
    with pytest.raises(NotFoundError, match="create"):
        store.dump(ids, [0], [part])
    store.create(ids)
    with pytest.raises(InvalidInputError, match="equally many"):
        store.dump(ids, [0, 1], [part])
    with pytest.raises(InvalidInputError, match="null"):
        store.dump_data(ids, [0], [0], [PIECE])
    with pytest.raises(InvalidInputError, match="contiguous"):
        store.dump(ids, [0], [np.zeros((PIECE, 2), np.uint8)[:, 0]])
    with pytest.raises(InvalidInputError, match="torch tensor or a NumPy"):
        store.dump(ids, [0], ["x"])
    store.dump([], [], [])
    store.commit([])


class OnDevice:
    """A tensor outside of the host."""

    class device:  # noqa: N801 - as torch names it
        type = "cuda"


def test_device_memory_is_refused(store: V0OverV1) -> None:
    for call in (store.load, store.dump):
        with pytest.raises(UnsupportedError, match="host memory"):
            call(names(1), [0], [OnDevice()])


def test_torch_tensors(store: V0OverV1) -> None:
    torch = pytest.importorskip("torch")
    ids = names(1)
    source = [torch.full((PIECE // 2,), number, dtype=torch.float16) for number in range(SHARDS)]
    target = [torch.zeros_like(part) for part in source]
    stored(store, ids, source)
    assert store.wait(store.load(*rows(ids), target)) == 0
    assert all(torch.equal(a, b) for a, b in zip(source, target, strict=True))


def test_room_for_created_blocks_is_bounded_and_forgotten_ones_give_it_back(
    failing: FailingV1,
) -> None:
    now = [0.0]
    store, ids = V0OverV1(failing, buffer_bytes=2 * BLOCK, clock=lambda: now[0]), names(4)
    assert store.create(ids[:3]) == [0, 0, -50004]
    assert store.create([ids[0], ids[3], ids[3]]) == [DUPLICATE_KEY, -50004, -50004]
    store.commit(ids[:1], False)
    assert store.create([ids[3], ids[3]]) == [0, DUPLICATE_KEY]
    now[0] = FORGOTTEN_S + 1
    assert store.create(ids[:2]) == [0, 0]


def test_create_says_when_the_store_is_not_well(failing: FailingV1) -> None:
    failing.well = False
    assert V0OverV1(failing).create(names(2)) == [-50013, -50013]


@pytest.mark.parametrize(
    ("trouble", "kind"), [("first row", "corrupt"), ("busy", "busy"), ("late", "timeout")]
)
def test_a_failed_publish_is_told_and_can_be_tried_again(
    failing: FailingV1, trouble: str, kind: str
) -> None:
    store, ids, source = V0OverV1(failing), names(1), memory(1)
    store.create(ids)
    store.dump(*rows(ids), source)
    failing.trouble = trouble
    with pytest.raises(TaskError) as caught:
        store.commit(ids)
    assert caught.value.failures[0].kind == kind
    assert store.lookup(ids) == [False]
    store.commit(ids)
    assert store.lookup(ids) == [True]


def test_a_dump_that_lies_is_not_believed(failing: FailingV1) -> None:
    store, ids = V0OverV1(failing), names(1)
    failing.forgetful = True
    store.create(ids)
    store.dump(*rows(ids), memory(1))
    with pytest.raises(TaskError, match="does not find the block"):
        store.commit(ids)


def test_memory_that_may_still_be_read_counts(
    failing: FailingV1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late commit: the V1 store still reads the kept memory, so it is not reused."""
    store, ids = V0OverV1(failing, buffer_bytes=BLOCK), names(2)
    store.create(ids[:1])
    store.dump(*rows(ids[:1]), memory(1))
    failing.trouble = "late"
    with pytest.raises(TaskError):
        store.commit(ids[:1])
    store.commit(ids[:1], False)
    assert store.create(ids[1:]) == [-50004]
    monkeypatch.setattr(failing, "check", lambda task, until="published": True)
    assert store.create(ids[1:]) == [0]


def test_an_interrupted_commit_keeps_what_it_did_not_publish(
    failing: FailingV1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during a wait: the V1 store may still read the kept memory, and the block can be
    committed again."""
    store, ids = V0OverV1(failing, buffer_bytes=2 * BLOCK), names(2)
    store.create(ids[:1])
    store.dump(*rows(ids[:1]), memory(1))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(failing, "wait", interrupted)
        patched.setattr(failing, "check", lambda task, until="published": False)
        with pytest.raises(KeyboardInterrupt):
            store.commit(ids[:1])
        assert store.create(ids) == [DUPLICATE_KEY, -50004]
    store.commit(ids[:1])
    assert store.lookup(ids[:1]) == [True]


def test_a_commit_is_cut_to_the_slots_there_are(failing: FailingV1) -> None:
    store, ids = V0OverV1(failing), names(5)
    failing.slots = 2
    stored(store, ids, memory(5))
    assert failing.dumped == [2 * SHARDS, 2 * SHARDS, SHARDS]
    assert store.lookup(ids) == [True] * 5


def test_pieces_of_a_shard_need_not_be_neighbours_for_v1(common: dict[str, Any]) -> None:
    """A V0 row is one stretch of bytes; a V1 store with several pieces per shard gets their
    addresses."""
    v1 = UcmPosixStore(
        common | {"tensor_size_list": [64, 32], "shard_size": 192, "block_size": 384}
    )
    with V0OverV1(v1) as store:
        source, target = np.arange(384, dtype=np.uint64).astype(np.uint8), np.zeros(384, np.uint8)
        assert store.create(names(1)) == [0]
        store.dump(names(1), [0], [source])
        store.commit(names(1))
        assert store.wait(store.load(names(1), [0], [target])) == 0
        assert np.array_equal(source, target)


# The factory
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["UcmPosixStore", "UcmNfsStore", "UcmPcStore"])
def test_names_and_keys_of_the_original(
    name: str, common: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A script of the original, unchanged except for its imports."""
    config = {
        "storage_backends": common["storage_backends"],
        "kv_block_size": BLOCK,
        "role": "worker",
        "device": 0,
        "io_size": PIECE,
        "stream_number": 32,
        "buffer_number": 512,
        "recycle_enable": 0,
        "storage_capacity": 0,
        "use_direct": False,
    }
    own = {key: common[key] for key in ("deadlines", "staging_capacity", "free_space_floor")}
    store = UcmConnectorFactory.create_connector(name, config | own)
    ids, source, target = names(2), memory(2), memory(2, seed=3)
    assert store.lookup(ids) == [False, False]
    stored(store, ids, source)
    assert store.lookup(ids) == [True, True]
    assert store.wait(store.load(*rows(ids), target)) == 0
    assert all(np.array_equal(a, b) for a, b in zip(source, target, strict=True))
    scheduler = UcmConnectorFactory.create_connector(name, config | own | {"role": "scheduler"})
    assert scheduler.lookup(ids) == [True, True]
    assert "stream_number" in caplog.text
    for made in (store, scheduler):
        made.close()  # type: ignore[attr-defined]


def test_a_users_v0_store_is_made_as_it_is() -> None:
    made = UcmConnectorFactory.create_connector("UsersV0", {"anything": 1}, "other_stores")
    assert isinstance(made, UsersV0)
    assert made.config == {"anything": 1}


def test_what_the_factory_cannot_make() -> None:
    with pytest.raises(UnknownConnectorError):
        UcmConnectorFactory.create_connector("Nothing", {})
    with pytest.raises(ConfigError, match="role"):
        UcmConnectorFactory.create_connector("UcmPosixStore", {"role": "cook"})
    with pytest.raises(InvalidInputError, match="sizes"):
        UcmConnectorFactory.create_connector("FailingV1", {}, "other_stores")


def test_every_name_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from ucm.store.factory_v1 import UcmConnectorFactoryV1

    monkeypatch.setattr(UcmConnectorFactoryV1, "_registry", dict(UcmConnectorFactoryV1._registry))
    UcmConnectorFactory.register_connector("Mine", "other_stores", "UsersV0")
    assert {"Mine", "UcmPosixStore", "UcmNfsStore", "UcmPcStore"} <= set(
        UcmConnectorFactory.registered()
    )
    assert isinstance(UcmConnectorFactory.create_connector("Mine", {}), UsersV0)
