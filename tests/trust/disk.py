"""A local file system with a faulty disk: an ext4 in a file on the matrix's own file system
(``fuse.py``).

Only I/O past the page cache reaches the disk; names and most metadata are in the kernel's memory.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import roots

SIZE = 64 << 20


class Disk:
    """The file system in ``image``, mounted; a context manager that unmounts it."""

    def __init__(self, image: Path, mount_point: Path, size: int = SIZE) -> None:
        self.mount_point = mount_point
        make(image, size)
        mount_point.mkdir(exist_ok=True)
        roots.mount("-o", "loop", image, mount_point)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        subprocess.run(["umount", str(self.mount_point)], check=kind is None)


def make(image: Path, size: int) -> None:
    """An empty ext4 in a file of its own."""
    with image.open("wb") as file:
        file.truncate(size)
    words = [
        "mkfs.ext4",
        "-q",
        "-F",
        "-b",
        "4096",
        "-J",
        "size=4",
        "-E",
        "lazy_itable_init=1,nodiscard",
        str(image),
    ]
    subprocess.run(words, check=True, capture_output=True)
