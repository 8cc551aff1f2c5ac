"""Ways to damage a record on disk, with the expected verdict of the tools."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from plain_record import crc32c

Damage = Callable[[Path], None]


def rewrite(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
    """Changes a file's bytes in place; its time of use stays."""
    before = path.stat()
    path.write_bytes(change(bytearray(path.read_bytes())))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(at: int) -> Damage:
    def change(data: bytearray) -> bytearray:
        data[at] ^= 0x10
        return data

    return lambda path: rewrite(path, change)


def newer(path: Path) -> None:
    def change(data: bytearray) -> bytearray:
        struct.pack_into("<I", data, 4, 2)
        struct.pack_into("<I", data, 60, crc32c(bytes(data[:60])))
        return data

    rewrite(path, change)


def seed_form(path: Path) -> None:
    rewrite(path, lambda data: bytes(data[:36]) + bytes(28) + bytes(data[64:]))


#: Name -> (the change of the file, the reason of the refusal).
DAMAGES: dict[str, tuple[Damage, str]] = {
    "magic": (flip(0), "not_a_record"),
    "preamble": (flip(9), "bad_header"),
    "header": (flip(100), "bad_header"),
    "table": (flip(580), "bad_header"),
    "padding of the header": (flip(4000), "bad_header"),
    "payload": (flip(4096 + 7), "bad_checksum"),
    "last layer": (flip(4096 + 6144 * 2 + 9), "bad_checksum"),
    "padding of the payload": (flip(4096 + 20479), "bad_checksum"),
    "a hole": (
        lambda path: rewrite(path, lambda data: data[:8192] + bytes(4096) + data[12288:]),
        "bad_checksum",
    ),
    "zeroed": (lambda path: rewrite(path, lambda data: bytes(len(data))), "not_a_record"),
    "empty": (lambda path: rewrite(path, lambda data: b""), "truncated"),
    "truncated in the preamble": (lambda path: rewrite(path, lambda data: data[:50]), "truncated"),
    "truncated in the header": (lambda path: rewrite(path, lambda data: data[:3000]), "truncated"),
    "truncated in the payload": (lambda path: rewrite(path, lambda data: data[:9000]), "truncated"),
    "a byte longer": (lambda path: rewrite(path, lambda data: data + b"x"), "wrong_length"),
    "twice as long": (lambda path: rewrite(path, lambda data: data + data), "wrong_length"),
    "seed form": (seed_form, "seed_form"),
}
