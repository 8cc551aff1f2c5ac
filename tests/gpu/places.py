"""The devices of the checks of this directory: a GPU with torch, the host, or the software CUDA
driver.

Each place has memory of its own that ucm did not allocate, and reads it without ucm.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: The library that replaces the CUDA driver in tests.
HOOK = "UCM_TEST_DRIVER"

#: The words of ``--device``.
WORDS = ("cuda", "host", "softcuda")


class MissingError(Exception):
    """A requirement of a place is missing; the text names it."""


class Place(Protocol):
    """A device and memory on it."""

    word: str
    #: Its name in stores and ``ucm.trans``.
    platform: str
    #: True if every address outside of the device's memory is refused and not accessed.
    refuses_wild_addresses: bool

    def allocate(self, size: int) -> int:
        """Memory that lives as long as this place; its address."""

    def write(self, address: int, data: Bytes) -> None:
        """Fills memory of :meth:`allocate`."""

    def read(self, address: int, size: int) -> Bytes:
        """What is in it."""

    def busy_write(self, address: int, data: Bytes) -> tuple[int, Callable[[], None]]:
        """Begins a write behind long work, with an event after it; returns its handle and a
        function that ends the work."""


class Host:
    """The memory of this process."""

    word = platform = "host"
    refuses_wild_addresses = False

    def __init__(self) -> None:
        self._kept: list[Bytes] = []

    def allocate(self, size: int) -> int:
        self._kept.append(np.zeros(size, np.uint8))
        return int(self._kept[-1].ctypes.data)

    def write(self, address: int, data: Bytes) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        ctypes.memmove(data.ctypes.data, address, size)
        return data

    def busy_write(self, address: int, data: Bytes) -> tuple[int, Callable[[], None]]:
        """The host has no events: the source of a dump is written before."""
        self.write(address, data)
        return 0, lambda: None


class Gpu:
    """A GPU, with memory, streams and events of torch's."""

    word = platform = "cuda"
    refuses_wild_addresses = True

    def __init__(self) -> None:
        if HOOK in os.environ:
            raise MissingError(f"a library of tests stands for the CUDA driver here ({HOOK})")
        try:
            import torch
        except ImportError:
            raise MissingError("torch is not installed") from None
        if not torch.cuda.is_available():
            raise MissingError(f"torch {torch.__version__} finds no GPU")
        self._torch: Any = torch
        self._kept: list[Any] = []

    def _tensor(self, address: int, size: int) -> Any:
        for tensor in self._kept:
            at = address - tensor.data_ptr()
            if at >= 0 and at + size <= tensor.numel():
                return tensor[at : at + size]
        raise AssertionError("no memory of this place")

    def allocate(self, size: int) -> int:
        self._kept.append(self._torch.zeros(size, dtype=self._torch.uint8, device="cuda"))
        return int(self._kept[-1].data_ptr())

    def write(self, address: int, data: Bytes) -> None:
        self._tensor(address, data.size).copy_(self._torch.from_numpy(data))
        self._torch.cuda.synchronize()

    def read(self, address: int, size: int) -> Bytes:
        self._torch.cuda.synchronize()
        read: Bytes = self._tensor(address, size).cpu().numpy()
        return read

    def busy_write(self, address: int, data: Bytes) -> tuple[int, Callable[[], None]]:
        there = self._torch.from_numpy(data).cuda()
        stream, event = self._torch.cuda.Stream(), self._torch.cuda.Event()
        self._torch.cuda.synchronize()
        with self._torch.cuda.stream(stream):
            self._torch.cuda._sleep(400_000_000)  # cycles, some tenths of a second
            self._tensor(address, data.size).copy_(there)
            event.record(stream)
        self._kept_events = event, there
        return int(event.cuda_event), event.synchronize


class Soft:
    """The software CUDA driver, whose memory the host cannot touch."""

    word, platform = "softcuda", "cuda"
    refuses_wild_addresses = True

    def __init__(self) -> None:
        if HOOK not in os.environ:
            raise MissingError(f"{HOOK} names no software driver; make test-py builds one")
        self._driver = ctypes.CDLL(os.environ[HOOK])
        context = ctypes.c_void_p()
        self._ok("cuInit", 0)
        self._ok("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._context = context

    def _ok(self, function: str, *arguments: Any) -> None:
        answer = getattr(self._driver, function)(*arguments)
        assert answer == 0, f"{function}: {answer}"

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._ok("cuCtxSetCurrent", self._context)
        self._ok("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def write(self, address: int, data: Bytes) -> None:
        self._ok(
            "softcuda_write",
            ctypes.c_uint64(address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )

    def read(self, address: int, size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        self._ok(
            "softcuda_read",
            ctypes.c_uint64(address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(size),
        )
        return data

    def busy_write(self, address: int, data: Bytes) -> tuple[int, Callable[[], None]]:
        there = self.allocate(data.size)
        self.write(there, data)
        stream, event = ctypes.c_void_p(), ctypes.c_void_p()
        self._ok("cuStreamCreate", ctypes.byref(stream), 1)
        self._ok("cuEventCreate", ctypes.byref(event), 0)
        self._driver.softcuda_hold(stream)
        size = ctypes.c_size_t(data.size)
        self._ok(
            "cuMemcpyDtoDAsync_v2", ctypes.c_uint64(address), ctypes.c_uint64(there), size, stream
        )
        self._ok("cuEventRecord", event, stream)
        assert event.value is not None
        release = threading.Timer(0.2, self._driver.softcuda_release, [stream])
        release.start()
        return event.value, release.join


def place(word: str) -> Place:
    """The place of this name; :class:`MissingError` if it is not available."""
    places: dict[str, Callable[[], Place]] = {"cuda": Gpu, "host": Host, "softcuda": Soft}
    return places[word]()
