"""vLLM on a CPU with KV treated as memory of an accelerator: ``platform: cuda`` over the software
driver.

Configured as ``kv_connector_module_path``, in processes where ``UCM_TEST_DRIVER`` names the
driver's library (``tests/softcuda``). The tensors stay in place, and the driver treats them as its
own memory, so a host access to them is not detected here, unlike in the suites of the crates.
Everything else is as on a GPU: events of the model's stream, streams that lag, staging and kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from software_driver import driver, ok, use_device

from ucm.integration.vllm.connector import UCMConnector as OurConnector
from ucm.integration.vllm.connector.platforms import PLATFORMS, Platform

#: Most delay of each operation of a stream, in microseconds.
LATE_US = 200
_NON_BLOCKING = 1
_NO_TIMING = 2


@cache
def stream() -> ctypes.c_void_p:
    """The model's stream, in the device's primary context, as torch makes it."""
    made = ctypes.c_void_p()
    use_device()
    ok(driver().cuStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, 0))
    driver().softcuda_jitter(ctypes.c_uint64(1), ctypes.c_uint64(LATE_US))
    return made


class Event:
    """An event on the model's stream, there as long as this is."""

    def __init__(self) -> None:
        model = stream()
        self._made = ctypes.c_void_p()
        ok(driver().cuEventCreate(ctypes.byref(self._made), _NO_TIMING))
        ok(driver().cuEventRecord(self._made, model))

    @property
    def handle(self) -> int:
        """What the core waits for."""
        return self._made.value or 0

    def __del__(self) -> None:
        driver().cuEventDestroy_v2(self._made)


def mark(device: torch.device) -> tuple[int, Any]:
    """The row of the worker's table for such an engine."""
    assert device.type == "cpu"
    event = Event()
    return event.handle, event


PLATFORMS.append(Platform("cuda", ("cpu",), "cpu", mark))


class UCMConnector(OurConnector):
    """Our connector, with KV that the software driver treats as its own."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The tensors of a rank."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in kv_caches.values()
        }
        for start, storage in storages.items():
            ok(driver().softcuda_accept(ctypes.c_size_t(start), ctypes.c_size_t(storage.nbytes())))
        super().register_kv_caches(kv_caches)


def hold(held: bool) -> None:
    """Holds or releases the model's stream, and with it every event recorded from now on."""
    (driver().softcuda_hold if held else driver().softcuda_release)(stream())
