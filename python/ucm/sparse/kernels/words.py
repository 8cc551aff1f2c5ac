"""What kernels share: codes as words of four bytes, how many bits of a word are set, and powers of
two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def popcount(words):
    """How many bits of each word (uint32) are set. Compilers know this form as one instruction
    (``popc``, ``bcnt``)."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


def as_words(*codes: Tensor) -> list[Tensor]:
    """Codes (uint8, without gaps in the last dimension) as int32, four bytes in each, where all of
    them divide so; else as they are."""
    for each in codes:
        steps = (each.shape[-1], each.storage_offset(), each.data_ptr(), *each.stride()[:-1])
        if any(step % 4 for step in steps):
            return list(codes)
    return [each.view(torch.int32) for each in codes]


def power_of_2(number: int) -> int:
    """The least one that is no smaller. Triton's own is a function of its language: some
    microseconds a call."""
    return 1 << (number - 1).bit_length()
