"""Selection by Hamming distance, by the names of the book."""

from __future__ import annotations

import torch
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.policy import Policy
from ucm.sparse.selection import Selection, compact, select
from ucm.sparse.selectors.codes import distance


def hamming_distance(hash_a: Tensor, hash_b: Tensor) -> Tensor:
    """Bits in which codes ``hash_a [a, bytes]`` and ``hash_b [b, bytes]`` differ, ``[a, b]``,
    int32."""
    return distance(hash_a[:, None], hash_b[None])


def cuda_hamming_topk(
    q_hash: Tensor,
    k_hash: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    topk_token: int,
    sink_token: int = 64,
    recent_token: int = 512,
    is_mla: bool = False,
) -> Tensor:
    """The block table of the blocks that are kept, ``[batch, most]``; :func:`update_seq_lens` has
    the lengths for it.

    ``q_hash [batch, 1, heads, bytes]``, ``k_hash [blocks, b, heads, bytes]`` (one head with latent
    attention, whose query heads' distances are added up), uint8. ``topk_token`` tokens are kept,
    windows included; windows are whole blocks. Works on any device: the name is the original's.
    """
    if q_hash.dtype != torch.uint8 or k_hash.dtype != torch.uint8:
        raise InvalidInputError(f"codes are uint8, got {q_hash.dtype} and {k_hash.dtype}")
    size = k_hash.shape[1]
    policy = Policy(
        init=-(-sink_token // size),
        local=max(1, -(-recent_token // size)),
        ratio=None,
        topk=-(-topk_token // size),
        windows_inside=True,
    )
    kept, blocks = [], [-(-int(length) // size) for length in seq_lens]
    for codes, row, length, n in zip(q_hash[:, 0], block_table, seq_lens, blocks, strict=True):
        if int(length) <= topk_token:
            kept.append([torch.arange(n, device=block_table.device)])
            continue
        keys = k_hash[row[:n].long()]  # [n, b, heads, bytes]
        dist = distance(codes, keys)
        near = (dist.sum(dim=-1) if is_mla else dist.amin(dim=-1)).amin(dim=1)
        kept.append(select(policy, -near[None], n, int(length)))
    return compact(Selection.of(kept, blocks), block_table, seq_lens, size)[0]


def update_seq_lens(seq_lens: Tensor, topk_token: int, block_size: int) -> Tensor:
    """The lengths that go with the kept blocks: whole blocks are left out, so the last one stays as
    full as it was."""
    over = (seq_lens - topk_token).clamp(min=0)
    return seq_lens - (over + block_size - 1) // block_size * block_size
