"""Representations of blocks that a worker did not compute, and those that it stores beside the KV.

A block that is computed here is encoded when its keys are written; one in vLLM's prefix cache keeps
its representation. A loaded one gets its representation before the load is reported, so before vLLM
lets the request run: from the store, where it lies beside the KV as a side shard, else from the
loaded keys, and then it is stored once. That work is done in pieces between steps. A failure leaves
a block without one, and its requests are dense.

Keys are read back from the pages of a KV cache (:func:`key_reader`). On an accelerator a page is
read as it is, on a CPU by places that are found once vLLM has written keys of a step
(:mod:`.pages`). Where there are none, loaded blocks are not selected from.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ucm.errors import UnsupportedError
from ucm.integration.vllm.attention.pages import Packed, is_latent, is_packed
from ucm.integration.vllm.connector.guard import throttle
from ucm.sparse.method import BlockSparse
from ucm.sparse.selector import rep_bytes
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

#: Blocks of one layer that are encoded at a time.
PIECE = 64
#: Seconds of a step for this work; a piece that has begun is finished.
STEP_S = 0.05
#: Most bytes of a side shard that a store keeps.
LARGEST = 16 << 20
#: Most side shards that are being stored at once.
MOST_WRITING = 64

#: Returns keys of whole blocks ``[m, b, h, d]`` from a layer's cache ``[blocks, heads, b,
#: elements]``.
ReadKeys = Callable[[Tensor, Tensor], Tensor]


def key_reader(layer: Any, backend: str, cache: Tensor, block_tokens: int) -> ReadKeys:
    """Reads the keys of a layer of this backend; ``cache`` is the layer's KV cache. Raises
    :class:`~ucm.errors.UnsupportedError` where they cannot be read."""
    if is_packed(backend) and not cache.dtype.is_floating_point:
        raise UnsupportedError("the pages of this CPU hold codes of 8 bits in the place of keys")
    if is_packed(backend):
        packed = Packed(layer, cache)
        return lambda pages, ids: packed.by_token(pages.index_select(0, ids), 0)
    if is_latent(backend):
        return lambda pages, ids: pages.index_select(0, ids).reshape(len(ids), block_tokens, 1, -1)
    size = layer.head_size
    return lambda pages, ids: pages.index_select(0, ids)[..., :size].transpose(1, 2)


Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Load:
    """Blocks that are being filled, and their side shards."""

    ids: Sequence[bytes]
    blocks: Ids
    store: UcmKVStoreBaseV1
    unread: int = 0  # blocks that are selected from and not filled: their side shards come last
    task: Any = None


@dataclass(slots=True)
class _Job:
    """Blocks that are filled, and have no representation yet."""

    request: str
    blocks: Ids
    load: _Load | None
    store_them: npt.NDArray[np.bool_] | None = None  # those to be stored once they are made
    answered: bool = False  # the store has answered
    missing: Ids | None = None  # of the blocks
    layer: int = 0  # index of the next layer
    first: int = 0  # and of the next block in it


class Representations:
    """The representations of one worker's method."""

    def __init__(
        self,
        method: BlockSparse,
        caches: Mapping[int, Tensor],
        read: ReadKeys | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        reads_later: bool = False,
        writer: bool = True,
        shards: int = 1,
    ) -> None:
        """``caches``: the KV cache of each layer that has representations, by its number; ``read``
        reads keys from them, None where that is not possible; ``reads_later``: :meth:`read_by` is
        called once vLLM has computed a step; ``writer``: whether this rank stores its part;
        ``shards``: shards of a block in the store, each with an equal share of the
        representations."""
        self._method = method
        self._caches = dict(caches)
        self._layers = list(method.store.layers)
        self._read = read
        self._reads_later = reads_later
        self._postponed: list[_Job] = []  # until keys can be read; their loads are over
        self._clock = clock
        self._writer = writer
        self._loads: dict[str, _Load] = {}
        self._jobs: deque[_Job] = deque()
        self._writing: deque[tuple[UcmKVStoreBaseV1, Any]] = deque()
        self._unselectable: set[str] = set()
        #: Rows for the representations of a request's blocks that are not on the device; empty once
        #: it has ended.
        self.rows_of: Callable[[str], Sequence[int]] = lambda _request: ()
        size = rep_bytes(method.selector) * len(self._layers)
        self._padding = -size % shards
        self.size = size + self._padding
        self.name = _name(method, self._padding)
        self.rebuilt = self.loaded = 0  # blocks

    @property
    def sides(self) -> dict[str, int]:
        """Side shards that a store is to keep for a block: bytes by name."""
        return {self.name: self.size} if 0 < self.size <= LARGEST else {}

    def read_by(self, read: ReadKeys | None) -> None:
        """Set how keys are read, None if they cannot be. Postponed jobs are done at once: the first
        requests of an engine choose from their first decode step on."""
        self._read, self._reads_later = read, False
        postponed, self._postponed = self._postponed, []
        for job in postponed if read is not None else ():
            self._try(job, float("inf"))

    def overwritten(self, blocks: Ids) -> None:
        """These blocks get other content: no representation is made of the old one."""
        self._postponed = [job for job in self._postponed if not np.isin(job.blocks, blocks).any()]

    # Dumps
    # ----------------------------------------------------------------------------------------------

    def beside(
        self, blocks: Ids, store: UcmKVStoreBaseV1
    ) -> dict[str, npt.NDArray[np.uint8]] | None:
        """The side shards of these blocks; None where the store keeps none, or a block has none."""
        if self.name not in store.side_sizes or not self._method.store.ready(blocks):
            return None
        return {self.name: self._bytes(blocks)}

    # Loads
    # ----------------------------------------------------------------------------------------------

    def begin_load(
        self,
        request: str,
        ids: Sequence[bytes],
        blocks: Ids,
        store: UcmKVStoreBaseV1,
        timeout: float | None = None,
        unread: Sequence[bytes] = (),
    ) -> None:
        """These blocks are about to be filled with the records of these ids; those of ``unread``
        are not, and their representations go to :attr:`rows_of` the request."""
        self._method.store.invalidate(blocks)
        self.overwritten(blocks)
        load = self._loads[request] = _Load(ids, blocks, store, len(unread))
        self._unselectable.discard(request)
        if self.name in store.side_sizes:
            try:
                load.task = store.load_sides([*ids, *unread], self.name, timeout)
            except Exception as error:
                text = "the store has no representations, they are computed: %r"
                throttle.warning("load sides", text, error)

    def failed(self, request: str) -> None:
        """The load failed: its blocks are computed over, or not selected from."""
        self._loads.pop(request, None)

    def forget(self, request: str) -> None:
        """The load of this request was reported as failed: no representation is made of its blocks,
        which vLLM may give to others."""
        self._loads.pop(request, None)
        self._unselectable.discard(request)
        self._jobs = deque(job for job in self._jobs if job.request != request)
        self._postponed = [job for job in self._postponed if job.request != request]

    def arrived(self, request: str, blocks: Ids) -> bool:
        """These blocks are filled. False: their representations are still to be made, see
        :meth:`work`."""
        load = self._loads.pop(request, None)
        if load is not None and load.unread and load.task is None:
            self._unselectable.add(request)
            return True
        if not self._layers or not len(blocks):
            return True
        job = _Job(request, blocks, load)
        if self._read is not None or (load is not None and load.task is not None):
            self._jobs.append(job)
            return False
        if self._reads_later:
            self._postponed.append(job)
        return True

    def selectable(self, request: str) -> bool:
        """Whether all representations of blocks that are not read were loaded; called once, after
        the load."""
        found = request not in self._unselectable
        self._unselectable.discard(request)
        return found

    def work(self) -> list[str]:
        """Go on with the jobs; returns the requests whose loads have ended with that."""
        deadline = self._clock() + STEP_S
        done: list[str] = []
        while self._writing and _finished(*self._writing[0]):
            self._writing.popleft()
        for _ in range(len(self._jobs)):
            job = self._jobs.popleft()
            if self._try(job, deadline):
                done.append(job.request)
            else:
                self._jobs.append(job)
            if self._clock() >= deadline:
                break
        return done

    def _try(self, job: _Job, deadline: float) -> bool:
        """As :meth:`_go_on`; a job that fails is over."""
        try:
            return self._go_on(job, deadline)
        except Exception as error:
            text = "loaded blocks could not be encoded, and are dense: %r"
            throttle.warning("representations", text, error)
            if job.load is not None and job.load.unread:
                self._unselectable.add(job.request)
            return True

    def __len__(self) -> int:
        """Loads whose representations are being made."""
        return len(self._jobs)

    def _go_on(self, job: _Job, deadline: float) -> bool:
        """Go on with a job until the deadline; whether it is over."""
        if not job.answered and not self._take(job):
            return False
        assert job.missing is not None
        while len(job.missing) and not self._piece(job, job.missing):
            if self._clock() >= deadline:
                return False
        if self._read is not None:
            self._method.store.mark_ready(job.blocks)
            self.rebuilt += len(job.missing)
            self._store_made(job)
        return True

    def _take(self, job: _Job) -> bool:
        """Use the store's representations; False: it has not answered yet."""
        load, found = job.load, np.zeros(len(job.blocks), dtype=np.bool_)
        if load is not None and load.task is not None:
            if not _finished(load.store, load.task):
                return False
            data, found = load.task.result()
            if load.unread:
                self._take_unread(job.request, data[len(job.blocks) :], found[len(job.blocks) :])
                data, found = data[: len(job.blocks)], found[: len(job.blocks)]
            self._put(job.blocks[found], data[found])
            self.loaded += int(found.sum())
            job.store_them = ~found
        job.answered, job.missing = True, job.blocks[~found]
        if self._read is None:
            self._method.store.mark_ready(job.blocks[found])
            if self._reads_later and len(job.missing):
                self._postponed.append(_of_missing(job, found))
            job.missing = job.missing[:0]
        return True

    def _take_unread(
        self, request: str, data: npt.NDArray[np.uint8], found: npt.NDArray[np.bool_]
    ) -> None:
        """Use those of blocks that are not read: all of them, or the request cannot be selected
        from."""
        rows = np.array(self.rows_of(request)[: len(data)], dtype=np.int64)
        if len(rows) < len(data) or not found.all():
            self._unselectable.add(request)
            return
        self._put(rows, data)
        self._method.store.mark_ready(rows)
        self.loaded += len(rows)

    def _piece(self, job: _Job, missing: Ids) -> bool:
        """Encode the next blocks from their keys; whether those were the last."""
        layer, store = self._layers[job.layer], self._method.store
        ids = torch.from_numpy(missing[job.first : job.first + PIECE])
        assert self._read is not None
        cache = self._caches[layer]
        store.update(layer, self._read(cache, ids.to(cache.device)), ids)
        job.first += PIECE
        if job.first >= len(missing):
            job.layer, job.first = job.layer + 1, 0
        return job.layer == len(self._layers)

    def _store_made(self, job: _Job) -> None:
        """Store representations that were made from keys, for blocks that are stored without."""
        load, wanted = job.load, job.store_them
        full = not self._writer or len(self._writing) >= MOST_WRITING
        if load is None or wanted is None or not wanted.any() or full:
            return
        ids = [load.ids[row] for row in np.flatnonzero(wanted)]
        try:
            task = load.store.dump_sides(ids, {self.name: self._bytes(job.blocks[wanted])})
        except Exception as error:  # no room, or the store is closed: they are made again later
            throttle.warning("dump sides", "representations could not be stored: %s", error)
            return
        self._writing.append((load.store, task))

    # Bytes
    # ----------------------------------------------------------------------------------------------

    def _bytes(self, blocks: Ids) -> npt.NDArray[np.uint8]:
        """Representations of these blocks, one layer after the other: ``[blocks, size]``."""
        store, rows = self._method.store, len(blocks)
        reps = [store.get(layer, blocks).cpu().contiguous() for layer in self._layers]
        flat = [each.view(rows, -1).view(torch.uint8) for each in reps]
        joined: npt.NDArray[np.uint8] = torch.cat(flat, 1).numpy()
        return np.pad(joined, ((0, 0), (0, self._padding)))

    def _put(self, blocks: Ids, data: npt.NDArray[np.uint8]) -> None:
        """The opposite."""
        if not len(blocks):
            return
        shape, dtype = self._method.selector.rep_shape()
        joined = np.ascontiguousarray(data[:, : self.size - self._padding])
        parts = np.split(joined, len(self._layers), axis=1)
        for layer, part in zip(self._layers, parts, strict=True):
            reps = torch.from_numpy(part.copy()).view(dtype).view(len(blocks), *shape)
            self._method.store.put(layer, blocks, reps)


def _of_missing(job: _Job, found: npt.NDArray[np.bool_]) -> _Job:
    """The rest of a job of which the store had some."""
    blocks, load = job.blocks[~found], job.load
    if load is not None:
        ids = [each for each, there in zip(load.ids, found, strict=False) if not there]
        load = replace(load, ids=ids, blocks=blocks, task=None)
    stored = None if job.store_them is None else job.store_them[~found]
    return _Job(job.request, blocks, load, stored, answered=True, missing=blocks)


def _finished(store: UcmKVStoreBaseV1, task: Any) -> bool:
    """Whether a task has ended or failed."""
    try:
        return bool(store.check(task))
    except Exception:
        return True


def _name(method: BlockSparse, padding: int) -> str:
    """Name of the side shard: different for everything that shapes the bytes."""
    text = f"{method.selector.signature()} layers {method.store.layers}"
    text += f" padding {padding}" if padding else ""
    return f"rep-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def caches_by_layer(
    method: BlockSparse, layers: Sequence[str], caches: Mapping[str, Any]
) -> dict[int, Tensor]:
    """The KV cache of each layer that has representations."""
    return {method.layer_number(name): caches[name] for name in layers if method.writes(name)}
