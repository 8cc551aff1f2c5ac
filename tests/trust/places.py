"""Where records lie below a root: in a file each, or many in one; by ``docs/format.md``, not by the
code under test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plain_planes import find_zstd
from plain_record import Expect, Header, Part, Refused, Shape, verify
from plain_segment import NAME, Footer, parse_footer

#: Decodes what is compressed; one of the development requirements.
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
        """Whether other records lie in the file."""
        return self.length is not None

    def read(self) -> bytes:
        """Its bytes; as many as there are."""
        if self.length is None:
            return self.path.read_bytes()
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)

    def write(self, data: bytes | bytearray) -> None:
        """Other bytes in its place, as a disk or a program would put them there: the file stays the
        same one."""
        if self.length is None:
            self.path.write_bytes(data)
            return
        assert len(data) == self.length, "a record in a segment keeps its length"
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            file.write(data)

    def judge(self, shape: Shape | None = None) -> Header:
        """The second reader's word on it, as a record of the first part; raises its verdict when
        that is not a hit."""
        namespace = bytes.fromhex(self.path.parents[1 if self.in_segment else 2].name)
        return verify(
            self.read(), Expect(self.record_id, namespace, Part(0, 0, 0), shape), zstd=_ZSTD
        )

    def is_right(self, shape: Shape | None = None) -> bool:
        """Whether it can be read and is a hit; what is no plain file is not opened."""
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
    """Every file that is being written, or that somebody left who died meanwhile."""
    return list(root.glob("*/tmp/*.tmp"))


def footers(root: Path) -> Iterator[tuple[Path, Footer]]:
    """Every segment whose footer can be believed."""
    for path in files(root):
        if path.suffix != ".seg" or path.is_symlink() or not path.is_file():
            continue
        try:
            data = path.read_bytes()
            footer = parse_footer(data, len(data))
        except (Refused, OSError):
            continue  # damaged, or removed meanwhile
        if footer.name == path.name and footer.namespace[:16].hex() == path.parents[1].name:
            yield path, footer


def places(root: Path) -> list[Place]:
    """Every copy of every record that a reader would find, the oldest of one record first."""
    found = [Place(path, bytes.fromhex(path.stem)) for path in files(root) if path.suffix == ".bin"]
    for path, footer in sorted(footers(root), key=lambda item: item[1].time_ns):
        found += [
            Place(path, entry.record_id, entry.offset, entry.length) for entry in footer.entries
        ]
    return found


def newest(root: Path) -> dict[bytes, Place]:
    """The copy of every record that counts."""
    return {place.record_id: place for place in places(root)}
