"""Locations of records below a root, one file each or many in one; by ``docs/format-files.md``, not
by the code under test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plain_planes import find_zstd
from plain_record import Expect, Header, Part, Refused, Shape, verify
from plain_segment import NAME, Footer, parse_footer

#: Decodes compressed records; one of the development requirements.
_ZSTD = find_zstd()
_RECORD = re.compile(r"[0-9a-f]{32}\.bin")


@dataclass(frozen=True)
class Place:
    """A copy of a record: a whole file, or ``length`` bytes of one from ``offset`` on."""

    path: Path
    record_id: bytes = b""
    offset: int = 0
    length: int | None = None

    @property
    def in_segment(self) -> bool:
        """True if the file has other records."""
        return self.length is not None

    def read(self) -> bytes:
        """Its existing bytes."""
        if self.length is None:
            return self.path.read_bytes()
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)

    def write(self, data: bytes | bytearray) -> None:
        """Overwrites it in place, as a disk or a program would: the file stays the same one."""
        if self.length is None:
            self.path.write_bytes(data)
            return
        assert len(data) == self.length, "a record in a segment keeps its length"
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            file.write(data)

    def judge(self, shape: Shape | None = None) -> Header:
        """Checks it with the second reader, as a record of the first part; raises the verdict if it
        is not a hit."""
        namespace = bytes.fromhex(self.path.parents[1 if self.in_segment else 2].name)
        return verify(
            self.read(), Expect(self.record_id, namespace, Part(0, 0, 0), shape), zstd=_ZSTD
        )

    def is_right(self, shape: Shape | None = None) -> bool:
        """True if it can be read and is a hit; anything but a plain file is not opened."""
        if self.path.is_symlink() or not self.path.is_file():
            return False
        try:
            self.judge(shape)
        except (Refused, OSError):
            return False
        return True


def files(root: Path) -> list[Path]:
    """Every file with records in it that has its name."""
    single = [path for path in root.glob("*/blocks/??/*.bin") if _RECORD.fullmatch(path.name)]
    return sorted(
        [*single, *(path for path in root.glob("*/segments/*.seg") if NAME.fullmatch(path.name))]
    )


def private_files(root: Path) -> list[Path]:
    """Every file that is being written, or was left by a dead writer."""
    return list(root.glob("*/tmp/*.tmp"))


def footers(root: Path) -> Iterator[tuple[Path, Footer]]:
    """Every segment with a valid footer."""
    for path in files(root):
        if path.suffix != ".seg" or path.is_symlink() or not path.is_file():
            continue
        try:
            data = path.read_bytes()
            footer = parse_footer(data, len(data))
        except (Refused, OSError):
            continue  # damaged, or just removed
        if footer.name == path.name and footer.namespace[:16].hex() == path.parents[1].name:
            yield path, footer


def places(root: Path) -> list[Place]:
    """Every copy of every record that a reader would find, the oldest of each record first."""
    found = [Place(path, bytes.fromhex(path.stem)) for path in files(root) if path.suffix == ".bin"]
    for path, footer in sorted(footers(root), key=lambda item: item[1].time_ns):
        found += [
            Place(path, entry.record_id, entry.offset, entry.length) for entry in footer.entries
        ]
    return found


def newest(root: Path) -> dict[bytes, Place]:
    """The newest copy of every record."""
    return {place.record_id: place for place in places(root)}
