"""Guarantees of the store API, through the Rust store on a real file system."""

from __future__ import annotations

import ctypes.util
import hashlib
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import BLOCK, LAYERS, PIECES, Memory, ids, records
from plain_record import Expect, Part, verify, verify_file

from ucm.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    CorruptError,
    DeadlineError,
    ForkedError,
    InvalidInputError,
    NotFoundError,
    TaskError,
    UnsupportedError,
)
from ucm.reasons import MissReason, reason_of
from ucm.store import BlockHasher, UcmConnectorFactoryV1
from ucm.store.engine import read_settings, settings_of
from ucm.store.pipeline import UcmPipelineStore
from ucm.store.posix import UcmPosixStore

Open = Callable[..., UcmPosixStore]


@pytest.fixture(params=["file", "segment"])
def config(common: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    shape = {"tensor_size_list": PIECES, "shard_size": BLOCK, "block_size": BLOCK}
    return common | shape | {"layout": request.param, "segment_age": 0}


@pytest.fixture(params=["Posix", "Cache|Posix"])
def opened(
    config: dict[str, Any], request: pytest.FixtureRequest
) -> Iterator[Callable[..., UcmPosixStore]]:
    """Opens stores over one root, alone and below memory; closes those left open."""
    stores: list[UcmPosixStore] = []

    def make(**changes: Any) -> UcmPosixStore:
        if request.param == "Posix":
            stores.append(UcmPosixStore(config | changes))
        else:
            above = {"store_pipeline": request.param, "cache_size": "1MiB"}
            stores.append(UcmPipelineStore(config | above | changes))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[..., UcmPosixStore]) -> UcmPosixStore:
    return opened()


def bytes_stored(root: Path) -> int:
    total = 0
    for path in [*root.rglob("*.bin"), *root.rglob("*.seg")]:
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # the collector was faster
            continue
    return total


def test_what_was_dumped_is_loaded_byte_for_byte(store: UcmPosixStore) -> None:
    names, source, target = ids(5), Memory(5), Memory(5, fill=0)
    assert store.lookup(names) == [False] * 5
    assert store.lookup_on_prefix(names) == -1
    store.wait(store.dump_data(names, [0] * 5, source.rows(*range(5))))
    assert store.lookup(names) == [True] * 5
    assert store.lookup_on_prefix([*names, b"x" * 16, names[0]]) == 4
    assert store.explain_on_prefix([*names, b"x" * 16, names[0]]) == (4, "absent")
    assert store.explain_on_prefix([]) == (-1, "absent")
    assert store.lookup([names[0], b"x" * 16, names[2]]) == [True, False, True], "exact per id"
    store.wait(store.load_data(names, [0] * 5, target.rows(*range(5))))
    assert all(source.equals(target, block) for block in range(5))


def test_tensors_and_a_second_process_of_the_same_identity(opened: Open) -> None:
    names, source, target = ids(2), Memory(2), Memory(2, fill=0)
    with opened() as first:
        task = first.dump(names, [0, 0], source.pieces)
        first.wait(task, until="staged")
        first.wait(task)
    second = opened()
    second.wait(second.load(names, [0, 0], target.pieces))
    assert source.equals(target, 0)
    assert source.equals(target, 1)
    assert opened(identity="others").lookup(names) == [False, False]
    assert opened(part=(0, 0, 1)).lookup(names) == [True, True], (
        "ids tell parts apart, not the namespace"
    )


def test_a_store_that_looks_up_finds_blocks_of_other_sizes(opened: Open) -> None:
    """A rank with one layer beside one with three; the lookup-only store may be opened for
    either."""
    names, source = ids(4), Memory(4)
    large = {
        "tensor_size_list": PIECES,
        "shard_size": BLOCK,
        "block_size": BLOCK,
        "part": (0, 0, 0),
    }
    small = large | {"shard_size": sum(PIECES), "block_size": sum(PIECES), "part": (0, 1, 0)}
    first, second = opened(**large), opened(**small)
    first.wait(first.dump_data(names[:2], [0, 0], source.rows(0, 1)))
    second.wait(second.dump_data(names[2:], [0, 0], source.rows(2, 3)[:, : len(PIECES)]))
    for own, other in ((large, small), (small, large)):
        scheduler = opened(**own, parts=[other], device_id=-1)
        assert scheduler.explain_on_prefix(names) == (3, "absent")
    with pytest.raises(InvalidInputError, match="tensor_size"):
        opened(parts=[large | {"tensor_size": 1}])
    with pytest.raises(InvalidInputError, match="multiple"):
        opened(parts=[small | {"block_size": 1}])


def test_layerwise_and_direct_write_the_same_record(opened: Open, tmp_path: Path) -> None:
    name, source = ids(1), Memory(1)
    layerwise = opened(shard_size=sum(PIECES), storage_backends=str(tmp_path / "layerwise"))
    tasks = [
        layerwise.dump_data(name, [layer], source.layer_rows(0)[[layer]]) for layer in range(LAYERS)
    ]
    layerwise.wait(tasks)
    direct = opened(storage_backends=str(tmp_path / "direct"))
    direct.wait(direct.dump_data(name, [0], source.rows(0)))
    one, other = (records(tmp_path / kind)[0].read() for kind in ("layerwise", "direct"))
    assert one[4096:] == other[4096:]
    target = Memory(1, fill=0)
    layerwise.wait(layerwise.load_data(name * LAYERS, list(range(LAYERS)), target.layer_rows(0)))
    assert source.equals(target, 0)


def test_the_header_says_what_was_described_and_the_second_reader_agrees(
    opened: Open, tmp_path: Path
) -> None:
    store = opened(block_tokens=32, dtype="torch.bfloat16", part=(0, 1, 2))
    name, source = ids(2), Memory(2)
    store.describe([name[1]], parents=[name[0]], ordinals=[7], tokens=[32])
    store.wait(store.dump_data([name[1]], [0], source.rows(1)))
    (stored,) = records(tmp_path / "root")
    data = stored.read()
    header = verify(data, Expect(record_id=name[1]))
    if stored.path.suffix == ".bin":
        assert stored.path.name == f"{name[1].hex()}.bin"
        assert stored.path.parent.name == f"{name[1][0]:02x}"
        assert verify_file(stored.path) == header
    assert (header.record_id, header.parent) == (name[1], name[0])
    assert (header.ordinal, header.tokens, header.block_tokens, header.dtype_name) == (
        7,
        32,
        32,
        "bf16",
    )
    assert header.part == Part(0, 1, 2)
    layers = [np.concatenate(source.pieces[1][2 * n : 2 * n + 2]).tobytes() for n in range(LAYERS)]
    assert [data[layer.offset : layer.offset + layer.length] for layer in header.table] == layers


def test_the_manifest_spells_out_what_its_digest_stands_for(opened: Open, tmp_path: Path) -> None:
    for rank in range(2):
        opened(
            part=(0, 0, rank),
            block_tokens=32,
            dtype="float16",
            labels={"model": "typed by the user"},
        )
    (path,) = (tmp_path / "root").glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    text = json.dumps(manifest["identity"], separators=(",", ":"), ensure_ascii=True)
    assert hashlib.sha256(text.encode()).hexdigest() == manifest["digest"]
    assert manifest["digest"].startswith(path.parent.name)
    assert manifest["identity"]["weights"] == str(tmp_path)
    assert manifest["labels"] == {"model": "typed by the user"}
    assert set(manifest["parts"]) == {"g0p0t0", "g0p0t1"}
    assert manifest["parts"]["g0p0t1"]["dtype"] == "f16"


def test_a_missing_block_fails_its_row_and_says_why(store: UcmPosixStore) -> None:
    names, memory = ids(2), Memory(2)
    store.wait(store.dump_data(names[:1], [0], memory.rows(0)))
    task = store.load_data(names, [0, 0], memory.rows(0, 1))
    for _ in range(2):
        with pytest.raises(TaskError) as caught:
            store.wait(task)
        assert isinstance(caught.value.failures[1], NotFoundError)
    assert store.check(task)
    assert task.completed


def test_a_load_may_end_in_the_verified_slot(store: UcmPosixStore) -> None:
    names, source = ids(5), Memory(5)
    store.wait(store.dump_data(names, [0] * 5, source.rows(*range(5))))
    task = store.verify(names, timeout=30.0)
    store.wait(task)
    assert store.check(task)
    assert task.completed
    stats = store.stats()
    assert (stats["blocks_verified"], stats["blocks_loaded"]) == (5, 0)
    with pytest.raises(TaskError) as caught:
        store.wait(store.verify([b"x" * 16]))
    assert isinstance(caught.value.failures[0], NotFoundError)
    with pytest.raises(InvalidInputError):
        store.verify([b"too short"])


@pytest.mark.parametrize("opened", ["Posix"], indirect=True)
def test_a_damaged_record_is_refused_and_the_next_dump_replaces_it(
    opened: Open, tmp_path: Path
) -> None:
    store = opened()
    names, source, target = ids(1), Memory(1), Memory(1, fill=3)
    store.wait(store.dump_data(names, [0], source.rows(0)))
    records(tmp_path / "root")[0].flip(5000)
    with pytest.raises(TaskError) as caught:
        store.wait(store.load_data(names, [0], target.rows(0)))
    assert isinstance(caught.value.failures[0], CorruptError)
    assert caught.value.failures[0].context["reason"] == "bad_checksum"
    assert target.equals(Memory(1, fill=3), 0), "no byte of it reached the device"
    assert store.lookup(names) == [False]
    assert store.explain_on_prefix(names) == (-1, "refused")
    with pytest.raises(TaskError) as caught:
        store.wait(store.load_data([*names, *ids(2)[1:]], [0, 0], Memory(2).rows(0, 1)))
    reasons = {row: reason_of(error) for row, error in caught.value.failures.items()}
    assert reasons == {0: MissReason.REFUSED, 1: MissReason.LOAD_FAILED}
    store.wait(store.dump_data(names, [0], source.rows(0)))
    store.wait(store.load_data(names, [0], target.rows(0)))
    assert source.equals(target, 0)
    stats = store.stats()
    assert stats["misses"]["bad_checksum"] == 1
    assert stats["records_replaced"] == 1


def test_what_lies_before_the_first_bad_record_is_loaded(opened: Open, tmp_path: Path) -> None:
    store = opened()
    names, source, target = ids(5), Memory(5), Memory(5, fill=3)
    store.wait(store.dump_data(names[3:4], [0], source.rows(3)))
    records(tmp_path / "root")[0].flip(5000)
    rest = [0, 1, 2, 4]
    store.wait(store.dump_data([names[row] for row in rest], [0] * 4, source.rows(*rest)))
    store.close()
    store = opened()  # with nothing in memory
    for reason in ("bad_checksum", "refused"):  # detected by the first load, known to the second
        with pytest.raises(TaskError) as caught:
            store.wait(store.load_data(names, [0] * 5, target.rows(*range(5))))
        first = min(caught.value.failures)
        assert (first, caught.value.failures[first].context["reason"]) == (3, reason)
        for row in range(3):
            assert source.equals(target, row)
        target = Memory(5, fill=3)


def test_a_dump_that_finds_no_slot_is_busy(opened: Open) -> None:
    store = opened(staging_capacity=1 << 20)
    slots = store.stats()["slots"]
    free = store.free_dump_slots()
    assert free is not None
    assert 0 < free < slots, "a part of the slots is never given to dumps"
    count = slots + 1
    memory = Memory(1)
    rows = np.repeat(memory.rows(0), count, axis=0)
    with pytest.raises(BusyError) as caught:
        store.dump_data(ids(count), [0] * count, rows)
    assert caught.value.retryable
    assert store.free_dump_slots() == free, "nothing was taken"


def test_waiting_releases_the_gil_and_has_an_end(opened: Open) -> None:
    store = opened()
    memory = Memory(1)
    task = store.dump_data(ids(1), [0], memory.rows(0))
    seen: list[bool] = []
    threads = [
        threading.Thread(target=lambda: seen.append(store.wait(task) is None)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [True] * 4
    blocked = ids(2)[1:]
    half = opened(shard_size=sum(PIECES), deadlines={"dump_s": 3600})
    part = half.dump_data(blocked, [0], memory.layer_rows(0)[:1])
    half.wait(part)  # a task that leaves its block incomplete is done when staged
    assert store.lookup(blocked) == [False]
    with pytest.raises(InvalidInputError):
        half.wait("no task")


def test_the_limit_of_a_wait_is_the_callers(opened: Open, tmp_path: Path) -> None:
    store = opened()
    task = store.dump_data(ids(1), [0], Memory(1).rows(0))
    try:
        store.wait(task, timeout=0)
    except DeadlineError as error:
        assert error.retryable
    store.wait(task)
    assert len(records(tmp_path / "root")) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": [b"short"]}, "16 bytes"),
        ({"names": ["00" * 16]}, "raw bytes"),
        ({"names": b"0123456789abcdef"}, "sequence"),
        ({"shards": [0, 0]}, "equally many"),
        ({"shards": [1]}, "shard index out of range"),
        ({"shards": [-1]}, "shard index out of range"),
        ({"addrs": np.ones((1, 5), np.uint64)}, "one column per tensor"),
        ({"addrs": np.ones((2, 6), np.uint64)}, "equally many"),
        ({"addrs": np.ones(6, np.uint64)}, "shape"),
        ({"addrs": np.ones((1, 6), np.float64)}, "integers"),
        ({"addrs": np.zeros((1, 6), np.uint64)}, "null"),
    ],
)
def test_wrong_arguments_are_named(
    store: UcmPosixStore, change: dict[str, Any], words: str
) -> None:
    good = {"names": ids(1), "shards": [0], "addrs": Memory(1).rows(0)}
    given = good | change
    for call in (store.load_data, store.dump_data):
        with pytest.raises(InvalidInputError, match=words):
            call(given["names"], given["shards"], given["addrs"])
    assert store.stats()["blocks_in_flight"] == 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"shard_size": 100}, InvalidInputError, "shard_size"),
        ({"block_size": BLOCK + 1}, InvalidInputError, "block_size"),
        ({"block_size": "big"}, InvalidInputError, "block_size"),
        ({"tensor_size": 8}, InvalidInputError, "either tensor_size or tensor_size_list"),
        ({"storage_backends": ""}, ConfigError, "storage_backends"),
        ({"storage_backends": [f"/{n}" for n in range(17)]}, ConfigError, "16 are the most"),
        (
            {"storage_backends": "/a:/b", "tiers": {"/a": "hot"}},
            ConfigError,
            "storage_policy is round_robin",
        ),
        ({"staging_capacity": "1 KiB"}, ConfigError, "staging_capacity"),
        ({"storage_capacity": "much"}, ConfigError, "storage_capacity"),
        ({"blocksize": 1}, ConfigError, "did you mean 'block_size'"),
        ({"identity": '{"format_version":1}'}, ConfigError, "identity"),
    ],
)
def test_a_wrong_configuration_is_named(
    config: dict[str, Any], change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises((error, ConfigError, InvalidInputError), match=words):
        UcmPosixStore(config | change)


def test_nothing_to_do_is_done_at_once(store: UcmPosixStore) -> None:
    assert list(store.lookup([])) == []
    assert store.lookup_on_prefix([]) == -1
    for addrs in (np.empty((0, 6), np.uint64), np.empty((0, 0), np.uint64), []):
        store.wait([store.load_data([], [], addrs), store.dump_data([], [], addrs)])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="equally many"):
        store.load_data(ids(1), [0], [])  # type: ignore[arg-type]


def test_a_store_for_lookups_only_writes_nothing(opened: Open, tmp_path: Path) -> None:
    lookups = opened(device_id=-1)
    assert lookups.lookup(ids(2)) == [False, False]
    assert not (tmp_path / "root").exists()
    with pytest.raises(UnsupportedError, match="lookups only"):
        lookups.dump_data(ids(1), [0], Memory(1).rows(0))
    writer = opened()
    writer.wait(writer.dump_data(ids(1), [0], Memory(1).rows(0)))
    until = time.monotonic() + 30
    while lookups.lookup(ids(1)) == [False]:  # segments of others are discovered once a second
        assert time.monotonic() < until
    assert lookups.lookup(ids(2)) == [True, False]


def test_use_after_close_and_closing_twice(store: UcmPosixStore) -> None:
    memory = Memory(1)
    task = store.dump_data(ids(1), [0], memory.rows(0))
    store.close()
    store.close()
    store.wait(task)  # closing finished it
    for call in (
        lambda: store.lookup(ids(1)),
        lambda: store.lookup_on_prefix(ids(1)),
        lambda: store.load_data(ids(1), [0], memory.rows(0)),
        lambda: store.dump_data(ids(1), [0], memory.rows(0)),
        lambda: store.touch(ids(1)),
    ):
        with pytest.raises(ClosedError):
            call()


def _in_child(store: UcmPosixStore, names: list[bytes], answer: Any) -> None:
    try:
        store.lookup(names)
        answer.send("a lookup went through")
    except ForkedError as error:
        answer.send(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_fork_the_child_is_told(store: UcmPosixStore) -> None:
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_in_child, args=(store, ids(1), send)
    )
    child.start()
    assert receive.poll(60)
    assert "fork" in receive.recv()
    child.join(60)
    assert child.exitcode == 0
    assert store.lookup(ids(1)) == [False], "the parent goes on"


def test_the_factory_makes_it_by_name(config: dict[str, Any]) -> None:
    with UcmConnectorFactoryV1.create_connector("UcmPosixStore", config) as store:
        assert store.lookup_on_prefix(ids(3)) == -1
        store.prefetch(ids(3))
        assert store.cc_store() != 0


def test_capacity_is_kept_and_shown(opened: Open, tmp_path: Path) -> None:
    store = opened(storage_capacity=10 * 32768)
    memory = Memory(1)
    for name in ids(40):
        try:
            store.wait(store.dump_data([name], [0], memory.rows(0)))
        except TaskError as error:
            assert error.failures[0].kind in ("busy", "no_space")
        assert bytes_stored(tmp_path / "root") <= 10 * 32768
    assert store.stats()["storage_capacity_bytes"] == 10 * 32768


def test_keys_name_tokens_and_all_before_them(store: UcmPosixStore) -> None:
    hasher = BlockHasher(b"identity", 4)
    one, other = (
        hasher.hash_blocks([1, 2, 3, 4, 5, 6, 7, 8]),
        hasher.hash_blocks([9, 2, 3, 4, 5, 6, 7, 8]),
    )
    assert not set(one) & set(other)
    memory = Memory(2)
    store.wait(store.dump_data(one, [0, 0], memory.rows(0, 1)))
    assert store.lookup_on_prefix(one) == 1
    assert store.lookup_on_prefix(other) == -1


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="a CUDA driver is here")
def test_without_a_driver_its_platform_is_refused_but_for_lookups(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCM_TEST_DRIVER", raising=False)
    with pytest.raises(UnsupportedError, match=r"is not installed.*libcuda\.so\.1"):
        opened(platform="cuda")
    with pytest.raises(ConfigError, match="transfer"):
        opened(transfer="by hand")
    assert opened(platform="cuda", device_id=-1).lookup(ids(1)) == [False]


@pytest.mark.parametrize(
    ("word", "library"),
    [("hip", "amdhip64"), ("musa", "musart"), ("maca", "mcruntime"), ("Ascend", "ascendcl")],
)
def test_without_its_library_a_vendors_platform_is_refused_with_its_name(
    opened: Open, monkeypatch: pytest.MonkeyPatch, word: str, library: str
) -> None:
    monkeypatch.delenv("UCM_TEST_DRIVER", raising=False)
    monkeypatch.delenv("MACA_PATH", raising=False)
    if ctypes.util.find_library(library) is not None:
        pytest.skip(f"lib{library} is here")
    with pytest.raises(UnsupportedError, match=rf"vendor={word.lower()}.*lib{library}\.so"):
        opened(platform=word)
    assert opened(platform=word, device_id=-1).lookup(ids(1)) == [False]


@pytest.mark.parametrize(
    ("platform", "device"),
    [
        ("hip", "hip:1"),
        ("musa", "musa:1"),
        ("maca", "maca:1"),
        ("ascend", "ascend:1"),
        ("simu", "host"),
    ],
)
def test_a_platform_names_a_device_of_the_core(
    config: dict[str, Any], platform: str, device: str
) -> None:
    settings = read_settings(
        config | {"platform": platform, "device_id": 1},
        settings_of(UcmPosixStore.store_name),
        "tests",
    )
    assert settings.device == device
    assert json.loads(settings.setup())["device"] == device


def test_a_platform_that_is_not_built_is_refused_with_those_that_are(opened: Open) -> None:
    with pytest.raises(
        ConfigError, match=r"abacus.*known=host, simu, cpu, cuda, hip, musa, maca, ascend"
    ):
        opened(platform="abacus")
    for same in ("host", "simu", "CPU"):
        store = opened(platform=same)
        source, target = Memory(1), Memory(1, fill=0)
        store.wait(store.dump_data(ids(1), [0], source.rows(0)))
        store.wait(store.load_data(ids(1), [0], target.rows(0)))
        assert target.equals(source, 0)
        store.close()
