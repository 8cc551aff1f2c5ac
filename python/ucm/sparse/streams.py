"""Work that one thread hands to another, on a device whose kernels run in streams.

A launch returns before the kernel has run, and every thread has a stream of its own. What the
stream of one thread makes may be read in that of another only once it has got there. On a CPU a
call has done its work when it returns, and nothing here does anything.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_streams = threading.local()


class Mark:
    """All that the calling thread has given to its stream so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._event = module.Event()
            self._event.record(module.current_stream(device))

    @contextlib.contextmanager
    def after(self) -> Iterator[None]:
        """A stream of the calling thread, in which everything runs after the mark; at the end it
        has run."""
        if self._event is None:
            yield
            return
        module = torch.get_device_module(self._device)
        stream = _stream_of(self._device)
        with module.stream(stream):
            stream.wait_event(self._event)
            try:
                yield
            finally:
                stream.synchronize()


def _stream_of(device: torch.device) -> Any:
    """The stream of this thread, made when it is first asked for."""
    made = vars(_streams).setdefault("of", {})
    if device not in made:
        made[device] = torch.get_device_module(device).Stream(device=device)
    return made[device]


def take_over(tensor: Tensor) -> None:
    """The calling thread's stream reads a tensor of another one from here on: its memory is not
    given to others before that has run."""
    if not tensor.is_cpu:
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))
