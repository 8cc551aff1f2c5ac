"""Keys and values of single tokens, in the pages of a layer's KV cache.

A page is a block of a layer: vLLM's view ``[block, head, token, element]``, whose elements are a
key and then a value. The strides of the view say whether tokens or heads lie together, so one form
serves both orders. Latent attention has one head and no values: a token is its latent part and its
rotated part.

The CPU backend arranges a page for its instruction set and documents no order. So numbers are
written to a page of our own by vLLM's function, and the place of each number is that of each
element. Whole blocks are read through strides. Pages without such strides cannot be read, and an
error says so.

A token is named by its slot: ``block * tokens of a block + place in the block``, as in vLLM's slot
mapping. What is read are the stored elements: of a cache of 8 bits its codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ucm.errors import InvalidInputError, UnsupportedError
from ucm.integration.vllm.attention.registering import OVERRIDDEN

#: Values of a digit that one write finds out: every type of a KV cache holds them exactly.
_DIGITS = 8


def is_packed(backend: str) -> bool:
    """Whether the order of a backend's pages is found out with a kernel of vLLM's, after vLLM has
    run it."""
    return backend == "CPU_ATTN"


def is_latent(backend: str) -> bool:
    """Whether a backend has latent attention."""
    return backend.endswith("MLA")


class TokenPages:
    """Reads and writes tokens of layers of one shape."""

    def __init__(self, layer: Any, backend: str, cache: Tensor) -> None:
        """``layer``: one of vLLM's attention layers, of a backend with this name; ``cache``: its
        KV. Other layers of its shape and type can then be read and written too. Raises
        :class:`~ucm.errors.UnsupportedError` for a backend whose pages are not known, and for pages
        that hold more than keys and values, or hold them in an order that cannot be found out."""
        self._latent = is_latent(backend)
        self._size = int(layer.head_size)
        self._rank = int(getattr(layer, "kv_lora_rank", self._size))
        value_size = 0 if self._latent else int(getattr(layer, "head_size_v", self._size))
        shape = tuple(cache.shape)
        if backend not in OVERRIDDEN:
            raise UnsupportedError(
                f"the pages of vLLM's {backend} are not read by token; use one of"
                f" {', '.join(OVERRIDDEN)}"
            )
        heads = 1 if self._latent else int(layer.num_kv_heads)
        if (1 if len(shape) == 3 else shape[1], shape[-1]) != (heads, self._size + value_size):
            raise UnsupportedError(
                "the pages of this engine hold more than keys and values; use an unquantized"
                " --kv-cache-dtype",
                context={"backend": backend, "page": shape[1:], "key": self._size},
            )
        self._packed = Packed(layer, cache) if is_packed(backend) else None

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens in these slots (int64 ``[t]``): ``[t, heads, d]`` each, new
        tensors. Of latent attention the key is all of a token, and the value its latent part.
        Raises :class:`~ucm.errors.InvalidInputError` for slots outside the cache."""
        view, block, place = self._at(cache, slots)
        if self._packed is not None:
            return self._packed.read(view, block, place)
        found = view[block, :, place]
        if self._latent:
            return found, found[..., : self._rank]
        return found[..., : self._size], found[..., self._size :]

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens as :meth:`read` returns them, in the cache's own type; the values of latent
        attention are part of its keys. No slot may be named twice. Raises
        :class:`~ucm.errors.InvalidInputError` for another type, or slots outside the cache."""
        if keys.dtype != cache.dtype or values.dtype != cache.dtype:
            raise InvalidInputError(
                "tokens are written in the type of the cache",
                context={"cache": str(cache.dtype), "keys": str(keys.dtype)},
            )
        view, block, place = self._at(cache, slots)
        if self._packed is not None:
            self._packed.write(view, block, place, (keys, values))
        else:
            view[block, :, place] = keys if self._latent else torch.cat([keys, values], dim=-1)

    @staticmethod
    def _at(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pages with a dimension for heads (vLLM drops that of latent ones), and the block and
        the place of each slot."""
        view = cache[:, None] if cache.dim() == 3 else cache
        tokens, slots = int(view.shape[2]), slots.to(cache.device, torch.int64)
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(view) * tokens:
            raise InvalidInputError(
                f"slots lie in 0..{len(view) * tokens - 1}",
                context={"least": int(slots.min()), "largest": int(slots.max())},
            )
        return view, slots // tokens, slots % tokens


# The CPU backend
# --------------------------------------------------------------------------------------------------


class Packed:
    """Reads and writes tokens of packed pages."""

    def __init__(self, layer: Any, cache: Tensor) -> None:
        """As :class:`TokenPages`."""
        self._layer, self._places = layer, packed_places(layer, cache)
        self._strides = [_strides_of(layer, places) for places in self._places]

    def read(self, pages: Tensor, block: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens: whole blocks are arranged by token, and the tokens taken."""
        blocks, at = torch.unique_consecutive(block, return_inverse=True)
        found, rows = pages[blocks], at * pages.shape[2] + place
        keys, values = (self.by_token(found, part).flatten(0, 1)[rows] for part in (0, 1))
        return keys, values

    def by_token(self, pages: Tensor, part: int) -> Tensor:
        """The keys (0) or the values (1) of whole pages: ``[block, token, head, element]``."""
        count, heads, tokens, both = pages.shape
        shape, strides, first = self._strides[part]
        page = tokens * both
        whole = pages.as_strided((count, heads, *shape), (heads * page, page, *strides), first)
        by_token = whole.movedim(1, 1 + len(shape) // 2)
        return by_token.reshape(count, tokens, heads, both // 2)

    def write(
        self, pages: Tensor, block: Tensor, place: Tensor, new: tuple[Tensor, Tensor]
    ) -> None:
        """Write keys and values. vLLM's function would encode 8-bit codes again, so those are
        written element by element."""
        if pages.dtype.is_floating_point:
            return _write_by_vllm(self._layer, pages, block * pages.shape[2] + place, new)
        flat = pages.view(*pages.shape[:2], -1)
        for part, content in zip(self._places[:, place], new, strict=True):
            flat[block[:, None], :, part] = content.transpose(1, 2)


def _strides_of(layer: Any, places: Tensor) -> tuple[list[int], list[int], int]:
    """Shape, strides and first place of the tensor that has these places ``[tokens, head size]``:
    the digits of a token and those of an element, equally many. Raises
    :class:`~ucm.errors.UnsupportedError` where there is none."""
    digits = [_sizes_of_digits(count) for count in places.shape]
    most = max(map(len, digits))
    shape = [digit for number in digits for digit in [1] * (most - len(number)) + number]
    flat, steps = places.flatten(), torch.empty(shape, device="meta").stride()
    first = int(flat[0])
    strides = [
        int(flat[step]) - first if count > 1 else 0
        for count, step in zip(shape, steps, strict=True)
    ]
    last = first + sum((count - 1) * step for count, step in zip(shape, strides, strict=True))
    if min(strides) < 0 or last >= 2 * len(flat):
        raise _other_form(layer)
    if not torch.equal(torch.arange(last + 1).as_strided(shape, strides, first).flatten(), flat):
        raise _other_form(layer)
    return shape, strides, first


def _sizes_of_digits(count: int) -> list[int]:
    """How many values each digit of the numbers below ``count`` has: 2, but for the first one."""
    twos = (count & -count).bit_length() - 1
    return [count >> twos, *[2] * twos]


def packed_places(layer: Any, cache: Tensor) -> Tensor:
    """The places of keys and values in a packed page of one head, int64 ``[2, tokens, head
    size]``. Raises :class:`~ucm.errors.UnsupportedError` where they are no permutation."""
    heads, tokens = int(layer.num_kv_heads), int(cache.shape[2])
    shape = (2, tokens, heads, int(layer.head_size))
    known = torch.stack([_written(layer, cache, torch.full(shape, n)) for n in range(_DIGITS)])
    numbers = torch.arange(2 * tokens * shape[3])
    found, scale = torch.zeros_like(numbers), 1
    while scale < len(numbers):
        digits = (numbers // scale % _DIGITS).view(2, tokens, 1, -1).expand(shape)
        equal = known[:, 0] == _written(layer, cache, digits)[0]
        if not (equal.sum(dim=0) == 1).all():
            raise _other_form(layer)
        found += equal.int().argmax(dim=0) * scale
        scale *= _DIGITS
    places = torch.empty_like(found)
    if not torch.equal(found.sort().values, numbers):
        raise _other_form(layer)
    places[found] = numbers
    places = places.view(2, tokens, -1)
    # All heads have the same order: random numbers of every head are found at these places.
    shown = torch.randint(_DIGITS, shape, generator=torch.Generator().manual_seed(0))
    page, head = _written(layer, cache, shown), torch.arange(heads)[:, None]
    at = places[:, :, None].expand(shape)
    if not torch.equal(page[head, at], known[shown, head, at]):
        raise _other_form(layer)
    return places


def _written(layer: Any, cache: Tensor, digits: Tensor) -> Tensor:
    """A page with these keys and values ``[2, tokens, heads, d]``, written as vLLM writes them:
    ``[heads, elements]``."""
    _, tokens, heads, size = digits.shape
    page = torch.zeros(1, heads, tokens, 2 * size, dtype=cache.dtype)
    given = digits.to(cache.dtype if cache.dtype.is_floating_point else layer.dtype)
    try:
        _write_by_vllm(layer, page, torch.arange(tokens, dtype=torch.int64), (given[0], given[1]))
    except RuntimeError as error:
        raise _other_form(layer) from error
    return page.view(heads, -1)


def _write_by_vllm(layer: Any, pages: Tensor, slots: Tensor, new: tuple[Tensor, Tensor]) -> None:
    from vllm import _custom_ops as ops

    count, heads, tokens, both = pages.shape
    parts = pages.view(count, heads, 2 * tokens, both // 2).chunk(2, dim=2)
    kind = "auto" if pages.dtype.is_floating_point else str(layer.kv_cache_dtype)
    keys, values = (content.contiguous() for content in new)
    ops.cpu_attn_reshape_and_cache(keys, values, *parts, slots, layer.isa, kv_cache_dtype=kind)


def _other_form(layer: Any) -> UnsupportedError:
    return UnsupportedError(
        "the pages of this CPU hold keys in another form",
        context={"isa": layer.isa, "kv_cache_dtype": getattr(layer, "kv_cache_dtype", "auto")},
    )
