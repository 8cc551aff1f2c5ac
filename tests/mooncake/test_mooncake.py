"""``UcmMooncakeStore`` over a real master, with memory that other processes lend, over TCP on
loopback."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from blocks import SHAPE, Memory, ids
from click.testing import CliRunner, Result
from mooncake_pool import HERE, PACKAGE, Pool
from plain_record import crc32c

from ucm.cli import main
from ucm.config import load
from ucm.errors import ConfigError, TaskError, UnhealthyError
from ucm.store import UcmConnectorFactoryV1
from ucm.store.posix import UcmPosixStore

Open = Callable[..., UcmPosixStore]
#: Short, but longer than this machine ever takes.
PATIENT = {"deadlines": {"lookup_ms": 20_000, "load_unknown_s": 20, "probe_s": 20}}
#: A breaker that opens at the first failure and probes again soon.
HASTY = {
    "deadlines": {
        "lookup_ms": 200,
        "load_unknown_s": 1,
        "dump_s": 1,
        "probe_s": 1,
        "shutdown_s": 1,
    },
    "breaker": {"threshold": 1, "cool_down_s": 0.2},
}


#: Less than Mooncake takes.
TOO_LITTLE = {"master_server_address": "127.0.0.1:1", "global_segment_size": "1MiB"}


@pytest.fixture
def opened(tmp_path: Path, open_store: Open) -> Open:
    """Opens stores over a pool, with an identity of the test's."""

    def make(pool: Pool, name: str = "UcmMooncakeStore", **keys: Any) -> UcmPosixStore:
        common = {"identity": str(tmp_path), "staging_capacity": "4MiB", **SHAPE, **PATIENT}
        return open_store(name, {**common, **pool.config, **keys})

    return make


def dump(store: UcmPosixStore, count: int) -> Memory:
    source = Memory(count)
    store.wait(store.dump_data(ids(count), [0] * count, source.rows(*range(count))))
    return source


def loaded(store: UcmPosixStore, source: Memory, count: int) -> list[bool]:
    """The blocks that a load copies; each must be exact."""
    target = Memory(count, fill=0)
    task = store.load_data(ids(count), [0] * count, target.rows(*range(count)))
    try:
        store.wait(task)
    except TaskError:
        pass
    failed = task.handle.failures()
    for block in range(count):
        assert block in failed or source.equals(target, block)
    return [block not in failed for block in range(count)]


def loaded_alone(store: UcmPosixStore, source: Memory, block: int) -> bool:
    """True if a load of the single block succeeds, because a load cancels the blocks behind its
    first failure."""
    target = Memory(len(source.pieces), fill=0)
    try:
        store.wait(store.load_data([ids(block + 1)[block]], [0], target.rows(block)))
    except TaskError:
        return False
    assert source.equals(target, block)
    return True


def eventually(what: Callable[[], bool]) -> None:
    """Returns when the condition holds; otherwise the test's time limit ends it."""
    pause = threading.Event()
    while not what():
        pause.wait(0.05)


def stored(store: UcmPosixStore, count: int) -> Memory:
    """Dumps into a store with short deadlines, again if a busy machine was too slow."""
    source = Memory(count)

    def dumped() -> bool:
        try:
            store.wait(store.dump_data(ids(count), [0] * count, source.rows(*range(count))))
        except (TaskError, UnhealthyError):  # until the pool was looked at again
            return False
        return store.lookup(ids(count)) == [True] * count

    eventually(dumped)
    return source


def comes_back(store: UcmPosixStore, source: Memory, count: int) -> bool:
    """True if all of it is loaded now; a store with short deadlines may be off for a moment."""
    try:
        return all(loaded(store, source, count))
    except UnhealthyError:
        return False


def stop(process: subprocess.Popen[str]) -> None:
    """Returns when all its threads are stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


class Raw:
    """Mooncake's own client, which reads and writes values under our keys."""

    def __init__(self, pool: Pool) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.client = MooncakeDistributedStore()
        assert (
            self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", pool.address)
            == 0
        )
        self.memory = mmap.mmap(-1, 1 << 20)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        assert self.client.register_buffer(self.address, len(self.memory)) == 0

    def get(self, key: str) -> bytes:
        (length,) = self.client.batch_get_into([key], [self.address], [len(self.memory)])
        assert length > 0, length
        return self.memory[:length]

    def set(self, key: str, value: bytes) -> None:
        self.memory[: len(value)] = value
        assert self.client.batch_upsert_from([key], [self.address], [len(value)]) == [0]


@pytest.fixture(scope="module")
def raw(shared_pool: Pool) -> Iterator[Raw]:
    client = Raw(shared_pool)
    yield client
    client.client.close()


def key(store: UcmPosixStore, block: bytes) -> str:
    """The key of a block."""
    namespace = hashlib.sha256(store.settings.identity_json.encode()).hexdigest()[:32]
    return f"ucm:{namespace}:{block.hex()}"


def test_blocks_come_back_from_the_memory_of_another_process(
    shared_pool: Pool, opened: Open
) -> None:
    store = opened(shared_pool)
    assert store.lookup(ids(5)) == [False] * 5
    source = dump(store, 40)
    other = opened(shared_pool)
    assert other.lookup(ids(41)) == [True] * 40 + [False]
    assert other.lookup_on_prefix(ids(41)) == 39
    assert loaded(other, source, 40) == [True] * 40
    (tier,) = other.stats()["tiers"]
    assert (tier["name"], tier["blocks_read"]) == ("mooncake", 40)


def test_one_call_is_for_many_records(shared_pool: Pool, opened: Open) -> None:
    store = opened(shared_pool)
    source = dump(store, 100)
    assert all(loaded(store, source, 100))
    stats = store.stats()
    assert stats["mooncake_records"] == 200
    assert stats["mooncake_calls"] < 150


def test_what_is_there_is_not_written_again(shared_pool: Pool, opened: Open, raw: Raw) -> None:
    store = opened(shared_pool)
    dump(store, 3)
    before = [raw.get(key(store, block)) for block in ids(3)]
    again = opened(shared_pool)
    dump(again, 3)
    assert [raw.get(key(store, block)) for block in ids(3)] == before


def _flip(record: bytes) -> bytes:
    middle = len(record) // 2
    return record[:middle] + bytes([record[middle] ^ 1]) + record[middle + 1 :]


def _safetensors(record: bytes) -> bytes:
    header = json.dumps(
        {"tensor": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(100)


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": _flip,
    "a truncated value": lambda record: record[:-4096],
    "a longer value": lambda record: record + bytes(4096),
    "a value that is too long for a slot": lambda record: record + bytes(1 << 19),
    "something else": lambda record: b"x" * 10,
    "nothing but zeros": lambda record: bytes(len(record)),
    "the form of safetensors": _safetensors,
}


def test_a_damaged_value_is_a_miss_and_is_replaced(
    shared_pool: Pool, opened: Open, raw: Raw
) -> None:
    store, count = opened(shared_pool), len(HARMS) + 1
    source = dump(store, count)
    for block, harm in zip(ids(count), HARMS.values(), strict=False):
        raw.set(key(store, block), harm(raw.get(key(store, block))))
    last_alone = [False] * len(HARMS) + [True]
    assert [loaded_alone(store, source, block) for block in range(count)] == last_alone
    assert store.lookup(ids(count)) == last_alone
    dump(store, count)
    assert store.lookup(ids(count)) == [True] * count
    assert loaded(store, source, count) == [True] * count
    assert loaded(opened(shared_pool), source, count) == [True] * count


def test_engines_with_side_shards_and_without_use_each_others_blocks(
    shared_pool: Pool, opened: Open
) -> None:
    """A value of one store is longer than a slot of the other, which reads the known part and does
    not replace it."""
    sides = {"mean-k": 96, "codes": 6000}
    keeps, without, source = opened(shared_pool, sides=sides), opened(shared_pool), Memory(6)
    beside = {name: np.full((3, size), size % 251, dtype=np.uint8) for name, size in sides.items()}
    keeps.wait(keeps.dump_data(ids(3), [0] * 3, source.rows(0, 1, 2), sides=beside))
    assert without.lookup(ids(3)) == [True] * 3
    assert loaded(without, source, 3) == [True] * 3
    without.wait(without.dump_data(ids(6), [0] * 6, source.rows(*range(6))))
    for name, side in beside.items():
        task = keeps.load_sides(ids(3), name)
        keeps.wait(task)
        data, found = task.result()
        assert found.all() and np.array_equal(data, side)
    assert loaded(keeps, source, 6) == [True] * 6


def test_a_record_under_anothers_key_is_a_miss(shared_pool: Pool, opened: Open, raw: Raw) -> None:
    store = opened(shared_pool)
    source = dump(store, 2)
    first, second = (key(store, block) for block in ids(2))
    raw.set(first, raw.get(second))
    assert [loaded_alone(store, source, block) for block in range(2)] == [False, True]


def test_safetensors_are_refused_with_a_sentence(shared_pool: Pool, opened: Open, raw: Raw) -> None:
    store = opened(shared_pool)
    dump(store, 1)
    raw.set(key(store, ids(1)[0]), _safetensors(b""))
    task = store.verify(ids(1))
    with pytest.raises(TaskError, match="form of safetensors"):
        store.wait(task)


def test_a_record_of_a_newer_version_stays(shared_pool: Pool, opened: Open, raw: Raw) -> None:
    store = opened(shared_pool)
    source = dump(store, 2)
    first, second = (key(store, block) for block in ids(2))
    newer = {place: bytearray(raw.get(place)) for place in (first, second)}
    for record in newer.values():
        record[4:8] = struct.pack("<I", 99)
        record[60:64] = struct.pack("<I", crc32c(bytes(record[:60])))
    raw.set(first, bytes(newer[first]))
    # refused here, and rewritten by a newer version before our next dump
    raw.set(second, _flip(raw.get(second)))
    assert [loaded_alone(store, source, block) for block in range(2)] == [False, False]
    raw.set(second, bytes(newer[second]))
    with pytest.raises(TaskError, match="reason=newer_version"):
        dump(store, 2)
    assert {place: raw.get(place) for place in newer} == newer


def test_memory_above_it(shared_pool: Pool, opened: Open) -> None:
    store = opened(
        shared_pool, "UcmPipelineStore", store_pipeline="Cache|Mooncake", cache_size="1MiB"
    )
    assert store.tier_names == ("memory", "mooncake")
    assert store.tier_media == ("host", "")
    source = dump(store, 60)  # more than the memory takes
    assert all(loaded(store, source, 60))
    assert opened(shared_pool).lookup(ids(60)) == [True] * 60


def test_a_configuration_names_it(shared_pool: Pool, tmp_path: Path) -> None:
    rest = {
        key: value for key, value in shared_pool.config.items() if key != "master_server_address"
    }
    for config in (
        {"storage_backend": "mooncake", **shared_pool.config},
        {
            "ucm_connectors": [
                {
                    "ucm_connector_name": "UcmMooncakeStore",
                    "ucm_connector_config": shared_pool.config,
                }
            ]
        },
        {"store_pipeline": "Cache|Mooncake", "cache_size": "1MiB", **shared_pool.config},
        {"storage_backends": f"mooncake://{shared_pool.address}", **rest},
        {
            "store_pipeline": "Cache|Mooncake",
            "path": f"mooncake://{shared_pool.address}",
            "cache_size": "1MiB",
            **rest,
        },
        {
            "pipeline": [
                {"type": "cache", "size_gb": 0.001},
                {"type": "mooncake", **shared_pool.config},
            ]
        },
    ):
        read = load({**config, **PATIENT}, {})
        given = {
            **read.store_config(),
            **SHAPE,
            "staging_capacity": "4MiB",
            "identity": str(tmp_path),
        }
        with UcmConnectorFactoryV1.create_connector(read.ucm_connector_name, given) as store:
            source = dump(store, 3)
            assert loaded(store, source, 3) == [True] * 3


def test_without_a_master_or_the_package_it_says_what_to_do(shared_pool: Pool) -> None:
    with pytest.raises(ConfigError, match="write master_server_address: host:port"):
        UcmConnectorFactoryV1.create_connector(
            "UcmMooncakeStore", {**SHAPE, "staging_capacity": "4MiB"}
        )
    with pytest.raises(ConfigError, match="at least 16 MiB"):
        UcmConnectorFactoryV1.create_connector("UcmMooncakeStore", {**SHAPE, **TOO_LITTLE})
    for address, words in (
        ("mooncake://", "written mooncake://host:port"),
        ("mooncake://user:secret@host:1", "written mooncake://host:port"),
        ("mooncake://host:port", "written mooncake://host:port"),
        ("mooncake://host/prefix", "written mooncake://host:port"),
        (["mooncake://one", "mooncake://two"], "names one pool"),
        ("mooncake://other:1", "two masters"),
    ):
        told = {**SHAPE, "staging_capacity": "4MiB", "storage_backends": address}
        named = {"master_server_address": "host:1"} if words == "two masters" else {}
        with pytest.raises(ConfigError, match=words) as refused:
            UcmConnectorFactoryV1.create_connector("UcmMooncakeStore", {**told, **named})
        assert "secret" not in str(refused.value)
    code = (
        "import sys; sys.modules['mooncake'] = None\nfrom ucm.store import"
        " UcmConnectorFactoryV1\nUcmConnectorFactoryV1.create_connector('UcmMooncakeStore',"
        f" {{**{SHAPE!r}, 'master_server_address': 'x:1'}})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "install mooncake-transfer-engine" in run.stderr and "ConfigError" in run.stderr


def test_a_killed_master_is_misses_and_a_new_one_is_used(
    own_pool: Callable[..., Pool], opened: Open
) -> None:
    pool = own_pool()
    store = opened(pool, **HASTY)
    source = stored(store, 3)
    pool.kill_master()
    assert not all(loaded(store, source, 3))
    eventually(lambda: not store.healthy())
    assert store.lookup(ids(3)) == [False] * 3
    pool.start()  # it has lost everything, and lenders reconnect by themselves

    def again() -> bool:
        try:
            store.wait(store.dump_data(ids(3), [0] * 3, source.rows(0, 1, 2)))
        except (TaskError, UnhealthyError):  # until the pool was looked at again
            return False
        return store.lookup(ids(3)) == [True] * 3

    eventually(again)
    eventually(lambda: comes_back(store, source, 3))


def test_a_master_that_hangs_costs_deadlines_and_then_nothing(
    own_pool: Callable[..., Pool], opened: Open
) -> None:
    pool = own_pool()
    store = opened(pool, **HASTY)
    source = stored(store, 3)
    assert pool.master is not None
    stop(pool.master)
    assert loaded(store, source, 3) == [False] * 3
    assert store.lookup(ids(3)) == [False] * 3
    eventually(lambda: not store.healthy())
    pool.master.send_signal(signal.SIGCONT)
    eventually(lambda: store.lookup(ids(3)) == [True] * 3)
    eventually(lambda: comes_back(store, source, 3))


def test_a_store_ends_while_its_master_hangs(own_pool: Callable[..., Pool], opened: Open) -> None:
    pool = own_pool()
    store = opened(pool, **HASTY)
    source = stored(store, 3)
    assert pool.master is not None
    stop(pool.master)
    assert loaded(store, source, 3) == [False] * 3
    store.close()


class Ticks:
    """Counts on a thread of its own, which stops while another one holds the GIL."""

    def __init__(self) -> None:
        self.count = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.001):
            self.count += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_a_lending_store_closes_while_its_master_hangs(
    own_pool: Callable[..., Pool], opened: Open
) -> None:
    pool = own_pool(lent=0)
    store = opened(
        pool, **(HASTY | {"global_segment_size": "64MiB", "deadlines": PATIENT["deadlines"]})
    )
    dump(store, 1)
    assert pool.master is not None
    stop(pool.master)
    with Ticks() as ticks:
        store.close()
        closed = ticks.count
        eventually(lambda: ticks.count > closed + 50)
    assert closed > 2, "other threads of this process stood still"


def test_a_store_opens_while_its_master_hangs(own_pool: Callable[..., Pool], opened: Open) -> None:
    pool = own_pool()
    assert pool.master is not None
    stop(pool.master)
    with Ticks() as ticks:
        store = opened(pool, **HASTY)
        there = ticks.count
        assert store.lookup(ids(1)) == [False]
        assert not store.healthy()
    assert there > 2, "other threads of this process stood still"
    pool.master.send_signal(signal.SIGCONT)
    eventually(lambda: store.lookup(ids(1)) == [False] and store.healthy())
    source = stored(store, 1)
    eventually(lambda: comes_back(store, source, 1))


def test_a_killed_lender_is_misses_of_what_it_lent(
    own_pool: Callable[..., Pool], opened: Open
) -> None:
    pool = own_pool(client_ttl=2)
    store = opened(pool, **HASTY)
    source = stored(store, 3)
    (lender,) = pool.lenders
    lender.kill()
    lender.wait()
    assert loaded(store, source, 3) == [False] * 3
    pool.lend(64 << 20)

    def again() -> bool:
        try:
            store.wait(store.dump_data(ids(3), [0] * 3, source.rows(0, 1, 2)))
        except (TaskError, UnhealthyError):  # until the pool was looked at again
            return False
        return comes_back(store, source, 3)

    eventually(again)


def test_eviction_under_a_reader(own_pool: Callable[..., Pool], opened: Open) -> None:
    """Reads are exact or misses while Mooncake evicts, with short leases."""
    pool = own_pool(lent=16 << 20, default_kv_lease_ttl=200)
    store, reader = opened(pool), opened(pool)
    count = 900  # 24 KiB each: more than the pool takes
    source, rows = Memory(count), range(count)
    over, reads = threading.Event(), []

    def read() -> None:
        while not over.is_set():
            reads.append(loaded(reader, source, 100))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for start in range(0, count, 100):
            some = rows[start : start + 100]
            task = store.dump_data([ids(count)[n] for n in some], [0] * 100, source.rows(*some))
            try:
                store.wait(task)
            except TaskError as error:
                assert "no room" in str(error)
        eventually(lambda: bool(reads))  # the thread that reads may not have had a turn yet
    finally:
        over.set()
        thread.join()
    assert reads
    there = reader.lookup(ids(count))
    assert any(there) and not all(there)
    assert any(loaded_alone(reader, source, block) for block in rows if there[block])


def test_a_store_lends_memory_and_only_one_that_stores(
    own_pool: Callable[..., Pool], opened: Open
) -> None:
    pool = own_pool(lent=0)
    opened(pool, global_segment_size="64MiB", device_id=-1).lookup(ids(1))
    store = opened(pool)
    with pytest.raises(TaskError, match="no room"):
        dump(store, 1)  # no memory is lent yet
    lending = opened(pool, global_segment_size="64MiB")
    source = dump(lending, 3)
    assert loaded(store, source, 3) == [True] * 3
    lending.close()
    assert loaded(store, source, 3) == [False] * 3


def ucm(pool: Pool, *words: str, http: str | None = None) -> Result:
    """The command line over a pool."""
    told = ["-o", f"master_http_address={http or f'127.0.0.1:{pool.metrics}'}"]
    return CliRunner().invoke(main, [words[0], f"mooncake://{pool.address}", *words[1:], *told])


def test_tools_look_into_a_pool(own_pool: Callable[..., Pool], opened: Open) -> None:
    pool = own_pool()
    store = opened(pool)
    source = dump(store, 5)
    other = opened(pool, identity="another")
    dump(other, 2)
    raw = Raw(pool)
    raw.set("of somebody else", b"x" * 100)
    raw.set(key(store, ids(1)[0]), _flip(raw.get(key(store, ids(1)[0]))))
    (root,) = json.loads(ucm(pool, "inspect", "--json").stdout)["roots"]
    assert (root["records"], root["foreign"]) == (7, 1)
    assert root["storage_capacity"] == 64 << 20
    mine = key(store, ids(1)[0]).split(":")[1]
    (space,) = [space for space in root["namespaces"] if space["namespace"] == mine]
    assert (space["records"], space["manifest"], space["oldest_use"]) == (5, "missing", None)
    assert space["parts_present"] == {"g0p0t0": 5}

    judged = ucm(pool, "verify", "--json", "--rate", "unlimited")
    assert judged.exit_code == 1
    verdict = json.loads(judged.stdout)
    assert (verdict["good"], verdict["bad"]) == (6, 1)
    assert ids(1)[0].hex() in verdict["bad_records"][0]["path"]

    for wish in ((), ("--older-than", "7d"), ("--to", "1MiB")):
        refused = ucm(pool, "gc", *wish)
        assert (
            refused.exit_code == 2 and "does not say when something was last used" in refused.stderr
        ), refused.output
    planned = json.loads(ucm(pool, "gc", "--namespace", mine, "--json").stdout)
    assert (planned["planned"], planned["removed"]) == (5, 0)
    assert other.lookup(ids(2)) == [True] * 2 and store.lookup(ids(5))[1:] == [True] * 4
    done = json.loads(ucm(pool, "gc", "--namespace", mine, "--yes", "--json").stdout)
    assert (done["removed"], done["failed"]) == (5, 0)
    assert store.lookup(ids(5)) == [False] * 5
    assert other.lookup(ids(2)) == [True] * 2
    assert raw.get("of somebody else") == b"x" * 100
    assert not any(loaded(store, source, 5))
    raw.client.close()

    nobody = ucm(pool, "inspect", http="127.0.0.1:1")
    assert nobody.exit_code == 2 and "--option master_http_address=host:port" in nobody.stderr


def test_a_record_longer_than_one_read_is_judged(
    own_pool: Callable[..., Pool], opened: Open
) -> None:
    pool = own_pool()
    size = 5 << 20  # longer than a piece that is read at once
    shape = {
        "tensor_size_list": [size],
        "shard_size": size,
        "block_size": size,
        "staging_capacity": "32MiB",
    }
    store = opened(pool, **shape)
    data = np.arange(size // 8, dtype=np.uint64)
    store.wait(store.dump_data(ids(1), [0], np.array([[data.ctypes.data]], dtype=np.uint64)))
    verdict = json.loads(ucm(pool, "verify", "--json", "--rate", "unlimited").stdout)
    assert (verdict["good"], verdict["bad"]) == (1, 0)
    assert verdict["bytes_read"] > size


def test_an_interpreter_that_ends_without_closing_it(shared_pool: Pool, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(PACKAGE)!r}, {str(HERE.parent / 'store')!r}]\nfrom"
        f" ucm.store import UcmConnectorFactoryV1; from blocks import ids\nconfig = {{**{SHAPE!r},"
        f" **{shared_pool.config!r}, **{PATIENT!r}, 'staging_capacity': '4MiB'}}\nstore ="
        " UcmConnectorFactoryV1.create_connector('UcmMooncakeStore',"
        " config)\nprint(store.lookup(ids(2)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "[False, False]\n"), run.stderr
