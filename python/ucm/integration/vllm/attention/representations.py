"""Representations of blocks that a worker did not compute: of those that are loaded from the store.

A block that is computed here is encoded when its keys are written; one that vLLM finds in its prefix cache still has
what it had. A loaded one gets its representation before the load is reported, so before vLLM lets the request run:
from the store, where it was stored beside the KV, else from the keys that were loaded, and then it is stored once. That
work is done in pieces between steps. What comes to nothing leaves a block without one, and its requests are dense.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ucm.integration.vllm.attention.pages import ReadKeys
from ucm.integration.vllm.connector.guard import throttle
from ucm.sparse.method import BlockSparse

Ids = npt.NDArray[np.int64]

#: Blocks of one layer that are encoded in one go.
PIECE = 64
#: How long a step works on this at most, in seconds; a piece that has begun is finished.
STEP_S = 0.05


@dataclass(slots=True)
class _Job:
    """The blocks of one load that have no representation yet."""

    request: str
    blocks: Ids
    layer: int = 0  # place of the next layer
    first: int = 0  # and of the next block in it


class Representations:
    """Those of one worker's method."""

    def __init__(
        self,
        method: BlockSparse,
        caches: Mapping[int, Tensor],
        read: ReadKeys | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``caches``: the KV cache of each layer that has representations, by its number; ``read`` reads keys from
        them, None where that is not possible."""
        self._method = method
        self._caches = dict(caches)
        self._layers = list(method.store.layers)
        self._read = read
        self._clock = clock
        self._jobs: deque[_Job] = deque()
        self._done: list[str] = []
        self.rebuilt = 0  # blocks

    def begin_load(self, blocks: Ids) -> None:
        """These blocks are about to be filled."""
        self._method.store.invalidate(blocks)

    def arrived(self, request: str, blocks: Ids) -> bool:
        """The KV of these blocks is there. False: their representations are still to be made, see :meth:`work`."""
        if self._read is None or not self._layers or not len(blocks):
            return True
        self._jobs.append(_Job(request, blocks))
        return False

    def work(self) -> list[str]:
        """Go on with what is to be made; the requests whose loads are over with it."""
        deadline = self._clock() + STEP_S
        while self._jobs:
            job = self._jobs[0]
            try:
                over = self._piece(job)
            except Exception as error:
                throttle.warning("representations", "loaded blocks could not be encoded, and are dense: %r", error)
                over = True
            if over:
                self._jobs.popleft()
                self._done.append(job.request)
            if self._clock() >= deadline:
                break
        done, self._done = self._done, []
        return done

    def _piece(self, job: _Job) -> bool:
        """Encode the next blocks; whether those were the last."""
        layer, store = self._layers[job.layer], self._method.store
        ids = torch.from_numpy(job.blocks[job.first : job.first + PIECE])
        assert self._read is not None
        cache = self._caches[layer]
        store.update(layer, self._read(cache, ids.to(cache.device)), ids)
        job.first += PIECE
        if job.first >= len(job.blocks):
            job.layer, job.first = job.layer + 1, 0
        if job.layer < len(self._layers):
            return False
        store.mark_ready(job.blocks)
        self.rebuilt += len(job.blocks)
        return True

    def __len__(self) -> int:
        """Loads whose representations are being made."""
        return len(self._jobs)


def caches_by_layer(method: BlockSparse, layers: Sequence[str], caches: Mapping[str, Any]) -> dict[int, Tensor]:
    """The KV cache of each layer that has representations."""
    return {method.layer_number(name): caches[name] for name in layers if method.writes(name)}
