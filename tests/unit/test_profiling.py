"""The profile: each line is an event of the Chrome trace format, and spans are closed."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path

import pytest
from plain_profile import events_of

from ucm.profiling import Profile


def record(path: Path, process: str, spans: int) -> None:
    profile = Profile()
    profile.open(str(path), process)
    for at in range(spans):
        profile.span("load", at, at + 0.5, request=f"{process}{at}")
    profile.step("step", 1.0, 1.25, rank=0)
    profile.close()


def test_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    record(path, "scheduler", 3)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=record, args=(path, f"rank{at}", 300)) for at in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = events_of(path)
    names = {one["args"]["name"] for one in found if one["ph"] == "M"}
    assert names == {"ucm scheduler", "ucm rank0", "ucm rank1", "ucm rank2"}
    assert {one["pid"] for one in found} == {os.getpid(), *(worker.pid for worker in workers)}
    assert sum(one["ph"] == "b" for one in found) == 903
    (step,) = [one for one in found if one["ph"] == "X" and one["pid"] == os.getpid()]
    assert (step["ts"], step["dur"], step["args"]) == (1_000_000, 250_000, {"rank": 0})


def test_an_event_is_in_the_file_at_once(tmp_path: Path) -> None:
    profile, path = Profile(), tmp_path / "p.json"
    profile.open(str(path), "x")
    profile.open(str(tmp_path / "other"), "x")
    profile.span("load", 0.0, 0.5)
    assert len(events_of(path)) == 3
    profile.close()
    profile.close()
    profile.span("load", 0.0, 9.0)
    assert len(events_of(path)) == 3


def test_a_full_disk_ends_the_profile_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    profile = Profile()
    with caplog.at_level(logging.WARNING, "ucm"):
        profile.open("/dev/full", "x")
    assert not profile.on
    profile.span("load", 0.0, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "the profile ends here: No space left on device"
    ]


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = Profile()
    with caplog.at_level(logging.WARNING, "ucm"):
        profile.open(str(tmp_path), "x")
    assert not profile.on
    assert [record.getMessage() for record in caplog.records] == [
        f"no profile is written: {tmp_path}: Is a directory"
    ]
    profile.span("load", 0.0, 1.0)
    profile.close()
