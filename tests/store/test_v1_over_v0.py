"""A user's V0 store as a V1 store: exact bytes, deadlines although V0 has none, bounded memory,
correct results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from other_stores import FailingV1, TensorV0, UsersV0

from ucm.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    StoreIOError,
    TaskError,
    UnsupportedError,
)
from ucm.store import UcmConnectorFactoryV1
from ucm.store.posix import UcmPosixStore
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1
from ucm.store.v0_over_v1 import V0OverV1
from ucm.store.v1_over_v0 import V1OverV0

PIECES = [96, 32]
LAYERS = 3
LAYER = sum(PIECES)
BLOCK = LAYER * LAYERS
PATIENT = {
    "deadlines": {"lookup_ms": 20_000, "load_unknown_s": 60.0, "load_max_s": 60.0, "dump_s": 60.0}
}
DIRECT = {"tensor_size_list": PIECES, "shard_size": BLOCK, "block_size": BLOCK, **PATIENT}
LAYERWISE = {"tensor_size_list": PIECES, "shard_size": LAYER, "block_size": BLOCK, **PATIENT}

Addresses = npt.NDArray[np.uint64]


class Memory:
    """Blocks of separate pieces."""

    def __init__(self, blocks: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.pieces = [
            [
                random.integers(0, 256, size, dtype=np.uint8)
                for _ in range(LAYERS)
                for size in PIECES
            ]
            for _ in range(blocks)
        ]

    @property
    def rows(self) -> Addresses:
        return np.array(
            [[piece.ctypes.data for piece in block] for block in self.pieces], np.uint64
        )

    @property
    def layers(self) -> Addresses:
        return self.rows.reshape(-1, len(PIECES))

    def same(self, other: Memory) -> bool:
        pairs = zip(self.pieces, other.pieces, strict=True)
        return all(
            np.array_equal(a, b)
            for mine, theirs in pairs
            for a, b in zip(mine, theirs, strict=True)
        )


def ids(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(1, count + 1)]


@pytest.fixture
def made() -> Iterator[Callable[..., V1OverV0]]:
    """Makes stores over a V0 store; releases hanging calls at the end."""
    stores: list[V1OverV0] = []

    def make(v0: Any = None, config: Any = None, **options: Any) -> V1OverV0:
        stores.append(V1OverV0(v0 or UsersV0({}), config or DIRECT, **options))
        return stores[-1]

    yield make
    for store in stores:
        if isinstance(store.v0, UsersV0):
            store.v0.go.set()
        store.close()


KINDS = ["users", "tensors", "there and back", "posix and back"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [DIRECT, LAYERWISE], ids=["direct", "layerwise"])
def test_any_v0_store_behaves_as_a_v1_store(
    kind: str, sizes: dict[str, Any], common: dict[str, Any], made: Callable[..., V1OverV0]
) -> None:
    """The same over a V1 store of this project: both adapters in sequence."""
    v0: Any
    if kind == "users":
        v0 = UsersV0({})
    elif kind == "tensors":
        pytest.importorskip("torch")
        v0 = TensorV0({})
    elif kind == "there and back":
        v0 = V0OverV1(FailingV1(sizes))
    else:
        v0 = V0OverV1(UcmPosixStore(common | sizes))
    store: UcmKVStoreBaseV1 = made(v0, sizes)
    names, source, target = ids(4), Memory(4, 0), Memory(4, 1)
    assert store.lookup(names) == [False] * 4
    assert store.lookup_on_prefix(names) == -1
    direct = sizes is DIRECT
    if direct:
        tasks = [store.dump_data(names, [0] * 4, source.rows)]
    else:
        by_layer = source.layers.reshape(4, LAYERS, -1)
        tasks = [
            store.dump_data(names, [layer] * 4, by_layer[:, layer]) for layer in range(LAYERS - 1)
        ]
        store.wait(tasks)
        assert store.lookup(names) == [False] * 4, "a block lacks a shard"
        tasks.append(store.dump_data(names, [LAYERS - 1] * 4, by_layer[:, LAYERS - 1]))
    store.wait(tasks)
    store.wait(tasks)
    assert all(store.check(task) for task in tasks)
    assert store.lookup([*names, b"x" * 16]) == [True] * 4 + [False]
    assert store.lookup_on_prefix([*names, b"x" * 16]) == 3
    if direct:
        store.wait(store.load_data(names, [0] * 4, target.rows))
    else:
        shards = [layer for _ in names for layer in range(LAYERS)]
        store.wait(
            store.load_data([n for n in names for _ in range(LAYERS)], shards, target.layers)
        )
    assert source.same(target)
    again = store.dump_data(names[:1], [0], (source.rows if direct else source.layers)[:1])
    store.wait(again)  # it is stored already: nothing to do


def test_the_source_is_free_when_dump_returned(made: Callable[..., V1OverV0]) -> None:
    store, source, target, wanted = made(), Memory(1, 0), Memory(1, 1), Memory(1, 0)
    assert isinstance(store.v0, UsersV0)
    task = store.dump_data(ids(1), [0], source.rows)
    for piece in source.pieces[0]:
        piece[:] = 0
    store.wait(task, until="staged")
    assert store.check(task, until="staged")
    store.wait(task)
    store.wait(store.load_data(ids(1), [0], target.rows))
    assert wanted.same(target)


def test_a_load_that_hangs_ends_at_its_deadline_and_writes_nothing_afterwards(
    made: Callable[..., V1OverV0],
) -> None:
    now = [0.0]
    v0 = UsersV0({})
    store, source, target, before = (
        made(v0, clock=lambda: now[0]),
        Memory(2, 0),
        Memory(2, 1),
        Memory(2, 1),
    )
    store.wait(store.dump_data(ids(2), [0, 0], source.rows))
    v0.go.clear()
    v0.at_wait.clear()
    task = store.load_data(ids(2), [0, 0], target.rows, timeout=5.0)
    behind = store.load_data(ids(2), [0, 0], target.rows, timeout=5.0)
    assert v0.at_wait.wait(60)
    assert not store.check(task)
    with pytest.raises(DeadlineError, match="not ended yet"):
        store.wait(task, timeout=0.0)
    assert store.healthy()
    now[0] = 6.0
    assert store.check(task)
    assert store.check(behind)
    with pytest.raises(TaskError) as caught:
        store.wait(task)
    assert {kind.kind for kind in caught.value.failures.values()} == {"timeout"}
    assert sorted(caught.value.failures) == [0, 1]
    assert not store.healthy(), "nothing else can be loaded while it hangs"
    now[0] = 7.0
    v0.go.set()
    late = Memory(2, 2)
    # the calls before it in the queue are over
    store.wait(store.load_data(ids(2), [0, 0], late.rows))
    assert target.same(before), "not one late byte"
    assert late.same(source)
    assert store.healthy()


def test_a_dump_that_hangs_ends_and_the_next_one_works(made: Callable[..., V1OverV0]) -> None:
    now = [0.0]
    v0 = UsersV0({})
    store, source = made(v0, clock=lambda: now[0]), Memory(1, 0)
    v0.go.clear()
    task = store.dump_data(ids(1), [0], source.rows)
    assert v0.at_wait.wait(60)
    now[0] = 100.0
    with pytest.raises(TaskError, match="did not end in time"):
        store.wait(task)
    v0.go.set()
    store.wait(store.dump_data(ids(2)[1:], [0], source.rows))
    assert store.lookup(ids(2)) == [True, True], "the late one was finally written"


def test_dumps_are_bounded_and_refused_at_once(made: Callable[..., V1OverV0]) -> None:
    """The minimum of staging is 1 MiB: two blocks here. A task keeps its staged bytes until it has
    ended."""
    size = 1 << 19
    v0 = UsersV0({})
    sizes = {
        "tensor_size": size,
        "shard_size": size,
        "block_size": size,
        "staging_capacity": "1MiB",
    }
    store = made(v0, PATIENT | sizes)
    source = np.zeros(size, np.uint8)
    rows = np.full((3, 1), source.ctypes.data, np.uint64)
    v0.go.clear()
    assert store.free_dump_slots() == 2
    first = store.dump_data(ids(2), [0, 0], rows[:2])
    assert store.free_dump_slots() == 0
    with pytest.raises(BusyError, match="no room"):
        store.dump_data(ids(3)[2:], [0], rows[2:])
    v0.go.set()
    store.wait(first)
    assert store.lookup(ids(3)) == [True, True, False]
    assert store.stats()["dump_bytes_waiting"] == 0
    store.close()
    with pytest.raises(ClosedError):
        store.dump_data(ids(1), [0], rows[:1])


def test_keys_of_all_stores_mean_the_same_here(made: Callable[..., V1OverV0]) -> None:
    now = [0.0]
    v0 = UsersV0({})
    store, there = (
        made(v0, DIRECT | {"deadlines": {"load_unknown_s": 2, "dump_s": 3}}, clock=lambda: now[0]),
        Memory(1, 0),
    )
    v0.go.clear()
    load, dump = store.load_data(ids(1), [0], there.rows), store.dump_data(ids(1), [0], there.rows)
    now[0] = 2.5
    assert (store.check(load), store.check(dump)) == (True, False)
    now[0] = 3.5
    assert store.check(dump)
    for wrong in ({"deadlines": {"dump_s": -1}}, {"staging_capacity": "little"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            V1OverV0(v0, DIRECT | wrong)


def test_closing_ends_what_runs_too_and_nothing_is_written_afterwards(
    made: Callable[..., V1OverV0],
) -> None:
    v0 = UsersV0({})
    store, target, before = made(v0), Memory(1, 0), Memory(1, 0)
    store.wait(store.dump_data(ids(1), [0], Memory(1, 1).rows))
    v0.at_wait.clear()
    v0.go.clear()
    running = store.load_data(ids(1), [0], target.rows)
    assert v0.at_wait.wait(60)
    waiting = store.load_data(ids(1), [0], target.rows)
    threads = [thread for thread in threading.enumerate() if thread.name == "ucm-v0-load"]
    store.close()
    store.close()
    for task in (running, waiting):
        with pytest.raises(TaskError, match="closed"):
            store.wait(task)
    v0.go.set()  # the call that was under way returns with its bytes
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert target.same(before)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-50009, NoSpaceError),
        (-50004, BusyError),
        (-50001, BusyError),
        (-50010, DeadlineError),
        (17, StoreIOError),
    ],
)
def test_codes_of_create_become_errors_by_row(
    code: int, kind: type[Exception], made: Callable[..., V1OverV0]
) -> None:
    v0 = UsersV0({})
    v0.codes[ids(2)[1].hex()] = code
    store, source = made(v0), Memory(2, 0)
    with pytest.raises(TaskError) as caught:
        store.wait(store.dump_data(ids(2), [0, 0], source.rows))
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1], kind)
    assert store.lookup(ids(2)) == [True, False]


def test_a_block_that_another_writes_is_busy_not_stored(made: Callable[..., V1OverV0]) -> None:
    v0 = UsersV0({})
    v0.created.add(ids(1)[0].hex())
    store = made(v0)
    with pytest.raises(TaskError, match="another process"):
        store.wait(store.dump_data(ids(1), [0], Memory(1, 0).rows))


def test_a_failed_dump_is_dropped_in_the_v0_store(made: Callable[..., V1OverV0]) -> None:
    v0 = UsersV0({})
    v0.wait_code = -50002
    store, source = made(v0), Memory(1, 0)
    with pytest.raises(TaskError, match="failed to dump"):
        store.wait(store.dump_data(ids(1), [0], source.rows))
    assert v0.calls == ["create", "commit False"]
    with pytest.raises(TaskError, match="failed to load"):
        store.wait(store.load_data(ids(1), [0], source.rows))
    v0.wait_code = 0
    store.wait(store.dump_data(ids(1), [0], source.rows))
    assert store.lookup(ids(1)) == [True]


def test_a_commit_that_lies_is_not_believed(made: Callable[..., V1OverV0]) -> None:
    v0 = UsersV0({})
    v0.forgetful = True
    with pytest.raises(TaskError) as caught:
        (store := made(v0)).wait(store.dump_data(ids(1), [0], Memory(1, 0).rows))
    assert isinstance(caught.value.failures[0], NotFoundError)


@pytest.mark.parametrize("method", ["create", "wait", "commit", "dump_data"])
def test_what_a_v0_store_raises_ends_the_dump(method: str, made: Callable[..., V1OverV0]) -> None:
    v0 = UsersV0({})

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a bug of the user's")

    setattr(v0, method, broken)
    store = made(v0)
    with pytest.raises(TaskError, match="a bug of the user's"):
        store.wait(store.dump_data(ids(1), [0], Memory(1, 0).rows))


def test_blocks_given_up_half_way_do_not_pile_up(
    made: Callable[..., V1OverV0], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucm.store.v0.INCOMPLETE", 2)
    v0 = UsersV0({})
    store, source = made(v0, LAYERWISE), Memory(3, 0)
    store.wait(store.dump_data(ids(3)[:2], [0, 0], source.layers[:2]))
    store.wait(store.dump_data(ids(3)[2:], [0], source.layers[:1]))
    assert v0.calls == ["create", "create", "commit False"] or v0.calls == [
        "create",
        "commit False",
        "create",
    ]
    assert len(v0.created) == 2


def test_calls_that_make_no_sense(made: Callable[..., V1OverV0]) -> None:
    store, there = made(), Memory(1, 0)
    for call in (store.load_data, store.dump_data):
        with pytest.raises(InvalidInputError, match="16 raw bytes"):
            call([b"short"], [0], there.rows)
        with pytest.raises(InvalidInputError, match="equally many"):
            call(ids(2), [0, 0], there.rows)
        with pytest.raises(InvalidInputError, match="one column per tensor"):
            call(ids(1), [0], there.rows[:, :1])
        with pytest.raises(InvalidInputError, match="out of range"):
            call(ids(1), [1], there.rows)
        with pytest.raises(InvalidInputError, match="null"):
            call(ids(1), [0], np.zeros_like(there.rows))
    with pytest.raises(UnsupportedError, match="events"):
        store.dump_data(ids(1), [0], there.rows, prerequisite_handle=1)
    with pytest.raises(InvalidInputError, match="no task"):
        store.wait(object())
    with pytest.raises(InvalidInputError, match="sizes"):
        V1OverV0(UsersV0({}), {})
    store.wait(
        [
            store.load_data([], [], np.zeros((0, 6), np.uint64)),
            store.dump_data([], [], np.zeros((0, 6))),
        ]
    )


def test_many_threads_at_once(made: Callable[..., V1OverV0]) -> None:
    store = made()
    problems: list[str] = []

    def work(number: int) -> None:
        name, source, target = [bytes([number]) * 16], Memory(1, number), Memory(1, 99)
        store.wait(store.dump_data(name, [0], source.rows))
        store.wait(store.load_data(name, [0], target.rows))
        if not source.same(target):
            problems.append(f"thread {number} read another's bytes")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems


def test_the_factory_puts_v1_in_front_of_a_v0_store() -> None:
    config = DIRECT | {"device_id": -1, "identity": "x", "storage_backends": ["/nowhere"]}
    store = UcmConnectorFactoryV1.create_connector("UsersV0", config, "other_stores")
    assert isinstance(store, V1OverV0)
    assert store.config == config
    told = store.v0.config
    assert (told["kv_block_size"], told["io_size"], told["role"]) == (BLOCK, BLOCK, "scheduler")
    worker = UcmConnectorFactoryV1.create_connector(
        "UsersV0", DIRECT | {"device_id": 0, "role": "x"}, "other_stores"
    )
    assert isinstance(worker, V1OverV0)
    assert worker.v0.config["role"] == "x", "what the user wrote holds"
    assert not issubclass(
        UcmConnectorFactoryV1.resolve("UsersV0", "other_stores"), UcmKVStoreBaseV1
    )
    with pytest.raises(ConfigError, match="does not define"):
        UcmConnectorFactoryV1.resolve("UcmKVStoreBase", "ucm.store.ucmstore")
