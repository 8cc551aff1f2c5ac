"""Sparse retrieval on a GPU, in Triton: the functions of :mod:`ucm.sparse.retrieval`, without
threads and instruction sets.

They return new tensors on the same GPU, without waiting for it. Tables and lengths are not checked
before a launch: ids must lie within the representations. :func:`try_all` tries them on an example
of small whole numbers, for which torch gives equal results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ucm.errors import InternalError
from ucm.sparse.kernels import code, distance, encode, scoring, select
from ucm.sparse.retrieval import Kept

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _launched(
    function: Callable[Concatenate[Tensor, _P], _R],
) -> Callable[Concatenate[Tensor, _P], _R]:
    """The same on the GPU of its first tensor: Triton launches on the current one, which a thread
    that chooses beside the model has not set."""

    @wraps(function)
    def there(first: Tensor, /, *rest: _P.args, **named: _P.kwargs) -> _R:
        if first.device.type != "cuda":  # interpreted, or compiled ahead of time
            return function(first, *rest, **named)
        with torch.cuda.device(first.device):
            return function(first, *rest, **named)

    return there


dot_scores = _launched(scoring.dot_scores)
hamming_scores = _launched(scoring.hamming_scores)
hash_encode = _launched(encode.hash_encode)
hash_encode_query = _launched(encode.hash_encode_query)
quest_scores = _launched(scoring.quest_scores)
scatter_codes = _launched(encode.scatter_codes)
select_blocks = _launched(select.select_blocks)


@_launched
def hash_scores(
    query: Tensor,
    weights: Tensor,
    codes: Tensor,
    table: Tensor,
    blocks: Tensor,
    *,
    heads_apart: bool = False,
    init: int = 0,
    local: int = 0,
) -> Tensor:
    """:func:`ucm.sparse.retrieval.hash_scores`, by two kernels."""
    wanted, tokens = (
        encode.hash_encode_query(query, weights, codes.shape[2]),
        blocks * codes.shape[1],
    )
    return scoring.hamming_scores(
        wanted, codes, table, tokens, heads_apart=heads_apart, init=init, local=local
    )


@_launched
def hash_select(
    query: Tensor,
    weights: Tensor,
    codes: Tensor,
    code_table: Tensor,
    table: Tensor,
    tokens: Tensor,
    budgets: Sequence[int] | Tensor,
    *,
    heads_apart: bool = False,
    init: int = 0,
    local: int = 1,
    into: Kept | None = None,
) -> Kept:
    """:func:`ucm.sparse.retrieval.hash_select`, by three kernels; ``budgets`` as of
    :func:`select_blocks`."""
    wanted = encode.hash_encode_query(query, weights, codes.shape[2])
    scores = scoring.hamming_scores(
        wanted, codes, code_table, tokens, heads_apart=heads_apart, init=init, local=local
    )
    return select.select_blocks(
        scores, table, tokens, codes.shape[1], budgets, init=init, local=local, into=into
    )


_BLOCKS, _BLOCK, _HEADS, _GROUP, _SIZE, _BITS = 12, 16, 2, 2, 32, 64


def try_all(device: torch.device) -> None:
    """Raises what Triton raises, or :class:`~ucm.errors.InternalError` where a kernel computes
    something else."""
    generator = torch.Generator().manual_seed(1)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-7, 8, shape, generator=generator).to(device, torch.bfloat16)

    keys, query = whole(_BLOCKS, _BLOCK, _HEADS, _SIZE), whole(1, _HEADS * _GROUP, _SIZE)
    weights = whole(_SIZE, _BITS).float()
    table = torch.randperm(_BLOCKS, generator=generator).to(device, torch.int32)[None]
    blocks = torch.tensor([_BLOCKS], dtype=torch.int32, device=device)
    mean = query.float().view(1, _HEADS, _GROUP, _SIZE).mean(dim=2)

    codes = torch.zeros((_BLOCKS, _BLOCK, _HEADS, _BITS // 8), dtype=torch.uint8, device=device)
    slots = torch.arange(_BLOCKS * _BLOCK, device=device)
    hash_encode(keys.flatten(0, 1), weights, codes, slots)
    _same("codes", codes, code(keys, weights))
    copied = torch.zeros_like(codes)
    scatter_codes(codes.flatten(0, 1), slots, copied)
    _same("copied codes", copied, codes)
    wanted = hash_encode_query(query, weights, _HEADS)
    _same("codes of queries", wanted, code(mean, weights))

    own = table[0].long()
    near = distance(wanted[0], codes[own]).amin(dim=(1, 2))
    scores = hamming_scores(wanted, codes, table, blocks * _BLOCK)
    _same("Hamming scores", scores[0, 0], -near)
    latent = codes.view(_BLOCKS, _BLOCK * _HEADS, 1, _BITS // 8)
    summed = distance(wanted[0, 0], latent[own]) + distance(wanted[0, 1], latent[own])
    scored = hamming_scores(wanted[:, None], latent, table, blocks * _BLOCK * _HEADS)[0, 0]
    _same("summed Hamming scores", scored, -summed.amin(dim=(1, 2)))

    first = keys[:, 0].contiguous()
    products = (first[own].float() * mean).sum(dim=(1, 2))
    _same("products", dot_scores(query, first, table, blocks)[0, 0], products)
    bounds = torch.stack([keys.amin(dim=1), keys.amax(dim=1)], dim=1)
    low, high = bounds[own].float().unbind(dim=1)
    bound = torch.maximum(mean * low, mean * high).sum(dim=(1, 2))
    _same("Quest's bounds", quest_scores(query, bounds, table, blocks)[0, 0], bound)

    kept = select_blocks(scores, table, blocks * _BLOCK - 3, _BLOCK, [4], init=1, local=2)
    order = torch.sort(-near[1:-2], descending=True, stable=True).indices[:4] + 1
    ends = torch.tensor([0, _BLOCKS - 2, _BLOCKS - 1], device=device)
    expected = torch.sort(torch.cat([order, ends])).values
    _same("kept blocks", kept.logical[0, 0].long(), expected)
    _same("the block table", kept.table[0, 0], table[0, expected])
    _same("the length", kept.tokens[0], 7 * _BLOCK - 3 + 0 * kept.tokens[0])


def _same(what: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected.to(found.dtype)):
        raise InternalError("a kernel computes something else than torch", context={"what": what})
