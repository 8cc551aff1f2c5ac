"""The software CUDA driver (``tests/softcuda``) from Python, where ``UCM_TEST_DRIVER`` names its
library."""

from __future__ import annotations

import ctypes
import os
from functools import cache

#: True if this run uses the driver, with everything possible on the device.
IN_USE = os.environ.get("UCM_TEST_DEVICE") == "cuda"


@cache
def driver() -> ctypes.CDLL:
    """The driver: the one that the core loads from the same path."""
    return ctypes.CDLL(os.environ["UCM_TEST_DRIVER"])


def ok(result: int) -> None:
    """Raises if a call of the driver failed."""
    if result != 0:
        raise RuntimeError(f"the software driver answered {result}")


def use_device() -> None:
    """Makes the primary context of device 0 current on this thread, as torch does."""
    context = ctypes.c_void_p()
    ok(driver().cuInit(0))
    ok(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    ok(driver().cuCtxSetCurrent(context))


class DeviceMemory:
    """Bytes on the device, inaccessible to the host, freed with this object."""

    def __init__(self, content: bytes) -> None:
        use_device()
        address = ctypes.c_uint64()
        ok(driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(len(content))))
        self.address, self._len = address.value, len(content)
        ok(driver().softcuda_write(address, content, ctypes.c_size_t(len(content))))

    def read(self) -> bytes:
        """What is there now."""
        into = ctypes.create_string_buffer(self._len)
        ok(driver().softcuda_read(ctypes.c_uint64(self.address), into, ctypes.c_size_t(self._len)))
        return into.raw

    def __del__(self) -> None:
        if hasattr(self, "address"):
            use_device()
            ok(driver().cuMemFree_v2(ctypes.c_uint64(self.address)))


def calls(*functions: str) -> list[int]:
    """The numbers of calls of the driver's functions in this process."""
    driver().softcuda_calls.restype = ctypes.c_uint64
    return [driver().softcuda_calls(function.encode()) for function in functions]
