"""A server or a bucket that is looked into as a root is, through the compiled core.

Everything that lies there is listed once, when it is first asked for, and told by the path it would
have below a root (``docs/format.md``). Nothing is ever moved there; what is removed goes by the
name it was listed under, after one more look.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ucm.cli.roots import FORMAT, MANIFEST, MARKER, SEGMENTS, Contents, Foreign, Found, Kind, Root
from ucm.errors import ConfigError, ForeignError, UcmError

if TYPE_CHECKING:
    from ucm._core import Place

_Item = tuple[str, str, int, int, str]
_MANIFEST_OF_PART = re.compile(r"manifest-g\d+p\d+t\d+\.json")
#: Most bytes of a document that is read (``DOCUMENT`` of the core).
_LONGEST_DOCUMENT = 16 << 20
_REDIS = ("redis", "rediss")


def scheme_of(path: str) -> str:
    """The scheme of an address; empty for a path."""
    scheme, found, _ = path.partition("://")
    return scheme.lower() if found else ""


class RemoteRoot:
    """A server or a bucket. A context manager with what :class:`~ucm.cli.roots.Root` has.

    Raises :class:`~ucm.errors.ConfigError` for an address or an option that is none.
    """

    def __init__(self, url: str, told: Mapping[str, str]) -> None:
        # with all of the configuration, which directories do not need
        from ucm.config.fields import (
            without_login,
        )

        self.shown = without_login(url)
        self._place = _place(url, told, self.shown)
        self.limit, self._used, self._words = self._place.room()
        #: The option without which ages are not known: Redis tells how long a record still lives.
        self.age_needs = (
            "expire_after" if scheme_of(url) in _REDIS and "expire_after" not in told else None
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
        """There is none that could be asked; of a server that has a limit, what that leaves."""
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
                contents.space.append(_found(Kind.SPACE, item))
        return contents

    def scan(self, namespace: str) -> Contents:
        """What lies in a namespace."""
        contents = Contents()
        for item in self.items():
            where = item[0].split("/")
            if where[0] != namespace or len(where) < 3:
                continue
            if where[1] == SEGMENTS:
                contents.segments.append(_found(Kind.SEGMENT, item))
            else:
                contents.records.append(_found(Kind.RECORD, item))
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
        """Removes what was found before; false if it is gone, or was used or replaced since."""
        item = self.item(found.path)
        try:
            return item is not None and self._place.remove(item)
        except UcmError as error:
            raise OSError(errno.EIO, error.message) from None

    def quarantine(self, _found: Found, _inode: int, _name: str) -> bool:
        """Nothing is moved there."""
        return False

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

    @contextmanager
    def directory(self, *_names: str) -> Iterator[int | None]:
        """There are none to open."""
        yield None

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
        """Bytes of what lies there; ``None`` if it is gone."""
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
        try:
            marker = self.document(MARKER)
        except ValueError:
            marker = {}
        if marker is None:
            raise ConfigError(
                f"{self.shown} is no root of ucm: it has no {MARKER}, so nothing in it is touched"
            )
        if not isinstance(marker, dict) or not isinstance(marker.get("format"), int):
            raise ConfigError(
                f"{MARKER} of {self.shown} is damaged; restore it, or use another prefix"
            )
        if marker["format"] > FORMAT:
            raise ForeignError(
                f"{self.shown} was made by a newer ucm (format {marker['format']}, known is"
                f" {FORMAT}); upgrade ucm"
            )
        return marker


AnyRoot = Root | RemoteRoot


class About(NamedTuple):
    """What is known of something that was read."""

    st_size: int
    st_ino: int = 0


class RemoteReader:
    """Reads what lies on a server or in a bucket."""

    def __init__(self, root: RemoteRoot) -> None:
        self._root = root
        #: There is no page cache of ours to go past.
        self.direct: bool | None = None
        #: Bytes read so far.
        self.bytes = 0

    def read(self, found: Found, most: int | None = None, start: int = 0) -> tuple[bytes, About]:
        """At most ``most`` bytes from ``start`` on, and what it is; raises :class:`OSError`."""
        item = self._root.item(found.path)
        try:
            there = (
                None
                if item is None
                else self._root.read(item, start, found.size if most is None else most)
            )
        except UcmError as error:
            raise OSError(errno.EIO, error.message, found.path) from None
        if there is None:
            raise FileNotFoundError(errno.ENOENT, "it is gone", found.path)
        self.bytes += len(there)
        return there, About(found.size)


@contextmanager
def open_root(path: str, told: Mapping[str, str]) -> Iterator[AnyRoot]:
    """The root at a path or an address; ``told``: keys of the store for an address."""
    if scheme_of(path):
        with RemoteRoot(path, told) as remote:
            yield remote
        return
    if told:
        raise ConfigError("--option is for addresses; a directory needs none")
    with Root(path) as root:
        yield root


def _place(url: str, told: Mapping[str, str], shown: str) -> Place:
    """The place at an address, with the keys of its store that are given or stand in the
    environment."""
    from pydantic import ValidationError

    from ucm._core import Place
    from ucm.config.fields import Section, for_core, section_of
    from ucm.config.words import STORE_OF_SCHEME, STORES

    store = STORE_OF_SCHEME.get(scheme_of(url))
    if store is None:
        known = ", ".join(f"{scheme}://" for scheme in STORE_OF_SCHEME)
        raise ConfigError(
            f"{shown} is no address that ucm knows; give a directory, or one that begins with"
            f" {known}"
        )
    kind = STORES[store].kind
    unknown = [key for key in told if key not in kind.options]
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
        section = made.model_validate({**environment, **told, "storage_backends": [url]})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    options = STORES[store].told(lambda key: getattr(section, key))
    del options["kind"]
    return Place(kind.word, for_core(options))


def _found(kind: Kind, item: _Item) -> Found:
    path, _, size, used_ns, _ = item
    *directory, name = path.split("/")
    return Found(kind, tuple(directory), name, size, used_ns, used_ns, 0)
