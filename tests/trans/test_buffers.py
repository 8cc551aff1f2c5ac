"""Buffers: pools that wait and never grow, pinned memory, and refused calls."""

from __future__ import annotations

import mmap
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from ucm import trans
from ucm.errors import ClosedError, DeadlineError, ForkedError, InvalidInputError, UcmError


@pytest.mark.parametrize("side", ["device", "host"])
def test_an_empty_pool_waits_and_does_not_grow(device: trans.Device, side: str) -> None:
    buffers = device.make_buffer()
    get = getattr(buffers, f"get_{side}_buffer")
    getattr(buffers, f"make_{side}_buffers")(1000, 2)
    one, two = get(1000), get(10)
    assert one.address != two.address and one.size == two.size == 1000
    with pytest.raises(DeadlineError):
        get(1000, 0)
    with pytest.raises(DeadlineError):
        get(1000, timeout=0.01)
    address = two.address
    two.close()
    two.close()
    with get(1000, 0) as again:
        assert again.address == address
    third = get(1000, 0)
    got: list[trans.Memory] = []
    waiting = threading.Thread(target=lambda: got.append(get(1000, None)))
    waiting.start()
    del third  # an unreferenced buffer returns too
    waiting.join()
    assert got[0].address == address
    with pytest.raises(InvalidInputError, match="make some first"):
        get(1001, 0)


@pytest.mark.parametrize("side", ["device", "host"])
def test_impossible_buffers(device: trans.Device, side: str) -> None:
    buffers = device.make_buffer()
    for size in [0, -1, 1.5, "4096", None, True, 2**64]:
        for name in [f"make_{side}_buffer", f"get_{side}_buffer"]:
            with pytest.raises(InvalidInputError):
                getattr(buffers, name)(size)
        with pytest.raises(InvalidInputError):
            getattr(buffers, f"make_{side}_buffers")(size, 1)
        with pytest.raises(InvalidInputError):
            getattr(buffers, f"make_{side}_buffers")(64, size)
    with pytest.raises(UcmError):
        getattr(buffers, f"make_{side}_buffer")(2**60)
    with pytest.raises(InvalidInputError):
        getattr(buffers, f"get_{side}_buffer")(64, float("nan"))


def test_the_host_sees_its_own_buffers_only(device: trans.Device) -> None:
    buffers = device.make_buffer()
    host = buffers.make_host_buffer(100)
    view = np.frombuffer(host, np.uint8)
    assert view.size == 100 and not view.any() and view.flags.writeable
    view[:] = 7
    host.close()
    assert (view == 7).all()
    with pytest.raises(ClosedError):
        memoryview(host)
    with pytest.raises(BufferError):
        memoryview(buffers.make_device_buffer(100))


def test_registered_memory(device: trans.Device, memory: Any) -> None:
    buffers, page = device.make_buffer(), device.allocate_memory(100_000)
    data = np.random.default_rng(1).integers(0, 256, 104_097, np.uint8)
    skipped = 1
    if memory.platform == "ascend":  # where pinned memory begins at a page
        with pytest.raises(InvalidInputError, match="multiple of 4096"):
            buffers.register_host_buffer(-data.ctypes.data % 4096 + data.ctypes.data + 1, 100)
        skipped = -data.ctypes.data % 4096
    address = data.ctypes.data + skipped
    for wrong in [(0, 10), (address, 0), (address, -1), (None, 10), (2**64 - 1, 100)]:
        with pytest.raises(InvalidInputError):
            buffers.register_host_buffer(*wrong)  # type: ignore[arg-type]
    buffers.register_host_buffer(address, 100_000)
    with pytest.raises(InvalidInputError, match="registered already"):
        buffers.register_host_buffer(address, 100)
    stream = device.make_sm_stream()
    stream.host_to_device(address, page, 100_000)
    assert (memory.read(page.address, 100_000) == data[skipped : skipped + 100_000]).all()
    buffers.unregister_host_buffer(address)
    with pytest.raises(InvalidInputError, match="no range"):
        buffers.unregister_host_buffer(address)


def test_kernels_reach_what_is_registered(device: trans.Device, soft: Any) -> None:
    buffers, page = device.make_buffer(), device.allocate_memory(100_000)
    data = np.zeros(100_000, np.uint8)
    stream = device.make_sm_stream()
    stream.device_to_host(page, data.ctypes.data, 100_000)
    copied = soft.calls("cuMemcpyDtoHAsync_v2")
    buffers.register_host_buffer(data.ctypes.data, 100_000)
    soft.write(page.address, np.full(100_000, 5, np.uint8))
    stream.device_to_host(page, data.ctypes.data, 100_000)
    assert (data == 5).all() and soft.calls("cuMemcpyDtoHAsync_v2") == copied
    buffers.unregister_host_buffer(data.ctypes.data)


def _in_child(
    device: trans.Device, stream: trans.Stream, memory: trans.Memory, tell: Connection
) -> None:
    told = []
    calls: list[Callable[[], object]] = [device.make_stream, device.make_buffer, stream.synchronize]
    for call in [*calls, lambda: memory.address]:
        try:
            call()
        except ForkedError:
            told.append("forked")
    tell.send(told)


def _end_in_child(memories: list[trans.Memory], stream: trans.Stream, tell: Connection) -> None:
    maps = [mmap.mmap(-1, size) for size in [4096, 1 << 20] * 16]
    for each in maps:
        each[:] = b"\x07" * len(each)
    for memory in memories[::2]:
        memory.close()
    stream.close()
    del memories[:], memory, stream
    tell.send(all(each[:] == b"\x07" * len(each) for each in maps))


def test_a_forked_child_ends_nothing_of_its_parents(device: trans.Device, memory: Any) -> None:
    buffers, stream = device.make_buffer(), device.make_stream()
    buffers.make_host_buffers(4096, 2)
    memories = [buffers.make_host_buffer(4096), buffers.make_host_buffer(1 << 20)]
    memories += [
        buffers.get_host_buffer(4096),
        buffers.get_host_buffer(4096),
        device.allocate_memory(4096),
    ]
    receive, send = multiprocessing.Pipe(duplex=False)
    stream.host_to_device_async(memories[1], memories[-1], 4096)  # it has a thread now
    stream.synchronize()
    child = multiprocessing.get_context("fork").Process(
        target=_end_in_child, args=(memories, stream, send)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0 and receive.poll() and receive.recv()
    page = memories[-1]
    stream.host_to_device(memories[1], page, 4096)
    assert (memory.read(page.address, 4096) == np.frombuffer(memories[1], np.uint8)[:4096]).all()


def test_a_forked_child_is_told(device: trans.Device) -> None:
    receive, send = multiprocessing.Pipe(duplex=False)
    stream, memory = device.make_stream(), device.allocate_memory(64)
    child = multiprocessing.get_context("fork").Process(
        target=_in_child, args=(device, stream, memory, send)
    )
    child.start()
    told = receive.recv()
    child.join()
    assert told == ["forked"] * 4 and child.exitcode == 0
