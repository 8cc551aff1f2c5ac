"""Refusal as users configure it: the keys of the breaker reach the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import PATIENT

from ucm.config import load
from ucm.errors import ConfigError, TaskError
from ucm.store.engine import read_settings, settings_of
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
    """Damages the record and lets a load detect it."""
    (path,) = root.glob(f"*/blocks/*/{block[0].hex()}.bin")
    damaged = bytearray(path.read_bytes())
    damaged[5000] ^= 1
    path.write_bytes(damaged)
    target = np.zeros(BLOCK, dtype=np.uint8)
    with pytest.raises(TaskError):
        store.wait(store.load_data(block, [0], row(target)))
    assert not target.any()


def test_keys_of_the_breaker_reach_the_core(opened: Open, tmp_path: Path) -> None:
    keys = {"threshold": 3, "window_s": 5, "cool_down_s": 3000, "damaged_per_minute": 1}
    store = opened(breaker=keys)
    for block in (ID, OTHER):
        dump(store, block)
    refuse(store, tmp_path / "root", ID)
    assert store.stats()["healthy"] == 1
    refuse(store, tmp_path / "root", OTHER)
    stats = store.stats()
    assert (stats["healthy"], stats["breaker_opened"], stats["records_refused"]) == (0, 1, 2)


def test_an_open_breaker_says_so_until_a_lookup_finds_the_medium_well(
    opened: Open, tmp_path: Path
) -> None:
    store = opened(breaker={"cool_down_s": 0.05, "damaged_per_minute": 1})
    assert store.healthy()
    for block in (ID, OTHER):
        dump(store, block)
    for block in (ID, OTHER):
        refuse(store, tmp_path / "root", block)
    assert not store.healthy()  # and stays open: time alone does not close it
    while not store.healthy():
        store.lookup([bytes(16)])
    dump(store)
    assert store.lookup(ID) == [True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"quarantine": {"max_per_minute": 0}},
        {"breaker": {"damaged_per_minute": 0}},
        {"breaker": {"threshold": 0}},
        {"breaker": {"cool_down_s": -1}},
    ],
)
def test_values_that_cannot_be_meant_are_refused(opened: Open, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"quarantine|breaker"):
        opened(**wrong)


def test_the_section_of_older_versions_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    old = {"enabled": False, "max_per_minute": 5, "max_records": 2, "keep_s": 60}
    config = load({"storage_backends": "/data/ucm", "quarantine": old}, {})
    assert config.breaker.damaged_per_minute == 5
    (warning,) = (text for text in config.warnings if "quarantine" in text)
    assert all(f'"quarantine.{key}"' in warning for key in ("enabled", "max_records", "keep_s"))
    dotted = load({"storage_backends": "/data/ucm", "quarantine.max_per_minute": 6}, {})
    assert dotted.breaker.damaged_per_minute == 6
    sizes = {"tensor_size": BLOCK, "shard_size": BLOCK, "block_size": BLOCK}
    keys = {**sizes, "storage_backends": "/data/ucm", "quarantine": old}
    settings = read_settings(keys, settings_of("UcmPosixStore"), "UcmPosixStore")
    assert settings.breaker.damaged_per_minute == 5
    assert '"UcmPosixStore.quarantine.keep_s"' in caplog.text
    del keys["quarantine"]
    for flat in (
        {"quarantine.max_per_minute": 6, "breaker": {"threshold": 3}},
        {"breaker": {"threshold": 3}, "quarantine.max_per_minute": 6},
    ):
        settings = read_settings({**keys, **flat}, settings_of("UcmPosixStore"), "UcmPosixStore")
        assert (settings.breaker.damaged_per_minute, settings.breaker.threshold) == (6, 3)
    both = {"quarantine.max_per_minute": 6, "quarantine": {"max_per_minute": 5}}
    with pytest.raises(ConfigError, match="differ"):
        read_settings({**keys, **both}, settings_of("UcmPosixStore"), "UcmPosixStore")
    with pytest.raises(ConfigError, match="breaker of UcmPosixStore is a section"):
        read_settings({**keys, **flat, "breaker": 3}, settings_of("UcmPosixStore"), "UcmPosixStore")
    stages = [{"type": "Cache"}, {"type": "Posix", "storage_backends": "/data/ucm"}]
    stages[1]["quarantine"] = {"max_per_minute": 6}
    (warning,) = load({"store_pipeline": stages}, {}).warnings
    assert '"store_pipeline[1].quarantine.max_per_minute"' in warning
    assert "`breaker.damaged_per_minute` at the top level" in warning
    for wrong in ({"quarantine": {"keep": 1}}, {"quarantine": True}):
        with pytest.raises(ConfigError, match="quarantine"):
            read_settings({**keys, **wrong}, settings_of("UcmPosixStore"), "UcmPosixStore")
        with pytest.raises(ConfigError, match="quarantine"):
            load({"storage_backends": "/data/ucm", **wrong}, {})
    with pytest.raises(ConfigError, match="differ"):
        load({"quarantine": {"max_per_minute": 1}, "breaker": {"damaged_per_minute": 2}}, {})


def test_keys_of_checks_that_older_versions_had_are_understood() -> None:
    config = load({"storage_backends": "/data/ucm", "verify": "paranoid", "audit_one_in": 9}, {})
    assert config.problems == ()
    for key in ("verify", "audit_one_in"):
        (warning,) = (text for text in config.warnings if f'"{key}"' in text)
        assert "without effect" in warning
    on = load({"storage_backends": "/data/ucm", "verify": True}, {})  # YAML reads a bare `on` so
    assert on.verify == "on"
    with pytest.raises(ConfigError, match="cannot be switched off"):
        load({"storage_backends": "/data/ucm", "verify": False}, {})
