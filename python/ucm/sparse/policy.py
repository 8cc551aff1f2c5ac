"""How many blocks a request keeps, which it always keeps, and when it chooses anew. The only place
of windows and budgets.

Notation: ``N`` blocks hold the tokens of a request, the last perhaps partly; of these the first
``init`` and the last ``local`` are always kept, and ``m = N - init - local`` lie between and are
chosen from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ucm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Policy:
    """Windows, budget and rhythm. Checked when it is made: :class:`~ucm.errors.ConfigError` names
    the key that is wrong.

    Exactly one of ``ratio``, ``topk`` and ``mass`` says how many blocks are chosen; ``k_min`` and
    ``k_max`` bound it.
    """

    #: First blocks that are always kept.
    init: int = 1
    #: Last blocks that are always kept; at least 1, because the last one may be partial.
    local: int = 2
    #: Share of the blocks chosen from, rounded up (with ``windows_inside``: of all blocks).
    ratio: float | None = 0.3
    #: Number of blocks; 0: the windows alone.
    topk: int | None = None
    #: The fewest blocks that hold this share of the estimated attention mass of those chosen from.
    mass: float | None = None
    #: Least and most blocks that a budget may come to.
    k_min: int = 0
    k_max: int | None = None
    #: Whether the windows are part of the budget, instead of beside it.
    windows_inside: bool = False
    #: Requests with fewer blocks, or fewer tokens, are dense.
    min_blocks: int = 0
    min_tokens: int = 0
    #: All are dense in steps with fewer long requests than this. Above 1 a request's answer depends
    #: on its neighbours.
    min_concurrency: int = 1
    #: Decode steps from one choice to the next.
    stride: int = 1
    #: Decode steps from the query of a choice to its first use.
    lag: int = 0
    #: Layers without selection.
    dense_layers: frozenset[int] = frozenset()
    #: Layer to the earlier layer whose choice it takes over.
    reuse_from: Mapping[int, int] = field(default_factory=dict)
    #: One choice for all heads of a layer, or one for each KV head.
    heads: Literal["shared", "kv"] = "shared"
    #: Whether tensor ranks agree on one choice, by adding up integer scores.
    shared_ranks: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("ratio", "topk", "mass") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a budget is one of ratio, topk and mass, got {', '.join(given) or 'none of them'}"
            )
        _at_least(
            0,
            init=self.init,
            k_min=self.k_min,
            min_blocks=self.min_blocks,
            min_tokens=self.min_tokens,
        )
        _at_least(0, lag=self.lag)
        _at_least(1, local=self.local, stride=self.stride, min_concurrency=self.min_concurrency)
        if self.topk is not None:
            _at_least(0, topk=self.topk)
        for name, share in (("ratio", self.ratio), ("mass", self.mass)):
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"{name} is a share above 0 and at most 1, got {share}")
        if self.k_max is not None and self.k_max < max(self.k_min, 1):
            raise ConfigError(f"k_max ({self.k_max}) lies below k_min ({max(self.k_min, 1)})")
        if any(layer < 0 for layer in self.dense_layers):
            raise ConfigError(f"dense_layers are counted from 0, got {sorted(self.dense_layers)}")
        if self.shared_ranks and self.lag:
            raise ConfigError(
                f"shared_selection needs lag 0, got {self.lag}: ranks add up their scores within"
                " the step, one layer after the other"
            )
        for layer, source in self.reuse_from.items():
            if not 0 <= source < layer:
                raise ConfigError(
                    f"reuse_from: layer {layer} can take the choice of an earlier layer only, got"
                    f" {source}"
                )
            if source in self.reuse_from or source in self.dense_layers:
                raise ConfigError(
                    f"reuse_from: layer {source} makes no choice that layer {layer} could take"
                )
            if layer in self.dense_layers:
                raise ConfigError(
                    f"layer {layer} stands in dense_layers and in reuse_from; keep one of them"
                )

    @property
    def windows(self) -> int:
        """Blocks that are always kept."""
        return self.init + self.local

    def is_dense(self, blocks: int, tokens: int) -> bool:
        """Whether a request of this length keeps every block, so that nothing has to be chosen: it
        is short, or its budget is as large as what there is to choose from."""
        keeps_all = self.least(blocks) >= blocks - self.windows
        return keeps_all or blocks < self.min_blocks or tokens < self.min_tokens

    def budget(self, blocks: int) -> int:
        """Most blocks that are chosen of the ``blocks - windows`` between the windows.

        For a budget by mass this is what bounds it, since the number depends on the scores.
        """
        m = max(0, blocks - self.windows)
        if self.topk is not None:
            k = self.topk
        elif self.ratio is not None:
            k = _share(self.ratio, blocks if self.windows_inside else m)
        else:
            k = blocks if self.windows_inside else m
        k = max(k, self.k_min)
        if self.k_max is not None:
            k = min(k, self.k_max)
        if self.windows_inside:
            k -= self.windows
        return min(max(k, 0), m)

    def least(self, blocks: int) -> int:
        """Fewest blocks that are chosen between the windows: what bounds a budget by mass from
        below."""
        if self.mass is None:
            return self.budget(blocks)
        k = self.k_min - self.windows if self.windows_inside else self.k_min
        return min(max(k, 0), self.budget(blocks))

    def kept(self, blocks: int, tokens: int) -> int:
        """Most blocks that a request of this length keeps, windows included."""
        return blocks if self.is_dense(blocks, tokens) else self.windows + self.budget(blocks)

    def dense_until(self, block_size: int, most: int, min_tokens: int = 0) -> int:
        """Length in tokens up to which a request keeps every block; at most ``most``. Requests with
        fewer than ``min_tokens`` are dense besides."""
        for blocks in range(self.windows + 1, -(-most // block_size) + 1):
            shortest = max((blocks - 1) * block_size + 1, self.min_tokens, min_tokens)
            if shortest <= blocks * block_size and not self.is_dense(blocks, shortest):
                return min(shortest - 1, most)
        return most

    def selecting_layers(self, layers: int) -> list[int]:
        """Of ``layers`` layers those that choose, and so need representations."""
        return [
            layer
            for layer in range(layers)
            if layer not in self.dense_layers and layer not in self.reuse_from
        ]


def _share(ratio: float, blocks: int) -> int:
    # Rounded first: 0.1 * 30 is a little more than 3, and would become 4.
    return math.ceil(round(ratio * blocks, 9))


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
