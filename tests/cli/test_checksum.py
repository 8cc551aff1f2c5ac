"""The faster CRC-32C gives what the plain one gives, and which one is used is told."""

from __future__ import annotations

import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.cli.checksum import ROW, fastest, with_numpy
from ucm.store.record import crc32c


def numpy_crc(data: bytes) -> int:
    (crc,) = with_numpy([memoryview(data)])
    return crc


def test_known_answer() -> None:
    assert numpy_crc(b"123456789") == 0xE3069283
    assert numpy_crc(b"\0" * 4096) == 0x98F94189


@pytest.mark.parametrize("length", [0, 1, 511, 512, 515, 4096, ROW * 4 - 1, ROW * 4, ROW * 4 + 1, ROW * 9 + 2])
def test_at_the_edges_of_words_and_rows(length: int) -> None:
    data = bytes((at * at + 7) % 251 for at in range(length))
    assert numpy_crc(data) == crc32c(data)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=3), st.integers(0, 5000), st.integers(0, 255))
def test_any_bytes(tail: bytes, length: int, fill: int) -> None:
    data = bytes([fill]) * length + tail
    assert numpy_crc(data) == crc32c(data)


def test_stretches_of_mixed_lengths_keep_their_order() -> None:
    data = bytes(at * 31 % 256 for at in range(40_000))
    lengths = [60, 2048, 2048, 2048, 6000, 0, 3, 2048, 1030, 1030, 4096]
    stretches = [memoryview(data)[at * 7 : at * 7 + length] for at, length in enumerate(lengths)]
    assert with_numpy(stretches) == [crc32c(stretch) for stretch in stretches]
    assert with_numpy([]) == []


def test_the_core_goes_first_and_plain_python_last(monkeypatch: pytest.MonkeyPatch) -> None:
    core = types.ModuleType("ucm._core")
    core.crc32c = crc32c  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ucm._core", core)
    assert fastest().name == "compiled core"
    assert fastest().of_each([memoryview(b"123456789"), memoryview(b"")]) == [0xE3069283, 0]
    monkeypatch.setitem(sys.modules, "ucm._core", types.ModuleType("ucm._core"))
    assert fastest().name == "NumPy", "a core without this function"
    monkeypatch.setitem(sys.modules, "ucm._core", None)
    assert fastest().name == "NumPy"
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert "plain Python" in fastest().name
    assert fastest().of_each([memoryview(b"123456789")]) == [0xE3069283]
