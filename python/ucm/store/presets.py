"""Stores by the names of the original: presets of the one engine, and two that keep no bytes.

A store of one tier without code of its own has its class made here on first use, from the kind of
tier with its name (:func:`__getattr__`): ``UcmNfsStore``, ``UcmDs3fsStore``, ``UcmMooncakeStore``,
``UcmObjectStore`` and others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import ValidationError

from ucm.config.fields import config_error
from ucm.config.words import STORES, option_keys, options_of
from ucm.errors import ClosedError, ConfigError, InvalidInputError, NotFoundError, UcmError
from ucm.store.engine import (
    EngineSettings,
    PosixTask,
    UcmPosixStore,
    read_pipeline_settings,
    read_stages,
)
from ucm.store.ucmstore_v1 import (
    Addresses,
    Ids,
    Ints,
    Task,
    UcmKVStoreBaseV1,
    Until,
    checked_ids,
    rows_failed,
    same_rows,
    task_of,
    wait_all,
)


def __getattr__(name: str) -> type[UcmPosixStore]:
    if name not in STORES or STORES[name].kind.role != "medium":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    members = {
        "__doc__": f"{name}: {STORES[name].summary}.",
        "__module__": __name__,
        "store_name": name,
    }
    made = type(name, (UcmPosixStore,), members)
    globals()[name] = made  # found at once by the next use
    return made


class UcmCacheStore(UcmPosixStore):
    """Blocks in memory that the processes of this host share; all are lost with the last of these.
    With ``backend: {name, config}`` it is the cache above that store, a pipeline of the two."""

    store_name: ClassVar[str] = "UcmCacheStore"

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> EngineSettings:
        if config.get("backend"):
            return read_stages(config, cls.__name__)
        return super()._read(config)


class PrefixTask(PosixTask):
    """A load of the first :attr:`blocks` blocks of a prefix."""

    #: Blocks that are being loaded, from the first on; 0: none is stored, the task is finished.
    blocks: int = 0


class UcmPcStore(UcmPosixStore):
    """Blocks of one root in segments: many in one file that is published whole, looked up in
    memory."""

    store_name: ClassVar[str] = "UcmPcStore"

    def load_prefix(
        self, prefix_hashes: Ids, dst_addrs: Addresses, timeout: float | None = None
    ) -> PrefixTask:
        """Load whole blocks from the first id on, as many as are stored without a gap.

        ``dst_addrs`` has shape (blocks * shards of a block, pieces per shard), the shards of a
        block one after the other. ``timeout`` in seconds, the configured deadline if None.
        :attr:`~PrefixTask.blocks` of the task is how many blocks it loads; memory of the others is
        not touched.
        """
        shards = self.settings.block_size // self.settings.shard_size
        addrs = np.asarray(dst_addrs)
        if addrs.shape[:1] != (len(prefix_hashes) * shards,):
            raise InvalidInputError(
                "dst_addrs has one row for each shard of each block",
                context={"shape": addrs.shape, "blocks": len(prefix_hashes), "shards": shards},
            )
        blocks = self.lookup_on_prefix(prefix_hashes) + 1
        ids = [block_id for block_id in prefix_hashes[:blocks] for _ in range(shards)]
        shard_index, rows = list(range(shards)) * blocks, addrs[: blocks * shards]
        loading = self.load_data(ids, shard_index, rows, timeout)
        task = PrefixTask(loading.handle, loading.kind)
        task.blocks = blocks
        return task


class UcmPipelineStore(UcmPosixStore):
    """The stages that ``store_pipeline`` names, top first, with their keys."""

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> EngineSettings:
        return read_pipeline_settings(config)

    @classmethod
    def _word(cls) -> str:
        return "pipeline"


class InstantTask(Task):
    """A load or dump that ended at once, with these failures by row."""

    def __init__(self, kind: str, failures: dict[int, UcmError]) -> None:
        super().__init__()
        self.kind, self.failures, self.completed = kind, failures, True


class InstantStore(UcmKVStoreBaseV1):
    """Waiting for and checking of such tasks, and the checks of arguments."""

    has_staged_level = True

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        """Never waits. Raises :class:`~ucm.errors.TaskError` for a task that failed."""
        if isinstance(task, list | tuple):
            wait_all(self, task, timeout, until)
        elif failures := task_of(InstantTask, task, "this store").failures:
            raise rows_failed(task, failures)

    def check(self, task: Any, until: Until = "published") -> bool:
        """Always."""
        del until
        return task_of(InstantTask, task, "this store").completed

    def checked(self, block_ids: Sequence[Any]) -> Sequence[bytes]:
        """The ids, if each is one and the store is open."""
        if self._closed:
            raise ClosedError("the store is closed")
        return checked_ids(block_ids)

    def rows(self, block_ids: Ids, shard_index: Ints, addrs: Any) -> int:
        """The number of rows, if it is the same everywhere."""
        return same_rows(self.checked(block_ids), shard_index, addrs)


class UcmEmptyStore(InstantStore):
    """Never a hit; a load fails with :class:`~ucm.errors.NotFoundError`, a dump is accepted and
    dropped. Every key of the other stores is accepted and means nothing."""

    def lookup(self, block_ids: Ids) -> list[bool]:
        return [False for _ in self.checked(block_ids)]

    def load_data(self, block_ids: Ids, shard_index: Ints, addrs: Addresses) -> InstantTask:
        rows = self.rows(block_ids, shard_index, addrs)
        absent = NotFoundError("the empty store has no block")
        return InstantTask("load", dict.fromkeys(range(rows), absent))

    def dump_data(
        self, block_ids: Ids, shard_index: Ints, addrs: Addresses, prerequisite_handle: int = 0
    ) -> InstantTask:
        self.rows(block_ids, shard_index, addrs)
        return InstantTask("dump", {})

    def stats(self) -> dict[str, Any]:
        return {"healthy": True}


class UcmFakeStore(InstantStore):
    """Ids alone, first in, first out. Keys: ``buffer_number`` (ids kept), ``allow_wrong_tokens``
    (must be true), ``storage_backends`` (a directory through which several processes share the ids;
    none: this process alone)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        given = {key: config[key] for key in option_keys("UcmFakeStore") if key in config}
        try:
            options = options_of("UcmFakeStore")(**given).model_dump()
        except ValidationError as error:
            raise config_error(error, store="UcmFakeStore") from None
        if not options["allow_wrong_tokens"]:
            raise ConfigError(
                "UcmFakeStore loads nothing, so an engine that uses it answers with wrong tokens;"
                " it is for tests: write allow_wrong_tokens: true there, and use UcmPosixStore"
                " everywhere else"
            )
        where = config.get("storage_backends") or ()
        root = where if isinstance(where, str | os.PathLike) else next(iter(where), None)
        path = None if root is None else Path(root) / "ucm-fake-ids"
        self._ids = IdRing(options["buffer_number"], path)
        shard = int(config.get("shard_size") or 1)
        self._shards = max(1, int(config.get("block_size", 1)) // shard)
        self._incomplete: dict[bytes, set[int]] = {}
        self._limit = options["buffer_number"]

    def lookup(self, block_ids: Ids) -> list[bool]:
        return self._ids.has(self.checked(block_ids))

    def load_data(self, block_ids: Ids, shard_index: Ints, addrs: Addresses) -> InstantTask:
        self.rows(block_ids, shard_index, addrs)
        there = self._ids.has(block_ids)
        missing = NotFoundError("this block was never dumped, or was pushed out by later ones")
        return InstantTask("load", {row: missing for row, known in enumerate(there) if not known})

    def dump_data(
        self, block_ids: Ids, shard_index: Ints, addrs: Addresses, prerequisite_handle: int = 0
    ) -> InstantTask:
        self.rows(block_ids, shard_index, addrs)
        whole = []
        for block, shard in zip(block_ids, shard_index, strict=True):
            left = self._incomplete.setdefault(block, set(range(self._shards)))
            left.discard(int(shard))
            if not left:
                del self._incomplete[block]
                whole.append(block)
        while len(self._incomplete) > self._limit:
            del self._incomplete[next(iter(self._incomplete))]
        self._ids.add(whole)
        return InstantTask("dump", {})

    def stats(self) -> dict[str, Any]:
        return {"healthy": True, "wrong_tokens": True}

    def close(self) -> None:
        super().close()
        self._ids.close()


_COUNT = struct.Struct("<Q")
_ID = 16


class IdRing:
    """A bounded first-in-first-out set of 16-byte ids; several processes may share one file."""

    def __init__(self, limit: int, path: Path | None = None) -> None:
        """``limit``: most ids kept, the same for all who share ``path``."""
        self._limit = limit
        self._lock = threading.Lock()
        self._known: dict[bytes, None] = {}
        self._seen = 0  # ids ever added
        size = _COUNT.size + limit * _ID
        if path is None:
            self._file = None
            self._map = mmap.mmap(-1, size)
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                there = os.fstat(self._file).st_size
                if there not in (0, size):  # others map it: it must not be cut
                    raise ConfigError(
                        "all who share the ids of a UcmFakeStore give the same buffer_number",
                        context={"path": str(path), "bytes": there, "expected": size},
                    )
                os.ftruncate(self._file, size)
            except BaseException:
                os.close(self._file)
                raise
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._map = mmap.mmap(self._file, size)

    def has(self, ids: Sequence[bytes]) -> list[bool]:
        """Which of them are kept."""
        with self._lock:
            self._catch_up()
            return [block in self._known for block in ids]

    def add(self, ids: Sequence[bytes]) -> None:
        """Keep them; an id that is kept already stays in its place."""
        with self._lock:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._catch_up()
                for block in ids:
                    if block not in self._known:
                        at = _COUNT.size + self._seen % self._limit * _ID
                        self._map[at : at + _ID] = block
                        _COUNT.pack_into(self._map, 0, self._seen + 1)
                        self._catch_up()
            finally:
                if self._file is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        count = int(_COUNT.unpack_from(self._map)[0])
        for number in range(max(self._seen, count - self._limit), count):
            at = _COUNT.size + number % self._limit * _ID
            self._known[self._map[at : at + _ID]] = None
        self._seen = count
        while len(self._known) > self._limit:
            del self._known[next(iter(self._known))]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._known.clear()
            if self._file is not None:
                os.close(self._file)
                self._file = None
