"""The CRC-32C of the core equals the plain one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_record import crc32c

from ucm import _core
from ucm.errors import InvalidInputError


def test_known_answer() -> None:
    assert _core.crc32c(b"123456789") == crc32c(b"123456789") == 0xE3069283


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=3), st.integers(0, 5000), st.integers(0, 255))
def test_any_bytes(tail: bytes, length: int, fill: int) -> None:
    data = bytes([fill]) * length + tail
    assert _core.crc32c(memoryview(data)) == crc32c(data)


@pytest.mark.parametrize("data", [memoryview(b"123456789")[::2], bytearray(b"123456789")])
def test_bytes_that_lie_apart_or_may_change_are_an_error(data: memoryview | bytearray) -> None:
    with pytest.raises(InvalidInputError, match="in one piece and be read-only"):
        _core.crc32c(data)
