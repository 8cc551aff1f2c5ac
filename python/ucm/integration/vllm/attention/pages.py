"""Reads keys back out of the pages of a KV cache, for blocks that were loaded instead of computed.

On an accelerator a page is read as it is. The CPU backend arranges a page for the instruction set
it computes with, and says nowhere how; so that is found out once vLLM has written keys of a step:
numbers are written to a page of our own by vLLM's function, and where each one went is where each
key will be. Where that gives no permutation, keys cannot be read back, and blocks that are loaded
are not selected from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ucm.errors import UnsupportedError

#: Keys of whole blocks ``[m, b, h, d]``, read from the cache of a layer ``[blocks, heads, b,
#: elements]``.
ReadKeys = Callable[[Tensor, Tensor], Tensor]

#: Numbers that every floating-point type of a KV cache holds exactly.
_DIGITS = 128


def is_packed(backend: str) -> bool:
    """Whether how a backend's pages are read is to be found out, by a kernel of vLLM's that vLLM
    has run before."""
    return backend == "CPU_ATTN"


def key_reader(layer: Any, backend: str, cache: Tensor, block_tokens: int) -> ReadKeys:
    """How the keys of a layer are read, of the backend of this name; ``cache`` is the layer's KV
    cache.

    Raises :class:`~ucm.errors.UnsupportedError` where they cannot be read.
    """
    if is_packed(backend):
        return _packed(layer, cache)
    if backend.endswith("MLA"):
        return lambda pages, ids: pages.index_select(0, ids).reshape(len(ids), block_tokens, 1, -1)
    size = layer.head_size
    return lambda pages, ids: pages.index_select(0, ids)[..., :size].transpose(1, 2)


def _packed(layer: Any, cache: Tensor) -> ReadKeys:
    heads, size, tokens, dtype = (
        layer.num_kv_heads,
        layer.head_size,
        int(cache.shape[2]),
        cache.dtype,
    )
    place = _places(layer, dtype, tokens, size)

    def read(pages: Tensor, ids: Tensor) -> Tensor:
        found = pages.index_select(0, ids).reshape(len(ids), heads, 2 * tokens * size)
        return found[:, :, place].reshape(len(ids), heads, tokens, size).transpose(1, 2)

    shown = torch.randn(tokens, heads, size).to(dtype)
    if not torch.equal(
        read(_write(layer, shown, tokens), torch.zeros(1, dtype=torch.int64))[0], shown
    ):
        raise UnsupportedError(
            "the pages of this CPU hold keys in another form", context={"isa": layer.isa}
        )
    return read


def _places(layer: Any, dtype: torch.dtype, tokens: int, size: int) -> Tensor:
    """Where in a page (of one head, keys and values) the element of each token and channel is,
    ``[b * d]``."""
    numbers = torch.arange(tokens * size)
    heads = layer.num_kv_heads
    found = torch.zeros(tokens * size, dtype=torch.int64)
    scale = 1
    while scale < tokens * size:
        digit = (numbers // scale % _DIGITS).view(tokens, 1, size).expand(tokens, heads, size)
        page = _write(layer, digit.to(dtype), tokens)[0].reshape(heads, -1)[0, : tokens * size]
        found += page.float().round().long() * scale
        scale *= _DIGITS
    if not torch.equal(found.sort().values, numbers):
        raise UnsupportedError(
            "the pages of this CPU hold keys in another form", context={"isa": layer.isa}
        )
    place = torch.empty_like(found)
    place[found] = numbers
    return place


def _write(layer: Any, keys: Tensor, tokens: int) -> Tensor:
    """A page with these keys, written as vLLM writes them: ``[1, heads, b, 2 * d]``."""
    from vllm import _custom_ops as ops

    heads, size = keys.shape[1], keys.shape[2]
    page = torch.zeros(1, heads, tokens, 2 * size, dtype=keys.dtype)
    key_cache, value_cache = page.view(1, heads, 2 * tokens, size).chunk(2, dim=2)
    keys = keys.contiguous()
    slots = torch.arange(tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        keys,
        torch.zeros_like(keys),
        key_cache,
        value_cache,
        slots,
        layer.isa,
        kv_cache_dtype="auto",
    )
    return page
