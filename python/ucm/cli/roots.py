"""Roots as the command line sees them: a directory, or what lies on a server or in a bucket.

:class:`Root` is a directory, opened once, walked without following links, never left. Everything
goes through descriptors of directories that were checked when they were opened: no link, and on the
same device as the root. So what is removed lies below the root that was marked, also when
directories are exchanged at the same time. Names are compared with the patterns of
``docs/format-files.md``; everything else is foreign and is only counted.

:class:`RemoteRoot` is the same for a server or a bucket, through the compiled core: everything is
listed once, under the path that it would have below a root.

The original's own form is a file ``blocks/<hh>/<32 hex>.bin`` that begins with 64 bytes of ``UCMB``
and no checksum (``seed_form`` in ``docs/format-verify.md``). :class:`Foreigners` finds these below
foreign directories, up to a bound.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ucm._core import Place, read_header
from ucm.cli.terminal import scheme_of
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

NAMESPACE = re.compile(r"[0-9a-f]{32}")


class Kind(StrEnum):
    """What a file of ours is."""

    RECORD = "record"
    SEGMENT = "segment"
    PRIVATE = "private"
    SPACE = "space"


def _paths(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("NAMESPACE", NAMESPACE.pattern), re.VERBOSE)


#: Paths of our files below a root; the group is the kind. Older versions kept damaged records in
#: ``quarantine``; in ``space`` the writers agree who counts the root and who may write how much.
_FILES = _paths(
    r"""
    (?P<record> NAMESPACE/blocks/(?P<shard>[0-9a-f]{2})/(?P=shard)[0-9a-f]{30}\.bin)
    | (?P<segment> NAMESPACE/segments/[0-9a-f]{16}-[0-9a-f]{16}\.seg)
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
        first = self.directory[0] if self.directory else ""
        return first if NAMESPACE.fullmatch(first) else ""

    def is_still(self, now: os.stat_result) -> bool:
        """Whether this is the same file, not used since."""
        unchanged = (now.st_ino, now.st_mtime_ns) == (self.inode, self.mtime_ns)
        return unchanged and stat.S_ISREG(now.st_mode)


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

    def add(self, found: Found) -> None:
        """Sort in a file of ours."""
        by_kind = {
            Kind.RECORD: self.records,
            Kind.SEGMENT: self.segments,
            Kind.PRIVATE: self.private,
            Kind.SPACE: self.space,
        }
        by_kind[found.kind].append(found)


def _marker_of(
    root: AnyRoot, keys: Mapping[str, type], *, where: str, other: str, hint: str = ""
) -> dict[str, Any]:
    """What the marker of a root says, which must have these keys. ``where`` and ``other`` say in an
    error which file is damaged and what to use instead."""
    damaged = ConfigError(f"{where} is damaged; restore it, or use another {other}")
    try:
        marker = root.document(MARKER)
    except ValueError:
        raise damaged from None
    if marker is None:
        raise ConfigError(
            f"{root.shown} is no root of ucm: it has no {MARKER}, so nothing in it is touched{hint}"
        )
    if not isinstance(marker, dict) or not isinstance(marker.get("format"), int):
        raise damaged
    if marker["format"] > FORMAT:
        raise ForeignError(
            f"{root.shown} was made by a newer ucm (format {marker['format']}, known is {FORMAT});"
            " upgrade ucm"
        )
    if not all(isinstance(marker.get(key), kind) for key, kind in keys.items()):
        raise damaged
    return marker


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
        return [
            name
            for name, what, _ in self._entries()
            if what == "directory" and NAMESPACE.fullmatch(name)
        ]

    def beside(self) -> Contents:
        """What lies in the root beside marker and namespaces."""
        contents = Contents()
        self._scan(contents, ())
        return contents

    def scan(self, namespace: str) -> Contents:
        """What lies in a namespace; what vanishes at the same time is left out."""
        contents = Contents()
        self._scan(contents, (namespace,))
        return contents

    def _scan(self, contents: Contents, where: tuple[str, ...]) -> None:
        """Sorts what lies below a directory; below the root itself without the namespaces."""
        for name, what, about in self._entries(*where):
            path = "/".join((*where, name))
            ours = _FILES.fullmatch(path)
            if what == "file" and ours:
                contents.add(_found(Kind(ours.lastgroup or ""), where, name, about))
            elif what == "directory" and _DIRECTORIES.fullmatch(path):
                if where or not NAMESPACE.fullmatch(name):
                    self._scan(contents, (*where, name))
            elif what != "file" or not _DOCUMENTS.fullmatch(path):
                size = about.st_size if what == "file" else 0
                contents.foreign.append(Foreign(path, what, size))

    def _entries(self, *where: str) -> Iterator[tuple[str, str, os.stat_result]]:
        """What lies in a directory, sorted: its name, what it is, what is known of it."""
        with self.directory(*where) as here:
            for entry in _listed(here):
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

    def open(self, directory: tuple[str, ...], name: str, how: int = 0) -> int:
        """A descriptor that reads a file; raises :class:`OSError`."""
        with self.directory(*directory) as here:
            if here is None:
                path = "/".join((*directory, name))
                raise FileNotFoundError(errno.ENOENT, "its directory does not exist any more", path)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how
            return os.open(name, flags, dir_fd=here)

    def document(self, *path: str) -> Any:
        """A JSON document below the root, ``None`` if it is absent; raises :class:`ValueError` if
        it is none."""
        try:
            fd = self.open(path[:-1], path[-1])
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            text = file.read(_LONGEST_DOCUMENT + 1)
        if len(text) > _LONGEST_DOCUMENT:
            raise ValueError(f"more than {_LONGEST_DOCUMENT} bytes")
        return json.loads(text)

    def unlink(self, found: Found) -> bool:
        """Removes a file found before; false if it does not exist any more, or was used or replaced
        since."""
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

    def written_ns(self, namespace: str) -> int:
        """When a record of a namespace was last begun or ended to be written; 0 if none can be."""
        with self.directory(namespace, "tmp") as here:
            return 0 if here is None else os.fstat(here).st_mtime_ns

    def remove_namespace(self, namespace: str) -> bool:
        """Removes what is left of a namespace without files: its directories, then its manifest,
        then itself. False if something else lies there; it then stays, with the manifest."""
        with self.directory(namespace, "blocks") as blocks:
            for entry in _listed(blocks):
                if _DIRECTORIES.fullmatch(f"{namespace}/blocks/{entry.name}"):
                    _remove_empty(entry.name, blocks)
        with self.directory(namespace) as here:
            for name in ("blocks", "segments", "tmp", "quarantine"):
                _remove_empty(name, here)
            left = [entry.name for entry in _listed(here)]
            if here is None or left not in ([], [MANIFEST]):
                return False
            if left:
                os.unlink(MANIFEST, dir_fd=here)
        with self.directory() as here:
            return _remove_empty(namespace, here)

    def _read_marker(self) -> dict[str, Any]:
        hint = ""
        if NAMESPACE.fullmatch(self.path.name) and (self.path.parent / MARKER).exists():
            hint = f"; it is a namespace of the root {self.path.parent}"
        keys = {"uuid": str, "storage_capacity": int}
        where = str(self.path / MARKER)
        return _marker_of(self, keys, where=where, other="directory", hint=hint)


def _listed(directory: int | None) -> list[os.DirEntry[str]]:
    if directory is None:
        return []
    with os.scandir(directory) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _found(kind: Kind, directory: tuple[str, ...], name: str, about: os.stat_result) -> Found:
    return Found(
        kind, directory, name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino
    )


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


_Item = tuple[str, str, int, int, str]
_MANIFEST_OF_PART = re.compile(r"manifest-g\d+p\d+t\d+\.json")
_REDIS = ("redis", "rediss")


class RemoteRoot:
    """A server or a bucket. A context manager with what :class:`~ucm.cli.roots.Root` has.

    Raises :class:`~ucm.errors.ConfigError` for an address or an option that is none.
    """

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        from ucm.config.fields import without_login  # imports all of the configuration

        self.shown = without_login(url)
        self._place = _place(url, options, self.shown)
        self.limit, self._used, self._words = self._place.room()
        #: The option without which ages are not known: Redis says how long a record still lives.
        self.age_needs = (
            "expire_after" if scheme_of(url) in _REDIS and "expire_after" not in options else None
        )
        self._items: list[_Item] | None = None
        self._by_path: dict[str, _Item] = {}
        self.marker = self._read_marker()

    def __enter__(self) -> RemoteRoot:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def uuid(self) -> str:
        """The marker's own number; what the server is, where it has no marker."""
        return str(self.marker.get("uuid", "-"))

    @property
    def layout(self) -> dict[str, Any] | None:
        """How records lie there."""
        if self._words:
            return {"kind": "one value per record", "why": self._words}
        return {"kind": "segment", "why": "objects in a bucket"}

    def file_system(self) -> tuple[int | None, int | None]:
        """There is none; of a server with a limit, that and what is free of it."""
        if not self._words or not self.limit:
            return None, None
        return self.limit, max(0, self.limit - self._used)

    def check(self) -> None:
        """Whether it can still be reached."""
        self._place.room()

    def namespaces(self) -> list[str]:
        """Names of the namespaces, sorted."""
        return sorted(
            {path.partition("/")[0] for path, *_ in self.items() if self._is_in_namespace(path)}
        )

    def beside(self) -> Contents:
        """What lies there beside marker and namespaces."""
        contents = Contents()
        for item in self.items():
            path, name, size, *_ = item
            if not path:
                contents.foreign.append(Foreign(name, "object", size))
            elif path != MARKER and not self._is_in_namespace(path):
                contents.space.append(_of_item(Kind.SPACE, item))
        return contents

    def scan(self, namespace: str) -> Contents:
        """What lies in a namespace."""
        contents = Contents()
        for item in self.items():
            where = item[0].split("/")
            if where[0] != namespace or len(where) < 3:
                continue
            if where[1] == "segments":
                contents.segments.append(_of_item(Kind.SEGMENT, item))
            else:
                contents.records.append(_of_item(Kind.RECORD, item))
        return contents

    def document(self, *path: str) -> Any:
        """A JSON document, ``None`` if it is absent; raises :class:`ValueError` if it is none.

        The manifest of a namespace is put together of those of its parts.
        """
        if path[1:] == (MANIFEST,):
            return self._manifest(path[0])
        item = self.item("/".join(path))
        return None if item is None else self._json(item)

    def unlink(self, found: Found) -> bool:
        """Removes what was found before; false if it does not exist any more, or was used or
        replaced since."""
        item = self.item(found.path)
        try:
            return item is not None and self._place.remove(item)
        except UcmError as error:
            raise OSError(errno.EIO, error.message) from None

    def written_ns(self, namespace: str) -> int:
        """When something of a namespace was last used."""
        return max(
            (used for path, _, _, used, _ in self.items() if path.startswith(f"{namespace}/")),
            default=0,
        )

    def remove_namespace(self, namespace: str) -> bool:
        """Removes the manifests of a namespace in which nothing else lies any more."""
        self._items = None
        left = [item for item in self.items() if item[0].startswith(f"{namespace}/")]
        foreign = any(
            not path and namespace in re.split("[:/]", name) for path, name, *_ in self.items()
        )
        if foreign or any(
            not _MANIFEST_OF_PART.fullmatch(item[0].rpartition("/")[2]) for item in left
        ):
            return False
        return sum(self._place.remove(item) for item in left) == len(left)

    def items(self) -> list[_Item]:
        """Everything that lies there."""
        if self._items is None:
            self._items = self._place.list()
            self._by_path = {item[0]: item for item in self._items if item[0]}
        return self._items

    def item(self, path: str) -> _Item | None:
        """What lies there under this path."""
        self.items()
        return self._by_path.get(path)

    def read(self, item: _Item, start: int, length: int) -> bytes | None:
        """Bytes of what lies there; ``None`` if it does not exist any more."""
        return self._place.read(item[1], start, length)

    def _is_in_namespace(self, path: str) -> bool:
        first, _, rest = path.partition("/")
        return bool(rest) and first != "space"

    def _json(self, item: _Item) -> Any:
        if item[2] > _LONGEST_DOCUMENT:
            raise ValueError(f"more than {_LONGEST_DOCUMENT} bytes")
        text = self.read(item, 0, item[2])
        return None if text is None else json.loads(text)

    def _manifest(self, namespace: str) -> Any:
        whole: dict[str, Any] | None = None
        for item in self.items():
            where, _, name = item[0].rpartition("/")
            if where == namespace and _MANIFEST_OF_PART.fullmatch(name):
                found = self._json(item)
                if not isinstance(found, dict) or not isinstance(found.get("parts"), dict):
                    raise ValueError(f"{item[1]} is no manifest")
                whole = (
                    found if whole is None else whole | {"parts": whole["parts"] | found["parts"]}
                )
        return whole

    def _read_marker(self) -> dict[str, Any]:
        if self._words:
            return {"format": FORMAT}
        return _marker_of(self, {}, where=f"{MARKER} of {self.shown}", other="prefix")


AnyRoot = Root | RemoteRoot


@contextmanager
def open_root(path: str, options: Mapping[str, str]) -> Iterator[AnyRoot]:
    """The root at a path or an address; ``options``: keys of the store for an address."""
    if scheme_of(path):
        with RemoteRoot(path, options) as remote:
            yield remote
        return
    if options:
        raise ConfigError("--option is for addresses; a directory needs none")
    with Root(path) as root:
        yield root


def _place(url: str, options: Mapping[str, str], shown: str) -> Place:
    """The place at an address, with the keys of its store that are given or stand in the
    environment."""
    from pydantic import ValidationError

    from ucm.config.fields import Section, config_error, for_core, section_of
    from ucm.config.words import STORE_OF_SCHEME, STORES

    store = STORE_OF_SCHEME.get(scheme_of(url))
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


def _of_item(kind: Kind, item: _Item) -> Found:
    path, _, size, used_ns, _ = item
    *directory, name = path.split("/")
    return Found(kind, tuple(directory), name, size, used_ns, used_ns, 0)


#: Bytes that say what a file is.
PREAMBLE_LEN = 64
#: Most entries visited in foreign directories.
VISITED_MOST = 100_000
#: Most foreign entries listed by name.
LISTED_MOST = 100


class Foreigners:
    """Collects what is not ours below one root."""

    def __init__(self, root: AnyRoot) -> None:
        self._root = root
        self._listed: list[dict[str, Any]] = []
        self._count = self._bytes = 0
        self._seeds = self._seed_bytes = 0
        self._visited = 0

    def add(self, found: Iterable[Foreign]) -> None:
        """Counts these; a directory counts as one and is scanned for the original's files."""
        for one in found:
            seeds, size = self._seeds, one.size
            *where, name = one.path.split("/")
            if isinstance(self._root, Root):
                if one.what == "directory":
                    size = self._walk(self._root, (*where, name))
                elif one.what == "file":
                    self._peek(self._root, tuple(where), name, one.size)
            self._count += 1
            self._bytes += size
            if len(self._listed) < LISTED_MOST:
                listed = {
                    "path": one.path,
                    "what": one.what,
                    "bytes": size,
                    "seed_form": self._seeds - seeds,
                }
                self._listed.append(listed)

    def document(self) -> dict[str, Any]:
        """What was found, as it stands in the JSON document."""
        return {
            "foreign": self._count,
            "foreign_bytes": self._bytes,
            "foreign_files": self._listed,
            "foreign_complete": self._visited <= VISITED_MOST,
            "seed_form": self._seeds,
            "seed_form_bytes": self._seed_bytes,
        }

    def _walk(self, root: Root, where: tuple[str, ...]) -> int:
        """Bytes of the files below a foreign directory."""
        size, waiting = 0, [where]
        while waiting and self._visited <= VISITED_MOST:
            names = waiting.pop()
            with root.directory(*names) as here:
                if here is None:
                    continue
                with os.scandir(here) as entries:
                    for entry in entries:
                        self._visited += 1
                        if self._visited > VISITED_MOST:
                            break
                        try:
                            about = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        if stat.S_ISDIR(about.st_mode):
                            waiting.append((*names, entry.name))
                        elif stat.S_ISREG(about.st_mode):
                            size += about.st_size
                            self._peek(root, names, entry.name, about.st_size)
        return size

    def _peek(self, root: Root, where: tuple[str, ...], name: str, size: int) -> None:
        if size < PREAMBLE_LEN:
            return
        try:
            fd = root.open(where, name)
        except OSError:  # removed, or not ours to read
            return
        try:
            _, reason, _ = read_header(os.pread(fd, PREAMBLE_LEN, 0))
        except OSError:
            return
        finally:
            os.close(fd)
        if reason == MissReason.SEED_FORM:
            self._seeds += 1
            self._seed_bytes += size


def pick(names: list[str], wanted: tuple[str, ...], where: str) -> list[str]:
    """The namespaces that the given beginnings of names stand for, all if none is given.

    Raises :class:`~ucm.errors.ConfigError` for one that fits none or several.
    """
    picked = set()
    for start in wanted:
        fits = [name for name in names if name.startswith(start)] if start else []
        if len(fits) != 1:
            problem = (
                f"{len(fits)} namespaces of {where} begin"
                if fits
                else f"no namespace of {where} begins"
            )
            known = ", ".join(name[:12] for name in names) or "none"
            raise ConfigError(f"{problem} with {start!r}; there are: {known}")
        picked.add(fits[0])
    return sorted(picked) if wanted else names


def pick_each(
    roots: Sequence[AnyRoot], wanted: tuple[str, ...]
) -> Iterable[tuple[AnyRoot, list[str]]]:
    """The same of each of several roots: a beginning has to fit one namespace of all of them
    together."""
    names = {root: root.namespaces() for root in roots}
    every = sorted({name for some in names.values() for name in some})
    picked = set(pick(every, wanted, ", ".join(root.shown for root in roots)))
    return [(root, [name for name in some if name in picked]) for root, some in names.items()]
