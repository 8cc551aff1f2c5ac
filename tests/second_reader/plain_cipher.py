"""Encrypted records in plain Python, by ``docs/format-compressed.md`` alone.

:mod:`plain_record` verifies the stored form; this module decrypts it. AES-256-GCM is that of the
package ``cryptography``; without it, or without the key, a record is verified by the checksums of
its ciphertext.
"""

from __future__ import annotations

import hmac
import importlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plain_checksum import crc32c

from ucm.reasons import MissReason

if TYPE_CHECKING:
    from plain_record import Header

#: The flag of a record whose layers and side shards are encrypted.
ENCRYPTED = 2
#: Bytes of an authentication tag, and of a side shard's entry: its tag and its plaintext checksum.
SEAL, SIDE_SEAL = 16, 20
#: Offsets of the key's number and of the record's salt.
KEY_ID, SALT = 176, 236
_FLAGS, _PREAMBLE_CRC, _CRC_LEN = 64, 60, 4
_SIDE_TABLE, _SIDE_ENTRY = 256, 40
_SHARD_TABLE, _SHARD_ENTRY = 576, 24
_SIDES = 1 << 31

#: Decrypts and authenticates: (key, nonce, ciphertext with its tag, associated data); raises on
#: failure.
Open = Callable[[bytes, bytes, bytes, bytes], bytes]


class NotAuthenticError(Exception):
    """Bytes that this key has not encrypted; ``what`` names them."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: the authentication tag is another")
        self.reason = MissReason.BAD_CHECKSUM


@dataclass(frozen=True)
class Keys:
    """Configured keys by their numbers in records, and the decryption function."""

    keys: Mapping[bytes, bytes]
    open: Open

    def has(self, header: Header) -> bool:
        """True if a record can be decrypted here."""
        return header.key_id in self.keys

    def decrypt(self, data: bytes, header: Header) -> bytes:
        """The plaintext record, up to the length of ``data``. A side shard that was modified
        becomes zeros, which its checksum shows: the rest is of use without it.

        Raises :class:`NotAuthenticError`.
        """
        assert header.key_id is not None
        key = _record_key(self.keys[header.key_id], data[SALT : SALT + 16], header.record_id)
        shards, head = len(header.table), header.header_len
        pieces = _pieces(header)
        secret = b"".join(data[piece.secret_crc : piece.secret_crc + 4] for piece in pieces)
        tag_at = _SHARD_TABLE + _SHARD_ENTRY * shards
        aad = bytearray(data[:head])
        for start, end in [
            (_PREAMBLE_CRC, _PREAMBLE_CRC + 4),
            (head - _CRC_LEN, head),
            (tag_at, tag_at + SEAL),
            *((piece.secret_crc, piece.secret_crc + 4) for piece in pieces),
        ]:
            aad[start:end] = bytes(end - start)
        used = self._open(key, 0, secret + data[tag_at : tag_at + SEAL], bytes(aad), "the header")
        plain = bytearray(data)
        seen = memoryview(plain).toreadonly()
        for number, piece in enumerate(pieces):
            is_side = number >= shards
            used_crc = used[4 * number : 4 * number + 4]
            if piece.end <= len(data):
                sealed = data[piece.start : piece.end] + data[piece.tag : piece.tag + SEAL]
                try:
                    opened = self._open(key, piece.nonce, sealed, b"", piece.name)
                except NotAuthenticError:
                    if not is_side:
                        raise
                    opened = bytes(piece.end - piece.start)
                plain[piece.start : piece.end] = opened
            if is_side or not header.compressed:
                plain[piece.crc : piece.crc + 4] = used_crc
                plain[piece.secret_crc : piece.secret_crc + 4] = bytes(4)
            else:
                stored = crc32c(seen[piece.start : piece.end])
                plain[piece.crc : piece.crc + 4] = stored.to_bytes(4, "little")
                plain[piece.secret_crc : piece.secret_crc + 4] = used_crc
        flags = int.from_bytes(plain[_FLAGS : _FLAGS + 4], "little") & ~ENCRYPTED
        plain[_FLAGS : _FLAGS + 4] = flags.to_bytes(4, "little")
        plain[KEY_ID : KEY_ID + 8] = bytes(8)
        plain[SALT : SALT + 16] = bytes(16)
        seals = SEAL * (1 + shards) + SIDE_SEAL * len(header.sides)
        plain[tag_at : tag_at + seals] = bytes(seals)
        for end in (_PREAMBLE_CRC, head - _CRC_LEN):
            plain[end : end + _CRC_LEN] = crc32c(seen[:end]).to_bytes(4, "little")
        return bytes(plain)

    def _open(self, key: bytes, number: int, sealed: bytes, aad: bytes, what: str) -> bytes:
        try:
            return self.open(key, struct.pack("<IQ", number, 0), sealed, aad)
        except Exception:
            raise NotAuthenticError(what) from None


@dataclass(frozen=True)
class _Piece:
    """A separately encrypted piece, and the offsets of its tag and checksums in the header."""

    name: str
    start: int
    end: int
    nonce: int
    tag: int
    crc: int
    secret_crc: int


def _pieces(header: Header) -> list[_Piece]:
    shards = len(header.table)
    tags = _SHARD_TABLE + _SHARD_ENTRY * shards + SEAL
    ends = [layer.offset for layer in header.table[1:]] + [header.kv_len]
    pieces = []
    for i, (layer, end) in enumerate(zip(header.table, ends, strict=False)):
        entry = _SHARD_TABLE + i * _SHARD_ENTRY
        pieces.append(
            _Piece(f"layer {i}", layer.offset, end, 1 + i, tags + SEAL * i, entry + 16, entry + 20)
        )
    for i, side in enumerate(header.sides):
        tag = tags + SEAL * shards + SIDE_SEAL * i
        crc = _SIDE_TABLE + i * _SIDE_ENTRY + 20
        name = f"side shard {side.name}"
        pieces.append(_Piece(name, side.offset, side.end, _SIDES + i, tag, crc, tag + SEAL))
    return pieces


def seals_len(shards: int, sides: int) -> int:
    """Bytes that encryption adds to the tables of a header."""
    return SEAL * (1 + shards) + SIDE_SEAL * sides


def key_id(key: bytes) -> bytes:
    """The number by which records name a key."""
    return hmac.digest(key, b"UCMKEYID", "sha256")[:8]


def _record_key(key: bytes, salt: bytes, record_id: bytes) -> bytes:
    return hmac.digest(key, b"UCMRECORD" + salt + record_id, "sha256")


def parse_keys(text: str) -> dict[bytes, bytes]:
    """Keys by their numbers: each 64 hex digits on a line of its own; text after a ``#`` is
    ignored.

    Raises :class:`ValueError` without the text.
    """
    keys = {}
    for number, line in enumerate(text.splitlines(), 1):
        digits = line.partition("#")[0].strip()
        if not digits:
            continue
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            key = b""
        if len(key) != 32 or len(digits) != 64:
            raise ValueError(f"line {number}: an encryption key is 64 hex digits, one key a line")
        keys[key_id(key)] = key
    if not keys:
        raise ValueError("there is no encryption key in it")
    return keys


def find_open() -> Open | None:
    """AES-256-GCM of ``cryptography``; None if that is not installed."""
    try:
        aead = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
    except ImportError:
        return None

    def opened(key: bytes, nonce: bytes, sealed: bytes, aad: bytes) -> bytes:
        return bytes(aead.AESGCM(key).decrypt(nonce, sealed, aad))

    return opened
