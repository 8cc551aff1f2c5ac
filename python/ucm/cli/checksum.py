"""CRC-32C for whole roots: the compiled core's where it has one, else NumPy, else plain Python.

A scrub reads every byte, and the standard library has no CRC-32C. What is used is told to the user, because it decides
how long a scrub takes. None of this is imported before records are judged.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ucm.store.record import Crcs, crc32c_each

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Words of four bytes that are folded at a time, at most: tables and temporaries fit the cache of a core.
ROW = 8192
#: Below this many bytes NumPy's calls cost more than they save.
_SHORT = 512
_ONES = 0xFFFFFFFF


@dataclass(frozen=True)
class Checksum:
    """A way to compute the CRC-32C of each of several stretches, and what to call it."""

    name: str
    of_each: Crcs


def fastest() -> Checksum:
    """The fastest way there is on this machine."""
    try:
        found: Any = getattr(importlib.import_module("ucm._core"), "crc32c", None)
    except ImportError:
        found = None
    if found is not None:
        return Checksum("compiled core", lambda stretches: [found(stretch) for stretch in stretches])
    try:
        importlib.import_module("numpy")
    except ImportError:
        return Checksum("plain Python (slow)", crc32c_each)
    return Checksum("NumPy", with_numpy)


def with_numpy(stretches: Sequence[memoryview]) -> list[int]:
    """CRC-32C of each stretch; neighbours of one length, as the layers of a record are, go together."""
    result: list[int] = []
    for length, group in groupby(stretches, len):
        alike = list(group)
        # Every stretch of a record but its preamble is such that it can be folded.
        result += _fold(alike) if length >= _SHORT and length % 4 == 0 else crc32c_each(alike)
    return result


def _fold(stretches: Sequence[memoryview]) -> list[int]:
    """CRC-32C of stretches of one length, which is a multiple of four bytes.

    The register after a message is a sum over its words, each multiplied by a power of x that tells how far from the
    end it stands. A row of words is multiplied as a whole (all of them move on by the same distance) and the next one
    is added; the last row is halved until one word is left.
    """
    import numpy as np

    words = np.stack([np.frombuffer(stretch, dtype="<u4") for stretch in stretches])
    count = words.shape[1]
    # A power of two, and not much of the stretch: the halving afterwards costs as much as two rows.
    length = min(ROW, 1 << max(4, count.bit_length() - 4))
    # Zeros before the message change nothing, so that the first row may be short.
    first = count % length or length
    row = np.zeros((len(stretches), length), dtype="<u4")
    row[:, length - first :] = words[:, :first]
    row[:, length - first] ^= _ONES
    for start in range(first, count, length):
        row = _shift(row, length * 4) ^ words[:, start : start + length]
    while length > 1:
        length //= 2
        row = _shift(row[:, :length], length * 4) ^ row[:, length:]
    return [int(register) ^ _ONES for register in _shift(row, 4)[:, 0]]


def _shift(words: npt.NDArray[np.uint32], count: int) -> npt.NDArray[np.uint32]:
    """Every word as a register, after ``count`` zero bytes."""
    import numpy as np

    low, high = _tables(count)
    halves = words.view("<u2").astype(np.intp)  # what take() wants: twice as fast as letting it convert
    return low.take(halves[:, 0::2]) ^ high.take(halves[:, 1::2])


@cache
def _tables(count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """What ``count`` zero bytes make of the lower and of the upper half of a register."""
    import numpy as np

    tables = []
    columns = _power(count)
    for half in (columns[:16], columns[16:]):
        table = np.zeros(1 << 16, dtype=np.uint32)
        for bit, column in enumerate(half):
            table[1 << bit : 2 << bit] = table[: 1 << bit] ^ np.uint32(column)
        tables.append(table)
    return tables[0], tables[1]


def _power(count: int) -> list[int]:
    """What ``count`` zero bytes make of each single bit of a register."""
    result = [1 << bit for bit in range(32)]
    square = [_one_zero_byte(1 << bit) for bit in range(32)]
    while count:
        if count & 1:
            result = [_apply(square, column) for column in result]
        square = [_apply(square, column) for column in square]
        count >>= 1
    return result


def _one_zero_byte(register: int) -> int:
    for _ in range(8):
        register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register


def _apply(columns: list[int], register: int) -> int:
    result = 0
    for bit, column in enumerate(columns):
        if register >> bit & 1:
            result ^= column
    return result
