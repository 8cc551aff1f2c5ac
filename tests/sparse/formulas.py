"""What selection is held against, written straight from the formulas: paged attention, and a small
engine around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ucm.sparse.base import SparseBatch, SparseRow
from ucm.sparse.method import BlockSparse
from ucm.sparse.selector import Geometry

BLOCK, HEADS, GROUP, DIM = 4, 2, 2, 8
GEOMETRY = Geometry(block_size=BLOCK, kv_heads=HEADS, head_dim=DIM)


def keys(blocks: int, seed: int = 0, geometry: Geometry = GEOMETRY) -> Tensor:
    """Random keys of whole blocks, ``[blocks, b, h, d]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        blocks, geometry.block_size, geometry.kv_heads, geometry.head_dim, generator=generator
    )


def query(
    seed: int = 1, count: int = 1, geometry: Geometry = GEOMETRY, group: int = GROUP
) -> Tensor:
    """Random queries, ``[count, heads, d]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, geometry.kv_heads * group, geometry.head_dim, generator=generator)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """Dense attention of ``q [heads, d]`` over the tokens ``k, v [t, h, d]`` where ``kept [t]``
    says so."""
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = torch.einsum("hd,thd->ht", q, k) * q.shape[-1] ** -0.5
    weights = torch.softmax(logits.masked_fill(~kept, -torch.inf), dim=-1)
    return torch.einsum("ht,thd->hd", weights, v)


def paged_attention(q: Tensor, cache: Tensor, table: Tensor, length: int) -> Tensor:
    """What an unmodified paged kernel computes: ``q [heads, d]``, ``cache [2, blocks, b, h, d]``,
    ``table [n]``."""
    blocks = -(-length // cache.shape[2])
    k, v = (part[table[:blocks].long()].flatten(0, 1)[:length] for part in cache)
    return masked_attention(q, k, v, torch.ones(length, dtype=torch.bool, device=q.device))


@cache
def token_rows(
    content: str, position: int, layer: int, g: Geometry, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one token of one layer."""
    seed = (
        sum(ord(letter) * 31**i for i, letter in enumerate(content)) * 1_000_003
        + position * 101
        + layer
    )
    generator = torch.Generator().manual_seed(seed % 2**62)
    kv = torch.randn(2, g.kv_heads, g.head_dim, generator=generator)
    return torch.randn(g.kv_heads * group, g.head_dim, generator=generator), kv[0], kv[1]


@dataclass
class Request:
    """A request of the small engine."""

    name: str
    prompt: int
    table: list[int]
    tokens: int = 0
    prefill: int = 0

    def __post_init__(self) -> None:
        self.prefill = self.prompt


@dataclass
class Engine:
    """A model without a model: K, V and Q of each (request, position, layer) are given by a seed,
    attention is real.

    It keeps the cache in the plain layout, gives its method the hooks in the order of an engine,
    and computes what comes out with a paged kernel that knows nothing of sparse attention.
    """

    method: BlockSparse | None
    geometry: Geometry = GEOMETRY
    layers: int = 2
    blocks: int = 64
    group: int = GROUP
    device: str = "cpu"
    requests: dict[str, Request] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        g = self.geometry
        self.names = [f"model.layers.{layer}.self_attn.attn" for layer in range(self.layers)]
        self.caches = [
            torch.full(
                (2, self.blocks, g.block_size, g.kv_heads, g.head_dim),
                torch.nan,
                device=self.device,
            )
            for _ in self.names
        ]
        self.free = list(range(self.blocks - 1, 0, -1))
        self.kept: dict[tuple[str, int, int], list[int]] = {}
        if self.method is not None:
            self.method.setup(g, self.names, self.blocks, max_sequences=8, device=self.device)

    def qkv(self, content: str, position: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of one token: they depend on what the prompt says, not on the request's name."""
        return token_rows(content, position, layer, self.geometry, self.group)

    def add(
        self,
        name: str,
        prompt: int,
        shared: Sequence[int] = (),
        physical: Sequence[int] | None = None,
    ) -> None:
        """A request whose first blocks may be those of another one (a prefix hit)."""
        own = (
            list(physical)
            if physical is not None
            else [self.free.pop() for _ in range(-(-prompt // BLOCK) - len(shared))]
        )
        self.requests[name] = Request(
            name, prompt, [*shared, *own], tokens=len(shared) * self.geometry.block_size
        )

    def step(self, counts: dict[str, int], content: str = "text") -> dict[str, list[Tensor]]:
        """Compute these numbers of tokens of each request; the attention outputs of the last token
        of each, by layer."""
        size, rows, slots, positions = self.geometry.block_size, [], [], []
        for name, count in counts.items():
            request = self.requests[name]
            start, request.tokens = request.tokens, request.tokens + count
            while len(request.table) * size < request.tokens:
                request.table.append(self.free.pop())
            rows.append(SparseRow(name, request.tokens, request.prefill, request.prompt, count))
            positions += range(start, request.tokens)
            slots += [
                request.table[p // size] * size + p % size for p in range(start, request.tokens)
            ]
        width = max(len(self.requests[name].table) for name in counts)
        table = torch.tensor(
            [
                self.requests[name].table + [0] * (width - len(self.requests[name].table))
                for name in counts
            ],
            dtype=torch.int32,
            device=self.device,
        )
        lens = torch.tensor([row.tokens for row in rows], dtype=torch.int32, device=self.device)
        if self.method is not None:
            self.method.bind_sparse_metadata(SparseBatch(rows, self.finished))
        self.finished = []
        found: dict[str, list[Tensor]] = {row.request_id: [] for row in rows}
        slot_mapping = torch.tensor(slots, device=self.device)
        for layer, name in enumerate(self.names):
            each = zip(*(self.qkv(content, p, layer) for p in positions), strict=True)
            q, k, v = (torch.stack(x).to(self.device) for x in each)
            self.caches[layer][0].view(-1, *k.shape[1:])[slot_mapping] = k
            self.caches[layer][1].view(-1, *v.shape[1:])[slot_mapping] = v
            metadata = SimpleNamespace(block_table=table, seq_lens=lens)
            context = SimpleNamespace(attn_metadata={name: metadata})
            if self.method is not None:
                self.method.write_keys(name, k, slot_mapping)
                q, k, v, _ = self.method.attention_begin(q, k, v, name, context)
            end = 0
            for i, row in enumerate(rows):
                end += row.queries
                ids, length = metadata.block_table[i], int(metadata.seq_lens[i])
                found[row.request_id].append(
                    paged_attention(q[end - 1], self.caches[layer], ids, length)
                )
                logical = [
                    self.requests[row.request_id].table.index(int(b))
                    for b in ids[: -(-length // size)]
                ]
                self.kept[row.request_id, row.step, layer] = logical
        if self.method is not None:
            self.method.clear_sparse_metadata()
        return found

    def run(
        self, name: str, prompt: int, steps: int, chunk: int | None = None, **kwargs: Any
    ) -> list[list[Tensor]]:
        """A request alone: its prompt in chunks, then decode steps; what each decode step
        computed."""
        self.add(name, prompt, **kwargs)
        while (left := prompt - self.requests[name].tokens) > 0:
            self.step({name: min(left, chunk or left)})
        return [self.step({name: 1})[name] for _ in range(steps)]

    def end(self, name: str) -> None:
        """A request has ended; its blocks are free, and hold what they held."""
        self.free += self.requests.pop(name).table
        self.finished.append(name)
