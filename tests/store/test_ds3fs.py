"""The store on 3FS, over its client library in software (``tests/soft3fs``)."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocks import SHAPE, Memory, ids

from ucm.config import load
from ucm.errors import ConfigError
from ucm.store.ds3fs.connector import UcmDs3fsStore
from ucm.store.posix import UcmPosixStore

Open = Callable[..., UcmPosixStore]
COUNT = 4


@pytest.fixture
def library() -> str:
    """Path of the library, which ``make`` builds."""
    path = os.environ.get("UCM_TEST_SOFT3FS", "target/drivers/debug/libsoft3fs.so")
    if not os.path.exists(path):
        pytest.fail(f"{path} is missing: cargo build -p soft3fs")
    return os.path.abspath(path)


@pytest.fixture
def opened(common: dict[str, Any], tmp_path: Path, library: str, open_store: Open) -> Open:
    """Opens a store on a directory that counts as 3FS."""
    (tmp_path / "mount" / "3fs-virt").mkdir(parents=True)

    def make(name: str = "UcmDs3fsStore", **keys: Any) -> UcmPosixStore:
        root = str(tmp_path / "mount" / "root")
        written = {
            "ucm_connector_name": name,
            "storage_backends": root,
            "hf3fs_library": library,
            **keys,
        }
        config = load(written, {})
        ours = {key: common[key] for key in ("deadlines", "free_space_floor")}
        told = config.store_config() | SHAPE | {"identity": str(tmp_path)} | ours
        return open_store(config.ucm_connector_name, told)

    return make


def operations(library: str) -> int:
    """Reads and writes that went through rings in this process."""
    calls = ctypes.CDLL(library).soft3fs_calls
    calls.restype = ctypes.c_uint64
    return int(calls(b"read")) + int(calls(b"write"))


def load_blocks(store: UcmPosixStore, source: Memory, blocks: range) -> None:
    """Loads blocks, which are those of the source to the byte."""
    target = Memory(len(source.pieces), fill=0)
    wanted = [ids(len(source.pieces))[block] for block in blocks]
    store.wait(store.load_data(wanted, [0] * len(blocks), target.rows(*blocks)))
    assert all(source.equals(target, block) for block in blocks)


def check(store: UcmPosixStore) -> None:
    source = Memory(COUNT)
    store.wait(store.dump_data(ids(COUNT), [0] * COUNT, source.rows(*range(COUNT))))
    assert store.lookup(ids(COUNT)) == [True] * COUNT
    load_blocks(store, source, range(COUNT))


@pytest.mark.parametrize("layout", ["file", "segment"])
def test_blocks_go_through_rings(opened: Open, library: str, layout: str) -> None:
    store = opened(layout=layout)
    assert isinstance(store, UcmDs3fsStore)
    before = operations(library)
    check(store)
    assert operations(library) >= before + 2


@pytest.mark.parametrize("layout", ["file", "segment"])
def test_two_stores_on_one_mount(opened: Open, library: str, layout: str) -> None:
    """Each store finds and loads the other's dumps while both are open."""
    one, other = opened(layout=layout), opened(layout=layout)
    source, blocks = Memory(2 * COUNT), ids(2 * COUNT)
    assert not any(one.lookup(blocks)) and not any(other.lookup(blocks))
    for writer, reader, first in ((one, other, 0), (other, one, COUNT)):
        mine = range(first, first + COUNT)
        writer.wait(writer.dump_data(blocks[first:][:COUNT], [0] * COUNT, source.rows(*mine)))
        pause = threading.Event()  # blocks of others are found a second later
        for _ in range(6000):
            if all(reader.lookup(blocks[: first + COUNT])):
                break
            pause.wait(0.01)
        else:
            raise AssertionError("the other store does not find them")
        before = operations(library)
        load_blocks(reader, source, mine)
        assert operations(library) > before
    load_blocks(one, source, range(2 * COUNT))
    load_blocks(other, source, range(2 * COUNT))


def test_a_pipeline_over_it(opened: Open, library: str) -> None:
    before = operations(library)
    check(opened("UcmPipelineStore", store_pipeline="Cache|Ds3fs", cache_size="1MiB"))
    assert operations(library) > before


def test_without_3fs_blocks_go_through_the_mount_and_that_is_said_once(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ucm.store.ds3fs"):
        check(opened(hf3fs_library="/no/such/library.so"))
    said = [
        record.getMessage()
        for record in caplog.records
        if "without the rings of 3FS" in record.getMessage()
    ]
    assert len(said) == 1 and "/no/such/library.so cannot be" in said[0]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ior_entries": 0}, "ior_entries"),
        ({"ior_dept": 4}, "ior_depth"),
        ({"numa_id": -2}, "numa_id"),
    ],
)
def test_refusals(opened: Open, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(**keys)
