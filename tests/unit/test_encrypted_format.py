"""Encrypted records by ``docs/format-compressed.md`` alone: a frozen one, made from the page's
text, and the second reader.

The core reads the same file in ``crates/ucm-store/tests/record_fixture.rs``.
"""

from __future__ import annotations

import hmac
import struct
from pathlib import Path

import pytest
from plain_cipher import Keys, find_open, key_id, parse_keys
from plain_record import Refused, crc32c, lost_sides, parse_header, read_side, verify

from ucm.reasons import MissReason

aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "record-v1"
FROZEN, PLAIN = (FIXTURES / "encrypted.bin").read_bytes(), (FIXTURES / "sided.bin").read_bytes()
KEY, SALT = bytes(range(32)), bytes(range(100, 116))
OPEN = find_open()
assert OPEN is not None
KEYS = Keys({key_id(KEY): KEY}, OPEN)


def encrypted(data: bytes) -> bytes:
    """A record of two layers and one side shard, each in a page of its own at most, encrypted by
    that page."""
    header, out = parse_header(data), bytearray(data)
    cipher = aead.AESGCM(hmac.digest(KEY, b"UCMRECORD" + SALT + header.record_id, "sha256"))
    out[64] |= 2
    out[176:184], out[236:252] = hmac.digest(KEY, b"UCMKEYID", "sha256")[:8], SALT
    (first, second), (side,) = header.table, header.sides
    tags = 576 + 24 * 2
    used = b""
    for number, start, end, crc, tag, crc_at in [
        (1, first.offset, second.offset, first.crc, tags + 16, 576 + 16),
        (2, second.offset, header.kv_len, second.crc, tags + 32, 576 + 24 + 16),
        (1 << 31, side.offset, header.record_len, side.crc, tags + 48, 256 + 20),
    ]:
        sealed = cipher.encrypt(struct.pack("<IQ", number, 0), data[start:end], None)
        out[start:end], out[tag : tag + 16] = sealed[:-16], sealed[-16:]
        out[crc_at : crc_at + 4] = crc32c(sealed[:-16]).to_bytes(4, "little")
        used += crc.to_bytes(4, "little")
    head = header.header_len
    out[60:64] = out[head - 4 : head] = bytes(4)
    sealed = cipher.encrypt(bytes(12), used, bytes(out[:head]))
    for at, crc_bytes in [
        (576 + 20, sealed[:4]),
        (576 + 44, sealed[4:8]),
        (tags + 64, sealed[8:12]),
    ]:
        out[at : at + 4] = crc_bytes
    out[tags : tags + 16] = sealed[12:]
    return resealed(bytes(out))


def resealed(data: bytes) -> bytes:
    out = bytearray(data)
    out[60:64] = crc32c(out[:60]).to_bytes(4, "little")
    out[4092:4096] = crc32c(out[:4092]).to_bytes(4, "little")
    return bytes(out)


def test_the_words_of_the_page_make_the_frozen_bytes() -> None:
    assert encrypted(PLAIN) == FROZEN
    assert key_id(KEY).hex() == "a6985c748e29523b"


def test_the_second_reader_gives_the_record_back() -> None:
    header = verify(FROZEN, keys=KEYS)
    assert header.key_id == key_id(KEY)
    assert KEYS.decrypt(FROZEN, header) == PLAIN
    assert lost_sides(FROZEN, header) == {}
    plain = KEYS.decrypt(FROZEN[: header.kv_len], header)  # a copy without its side shard
    assert plain == PLAIN[: header.kv_len]
    assert verify(FROZEN) == header  # without a key: by the checksums of the ciphertext
    other = Keys({key_id(bytes(32)): bytes(32)}, KEYS.open)
    assert verify(FROZEN, keys=other) == header
    with pytest.raises(Refused):
        read_side(PLAIN, header.sides[0])


@pytest.mark.parametrize(
    "at", [28, 72, 184, 240, 300, 576 + 20, 576 + 48, 576 + 64, 576 + 112, 700, 3000]
)
def test_a_changed_header_is_not_authentic_whatever_its_checksums(at: int) -> None:
    data = bytearray(FROZEN)
    data[at] ^= 1
    with pytest.raises(Refused) as refused:
        verify(resealed(bytes(data)), keys=KEYS)
    assert refused.value.reason in (MissReason.BAD_CHECKSUM, MissReason.BAD_HEADER)


@pytest.mark.parametrize(
    ("at", "crc_at", "start", "end"), [(4100, 592, 4096, 4288), (8191, 616, 4288, 8192)]
)
def test_changed_ciphertext_is_not_authentic_whatever_its_checksum(
    at: int, crc_at: int, start: int, end: int
) -> None:
    data = bytearray(FROZEN)
    data[at] ^= 1
    with pytest.raises(Refused, match="CRC"):
        verify(bytes(data), keys=KEYS)
    data[crc_at : crc_at + 4] = crc32c(data[start:end]).to_bytes(4, "little")
    verify(resealed(bytes(data)))
    with pytest.raises(Refused, match="authentication tag"):
        verify(resealed(bytes(data)), keys=KEYS)


def test_keys_are_read_from_text_and_never_shown() -> None:
    text = f"# new\n{'00' * 32}\n{KEY.hex()}  # before\n"
    assert parse_keys(text) == {key_id(bytes(32)): bytes(32), key_id(KEY): KEY}
    for wrong in ("", "00", KEY.hex() + "0", "zz" * 32):
        with pytest.raises(ValueError, match="encryption key") as refused:
            parse_keys(wrong)
        assert len(wrong) < 3 or wrong[:8] not in str(refused.value)
