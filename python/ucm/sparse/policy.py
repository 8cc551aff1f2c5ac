"""How many blocks a request keeps, the windows, and when it chooses again; and the way from the
keys of an algorithm to a policy and a selector.

Notation: ``N`` blocks hold the tokens of a request, the last perhaps partly; the first ``init`` and
the last ``local`` are always kept, and ``m = N - init - local`` between them are candidates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

from ucm.config.loading import algorithm_name, assemble, normalise, warn_once
from ucm.config.sparse import (
    MAX_LAYERS,
    AlgorithmConfig,
    AutoConfig,
    Preset,
    chooses_blocks,
    keys_of,
)
from ucm.errors import ConfigError
from ucm.sparse.selector import BlockSelector, Geometry, make_selector

_log = logging.getLogger("ucm.sparse")


@dataclass(frozen=True, slots=True)
class Policy:
    """Windows, budget and rhythm. Checked when it is made: :class:`~ucm.errors.ConfigError` names
    the wrong key. Exactly one of ``ratio``, ``topk`` and ``mass`` is the budget; ``k_min`` and
    ``k_max`` bound it."""

    #: First blocks that are always kept.
    init: int = 1
    #: Last blocks that are always kept; at least 1, because the last one may be partial.
    local: int = 2
    #: Share of the candidates, rounded up (with ``windows_inside``: of all blocks).
    ratio: float | None = 0.3
    #: Number of blocks; 0: the windows alone.
    topk: int | None = None
    #: The fewest blocks that hold this share of the candidates' estimated attention mass.
    mass: float | None = None
    #: Bounds of a budget.
    k_min: int = 0
    k_max: int | None = None
    #: Whether the windows are part of the budget.
    windows_inside: bool = False
    #: Requests with fewer blocks, or fewer tokens, are dense.
    min_blocks: int = 0
    min_tokens: int = 0
    #: All are dense in steps with fewer long requests. Above 1 a request's answer depends on its
    #: neighbours.
    min_concurrency: int = 1
    #: Decode steps from one choice to the next.
    stride: int = 1
    #: Decode steps from the query of a choice to its first use.
    lag: int = 0
    #: Layers without selection.
    dense_layers: frozenset[int] = frozenset()
    #: Layer to the earlier layer whose choice it reuses.
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
        _at_least(0, init=self.init, k_min=self.k_min, lag=self.lag, topk=self.topk or 0)
        _at_least(0, min_blocks=self.min_blocks, min_tokens=self.min_tokens)
        _at_least(1, local=self.local, stride=self.stride, min_concurrency=self.min_concurrency)
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
        """Whether a request of this length keeps every block: it is short, or its budget covers all
        candidates."""
        keeps_all = self.least(blocks) >= blocks - self.windows
        return keeps_all or blocks < self.min_blocks or tokens < self.min_tokens

    def budget(self, blocks: int) -> int:
        """Most blocks that are chosen of the ``blocks - windows`` candidates; the bound of a budget
        by mass."""
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
        """Fewest blocks that are chosen between the windows: the lower bound of a budget by
        mass."""
        if self.mass is None:
            return self.budget(blocks)
        k = self.k_min - self.windows if self.windows_inside else self.k_min
        return min(max(k, 0), self.budget(blocks))

    def kept(self, blocks: int, tokens: int) -> int:
        """Most blocks that a request of this length keeps, windows included."""
        return blocks if self.is_dense(blocks, tokens) else self.windows + self.budget(blocks)

    def dense_until(self, block_size: int, most: int, min_tokens: int = 0) -> int:
        """Length in tokens up to which a request keeps every block; at most ``most``. Requests with
        fewer than ``min_tokens`` are dense too."""
        for blocks in range(self.windows + 1, -(-most // block_size) + 1):
            shortest = max((blocks - 1) * block_size + 1, self.min_tokens, min_tokens)
            if shortest <= blocks * block_size and not self.is_dense(blocks, shortest):
                return min(shortest - 1, most)
        return most

    def selecting_layers(self, layers: int) -> list[int]:
        """Of ``layers`` layers those that choose, and so need representations."""
        kept = self.dense_layers | self.reuse_from.keys()
        return [layer for layer in range(layers) if layer not in kept]


def _share(ratio: float, blocks: int) -> int:
    # Rounded first: 0.1 * 30 is a little more than 3, and would become 4.
    return math.ceil(round(ratio * blocks, 9))


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm, ready for keys of one shape."""

    selector: BlockSelector
    policy: Policy
    settings: AlgorithmConfig


def settings_of(
    algorithm: str, keys: Mapping[str, Any] | AlgorithmConfig | None = None
) -> AlgorithmConfig:
    """The typed keys of an algorithm, in any spelling. Raises :class:`~ucm.errors.ConfigError` for
    an unknown algorithm or key, with the nearest one, and for a wrong value."""
    if isinstance(keys, AlgorithmConfig):
        return keys
    name = algorithm_name(algorithm, "algorithm")
    if not chooses_blocks(name):
        raise ConfigError(f"{name} chooses no blocks, so it has no selector")
    found = assemble([normalise({"ucm_sparse_config": {name: dict(keys or {})}}, "the given keys")])
    for warning in found.warnings:
        warn_once(warning)
    settings = found.sparse.settings
    assert isinstance(settings, AlgorithmConfig)
    return settings


def resolve_auto(settings: AlgorithmConfig, model: str) -> AlgorithmConfig:
    """The settings of the algorithm that ``auto`` means; other settings as they are. It is the hash
    method, with the settings known for the model, else its defaults: of the methods here it alone
    keeps something of every token (1/16 of the size of bf16 keys for heads of 128 channels), has
    kernels on a CPU, and serves latent attention."""
    if not isinstance(settings, AutoConfig):
        return settings
    written = {key: getattr(settings, key) for key in settings.model_fields_set}
    chosen = cast("AlgorithmConfig", keys_of("GSAOnDevice")(**written))
    _log.info("sparse attention: auto is %s for %s", chosen.algorithm, model or "the model")
    return chosen


@cache
def preset_for(presets: tuple[Preset, ...], model: str) -> Preset | None:
    """The preset of the model of this name or path; None, logged once, without any."""
    for preset in presets:
        if preset.name.lower() in model.lower():
            return preset
    _log.info(
        'no settings of sparse attention are known for the model "%s": defaults are used', model
    )
    return None


def policy_of(
    settings: AlgorithmConfig, block_size: int, model: str = "", layers: int | None = None
) -> Policy:
    """The policy of these settings for blocks of ``block_size`` tokens. ``model`` is the name or
    path of the model, for presets; ``layers`` its number of layers, beyond which settings of layers
    are ignored."""
    preset = preset_for(settings.presets, model) if settings.presets and model else None
    name, value = settings.budget
    if preset is not None and name == "topk_tokens" and name not in settings.model_fields_set:
        value = preset.topk_tokens
    budget: dict[str, Any] = {"ratio": None}
    match name:
        case "topk_tokens":
            budget["topk"] = -(-value // block_size)
        case "topk_blocks":
            budget["topk"] = value
        case "score_mass":
            budget["mass"] = value
        case "ratio":
            budget["ratio"] = value
    min_tokens = settings.min_tokens
    if min_tokens is None:
        min_tokens = preset.min_tokens if preset is not None else 0
    dense = settings.dense_layers
    if dense is None:
        dense = preset.dense_layers if preset is not None else ()
    least = settings.min_blocks if settings.min_blocks_is_budget else 0
    known = range(layers if layers is not None else MAX_LAYERS)
    return Policy(
        init=settings.window("init", block_size),
        local=settings.window("local", block_size),
        **budget,
        k_min=max(settings.k_min, least),
        k_max=settings.k_max,
        windows_inside=settings.windows_inside,
        min_blocks=settings.min_blocks - least,
        min_tokens=min_tokens,
        min_concurrency=settings.min_concurrency,
        stride=settings.stride,
        lag=settings.lag,
        dense_layers=frozenset(layer for layer in dense if layer in known),
        reuse_from={layer: of for layer, of in settings.reuse_from.items() if layer in known},
        heads=settings.heads,
        shared_ranks=settings.shared_selection,
    )


def method_of(
    settings: AlgorithmConfig, geometry: Geometry, model: str = "", layers: int | None = None
) -> Method:
    """Selector and policy of these settings. ``model`` is the name or path of the model, for
    presets. Raises :class:`~ucm.errors.ConfigError` where settings and shape do not fit."""
    settings = resolve_auto(settings, model)
    policy = policy_of(settings, geometry.block_size, model, layers)
    return Method(make_selector(settings, geometry), policy, settings)
