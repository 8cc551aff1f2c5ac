"""Attention over another block table for each KV head, by a kernel that knows one table for all.

A page of the CPU backend is one KV head after the other, so a cache of ``B`` blocks of ``H`` heads
is also one of ``B * H`` blocks of one head. Each row becomes ``H`` rows, one for each KV head and
the query heads that share it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class HeadRows:
    """The rows of a step, one for each KV head."""

    #: ``[tokens * heads]``: which token and head is where, the tokens of a row and head one after
    #: the other.
    order: Tensor
    starts: Tensor
    tokens: int
    heads: int

    @classmethod
    def of(cls, query_start_loc: Tensor, rows: int, heads: int) -> HeadRows:
        """From where the queries of each row begin ``[rows + 1]``."""
        starts = query_start_loc[: rows + 1].long()
        lengths = (starts[1:] - starts[:-1]).repeat_interleave(heads)
        order = [
            (torch.arange(begin, end)[None] * heads + torch.arange(heads)[:, None]).flatten()
            for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(query_start_loc.dtype)
        return cls(torch.cat(order), ends, int(starts[-1]), heads)

    def split(self, query: Tensor) -> Tensor:
        """Queries ``[tokens, query heads, d]`` as ``[tokens * heads, query heads / heads, d]``."""
        shape = (self.tokens * self.heads, query.shape[1] // self.heads, query.shape[2])
        return query[: self.tokens].reshape(shape).index_select(0, self.order)

    def join(self, parts: Tensor, output: Tensor) -> None:
        """The opposite, into ``output``."""
        joined = torch.empty_like(parts)
        joined[self.order] = parts
        output[: self.tokens] = joined.view(self.tokens, output.shape[1], output.shape[2])


def metadata_of(made: Any, rows: HeadRows, plan: Callable[[Any], Any]) -> Any:
    """The metadata of these rows, from a copy whose block table is ``[rows, heads, blocks]`` and
    whose lengths are ``[rows, heads]``; ``plan`` makes what the kernel wants computed ahead."""
    found = copy.copy(made)
    heads = torch.arange(rows.heads, dtype=made.block_table.dtype)[None, :, None]
    found.block_table = (made.block_table * rows.heads + heads).flatten(0, 1).contiguous()
    found.seq_lens = made.seq_lens.flatten().contiguous()
    found.query_start_loc = rows.starts
    found.num_actual_tokens = rows.tokens * rows.heads
    found.scheduler_metadata = plan(found)
    return found
