"""Harms to a server and their effect on a store: right bytes or none, no call that waits longer
than its deadline, and recovery by itself. The first line of a test is the name of its row in the
table."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blocks import BLOCK, LAYERS, PIECES, Memory, ids
from proxy import Proxy
from remote_columns import Column, redis_says

from servers import Server
from ucm.errors import UcmError
from ucm.store import UcmConnectorFactoryV1

#: Short, so that a failed server is tried again soon; long where a busy machine is slow.
QUICK = {
    "deadlines": {
        "lookup_ms": 2000,
        "load_unknown_s": 3.0,
        "dump_s": 6.0,
        "probe_s": 10.0,
        "shutdown_s": 2.0,
    },
    "breaker": {"threshold": 3, "cool_down_s": 0.3},
}
#: Most seconds to wait for a recovery.
PATIENCE = 60.0


@contextmanager
def opened(column: Column, at: str, reached: bool = True, **keys: Any) -> Iterator[Any]:
    """A store on the server at this address; ``reached``: waits until it has reached it."""
    told = {
        "identity": "tests",
        "tensor_size_list": PIECES,
        "shard_size": BLOCK,
        "block_size": BLOCK,
        "staging_capacity": "4MiB",
        **QUICK,
        **column.keys(at),
        **keys,
    }
    assert sum(PIECES) * LAYERS == BLOCK
    with UcmConnectorFactoryV1.create_connector(column.store, told) as store:
        if reached:
            soon("it reaches the server", store.healthy)
        yield store


def dumped(store: Any, source: Memory, first: int, count: int) -> bool:
    """True if blocks of the source are stored now; no call waits longer than its deadline."""
    wanted = ids(first + count)[first:]
    try:
        store.wait(store.dump_data(wanted, [0] * count, source.rows(*range(first, first + count))))
    except UcmError:
        return False
    return True


def loaded(store: Any, source: Memory, first: int, count: int) -> bool:
    """True if they are loaded; no other bytes are ever loaded."""
    target = Memory(first + count, fill=7)
    wanted = ids(first + count)[first:]
    try:
        store.wait(store.load_data(wanted, [0] * count, target.rows(*range(first, first + count))))
        come = True
    except UcmError:
        come = False
    for block in range(first, first + count):
        blank = all(np.all(piece == 7) for piece in target.pieces[block])
        assert target.equals(source, block) or (blank and not come), (
            f"block {block} is neither right nor untouched"
        )
    return come


def soon(what: str, so: Any) -> None:
    """Waits until something is so."""
    deadline, pause = time.monotonic() + PATIENCE, threading.Event()
    while not so():
        assert time.monotonic() < deadline, what
        pause.wait(0.01)


def store_all(store: Any, source: Memory, first: int, count: int) -> None:
    """Stores blocks, again if a busy machine took longer than the deadline of a dump."""
    soon("they are stored", lambda: dumped(store, source, first, count))


def load_all(store: Any, source: Memory, first: int, count: int) -> None:
    """Loads blocks, again if a busy machine took longer than the deadline of a load."""
    soon("they come back", lambda: loaded(store, source, first, count))


def is_well(store: Any, source: Memory, first: int, count: int) -> bool:
    """True if blocks are stored and loaded."""
    return dumped(store, source, first, count) and loaded(store, source, first, count)


@pytest.fixture
def source() -> Memory:
    """What is stored."""
    return Memory(64)


def test_stored_and_loaded(column: Column, server: Server, source: Memory) -> None:
    """stored, found and loaded; another store finds it too"""
    with opened(column, server.at) as store, opened(column, server.at) as other:
        store_all(store, source, 0, 16)
        load_all(store, source, 0, 16)
        soon("they are found", lambda: store.lookup(ids(17)) == [True] * 16 + [False])
        soon("the other store finds it", lambda: other.lookup(ids(16)) == [True] * 16)
        load_all(other, source, 0, 16)
        store_all(other, source, 16, 8)
        soon("and the first finds the blocks of that one", lambda: loaded(store, source, 16, 8))


def test_killed_and_restarted(column: Column, server: Server, source: Memory) -> None:
    """server killed in the middle of loads and dumps, and started again"""
    with opened(column, server.at) as store:
        store_all(store, source, 0, 16)
        tasks = [store.dump_data([ids(64)[n]], [0], source.rows(n)) for n in range(16, 24)]
        target = Memory(16, fill=7)
        loads = [store.load_data([ids(16)[n]], [0], target.rows(n)) for n in range(8)]
        server.kill()
        for task in (*tasks, *loads):
            try:
                store.wait(task)
            except UcmError:
                continue
        for n in range(8):
            blank = all(np.all(piece == 7) for piece in target.pieces[n])
            assert blank or target.equals(source, n)
        assert not dumped(store, source, 32, 4)
        server.start()
        soon("it is used again", lambda: is_well(store, source, 40, 4))
        if column.keeps:
            load_all(store, source, 0, 16)  # earlier published blocks exist


def test_restart_of_both(column: Column, server: Server, source: Memory) -> None:
    """a new process after the server's restart: hits where it keeps its data, else misses"""
    with opened(column, server.at) as store:
        store_all(store, source, 0, 8)
    server.restart()
    with opened(column, server.at) as store:
        if column.keeps:
            load_all(store, source, 0, 8)
        else:
            assert not loaded(store, source, 0, 8)
        soon("it stores again", lambda: is_well(store, source, 8, 4))


def test_refused_at_first(column: Column, proxy: Proxy, source: Memory) -> None:
    """no server when the store is opened, and one later"""
    proxy.become("refuse")
    with opened(column, proxy.at, reached=False) as store:
        assert not store.healthy() and store.trouble()
        assert store.lookup(ids(4)) == [False] * 4
        proxy.become("pass")
        soon("it is used", lambda: is_well(store, source, 0, 4))


def test_reset(column: Column, proxy: Proxy, source: Memory) -> None:
    """connections end at once, for a while"""
    with opened(column, proxy.at) as store:
        store_all(store, source, 0, 8)
        proxy.become("reset")
        assert not dumped(store, source, 8, 4)
        loaded(store, source, 0, 8)
        proxy.become("pass")
        soon("it is used again", lambda: is_well(store, source, 16, 4))
        load_all(store, source, 0, 8)


def test_half_open(column: Column, proxy: Proxy, source: Memory) -> None:
    """connections stay open and nothing comes any more"""
    with opened(column, proxy.at) as store:
        store_all(store, source, 0, 8)
        proxy.become("silent")
        assert not loaded(store, source, 0, 8)
        assert not dumped(store, source, 8, 4)
        store.lookup(ids(24)[16:])
        proxy.become("pass")
        soon("it is used again", lambda: is_well(store, source, 16, 4))
        load_all(store, source, 0, 8)
        soon("every slot comes back", lambda: store.stats()["slots_free"] == store.stats()["slots"])


def test_frozen(column: Column, server: Server, source: Memory) -> None:
    """the server stops in the middle of its work and goes on later"""
    with opened(column, server.at) as store:
        store_all(store, source, 0, 8)
        server.freeze()
        assert not loaded(store, source, 0, 8)
        server.thaw()
        soon("it is used again", lambda: is_well(store, source, 16, 4))
        load_all(store, source, 0, 8)


def test_slow(column: Column, proxy: Proxy, source: Memory) -> None:
    """every piece is late, but in time"""
    with opened(column, proxy.at) as store:
        proxy.become("slow")
        soon("it is used", lambda: is_well(store, source, 0, 4))


@pytest.mark.parametrize("mode", ["busy", "fail"])
def test_http_errors(column: Column, proxy: Proxy, source: Memory, mode: Any) -> None:
    """503 Slow Down and 500, for a while"""
    if not column.http:
        pytest.skip("it speaks no HTTP")
    with opened(column, proxy.at) as store:
        store_all(store, source, 0, 8)
        before = proxy.answered
        proxy.become(mode)
        assert not loaded(store, source, 0, 8)
        assert not dumped(store, source, 8, 4)
        # Tried again a few times within the deadline.
        assert 2 <= proxy.answered - before <= 400
        proxy.become("pass")
        soon("it is used again", lambda: is_well(store, source, 16, 4))


def test_full(column: Column, server: Server, proxy: Proxy, source: Memory) -> None:
    """no room: dumps pause, loads go on"""
    with opened(column, proxy.at) as store:
        store_all(store, source, 0, 8)
        if column.http:
            proxy.become("full")
        else:
            redis_says(server, "CONFIG", "SET", "maxmemory", "100kb")
        assert not dumped(store, source, 8, 4)
        if column.http:
            proxy.become("pass")
        load_all(store, source, 0, 8)  # stored blocks are read
        if not column.http:
            redis_says(server, "CONFIG", "SET", "maxmemory", "0")
        soon("there is room again", lambda: is_well(store, source, 16, 4))


def test_below_memory(column: Column, server: Server, source: Memory) -> None:
    """below memory (and a directory): brought up once, and then the server is not used"""
    word = column.store.removeprefix("Ucm").removesuffix("Store").lower()
    keys = dict(column.keys(server.at))
    stages = [{"type": "cache"}, {"type": word, "path": keys.pop("storage_backends"), **keys}]
    told = {**keys, "storage_backends": [], "store_pipeline": stages, "cache_size": "8MiB"}
    told["identity"] = server.at  # processes of one identity read each other's memory
    with opened(column, server.at, identity=server.at) as store:
        store_all(store, source, 0, 8)
    with opened(replace(column, store="UcmPipelineStore"), server.at, **told) as store:
        store_all(store, source, 8, 8)
        soon("what lies below is found", lambda: store.lookup(ids(16)) == [True] * 16)
        load_all(store, source, 0, 8)
        # A load does not wait for its copies in the upper tiers.
        soon("all of them are in memory", lambda: store.locate_on_prefix(ids(16))[0] == bytes(16))
        server.kill()
        load_all(store, source, 0, 16)


def test_no_secret_in_the_log(
    column: Column,
    server: Server,
    source: Memory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """wrong keys: refused, logged, and not shown"""
    secret = "very-secret-word"
    keys: dict[str, Any] = {}
    if column.http:
        if column.name == "moto":
            pytest.skip("it believes every key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    else:
        redis_says(server, "CONFIG", "SET", "requirepass", "another")
        keys["storage_backends"] = f"redis://user:{secret}@{server.at}"
    with caplog.at_level("DEBUG"), opened(column, server.at, reached=False, **keys) as store:
        assert not store.healthy()
        assert not dumped(store, source, 0, 2)
        said = store.trouble()
        assert said and secret not in said
        assert secret not in str(store.stats()) and secret not in store.settings.label
    assert secret not in caplog.text
