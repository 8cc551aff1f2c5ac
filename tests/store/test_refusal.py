"""Refusal as users configure it: the keys of quarantine, breaker and paranoid verification reach
the core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import PATIENT

from ucm.config import load
from ucm.errors import InvalidInputError, TaskError
from ucm.store.posix import UcmPosixStore

BLOCK = 8192
ID, OTHER = [b"0123456789abcdef"], [b"fedcba9876543210"]
Open = Callable[..., UcmPosixStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens stores as the connector does: from the configuration a user writes."""
    stores: list[UcmPosixStore] = []

    def make(**keys: Any) -> UcmPosixStore:
        room = {"storage_capacity": "1GiB", "free_space_floor": 0, "staging_capacity": "4MiB"}
        written = {
            "storage_backends": str(tmp_path / "root"),
            "layout": "file",
            "deadlines": PATIENT,
        }
        config = load(room | written | keys, {})
        assert config.problems == ()
        sizes = {
            "tensor_size": BLOCK,
            "shard_size": BLOCK,
            "block_size": BLOCK,
            "identity": "tests",
        }
        stores.append(UcmPosixStore(config.store_config() | sizes))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def row(memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([[memory.ctypes.data]], dtype=np.uint64)


def dump(store: UcmPosixStore, block: list[bytes] = ID) -> None:
    memory = np.arange(BLOCK, dtype=np.uint8)
    store.wait(store.dump_data(block, [0], row(memory)))


def refuse(store: UcmPosixStore, root: Path, block: list[bytes] = ID) -> None:
    """Damages the record and lets a load find out."""
    (path,) = root.glob(f"*/blocks/*/{block[0].hex()}.bin")
    damaged = bytearray(path.read_bytes())
    damaged[5000] ^= 1
    path.write_bytes(damaged)
    target = np.zeros(BLOCK, dtype=np.uint8)
    with pytest.raises(TaskError):
        store.wait(store.load_data(block, [0], row(target)))
    assert not target.any()


def until(store: UcmPosixStore, counter: str) -> None:
    """Waits for something that happens in the background."""
    wait = threading.Event()
    for _ in range(3000):
        if store.stats()[counter]:
            return
        wait.wait(0.01)
    raise AssertionError(f"{counter} stays 0: {store.stats()}")


def test_evidence_is_kept_under_the_documented_name(opened: Open, tmp_path: Path) -> None:
    store = opened()
    dump(store)
    refuse(store, tmp_path / "root")
    until(store, "records_quarantined")
    (kept,) = (tmp_path / "root").glob("*/quarantine/*")
    name, reason, seconds, suffix = kept.name.split(".")
    assert (name, reason, suffix) == (ID[0].hex(), "bad_checksum", "bin")
    assert abs(int(seconds) - kept.stat().st_ctime) < 120
    dump(store)
    target = np.zeros(BLOCK, dtype=np.uint8)
    store.wait(store.load_data(ID, [0], row(target)))
    assert np.array_equal(target, np.arange(BLOCK, dtype=np.uint8))


def test_keys_of_quarantine_and_breaker_reach_the_core(opened: Open, tmp_path: Path) -> None:
    store = opened(
        quarantine={
            "enabled": False,
            "max_per_minute": 1,
            "max_records": 2,
            "max_bytes": "1MiB",
            "keep_s": 60,
        },
        breaker={"threshold": 3, "window_s": 5, "cool_down_s": 3000},
    )
    for block in (ID, OTHER):
        dump(store, block)
    for block in (ID, OTHER):
        refuse(store, tmp_path / "root", block)
    until(store, "quarantine_stopped")
    stats = store.stats()
    assert (stats["healthy"], stats["breaker_opened"], stats["records_quarantined"]) == (0, 1, 0)
    assert not list((tmp_path / "root").glob("*/quarantine"))


def test_an_open_breaker_says_so_until_a_lookup_finds_the_medium_well(
    opened: Open, tmp_path: Path
) -> None:
    store = opened(quarantine={"max_per_minute": 1}, breaker={"cool_down_s": 0.05})
    assert store.healthy()
    for block in (ID, OTHER):
        dump(store, block)
    for block in (ID, OTHER):
        refuse(store, tmp_path / "root", block)
    until(store, "quarantine_stopped")
    assert not store.healthy()  # and stays so: time alone closes no breaker
    while not store.healthy():
        store.lookup([bytes(16)])
    dump(store)
    assert store.lookup(ID) == [True]


def test_marked_blocks_are_compared_when_they_are_dumped(opened: Open) -> None:
    store = opened()
    dump(store)
    store.audit(ID)
    dump(store)
    store.audit(ID)
    other = np.zeros(BLOCK, dtype=np.uint8)
    store.wait(store.dump_data(ID, [0], row(other)))
    stats = store.stats()
    assert (stats["audits"], stats["audit_deviations"], stats["blocks_present"]) == (2, 1, 2)
    with pytest.raises(InvalidInputError):
        store.audit([b"short"])


def test_paranoid_stores_and_loads(opened: Open) -> None:
    store = opened(verify="paranoid")
    dump(store)
    target = np.zeros(BLOCK, dtype=np.uint8)
    store.wait(store.load_data(ID, [0], row(target)))
    assert np.array_equal(target, np.arange(BLOCK, dtype=np.uint8))


@pytest.mark.parametrize(
    "wrong",
    [
        {"quarantine": {"max_per_minute": 0}},
        {"quarantine": {"keep_s": 0}},
        {"quarantine": {"max_bytes": 0}},
        {"breaker": {"threshold": 0}},
        {"breaker": {"cool_down_s": -1}},
    ],
)
def test_values_that_cannot_be_meant_are_refused(opened: Open, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"quarantine|breaker"):
        opened(**wrong)
