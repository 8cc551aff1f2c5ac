"""Layers of compressed records in plain Python, by ``docs/format.md`` section 5 alone.

Beside :mod:`plain_record`, which verifies what is stored; this makes of it what was compressed.
Blocks of lz4 are decoded here. The standard library has a decoder of zstd from Python 3.14 on,
before that the package ``zstandard`` is one; without either nothing of zstd is decoded, and the
caller says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

_ZSTD, _LZ4 = 1, 2
#: Codec numbers -> bytes of an element.
WIDTHS: dict[int, int] = {
    width << 8 | algorithm: width for algorithm in (_ZSTD, _LZ4) for width in (1, 2, 4)
}
_AS_IS = 1 << 31


#: Makes a plane, of at most so many bytes, of its packed form; raises anything when that is none.
Unpack = Callable[[bytes, int], bytes]


@dataclass(frozen=True)
class Zstd:
    """A decoder of zstd frames, and what to call it."""

    name: str
    decode: Unpack


def find_zstd() -> Zstd | None:
    """A decoder that is installed here."""
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


def unpacker(codec: int, zstd: Zstd | None) -> Unpack | None:
    """What decodes the planes of this codec; None where they are zstd's and there is none of it."""
    if codec & 0xFF == _LZ4:
        return unpack_lz4
    return zstd.decode if zstd is not None else None


def unpack_lz4(block: bytes, most: int) -> bytes:
    """What an lz4 block holds: runs of bytes as they are, each but the last followed by a copy of
    bytes before it."""
    out, at = bytearray(), 0
    while True:
        token = block[at]
        literals, at = _lengthened(block, at + 1, token >> 4)
        end = at + literals
        if end > len(block) or len(out) + literals > most:
            raise ValueError(f"{literals} bytes at {at} of {len(block)}")
        out += block[at:end]
        if end == len(block):
            return bytes(out)
        distance = int.from_bytes(block[end : end + 2], "little")
        copied, at = _lengthened(block, end + 2, token & 15)
        copied += 4
        if not 0 < distance <= len(out) or len(out) + copied > most:
            raise ValueError(f"{copied} bytes from {distance} before {len(out)}")
        piece = out[-distance:][:copied]
        out += (piece * (copied // len(piece) + 1))[:copied]


def _lengthened(block: bytes, at: int, length: int) -> tuple[int, int]:
    """A length that goes on in further bytes where it is 15, and where what follows it begins."""
    more = 255 if length == 15 else 0
    while more == 255:
        more, at = block[at], at + 1
        length += more
    return length, at


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
