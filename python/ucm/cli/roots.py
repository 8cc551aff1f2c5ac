"""Roots as the command line sees them: a directory, or what lies on a server or in a bucket.

:class:`Root` is a directory, opened once, walked without following links, never left. Everything
goes through descriptors of directories that were checked when they were opened: no link, and on the
same device as the root. So what is removed lies below the root that was marked, also when
directories are exchanged at the same time. Names are compared with the patterns of
``docs/format-files.md``; everything else is foreign and is only counted.

:class:`RemoteRoot` is the same for a server or a bucket, through the compiled core: everything is
listed once, under the path that it would have below a root.

The original's own form is a file ``blocks/<hh>/<32 hex>.bin`` that begins with 64 bytes of ``UCMB``
and no checksum (``seed_form`` in ``docs/format-verify.md``). :func:`foreigners` finds these below
foreign directories, up to a bound.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import click

from ucm._core import Place, read_header
from ucm.cli import terminal
from ucm.errors import ConfigError, ForeignError, StoreIOError, UcmError
from ucm.reasons import MissReason

FORMAT = 1
MARKER = "ucm-root.json"
MANIFEST = "manifest.json"
#: Share of the limit down to which the collector removes.
LOW = 0.85
#: Nanoseconds after which a private file is taken for that of a dead writer.
STALE_NS = 3600 * 10**9
_LONGEST_DOCUMENT = 16 << 20
#: Bytes of a page, at which direct reads begin.
PAGE = 4096
#: The file system refuses direct I/O.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)

NAMESPACE = re.compile(r"[0-9a-f]{32}")


class Kind(StrEnum):
    """What a file of ours is: a field of :class:`Contents`, and a group of the pattern below."""

    RECORD = "records"
    SEGMENT = "segments"
    PRIVATE = "private"
    SPACE = "space"


def _paths(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("NAMESPACE", NAMESPACE.pattern), re.VERBOSE)


#: Paths of our files below a root. Older versions kept damaged records in ``quarantine``; in
#: ``space`` the writers agree who counts the root and who may write how much.
_FILES = _paths(
    r"""
    (?P<records> NAMESPACE/blocks/(?P<shard>[0-9a-f]{2})/(?P=shard)[0-9a-f]{30}\.bin)
    | (?P<segments> NAMESPACE/segments/[0-9a-f]{16}-[0-9a-f]{16}\.seg)
    | (?P<private>
        (NAMESPACE/tmp|space)/[0-9a-f]{16}-[0-9a-f]{16}\.tmp
        | \.[0-9a-f]{32}\.tmp
        | NAMESPACE/quarantine/[0-9a-f]{32}
            \.(wrong_length|truncated|not_a_record|bad_header|bad_checksum)\.[0-9]{1,20}\.bin
    )
    | (?P<space> space/(collector|grants|writer)-[0-9a-f]{16}\.json)
    """
)
_DIRECTORIES = _paths("space | NAMESPACE (/(blocks(/[0-9a-f]{2})? | segments | tmp | quarantine))?")
#: Documents, which do not count as use.
_DOCUMENTS = _paths(r"NAMESPACE/manifest\.json | ucm-(root|digests|rates|mode)\.json")


@dataclass(frozen=True, slots=True)
class Found:
    """A file of ours: path below the root, bytes, time of use (ns since 1970), inode."""

    kind: Kind
    path: str
    size: int
    mtime_ns: int
    inode: int = 0

    @property
    def name(self) -> str:
        """Its name in its directory."""
        return self.path.rpartition("/")[2]

    @property
    def namespace(self) -> str:
        """The namespace it lies in, empty for what lies beside the namespaces."""
        first = self.path.partition("/")[0]
        return first if NAMESPACE.fullmatch(first) else ""


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
    space: list[Found] = field(default_factory=list)
    foreign: list[Foreign] = field(default_factory=list)

    @property
    def files(self) -> list[Found]:
        """Everything that counts as use."""
        return [*self.records, *self.segments, *self.private]


def uses(files: Iterable[Found]) -> dict[str, int | None]:
    """The first and the last use of files (s since 1970), as they stand in JSON documents."""
    used = [found.mtime_ns // 10**9 for found in files if found.mtime_ns]
    return {"oldest_use": min(used, default=None), "newest_use": max(used, default=None)}


class _Root:
    """What a directory, a server and a bucket have in common."""

    #: What it is called; what the marker says.
    shown: str
    marker: dict[str, Any]
    #: Most bytes that it takes; 0: not known.
    limit: int
    #: How records lie there, as was decided; None: nothing was.
    layout: dict[str, Any] | None
    #: The option without which ages are not known: Redis says how long a record still lives.
    age_needs: str | None = None
    #: Whether reads bypassed the page cache; None before the first, and where there is none.
    direct: bool | None = None
    #: Bytes of records and segments that were read.
    bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def uuid(self) -> str:
        """The root's own number, 32 hex digits; `-` where there is no marker."""
        return str(self.marker.get("uuid", "-"))

    def head(self, path: str, most: int) -> bytes | None:
        """The first bytes of a file below the root; None if it is absent. Raises
        :class:`OSError`."""
        raise NotImplementedError

    def document(self, path: str) -> Any:
        """A JSON document below the root; None if absent, :class:`ValueError` if not JSON."""
        text = self.head(path, _LONGEST_DOCUMENT + 1)
        if text is None:
            return None
        if len(text) > _LONGEST_DOCUMENT:
            raise ValueError(f"more than {_LONGEST_DOCUMENT} bytes")
        return json.loads(text)

    def manifest(self, namespace: str) -> Any:
        """The manifest of a namespace, as of :meth:`document`."""
        return self.document(f"{namespace}/{MANIFEST}")

    def _read_marker(
        self, keys: Mapping[str, type], where: str, other: str, hint: str = ""
    ) -> dict[str, Any]:
        """What the marker says, which must have these keys. ``where`` and ``other`` say in an error
        which file is damaged and what to use instead."""
        damaged = ConfigError(f"{where} is damaged; restore it, or use another {other}")
        try:
            marker = self.document(MARKER)
        except ValueError:
            raise damaged from None
        if marker is None:
            text = f"it has no {MARKER}, so nothing in it is touched{hint}"
            raise ConfigError(f"{self.shown} is no root of ucm: {text}")
        if not isinstance(marker, dict) or not isinstance(marker.get("format"), int):
            raise damaged
        if marker["format"] > FORMAT:
            raise ForeignError(
                f"{self.shown} was made by a newer ucm (format {marker['format']}, known is"
                f" {FORMAT}); upgrade ucm"
            )
        if not all(isinstance(marker.get(key), kind) for key, kind in keys.items()):
            raise damaged
        return marker


class Root(_Root):
    """A marked directory, held open. A context manager.

    Raises :class:`~ucm.errors.ConfigError` when the directory is none or has no marker that can be
    read, and :class:`~ucm.errors.ForeignError` when a newer version made it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.shown = str(self.path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{self.path} is no directory; give the directory that storage_backends names"
            ) from None
        try:
            self._device = os.fstat(self._fd).st_dev
            self.marker = self._own_marker()
        except BaseException:
            os.close(self._fd)
            raise
        self.limit = self.marker["storage_capacity"]
        kept = self.marker.get("layout")
        self.layout = kept if isinstance(kept, dict) else None
        self._buffer = mmap.mmap(-1, PAGE)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def file_system(self) -> tuple[int | None, int | None]:
        """Bytes of the file system, and those that are free to us."""
        found = os.fstatvfs(self._fd)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def check(self) -> None:
        """Raises :class:`~ucm.errors.StoreIOError` if the path does not lead to this marked root
        any more."""
        try:
            now, mine = os.stat(self.path), os.fstat(self._fd)
            same = (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)
            same = same and self._own_marker()["uuid"] == self.uuid
        except (OSError, ConfigError, ForeignError):
            same = False
        if not same:
            raise StoreIOError(
                f"{self.path} is not the root any more that was opened (removed, unmounted, or"
                " another marker); stopped"
            )

    def namespaces(self) -> list[str]:
        """Names of the namespaces, sorted."""
        listed = self.entries("")
        return sorted(n for n, what, _ in listed if what == "directory" and NAMESPACE.fullmatch(n))

    def beside(self) -> Contents:
        """What lies in the root beside marker and namespaces."""
        return self.scan("")

    def scan(self, namespace: str) -> Contents:
        """What lies in a namespace; what vanishes at the same time is left out."""
        contents = Contents()
        self._scan(contents, namespace)
        return contents

    def _scan(self, contents: Contents, where: str) -> None:
        """Sorts what lies below a directory; below the root itself without the namespaces."""
        for name, what, about in sorted(self.entries(where)):
            path = f"{where}/{name}" if where else name
            ours = _FILES.fullmatch(path)
            if what == "file" and ours:
                kind = Kind(ours.lastgroup or "")
                found = Found(kind, path, about.st_size, about.st_mtime_ns, about.st_ino)
                getattr(contents, kind).append(found)
            elif what == "directory" and _DIRECTORIES.fullmatch(path):
                if where or not NAMESPACE.fullmatch(name):
                    self._scan(contents, path)
            elif what != "file" or not _DOCUMENTS.fullmatch(path):
                size = about.st_size if what == "file" else 0
                contents.foreign.append(Foreign(path, what, size))

    def entries(self, path: str) -> Iterator[tuple[str, str, os.stat_result]]:
        """What lies in a directory: its name, what it is, what is known of it."""
        with self._directory(path) as here:
            if here is None:
                return
            with os.scandir(here) as listed:
                for entry in listed:
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISLNK(about.st_mode):
                        what = "link"
                    elif about.st_dev != self._device:
                        what = "other device"
                    elif stat.S_ISDIR(about.st_mode):
                        what = "directory"
                    else:
                        what = "file" if stat.S_ISREG(about.st_mode) else "special file"
                    yield entry.name, what, about

    @contextmanager
    def _directory(self, path: str) -> Iterator[int | None]:
        """A descriptor of a directory below the root; ``None`` if there is none, or a link, or
        another device's."""
        fd: int | None = os.dup(self._fd)
        try:
            for name in filter(None, path.split("/")):
                assert fd is not None
                upper, fd = fd, None
                try:
                    how = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    fd = os.open(name, how, dir_fd=upper)
                except (FileNotFoundError, NotADirectoryError):  # Linux says ENOTDIR of a link, too
                    break
                except OSError as error:
                    raise OSError(error.errno, error.strerror, f"{self.path}/{path}") from None
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

    def _open(self, path: str, how: int = 0) -> int:
        """A descriptor that reads a file; raises :class:`OSError`."""
        above, _, name = path.rpartition("/")
        with self._directory(above) as here:
            if here is None:
                raise FileNotFoundError(errno.ENOENT, "its directory does not exist any more", path)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how
            return os.open(name, flags, dir_fd=here)

    def read(self, found: Found, most: int | None = None, start: int = 0) -> tuple[bytes, int]:
        """At most ``most`` bytes from ``start`` (a page) on, and how many there are in all. Direct
        I/O where the file system has it. Raises :class:`OSError`."""
        try:
            answer = self._read(found.path, most, start, os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self.direct = False
            return self._read(found.path, most, start, 0)
        self.direct = self.direct is not False
        return answer

    def _read(self, path: str, most: int | None, start: int, how: int) -> tuple[bytes, int]:
        fd = self._open(path, how)
        try:
            size = os.fstat(fd).st_size
            there = max(0, size - start)
            want = there if most is None else min(most, there)
            room = -(-want // PAGE) * PAGE
            if room > len(self._buffer):
                self._buffer = mmap.mmap(-1, room)
            at = 0
            with memoryview(self._buffer) as view:
                while at < want:
                    count = os.preadv(fd, [view[at:room]], start + at)
                    at += count
                    # the end of the file; direct reads begin at pages only
                    if count == 0 or (how and at % PAGE):
                        break
                self.bytes_read += min(at, want)
                return bytes(view[: min(at, want)]), size
        finally:
            os.close(fd)

    def head(self, path: str, most: int) -> bytes | None:
        try:
            fd = self._open(path)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(most)

    def unlink(self, found: Found) -> bool:
        """Removes a file found before; false if it was removed, used or replaced since."""
        above, _, name = found.path.rpartition("/")
        with self._directory(above) as here:
            if here is None:
                return False
            try:
                now = os.stat(name, dir_fd=here, follow_symlinks=False)
                still = (now.st_ino, now.st_mtime_ns) == (found.inode, found.mtime_ns)
                if still := still and stat.S_ISREG(now.st_mode):
                    os.unlink(name, dir_fd=here)
            except FileNotFoundError:
                return False
        return still

    def written_ns(self, namespace: str) -> int:
        """When a record of a namespace was last begun or ended to be written; 0 if none can be."""
        with self._directory(os.path.join(namespace, "tmp")) as here:
            return 0 if here is None else os.fstat(here).st_mtime_ns

    def remove_namespace(self, namespace: str) -> bool:
        """Removes what is left of a namespace without files: its directories, then its manifest,
        then itself. False if something else lies there; it then stays, with the manifest."""
        with self._directory(f"{namespace}/blocks") as blocks:
            for name in () if blocks is None else os.listdir(blocks):
                if _DIRECTORIES.fullmatch(f"{namespace}/blocks/{name}"):
                    _remove_empty(name, blocks)
        with self._directory(namespace) as here:
            if here is None:
                return False
            for name in ("blocks", "segments", "tmp", "quarantine"):
                _remove_empty(name, here)
            left = os.listdir(here)
            if left not in ([], [MANIFEST]):
                return False
            if left:
                os.unlink(MANIFEST, dir_fd=here)
        return _remove_empty(namespace, self._fd)

    def _own_marker(self) -> dict[str, Any]:
        hint = ""
        if NAMESPACE.fullmatch(self.path.name) and (self.path.parent / MARKER).exists():
            hint = f"; it is a namespace of the root {self.path.parent}"
        keys = {"uuid": str, "storage_capacity": int}
        return self._read_marker(keys, str(self.path / MARKER), "directory", hint)


def _remove_empty(name: str, directory: int | None) -> bool:
    assert directory is not None  # it would be the current one
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError:  # something lies in it, or it is no directory
        return False
    return True


_Item = tuple[str, str, int, int, str]
_MANIFEST_OF_PART = _paths(r"NAMESPACE/manifest-g\d+p\d+t\d+\.json")
_REDIS = ("redis", "rediss")


class RemoteRoot(_Root):
    """A server or a bucket. A context manager with what :class:`Root` has.

    Raises :class:`~ucm.errors.ConfigError` for an address or an option that is none.
    """

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        from ucm.config.fields import without_login  # imports all of the configuration

        self.shown = without_login(url)
        self._place = _place(url, options, self.shown)
        self.limit, self._used, self._words = self._place.room()
        if terminal.scheme_of(url) in _REDIS and "expire_after" not in options:
            self.age_needs = "expire_after"
        self._list()
        if self._words:
            self.marker = {"format": FORMAT}
            self.layout = {"kind": "one value per record", "why": self._words}
        else:
            self.marker = self._read_marker({}, f"{MARKER} of {self.shown}", "prefix")
            self.layout = {"kind": "segment", "why": "objects in a bucket"}

    def _list(self) -> None:
        items = self._place.list()
        #: What is ours, by its path; and what is not.
        self._items: dict[str, _Item] = {item[0]: item for item in items if item[0]}
        self._foreign = [
            Foreign(name, "object", size) for path, name, size, *_ in items if not path
        ]

    def file_system(self) -> tuple[int | None, int | None]:
        """There is none; of a server with a limit, that and what is free of it."""
        if not self._words or not self.limit:
            return None, None
        return self.limit, max(0, self.limit - self._used)

    def check(self) -> None:
        self._place.room()

    def entries(self, path: str) -> Iterator[tuple[str, str, os.stat_result]]:
        return iter(())  # there are no directories

    def namespaces(self) -> list[str]:
        return sorted({path.partition("/")[0] for path in self._items if _is_in_namespace(path)})

    def beside(self) -> Contents:
        others = (item for path, item in self._items.items() if not _is_in_namespace(path))
        space = [_of_item(Kind.SPACE, item) for item in others if item[0] != MARKER]
        return Contents(space=space, foreign=self._foreign)

    def scan(self, namespace: str) -> Contents:
        contents = Contents()
        for path, item in self._below(namespace):
            where = path.split("/")
            if len(where) > 2:
                kind = Kind.SEGMENT if where[1] == Kind.SEGMENT else Kind.RECORD
                getattr(contents, kind).append(_of_item(kind, item))
        return contents

    def _below(self, namespace: str) -> list[tuple[str, _Item]]:
        return [one for one in self._items.items() if one[0].startswith(f"{namespace}/")]

    def manifest(self, namespace: str) -> Any:
        """Put together of those of its parts."""
        whole: dict[str, Any] | None = None
        for path, item in self._below(namespace):
            if _MANIFEST_OF_PART.fullmatch(path):
                found = self.document(path)
                if not isinstance(found, dict) or not isinstance(found.get("parts"), dict):
                    raise ValueError(f"{item[1]} is no manifest")
                whole = (whole or found) | {"parts": (whole or found)["parts"] | found["parts"]}
        return whole

    def read(self, found: Found, most: int | None = None, start: int = 0) -> tuple[bytes, int]:
        item = self._items.get(found.path)
        length = found.size if most is None else most
        try:
            there = None if item is None else self._place.read(item[1], start, length)
        except UcmError as error:
            raise OSError(errno.EIO, error.message, found.path) from None
        if there is None:
            raise FileNotFoundError(errno.ENOENT, "it does not exist any more", found.path)
        self.bytes_read += len(there)
        return there, found.size

    def head(self, path: str, most: int) -> bytes | None:
        item = self._items.get(path)
        return None if item is None else self._place.read(item[1], 0, min(item[2], most))

    def unlink(self, found: Found) -> bool:
        item = self._items.get(found.path)
        try:
            return item is not None and self._place.remove(item)
        except UcmError as error:
            raise OSError(errno.EIO, error.message) from None

    def written_ns(self, namespace: str) -> int:
        return max((item[3] for _, item in self._below(namespace)), default=0)

    def remove_namespace(self, namespace: str) -> bool:
        """Removes the manifests of a namespace in which nothing else lies any more."""
        self._list()
        left = self._below(namespace)
        foreign = any(namespace in re.split("[:/]", one.path) for one in self._foreign)
        if foreign or not all(_MANIFEST_OF_PART.fullmatch(path) for path, _ in left):
            return False
        return sum(self._place.remove(item) for _, item in left) == len(left)


AnyRoot = Root | RemoteRoot


def _is_in_namespace(path: str) -> bool:
    first, _, rest = path.partition("/")
    return bool(rest) and first != "space"


def _of_item(kind: Kind, item: _Item) -> Found:
    path, _, size, used_ns, _ = item
    return Found(kind, path, size, used_ns)


@contextmanager
def open_root(path: str, options: Mapping[str, str]) -> Iterator[AnyRoot]:
    """The root at a path or an address; ``options``: keys of the store for an address."""
    if options and not terminal.scheme_of(path):
        raise ConfigError("--option is for addresses; a directory needs none")
    with RemoteRoot(path, options) if terminal.scheme_of(path) else Root(path) as root:
        yield root


def _place(url: str, options: Mapping[str, str], shown: str) -> Place:
    """The place at an address, with keys of its store, given or from the environment."""
    from pydantic import ValidationError

    from ucm.config.fields import Section, config_error, for_core, section_of
    from ucm.config.words import STORE_OF_SCHEME, STORES

    store = STORE_OF_SCHEME.get(terminal.scheme_of(url))
    if store is None:
        known = ", ".join(f"{scheme}://" for scheme in STORE_OF_SCHEME)
        raise ConfigError(
            f"{shown} is no address that ucm knows; give a directory, or one that begins with"
            f" {known}"
        )
    kind = STORES[store].kind
    unknown = [key for key in options if key not in kind.options]
    if unknown:
        raise ConfigError(f"{store} has no key {unknown[0]!r}; it has {', '.join(kind.options)}")
    environment = {
        key: os.environ[name]
        for key, schema in kind.options.items()
        for name in schema.get("env", ())
        if key != "storage_backends" and os.environ.get(name)
    }
    try:
        made: type[Section] = section_of(f"{store}Place", kind.options, kind.defaults)
        section = made.model_validate({**environment, **options, "storage_backends": [url]})
    except ValidationError as error:
        raise config_error(error) from None
    described = STORES[store].described(lambda key: getattr(section, key))
    del described["kind"]
    return Place(kind.word, for_core(described))


#: Bytes that say what a file is.
PREAMBLE_LEN = 64
#: Most entries visited in foreign directories.
VISITED_MOST = 100_000
#: Most foreign entries listed by name.
LISTED_MOST = 100


def foreigners(root: AnyRoot, found: Sequence[Foreign]) -> dict[str, Any]:
    """What is not ours below a root, as it stands in the JSON document. A directory counts as one
    and is scanned for the original's files."""
    listed: list[dict[str, Any]] = []
    seeds: list[int] = []  # bytes of each
    whole = visited = 0
    for one in found:
        size, before = 0, len(seeds)
        waiting = [(one.path, one.what, one.size)]
        while waiting:
            path, what, length = waiting.pop()
            if what == "directory" and visited <= VISITED_MOST:
                for name, kind, about in root.entries(path):
                    visited += 1
                    if visited > VISITED_MOST:
                        break
                    waiting.append((f"{path}/{name}", kind, about.st_size))
            elif what in ("file", "object"):
                size += length
                if what == "file" and length >= PREAMBLE_LEN and _is_seed_form(root, path):
                    seeds.append(length)
        whole += size
        count = len(seeds) - before
        if len(listed) < LISTED_MOST:
            listed.append({"path": one.path, "what": one.what, "bytes": size, "seed_form": count})
    return {
        "foreign": len(found),
        "foreign_bytes": whole,
        "foreign_files": listed,
        "foreign_complete": visited <= VISITED_MOST,
        "seed_form": len(seeds),
        "seed_form_bytes": sum(seeds),
    }


def _is_seed_form(root: AnyRoot, path: str) -> bool:
    try:
        head = root.head(path, PREAMBLE_LEN)
    except OSError:  # not ours to read
        return False
    return head is not None and read_header(head)[1] == MissReason.SEED_FORM


def pick_each(
    roots: Sequence[AnyRoot], wanted: tuple[str, ...]
) -> Iterable[tuple[AnyRoot, list[str]]]:
    """The namespaces of each root that the given beginnings of names stand for, all if none is
    given. Raises :class:`~ucm.errors.ConfigError` for one that does not fit one namespace of all of
    them together."""
    names = {root: root.namespaces() for root in roots}
    every = sorted({name for some in names.values() for name in some})
    picked = set[str]()
    for start in wanted:
        fits = [name for name in every if name.startswith(start)] if start else []
        if len(fits) != 1:
            many = f"{len(fits)} namespaces of" if fits else "no namespace of"
            where = f"{', '.join(root.shown for root in roots)} begin{'' if fits else 's'}"
            known = ", ".join(name[:12] for name in every) or "none"
            raise ConfigError(f"{many} {where} with {start!r}; there are: {known}")
        picked.add(fits[0])
    return [
        (root, [name for name in some if name in picked or not wanted])
        for root, some in names.items()
    ]


def over_roots(
    ctx: click.Context,
    paths: Sequence[str],
    options: Mapping[str, str],
    wanted: tuple[str, ...],
    as_json: bool,
    work: Callable[[AnyRoot, list[str]], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    bad: Sequence[str],
) -> None:
    """Runs a command on the wanted namespaces of each root, prints what it returns, and ends with
    the status: 130 after an interrupt, 1 if a key of ``bad`` counts something."""
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        roots = [stack.enter_context(open_root(path, options)) for path in paths]
        for root, names in pick_each(roots, wanted):
            results.append(work(root, names))
            if results[-1]["interrupted"]:
                break
    if not as_json:
        terminal.each(show, results)
    elif len(results) == 1:
        terminal.document(results[0])
    else:
        terminal.document({"command": ctx.info_name, "roots": results})
    failed = any(result[key] for result in results for key in bad)
    ctx.exit(130 if results[-1]["interrupted"] else int(failed))
