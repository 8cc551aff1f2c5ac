"""ESA: means of keys choose the blocks, anew every ``stride`` steps; what the book builds it from,
as objects of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor

from ucm.config.sparse import AlgorithmConfig
from ucm.errors import BusyError, InvalidInputError
from ucm.sparse.policy import Policy
from ucm.sparse.positional import PositionalMethod
from ucm.sparse.selection import choose

_log = logging.getLogger("ucm.sparse")


class ESA(PositionalMethod):
    """Means of keys."""

    algorithm: ClassVar[str] = "ESA"


class ESASparse(ESA):
    """The book's form of the constructor, with the store beside it."""

    def __init__(self, vllm_config: Any, role: Any, store: Any = None) -> None:
        """``store`` is where offloaded blocks are; the connector's is used where none is given."""
        super().__init__(vllm_config, role)
        self.kv_store = store


class BlockReprPool:
    """A bounded pool of vectors, one for each block."""

    def __init__(
        self,
        max_blocks: int,
        repr_dim: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float16,
    ) -> None:
        """``max_blocks`` vectors of ``repr_dim`` elements."""
        self.pool = torch.zeros(max_blocks, repr_dim, dtype=dtype, device=device)
        self.free_indices = list(range(max_blocks - 1, -1, -1))
        self.block_to_index: dict[int, int] = {}

    def allocate(self, block_id: int) -> int:
        """The place of a block's vector: the one it has, or a free one. Raises
        :class:`~ucm.errors.BusyError`."""
        known = self.block_to_index.get(block_id)
        if known is not None:
            return known
        if not self.free_indices:
            raise BusyError(
                "the pool of block representations is full", context={"max_blocks": len(self.pool)}
            )
        index = self.free_indices.pop()
        self.block_to_index[block_id] = index
        return index

    def set_repr(self, block_id: int, value: Tensor) -> None:
        """Keep a block's vector."""
        self.pool[self.allocate(block_id)] = value.to(self.pool)

    def get_repr(self, block_id: int) -> Tensor:
        """A block's vector. Raises :class:`~ucm.errors.InvalidInputError` for one that has no
        place."""
        return self.pool[self._index(block_id)]

    def free(self, block_id: int) -> None:
        """Give a block's place back."""
        self.free_indices.append(self._index(block_id))
        del self.block_to_index[block_id]

    def _index(self, block_id: int) -> int:
        index = self.block_to_index.get(block_id)
        if index is None:
            raise InvalidInputError(
                f"block {block_id} has no place in the pool of block representations"
            )
        return index


class ESARetrievalEngine:
    """Scores blocks on a few threads and calls back with the best."""

    #: Most retrievals that may be under way.
    LIMIT = 1024

    def __init__(self, config: AlgorithmConfig | Mapping[str, Any] | Any, threads: int = 4) -> None:
        """``config.topk`` (or the key ``topk``, or ``topk_blocks``) says how many blocks are
        chosen."""
        self.topk = _topk(config)
        self.thread_pool = ThreadPoolExecutor(threads, thread_name_prefix="ucm-esa")
        self.pending_tasks: dict[str, Future[list[int]]] = {}

    def submit_retrieval(
        self,
        request_id: str,
        query: Tensor,
        block_reprs: Tensor,
        callback: Callable[[str, list[int]], None],
    ) -> None:
        """Choose of ``block_reprs [n, d]`` those with the largest dot product with ``query [d]``,
        of equal ones the earlier; ``callback(request_id, places)`` gets them in ascending order, on
        one of the threads. An error of the callback is logged. Raises
        :class:`~ucm.errors.BusyError` while too many are under way."""
        self.pending_tasks = {
            name: task for name, task in self.pending_tasks.items() if not task.done()
        }
        if len(self.pending_tasks) >= self.LIMIT:
            raise BusyError("too many retrievals are under way", context={"limit": self.LIMIT})
        query, reprs = (
            query.detach().float().cpu().clone(),
            block_reprs.detach().float().cpu().clone(),
        )

        def retrieve() -> list[int]:
            found = self.retrieve(query, reprs)
            try:
                callback(request_id, found)
            except Exception:
                _log.exception("the callback of a retrieval failed")
            return found

        self.pending_tasks[request_id] = self.thread_pool.submit(retrieve)

    def retrieve(self, query: Tensor, block_reprs: Tensor) -> list[int]:
        """The same, at once."""
        scores = (block_reprs * query.reshape(-1)).sum(dim=-1)[None]
        # All blocks are candidates: the window of one that a policy needs is a block beyond them.
        policy = Policy(init=0, local=1, ratio=None, topk=self.topk)
        return [int(place) for place in choose(policy, scores, scores.shape[1] + 1)[0]]

    def close(self) -> None:
        """Stop the threads, without waiting."""
        self.thread_pool.shutdown(wait=False, cancel_futures=True)


def _topk(config: Any) -> int:
    found = config.get("topk", config.get("topk_blocks")) if isinstance(config, Mapping) else None
    if found is None:
        found = getattr(config, "topk", None) or getattr(config, "topk_blocks", None)
    if not isinstance(found, int) or found < 1:
        raise InvalidInputError(f"topk says how many blocks are chosen, at least 1; got {found!r}")
    return found
