"""``UcmPosixStore``: the Rust engine over a directory on any file system that mounts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ucm._core import Asked, Store
from ucm._core import Sides as CoreSides
from ucm._core import Task as CoreTask
from ucm.config.secret import concealed
from ucm.config.stores import DEFAULT_STORE, STORES
from ucm.errors import ClosedError, DeadlineError, InvalidInputError, TaskError, UcmError
from ucm.store.kv_layout import KVLayout, block_numbers
from ucm.store.posix.settings import EngineSettings, read_settings, settings_of
from ucm.store.ucmstore_v1 import Priority, Sides, SidesTask, Task, UcmKVStoreBaseV1, Until

#: Part of the top level that prefetches may fill ahead of need (one in so many), and most blocks of
#: them.
PREFETCH_SHARE, MAX_PREFETCH = 8, 1024


class PosixTask(Task):
    """A load or dump under way in the core."""

    handle: CoreTask

    def __init__(self, handle: CoreTask, kind: str) -> None:
        super().__init__(handle)
        self.kind = kind

    def _is_over(self) -> bool:
        return self.handle.check("published")

    def shard_done(self, row: int) -> bool:
        """Whether row ``row`` of a load is where it was wanted, verified, while others of its block
        may still be read. Never waits."""
        return self.handle.shard_done(row)

    def wait_shard(self, row: int, timeout: float | None = None) -> bool:
        """Wait for that, ``timeout`` seconds at most; False if it is not so: the time was up, or
        the row has failed."""
        return self.handle.wait_shard(row, timeout)


class PosixSidesTask(PosixTask, SidesTask):
    """Side shards being read by the core."""

    def __init__(self, reading: CoreSides) -> None:
        super().__init__(reading.task, "read of side shards")
        self._reading = reading

    def result(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        if not self.completed:
            raise InvalidInputError("the side shards are not there yet: wait for the task first")
        return self._reading.result()

    def missing(self) -> dict[int, UcmError]:
        """Why side shards are not there, by the index of their ids: most of them because there is
        none."""
        return self.handle.failures()


class UcmPosixStore(UcmKVStoreBaseV1):
    """Records below a directory: host memory for staging, checksums on every read, bounded space.

    It is the base of every store of the core, too. The keys are those of ``docs/configuration.md``.
    """

    #: The name in the registry whose tier it opens.
    store_name: ClassVar[str] = DEFAULT_STORE

    has_staged_level = True
    takes_load_timeout = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.config = concealed(self.config)
        self.settings = self._read(config)
        self._logger = logging.getLogger(f"ucm.store.{self._word()}")
        self._last_warning = ""
        self._core = Store(self.settings.setup())
        self.side_sizes = {name: size for name, _, size in self._core.sides()}
        self._tiers = self._told_tiers()
        if len(self._tiers) > 1:
            self.tier_names = tuple(tier["name"] for tier in self._tiers)
        self.has_own_memory = any(tier["memory"] for tier in self._tiers)
        self._hand_over_log()

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> EngineSettings:
        """The checked keys; what a store of the core over other stages overrides."""
        return read_settings(config, settings_of(cls.store_name), cls.__name__)

    @classmethod
    def _word(cls) -> str:
        """The store's word, under which it logs."""
        return STORES[cls.store_name].word

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        found = self._open().lookup(block_ids)
        self._hand_over_log()
        return found

    def lookup_on_prefix(self, block_ids: Sequence[bytes]) -> int:
        last = self._open().lookup_on_prefix(block_ids) - 1
        self._hand_over_log()
        return last

    def explain_on_prefix(self, block_ids: Sequence[bytes]) -> tuple[int, str]:
        run, reason = self._open().explain_on_prefix(block_ids)
        self._hand_over_log()
        return run - 1, reason or "absent"

    def locate_on_prefix(self, block_ids: Sequence[bytes]) -> tuple[bytes, str]:
        tiers, reason = self._open().locate_on_prefix(block_ids)
        self._hand_over_log()
        return tiers, reason or "absent"

    def begin_locate_on_prefix(self, block_ids: Sequence[bytes]) -> Asked:
        asked = self._open().begin_locate_on_prefix(block_ids)
        self._hand_over_log()
        return asked

    @property
    def answers_at_once(self) -> bool:
        return self._open().answers_at_once()

    def load_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: npt.NDArray[np.uint64],
        timeout: float | None = None,
    ) -> PosixTask:
        """As in the base class; ``timeout`` in seconds, the configured deadline if None."""
        return PosixTask(self._open().load(block_ids, shard_index, _matrix(addrs), timeout), "load")

    def verify(self, block_ids: Sequence[bytes], timeout: float | None = None) -> PosixTask:
        """Starts a load of whole blocks that ends in the store's own memory: read and verified, and
        copied nowhere.

        It fails where a load would, with the same consequences: a refused record is no hit any
        more. ``timeout`` as in :meth:`load_data`.
        """
        return PosixTask(self._open().verify(block_ids, timeout), "load")

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: npt.NDArray[np.uint64],
        prerequisite_handle: int = 0,
        *,
        sides: Sides | None = None,
    ) -> PosixTask:
        """As in the base class; ``sides`` as of :meth:`dump`."""
        beside = self._beside(sides, len(block_ids))
        return PosixTask(
            self._open().dump(block_ids, shard_index, _matrix(addrs), prerequisite_handle, beside),
            "dump",
        )

    def load_sides(
        self, block_ids: Sequence[bytes], name: str, timeout: float | None = None
    ) -> PosixSidesTask:
        return PosixSidesTask(self._open().load_sides(block_ids, name, timeout))

    def dump_sides(self, block_ids: Sequence[bytes], sides: Sides) -> PosixTask:
        """As in the base class. Row *i* of the task is block *i* with the first name, then come
        those of the next."""
        unknown = [name for name in sides if name not in self.side_sizes]
        if unknown:
            raise self._other_sides(sides)
        rows = [
            (name, _bytes(name, side, len(block_ids), self.side_sizes[name]))
            for name, side in sides.items()
        ]
        return PosixTask(self._open().dump_sides(block_ids, rows), "dump")

    def _beside(self, sides: Sides | None, rows: int) -> npt.NDArray[np.uint8] | None:
        """What each row brings of every side shard, one behind the other in their order."""
        if not sides:
            return None
        if sides.keys() != self.side_sizes.keys():
            raise self._other_sides(sides)
        shards = self.settings.block_size // self.settings.shard_size
        shares = [
            _bytes(name, sides[name], rows, size // shards)
            for name, size in self.side_sizes.items()
        ]
        return np.ascontiguousarray(np.concatenate(shares, axis=1))

    def _other_sides(self, sides: Sides) -> InvalidInputError:
        return InvalidInputError(
            "a dump brings the side shards that the key `sides` of the store names, all of them",
            context={"given": sorted(sides), "declared": sorted(self.side_sizes)},
        )

    def register_kv(self, layout: KVLayout) -> None:
        if self._by_number:
            self._open().register_kv(layout.first, layout.stride, layout.num_blocks)
        super().register_kv(layout)

    @property
    def _by_number(self) -> bool:
        """Whether the core is given the numbers of blocks: not where a class of its own moves rows
        in its own way, or where a block is split into shards."""
        own = type(self)
        as_here = (
            own.load_data is UcmPosixStore.load_data and own.dump_data is UcmPosixStore.dump_data
        )
        return as_here and self.settings.shard_size == self.settings.block_size

    def load_blocks(
        self,
        block_ids: Sequence[bytes],
        blocks: Sequence[int] | npt.NDArray[np.int64],
        timeout: float | None = None,
    ) -> Task:
        if not self._by_number:
            return super().load_blocks(block_ids, blocks, timeout)
        return PosixTask(
            self._open().load_blocks(block_ids, block_numbers(blocks), timeout), "load"
        )

    def dump_blocks(
        self,
        block_ids: Sequence[bytes],
        blocks: Sequence[int] | npt.NDArray[np.int64],
        prerequisite_handle: int = 0,
        *,
        sides: Sides | None = None,
    ) -> Task:
        if not self._by_number:
            return super().dump_blocks(block_ids, blocks, prerequisite_handle, sides=sides)
        numbers, beside = block_numbers(blocks), self._beside(sides, len(block_ids))
        return PosixTask(
            self._open().dump_blocks(block_ids, numbers, prerequisite_handle, beside), "dump"
        )

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        if isinstance(task, list | tuple):
            self._wait_all(task, timeout, until)
            return
        handle = _handle(task)
        finished = handle.wait(until, timeout)
        self._hand_over_log()
        if not finished:
            raise DeadlineError(f"the {task.kind} is not {until} yet", context={"timeout": timeout})
        task.completed = task.completed or until == "published" or task.kind != "dump"
        failures = {} if isinstance(task, PosixSidesTask) else handle.failures()
        if failures:
            first = min(failures)
            task.error = TaskError(
                f"{len(failures)} rows of the {task.kind} failed, the first: {failures[first]}",
                failures=failures,
                context={"row": first},
            )
            raise task.error

    def _wait_all(self, tasks: Sequence[Any], timeout: float | None, until: Until) -> None:
        """Wait for all, within one ``timeout``; raises the first failure once every one has been
        waited for."""
        end = None if timeout is None else time.monotonic() + timeout
        failed: UcmError | None = None
        for task in tasks:
            try:
                self.wait(task, None if end is None else max(0.0, end - time.monotonic()), until)
            except UcmError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def check(self, task: Any, until: Until = "published") -> bool:
        finished = _handle(task).check(until)
        if finished and (until == "published" or task.kind != "dump"):
            task.completed = True
        return finished

    def describe(
        self,
        block_ids: Sequence[bytes],
        *,
        parents: Sequence[bytes] | None = None,
        ordinals: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        tenant: bytes | None = None,
    ) -> None:
        self._open().describe(block_ids, parents, ordinals, tokens, tenant)

    def audit(self, block_ids: Sequence[bytes]) -> None:
        self._open().audit(block_ids)

    def distrust(self, block_ids: Sequence[bytes]) -> None:
        self._open().distrust(block_ids)

    def trust(self, block_ids: Sequence[bytes]) -> None:
        self._open().trust(block_ids)

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._open().touch(block_ids)

    def touch_own(self, block_ids: Sequence[bytes], first: int = 0) -> None:
        self._open().touch_own(block_ids, first)

    @property
    def wants_touch_own(self) -> bool:
        return self._open().wants_touch_own()

    def served(self, task: Any) -> Sequence[int]:
        """As in the base class; also while the load goes on."""
        return _handle(task).served()[: len(self._tiers)]

    def prefetch_room(self) -> int:
        """A part of the top level, so that what is brought up does not push out what is in use
        there."""
        tiers = self._told_tiers()
        if tiers[-1]["level"] == 0:
            return 0
        top = (
            sum(int(tier["capacity_bytes"]) for tier in tiers if tier["level"] == 0)
            // self.record_len
        )
        return min(top // PREFETCH_SHARE, MAX_PREFETCH)

    def prefetch(self, block_ids: Sequence[bytes], priority: Priority = "normal") -> int:
        return self._open().prefetch(block_ids, priority)

    def cancel_prefetch(self, block_ids: Sequence[bytes]) -> int:
        return self._open().cancel_prefetch(block_ids)

    def flush(self) -> None:
        self._open().flush()

    def cc_store(self) -> int:
        return self._open().cc_store()

    def stats(self) -> dict[str, Any]:
        self._hand_over_log()
        stats: dict[str, Any] = json.loads(self._core.stats())
        return stats

    def healthy(self) -> bool:
        return bool(json.loads(self._open().stats())["healthy"])

    def early(self) -> tuple[list[bytes], list[bytes]]:
        return self._open().early()

    def trouble(self) -> str:
        self._hand_over_log()
        return self._last_warning

    def free_dump_slots(self) -> int | None:
        return self._open().free_dump_slots()

    @property
    def record_len(self) -> int:
        """Bytes of one record on the medium."""
        return self._core.record_len

    def close(self) -> None:
        super().close()
        self._core.close()
        self._hand_over_log()

    def _told_tiers(self) -> list[dict[str, Any]]:
        tiers: list[dict[str, Any]] = json.loads(self._core.stats())["tiers"]
        return tiers

    def _open(self) -> Store:
        if self._closed:
            raise ClosedError("the store is closed")
        return self._core

    def _hand_over_log(self) -> None:
        """Writes what the core logged for this store since then: no thread of the core takes the
        GIL for it."""
        for level, message, fields in self._core.take_log():
            if level >= logging.WARNING:
                self._last_warning = message
            self._logger.log(
                level, "%s: %s", self.settings.label, message, extra={"fields": fields}
            )


def _handle(task: Any) -> CoreTask:
    if not isinstance(task, PosixTask):
        raise InvalidInputError(
            "this is no task of a UcmPosixStore",
            context={"type": type(task).__name__, "expected": "PosixTask"},
        )
    return task.handle


def _bytes(name: str, side: Any, rows: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a side shard: ``size`` for each of so many rows, whatever the type of the
    array."""
    array = np.asarray(side)
    given = array.nbytes // len(array) if array.ndim and len(array) else size
    if not array.ndim or len(array) != rows or given != size:
        raise InvalidInputError(
            "a side shard is an array with as many bytes in each row as the store was told",
            context={"name": name, "shape": array.shape, "bytes": given, "expected": (rows, size)},
        )
    return np.ascontiguousarray(array).view(np.uint8).reshape(rows, size)


def _matrix(addrs: Any) -> npt.NDArray[np.uint64]:
    matrix = np.asarray(addrs)
    if matrix.dtype != np.uint64:
        if matrix.size and not np.issubdtype(matrix.dtype, np.integer):
            raise InvalidInputError("addresses are integers", context={"dtype": str(matrix.dtype)})
        matrix = matrix.astype(np.uint64)
    if matrix.size == 0 and matrix.ndim != 2:
        matrix = matrix.reshape(0, 0)  # no rows, written as an empty list
    if matrix.ndim != 2:
        raise InvalidInputError(
            "addrs has shape (rows, pieces per row)", context={"shape": matrix.shape}
        )
    return np.ascontiguousarray(matrix)
