"""What the demo may know of the store: its block files on disk, their sizes and their bytes."""

from __future__ import annotations

import hashlib
import pathlib

#: A record's header takes the first page, the keys and values follow.
HEADER_BYTES = 4096


class StoreFiles:
    """A look at all block files of one root at one moment: ``<namespace>/blocks/<hh>/<32 hex>.bin``."""

    def __init__(self, root: pathlib.Path) -> None:
        self.digests = {path: _digest(path) for path in sorted(root.glob("*/blocks/*/*.bin"))}
        self.sizes = {path: path.stat().st_size for path in self.digests}

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def block_bytes(self) -> int:
        """Size of one block file; all blocks of the demo have the same."""
        return max(self.sizes.values(), default=0)

    def written_since(self, before: StoreFiles) -> int:
        """Bytes in files that are new or have other contents than ``before``."""
        return sum(size for path, size in self.sizes.items() if before.digests.get(path) != self.digests[path])


def flip_byte(path: pathlib.Path) -> None:
    """Change one byte in the middle of the keys and values of a block, as a failing disk would."""
    contents = bytearray(path.read_bytes())
    contents[(HEADER_BYTES + len(contents)) // 2] ^= 0x40
    with path.open("r+b") as file:  # in place: the same file, the same length
        file.write(contents)


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
