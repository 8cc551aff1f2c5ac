"""SHA-256 digests of files: of the content, of samples, or remembered while the file's metadata is
unchanged."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ucm._core import QuietSha256
from ucm.errors import UcmError
from ucm.integration.vllm.connector.root_file import RootFile

#: Bytes hashed in one call: large enough that the hash, not the call, is what costs.
CHUNK = 4 << 20

#: A file whose ctime is younger than this may change again within the same tick: its digest is not
#: used.
SETTLED_NS = 2_000_000_000

#: Name of the file below a store's root in which digests are remembered, and how many it holds at
#: most.
MEMORY_NAME = "ucm-digests.json"
MEMORY_LIMIT = 4096

#: Samples of a file, spread evenly, the first and the last bytes among them.
SAMPLES, SAMPLE_BYTES = 64, 65536


class FileChangedError(UcmError):
    """A file was written or replaced while it was being read."""

    kind, retryable = "io", True


@dataclass(frozen=True)
class FileStamp:
    """What changes when a file does."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileStamp:
        """From a stat of the file (links followed)."""
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def hash_file(
    path: str, sampled: bool = False, progress: Callable[[int], None] | None = None
) -> tuple[bytes, FileStamp]:
    """SHA-256 of a file's content, or of its samples, and the stamp it had all the while.

    Hashed by threads of the core, of the lowest priority: a thread of Python must keep its own, for
    one that has the interpreter and no processor holds up the engine, on a busy machine for a
    second.

    ``progress`` is told the bytes of each piece read. Raises :class:`FileChangedError` and
    :class:`OSError`.
    """
    with open(path, "rb", buffering=0) as file:
        before = FileStamp.of(os.fstat(file.fileno()))
        digest = QuietSha256()
        for start, length in _sample_ranges(before.size) if sampled else [(0, before.size)]:
            _feed(digest, file, start, length, progress)
        after = FileStamp.of(os.fstat(file.fileno()))
    if not before == after == FileStamp.of(os.stat(path)):
        raise FileChangedError("the file changed while it was being read", context={"path": path})
    return digest.digest(), before


def _sample_ranges(size: int) -> Iterable[tuple[int, int]]:
    if size <= SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    last = size - SAMPLE_BYTES
    return [(last * i // (SAMPLES - 1), SAMPLE_BYTES) for i in range(SAMPLES)]


def _feed(
    digest: QuietSha256, file: Any, start: int, length: int, progress: Callable[[int], None] | None
) -> None:
    end = start + length
    while start < end:
        got = digest.update(file.fileno(), start, min(end - start, CHUNK))
        if not got:
            raise FileChangedError(
                "the file became shorter while it was being read", context={"path": file.name}
            )
        start += got
        if progress is not None:
            progress(got)


def combined(label: bytes, files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """SHA-256 over the sorted (name, size in bytes, digest) of several files; ``label`` says what
    they are."""
    digest = hashlib.sha256(label)
    for name, size, content in sorted(files):
        encoded = name.encode("utf-8", "surrogateescape")
        digest.update(struct.pack("<I", len(encoded)) + encoded + struct.pack("<Q", size) + content)
    return digest.digest()


class DigestMemory:
    """Digests remembered in one small JSON file, by path, inode, size, mtime and ctime.

    Losing it, or an entry to another process that writes at the same time, costs a hash and nothing
    else.
    """

    def __init__(self, root: str | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._file = (
            RootFile(root, MEMORY_NAME, "files", MEMORY_LIMIT) if root is not None else None
        )
        self._now_ns = now_ns
        self._known = {} if self._file is None else self._file.read_soon()
        self._new: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def settled(self, stamp: FileStamp) -> bool:
        """Whether a file with this stamp could not have been written again without a new ctime.

        A ctime in whole seconds is coarse or made up by a read-only image, and says too little.
        """
        return stamp.ctime_ns + SETTLED_NS <= self._now_ns() and stamp.ctime_ns % 1_000_000_000 != 0

    def recall(self, path: str, stamp: FileStamp) -> bytes | None:
        """The content digest of a file with this stamp, when it is known for sure."""
        entry = self._known.get(os.path.abspath(path))
        if entry is None or not self.settled(stamp) or entry.get("stamp") != _numbers(stamp):
            return None
        try:
            digest = bytes.fromhex(entry["sha256"])
        except (KeyError, TypeError, ValueError):
            return None
        return digest if len(digest) == 32 else None

    def learn(self, path: str, stamp: FileStamp, digest: bytes, started_ns: int) -> None:
        """Remember a digest whose computation began at ``started_ns``; a file too young then is not
        remembered."""
        if stamp.ctime_ns + SETTLED_NS <= started_ns and self.settled(stamp):
            with self._lock:
                self._new[os.path.abspath(path)] = {
                    "sha256": digest.hex(),
                    "stamp": _numbers(stamp),
                }

    def save(self) -> None:
        """Write what was learnt, together with what others wrote meanwhile. Raises
        :class:`OSError`.

        Kept for the next call while the root is not marked or does not answer.
        """
        with self._lock:
            if self._file is None or not self._new:
                return
            new = dict(self._new)
        known = self._file.merge_soon(new)
        if known is None:
            return
        with self._lock:
            self._known, self._new = (
                known,
                {path: it for path, it in self._new.items() if new.get(path) != it},
            )


def _numbers(stamp: FileStamp) -> list[int]:
    return [stamp.inode, stamp.size, stamp.mtime_ns, stamp.ctime_ns]
