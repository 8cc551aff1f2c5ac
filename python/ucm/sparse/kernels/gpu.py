"""Sparse retrieval on a GPU, in Triton: the functions of :mod:`ucm.sparse.retrieval` for tensors of
a GPU.

They take the same tensors, mean the same and return new tensors on the same GPU, without waiting
for it. What a table or a length says is not looked at before a launch: ids must lie within the
representations. Threads and instruction sets of a CPU are no arguments here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ucm.sparse.kernels import dot, encode, hamming, select
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


dot_scores = _launched(dot.dot_scores)
hamming_scores = _launched(hamming.hamming_scores)
hash_encode = _launched(encode.hash_encode)
hash_encode_query = _launched(encode.hash_encode_query)
quest_scores = _launched(dot.quest_scores)
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
    asked, tokens = (
        encode.hash_encode_query(query, weights, codes.shape[2]),
        blocks * codes.shape[1],
    )
    return hamming.hamming_scores(
        asked, codes, table, tokens, heads_apart=heads_apart, init=init, local=local
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
    asked = encode.hash_encode_query(query, weights, codes.shape[2])
    scores = hamming.hamming_scores(
        asked, codes, code_table, tokens, heads_apart=heads_apart, init=init, local=local
    )
    return select.select_blocks(
        scores, table, tokens, codes.shape[1], budgets, init=init, local=local, into=into
    )
