"""Loads and dumps under way on one rank: started, polled once per step, reported exactly once.
Never waits.

The store enforces deadlines: it ends a late load as failed. This module only calls ``store.check``
and, after the end, ``store.wait`` for the outcome. Any exception of a store ends the transfer as
failed, so that no request waits for ever.

vLLM frees no block of a load and computes no token of its request before every rank has reported
it. So :class:`PendingLoads` is kept outside of the code that may fail: a load enters it with the
step's metadata, before anything else reads them, and leaves it with its report.

With offload, which loads a block in one layer and not in others, a :class:`LayeredStore` stands
before the store, which was opened with one shard for each layer. Blocks are dumped and loaded whole
as before, their layers as rows of one task; the record is the same. One layer of some blocks can be
loaded alone.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ucm.errors import BusyError, TaskError, UcmError, UnsupportedError
from ucm.integration.vllm.connector.guard import logger, throttle
from ucm.integration.vllm.connector.metadata import (
    KEY,
    Dump,
    DumpResult,
    GroupBlocks,
    Load,
    LoadFailure,
    LoadServed,
    join_keys,
    split_keys,
)
from ucm.integration.vllm.connector.stats import TIMES, format_counts
from ucm.profiling import span, stages
from ucm.reasons import LEFT_ALONE, MissReason, is_transient, reason_of
from ucm.store import record_ids
from ucm.store.kv_layout import KVLayout, block_numbers
from ucm.store.ucmstore_v1 import Sides, Task, UcmKVStoreBaseV1

if TYPE_CHECKING:
    from ucm.integration.vllm.attention.representations import Representations


# Pending loads
# --------------------------------------------------------------------------------------------------


class PendingLoads:
    """Loads that were sent to this rank and not reported to vLLM."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._lost: set[str] = set()  # of these, failed without an answer of the store
        self.reported: list[Load] = []  # by the last report
        # of these, the lost ones: none of their blocks counts as filled
        self.unfilled: list[Load] = []

    def sent(self, loads: Iterable[Load]) -> None:
        """A step's metadata have arrived."""
        self._loads.update((load.request, load) for load in loads)

    def lost(self, loads: Iterable[Load]) -> None:
        """Loads that are never begun."""
        self._lost.update(load.request for load in loads)

    def lost_but(self, under_way: Collection[str]) -> None:
        """After a failure: all but these requests, whose loads may still write."""
        self._lost.update(self._loads.keys() - set(under_way))

    def report(self, ended: Iterable[str]) -> set[str]:
        """Requests that are reported to vLLM now: those whose load ended, and the lost ones."""
        names = (self._lost | set(ended)) & self._loads.keys()
        self.unfilled = [self._loads[name] for name in self._lost & names]
        self.reported = [self._loads.pop(name) for name in names]
        self._lost.clear()
        return names

    def __len__(self) -> int:
        return len(self._loads)


# Loads and dumps
# --------------------------------------------------------------------------------------------------


@cache
def _takes_tenant(store: type[UcmKVStoreBaseV1]) -> bool:
    """Whether a store's ``describe`` takes ``tenant``; a user's store may be older."""
    parameters = inspect.signature(store.describe).parameters.values()
    return any(one.name == "tenant" or one.kind is one.VAR_KEYWORD for one in parameters)


def finished(store: UcmKVStoreBaseV1, task: Any, staged: bool = False) -> bool:
    """Whether a task ended (with ``staged``: whether device memory is free again). Never raises."""
    try:
        if staged and store.has_staged_level:
            return bool(store.check(task, until="staged"))
        return bool(store.check(task))
    except UcmError as error:
        # Busy: poll again. After any other error it has ended, and wait() says how.
        return not error.retryable
    except Exception as error:
        throttle.warning("check", "the store's check() failed: %r", error)
        return True


def failed_rows(store: UcmKVStoreBaseV1, task: Any, rows: int) -> dict[int, BaseException]:
    """The failures of a finished task by row. Never raises."""
    try:
        store.wait(task)
    except TaskError as error:
        return _named_rows(error, rows) or dict.fromkeys(range(rows), error)
    except Exception as error:
        return dict.fromkeys(range(rows), error)
    return {}


def _named_rows(error: TaskError, rows: int) -> dict[int, BaseException]:
    """The failures that a task names; none if they are malformed, then all its rows failed."""
    named: object = error.failures
    if not isinstance(named, Mapping):
        return {}
    sound = (row in range(rows) and isinstance(why, BaseException) for row, why in named.items())
    return {int(row): why for row, why in named.items()} if all(sound) else {}


def served_tiers(store: UcmKVStoreBaseV1, task: Any) -> tuple[int, ...]:
    """Blocks of a load by their tier; none where a store has one tier or does not know. Never
    raises."""
    if len(store.tier_names) < 2:
        return ()
    try:
        return tuple(int(blocks) for blocks in store.served(task))
    except Exception as error:  # only statistics are lost
        throttle.warning("served", "the store's served() failed: %r", error)
        return ()


@dataclass(frozen=True)
class GroupStore:
    """The store as that of one KV group on a rank."""

    store: UcmKVStoreBaseV1
    #: Between the keys of blocks, as they are sent, and the ids of their records.
    mask: bytes
    #: Tokens of a block there.
    tokens: int = 0
    #: Where its KV lies.
    layout: KVLayout | None = None


@dataclass(slots=True)
class _Running:
    work: Any
    task: Any
    store: UcmKVStoreBaseV1  # it was begun on, which may be closed by now
    keep: Any = None  # what must live as long as the device may read it
    staged: bool = False
    began: float = 0.0
    staged_at: float = 0.0


class _Times:
    """How long transfers took, in seconds, until :meth:`take`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._taken: list[float] = []

    def ended(self, running: _Running | _Loading) -> None:
        if len(self._taken) < TIMES:
            self._taken.append(self.clock() - running.began)

    def take(self) -> list[float]:
        """Those since the last call."""
        taken, self._taken = self._taken, []
        return taken


@dataclass(slots=True)
class _Loading:
    """A load under way: a task for each KV group."""

    load: Load
    began: float
    tasks: list[_Running] = field(default_factory=list)
    refused: Exception | None = None  # why a group's task was not begun

    def ended(self) -> bool:
        return all(finished(one.store, one.task) for one in self.tasks)


class Loads:
    """Loads of one rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, whole: bool = False) -> None:
        """``whole``: a load that lacks a block is of no use."""
        self.times = _Times(clock)
        self._whole = whole
        self._running: list[_Loading] = []
        self._failed: set[str] = set()  # requests whose loads failed as a whole
        # loads whose blocks are there, and their representations perhaps not
        self._selecting: dict[str, Load] = {}
        self._ended: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failures: list[LoadFailure] = []
        self._served: list[LoadServed] = []
        self.loaded: Counter[int] = Counter()  # blocks loaded so far, by KV group
        #: Under sparse attention: prepares a loaded block before its load is reported.
        self.representations: Representations | None = None

    def start(self, load: Load, stores: Mapping[int, GroupStore]) -> None:
        """Begin; if that is impossible the load has failed already. ``stores``: of the KV groups
        that have layers on this rank, none where it has no store."""
        if not stores:
            return self._fail_all(load, MissReason.UNHEALTHY)
        loading = _Loading(load, self.times.clock())
        for part in (GroupBlocks(0, load.first, load.keys, load.blocks), *load.rest):
            own = stores.get(part.group)
            if own is None or not part.keys:
                continue  # no layers here, or nothing of this group is needed
            ids = record_ids(part.keys, own.mask)
            if self.representations is not None:
                unread, name = record_ids(load.unread, own.mask), load.request
                blocks, timeout = part.blocks, load.timeout
                self.representations.begin_load(name, ids, blocks, own.store, timeout, unread)
            try:
                task = own.store.load_blocks(ids, part.blocks, load.timeout)
            except Exception as error:
                throttle.warning("load", "a load was refused: %s", error)
                loading.refused = error
                break
            loading.tasks.append(_Running(part, task, own.store))
        if loading.refused is not None and not loading.tasks:
            return self._fail_all(load, reason_of(loading.refused))
        self._running.append(loading)

    def poll(self) -> None:
        """Process those that have ended."""
        still = []
        for loading in self._running:
            if not loading.ended():
                still.append(loading)
                continue
            self.times.ended(loading)
            request, now = loading.load.request, self.times.clock()
            for running in loading.tasks:
                of = {"group": running.work.group, "blocks": len(running.work.blocks)}
                span("load", loading.began, now, request=request, **of)
                task, began = running.task, loading.began
                stages("load", running.store, task, began, request=request, **of)
            load, failures, tiers = loading.load, dict[int, BlockFailure](), Counter[int]()
            for running in loading.tasks:
                part: GroupBlocks = running.work
                failed = failed_rows(running.store, running.task, len(part.blocks))
                self.loaded[part.group] += len(part.blocks) - len(failed)
                keys = split_keys(part.keys) if failed else []
                for row in sorted(failed):
                    of_block = failures.setdefault(part.first + row, BlockFailure(failed[row]))
                    of_block.add(keys[row], failed[row])
                if not failed:
                    tiers.update(dict(enumerate(served_tiers(running.store, running.task))))
            if loading.refused is not None:
                self._fail_all(load, reason_of(loading.refused))
            elif failures:
                self._report_failures(load, failures)
            else:
                self._arrived(load)
                if tiers:
                    served = tuple(tiers[tier] for tier in range(max(tiers) + 1))
                    self._served.append(LoadServed(load.request, served))
        self._running = still
        if self.representations is not None:
            for request in self.representations.work():
                self._over(request)

    def _report_failures(self, load: Load, failures: Mapping[int, BlockFailure]) -> None:
        """``failures`` by ordinal, in every group."""
        at = min(failures)
        first = load.first if load.unread or load.whole else at
        text = "request %s: block %d: %s"
        throttle.warning("load failed", text, load.request, first - load.first, failures[at].why)
        behind = range(first, max(load.first + len(load.blocks), max(failures) + 1))
        reasons = {at: reason_of(failure.why) for at, failure in failures.items()}
        self._fail(
            load,
            first,
            [key for failure in failures.values() for key in failure.bad],
            [reasons.get(at, MissReason.LOAD_FAILED) for at in behind],
            [key for failure in failures.values() for key in failure.newer],
        )

    def _arrived(self, load: Load) -> None:
        """All blocks of a load are there."""
        self._selecting[load.request] = load
        if self.representations is None or self.representations.arrived(load.request, load.blocks):
            self._over(load.request)

    def _over(self, request: str) -> None:
        """A load whose blocks are there has ended. Without the representations of blocks that were
        not read, its request cannot run: vLLM is to admit it again, and to load all of it."""
        load, made = self._selecting.pop(request, None), self.representations
        if load is None or not load.unread or made is None or made.selectable(request):
            self._ended.add(request)
            return
        reasons = [MissReason.LOAD_FAILED] * len(load.blocks)
        self._fail(load, load.first, [], reasons, unselectable=True)

    def _fail_all(self, load: Load, reason: MissReason) -> None:
        first = min([load.first, *(part.first for part in load.rest)])
        self._fail(load, first, [], [reason] * max(len(load.blocks), 1))

    def _fail(
        self,
        load: Load,
        first: int,
        bad: Sequence[bytes],
        why: Sequence[MissReason],
        newer: Sequence[bytes] = (),
        *,
        unselectable: bool = False,
    ) -> None:
        if self.representations is not None:
            self.representations.failed(load.request)
        if self._whole:
            self._failed.add(load.request)
        else:  # from the first one on: that one ends what vLLM takes for loaded
            self._bad_blocks.update(load.blocks[first - load.first :].tolist())
        reasons = tuple(str(reason) for reason in why)
        refused, left = join_keys(bad), join_keys(newer)
        failure = LoadFailure(load.request, first, refused, reasons, left, unselectable)
        self._failures.append(failure)
        self._ended.add(load.request)

    def under_way(self, *, poll: bool) -> set[str]:
        """Requests whose loads may still write to device blocks; ``poll``: check each with the
        store, because :meth:`poll` failed."""
        running = [one for one in self._running if not poll or not one.ended()]
        return {one.load.request for one in running} | ({} if poll else self._selecting).keys()

    def drain(self) -> None:
        """Return when no load under way writes to device blocks any more, because they are about to
        be unmapped; the store's deadline of a load bounds the wait."""
        for running in (task for loading in self._running for task in loading.tasks):
            try:
                running.store.wait(running.task)
            except Exception as error:  # reported when it is polled
                throttle.warning("drain", "a load failed: %s", error)

    def forget(self, load: Load) -> None:
        """This load was reported as failed: drop its state, which a later load of its request must
        not find, and report the failure to the scheduler side, which then claims the same hit no
        more."""
        self._running = [one for one in self._running if one.load is not load]
        self._failed.discard(load.request)
        self._selecting.pop(load.request, None)
        self._ended.discard(load.request)
        self._bad_blocks.difference_update(load.blocks.tolist())
        self._served = [served for served in self._served if served.request != load.request]
        if self.representations is not None:
            self.representations.forget(load.request)
        if all(failure.request != load.request for failure in self._failures):
            reasons = (str(MissReason.INTERNAL),) * max(len(load.blocks), 1)
            self._failures.append(LoadFailure(load.request, load.first, b"", reasons))

    def take_ended(self) -> set[str]:
        """Requests whose load ended since the last call, each named once."""
        ended, self._ended = self._ended, set()
        return ended

    def take_failed(self) -> set[str]:
        """Requests whose load failed as a whole since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_bad_blocks(self) -> set[int]:
        """Device blocks that a load did not fill."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_news(self) -> tuple[list[LoadFailure], list[LoadServed]]:
        """For the scheduler side: loads that failed since the last call, and the tiers of the
        blocks of those that succeeded."""
        news = self._failures, self._served
        self._failures, self._served = [], []
        return news

    @property
    def blocks(self) -> int:
        """Blocks loaded so far."""
        return sum(self.loaded.values())

    def __len__(self) -> int:
        return len(self._running)


@dataclass(slots=True)
class BlockFailure:
    """Why a block of a load failed, in any of its groups."""

    why: BaseException
    bad: list[bytes] = field(default_factory=list)  # keys of records that are bad, not merely late
    newer: list[bytes] = field(default_factory=list)  # and of those that stay

    def add(self, key: bytes, why: BaseException) -> None:
        """The record of this key failed."""
        if reason_of(why) in LEFT_ALONE:
            self.newer.append(key)
        elif not is_transient(why):
            self.bad.append(key)


class Dumps:
    """Dumps of one rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.times = _Times(clock)
        self.comparisons = Comparisons()
        self._running: list[_Running] = []
        self._staged: list[int] = []
        self._done: list[DumpResult] = []
        self.last_job = 0
        self.published: Counter[int] = Counter()  # blocks published so far, by KV group

    def skip(self, dump: Dump, own: GroupStore | None) -> None:
        """Another rank writes the same bytes, or this one has no layers of that group (``own`` is
        None). Records that it replaces may be refused on this one."""
        self.last_job = max(self.last_job, dump.job)
        if dump.refused and own is not None:
            try:
                own.store.clear_bad(record_ids(_rows(dump), own.mask))
            except Exception as error:  # they stay refused for longer than needed
                throttle.warning("clear_bad", "the store's clear_bad() failed: %r", error)
        self._done.append(DumpResult(dump.job))

    def start(
        self,
        dumps: Sequence[Dump],
        own: GroupStore | None,
        event: tuple[int, Any],
        representations: Representations | None = None,
    ) -> None:
        """Begin those of one KV group; after a refused one the rest of its request's chain is
        refused for this step. ``own``: its store, None where there is none yet; ``event``: handle
        and its owner; ``representations``: what is stored beside the KV."""
        refused: set[str] = set()
        for dump in dumps:
            self.last_job = max(self.last_job, dump.job)
            if dump.compare:
                self.comparisons.begin(dump, own)
                self._done.append(DumpResult(dump.job))
                continue
            if own is None or dump.request in refused:
                self._refuse(dump, busy=True)
                continue
            store, mask = own.store, own.mask
            try:
                ids = record_ids(dump.keys, mask)
                parent = record_ids(dump.parent, mask)[0] if dump.parent else bytes(16)
                tagged = dump.tenant and _takes_tenant(type(store))
                store.describe(
                    ids,
                    parents=[parent, *ids[:-1]],
                    ordinals=list(range(dump.first, dump.first + len(ids))),
                    tokens=[own.tokens] * len(ids),
                    **({"tenant": dump.tenant} if tagged else {}),
                )
                if dump.refused:
                    store.mark_bad([ids[row] for row in dump.refused])
                beside = representations
                sides = None if beside is None else beside.beside(dump.blocks, store)
                with_sides = {} if sides is None else {"sides": sides}
                task = store.dump_blocks(ids, dump.blocks, event[0], **with_sides)
            except BusyError:
                refused.add(dump.request)
                self._refuse(dump, busy=True)
            except Exception as error:
                throttle.warning("dump", "a dump was refused: %s", error)
                refused.add(dump.request)
                self._refuse(dump, busy=False)
            else:
                began, keep = self.times.clock(), event[1]
                self._running.append(_Running(dump, task, store, keep=keep, began=began))

    def _refuse(self, dump: Dump, busy: bool) -> None:
        self._done.append(DumpResult(dump.job, tuple(range(len(dump.blocks))), busy))

    def flush(self, jobs: Collection[int] | None) -> None:
        """Return when the source blocks of these jobs (None: of all) were read, or never will be:
        they are about to be overwritten. Reading is a copy in memory, begun a step ago or earlier,
        so the wait is rare and short; the store's deadline of a dump bounds it."""
        for running in self._running:
            if (jobs is None or running.work.job in jobs) and not running.staged:
                try:
                    if running.store.has_staged_level:
                        running.store.wait(running.task, until="staged")
                    else:
                        running.store.wait(running.task)
                except Exception as error:  # reported when it is polled
                    throttle.warning("flush", "a dump failed: %s", error)

    def poll(self) -> None:
        """Process those that are staged and those that have ended."""
        still = []
        for running in self._running:
            dump: Dump = running.work
            store = running.store
            if not running.staged and finished(store, running.task, staged=True):
                running.staged, running.keep = True, None
                self._span("gather", running, running.began)
                running.staged_at = self.times.clock()
                self._staged.append(dump.job)
            if not running.staged or not finished(store, running.task):
                still.append(running)
                continue
            self.times.ended(running)
            self._span("publish", running, running.staged_at)
            of = {"request": dump.request, "group": dump.group, "blocks": len(dump.blocks)}
            stages("dump", store, running.task, running.began, **of)
            failures = failed_rows(store, running.task, len(dump.blocks))
            self.published[dump.group] += len(dump.blocks) - len(failures)
            # The store logs these once: such a block is not stored, and other dumps go on.
            left_alone = [row for row, why in failures.items() if reason_of(why) in LEFT_ALONE]
            failed = {row: why for row, why in failures.items() if row not in left_alone}
            if failed:
                throttle.warning("dump failed", "a dump failed: %s", failed[min(failed)])
            busy = bool(failed) and all(isinstance(why, BusyError) for why in failed.values())
            rows = tuple(sorted(failed)), tuple(sorted(left_alone))
            self._done.append(DumpResult(dump.job, rows[0], busy, rows[1]))
        self._running = still

    def _span(self, name: str, running: _Running, began: float) -> None:
        dump: Dump = running.work
        blocks = len(dump.blocks)
        span(name, began, self.times.clock(), request=dump.request, group=dump.group, blocks=blocks)

    def take(self) -> tuple[list[int], list[DumpResult]]:
        """Jobs staged and jobs ended since the last call."""
        staged, done = self._staged, self._done
        self._staged, self._done = [], []
        ended = {result.job for result in done}
        return [job for job in staged if job not in ended], done

    @property
    def news(self) -> bool:
        """Whether :meth:`take` has something."""
        return bool(self._staged or self._done)

    @property
    def blocks(self) -> int:
        """Blocks published so far."""
        return sum(self.published.values())

    @property
    def failed(self) -> bool:
        """Whether some dump failed, not only for want of room, since the last :meth:`take`."""
        return any(result.failed and not result.busy for result in self._done)

    def __len__(self) -> int:
        return len(self._running)


def _rows(dump: Dump) -> list[bytes]:
    """Keys of a dump whose stored records some rank could not use."""
    keys = split_keys(dump.keys)
    return [keys[row] for row in dump.refused]


# Comparing
# --------------------------------------------------------------------------------------------------

#: Most bytes of KV that are compared at a time, in each KV group.
COMPARED_BYTES = 64 << 20
#: The largest difference of two blocks that are close, as a share of the largest element of their
#: tensor: KV that was computed in another batch may be rounded otherwise.
CLOSE = 1 / 32


class Comparisons:
    """Compares stored blocks with those that this engine computed (:attr:`.Dump.compare`).

    The computed blocks are copied to the host at once. A thread loads the stored ones into memory
    of its own and compares the bytes, one job of a KV group at a time. Jobs that are sent in the
    meantime, and blocks that cannot be loaded, are not compared.
    """

    def __init__(self) -> None:
        self._running: set[int] = set()  # KV groups
        #: Blocks that were "equal", "close" and "different" so far.
        self.counts: Counter[str] = Counter()

    def begin(self, dump: Dump, own: GroupStore | None) -> None:
        """Begin with the first blocks of a job, as many as may be compared at a time."""
        if own is None or own.layout is None or dump.group in self._running:
            return
        self._running.add(dump.group)
        try:
            most = max(1, COMPARED_BYTES // own.layout.block_bytes)
            args = dump, own, own.layout, kv_bytes(own.layout, dump.blocks[:most])
            work = threading.Thread(target=self._work, args=args, name="ucm-compare", daemon=True)
            work.start()
        except Exception as error:
            self._running.discard(dump.group)
            throttle.warning("compare", "stored blocks cannot be compared: %r", error)

    def _work(self, dump: Dump, own: GroupStore, layout: KVLayout, computed: torch.Tensor) -> None:
        rows, results = len(computed), Counter[str]()
        try:
            stored = torch.empty(computed.shape, dtype=torch.uint8, device=layout.device)
            stored[:1, :1].cpu()  # no earlier work of the device uses this memory any more
            sizes = [view.run for layer in layout.layers for view in layer for _ in view.offsets]
            addresses = stored.data_ptr() + np.arange(rows)[:, None] * layout.block_bytes
            addresses = (addresses + np.cumsum([0, *sizes[:-1]])).astype(np.uint64)
            ids = record_ids(dump.keys[: rows * KEY], own.mask)
            own.store.wait(own.store.load_data(ids, [0] * rows, addresses))
            for at, (ours, theirs) in enumerate(zip(computed, stored.cpu(), strict=True)):
                result, how = compared(layout, ours, theirs)
                results[result] += 1
                if result == "different":
                    text = "request %s: block %d is stored with other KV than was computed: %s"
                    throttle.warning("different", text, dump.request, dump.first + at, how)
        except Exception as error:
            logger.info("request %s: stored blocks not compared: %s", dump.request, error)
        if results:
            self.counts += results
            found = format_counts(results), format_counts(self.counts)
            logger.info("request %s: stored blocks: %s; in all: %s", dump.request, *found)
        self._running.discard(dump.group)  # the results are there


def kv_bytes(layout: KVLayout, blocks: npt.NDArray[np.int64]) -> torch.Tensor:
    """The KV of these blocks, a row of bytes each, in the order in which a store has them."""
    rows, numbers = list[torch.Tensor](), torch.tensor(blocks)
    for tensor in itertools.chain.from_iterable(layout.tensors):
        parts = tensor.unflatten(0, (layout.num_blocks, -1))
        order = sorted(range(1, parts.dim()), key=parts.stride, reverse=True)
        rows.append(parts.permute(0, *order)[numbers].flatten(1).view(torch.uint8))
    return torch.cat(rows, 1).cpu()


def compared(layout: KVLayout, ours: torch.Tensor, theirs: torch.Tensor) -> tuple[str, str]:
    """Whether the bytes of two blocks are "equal", or their elements "close" or "different", and
    how they differ."""
    if torch.equal(ours, theirs):
        return "equal", ""
    at, worst = 0, (0.0, 0.0, "")
    for name, tensors, views in zip(layout.names, layout.tensors, layout.layers, strict=True):
        for tensor, view in zip(tensors, views, strict=True):
            end = at + view.run * len(view.offsets)
            pair = torch.stack((ours[at:end], theirs[at:end])).view(tensor.dtype).double()
            pair = pair.nan_to_num(nan=1e300)
            gap, largest = float((pair[0] - pair[1]).abs().max()), float(pair.abs().max())
            worst = max(worst, (gap / largest if gap else 0.0, gap, name))
            at = end
    share, gap, name = worst
    differ = f"{int((ours != theirs).sum())} of {len(ours)} bytes differ"
    most = f"most in layer {name}, by up to {gap:.4g} ({share:.1%} of its largest element)"
    return "close" if share <= CLOSE else "different", f"{differ}, {most}"


# One layer at a time
# --------------------------------------------------------------------------------------------------

Ids = Sequence[int] | npt.NDArray[np.int64]


def layer_bytes(layout: KVLayout) -> int:
    """Bytes of one layer of a block. Raises :class:`~ucm.errors.UnsupportedError` where layers
    differ."""
    sizes = {sum(view.run * len(view.offsets) for view in layer) for layer in layout.layers}
    pieces = {sum(len(view.offsets) for view in layer) for layer in layout.layers}
    if len(sizes) != 1 or len(pieces) != 1:
        raise UnsupportedError(
            "the layers of this model have KV of different sizes", context={"bytes": sorted(sizes)}
        )
    return sizes.pop()


class LayeredStore:
    """Stands before a store that was opened with ``shard_size`` of one layer, and passes on other
    calls."""

    def __init__(self, store: UcmKVStoreBaseV1, layout: KVLayout) -> None:
        """Raises :class:`~ucm.errors.UnsupportedError` for a store whose loads take no timeout."""
        if not store.takes_load_timeout:
            raise UnsupportedError(
                "offload needs a store whose loads end within a time that it is given"
                " (takes_load_timeout)"
            )
        self._store, self._layout = store, layout
        self._count = len(layout.layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load_blocks(
        self, block_ids: Sequence[bytes], blocks: Ids, timeout: float | None = None
    ) -> Any:
        """All layers of each block."""
        rows, shards, addresses = self._rows(block_ids, blocks)
        return self._load(rows, shards, addresses, timeout)

    def load_layer(
        self, layer: int, block_ids: Sequence[bytes], blocks: Ids, timeout: float | None = None
    ) -> Any:
        """One layer (its place among those of this rank) of each block; a row of the task is a
        block."""
        addresses = self._addresses(blocks)[:, layer]
        return _Task(self._load(block_ids, [layer] * len(block_ids), addresses, timeout).task, 1)

    def dump_blocks(
        self,
        block_ids: Sequence[bytes],
        blocks: Ids,
        prerequisite_handle: int = 0,
        *,
        sides: Sides | None = None,
    ) -> Any:
        """All layers of each block, each with its share of the side shards."""
        rows, shards, addresses = self._rows(block_ids, blocks)
        sides = sides or {}
        shares = {name: self._shares(side) for name, side in sides.items()}
        with_sides = {"sides": shares} if shares else {}
        task = self._store.dump_data(rows, shards, addresses, prerequisite_handle, **with_sides)
        return _Task(task, self._count)

    def wait(self, task: Any, *args: Any, **kwargs: Any) -> None:
        """As of the store; failures are reported by block."""
        if not isinstance(task, _Task):
            self._store.wait(task, *args, **kwargs)
            return
        try:
            self._store.wait(task.task, *args, **kwargs)
        except TaskError as error:
            rows = sorted(error.failures.items(), reverse=True)
            failures = {row // task.rows: why for row, why in rows}
            raise TaskError(str(error), failures=failures) from error

    def check(self, task: Any, *args: Any, **kwargs: Any) -> bool:
        """As of the store."""
        own = task.task if isinstance(task, _Task) else task
        return bool(self._store.check(own, *args, **kwargs))

    def served(self, task: Any) -> Sequence[int]:
        """As of the store."""
        return self._store.served(task.task if isinstance(task, _Task) else task)

    def stages(self, task: Any) -> Mapping[str, Sequence[float]]:
        """As of the store."""
        return self._store.stages(task.task if isinstance(task, _Task) else task)

    def _load(
        self, rows: Sequence[bytes], shards: Sequence[int], addresses: Any, timeout: float | None
    ) -> _Task:
        addresses = np.ascontiguousarray(addresses)
        if timeout is not None:
            task: Task = self._store.load_data(rows, shards, addresses, timeout=timeout)  # type: ignore[call-arg]
        else:
            task = self._store.load_data(rows, shards, addresses)
        return _Task(task, self._count)

    def _rows(self, block_ids: Sequence[bytes], blocks: Ids) -> tuple[list[bytes], list[int], Any]:
        addresses = self._addresses(blocks)
        rows = [block for block in block_ids for _ in range(self._count)]
        return rows, list(range(self._count)) * len(block_ids), addresses.reshape(len(rows), -1)

    def _addresses(self, blocks: Ids) -> npt.NDArray[np.uint64]:
        """``[blocks, layers, pieces]``."""
        found = self._layout.addresses(block_numbers(blocks))
        return found.reshape(len(found), self._count, -1)

    def _shares(self, side: Any) -> Any:
        rows = np.asarray(side)
        return rows.reshape(len(rows) * self._count, -1)


class _Task:
    """A task of the store, ``count`` rows of which are one block."""

    def __init__(self, task: Any, rows: int) -> None:
        self.task, self.rows = task, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)
