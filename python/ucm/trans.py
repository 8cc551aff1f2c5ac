"""Copies between a device and the host by address, with streams and buffers: for programs that move
memory themselves.

``Device().setup(0)`` opens a device of this machine, ``make_stream()`` gives a stream that uses its
copy engine, ``make_sm_stream()`` one that uses ucm's kernels, ``make_buffer()`` makes memory on
both sides. The names of the original (``Setup``, ``MakeStream``, ``DeviceToHost`` ...) mean the
same. The whole is also the package ``ucmtrans``.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from ucm import _core
from ucm._core import TransBuffer, TransDevice, TransStream
from ucm._core import TransMemory as Memory
from ucm.config.words import PLATFORM_ROWS, PLATFORMS, parse_platform
from ucm.errors import ConfigError, InvalidInputError, UnsupportedError
from ucm.store.kv_layout import address_of, bytes_of

#: Seconds to wait for an empty pool by default.
POOL_TIMEOUT = 30.0


class Buffer:
    """Makes buffers of one device: single ones, or from pools that never grow by themselves.

    They are :class:`Memory`: with an ``address`` and a ``size`` in bytes, accepted wherever an
    address is, and released by ``close()``, at the end of a ``with`` block or when nothing uses
    them any more. Copies under way keep them. NumPy reads one of the host:
    ``numpy.frombuffer(memory, "uint8")``.
    """

    def __init__(self, core: TransBuffer) -> None:
        self._core = core

    def make_device_buffer(self, size: int) -> Memory:
        """``size`` bytes on the device, whatever was in them."""
        return self._core.make("device", size)

    def make_host_buffer(self, size: int) -> Memory:
        """``size`` bytes on the host, zeroed, which the device copies to and from at full speed."""
        return self._core.make("host", size)

    def make_device_buffers(self, size: int, number: int) -> None:
        """Add ``number`` buffers of ``size`` bytes to the device's pool of that size."""
        self._core.fill("device", size, number)

    def make_host_buffers(self, size: int, number: int) -> None:
        """Add ``number`` buffers of ``size`` bytes to the host's pool of that size."""
        self._core.fill("host", size, number)

    def get_device_buffer(self, size: int, timeout: float | None = POOL_TIMEOUT) -> Memory:
        """A buffer from the device's pool of the smallest that hold ``size`` bytes. Waits for an
        empty pool for ``timeout`` seconds (None: for ever). Raises
        :class:`~ucm.errors.DeadlineError`, and :class:`~ucm.errors.InvalidInputError` where no pool
        has buffers so large."""
        return self._core.get("device", size, timeout)

    def get_host_buffer(self, size: int, timeout: float | None = POOL_TIMEOUT) -> Memory:
        """The same of the host's pools."""
        return self._core.get("host", size, timeout)

    def register_host_buffer(self, address: int | Memory, size: int) -> None:
        """Pin ``size`` bytes of the caller's memory: copies of them are fast, and kernels can reach
        them. The memory must stay until :meth:`unregister_host_buffer` or the end of this object.
        """
        self._core.register(address, size)

    def unregister_host_buffer(self, address: int | Memory) -> None:
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


logger = logging.getLogger("ucm.trans")

#: One place: its address, or memory of ours.
Address: TypeAlias = int | Memory
#: Many: an array of addresses, a list of places, or the address of an array of pointers.
Addresses: TypeAlias = "npt.NDArray[np.uint64] | Sequence[Address] | int"


class Stream:
    """Copies in the order in which they were submitted.

    ``size`` is the bytes of each piece, ``number`` how many pieces there are: it may be left out
    where an array or a list says it. Until the copy has ended, addresses must stay valid and what
    is copied must not be used; no piece may write what another of the same call reads or writes.
    Sizes and addresses are checked before the first byte moves.

    The forms with ``_async`` return when the copy is submitted (:class:`~ucm.errors.BusyError` when
    a thousand wait); their failures are raised by :meth:`synchronize`. Calls on one stream are made
    one after the other, from whatever thread, without the GIL.
    """

    def __init__(self, core: TransStream) -> None:
        self._core = core

    def device_to_host(self, src: Address, dst: Address, size: int) -> None:
        """Copy ``size`` bytes from the device."""
        self._core.copy("one", False, src, dst, size, None, True)

    def device_to_host_async(self, src: Address, dst: Address, size: int) -> None:
        """Begin to copy ``size`` bytes from the device."""
        self._core.copy("one", False, src, dst, size, None, False)

    def device_to_host_batch(
        self, src: Addresses, dst: Addresses, size: int, number: int | None = None
    ) -> None:
        """Copy pieces from the device, each to a place of its own."""
        self._core.copy("batch", False, src, dst, size, number, True)

    def device_to_host_batch_async(
        self, src: Addresses, dst: Addresses, size: int, number: int | None = None
    ) -> None:
        """Begin to copy pieces from the device, each to a place of its own."""
        self._core.copy("batch", False, src, dst, size, number, False)

    def device_to_host_gather(
        self, src: Addresses, dst: Address, size: int, number: int | None = None
    ) -> None:
        """Copy pieces from the device into one buffer, one behind the other."""
        self._core.copy("together", False, src, dst, size, number, True)

    def device_to_host_gather_async(
        self, src: Addresses, dst: Address, size: int, number: int | None = None
    ) -> None:
        """Begin to copy pieces from the device into one buffer, one behind the other."""
        self._core.copy("together", False, src, dst, size, number, False)

    def host_to_device(self, src: Address, dst: Address, size: int) -> None:
        """Copy ``size`` bytes to the device."""
        self._core.copy("one", True, dst, src, size, None, True)

    def host_to_device_async(self, src: Address, dst: Address, size: int) -> None:
        """Begin to copy ``size`` bytes to the device."""
        self._core.copy("one", True, dst, src, size, None, False)

    def host_to_device_batch(
        self, src: Addresses, dst: Addresses, size: int, number: int | None = None
    ) -> None:
        """Copy pieces to the device, each from a place of its own."""
        self._core.copy("batch", True, dst, src, size, number, True)

    def host_to_device_batch_async(
        self, src: Addresses, dst: Addresses, size: int, number: int | None = None
    ) -> None:
        """Begin to copy pieces to the device, each from a place of its own."""
        self._core.copy("batch", True, dst, src, size, number, False)

    def host_to_device_scatter(
        self, src: Address, dst: Addresses, size: int, number: int | None = None
    ) -> None:
        """Copy one buffer, piece by piece, to places on the device."""
        self._core.copy("together", True, dst, src, size, number, True)

    def host_to_device_scatter_async(
        self, src: Address, dst: Addresses, size: int, number: int | None = None
    ) -> None:
        """Begin to copy one buffer, piece by piece, to places on the device."""
        self._core.copy("together", True, dst, src, size, number, False)

    def append_callback(self, call: Callable[[bool], object]) -> None:
        """Call ``call(well)`` on a thread of the stream once everything submitted before has ended.
        ``well``: whether no copy has failed since the stream was last synchronized.

        What it raises is logged. The next copy waits for it; it must use no stream and wait for no
        buffer. The end of the interpreter waits for one that has begun, and drops the others.
        """
        self._core.append_callback(partial(_called, call))

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until everything submitted has ended; raise the error of the first copy that failed
        since the last time. ``timeout`` in seconds, for ever if None
        (:class:`~ucm.errors.DeadlineError`)."""
        self._core.synchronize(timeout)

    def close(self) -> None:
        """Take no more calls; repeatable. What was submitted is still done, without waiting."""
        self._core.close()

    DeviceToHost = device_to_host
    DeviceToHostAsync = device_to_host_async
    DeviceToHostBatch = device_to_host_batch
    DeviceToHostBatchAsync = device_to_host_batch_async
    DeviceToHostGather = device_to_host_gather
    DeviceToHostGatherAsync = device_to_host_gather_async
    HostToDevice = host_to_device
    HostToDeviceAsync = host_to_device_async
    HostToDeviceBatch = host_to_device_batch
    HostToDeviceBatchAsync = host_to_device_batch_async
    HostToDeviceScatter = host_to_device_scatter
    HostToDeviceScatterAsync = host_to_device_scatter_async
    AppendCallback = append_callback
    Synchronized = synchronize


def _called(call: Callable[[bool], object], well: bool) -> None:
    try:
        call(well)
    except BaseException:
        logger.exception("a callback of a stream raised an exception")


#: What is tried where no platform is named, in this order; without any of them it is the host.
AUTOMATIC = tuple(row.name for row in PLATFORM_ROWS if row.in_torch != "cpu")


class Device:
    """A device of this machine, once :meth:`setup` has opened it in this process.

    ``platform`` names its kind (``cuda``, ``host`` ...), else the environment's ``PLATFORM`` does,
    else it is the first kind whose runtime is installed and finds a device, or the host. The log
    says which, and why. A runtime that cannot be used is an error: the host cannot reach the memory
    of its devices.
    """

    def __init__(self, platform: str | None = None) -> None:
        self._platform = _platform(platform)
        self._core: TransDevice | None = None
        self._own: Stream | None = None
        self._streams: WeakSet[Stream] = WeakSet()

    def setup(self, device_id: int = 0) -> None:
        """Open device number ``device_id``; the host has one, whatever its number.

        Raises :class:`~ucm.errors.UnsupportedError` where the driver is missing or too old,
        :class:`~ucm.errors.ConfigError` for a number that the machine does not have,
        :class:`~ucm.errors.DeadlineError` where the device does not answer within 30 seconds, and
        :class:`~ucm.errors.ForkedError` in a child of a process that has opened one.
        """
        if type(device_id) is not int or device_id < 0:
            raise InvalidInputError(
                "the number of a device is 0 or more", context={"device_id": device_id}
            )
        self._own = None
        self._core, why = self._open(device_id)
        self._hand_over_log()
        logger.info("ucm %s: device %s%s", version, self._core.name, why)

    def _open(self, device_id: int) -> tuple[TransDevice, str]:
        """The device, and why it is the host where no platform was named."""
        if self._platform is not None:
            return TransDevice(_name(self._platform, device_id)), ""
        missing = []
        for platform in AUTOMATIC:
            try:
                return TransDevice(_name(platform, device_id)), ""
            except UnsupportedError as error:
                if "function" in error.context:  # a driver is there, and lacks this one
                    raise
                missing.append(str(error))
        return TransDevice("host"), f", because: {'; '.join(missing)}"

    def _device(self) -> TransDevice:
        if self._core is None:
            raise InvalidInputError("the device is not open: call setup first")
        return self._core

    @property
    def name(self) -> str:
        """Its kind and number: ``cuda:0``; ``host``."""
        return self._device().name

    def make_stream(self, transfer: str = "dma") -> Stream:
        """A stream that copies by the device's copy engine, or as ``transfer`` says: ``auto`` (the
        cheapest by measurements at the device's opening), ``sm``, ``staging`` or ``dma``, as the
        key ``transfer`` of a store."""
        stream = Stream(self._device().make_stream(transfer))
        self._streams.add(stream)
        return stream

    def make_sm_stream(self) -> Stream:
        """A stream that copies by ucm's kernels. They reach host buffers and registered host
        memory; other host memory is copied the cheapest other way."""
        return self.make_stream("sm")

    def make_buffer(self) -> Buffer:
        """Memory of this device and of the host for it."""
        return Buffer(self._device().make_buffer())

    def allocate_memory(self, size: int) -> Memory:
        """``size`` bytes on the device."""
        return self.make_buffer().make_device_buffer(size)

    def h2d_transfer(self, src: Any, dst: int | Memory) -> None:
        """Copy a contiguous array or tensor on the host to the device."""
        self._copies().host_to_device(address_of(src), dst, bytes_of(src))

    def d2h_transfer(self, src: int | Memory, dst: Any) -> None:
        """Fill a contiguous array or tensor on the host with bytes of the device."""
        if not getattr(getattr(dst, "flags", None), "writeable", True):
            raise InvalidInputError("the array to copy to is read-only")
        self._copies().device_to_host(src, address_of(dst), bytes_of(dst))

    def _copies(self) -> Stream:
        if self._own is None:
            self._own = self.make_stream("auto")
        return self._own

    def synchronize(self, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Wait for one stream, or for all of this device that still exist."""
        for each in [stream] if stream is not None else list(self._streams):
            each.synchronize(timeout)
        self._hand_over_log()

    def _hand_over_log(self) -> None:
        """Writes what the core logged of its devices: its threads do not take the GIL for it."""
        for level, message, fields in self._device().take_log():
            logger.log(level, message, extra={"fields": fields})

    create_stream = make_stream
    Setup = setup
    MakeStream = make_stream
    MakeSMStream = make_sm_stream
    MakeBuffer = make_buffer


def _name(platform: str, device_id: int) -> str:
    return platform if platform == "host" else f"{platform}:{device_id}"


def _platform(named: str | None) -> str | None:
    if named is not None:
        try:
            return parse_platform(named)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    word = os.environ.get("PLATFORM", "").strip()
    if word and word.lower() not in PLATFORMS:
        logger.warning(
            'environment PLATFORM is "%s" and ignored; known are %s', word, ", ".join(PLATFORMS)
        )
    return PLATFORMS.get(word.lower())


#: The names of a platform abstraction (``allocate_memory``, ``h2d_transfer`` ...) are methods of
#: every device.
PlatformAbstraction = Device

project = "ucm"
version = _core.__version__
commit_id = _core.__commit_id__
build_type = _core.__build_type__

__all__ = [
    "Buffer",
    "Device",
    "Memory",
    "PlatformAbstraction",
    "Stream",
    "build_type",
    "commit_id",
    "project",
    "version",
]

# A stream's thread that enters an ending interpreter would never leave it.
atexit.register(_core.end_callbacks)
