"""The columns of the matrix at the store level: the kinds of our stores.

A test selects its column with :func:`use`, in the environment, so that its child processes open the
same kind of store. The rest of the matrix uses the :class:`Column` and never its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from ucm.store import UcmConnectorFactoryV1
from ucm.store.posix import UcmPosixStore

#: Name of the column under test; the first one if it is not set.
VARIABLE = "UCM_TRUST_COLUMN"
#: Separates the memory of this run from that of others on the machine, which is found by identity.
RUN = os.environ.setdefault("UCM_TRUST_RUN", os.urandom(8).hex())


@dataclass(frozen=True)
class Column:
    """A kind of store: the layout of its records, the mode of reading and writing, and the upper
    tiers."""

    name: str
    layout: Literal["file", "segment"] = "file"
    #: Past the page cache.
    direct: bool = False
    #: A memory tier is the top stage.
    memory: bool = False
    #: Every record is stored compressed, independent of the gain.
    compressed: bool = False
    #: One directory, or two, of which the lower one decides about publishing.
    directories: Literal[1, 2] = 1

    @property
    def in_segments(self) -> bool:
        """True if many records share a file."""
        return self.layout == "segment"

    def roots(self, root: Path) -> list[Path]:
        """Its directories, top first; the last one is ``root``."""
        return [root.with_name(f"{root.name}-upper"), root][-self.directories :]

    def open(self, root: Path, common: Mapping[str, Any]) -> UcmPosixStore:
        """A store of this kind below ``root``."""
        keys: dict[str, Any] = {
            "io_direct": self.direct,
            "storage_backends": ":".join(map(str, self.roots(root))),
        }
        if self.in_segments:
            keys["segment_age"] = (
                0.05  # otherwise blocks without a waiter stay unpublished for long
            )
        above = ["Cache"] * self.memory + ["Compress"] * self.compressed
        if above:
            lower = "Pc" if self.in_segments else "Posix"
            keys["store_pipeline"] = "|".join([*above, *[lower] * self.directories])
        if self.memory:
            keys["cache_size"] = "2MiB"
        if not (above and self.in_segments):
            keys["layout"] = self.layout
        name = "UcmPipelineStore" if above else "UcmPosixStore"
        store = UcmConnectorFactoryV1.create_connector(name, {**keys, **common})
        assert isinstance(store, UcmPosixStore)
        return store


FILES = Column("file")
COLUMNS = (
    FILES,
    Column("file/direct", direct=True),
    Column("segment", "segment"),
    Column("segment/direct", "segment", direct=True),
    Column("Cache|Posix", memory=True),
    Column("Cache|Pc", "segment", memory=True),
    Column("Cache|Posix|Posix", memory=True, directories=2),
    Column("Compress|Pc", "segment", compressed=True),
)


def current() -> Column:
    """The column under test."""
    name = os.environ.get(VARIABLE, FILES.name)
    return next(column for column in COLUMNS if column.name == name)


def use(column: Column, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends all stores are of this kind, including those of child processes."""
    monkeypatch.setenv(VARIABLE, column.name)
