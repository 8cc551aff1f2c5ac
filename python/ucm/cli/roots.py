"""A root as the command line sees it: opened once, walked without following links, never left.

Everything goes through descriptors of directories that were checked when they were opened: not a
link, on the same device as the root. So what is removed or renamed lies below the root that was
marked, also when somebody exchanges directories meanwhile. Names are taken by the patterns of
``docs/format.md``; everything else is foreign and is only counted.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ucm.errors import ConfigError, ForeignError, StoreIOError
from ucm.reasons import MissReason
from ucm.store import segment

FORMAT = 1
MARKER = "ucm-root.json"
DIGESTS = "ucm-digests.json"
RATES = "ucm-rates.json"
MANIFEST = "manifest.json"
QUARANTINE = "quarantine"
#: Where the writers of a root agree who counts it and who may write how much; theirs alone.
SPACE = "space"
#: Most quarantined records below a root, most bytes of them, and the part of the limit that they
#: may take.
QUARANTINE_MOST, QUARANTINE_BYTES, QUARANTINE_SHARE = 64, 256 << 20, 16
#: Share of the limit down to which the collector removes.
LOW = 0.85
#: Nanoseconds after which a private file is taken for that of a dead writer.
STALE_NS = 3600 * 10**9
_LONGEST_DOCUMENT = 16 << 20

NAMESPACE = re.compile(r"[0-9a-f]{32}")
PRIVATE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.tmp")
SPACE_DOCUMENT = re.compile(r"(collector|grants|writer)-[0-9a-f]{16}\.json")
ROOT_PRIVATE = re.compile(r"\.[0-9a-f]{32}\.tmp")
#: Reasons that are damage, of which evidence is kept; what is whole but belongs elsewhere is not.
DAMAGE = frozenset(
    {
        MissReason.WRONG_LENGTH,
        MissReason.TRUNCATED,
        MissReason.NOT_A_RECORD,
        MissReason.BAD_HEADER,
        MissReason.BAD_CHECKSUM,
    }
)
#: Directory of a namespace's segments.
SEGMENTS = "segments"
QUARANTINED = re.compile(rf"[0-9a-f]{{32}}\.(?:{'|'.join(sorted(DAMAGE))})\.[0-9]{{1,20}}\.bin")
_SHARD = re.compile(r"[0-9a-f]{2}")


class Kind(StrEnum):
    """What a file of ours is."""

    RECORD = "record"
    SEGMENT = "segment"
    PRIVATE = "private"
    QUARANTINED = "quarantined"
    SPACE = "space"


@dataclass(frozen=True, slots=True)
class Found:
    """A file of ours: where below the root, its bytes, its times (ns since 1970), its inode."""

    kind: Kind
    directory: tuple[str, ...]
    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @property
    def path(self) -> str:
        """The path below the root."""
        return "/".join((*self.directory, self.name))

    @property
    def namespace(self) -> str:
        """The namespace it lies in, empty for what lies beside the namespaces."""
        return (
            self.directory[0] if self.directory and NAMESPACE.fullmatch(self.directory[0]) else ""
        )

    def is_still(self, now: os.stat_result) -> bool:
        """Whether this is the same file, not used since."""
        return (now.st_ino, now.st_mtime_ns) == (self.inode, self.mtime_ns) and stat.S_ISREG(
            now.st_mode
        )


@dataclass(frozen=True, slots=True)
class Foreign:
    """Something that is not ours: where below the root, what it is, its bytes if it is a file."""

    path: str
    what: str
    size: int


@dataclass
class Contents:
    """What lies in a namespace, or beside the namespaces (private files and the documents of the
    writers)."""

    records: list[Found] = field(default_factory=list)
    segments: list[Found] = field(default_factory=list)
    private: list[Found] = field(default_factory=list)
    quarantined: list[Found] = field(default_factory=list)
    space: list[Found] = field(default_factory=list)
    foreign: list[Foreign] = field(default_factory=list)

    @property
    def files(self) -> list[Found]:
        """Everything that counts as use."""
        return [*self.records, *self.segments, *self.private, *self.quarantined]


class Root:
    """A marked directory, held open. A context manager.

    Raises :class:`~ucm.errors.ConfigError` when the directory is none or has no marker that can be
    read, and :class:`~ucm.errors.ForeignError` when a newer version made it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(path))
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{self.path} is no directory; give the directory that storage_backends names"
            ) from None
        try:
            self._device = os.fstat(self._fd).st_dev
            self.marker = self._read_marker()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Root:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def shown(self) -> str:
        """What it is called."""
        return str(self.path)

    @property
    def uuid(self) -> str:
        """The root's own number, 32 hex digits."""
        return str(self.marker["uuid"])

    @property
    def limit(self) -> int:
        """The limit that the marker keeps, in bytes."""
        return int(self.marker["storage_capacity"])

    @property
    def layout(self) -> dict[str, Any] | None:
        """What the marker says of the layout that was decided on; None: nothing was."""
        kept = self.marker.get("layout")
        return kept if isinstance(kept, dict) else None

    def file_system(self) -> tuple[int | None, int | None]:
        """Bytes of the file system, and those that are free to us."""
        found = os.fstatvfs(self._fd)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def check(self) -> None:
        """Raises :class:`~ucm.errors.StoreIOError` if the path does not lead to this marked root
        any more."""
        try:
            now, mine = os.stat(self.path), os.fstat(self._fd)
            same = (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino) and self._read_marker()[
                "uuid"
            ] == self.uuid
        except (OSError, ConfigError, ForeignError):
            same = False
        if not same:
            raise StoreIOError(
                f"{self.path} is not the root any more that was opened (removed, unmounted, or"
                " another marker); stopped"
            )

    def namespaces(self) -> list[str]:
        """Names of the namespaces, sorted."""
        with self.directory() as here:
            return sorted(
                entry.name
                for entry in _entries(here)
                if NAMESPACE.fullmatch(entry.name) and self._kind(entry)[0] == "directory"
            )

    def beside(self) -> Contents:
        """What lies in the root beside marker and namespaces."""
        contents = Contents()
        with self.directory() as here:
            for entry in _entries(here):
                what, about = self._kind(entry)
                if what == "gone" or entry.name in (MARKER, DIGESTS, RATES):
                    continue
                if what == "file" and about and ROOT_PRIVATE.fullmatch(entry.name):
                    contents.private.append(_found(Kind.PRIVATE, (), entry.name, about))
                elif what == "directory" and entry.name == SPACE:
                    into = (
                        (Kind.SPACE, SPACE_DOCUMENT, contents.space),
                        (Kind.PRIVATE, PRIVATE, contents.private),
                    )
                    self._scan_files((SPACE,), into, contents.foreign)
                elif what != "directory" or not NAMESPACE.fullmatch(entry.name):
                    contents.foreign.append(_foreign((), entry.name, what, about))
        return contents

    def scan(self, namespace: str) -> Contents:
        """What lies in a namespace; what vanishes meanwhile is left out."""
        contents = Contents()
        places = {
            SEGMENTS: (Kind.SEGMENT, segment.NAME, contents.segments),
            "tmp": (Kind.PRIVATE, PRIVATE, contents.private),
            QUARANTINE: (Kind.QUARANTINED, QUARANTINED, contents.quarantined),
        }
        with self.directory(namespace) as here:
            for entry in _entries(here):
                what, about = self._kind(entry)
                if what == "directory" and entry.name == "blocks":
                    self._scan_blocks(namespace, contents)
                elif what == "directory" and entry.name in places:
                    self._scan_files(
                        (namespace, entry.name), (places[entry.name],), contents.foreign
                    )
                elif what != "gone" and (what != "file" or entry.name != MANIFEST):
                    contents.foreign.append(_foreign((namespace,), entry.name, what, about))
        return contents

    def _scan_blocks(self, namespace: str, contents: Contents) -> None:
        with self.directory(namespace, "blocks") as here:
            for entry in _entries(here):
                what, about = self._kind(entry)
                if what == "directory" and _SHARD.fullmatch(entry.name):
                    pattern = re.compile(rf"{entry.name}[0-9a-f]{{30}}\.bin")
                    where = (namespace, "blocks", entry.name)
                    self._scan_files(
                        where, ((Kind.RECORD, pattern, contents.records),), contents.foreign
                    )
                elif what != "gone":
                    contents.foreign.append(
                        _foreign((namespace, "blocks"), entry.name, what, about)
                    )

    def _scan_files(
        self,
        where: tuple[str, ...],
        ours: Iterable[tuple[Kind, re.Pattern[str], list[Found]]],
        foreign: list[Foreign],
    ) -> None:
        with self.directory(*where) as here:
            for entry in _entries(here):
                what, about = self._kind(entry)
                fits = [
                    (kind, into) for kind, pattern, into in ours if pattern.fullmatch(entry.name)
                ]
                if fits and what == "file" and about:
                    kind, into = fits[0]
                    into.append(_found(kind, where, entry.name, about))
                elif what != "gone":
                    foreign.append(_foreign(where, entry.name, what, about))

    @contextmanager
    def directory(self, *names: str) -> Iterator[int | None]:
        """A descriptor of a directory below the root; ``None`` if there is none, or a link, or
        another device's."""
        fd: int | None = os.dup(self._fd)
        try:
            for name in names:
                assert fd is not None
                upper, fd = fd, None
                try:
                    fd = os.open(
                        name,
                        os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                        dir_fd=upper,
                    )
                except (FileNotFoundError, NotADirectoryError):  # Linux says ENOTDIR of a link, too
                    break
                except OSError as error:
                    raise OSError(
                        error.errno, error.strerror, str(self.path.joinpath(*names))
                    ) from None
                finally:
                    os.close(upper)
                if os.fstat(fd).st_dev != self._device:
                    os.close(fd)
                    fd = None
                    break
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def document(self, *path: str) -> Any:
        """A JSON document below the root, ``None`` if it is absent; raises :class:`ValueError` if
        it is none."""
        with self.directory(*path[:-1]) as here:
            if here is None:
                return None
            try:
                fd = os.open(
                    path[-1],
                    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                    dir_fd=here,
                )
            except FileNotFoundError:
                return None
            with os.fdopen(fd, "rb") as file:
                text = file.read(_LONGEST_DOCUMENT + 1)
        if len(text) > _LONGEST_DOCUMENT:
            raise ValueError(f"more than {_LONGEST_DOCUMENT} bytes")
        return json.loads(text)

    def unlink(self, found: Found) -> bool:
        """Removes a file found before; false if it is gone, or was used or replaced since."""
        with self.directory(*found.directory) as here:
            if here is None:
                return False
            try:
                if not found.is_still(os.stat(found.name, dir_fd=here, follow_symlinks=False)):
                    return False
                os.unlink(found.name, dir_fd=here)
            except FileNotFoundError:
                return False
        return True

    def quarantine(self, found: Found, inode: int, name: str) -> bool:
        """Moves a record into its namespace's quarantine under ``name``; false if it is gone or was
        replaced."""
        with self.directory(found.namespace) as above:
            if above is None:
                return False
            with suppress(FileExistsError):
                os.mkdir(QUARANTINE, stat.S_IMODE(os.fstat(above).st_mode), dir_fd=above)
        with (
            self.directory(*found.directory) as here,
            self.directory(found.namespace, QUARANTINE) as there,
        ):
            if here is None or there is None:
                return False
            try:
                if os.stat(found.name, dir_fd=here, follow_symlinks=False).st_ino != inode:
                    return False
                os.rename(found.name, name, src_dir_fd=here, dst_dir_fd=there)
            except FileNotFoundError:
                return False
            if os.stat(name, dir_fd=there, follow_symlinks=False).st_ino == inode:
                return True
            # Replaced between the two calls: what was moved is a newer record, and goes back where
            # nothing lies yet.
            with suppress(FileExistsError):
                os.link(name, found.name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
            os.unlink(name, dir_fd=there)
            return False

    def written_ns(self, namespace: str) -> int:
        """When somebody last began or ended to write a record of a namespace; 0 if no one can."""
        with self.directory(namespace, "tmp") as here:
            return 0 if here is None else os.fstat(here).st_mtime_ns

    def remove_namespace(self, namespace: str) -> bool:
        """Removes what is left of a namespace without files: its directories, then its manifest,
        then itself.

        False if something still lies there, which then stays, with the manifest that explains it.
        """
        with self.directory(namespace, "blocks") as blocks:
            for entry in _entries(blocks):
                if _SHARD.fullmatch(entry.name):
                    _remove_empty(entry.name, blocks)
        with self.directory(namespace) as here:
            for name in ("blocks", SEGMENTS, "tmp", QUARANTINE):
                _remove_empty(name, here)
            left = [entry.name for entry in _entries(here)]
            if here is None or left not in ([], [MANIFEST]):
                return False
            if left:
                os.unlink(MANIFEST, dir_fd=here)
        with self.directory() as here:
            return _remove_empty(namespace, here)

    def _read_marker(self) -> dict[str, Any]:
        try:
            marker = self.document(MARKER)
        except ValueError:
            raise ConfigError(
                f"{self.path / MARKER} is damaged; restore it, or use another directory"
            ) from None
        if marker is None:
            hint = ""
            if NAMESPACE.fullmatch(self.path.name) and (self.path.parent / MARKER).exists():
                hint = f"; it is a namespace of the root {self.path.parent}"
            raise ConfigError(
                f"{self.path} is no root of ucm: it has no {MARKER}, so nothing in it is"
                f" touched{hint}"
            )
        if not isinstance(marker, dict) or not isinstance(marker.get("format"), int):
            raise ConfigError(
                f"{self.path / MARKER} is damaged; restore it, or use another directory"
            )
        if marker["format"] > FORMAT:
            raise ForeignError(
                f"{self.path} was made by a newer ucm (format {marker['format']}, known is"
                f" {FORMAT}); upgrade ucm"
            )
        if not isinstance(marker.get("uuid"), str) or not isinstance(
            marker.get("storage_capacity"), int
        ):
            raise ConfigError(
                f"{self.path / MARKER} is damaged; restore it, or use another directory"
            )
        return marker

    def _kind(self, entry: os.DirEntry[str]) -> tuple[str, os.stat_result | None]:
        try:
            about = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return "gone", None
        if stat.S_ISLNK(about.st_mode):
            return "link", about
        if about.st_dev != self._device:
            return "other device", about
        if stat.S_ISDIR(about.st_mode):
            return "directory", about
        return ("file" if stat.S_ISREG(about.st_mode) else "special file"), about


def _entries(directory: int | None) -> list[os.DirEntry[str]]:
    if directory is None:
        return []
    with os.scandir(directory) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _found(kind: Kind, directory: tuple[str, ...], name: str, about: os.stat_result) -> Found:
    return Found(
        kind, directory, name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino
    )


def _foreign(
    directory: tuple[str, ...], name: str, what: str, about: os.stat_result | None
) -> Foreign:
    size = about.st_size if about is not None and what == "file" else 0
    return Foreign("/".join((*directory, name)), what, size)


def _remove_empty(name: str, directory: int | None) -> bool:
    if directory is None:
        return False
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError:  # something lies in it, or it is no directory
        return False
    return True
