"""What the demo knows of the store: its block files, their bytes, and the verdict on each."""

from __future__ import annotations

import hashlib
import pathlib

from ucm.cli.inspect import inspect_file


class StoreFiles:
    """A look at all block files of one root at one moment: ``<namespace>/blocks/<hh>/<32
    hex>.bin``."""

    def __init__(self, root: pathlib.Path) -> None:
        self.digests = {path: _digest(path) for path in sorted(root.glob("*/blocks/*/*.bin"))}
        self.sizes = {path: path.stat().st_size for path in self.digests}

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def block_bytes(self) -> int:
        """Size of one block file; all blocks of the demo have the same."""
        return max(self.sizes.values(), default=0)

    def chain(self) -> list[pathlib.Path]:
        """The files in the order of their blocks in the prompt, as their headers say it."""
        return sorted(self.digests, key=lambda path: inspect_file(str(path))["header"]["ordinal"])

    def written_since(self, before: StoreFiles) -> int:
        """Bytes in files that are new or have other contents than ``before``."""
        return sum(
            size
            for path, size in self.sizes.items()
            if before.digests.get(path) != self.digests[path]
        )


def flip_byte(path: pathlib.Path) -> None:
    """Change one byte in the middle of the keys and values of a block, as a failing disk would."""
    header_len = inspect_file(str(path))["header"]["header_bytes"]
    with path.open("r+b") as file:  # in place: the same file, the same length
        file.seek((header_len + path.stat().st_size) // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))


def verdict(path: pathlib.Path) -> str:
    """``good``, or why the record in this file is refused."""
    return inspect_file(str(path))["reason"] or "good"


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
