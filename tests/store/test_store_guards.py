"""Protections of the Rust store: forked children, odd timeouts, a start without a log line."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ucm
from ucm.errors import ConfigError, ForkedError, InvalidInputError, TaskError
from ucm.store.posix import UcmPosixStore

BLOCK = 4096


@pytest.fixture
def config(common: dict[str, Any]) -> dict[str, Any]:
    return common | {"tensor_size": BLOCK, "shard_size": BLOCK, "block_size": BLOCK}


@pytest.fixture
def store(config: dict[str, Any]) -> Iterator[UcmPosixStore]:
    opened = UcmPosixStore(config)
    yield opened
    opened.close()


def rows(memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([[memory.ctypes.data]], dtype=np.uint64)


NAME = b"0123456789abcdef"


def _child(calls: list[Callable[[], object]], store: list[UcmPosixStore], answer: Any) -> None:
    told = []
    for call in calls:
        try:
            call()
            told.append("went through")
        except ForkedError:
            told.append("forked")
    store.pop().close()
    gc.collect()
    answer.send(told)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_by_every_call_and_may_close(store: UcmPosixStore) -> None:
    memory = np.zeros(BLOCK, np.uint8)
    task = store.dump_data([NAME], [0], rows(memory))
    calls: list[Callable[[], object]] = [
        lambda: store.lookup([NAME]),
        lambda: store.lookup_on_prefix([NAME]),
        lambda: store.load_data([NAME], [0], rows(memory)),
        lambda: store.dump_data([NAME], [0], rows(memory)),
        lambda: store.describe([NAME], tokens=[1]),
        lambda: store.touch([NAME]),
        lambda: store.stats(),
        lambda: store.free_dump_slots(),
        lambda: store.wait(task),
        lambda: store.check(task),
    ]
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(calls, [store], send))
    child.start()
    assert receive.poll(60)
    assert receive.recv() == ["forked"] * len(calls)
    child.join(60)
    assert child.exitcode == 0
    store.wait(task)
    assert store.lookup([NAME]) == [True]


def test_timeouts_that_are_no_numbers_are_errors_and_those_that_are_over_end_at_once(
    store: UcmPosixStore,
) -> None:
    memory = np.zeros(BLOCK, np.uint8)
    task = store.dump_data([NAME], [0], rows(memory))
    with pytest.raises(InvalidInputError, match="NaN"):
        store.wait(task, timeout=math.nan)
    store.wait(task, timeout=math.inf)
    with pytest.raises(InvalidInputError, match="NaN"):
        store.load_data([NAME], [0], rows(memory), timeout=math.nan)
    for over in (-1.0, 0.0):
        with pytest.raises(TaskError) as caught:
            store.wait(store.load_data([NAME], [0], rows(memory), timeout=over))
        assert caught.value.failures[0].kind == "timeout"
    store.wait(store.load_data([NAME], [0], rows(memory), timeout=math.inf))


def test_the_start_says_what_is_used(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ucm.store.posix"):
        UcmPosixStore(config).close()
    first, opened = caplog.messages
    root = str(config["storage_backends"])
    assert first.startswith(f"{root}: ucm {ucm.__version__}: ")
    assert "staging slots of 8 KiB on " in first
    assert opened.startswith(f"open: {root} on ") and opened.count(root) == 1
    for words in ("16 I/O threads", "buffered I/O", "at most 1 GiB stored"):
        assert words in opened


def test_a_line_of_the_core_carries_what_it_is_about(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    in_the_way = str(tmp_path / "file")
    with caplog.at_level(logging.INFO, logger="ucm.store.posix"):
        store = UcmPosixStore(config | {"storage_backends": [in_the_way]})
        other = UcmPosixStore(config)
        lines = [
            (record.getMessage(), record.levelno, vars(record)["fields"])
            for record in caplog.records
        ]
        store.close()
        other.close()
    (off, level, fields), _, (opened, _, _) = lines
    assert off.startswith("posix is switched off") and off.count(in_the_way) == 1
    assert (level, fields["tier"], set(fields)) == (logging.WARNING, "posix", {"tier", "error"})
    assert store.trouble() in off
    for words in (
        "every lookup misses",
        "nothing is stored",
        in_the_way,
        "configure another place",
    ):
        assert words in off
    assert opened.startswith(f"open: {config['storage_backends']} on ")
    assert other.trouble() == ""


def _says_in_a_child(config: dict[str, Any], answer: Any) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ucm.store.posix")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    UcmPosixStore(config).close()
    answer.send(said)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_store_of_a_forked_child_says_what_it_uses(
    store: UcmPosixStore, config: dict[str, Any]
) -> None:
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_says_in_a_child, args=(config, send)
    )
    child.start()
    assert receive.poll(60)
    assert receive.recv()[1].startswith("open: ")
    child.join(60)


def test_what_is_written_past_the_page_cache_is_read_back(config: dict[str, Any]) -> None:
    blocks = [bytes([number]) * 16 for number in range(8)]
    memory = (
        np.arange(len(blocks) * BLOCK, dtype=np.uint32).astype(np.uint8).reshape(len(blocks), BLOCK)
    )
    wanted = memory.copy()
    store = UcmPosixStore(config | {"io_direct": True})
    addresses = [[memory[number].ctypes.data] for number in range(len(blocks))]
    store.wait(store.dump_data(blocks, [0] * len(blocks), addresses))
    memory[:] = 0
    store.wait(store.load_data(blocks, [0] * len(blocks), addresses))
    store.close()
    assert (memory == wanted).all()


def test_a_limit_too_small_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="storage_capacity"):
        UcmPosixStore(config | {"storage_capacity": 8192})
