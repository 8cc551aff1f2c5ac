"""Callbacks run on their stream's thread, log their exceptions, and never keep a process from
ending."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import numpy as np
import pytest

from ucm import trans
from ucm.errors import InvalidInputError


def test_in_order_on_another_thread_with_everything_before_done(device: trans.Device) -> None:
    stream, buffers = device.make_stream(), device.make_buffer()
    page = buffers.make_device_buffer(4096)
    hosts = [buffers.make_host_buffer(4096) for _ in range(5)]
    seen: list[tuple[int, bool, int, str]] = []
    for number, host in enumerate(hosts):
        data = np.full(4096, number, np.uint8)
        stream.host_to_device_async(data.ctypes.data, page, 4096)
        stream.device_to_host_async(page, host, 4096)

        def called(well: bool, data: object = data, number: int = number) -> None:
            last = int(np.frombuffer(hosts[number], np.uint8)[-1])
            seen.append((number, well, last, threading.current_thread().name))

        stream.append_callback(called)
    stream.synchronize(60)
    assert [entry[:3] for entry in seen] == [(n, True, n) for n in range(5)]
    assert threading.current_thread().name not in {entry[3] for entry in seen}


def test_what_it_raises_is_logged_and_the_stream_goes_on(
    device: trans.Device, caplog: pytest.LogCaptureFixture
) -> None:
    stream = device.make_stream()
    after: list[bool] = []

    def wrong(well: bool) -> None:
        raise KeyError("nobody")

    def ends(well: bool) -> None:
        raise SystemExit(3)

    with caplog.at_level(logging.ERROR, "ucm.trans"):
        for call in (wrong, ends, after.append):
            stream.append_callback(call)
        stream.synchronize(60)
    raised = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert raised == [KeyError, SystemExit]
    assert after == [True]


def test_it_may_not_wait_for_what_waits_for_it(device: trans.Device) -> None:
    stream, buffers = device.make_stream(), device.make_buffer()
    buffers.make_host_buffers(64, 1)
    told: list[str] = []
    refused = [
        stream.synchronize,
        lambda: stream.host_to_device(1, 1, 1),
        lambda: stream.append_callback(print),
        lambda: buffers.get_host_buffer(64),
    ]

    def called(well: bool) -> None:
        for call in refused:
            with pytest.raises(InvalidInputError) as info:
                call()
            told.append(str(info.value))

    stream.append_callback(called)
    stream.synchronize(60)
    assert len(told) == 4 and all("callback" in text for text in told)


AT_EXIT = """
import os, sys, threading
from ucm import trans
device = trans.Device({platform!r})
device.setup(0)
stream = device.make_stream()
began, go = threading.Event(), threading.Event()
def first(well):
    began.set()
    go.wait()
    sys.stdout.write("ended ")
    sys.stdout.flush()
stream.append_callback(first)
for _ in range(500):
    stream.append_callback(lambda well: None)
began.wait()
threading.Timer(0.05, go.set).start() if {late} else go.set()
"""


@pytest.mark.parametrize("late", [False, True])
def test_the_interpreter_ends_with_callbacks_under_way(memory: object, late: bool) -> None:
    program = AT_EXIT.format(platform=memory.platform, late=late)  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended "), done.stderr
    assert "Error" not in done.stderr and "Fatal" not in done.stderr
