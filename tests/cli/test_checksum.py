"""The faster CRC-32C gives what the plain one gives, and which one is used is told."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm import _core
from ucm.cli.checksum import fastest
from ucm.errors import InvalidInputError
from ucm.store.record import crc32c


def test_known_answer() -> None:
    assert fastest().of(b"123456789") == crc32c(b"123456789") == 0xE3069283


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=3), st.integers(0, 5000), st.integers(0, 255))
def test_any_bytes(tail: bytes, length: int, fill: int) -> None:
    data = bytes([fill]) * length + tail
    assert fastest().of(memoryview(data)) == crc32c(data)


@pytest.mark.parametrize("data", [memoryview(b"123456789")[::2], bytearray(b"123456789")])
def test_bytes_that_lie_apart_or_may_change_are_an_error(data: memoryview | bytearray) -> None:
    with pytest.raises(InvalidInputError, match="in one piece and be read-only"):
        _core.crc32c(data)


def test_the_core_goes_first_and_plain_python_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastest().name == "compiled core"
    monkeypatch.setitem(sys.modules, "ucm._core", None)
    monkeypatch.delattr("ucm._core")
    assert "plain Python" in fastest().name
    assert fastest().of(b"123456789") == 0xE3069283
