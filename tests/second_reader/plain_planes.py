"""Layers of compressed records in plain Python, by ``docs/format-compressed.md`` alone.

:mod:`plain_record` verifies the stored form; this module decodes it. The standard library has a
decoder of zstd from Python 3.14 on; before that the package ``zstandard`` is used. Without either
nothing is decoded, and the caller reports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

#: Codec numbers of zstd -> bytes of an element.
WIDTHS: dict[int, int] = {width << 8 | 1: width for width in (1, 2, 4)}
#: Codec numbers of lz4, which older versions wrote: such a record is refused, and the next dump
#: replaces it.
LZ4: frozenset[int] = frozenset(width << 8 | 2 for width in (1, 2, 4))
_AS_IS = 1 << 31


#: Decodes a plane of at most this length from its packed form; raises any exception on bad input.
Unpack = Callable[[bytes, int], bytes]


@dataclass(frozen=True)
class Zstd:
    """A decoder of zstd frames, and its name."""

    name: str
    decode: Unpack


def find_zstd() -> Zstd | None:
    """An installed decoder."""
    try:
        library = importlib.import_module("compression.zstd")
    except ImportError:
        pass
    else:

        def decode(frame: bytes, most: int) -> bytes:
            return bytes(library.ZstdDecompressor().decompress(frame, most))

        return Zstd("Python's own zstd", decode)
    try:
        package = importlib.import_module("zstandard")
    except ImportError:
        return None

    def unpack(frame: bytes, most: int) -> bytes:
        if package.get_frame_parameters(frame).content_size > most:
            raise ValueError("a frame that is longer than its plane")
        return bytes(package.ZstdDecompressor().decompress(frame, max_output_size=most))

    return Zstd("zstandard", unpack)


def decode_layer(stored: bytes, width: int, length: int, unpack: Unpack) -> bytes:
    """The ``length`` bytes of a layer from its stored form; raises :class:`ValueError` when that is
    none."""
    count, at = length // width, 4 * width
    planes = bytearray(count * width)
    for place in range(width):
        word = int.from_bytes(stored[4 * place : 4 * place + 4], "little")
        end = at + (word & ~_AS_IS)
        if length % width or end > len(stored):
            raise ValueError(f"plane {place} ends at {end} of {len(stored)} bytes")
        plane = stored[at:end]
        if not word & _AS_IS:
            try:
                plane = unpack(plane, count)
            except Exception as error:
                raise ValueError(f"plane {place}: {error}") from error
        if len(plane) != count:
            raise ValueError(f"plane {place} has {len(plane)} of {count} bytes")
        planes[place::width] = plane
        at = end
    if at != len(stored):
        raise ValueError(f"{len(stored) - at} bytes behind the last plane")
    return _rotated(bytes(planes), width)


def _rotated(elements: bytes, width: int) -> bytes:
    """Every element as a little-endian number rotated right by one bit; all at once, as one long
    number."""
    if width == 1:
        return elements
    lowest = int.from_bytes((b"\1" + bytes(width - 1)) * (len(elements) // width), "little")
    number = int.from_bytes(elements, "little")
    signs = number & lowest
    return ((number ^ signs) >> 1 | signs << (8 * width - 1)).to_bytes(len(elements), "little")
