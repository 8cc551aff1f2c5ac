"""Compressed records by ``docs/format-compressed.md``: the frozen ones, an older reader, and
decoding."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import plain_record as record
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_planes import Zstd, decode_layer, find_zstd
from plain_record import Expect, Part, Refused, Shape

from ucm.reasons import MissReason

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "record-v1"
FROZEN = (FIXTURES / "planes.bin").read_bytes()
FROZEN_LZ4 = [(FIXTURES / name).read_bytes() for name in ("planes-lz4.bin", "planes-sided.bin")]
FROZEN_SIDED = (FIXTURES / "planes-zstd-sided.bin").read_bytes()
LAYERS, LAYER, STRIDE = 4, 8000, 8000
IDENTITY = (
    '{"format_version":1,"architecture":"A","world_size":1,"dtype":"f32","weights":"w","model_config":{},"position":{},'
    '"kv_dtype":"f32","attention_backend":"a","kv_packing":{},"kv_layout":"l","kv_groups":[],"block_tokens":16,'
    '"tensor_parallel":1,"pipeline_parallel":1,"decode_context_parallel":1}'
)
EXPECT = Expect(
    bytes([7]) * 16,
    hashlib.sha256(IDENTITY.encode()).digest(),
    Part(0, 0, 0),
    Shape(tensors=(5000, 3000), layers=LAYERS, block_tokens=16, dtype=2),
)


def plain(packed: bytes, most: int) -> bytes:
    """Unpacks what is packed as it is."""
    return packed[:most]


def contents() -> list[bytes]:
    """The uncompressed layers of a frozen record."""
    state, layers = 1, []
    for _ in range(LAYERS):
        layer = bytearray()
        for at in range(LAYER):
            state = (state * 1664525 + 1013904223) % 2**32
            noise = state >> 24
            layer.append(noise >> 6 if at % 2 else noise)
        layers.append(bytes(layer))
    return layers


def padded(layers: list[bytes]) -> list[bytes]:
    """The same with the bytes that a checksum covers behind each."""
    whole = -(-STRIDE * LAYERS // 4096) * 4096
    return [
        layer + bytes((whole - i * STRIDE if i + 1 == LAYERS else STRIDE) - LAYER)
        for i, layer in enumerate(layers)
    ]


def refusal(data: bytes, zstd: Zstd | None = None) -> MissReason:
    with pytest.raises(Refused) as refused:
        record.verify(data, EXPECT, zstd=zstd)
    return refused.value.reason


def zstd() -> Zstd:
    found = find_zstd()
    if found is None:
        pytest.skip("there is no zstd for Python here (pip install zstandard)")
    return found


def test_what_is_stored_is_whole_and_its_fields_lie_where_the_format_says() -> None:
    header = record.verify(FROZEN, EXPECT)
    assert (header.codec, header.compressed, header.raw_len) == (0x201, True, LAYERS * LAYER)
    assert struct.unpack_from("<I", FROZEN, 136) == (0x201,)
    assert struct.unpack_from("<Q", FROZEN, 44) == (len(FROZEN),)
    assert struct.unpack_from("<Q", FROZEN, 152) == (len(FROZEN) - 4096,)
    assert len(FROZEN) < 4096 + LAYERS * LAYER
    end = 4096
    for i, raw in enumerate(padded(contents())):
        offset, length, crc, raw_crc = struct.unpack_from("<QQII", FROZEN, 576 + 24 * i)
        last = i + 1 == LAYERS
        assert offset == end
        end = offset + length
        assert crc == record.crc32c(FROZEN[offset : None if last else end])
        assert raw_crc == record.crc32c(raw) == header.table[i].raw_crc
        # Two planes, each a frame of zstd.
        low, high = struct.unpack_from("<II", FROZEN, offset)
        assert 8 + low + high == length
        for at in (offset + 8, end - high):
            assert FROZEN[at : at + 4] == b"\x28\xb5\x2f\xfd"
    assert not any(FROZEN[end:])


def test_the_frozen_record_is_decoded() -> None:
    header = record.verify(FROZEN, EXPECT, zstd=zstd())
    assert list(record.decoded_layers(FROZEN, header, zstd().decode)) == padded(contents())


def test_the_frozen_records_of_lz4_are_refused_and_not_newer() -> None:
    for frozen in FROZEN_LZ4:
        assert struct.unpack_from("<I", frozen, 136) == (0x202,)
        assert refusal(frozen) == MissReason.FOREIGN_SHAPE


def test_side_shards_of_a_compressed_record_are_stored_as_they_are() -> None:
    header = record.verify(FROZEN_SIDED, EXPECT)
    assert (header.codec, header.record_len) == (0x201, len(FROZEN_SIDED))
    lengths = {"mean-k": 100, "codes": 5000}
    assert {side.name: side.length for side in header.sides} == lengths
    for side in header.sides:
        content = bytes((at * 7 + 3) % 256 for at in range(side.length))
        assert record.read_side(FROZEN_SIDED, side) == content
    assert [side.offset for side in header.sides] == [header.kv_len, header.kv_len + 4096]
    assert FROZEN_SIDED[4096 : header.kv_len] == FROZEN[4096:], (
        "the payload is that without side shards"
    )
    for at, name in [(header.kv_len, "mean-k"), (len(FROZEN_SIDED) - 1, "codes")]:
        data = bytearray(FROZEN_SIDED)
        data[at] ^= 1
        assert list(record.lost_sides(bytes(data), record.verify(bytes(data), EXPECT))) == [name]


def test_to_a_reader_without_this_codec_it_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of older readers: every codec but 0 is newer, and a newer record is not replaced."""
    monkeypatch.setattr(record, "WIDTHS", {})
    assert refusal(FROZEN) == MissReason.NEWER_VERSION


@pytest.mark.parametrize(
    ("offset", "value"),
    [(136, b"\3\2"), (136, b"\1\3"), (138, b"\1"), (64, b"\1")],
    ids=["another codec", "another width", "more bits", "no KV"],
)
def test_what_this_version_does_not_write_is_newer(offset: int, value: bytes) -> None:
    data = bytearray(FROZEN)
    data[offset : offset + len(value)] = value
    data[4092:4096] = record.crc32c(bytes(data[:4092])).to_bytes(4, "little")
    assert refusal(bytes(data)) == MissReason.NEWER_VERSION


@settings(max_examples=100, deadline=None)
@given(offset=st.integers(0, len(FROZEN) - 1), mask=st.integers(1, 255))
def test_any_flipped_byte_is_refused(offset: int, mask: int) -> None:
    data = bytearray(FROZEN)
    data[offset] ^= mask
    reason = (
        MissReason.NOT_A_RECORD
        if offset < 4
        else MissReason.BAD_HEADER
        if offset < 4096
        else MissReason.BAD_CHECKSUM
    )
    assert refusal(bytes(data)) == reason


def test_what_is_whole_as_stored_and_does_not_decode_is_refused() -> None:
    data = bytearray(FROZEN)
    first, second = struct.unpack_from("<Q", data, 576)[0], struct.unpack_from("<Q", data, 600)[0]
    data[first + 100] ^= 1
    data[592:596] = record.crc32c(bytes(data[first:second])).to_bytes(4, "little")
    data[4092:4096] = record.crc32c(bytes(data[:4092])).to_bytes(4, "little")
    record.verify(bytes(data), EXPECT)
    assert refusal(bytes(data), zstd()) == MissReason.BAD_CHECKSUM


@settings(max_examples=50, deadline=None)
@given(width=st.sampled_from([1, 2, 4]), data=st.binary(max_size=400))
def test_planes_are_put_together_element_by_element(width: int, data: bytes) -> None:
    count = len(data) // width
    numbers = [int.from_bytes(data[i * width :][:width], "little") for i in range(count)]
    bits = 8 * width if width > 1 else 0
    rotated = [(n << 1 | n >> (bits - 1)) % 2**bits if bits else n for n in numbers]
    pieces = [bytes(n >> 8 * place & 255 for n in rotated) for place in range(width)]
    stored = b"".join((count | 1 << 31).to_bytes(4, "little") for _ in pieces) + b"".join(pieces)
    assert decode_layer(stored, width, count * width, plain) == data[: count * width]


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\4\0\0\x80",
        b"\4\0\0\x80abc",
        b"\3\0\0\x80abc",
        b"\4\0\0\x80abcde",
        b"\xff\xff\xff\xffabcd",
        b"\3\0\0\0abc",
    ],
)
def test_what_is_no_layer_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="plane"):
        decode_layer(stored, 1, 4, plain)
