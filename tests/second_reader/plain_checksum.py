"""The checksum of the format, by a library that the core does not use."""

from __future__ import annotations

from google_crc32c import value


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """CRC-32C (Castagnoli) of ``data``."""
    return value(bytes(data))  # it takes no ``bytearray``
