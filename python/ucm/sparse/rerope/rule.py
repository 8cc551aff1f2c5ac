"""The position rule of ReRoPE and its attention: of whole tensors in torch, of CPU pages by kernel.

A token attends by the distance to another one, as with RoPE, but distances end at a window::

    logit(i, j) = scale · s_i · q_iᵀ R(min(i - j, window)) k_j,   j <= i
    s_i = max(1, ln(i + 1) / ln(training length)) with log scale, else 1

Keys are cached unrotated, so a cache has the usual size. Below the window a logit is the product of
a query rotated by ``i`` and a key rotated by ``j``; beyond it, that of a query rotated by the
window and the key as it is. A window that no distance reaches gives RoPE. Since a logit depends on
the two tokens alone, a prompt computed at once, in chunks or token by token has the same results.

Shapes: ``t`` queries, the last of ``T`` tokens of a row; ``hq`` query heads, ``h`` KV heads, ``d``
head size; ``n`` blocks of ``b`` tokens. Logits, probabilities and sums are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse import retrieval

#: Most logits, and most queries of pages, that are computed at a time.
_LOGITS, _ROWS = 1 << 24, 1024
#: Most and fewest queries of a tile.
_MOST, _LEAST = 256, 16


@dataclass(frozen=True)
class Rule:
    """The settings of an engine."""

    #: Distance from which on logits no longer depend on the distance, in tokens, at least 1.
    window: int
    #: Tokens of the longest sequence that the model was trained with.
    training_length: int
    #: Whether queries beyond the trained length are scaled.
    log_scale: bool = False

    def scales(self, places: Tensor) -> Tensor:
        """``s_i`` of tokens at these places, float32 of the same shape."""
        if not self.log_scale:
            return torch.ones_like(places, dtype=torch.float32)
        return ((places + 1).log() / math.log(self.training_length)).clip(1).float()


class RotationTable:
    """A model's rotation: cosines and sines of each place, float32 ``[places, d / 2]``; channel
    ``c`` turns with channel ``c + d / 2``. An amplitude other than 1 (YaRN's) is part of them."""

    def __init__(self, cos_sin: Tensor) -> None:
        """``cos_sin [places, d]``: cosines of each place, then sines, as vLLM keeps them."""
        self.amplitude = float(cos_sin[0, 0])
        self.table = cos_sin.float().contiguous()
        self.cos, self.sin = self.table.chunk(2, dim=-1)

    def move(self, device: torch.device) -> None:
        """Keep the table on another device."""
        self.table = self.table.to(device)
        self.cos, self.sin = self.table.chunk(2, dim=-1)

    @classmethod
    def like(cls, cos_sin: Tensor, places: int) -> RotationTable:
        """The rotation by constant rates whose first two places are ``cos_sin [2, d]``, for any
        number of places."""
        cos, sin = cos_sin.double().cpu().chunk(2, dim=-1)
        numbers = torch.arange(places, dtype=torch.float64, device="cpu")
        angles = numbers[:, None] * torch.atan2(sin[1], cos[1])
        return cls(torch.cat([angles.cos(), angles.sin()], dim=-1) * cos[0, 0])

    @property
    def places(self) -> int:
        """The number of places that it knows."""
        return len(self.table)

    def queries(self, query: Tensor, places: Tensor) -> Tensor:
        """``query [..., t, d]`` rotated by the places ``[t]``."""
        cos, sin = self.cos[places], self.sin[places]
        first, second = query.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def keys(self, keys: Tensor, begin: int) -> Tensor:
        """Transposed keys ``[..., d, T]`` rotated by the places from ``begin`` on."""
        end = begin + keys.shape[-1]
        cos, sin = self.cos[begin:end].T, self.sin[begin:end].T
        first, second = keys.chunk(2, dim=-2)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-2)


def attention(
    query: Tensor, key: Tensor, value: Tensor, rotation: RotationTable, rule: Rule, scale: float
) -> Tensor:
    """Causal attention of the last ``t`` of ``T`` tokens, ``[t, hq, d]`` like ``query``, none of
    whose heads is rotated; ``key`` and ``value`` are ``[T, h, d]``. Raises
    :class:`~ucm.errors.InvalidInputError` for more tokens than the rotation has places."""
    out = torch.empty_like(query)
    _check(key.shape[0], rotation)
    keys, values = key.permute(1, 2, 0).float(), value.transpose(0, 1).float()
    _attend(query, keys, values, rotation, rule, scale, out)
    return out


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    tokens: Tensor,
    rotation: RotationTable,
    rule: Rule,
    scale: float,
    out: Tensor,
) -> None:
    """:func:`attention` of each row of a batch, into ``out [t, hq, d]``.

    ``kv_cache [n, h, b, 2 * d]`` are pages as vLLM's CPU backend packs them for "vec" and "vec16":
    of each head the keys as ``[d, b]``, then the values as ``[b, d]``. ``b`` and ``d`` are
    multiples of 16. ``table [r, N]`` and ``tokens [r]`` are the blocks and the tokens of each row,
    the last ones those of its queries, ``query[starts[r]:starts[r + 1]]`` with ``starts[0]`` 0.
    Each query is a row of the kernel of :func:`ucm.sparse.retrieval.paged_attention`.
    """
    _check(int(tokens.max()), rotation)
    counts = starts.diff()
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    # The last query of a row sees all its tokens, the one before it one less.
    behind = starts[1:].index_select(0, row) - 1 - torch.arange(len(row))
    seen = (tokens.index_select(0, row) - behind).int()
    unit = 1 / math.log(rule.training_length) if rule.log_scale else 0.0
    for begin in range(0, len(row), _ROWS):
        part = slice(begin, begin + _ROWS)
        blocks = table.index_select(0, row[part])
        settings = (rotation.table, rule.window, unit)
        retrieval.paged_attention(
            query[part], kv_cache, blocks, seen[part], scale, out[part], rule=settings
        )


def _check(tokens: int, rotation: RotationTable) -> None:
    if tokens > rotation.places:
        raise InvalidInputError(
            "a row is longer than the places of its model's rotation; raise"
            " max_position_embeddings",
            context={"tokens": tokens, "places": rotation.places},
        )


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rotation: RotationTable,
    rule: Rule,
    scale: float,
    out: Tensor,
) -> None:
    """``query [t, hq, d]`` over ``keys [h, d, T]`` and ``values [h, T, d]``, tile by tile: of the
    keys before a tile's windows only the far product is computed, of those within all windows only
    the near one."""
    count, heads, dim = query.shape
    kv_heads, _, length = keys.shape
    window = min(rule.window, rotation.places)
    by_group = query.float().view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    tile = max(_LEAST, min(_MOST, _LOGITS // (heads * length)))
    for begin in range(0, count, tile):
        end = min(begin + tile, count)
        places = torch.arange(begin, end) + (length - count)
        first, last = int(places[0]), int(places[-1])
        asked = by_group[:, :, begin:end] * (rule.scales(places) * scale)[:, None]
        near_from, far_to = max(0, first - window + 1), max(0, last + 1 - window)
        near = rotation.queries(asked, places).flatten(1, 2) @ rotation.keys(
            keys[:, :, near_from : last + 1], near_from
        )
        logits = near.view(*asked.shape[:3], -1)
        if far_to:
            at_window = torch.full_like(places, window)
            turned = rotation.queries(asked, at_window) * rotation.amplitude
            far = (turned.flatten(1, 2) @ keys[:, :, :far_to]).view(*asked.shape[:3], -1)
            both = far_to - near_from  # keys that some queries of the tile see near, others far
            is_near = places[:, None] - torch.arange(near_from, far_to) < window
            far[..., near_from:] = torch.where(is_near, logits[..., :both], far[..., near_from:])
            logits = torch.cat([far, logits[..., both:]], dim=-1)
        future = torch.arange(first, last + 1) > places[:, None]
        logits[..., first:].masked_fill_(future, -math.inf)
        weights = logits.softmax(dim=-1).flatten(1, 2)
        found = (weights @ values[:, : last + 1]).view(*asked.shape)
        out[begin:end] = found.permute(2, 0, 1, 3).reshape(end - begin, heads, dim).to(out.dtype)
