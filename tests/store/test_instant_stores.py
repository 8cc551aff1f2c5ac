"""The stores that move no bytes: an empty one, and one that only pretends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucm import config as ucm_config
from ucm.errors import (
    ClosedError,
    ConfigError,
    InvalidInputError,
    NotFoundError,
    TaskError,
    UnknownConnectorError,
)
from ucm.store import UcmConnectorFactory, UcmConnectorFactoryV1
from ucm.store.empty import UcmEmptyStore
from ucm.store.fake import UcmFakeStore
from ucm.store.presets import InstantStore

FAKE = {"allow_wrong_tokens": True, "buffer_number": 4}
SIZES = {"tensor_size": 8, "shard_size": 8, "block_size": 16}


def ids(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def addresses(rows: int) -> Any:
    return np.ones((rows, 1), np.uint64)


def dump(store: InstantStore, *numbers: int) -> None:
    store.wait(store.dump_data(ids(*numbers), [0] * len(numbers), addresses(len(numbers))))


@pytest.fixture(params=["UcmEmptyStore", "UcmFakeStore"])
def either(request: pytest.FixtureRequest) -> InstantStore:
    made = UcmConnectorFactoryV1.create_connector(
        request.param, FAKE | {"part": (0, 0, 0), "device_id": -1}
    )
    assert isinstance(made, InstantStore)
    return made


def test_the_empty_store_has_nothing() -> None:
    store = UcmEmptyStore({})
    task = store.dump_data(ids(1, 2), [0, 0], addresses(2))
    assert store.check(task)
    store.wait(task, until="staged")
    store.wait(task)
    assert store.lookup(ids(1, 2)) == [False, False]
    assert store.lookup_on_prefix(ids(1, 2)) == -1
    task = store.load_data(ids(1, 2), [0, 0], addresses(2))
    assert store.check(task)
    for _ in range(2):
        with pytest.raises(TaskError) as caught:
            store.wait([task, task])
    assert sorted(caught.value.failures) == [0, 1]
    assert all(isinstance(why, NotFoundError) for why in caught.value.failures.values())
    assert store.free_dump_slots() is None


def test_the_fake_store_knows_ids_and_touches_no_memory() -> None:
    store, target = UcmFakeStore(FAKE), np.full(8, 7, np.uint8)
    dump(store, 1, 2)
    assert store.lookup(ids(1, 2, 3)) == [True, True, False]
    store.wait(store.load_data(ids(1), [0], np.array([[target.ctypes.data]], np.uint64)))
    assert (target == 7).all()
    with pytest.raises(TaskError) as caught:
        store.wait(store.load_data(ids(1, 3), [0, 0], addresses(2)))
    assert list(caught.value.failures) == [1]


def test_the_fake_store_forgets_the_first_first_and_counts_a_block_once() -> None:
    store = UcmFakeStore(FAKE)
    dump(store, 1, 2, 3, 1, 2)
    dump(store, 1)
    assert store.lookup(ids(1, 2, 3)) == [True] * 3
    dump(store, 4, 5)
    assert store.lookup(ids(1, 2, 3, 4, 5)) == [False, True, True, True, True]
    dump(store, *range(10, 30))
    assert store.lookup(ids(2, 25, *range(26, 30))) == [False, False, True, True, True, True]


def test_a_block_of_the_fake_store_needs_all_its_shards() -> None:
    store = UcmFakeStore(FAKE | SIZES)
    dump(store, 1, 2)
    assert store.lookup(ids(1, 2)) == [False, False]
    store.wait(store.dump_data(ids(2), [1], addresses(1)))
    assert store.lookup(ids(1, 2)) == [False, True]
    dump(store, 3, 4, 5, 6, 7)  # too many begun: the first is dropped
    store.wait(store.dump_data(ids(1), [1], addresses(1)))
    assert store.lookup(ids(1)) == [False]


def test_processes_share_the_ids_of_the_fake_store_through_a_directory(tmp_path: Path) -> None:
    config = FAKE | {"storage_backends": [str(tmp_path / "ids")]}
    first, second = UcmFakeStore(config), UcmFakeStore(config)
    dump(first, 1)
    code = (
        "import sys, numpy as np\n"
        "from ucm.store.fake import UcmFakeStore\n"
        f"store = UcmFakeStore({config!r})\n"
        "ids = [n.to_bytes(16, 'big') for n in (1, 2)]\n"
        "print(store.lookup(ids))\n"
        "store.dump_data(ids[1:], [0], np.ones((1, 1), np.uint64))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, False]\n"
    assert second.lookup(ids(1, 2)) == first.lookup(ids(1, 2)) == [True, True]
    dump(second, 3, 4, 5)
    assert first.lookup(ids(1, 2, 5)) == [False, True, True]
    with pytest.raises(ConfigError, match="the same buffer_number"):
        UcmFakeStore(config | {"buffer_number": 8})
    first.close()


def test_keys_of_the_fake_store_are_checked() -> None:
    with pytest.raises(ConfigError, match="buffer_number"):
        UcmFakeStore(FAKE | {"buffer_number": 0})


@pytest.mark.parametrize(
    "config", [{}, {"allow_wrong_tokens": False}, {"allow_wrong_tokens": "no"}]
)
def test_the_fake_store_must_be_asked_for_by_name_and_by_consequence(
    config: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="wrong tokens"):
        UcmFakeStore(config)
    with pytest.raises(ConfigError, match="wrong tokens"):
        ucm_config.load({"ucm_connector_name": "UcmFakeStore", **config}, {})
    with pytest.raises(ConfigError, match="wrong tokens"):
        ucm_config.load({"store_pipeline": "Cache|Fake", **config}, {})
    # Also not by a module path, which makes any class a user's own store: the class itself checks.
    with pytest.raises(ConfigError, match="wrong tokens"):
        UcmConnectorFactoryV1.create_connector("UcmFakeStore", config, "ucm.store.fake.connector")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ({"ucm_connector_name": "UcmEmptyStore"}, "UcmEmptyStore"),
        ({"storage_backend": "empty"}, "UcmEmptyStore"),
        ({"store_pipeline": "Empty"}, "UcmEmptyStore"),
        (
            {"store_pipeline": "Fake", "allow_wrong_tokens": True, "buffer_number": 2048},
            "UcmFakeStore",
        ),
        (
            {
                "ucm_connectors": [
                    {"ucm_connector_name": "UcmFakeStore", "ucm_connector_config": FAKE}
                ]
            },
            "UcmFakeStore",
        ),
    ],
)
def test_they_are_stores_by_name_and_by_stage_word(written: dict[str, Any], name: str) -> None:
    config = ucm_config.load(written, {})
    assert config.ucm_connector_name == name
    made = UcmConnectorFactoryV1.create_connector(
        name, config.store_config() | SIZES | {"part": (0, 0, 0)}
    )
    assert type(made).__name__ == name
    assert made.lookup(ids(1)) == [False]


def test_calls_that_make_no_sense(either: InstantStore) -> None:
    for call in (either.load_data, either.dump_data):
        with pytest.raises(InvalidInputError, match="16 raw bytes"):
            call([b"short"], [0], addresses(1))
        with pytest.raises(InvalidInputError, match="equally many"):
            call(ids(1, 2), [0], addresses(1))
    with pytest.raises(InvalidInputError, match="16 raw bytes"):
        either.lookup(["0" * 32])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match="no task"):
        either.wait(object())
    assert either.stats()["healthy"]
    either.close()
    either.close()
    with pytest.raises(ClosedError):
        either.lookup(ids(1))


def test_through_v0_too() -> None:
    store = UcmConnectorFactory.create_connector(
        "UcmFakeStore", FAKE | {"kv_block_size": 16, "io_size": 8}
    )
    names, part = ["0" * 31 + "1"], np.zeros(16, np.uint8)
    assert list(store.create(names)) == [0]
    store.dump(names, [0], [part])
    store.commit(names)
    assert list(store.lookup(names)) == [True]
    with pytest.raises(UnknownConnectorError, match="UcmEmptyStore"):
        UcmConnectorFactory.create_connector("UcmEmpty", {})
