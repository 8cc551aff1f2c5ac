"""Reads and verifies one stored record in plain Python, by ``docs/format-record.md`` and
``docs/format-verify.md`` alone.

This is the second reader of the format: it shares no code with the core, so an error in one shows
as a difference between the two. It needs ``google-crc32c`` and the names of the reasons.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plain_checksum import crc32c
from plain_cipher import ENCRYPTED, KEY_ID, Keys, NotAuthenticError, seals_len
from plain_planes import LZ4, WIDTHS, Unpack, Zstd, decode_layer

from ucm.reasons import MissReason

MAGIC = b"UCMB"
MARK = b"UCMR"
VERSION = 1
PREAMBLE_LEN = 64
PAGE = 4096
LAYER_ALIGN = 64
MAX_LAYERS = 4096
MAX_SIDES = 8
MAX_STRETCH = 1 << 30
#: The most bytes of a record: of the longest header, the most KV and the most side shards.
MAX_RECORD = 102_400 + (1 << 30) + (16 << 20)
#: The flag of a record without KV: side shards of a block whose own record lacks them.
WITHOUT_KV = 1
_SIDE_TABLE, _SIDE_ENTRY = 256, 40
_SHARD_TABLE, _SHARD_ENTRY = 576, 24
_CRC_LEN = 4

#: Codes of the element types.
DTYPES = ("other", "f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2", "int8", "opaque")

_PATH = re.compile(r"([0-9a-f]{32})/blocks/([0-9a-f]{2})/([0-9a-f]{32})\.bin")


class Refused(Exception):  # noqa: N818 - a verdict on bytes, not an error of the program
    """These bytes are not the requested record: the reason, and a text with the found value."""

    def __init__(self, reason: MissReason, found: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason = reason
        self.found = found


@dataclass(frozen=True)
class Part:
    """A part of a block: KV group, pipeline rank, tensor rank."""

    group: int
    pipeline_rank: int
    tensor_rank: int

    def mask(self) -> bytes:
        """The mask between a block key and this part's record id."""
        numbers = struct.pack("<III", self.group, self.pipeline_rank, self.tensor_rank)
        return hashlib.sha256(b"UCMPART" + numbers).digest()[:16]


@dataclass(frozen=True)
class Layer:
    """A layer in the header's table; the checksum covers ``offset`` up to the next layer or the
    payload's end.

    ``raw_crc``: the same of the uncompressed layer in a compressed record, else 0; encrypted in an
    encrypted record.
    """

    offset: int
    length: int
    crc: int
    raw_crc: int = 0


@dataclass(frozen=True)
class Side:
    """A side shard in the header's table; the checksum covers ``offset`` up to the end of its last
    page."""

    name: str
    version: int
    crc: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """End of its last page."""
        return self.offset + _round_up(self.length, PAGE)

    def mask(self) -> bytes:
        """The mask between the id of a record and that of the record with this side shard only."""
        name = self.name.encode().ljust(16, b"\0")
        return hashlib.sha256(b"UCMSIDE" + name + struct.pack("<I", self.version)).digest()[:16]


@dataclass(frozen=True)
class Header:
    """The header of a record, lengths and offsets in bytes."""

    version: int
    codec: int
    record_id: bytes
    layers: int
    block_tokens: int
    dtype: int
    header_len: int
    record_len: int
    ordinal: int
    parent: bytes
    namespace: bytes
    part: Part
    tokens: int
    raw_len: int
    stored_len: int
    time_ns: int
    writer: int
    tenant: bytes
    tensors: int
    layer_len: int
    shape: int
    table: tuple[Layer, ...]
    sides: tuple[Side, ...]
    without_kv: bool = False
    key_id: bytes | None = None  # of an encrypted record

    @property
    def kv_len(self) -> int:
        """Header and payload together."""
        return self.header_len + self.stored_len

    @property
    def compressed(self) -> bool:
        """True if the layers are compressed."""
        return self.codec != 0

    @property
    def dtype_name(self) -> str:
        """The element type in words."""
        return DTYPES[self.dtype] if self.dtype < len(DTYPES) else f"unknown ({self.dtype})"

    @property
    def block_record_id(self) -> bytes:
        """The id of the record that has the block's KV: its own, unless it is a record of side
        shards."""
        return _xor(self.record_id, self.sides[0].mask()) if self.without_kv else self.record_id

    @property
    def block_key(self) -> bytes:
        """The key of the whole block, which its other parts share."""
        return _xor(self.block_record_id, self.part.mask())


@dataclass(frozen=True)
class Shape:
    """Sizes of a part's blocks, as its manifest lists them: bytes of a layer's tensors, layers,
    tokens, type's code."""

    tensors: tuple[int, ...]
    layers: int
    block_tokens: int
    dtype: int

    @property
    def header_len(self) -> int:
        """Length of the header."""
        return self.header_len_of(False)

    def header_len_of(self, encrypted: bool) -> int:
        """The same of a record that may be encrypted."""
        seals = seals_len(self.layers, MAX_SIDES) if encrypted else 0
        return _round_up(_SHARD_TABLE + _SHARD_ENTRY * self.layers + seals + _CRC_LEN, PAGE)

    @property
    def payload_len(self) -> int:
        """Length of the payload."""
        return _round_up(self.stride * self.layers, PAGE)

    @property
    def stride(self) -> int:
        """From the start of one layer to that of the next."""
        return _round_up(sum(self.tensors), LAYER_ALIGN)

    def matches(self, header: Header) -> bool:
        """True if a record has this geometry."""
        length = sum(self.tensors)
        header_len = header.header_len
        if not header.without_kv and header_len not in (self.header_len, self.header_len_of(True)):
            return False
        table = [(header_len + i * self.stride, length) for i in range(self.layers)]
        sizes = b"".join(size.to_bytes(8, "little") for size in self.tensors)
        of_this = (header.layers, header.block_tokens, header.dtype) == (
            self.layers,
            self.block_tokens,
            self.dtype,
        ) and (header.tensors, header.layer_len, header.shape) == (
            len(self.tensors),
            length,
            crc32c(sizes),
        )
        if header.without_kv:
            return of_this and header.header_len == PAGE
        return (
            of_this
            and header.raw_len == length * self.layers
            and (
                len(header.table) == self.layers
                and header.stored_len <= self.payload_len
                and length % WIDTHS[header.codec] == 0
                if header.compressed
                else header.stored_len == self.payload_len
                and [(layer.offset, layer.length) for layer in header.table] == table
            )
        )


@dataclass(frozen=True)
class Expect:
    """Expected fields of a record; ``None``: not checked. ``namespace`` may be the digest or its
    first bytes."""

    record_id: bytes | None = None
    namespace: bytes | None = None
    part: Part | None = None
    shape: Shape | None = None


def parse_header(data: bytes) -> Header:
    """The header at the start of ``data``; raises :class:`Refused` if there is no valid one."""
    header_len = _check_preamble(data)
    most = _round_up(_SHARD_TABLE + _SHARD_ENTRY * MAX_LAYERS + _CRC_LEN, PAGE)
    if header_len == 0 or header_len % PAGE or header_len > most:
        raise Refused(MissReason.BAD_HEADER, f"a header of {header_len} bytes")
    if len(data) < header_len:
        raise Refused(MissReason.TRUNCATED, f"{len(data)} bytes of a header of {header_len}")
    end = header_len - _CRC_LEN
    _check_crc(data, 0, end, _u32(data, end), MissReason.BAD_HEADER, "header")
    flags, codec = _u32(data, 64), _u32(data, 136)
    shards, sides = _u32(data, 140), _u32(data, 216)
    if flags & ~(WITHOUT_KV | ENCRYPTED) or (codec and codec not in (*WIDTHS, *LZ4)):
        known = ", ".join(f"{number:#x}" for number in (0, *WIDTHS))
        raise Refused(
            MissReason.NEWER_VERSION,
            f"flags {flags:#x} and codec {codec:#x}, known are 0 to 3 and {known}",
        )
    without_kv, encrypted = bool(flags & WITHOUT_KV), bool(flags & ENCRYPTED)
    if without_kv and codec:
        raise Refused(MissReason.NEWER_VERSION, f"codec {codec:#x} without KV")
    if codec in LZ4:
        raise Refused(MissReason.FOREIGN_SHAPE, f"codec {codec:#x}, of lz4, which is not decoded")
    most = 0 if without_kv else (end - _SHARD_TABLE) // _SHARD_ENTRY
    if (
        shards > most
        or (shards == 0) != without_kv
        or sides > MAX_SIDES
        or (sides == 0 and without_kv)
    ):
        raise Refused(
            MissReason.BAD_HEADER, f"{shards} shards and {sides} side shards in {header_len} bytes"
        )
    if encrypted and _SHARD_TABLE + _SHARD_ENTRY * shards + seals_len(shards, sides) > end:
        raise Refused(
            MissReason.BAD_HEADER, f"no room for the tags of {shards} shards in {header_len} bytes"
        )
    header = Header(
        version=VERSION,
        codec=codec,
        record_id=data[8:24],
        layers=_u32(data, 24),
        block_tokens=_u32(data, 28),
        dtype=_u32(data, 32),
        header_len=header_len,
        record_len=_u64(data, 44),
        ordinal=_u32(data, 68),
        parent=data[72:88],
        namespace=data[88:120],
        part=Part(*struct.unpack_from("<III", data, 120)),
        tokens=_u32(data, 132),
        raw_len=_u64(data, 144),
        stored_len=_u64(data, 152),
        time_ns=_u64(data, 160),
        writer=_u64(data, 168),
        tenant=data[184:216],
        tensors=_u32(data, 220),
        layer_len=_u64(data, 224),
        shape=_u32(data, 232),
        table=tuple(
            _layer(data, _SHARD_TABLE + i * _SHARD_ENTRY, codec or encrypted) for i in range(shards)
        ),
        sides=tuple(_side(data, _SIDE_TABLE + i * _SIDE_ENTRY) for i in range(sides)),
        without_kv=without_kv,
        key_id=data[KEY_ID : KEY_ID + 8] if encrypted else None,
    )
    _check_table(header)
    return header


def verify(
    data: bytes,
    expect: Expect | None = None,
    zstd: Zstd | None = None,
    keys: Keys | None = None,
) -> Header:
    """Verifies a record read whole, or at least up to the end of its payload; raises
    :class:`Refused` with the reason.

    A compressed record is verified in its stored form and, if zstd is installed, after decoding.
    Damage of a side shard does not affect the KV (:func:`lost_sides`), unless the record has
    nothing else. An encrypted record is verified in its stored form and, if ``keys`` has its key,
    by its tags and after decryption. Returns the stored header.
    """
    header, expect = parse_header(data), expect or Expect()
    if (
        expect.namespace is not None
        and header.namespace[: len(expect.namespace)] != expect.namespace
    ):
        raise Refused(MissReason.FOREIGN_IDENTITY, f"identity {header.namespace.hex()}")
    if expect.part is not None and header.part != expect.part:
        raise Refused(MissReason.FOREIGN_PART, f"{header.part}")
    if expect.record_id is not None and header.record_id != expect.record_id:
        raise Refused(MissReason.FOREIGN_ID, f"id {header.record_id.hex()}")
    if expect.shape is not None and not expect.shape.matches(header):
        raise Refused(
            MissReason.FOREIGN_SHAPE,
            f"{header.layers} layers of {header.layer_len} bytes, {header.dtype_name}",
        )
    if len(data) > header.record_len:
        raise Refused(
            MissReason.WRONG_LENGTH, f"{len(data)} bytes, the header says {header.record_len}"
        )
    least = header.record_len if header.without_kv else header.kv_len
    if len(data) < least:
        raise Refused(
            MissReason.TRUNCATED, f"{len(data)} bytes, the header says {header.record_len}"
        )
    for what, start, end, written in _stretches(header):
        _check_crc(data, start, end, written, MissReason.BAD_CHECKSUM, what)
    if header.without_kv and (lost := lost_sides(data, header)):
        raise next(iter(lost.values()))
    if header.key_id is not None:
        if keys is not None and keys.has(header):
            try:
                plain = keys.decrypt(data, header)
            except NotAuthenticError as error:
                raise Refused(error.reason, str(error)) from None
            verify(plain, expect, zstd)
        return header
    if header.compressed and zstd is not None:
        for i, raw in enumerate(decoded_layers(data, header, zstd.decode)):
            _check_crc(
                raw,
                0,
                len(raw),
                header.table[i].raw_crc,
                MissReason.BAD_CHECKSUM,
                f"decoded layer {i}",
            )
    return header


def lost_sides(data: bytes, header: Header) -> dict[str, Refused]:
    """Bad side shards of the header by name, with the reason: damaged or, in a copy that ends
    before them, absent."""
    lost = {}
    for side in header.sides:
        try:
            read_side(data, side)
        except Refused as refused:
            lost[side.name] = refused
    return lost


def read_side(data: bytes, side: Side) -> bytes:
    """The bytes of a side shard. Only its pages are read; the KV need not be present.

    Raises :class:`Refused`; ``absent`` if the record ends before it.
    """
    if len(data) < side.end:
        raise Refused(
            MissReason.ABSENT, f"side shard {side.name}: {len(data)} bytes, it ends at {side.end}"
        )
    _check_crc(
        data,
        side.offset,
        side.end,
        side.crc,
        MissReason.BAD_CHECKSUM,
        f"side shard {side.name}",
    )
    return data[side.offset : side.offset + side.length]


def decoded_layers(data: bytes, header: Header, unpack: Unpack) -> Iterator[bytes]:
    """The decoded layers of a compressed record, with the zeros behind them.

    Raises :class:`Refused` if they cannot be decoded.
    """
    stride = _round_up(header.layer_len, LAYER_ALIGN)
    for i, layer in enumerate(header.table):
        stored = data[layer.offset : layer.offset + layer.length]
        try:
            raw = decode_layer(stored, WIDTHS[header.codec], header.layer_len, unpack)
        except ValueError as error:
            raise Refused(
                MissReason.BAD_CHECKSUM, f"layer {i} cannot be decoded: {error}"
            ) from None
        last = i + 1 == len(header.table)
        end = _round_up(stride * len(header.table), PAGE) - stride * i if last else stride
        yield raw + bytes(end - len(raw))


def verify_file(path: Path, shape: Shape | None = None) -> Header:
    """Verifies a block file; its path has the expected id and namespace.

    Raises :class:`Refused`, or :class:`OSError` when the file cannot be read.
    """
    named = _PATH.fullmatch("/".join(path.absolute().parts[-4:]))
    expect = Expect(shape=shape)
    if named is not None:
        namespace, shard, record_id = named.groups()
        if record_id[:2] != shard:
            raise Refused(MissReason.FOREIGN_ID, f"a file in directory {shard}")
        expect = Expect(bytes.fromhex(record_id), bytes.fromhex(namespace), shape=shape)
    with path.open("rb") as file:
        return verify(file.read(min(os.fstat(file.fileno()).st_size, MAX_RECORD + 1)), expect)


def _stretches(header: Header) -> Iterator[tuple[str, int, int, int]]:
    ends = [layer.offset for layer in header.table[1:]] + [header.kv_len]
    for i, (layer, end) in enumerate(zip(header.table, ends, strict=False)):
        yield f"layer {i}", layer.offset, end, layer.crc


def _check_preamble(data: bytes) -> int:
    """Length of the header, if the first 64 bytes are those of a record of this version."""
    if data[:4] != MAGIC[: len(data)]:
        raise Refused(MissReason.NOT_A_RECORD, f"magic {data[:4]!r}")
    if len(data) < PREAMBLE_LEN:
        raise Refused(MissReason.TRUNCATED, f"{len(data)} bytes")
    if not any(data[36:64]):
        raise Refused(
            MissReason.SEED_FORM, "a block file of the seed, which has no checksum and no identity"
        )
    if data[36:40] != MARK:
        raise Refused(MissReason.BAD_HEADER, f"mark {data[36:40]!r}")
    _check_crc(data, 0, 60, _u32(data, 60), MissReason.BAD_HEADER, "preamble")
    version = _u32(data, 4)
    if version == 0:
        raise Refused(MissReason.BAD_HEADER, "version 0")
    if version > VERSION:
        raise Refused(MissReason.NEWER_VERSION, f"version {version}, known is {VERSION}")
    return _u32(data, 40)


def _check_table(header: Header) -> None:
    """Layers and side shards follow each other without a gap that no checksum covers, up to the
    record's end."""
    if header.without_kv and (header.stored_len or header.raw_len):
        raise Refused(MissReason.BAD_HEADER, f"{header.stored_len} bytes of a record without KV")
    free, kv_len = header.header_len, header.kv_len
    for i, layer in enumerate(header.table):
        if (
            layer.offset < free
            or (i == 0 and layer.offset != free)
            or layer.offset + layer.length > kv_len
        ):
            raise Refused(
                MissReason.BAD_HEADER, f"layer {i} lies at {layer.offset}, {layer.length} bytes"
            )
        free = layer.offset + layer.length
    page = kv_len
    for side in header.sides:
        if side.offset != page or not 0 < side.length <= MAX_STRETCH:
            raise Refused(
                MissReason.BAD_HEADER,
                f"side shard {side.name} lies at {side.offset}, {side.length} bytes",
            )
        page = side.end
    if kv_len % PAGE or page != header.record_len:
        raise Refused(
            MissReason.BAD_HEADER, f"a record of {header.record_len} bytes whose parts make {page}"
        )


def _layer(data: bytes, at: int, has_raw_crc: bool | int) -> Layer:
    offset, length, crc, raw_crc = struct.unpack_from("<QQII", data, at)
    return Layer(offset, length, crc, raw_crc if has_raw_crc else 0)


def _side(data: bytes, at: int) -> Side:
    name, version, crc, offset, length = struct.unpack_from("<16sIIQQ", data, at)
    try:
        return Side(name.rstrip(b"\0").decode(), version, crc, offset, length)
    except UnicodeDecodeError:
        raise Refused(MissReason.BAD_HEADER, f"a side shard named {name!r}") from None


def _check_crc(
    data: bytes, start: int, end: int, written: int, reason: MissReason, what: str
) -> None:
    found = crc32c(data[start:end])
    if found != written:
        raise Refused(reason, f"{what}: CRC-32C {found:08x}, written was {written:08x}")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")
