"""CRC-32C for whole roots: the compiled core's, or plain Python where there is none.

A scrub reads every byte, and the standard library has no CRC-32C. Which one is used is told to the
user, because it decides how long a scrub takes. The core is imported when records are to be
verified, not before.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucm.store.record import Crc, crc32c


@dataclass(frozen=True)
class Checksum:
    """A way to compute the CRC-32C of bytes, and what to call it."""

    name: str
    of: Crc


def fastest() -> Checksum:
    """The fastest way there is on this machine."""
    try:
        from ucm import _core
    except ImportError:
        return Checksum("plain Python (slow)", crc32c)
    return Checksum("compiled core", _core.crc32c)
