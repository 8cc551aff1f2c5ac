"""Devices of the copies: always the host; another over the software driver if the environment names
its library.

``make test-py`` builds and names it, and runs this directory by itself: a process loads its driver
once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from ucm import trans

#: The library that replaces a vendor's.
HOOK = "UCM_TEST_DRIVER"

#: The vendor of this run: ``UCM_TEST_DEVICE``, as in the suites of the core.
SOFT = os.environ.get("UCM_TEST_DEVICE", "cuda")

Bytes = npt.NDArray[np.uint8]


class Host:
    """Reads memory of the host as a device's."""

    platform = "host"

    def write(self, address: int, data: Bytes) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        ctypes.memmove(data.ctypes.data, address, size)
        return data


class Soft:
    """The software driver: reads its devices' memory and injects failures."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.library = ctypes.CDLL(os.environ[HOOK])
        self.library.softcuda_calls.restype = ctypes.c_uint64

    def write(self, address: int, data: Bytes) -> None:
        done = self.library.softcuda_write(
            ctypes.c_uint64(address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )
        assert done == 0

    def read(self, address: int, size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        done = self.library.softcuda_read(
            ctypes.c_uint64(address), ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(size)
        )
        assert done == 0
        return data

    def calls(self, function: str) -> int:
        return int(self.library.softcuda_calls(function.encode()))

    def fail(self, function: str, nth: int = 1) -> None:
        self.library.softcuda_fail(function.encode(), ctypes.c_uint64(nth), 719)

    def hold(self) -> None:
        self.library.softcuda_hold(None)

    def release(self) -> None:
        self.library.softcuda_release(None)

    def jitter(self, seed: int, most_us: int) -> None:
        self.library.softcuda_jitter(ctypes.c_uint64(seed), ctypes.c_uint64(most_us))


@pytest.fixture(scope="session", params=["host", *([SOFT] if HOOK in os.environ else [])])
def memory(request: pytest.FixtureRequest) -> Host | Soft:
    """Access to the device's memory."""
    return Host() if request.param == "host" else Soft(request.param)


@pytest.fixture(scope="session")
def device(memory: Host | Soft) -> trans.Device:
    """An open device."""
    device = trans.Device(memory.platform)
    device.setup(0)
    return device


@pytest.fixture
def soft(memory: Host | Soft) -> Iterator[Soft]:
    """The software driver, without failures again at the end."""
    if not isinstance(memory, Soft) or memory.platform != "cuda":
        pytest.skip("what disturbs the driver knows calls of CUDA")
    yield memory
    memory.release()
    memory.jitter(1, 0)
    memory.library.softcuda_mend()
