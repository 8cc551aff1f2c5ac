"""Stores that encrypt, and tags of tenants, through the public interface: the bytes on disk, and
who can read them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocks import LAYERS, PIECES, SHAPE, Memory, ids, records
from plain_cipher import Keys, find_open, parse_keys
from plain_record import Expect, Refused, Shape, crc32c, parse_header, verify

from ucm.config import load
from ucm.errors import ConfigError, InvalidInputError, TaskError
from ucm.reasons import MissReason, reason_of
from ucm.store.posix import UcmPosixStore

Open = Callable[..., UcmPosixStore]
NAMES = ids(3)
KEY, OTHER = "5a" * 32, secrets.token_hex(32)


@pytest.fixture
def opened(
    common: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_store: Open
) -> Open:
    """Opens stores with this text in their key file, None for none."""
    monkeypatch.delenv("UCM_ENCRYPTION_KEY", raising=False)
    numbers = itertools.count()

    def make(key: str | None = KEY, name: str = "UcmPosixStore", **keys: Any) -> UcmPosixStore:
        config = {**common, **SHAPE, "dtype": "bfloat16", **keys}
        if key is not None:
            file = tmp_path / f"key-{next(numbers)}"
            file.touch(0o600)
            file.write_text(key)
            config["encryption_key_file"] = str(file)
        return open_store(name, config)

    return make


def dump(store: UcmPosixStore, memory: Memory) -> None:
    store.wait(store.dump_data(NAMES, [0] * len(NAMES), memory.rows(*range(len(NAMES)))))


def comes_back(store: UcmPosixStore, memory: Memory) -> bool:
    """Each by a load of its own, because a load cancels the blocks behind its first failure."""
    target, failed = Memory(len(NAMES), fill=0), False
    for block, name in enumerate(NAMES):
        try:
            store.wait(store.load_data([name], [0], target.rows(block)))
        except TaskError:
            failed = True
    return not failed and all(memory.equals(target, block) for block in range(len(NAMES)))


@pytest.mark.parametrize(
    "keys", [{"layout": "file"}, {"layout": "segment"}, {"layout": "segment", "codec": "zstd"}]
)
def test_the_second_reader_decrypts_what_the_core_encrypted(
    opened: Open, tmp_path: Path, keys: dict[str, str]
) -> None:
    store, memory = opened(**keys), Memory(len(NAMES))
    for pieces in memory.pieces:  # compressible
        for piece in pieces:
            piece[1::2] &= 3
    dump(store, memory)
    assert comes_back(store, memory)
    store.close()
    opener = find_open()
    assert opener is not None
    reading, others = (
        Keys(parse_keys(f"{OTHER}\n{KEY} # the one\n"), opener),
        Keys(parse_keys(OTHER), opener),
    )
    found = {}
    for stored in records(tmp_path / "root"):
        data = stored.read()
        header = verify(data, Expect(shape=Shape(tuple(PIECES), LAYERS, 0, 2)))
        assert header.key_id in reading.keys
        assert verify(data, keys=reading) == verify(data, keys=others) == header
        plain = reading.decrypt(data, header)
        found[header.record_id] = plain
        for at in (header.header_len, header.record_len - 1, 700, 300):
            changed = bytearray(data)
            changed[at] ^= 1
            with pytest.raises(Refused) as refused:
                verify(forged(changed), keys=reading)
            assert refused.value.reason == MissReason.BAD_CHECKSUM
    assert sorted(found) == sorted(NAMES)
    if "codec" not in keys:
        layer = verify(found[NAMES[0]]).table[0]
        of_layer = b"".join(piece.tobytes() for piece in memory.pieces[0][: len(PIECES)])
        assert found[NAMES[0]][layer.offset : layer.offset + layer.length] == of_layer


def test_a_wrong_key_is_a_miss_with_its_reason_and_nothing_is_lost(opened: Open) -> None:
    owner, memory = opened(), Memory(len(NAMES))
    dump(owner, memory)
    for key in (OTHER, None):
        store = opened(key)
        assert not comes_back(store, memory)
        assert store.stats()["misses"]["wrong_key"] == len(NAMES)
        assert store.lookup(NAMES) == [False] * len(NAMES)
        with pytest.raises(TaskError) as failed:  # unreadable blocks are not stored
            dump(store, memory)
        reasons = {reason_of(error) for error in failed.value.failures.values()}
        assert reasons == {MissReason.WRONG_KEY}
        assert store.stats()["blocks_published"] == 0
    assert comes_back(opened(f"{OTHER}\n{KEY}"), memory)  # a key that follows another
    assert comes_back(opened(), memory)


def test_the_key_may_stand_in_the_environment(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(len(NAMES))
    monkeypatch.setenv("UCM_ENCRYPTION_KEY", KEY)
    dump(opened(None), memory)
    monkeypatch.delenv("UCM_ENCRYPTION_KEY")
    assert not comes_back(opened(None), memory)
    assert comes_back(opened(), memory)
    assert comes_back(
        opened(name="UcmPipelineStore", store_pipeline="Cache|Posix", cache_size="4MiB"), memory
    )


def test_a_key_that_is_none_is_refused_and_not_shown(opened: Open, tmp_path: Path) -> None:
    for text in ("", "# nothing", "5a", KEY + "0", "key: " + KEY):
        with pytest.raises(
            ConfigError, match=r"64 hex digits|there must be an encryption key"
        ) as refused:
            opened(text).lookup(NAMES)
        assert KEY not in str(refused.value)
    with pytest.raises(ConfigError, match="no-such-key"):
        opened(None, encryption_key_file=str(tmp_path / "no-such-key")).lookup(NAMES)
    with pytest.raises(ConfigError, match="beside the pipeline"):
        load(
            {
                "store_pipeline": [
                    "Cache",
                    {"type": "posix", "encryption_key_file": "/k", "storage_backends": "/d"},
                ]
            },
            {},
        )
    with pytest.raises(ConfigError, match="encryption_key_file"):
        load({"storage_backends": "/d", "encryption_key_fil": "/key"}, {})
    own = {
        "ucm_connector_name": "Mine",
        "ucm_connector_module_path": "mine",
        "encryption_key_file": "/key",
    }
    with pytest.raises(ConfigError, match="encrypt by itself"):
        load(own, {})


def test_the_tag_of_a_tenant_stands_in_the_header(opened: Open, tmp_path: Path) -> None:
    for key in (None, KEY):
        store, memory = (
            opened(key, storage_backends=str(tmp_path / f"root-{key}")),
            Memory(len(NAMES)),
        )
        tag = bytes(range(32))
        store.describe(NAMES[:1], tenant=tag)
        store.describe(NAMES[1:2], ordinals=[1])
        dump(store, memory)
        assert comes_back(store, memory)
        headers = [verify(stored.read()) for stored in records(tmp_path / f"root-{key}")]
        tags = {header.record_id: header.tenant for header in headers}
        assert tags == {NAMES[0]: tag, NAMES[1]: bytes(32), NAMES[2]: bytes(32)}
        with pytest.raises(InvalidInputError, match="32 bytes"):
            store.describe(NAMES, tenant=b"short")


def forged(data: bytearray) -> bytes:
    """These bytes with correct checksums, if there is still a header."""
    head = int.from_bytes(data[40:44], "little")

    def seal() -> None:
        data[60:64] = crc32c(memoryview(data)[:60]).to_bytes(4, "little")
        data[head - 4 : head] = crc32c(memoryview(data)[: head - 4]).to_bytes(4, "little")

    seal()
    header = parse_header(bytes(data))
    ends = [layer.offset for layer in header.table[1:]] + [header.kv_len]
    for number, (layer, end) in enumerate(zip(header.table, ends, strict=False)):
        at = 576 + 24 * number + 16
        data[at : at + 4] = crc32c(memoryview(data)[layer.offset : end]).to_bytes(4, "little")
    seal()
    return bytes(data)
