"""Streams of copies between a device and the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ucm._core import TransMemory, TransStream

logger = logging.getLogger("ucm.trans")

#: One place: its address, or memory of ours.
Address: TypeAlias = int | TransMemory
#: Many: an array of addresses, a list of places, or the address of an array of pointers.
Addresses: TypeAlias = "npt.NDArray[np.uint64] | Sequence[Address] | int"


class Stream:
    """Copies in the order in which they were submitted.

    ``size`` is the bytes of each piece, ``number`` how many pieces there are: it may be left out
    where an array or a list says it. Addresses must stay valid until the copy has ended, and no one
    may touch what is copied meanwhile; no piece may write what another of the same call reads or
    writes. Sizes and addresses are checked before the first byte moves.

    The forms with ``_async`` return when the copy is submitted (:class:`~ucm.errors.BusyError` when
    a thousand wait); a failure of theirs is raised by :meth:`synchronize`. Calls on one stream are
    made one after the other, whatever thread they come from; the GIL is released meanwhile.
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

        ``well``: whether no copy has failed since the stream was last synchronized. What it raises
        is logged. The next copy waits for it; it uses no stream and waits for no buffer. One that
        has not begun when the interpreter ends is not called, and the interpreter waits for one
        that has.
        """
        self._core.append_callback(partial(_called, call))

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until everything submitted has ended; raise what the first failed copy since the
        last time failed with.

        ``timeout`` in seconds, for ever if None; :class:`~ucm.errors.DeadlineError` when it is
        over.
        """
        self._core.synchronize(timeout)

    def close(self) -> None:
        """Take no more calls. What was submitted is still done, and no one waits for it;
        repeatable."""
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
