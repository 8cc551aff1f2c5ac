"""GSA: means of keys choose the blocks in every step; the functions that the book and document 002
describe it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ucm.config.sparse import AlgorithmConfig
from ucm.errors import InvalidInputError
from ucm.sparse.config import policy_of, settings_of
from ucm.sparse.eviction import HybridEvictionPolicy, LRUEvictionPolicy, ScoreBasedEvictionPolicy
from ucm.sparse.policy import Policy
from ucm.sparse.positional import PositionalMethod
from ucm.sparse.selection import select

__all__ = [
    "GSA",
    "GSAReqStat",
    "GSASparseKernel",
    "HybridEvictionPolicy",
    "LRUEvictionPolicy",
    "ScoreBasedEvictionPolicy",
    "compute_block_scores",
    "compute_topk_len",
    "select_topk_blocks",
]


class GSA(PositionalMethod):
    """Means of keys, with larger windows."""

    algorithm: ClassVar[str] = "GSA"


@dataclass
class GSAReqStat:
    """How far a request is, and what was chosen for it."""

    request_id: str
    index_in_batch: int = 0
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    vllm_block_ids: list[int] = field(default_factory=list)
    ucm_block_hashes: list[str] = field(default_factory=list)
    selected_blocks: list[int] = field(default_factory=list)
    prefetch_task: Any = None

    @property
    def prefetch_ready(self) -> bool:
        """Whether its prefetch (a :class:`~ucm.sparse.prefetch.PrefetchHandle`) is there; true
        where there is none."""
        return self.prefetch_task is None or self.prefetch_task.state == "done"


def compute_block_scores(
    query: Tensor, block_reprs: Tensor, block_size: int = 0, method: str = "l2"
) -> Tensor:
    """Scores ``[n]`` of blocks ``block_reprs [n, heads, d]`` for ``query [heads, d]``, by one of
    the book's three methods: ``mean`` or ``max`` of the heads' dot products, or minus the sum of
    their distances (``l2``)."""
    del block_size
    q, r = query.float(), block_reprs.float()
    if method == "l2":
        return -(q - r).norm(dim=-1).sum(dim=-1)
    dots = (q * r).sum(dim=-1)
    if method not in ("mean", "max"):
        raise InvalidInputError(f'the method is mean, max or l2, got "{method}"')
    return dots.mean(dim=-1) if method == "mean" else dots.amax(dim=-1)


def select_topk_blocks(
    scores: Tensor, num_blocks: int, init_window_size: int, local_window_size: int, topk: int
) -> Tensor:
    """The windows and the ``topk`` best blocks between them, ascending; all where there are none
    between. The last block is always among them."""
    policy = Policy(init=init_window_size, local=max(1, local_window_size), ratio=None, topk=topk)
    return select(policy, scores[None], num_blocks, num_blocks)[0]


def compute_topk_len(
    block_len: int, config: Mapping[str, Any] | AlgorithmConfig | None = None
) -> int:
    """How many of ``block_len`` blocks are kept, windows included."""
    # The block size matters for windows in tokens alone; 128 is the one that the book speaks of.
    return policy_of(settings_of("GSA", config), 128).kept(block_len, block_len * 128)


class GSASparseKernel:
    """Attention over chosen blocks of a batch that holds its KV by request: gather, then softmax
    over what was gathered."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """``config`` may say ``head_dim`` (128), by whose root scores are divided."""
        self.head_dim = int((config or {}).get("head_dim", 128))

    def forward(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        selected_indices: Tensor | Sequence[Sequence[int]],
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """``query [batch, heads, q, d]``, caches ``[batch, blocks, b, KV heads, d]``,
        ``selected_indices [batch, k]`` and ``attention_mask [batch, q, blocks * b]`` (true: attend)
        give ``[batch, heads, q, d]``."""
        index = torch.as_tensor(selected_indices, device=key_cache.device).long()
        keys, values = self._gather(key_cache, index), self._gather(value_cache, index)
        group = query.shape[1] // keys.shape[2]
        keys, values = (
            keys.repeat_interleave(group, dim=2).float(),
            values.repeat_interleave(group, dim=2).float(),
        )
        logits = torch.einsum("bhqd,bkhd->bhqk", query.float(), keys) * self.head_dim**-0.5
        if attention_mask is not None:
            size = key_cache.shape[2]
            places = (index[:, :, None] * size + torch.arange(size, device=index.device)).flatten(1)
            mask = attention_mask.gather(2, places[:, None].expand(-1, attention_mask.shape[1], -1))
            logits = logits.masked_fill(~mask[:, None], -torch.inf)
        return torch.einsum("bhqk,bkhd->bhqd", torch.softmax(logits, dim=-1), values).to(
            query.dtype
        )

    @staticmethod
    def _gather(cache: Tensor, index: Tensor) -> Tensor:
        return cache[torch.arange(len(index), device=index.device)[:, None], index].flatten(1, 2)
