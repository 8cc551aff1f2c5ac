"""The rules of ``docs/format.md``: known answers by hashlib, the frozen fixtures, and the second
reader's verdicts."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import plain_record as record
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_record import Expect, Part, Refused, Shape

from ucm.reasons import MissReason
from ucm.store import BlockHasher, part_mask, record_ids

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures" / "record-v1"

IDENTITY = json.dumps(
    {
        "format_version": 1,
        "architecture": "LlamaForCausalLM",
        "world_size": 2,
        "dtype": "bfloat16",
        "weights": "sha256:00",
        "model_config": {
            "head_dim": 64,
            "name": "caf\u00e9",
            "rope": {"base": 1e-05, "type": "x y"},
        },
        "position": "rope",
        "kv_dtype": "bfloat16",
        "attention_backend": "CPU_ATTN",
        "kv_packing": "avx2",
        "kv_layout": "HND",
        "kv_groups": [{"layers": 2, "shape": [2, 16, 64]}],
        "block_tokens": 16,
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "decode_context_parallel": 1,
    },
    separators=(",", ":"),
    ensure_ascii=True,
)
DIGEST = hashlib.sha256(IDENTITY.encode()).digest()
TOKENS = [(i * 2654435761) % 2**32 for i in range(40)]
SALT = (0, 3, b"salt")
PART = Part(0, 0, 1)
SHAPE = Shape(tensors=(100, 60), layers=2, block_tokens=16, dtype=2)
SIDE = bytes((2 * 131 + j * 7 + 3) % 256 for j in range(50))

#: Key before block 0, keys of 3 blocks of 1 token, of 2 blocks of 16, of the same with frames; also
#: in the core.
KNOWN = {
    "sha256": (
        ["dffaea45863aef920aa2b79e1f5b0e96"],
        [
            "b67cef95ce01a21e7909063d2634d4af",
            "5e015bb66771fedecf25839fb1cc9ac7",
            "11ee9a5c9c81a59c125bbf9a864c5740",
        ],
        ["736641dbb5422bd38f6df6735d506ed2", "cc45e8be8ff873eaac1f76f371cc60da"],
        ["7d3d931fae6f888ef814d27392fd96b0", "fc6162193a5e09fff0f352d6859f50c6"],
    ),
    "md5": (
        ["f7370f03cd674ce4190eb2e2e5bd872a"],
        [
            "0b6bc116467491a8b1601d026b2d0e86",
            "94614858ec8867e0b2957f0ceb02fc96",
            "ccc17d90e7bab2d393c050c7fbfa8714",
        ],
        ["b13acf08ddae80016cb748a7a1c579be", "0ebd97c0034c18d52f59a4d148561192"],
        ["d3fb4095b31bcfa92733a6077f6c8b4a", "0ddc5d9b37da3e31a8668c29a06c7738"],
    ),
}
FRAMES = [(0, 1, b"adapter"), (0, 3, b"salt"), (1, 2, b"")]


def chain(
    method: str,
    identity: bytes,
    tokens: list[int],
    block_size: int,
    extra: Iterable[tuple[int, int, bytes]] = (),
) -> list[bytes]:
    """The key before block 0 and the keys of the full blocks, by hashlib alone."""

    def cut(message: bytes) -> bytes:
        return hashlib.new(method, message, usedforsecurity=False).digest()[:16]

    keys = [cut(b"UCMHASHSEED" + identity)]
    for block in range(len(tokens) // block_size):
        message = keys[-1] + struct.pack(
            f"<{block_size}I", *tokens[block * block_size : (block + 1) * block_size]
        )
        for _, tag, data in sorted(frame for frame in extra if frame[0] == block):
            message += struct.pack("<BI", tag, len(data)) + data
        keys.append(cut(message))
    return keys


def xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))


def fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


def expected() -> Expect:
    keys = chain("sha256", DIGEST, TOKENS, 16, [SALT])
    return Expect(xor(keys[2], PART.mask()), DIGEST, PART, SHAPE)


def refusal(data: bytes, expect: Expect | None = None) -> MissReason:
    with pytest.raises(Refused) as refused:
        record.verify(data, expect or expected())
    return refused.value.reason


@pytest.mark.parametrize("method", KNOWN)
def test_keys_are_those_of_hashlib(method: str) -> None:
    identity = b"model:2:bfloat16:0"
    seed, ones, sixteens, framed = ([bytes.fromhex(key) for key in keys] for keys in KNOWN[method])
    assert chain(method, identity, TOKENS[:3], 1) == seed + ones
    assert chain(method, identity, TOKENS, 16) == seed + sixteens
    assert chain(method, identity, TOKENS, 16, FRAMES) == seed + framed
    assert BlockHasher(identity, 1, method).hash_blocks(TOKENS[:3]) == ones
    assert BlockHasher(identity, 16, method).hash_blocks(TOKENS) == sixteens
    assert BlockHasher(identity, 16, method).hash_blocks(TOKENS, extra=FRAMES[::-1]) == framed


@settings(max_examples=50, deadline=None)
@given(
    method=st.sampled_from(["sha256", "md5"]),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    block_size=st.integers(1, 40),
    extra=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 255), st.binary(max_size=100)), max_size=5
    ),
    data=st.data(),
)
def test_the_core_hashes_as_hashlib_does(
    method: str,
    tokens: list[int],
    block_size: int,
    extra: list[tuple[int, int, bytes]],
    data: st.DataObject,
) -> None:
    _, *keys = chain(method, DIGEST, tokens, block_size, extra)
    hasher = BlockHasher(DIGEST, block_size, method)
    assert hasher.hash_blocks(tokens, extra=extra) == keys
    start = data.draw(st.integers(0, len(keys)))
    parent = keys[start - 1] if start else None
    assert hasher.hash_blocks(tokens, parent=parent, start=start, extra=extra) == keys[start:]


def test_part_masks_and_record_ids_are_those_of_hashlib() -> None:
    known = {
        (0, 0, 0): "d1735336227e3c2f267c9eba12d4504b",
        (0, 0, 1): "31e4d3fa5060ad12d7811d7a592de7a9",
        (1, 2, 3): "270550f27eb00da7464412fd597e2b1e",
    }
    keys = chain("sha256", DIGEST, TOKENS, 16)[1:]
    for part, mask in known.items():
        assert Part(*part).mask().hex() == mask
        assert part_mask(*part).hex() == mask
        assert record_ids(keys, bytes.fromhex(mask)) == [
            xor(key, bytes.fromhex(mask)) for key in keys
        ]


def test_the_identity_digest_is_that_of_hashlib() -> None:
    assert DIGEST.hex() == "345a51b41e3fd0f6ad66d55bddbb3600711c8850ca44734d1795c81ac8f0d860"


def test_crc_is_castagnoli() -> None:
    assert record.crc32c(b"123456789") == 0xE3069283
    assert record.crc32c(bytes(32)) == 0x8A9136AA
    assert record.crc32c(b"") == 0


def test_every_field_lies_where_the_format_says() -> None:
    data = fixture("sided.bin")
    first, second = chain("sha256", DIGEST, TOKENS, 16, [SALT])[1:]
    mask = hashlib.sha256(b"UCMPART" + struct.pack("<III", 0, 0, 1)).digest()[:16]
    fields = [
        (0, "4s", b"UCMB"),
        (4, "I", 1),
        (8, "16s", xor(second, mask)),
        (24, "I", 2),
        (28, "I", 16),
        (32, "I", 2),
        (36, "4s", b"UCMR"),
        (40, "I", 4096),
        (44, "Q", 12288),
        (52, "8s", bytes(8)),
        (60, "I", record.crc32c(data[:60])),
        (64, "I", 0),
        (68, "I", 1),
        (72, "16s", xor(first, mask)),
        (88, "32s", DIGEST),
        (120, "12s", struct.pack("<III", 0, 0, 1)),
        (132, "I", 16),
        (136, "I", 0),
        (140, "I", 2),
        (144, "Q", 320),
        (152, "Q", 4096),
        (160, "Q", 1700000000123456789),
        (168, "Q", 0x1122334455667788),
        (176, "8s", bytes(8)),
        (184, "32s", bytes(32)),
        (216, "I", 1),
        (220, "I", 2),
        (224, "Q", 160),
        (232, "I", record.crc32c(struct.pack("<QQ", 100, 60))),
        (236, "20s", bytes(20)),
        (256, "16s", b"mean-k" + bytes(10)),
        (272, "I", 3),
        (276, "I", record.crc32c(data[8192:12288])),
        (280, "Q", 8192),
        (288, "Q", 50),
        (296, "280s", bytes(280)),
        (576, "Q", 4096),
        (584, "Q", 160),
        (592, "I", record.crc32c(data[4096:4288])),
        (596, "I", 0),
        (600, "Q", 4288),
        (608, "Q", 160),
        (616, "I", record.crc32c(data[4288:8192])),
        (620, "I", 0),
        (624, f"{4092 - 624}s", bytes(4092 - 624)),
        (4092, "I", record.crc32c(data[:4092])),
    ]
    end = 0
    for offset, form, value in fields:
        assert offset == end, "the list names every byte once"
        assert struct.unpack_from("<" + form, data, offset) == (value,), f"offset {offset}"
        end = offset + struct.calcsize("<" + form)
    assert end == 4096
    content = [
        bytes((i * 131 + j * 7 + 3) % 256 for j in range(length))
        for i, length in enumerate((160, 160, 50))
    ]
    padded = content[0] + bytes(32) + content[1] + bytes(4096 - 352) + content[2] + bytes(4096 - 50)
    assert data[4096:] == padded
    assert fixture("plain.bin")[4096:] == padded[:4096]


@pytest.mark.parametrize("name", ["plain.bin", "sided.bin"])
def test_frozen_records_are_read(name: str) -> None:
    data = fixture(name)
    header = record.verify(data, expected())
    first, second = chain("sha256", DIGEST, TOKENS, 16, [SALT])[1:]
    assert header.block_key == second
    assert header.parent == xor(first, PART.mask())
    assert (header.ordinal, header.tokens, header.dtype_name) == (1, 16, "bf16")
    assert header.record_len == len(data)
    assert [side.name for side in header.sides] == (["mean-k"] if name == "sided.bin" else [])
    assert record.verify(data[: header.kv_len], expected()) == header


def side_mask(name: bytes, version: int) -> bytes:
    """The mask of a record with a side shard only, by hashlib."""
    return hashlib.sha256(
        b"UCMSIDE" + name.ljust(16, b"\0") + version.to_bytes(4, "little")
    ).digest()[:16]


def alone() -> Expect:
    """The expected record with only the side shard of the frozen block."""
    record_id = expected().record_id
    assert record_id is not None
    return Expect(xor(record_id, side_mask(b"mean-k", 3)), DIGEST, PART, SHAPE)


def test_a_side_shard_is_read_without_the_kv() -> None:
    data = fixture("sided.bin")
    header = record.parse_header(data[:4096])
    (side,) = header.sides
    assert (side.version, side.offset, side.end) == (3, 8192, 12288)
    without = data[:4096] + bytes(4096) + data[8192:]
    assert record.read_side(without, side) == SIDE
    with pytest.raises(Refused) as refused:
        record.read_side(data[: side.end - 1], side)
    assert refused.value.reason == MissReason.ABSENT


def test_a_side_shard_that_lies_alone_is_read() -> None:
    data = fixture("side-alone.bin")
    header = record.verify(data, alone())
    assert (header.without_kv, header.record_len, header.kv_len, header.table) == (
        True,
        8192,
        4096,
        (),
    )
    assert (header.block_record_id, header.layers) == (expected().record_id, 2)
    assert header.block_key == chain("sha256", DIGEST, TOKENS, 16, [SALT])[2]
    assert record.read_side(data, header.sides[0]) == SIDE
    assert struct.unpack_from("<I", data, 64) == (1,)
    assert struct.unpack_from("<I", data, 140) == (0,)
    assert struct.unpack_from("<QQ", data, 144) == (0, 0)
    assert refusal(data, expected()) == MissReason.FOREIGN_ID
    assert refusal(data, Expect(shape=Shape((100, 60), 3, 16, 2))) == MissReason.FOREIGN_SHAPE
    for length in range(0, 8192, 7):
        assert refusal(data[:length], alone()) == MissReason.TRUNCATED


@settings(max_examples=100, deadline=None)
@given(offset=st.integers(4, 8191), mask=st.integers(1, 255))
def test_any_flipped_byte_of_a_side_shard_that_lies_alone_is_refused(
    offset: int, mask: int
) -> None:
    data = bytearray(fixture("side-alone.bin"))
    data[offset] ^= mask
    assert refusal(bytes(data), alone()) == (
        MissReason.BAD_HEADER if offset < 4096 else MissReason.BAD_CHECKSUM
    )


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (64, b"\5", MissReason.NEWER_VERSION),
        (64, b"\0", MissReason.BAD_HEADER),
        (136, b"\1\1", MissReason.NEWER_VERSION),
        (140, b"\1", MissReason.BAD_HEADER),
        (144, b"\1", MissReason.BAD_HEADER),
        (152, b"\0\x10", MissReason.BAD_HEADER),
        (216, b"\0", MissReason.BAD_HEADER),
    ],
)
def test_a_record_without_kv_says_so_soundly(offset: int, value: bytes, reason: MissReason) -> None:
    data = resealed(fixture("side-alone.bin"), offset, value)
    assert refusal(data, alone()) == reason


def test_frozen_newer_and_seed_files_are_named() -> None:
    assert refusal(fixture("newer.bin")) == MissReason.NEWER_VERSION
    assert refusal(fixture("seed.bin")) == MissReason.SEED_FORM


def test_a_block_file_is_judged_by_its_path(tmp_path: Path) -> None:
    record_id, namespace = expected().record_id, DIGEST.hex()[:32]
    assert record_id is not None
    name = record_id.hex()

    def put(namespace: str, shard: str, name: str) -> Path:
        path = tmp_path / namespace / "blocks" / shard / f"{name}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fixture("plain.bin"))
        return path

    def reason(path: Path, shape: Shape = SHAPE) -> MissReason:
        with pytest.raises(Refused) as refused:
            record.verify_file(path, shape)
        return refused.value.reason

    assert record.verify_file(put(namespace, name[:2], name), SHAPE).record_id == record_id
    assert reason(put(namespace, name[:2], name[:-1] + "f")) == MissReason.FOREIGN_ID
    assert reason(put(namespace, "00", name)) == MissReason.FOREIGN_ID
    assert reason(put("0" * 32, name[:2], name)) == MissReason.FOREIGN_IDENTITY
    other = Shape(tensors=(60, 100), layers=2, block_tokens=16, dtype=2)
    assert reason(put(namespace, name[:2], name), other) == MissReason.FOREIGN_SHAPE


def test_what_belongs_to_another_is_refused() -> None:
    data, ours = fixture("plain.bin"), expected()
    assert refusal(data, Expect(bytes(16), ours.namespace, ours.part)) == MissReason.FOREIGN_ID
    assert (
        refusal(data, Expect(bytes(16), ours.namespace, Part(0, 0, 0))) == MissReason.FOREIGN_PART
    )
    assert refusal(data, Expect(bytes(16), bytes(32), Part(0, 0, 0))) == MissReason.FOREIGN_IDENTITY
    for shape in [
        Shape((100, 60), 3, 16, 2),
        Shape((100, 60), 2, 32, 2),
        Shape((100, 60), 2, 16, 1),
        Shape((160,), 2, 16, 2),
    ]:
        assert refusal(data, Expect(shape=shape)) == MissReason.FOREIGN_SHAPE


@settings(max_examples=150, deadline=None)
@given(offset=st.integers(0, 12287), mask=st.integers(1, 255))
def test_any_flipped_byte_is_refused(offset: int, mask: int) -> None:
    data = bytearray(fixture("sided.bin"))
    data[offset] ^= mask
    if offset >= 8192:  # in the side shard: a miss of that side shard only
        header = record.verify(bytes(data), expected())
        assert list(record.lost_sides(bytes(data), header)) == ["mean-k"]
        return
    reason = (
        MissReason.NOT_A_RECORD
        if offset < 4
        else MissReason.BAD_HEADER
        if offset < 4096
        else MissReason.BAD_CHECKSUM
    )
    assert refusal(bytes(data)) == reason
    if offset >= 4096:  # in the KV: the side shard is still good
        assert record.lost_sides(bytes(data), record.parse_header(bytes(data))) == {}


@settings(max_examples=100, deadline=None)
@given(length=st.integers(0, 12287))
def test_any_truncation_is_refused(length: int) -> None:
    data = fixture("sided.bin")[:length]
    if length < 8192:
        assert refusal(data) == MissReason.TRUNCATED
    else:
        assert list(record.lost_sides(data, record.verify(data, expected()))) == ["mean-k"]


def test_bytes_beyond_the_end_are_refused() -> None:
    assert refusal(fixture("plain.bin") + b"\0") == MissReason.WRONG_LENGTH


def forged(offset: int, value: bytes) -> bytes:
    """The frozen record with other header fields and correct checksums."""
    return resealed(fixture("sided.bin"), offset, value)


def resealed(frozen: bytes, offset: int, value: bytes) -> bytes:
    data = bytearray(frozen)
    data[offset : offset + len(value)] = value
    data[60:64] = record.crc32c(bytes(data[:60])).to_bytes(4, "little")
    data[4092:4096] = record.crc32c(bytes(data[:4092])).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (4, b"\2", MissReason.NEWER_VERSION),
        (4, b"\0", MissReason.BAD_HEADER),
        (40, b"\0\0", MissReason.BAD_HEADER),
        (40, b"\1", MissReason.BAD_HEADER),
        (40, b"\0\0\0\1", MissReason.BAD_HEADER),
        (44, b"\xff" * 8, MissReason.BAD_HEADER),
        (64, b"\1", MissReason.BAD_HEADER),
        (64, b"\4", MissReason.NEWER_VERSION),
        (136, b"\1", MissReason.NEWER_VERSION),
        (140, b"\0", MissReason.BAD_HEADER),
        (140, b"\xff", MissReason.BAD_HEADER),
        (152, b"\xff" * 8, MissReason.BAD_HEADER),
        (216, b"\x09", MissReason.BAD_HEADER),
        (256, b"\xff", MissReason.BAD_HEADER),
        (280, b"\1", MissReason.BAD_HEADER),
        (288, b"\xff" * 8, MissReason.BAD_HEADER),
        (576, b"\1", MissReason.BAD_HEADER),
        (600, b"\xff" * 8, MissReason.BAD_HEADER),
        (600, b"\0\x11", MissReason.FOREIGN_SHAPE),
    ],
)
def test_forged_headers_are_refused(offset: int, value: bytes, reason: MissReason) -> None:
    assert refusal(forged(offset, value)) == reason


def test_docs_and_readers_know_the_same_reasons() -> None:
    source = (REPOSITORY / "crates" / "ucm-core" / "src" / "miss.rs").read_text()
    core = re.findall(r'^        \w+ = "(\w+)",$', source, flags=re.MULTILINE)
    docs = re.findall(
        r"^\| `(\w+)` \|",
        (REPOSITORY / "docs" / "format-verify.md").read_text(),
        flags=re.MULTILINE,
    )
    assert docs == core
    assert [str(reason) for reason in MissReason] == core


def test_docs_name_the_identity_keys_in_order() -> None:
    listed = re.findall(
        r"^\d+\. `(\w+)`", (REPOSITORY / "docs" / "format.md").read_text(), flags=re.MULTILINE
    )
    assert listed == list(json.loads(IDENTITY))
