"""Memory on a device and, pinned, on the host for it."""

from __future__ import annotations

from ucm._core import TransBuffer, TransMemory

#: Seconds that an empty pool is waited for where nothing else is said.
POOL_TIMEOUT = 30.0


class Buffer:
    """Where buffers of one device come from: alone, or from pools that never grow by themselves.

    What these methods return is a :class:`~ucm.trans.Memory`: it has an ``address`` and a ``size``
    in bytes, is taken wherever an address is, and is given back by ``close()``, at the end of a
    ``with`` block or when nothing uses it any more. Copies under way keep it. One on the host shows
    its bytes to NumPy: ``numpy.frombuffer(memory, "uint8")``.
    """

    def __init__(self, core: TransBuffer) -> None:
        self._core = core

    def make_device_buffer(self, size: int) -> TransMemory:
        """``size`` bytes on the device, whatever was in them."""
        return self._core.make("device", size)

    def make_host_buffer(self, size: int) -> TransMemory:
        """``size`` bytes on the host, zeroed, which the device copies to and from at full speed."""
        return self._core.make("host", size)

    def make_device_buffers(self, size: int, number: int) -> None:
        """Add ``number`` buffers of ``size`` bytes to the device's pool of that size."""
        self._core.fill("device", size, number)

    def make_host_buffers(self, size: int, number: int) -> None:
        """Add ``number`` buffers of ``size`` bytes to the host's pool of that size."""
        self._core.fill("host", size, number)

    def get_device_buffer(self, size: int, timeout: float | None = POOL_TIMEOUT) -> TransMemory:
        """A buffer from the device's pool of the smallest that hold ``size`` bytes.

        An empty pool is waited for ``timeout`` seconds (None: for ever), then it is a
        :class:`~ucm.errors.DeadlineError`; where no pool has buffers so large, an
        :class:`~ucm.errors.InvalidInputError` at once.
        """
        return self._core.get("device", size, timeout)

    def get_host_buffer(self, size: int, timeout: float | None = POOL_TIMEOUT) -> TransMemory:
        """The same of the host's pools."""
        return self._core.get("host", size, timeout)

    def register_host_buffer(self, address: int | TransMemory, size: int) -> None:
        """Pin ``size`` bytes of the caller's memory: copies of them are fast, and kernels can reach
        them.

        The memory must stay until :meth:`unregister_host_buffer` was called, or this object is
        gone.
        """
        self._core.register(address, size)

    def unregister_host_buffer(self, address: int | TransMemory) -> None:
        """End that; no copy may use the memory at that moment."""
        self._core.unregister(address)

    MakeDeviceBuffer = make_device_buffer
    MakeHostBuffer = make_host_buffer
    MakeDeviceBuffers = make_device_buffers
    MakeHostBuffers = make_host_buffers
    GetDeviceBuffer = get_device_buffer
    GetHostBuffer = get_host_buffer
    RegisterHostBuffer = register_host_buffer
    UnregisterHostBuffer = unregister_host_buffer
