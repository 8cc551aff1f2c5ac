"""Devices of this machine, and what is made on them."""

from __future__ import annotations

import logging
import os
from typing import Any
from weakref import WeakSet

from ucm._core import TransDevice, TransMemory
from ucm.config.words import PLATFORM_ROWS, PLATFORMS, parse_platform
from ucm.errors import ConfigError, InvalidInputError, UnsupportedError
from ucm.store.kv_layout import address_of, bytes_of
from ucm.trans.buffer import Buffer
from ucm.trans.stream import Stream

logger = logging.getLogger("ucm.trans")

#: What is tried where no platform is named, in this order; without any of them it is the host.
AUTOMATIC = tuple(row.name for row in PLATFORM_ROWS if row.in_torch != "cpu")


class Device:
    """A device of this machine, once :meth:`setup` has opened it. It belongs to the process that
    does.

    ``platform`` names its kind (``cuda``, ``host`` ...); without it the environment's ``PLATFORM``
    does, and without that it is the first kind whose runtime is installed and finds a device, or
    else the host. The log says which, and why. A runtime that is there and cannot be used is an
    error: the host cannot reach the memory of its devices.
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
        self._core = self._open(device_id)
        self._hand_over_log()
        logger.info("device %s", self._core.name)

    def _open(self, device_id: int) -> TransDevice:
        if self._platform is not None:
            return TransDevice(_name(self._platform, device_id))
        missing = []
        for platform in AUTOMATIC:
            try:
                return TransDevice(_name(platform, device_id))
            except UnsupportedError as error:
                if "function" in error.context:  # a driver is there, and lacks this one
                    raise
                missing.append(str(error))
        logger.info("platform host, because: %s", "; ".join(missing))
        return TransDevice("host")

    def _device(self) -> TransDevice:
        if self._core is None:
            raise InvalidInputError("the device is not open: call setup first")
        return self._core

    @property
    def name(self) -> str:
        """Its kind and number: ``cuda:0``; ``host``."""
        return self._device().name

    def make_stream(self, transfer: str = "dma") -> Stream:
        """A stream that copies by the device's copy engine, or in the way that ``transfer`` names.

        That is ``auto`` (what is cheapest by what was measured of the device when it was opened),
        ``sm``, ``staging`` or ``dma``, as the key ``transfer`` of a store.
        """
        stream = Stream(self._device().make_stream(transfer))
        self._streams.add(stream)
        return stream

    def make_sm_stream(self) -> Stream:
        """A stream that copies by ucm's kernels.

        They reach host memory that is a host buffer or registered; other host memory goes the
        cheapest other way.
        """
        return self.make_stream("sm")

    def make_buffer(self) -> Buffer:
        """Memory of this device and of the host for it."""
        return Buffer(self._device().make_buffer())

    def allocate_memory(self, size: int) -> TransMemory:
        """``size`` bytes on the device."""
        return self.make_buffer().make_device_buffer(size)

    def h2d_transfer(self, src: Any, dst: int | TransMemory) -> None:
        """Copy a contiguous array or tensor on the host to the device."""
        self._copies().host_to_device(address_of(src), dst, bytes_of(src))

    def d2h_transfer(self, src: int | TransMemory, dst: Any) -> None:
        """Copy from the device into a contiguous array or tensor on the host, as many bytes as that
        has."""
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
        """Writes what the core logged of its devices since then: no thread of the core takes the
        GIL for it."""
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
