"""Damage to one block's record or its file: each function makes one kind of damage.

The damage is made in place, as by a disk, a program or an operator. Complete but wrong records are
*forged*: fields of the header are changed and its checksums computed again, by the offsets of
``docs/format-verify.md``. Damage to a file affects all records in it.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from places import Place as Copy
from plain_record import Header, Layer, Part, Refused, crc32c, parse_header


@dataclass(frozen=True)
class Victim:
    """The damaged copy, another block's copy beside it, and a seeded source of numbers."""

    copy: Copy
    other: Copy
    random: random.Random

    @property
    def path(self) -> Path:
        """The file it lies in."""
        return self.copy.path

    def header(self) -> Header:
        """The record's own header."""
        return header_of(self.copy.read())


def header_of(data: bytes) -> Header:
    """The header of a record; for a file of another store, one with a quarter of it as header and
    the rest as shards."""
    try:
        return parse_header(data)
    except Refused:
        start, layer = len(data) // 4, len(data) // 4
        table = tuple(Layer(start + layer * n, layer, 0) for n in range(3))
        nothing = dict.fromkeys(
            ("block_tokens", "dtype", "ordinal", "tokens", "time_ns", "writer", "tensors", "shape"),
            0,
        )
        return Header(
            **nothing,
            version=1,
            record_id=bytes(16),
            parent=bytes(16),
            namespace=bytes(32),
            part=Part(0, 0, 0),
            tag=bytes(32),
            layers=3,
            header_len=start,
            record_len=len(data),
            raw_len=3 * layer,
            stored_len=len(data) - start,
            layer_len=layer,
            table=table,
            sides=(),
        )


Harm = Callable[[Victim], None]
#: A place in a record, which may depend on its sizes.
Place = int | Callable[[Header], int]


def _at(place: Place, header: Header) -> int:
    return place if isinstance(place, int) else place(header)


def _edit(victim: Victim, change: Callable[[bytearray, Header], bytes | bytearray]) -> None:
    data = bytearray(victim.copy.read())
    victim.copy.write(change(data, header_of(bytes(data))))


def flip(place: Place) -> Harm:
    """One bit of one byte."""

    def harm(victim: Victim) -> None:
        def change(data: bytearray, header: Header) -> bytearray:
            data[_at(place, header) % len(data)] ^= 1 << victim.random.randrange(8)
            return data

        _edit(victim, change)

    return harm


def flip_anywhere(victim: Victim) -> None:
    """One bit of one byte anywhere behind the magic."""
    flip(lambda header: victim.random.randrange(4, header.record_len))(victim)


def noise(start: Place, length: int) -> Harm:
    """A burst of other bytes."""

    def harm(victim: Victim) -> None:
        def change(data: bytearray, header: Header) -> bytearray:
            at = _at(start, header)
            for place in range(at, min(at + length, len(data))):
                data[place] ^= victim.random.randrange(1, 256)
            return data

        _edit(victim, change)

    return harm


def zero(start: Place, end: Place) -> Harm:
    """Zeros, as after a lost write."""

    def harm(victim: Victim) -> None:
        def change(data: bytearray, header: Header) -> bytearray:
            first, last = _at(start, header), _at(end, header)
            data[first:last] = bytes(last - first)
            return data

        _edit(victim, change)

    return harm


def truncate(length: Place) -> Harm:
    """The first bytes only."""
    return lambda victim: os.truncate(
        victim.path, victim.copy.offset + _at(length, victim.header())
    )


def truncate_share(share: float) -> Harm:
    """The first bytes only, a share of all."""
    return truncate(lambda header: int(header.record_len * share))


def lengthen(more: int) -> Harm:
    """Extra bytes behind the record."""

    def harm(victim: Victim) -> None:
        with victim.path.open("ab") as file:
            file.write(bytes(more))

    return harm


def swap(victim: Victim) -> None:
    """Swaps the files of two blocks, or their records."""
    if victim.copy.in_segment:
        one, other = victim.copy.read(), victim.other.read()
        victim.copy.write(other)
        victim.other.write(one)
        return
    aside = victim.path.with_suffix(".aside")
    victim.path.rename(aside)
    victim.other.path.rename(victim.path)
    aside.rename(victim.other.path)


def copy_other(victim: Victim) -> None:
    """Another block's record under this block's name."""
    victim.copy.write(victim.other.read())


def forge(*fields: tuple[int, bytes]) -> Harm:
    """Other values at these offsets of the header, with correct checksums."""

    def harm(victim: Victim) -> None:
        def change(data: bytearray, header: Header) -> bytearray:
            for offset, value in fields:
                data[offset : offset + len(value)] = value
            return _sealed(data, header)

        _edit(victim, change)

    return harm


def _sealed(data: bytearray, header: Header) -> bytearray:
    struct.pack_into("<I", data, 60, crc32c(bytes(data[:60])))
    end = header.header_len - 4
    struct.pack_into("<I", data, end, crc32c(bytes(data[:end])))
    return data


def forge_frame(victim: Victim) -> None:
    """The last frame of the first compressed layer with noise in it, with correct checksums."""

    def change(data: bytearray, header: Header) -> bytearray:
        first, second = header.table[:2]
        for place in range(first.offset + first.length - 64, first.offset + first.length):
            data[place] ^= victim.random.randrange(1, 256)
        struct.pack_into("<I", data, 576 + 16, crc32c(bytes(data[first.offset : second.offset])))
        return _sealed(data, header)

    _edit(victim, change)


def forge_part(victim: Victim) -> None:
    """The same block's record of another tensor rank: its id is masked by its part."""
    header = victim.header()
    other = type(header.part)(
        header.part.group, header.part.pipeline_rank, header.part.tensor_rank + 1
    )
    record_id = bytes(a ^ b for a, b in zip(header.block_key, other.mask(), strict=True))
    forge((8, record_id), (128, struct.pack("<I", other.tensor_rank)))(victim)


def newer_and_longer(victim: Victim) -> None:
    """A record of a later version, with another form and more space."""
    forge((4, struct.pack("<I", 2)))(victim)
    lengthen(4096)(victim)


def seed_form(victim: Victim) -> None:
    """A block file in the original's format: 64 bytes of header with an empty second half, then
    bare KV."""

    def change(data: bytearray, header: Header) -> bytes:
        head = struct.pack(
            "<4sI16sIII", b"UCMB", 1, header.record_id, header.layers, header.block_tokens, 0
        )
        return head.ljust(64, b"\0") + victim.random.randbytes(len(data) - 64)

    _edit(victim, change)


def stranger(victim: Victim) -> None:
    """A file of another program, accidentally of this length, renamed to the block's name."""
    about = json.dumps(
        {"model.embed_tokens.weight": {"dtype": "F32", "shape": [512, 128]}}
    ).encode()

    def change(data: bytearray, _header: Header) -> bytes:
        return (struct.pack("<Q", len(about)) + about).ljust(len(data), b"\x7f")

    _edit(victim, change)


def directory(victim: Victim) -> None:
    """A directory under the block's name, with a file in it."""
    victim.path.unlink()
    victim.path.mkdir()
    (victim.path / "note").write_text("not ours")


def symlink_to_other(victim: Victim) -> None:
    """A link to another block's record, or to the segment itself under another name: the length is
    right."""
    if victim.copy.in_segment:
        aside = victim.path.with_suffix(".aside")
        victim.path.rename(aside)
        victim.path.symlink_to(aside)
        return
    victim.path.unlink()
    victim.path.symlink_to(victim.other.path)


def symlink_to_nothing(victim: Victim) -> None:
    """A link to a name that does not exist."""
    victim.path.unlink()
    victim.path.symlink_to(victim.path.with_name("nothing"))


def fifo(victim: Victim) -> None:
    """A pipe without a writer: a plain open of it waits for ever."""
    victim.path.unlink()
    os.mkfifo(victim.path)


def remove(victim: Victim) -> None:
    """The file is removed."""
    victim.path.unlink()


def set_times(year: int) -> Harm:
    """Times of the file in that year."""
    seconds = (year - 1970) * 31_557_600
    return lambda victim: os.utime(victim.path, (seconds, seconds))
