"""Every shape of copy moves exactly its bytes; order, failures, wrong input."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ucm import trans
from ucm.errors import ClosedError, DeadlineError, InvalidInputError, StoreIOError, UcmError

TRANSFERS = ["dma", "sm", "staging", "auto"]
POISON = 0xEE
GAP = 19


def bytes_of(seed: int, size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Pages:
    """Pieces of ``size`` bytes on the device and on the host, each with a gap behind it that no
    copy may touch."""

    def __init__(self, device: trans.Device, memory: Any, size: int, count: int) -> None:
        self.memory, self.size, self.count = memory, size, count
        self.all = count * (size + GAP)
        buffers = device.make_buffer()
        self.device, self.host = (
            buffers.make_device_buffer(self.all),
            buffers.make_host_buffer(self.all),
        )
        self.bytes = np.frombuffer(self.host, np.uint8)
        order = np.random.default_rng(size).permutation(count)
        self.at = order * (size + GAP)
        self.device_at = (np.uint64(self.device.address) + self.at.astype(np.uint64)).astype(
            np.uint64
        )
        self.host_at = (np.uint64(self.host.address) + self.at.astype(np.uint64)[::-1]).astype(
            np.uint64
        )

    def fill(self, device: npt.NDArray[np.uint8], host: npt.NDArray[np.uint8]) -> None:
        self.memory.write(self.device.address, device)
        self.bytes[:] = host

    def poison(self) -> npt.NDArray[np.uint8]:
        return np.full(self.all, POISON, np.uint8)

    def on_device(self) -> npt.NDArray[np.uint8]:
        return self.memory.read(self.device.address, self.all)

    def moved(
        self, source: npt.NDArray[np.uint8], from_: npt.NDArray[Any], to: npt.NDArray[Any]
    ) -> Any:
        """Expected bytes of a poisoned destination."""
        expected = self.poison()
        for a, b in zip(from_, to, strict=True):
            expected[b : b + self.size] = source[a : a + self.size]
        return expected

    def packed(self) -> npt.NDArray[Any]:
        return np.arange(self.count) * self.size


def forms(addresses: npt.NDArray[np.uint64]) -> list[Any]:
    """The forms of the same addresses."""
    return [addresses, [int(address) for address in addresses], addresses.ctypes.data]


@pytest.mark.parametrize("form", range(3), ids=["array", "list", "pointer"])
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_every_shape(
    device: trans.Device, memory: Any, transfer: str, wait: bool, form: int
) -> None:
    stream = device.make_stream(transfer)
    suffix = "" if wait else "_async"

    def copy(name: str, *arguments: Any) -> None:
        getattr(stream, name + suffix)(*arguments)
        stream.synchronize(60)

    for size, count in [(1, 3), (24, 100), (1000, 17), (40_000, 5)]:
        pages = Pages(device, memory, size, count)
        on_device, on_host = (forms(at)[form] for at in (pages.device_at, pages.host_at))
        data = bytes_of(size, pages.all)
        back = pages.at[::-1]

        pages.fill(data, pages.poison())
        copy("device_to_host_batch", on_device, on_host, size, count)
        assert (pages.bytes == pages.moved(data, pages.at, back)).all()

        pages.fill(data, pages.poison())
        copy("device_to_host_gather", on_device, pages.host, size, count)
        assert (pages.bytes == pages.moved(data, pages.at, pages.packed())).all()

        pages.fill(data, pages.poison())
        copy("device_to_host", pages.device.address + 3, pages.host.address + 5, size)
        assert (pages.bytes == pages.moved(data, np.array([3]), np.array([5]))).all()

        pages.fill(pages.poison(), data)
        copy("host_to_device_batch", on_host, on_device, size, count)
        assert (pages.on_device() == pages.moved(data, back, pages.at)).all()

        pages.fill(pages.poison(), data)
        copy("host_to_device_scatter", pages.host, on_device, size, count)
        assert (pages.on_device() == pages.moved(data, pages.packed(), pages.at)).all()

        pages.fill(pages.poison(), data)
        copy("host_to_device", pages.host.address + 5, pages.device.address + 3, size)
        assert (pages.on_device() == pages.moved(data, np.array([5]), np.array([3]))).all()


def test_memory_that_nobody_registered(device: trans.Device, memory: Any) -> None:
    data, back = bytes_of(1, 300_001), np.full(300_001, POISON, np.uint8)
    page = device.allocate_memory(300_001)
    for transfer in TRANSFERS:
        stream = device.make_stream(transfer)
        stream.host_to_device(data.ctypes.data, page, data.nbytes)
        assert (memory.read(page.address, page.size) == data).all()
        back[:] = POISON
        stream.device_to_host(page, back.ctypes.data + 1, 300_000)
        assert back[0] == POISON and (back[1:] == data[:-1]).all()


def test_the_number_says_how_many_of_an_array(device: trans.Device, memory: Any) -> None:
    pages = Pages(device, memory, 64, 8)
    data = bytes_of(2, pages.all)
    pages.fill(data, pages.poison())
    device.make_stream().device_to_host_gather(pages.device_at, pages.host, 64, 3)
    assert (pages.bytes == pages.moved(data, pages.at[:3], pages.packed()[:3])).all()


def test_a_stream_keeps_the_order(device: trans.Device, memory: Any) -> None:
    if hasattr(memory, "jitter"):
        memory.jitter(7, 200)
    stream, buffers = device.make_stream("auto"), device.make_buffer()
    size = 5000
    one, two = buffers.make_device_buffer(size), buffers.make_device_buffer(size)
    ends = [buffers.make_host_buffer(size) for _ in range(20)]
    data = bytes_of(3, size)
    np.frombuffer(ends[0], np.uint8)[:] = data
    for before, after, page in zip(ends, ends[1:], [one, two] * 10, strict=False):
        stream.host_to_device_async(before, page, size)
        stream.device_to_host_async(page, after, size)
    stream.synchronize(60)
    assert (np.frombuffer(ends[-1], np.uint8) == data).all()
    if hasattr(memory, "jitter"):
        memory.jitter(1, 0)


def test_buffers_live_until_their_copies_are_over(device: trans.Device, soft: Any) -> None:
    stream, buffers = device.make_stream(), device.make_buffer()
    page, host = buffers.make_device_buffer(4096), buffers.make_host_buffer(4096)
    data = bytes_of(4, 4096)
    np.frombuffer(host, np.uint8)[:] = data
    view = np.frombuffer(buffers.make_host_buffer(4096), np.uint8)
    soft.hold()
    stream.host_to_device_async(host, page, 4096)
    stream.device_to_host_async(page, view.ctypes.data, 4096)
    host.close()
    page.close()
    soft.release()
    stream.synchronize(60)
    assert (view == data).all()
    with pytest.raises(ClosedError):
        _ = page.address
    with pytest.raises(ClosedError):
        stream.host_to_device(host, page, 4096)


def test_others_run_while_a_copy_waits(device: trans.Device, soft: Any) -> None:
    stream, page = device.make_stream(), device.allocate_memory(64)
    data = bytes_of(5, 64)
    soft.hold()
    copy = threading.Thread(target=stream.host_to_device, args=(data.ctypes.data, page, 64))
    copy.start()  # and this thread continues, because it must release the driver
    soft.release()
    copy.join()
    assert (soft.read(page.address, 64) == data).all()


def test_a_failure_is_told_at_once_or_when_synchronized(device: trans.Device, soft: Any) -> None:
    stream, page = device.make_stream(), device.allocate_memory(64)
    data = bytes_of(6, 64)
    soft.fail("cuMemcpyHtoDAsync_v2")
    with pytest.raises(StoreIOError, match="cuMemcpyHtoDAsync"):
        stream.host_to_device(data.ctypes.data, page, 64)
    well: list[bool] = []
    soft.fail("cuMemcpyHtoDAsync_v2")
    stream.host_to_device_async(data.ctypes.data, page, 64)
    stream.append_callback(well.append)
    with pytest.raises(StoreIOError):
        stream.synchronize()
    stream.host_to_device_async(data.ctypes.data, page, 64)
    stream.append_callback(well.append)
    stream.synchronize()
    assert well == [False, True]
    assert (soft.read(page.address, 64) == data).all()


def test_a_wait_ends_at_its_deadline(device: trans.Device) -> None:
    stream = device.make_stream()
    go = threading.Event()
    stream.append_callback(lambda well: go.wait())
    with pytest.raises(DeadlineError):
        stream.synchronize(0)
    go.set()
    stream.synchronize()


def test_wrong_input_moves_nothing(device: trans.Device, memory: Any) -> None:
    pages = Pages(device, memory, 64, 8)
    on_device, on_host = pages.device_at, pages.host_at
    one, other = pages.device.address, pages.host.address
    null = on_device.copy()
    null[5] = 0
    stream = device.make_stream()
    single: list[tuple[Any, ...]] = [
        (0, other, 64),
        (one, 0, 64),
        (-1, other, 64),
        (one, other, 0),
        (one, other, -64),
        (one, other, 1.5),
        (one, other, True),
        (one, other, 2**63),
        (one, other, 2**70),
        (one, 2**64 - 8, 64),
        ("here", other, 64),
        (None, other, 64),
        (pages.device, other, pages.all + 1),
        (one, pages.host, pages.all + 1),
    ]
    batch: list[tuple[Any, ...]] = [
        (null, on_host, 64),
        (on_device, null, 64),
        (on_device[:7], on_host, 64),
        (on_device, on_host, 64, 9),
        (on_device, on_host, 64, 0),
        (on_device, on_host, 64, -1),
        (on_device, on_host, 0),
        (on_device.reshape(2, 4), on_host, 64),
        (on_device.astype(np.int64), on_host, 64),
        (on_device.astype(np.float64), on_host, 64),
        (on_device.ctypes.data, on_host, 64),
        (0, on_host, 64, 8),
        (on_device.ctypes.data, 0, 64, 8),
        (on_device, "there", 64),
        ([], [], 64),
        ([pages.device], [other], pages.all + 1),
        (on_device[:0], on_host[:0], 64),
    ]
    together: list[tuple[Any, ...]] = [
        (null, other, 64),
        (on_device, 0, 64),
        (on_device, on_host, 64),
        (on_device, 2**64 - 100, 64),
        (on_device, pages.host, pages.all // 8 + 1),
        (on_device, other, 0),
        (on_device, other, 2**62),
    ]
    data = bytes_of(7, pages.all)
    pages.fill(data, pages.poison())
    for wait in ["", "_async"]:
        for shape, cases in [("", single), ("_batch", batch), ("_gather", together)]:
            for case in cases:
                with pytest.raises(InvalidInputError):
                    getattr(stream, f"device_to_host{shape}{wait}")(*case)
        for shape, cases in [("", single), ("_batch", batch), ("_scatter", together)]:
            for src, dst, *rest in cases:
                with pytest.raises(InvalidInputError):
                    getattr(stream, f"host_to_device{shape}{wait}")(dst, src, *rest)
    stream.synchronize()
    assert (pages.bytes == POISON).all() and (pages.on_device() == data).all()


def test_a_closed_stream_is_refused(device: trans.Device) -> None:
    stream = device.make_stream()
    stream.close()
    stream.close()
    with pytest.raises(ClosedError):
        stream.synchronize()


def test_no_such_transfer(device: trans.Device) -> None:
    with pytest.raises(UcmError, match="auto, dma, sm, staging"):
        device.make_stream("pigeon")
