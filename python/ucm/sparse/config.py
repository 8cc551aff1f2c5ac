"""From the keys of an algorithm to what runs: a selector, a policy, and the settings of the host
around them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from ucm.config.loading import algorithm_name, assemble, normalise, warn_once
from ucm.config.sparse import AlgorithmConfig, AutoConfig, Preset, chooses_blocks, keys_of
from ucm.errors import ConfigError
from ucm.sparse.policy import Policy
from ucm.sparse.selector import Geometry, Selector, make_selector

_log = logging.getLogger("ucm.sparse")


@dataclass(frozen=True, slots=True)
class Method:
    """What runs: an algorithm, ready for keys of one shape."""

    selector: Selector
    policy: Policy
    settings: AlgorithmConfig


def settings_of(
    algorithm: str, keys: Mapping[str, Any] | AlgorithmConfig | None = None
) -> AlgorithmConfig:
    """The typed keys of an algorithm, in any spelling of it and of its keys.

    Raises :class:`~ucm.errors.ConfigError` for an unknown algorithm or key, with the nearest one,
    and for a wrong value.
    """
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
    """The settings of the algorithm that ``auto`` means; other settings as they are.

    The rule: the hash method, with the settings known for the model, else its defaults. Of the
    methods here it alone keeps something of every token, at 1/16 of the size of bf16 keys for heads
    of 128 channels, it has kernels on a CPU, and it knows latent attention.
    """
    if not isinstance(settings, AutoConfig):
        return settings
    written = {key: getattr(settings, key) for key in settings.model_fields_set}
    chosen = cast("AlgorithmConfig", keys_of("GSAOnDevice")(**written))
    _log.info("sparse attention: auto is %s for %s", chosen.algorithm, model or "the model")
    return chosen


@cache
def preset_for(presets: tuple[Preset, ...], model: str) -> Preset | None:
    """The preset of the model of this name or path; None, and a line in the log, once, where there
    is none."""
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
    path of the model, for what is known of it; ``layers`` how many layers it has, beyond which
    settings for layers mean nothing."""
    preset = preset_for(settings.presets, model) if settings.presets and model else None
    name, value = settings.budget
    if (
        preset is not None
        and "topk_tokens" not in settings.model_fields_set
        and name == "topk_tokens"
    ):
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
    known = range(layers) if layers is not None else None
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
        dense_layers=frozenset(layer for layer in dense if known is None or layer in known),
        reuse_from={
            layer: source
            for layer, source in settings.reuse_from.items()
            if known is None or layer in known
        },
        heads=settings.heads,
        shared_ranks=settings.shared_selection,
    )


def method_of(
    settings: AlgorithmConfig, geometry: Geometry, model: str = "", layers: int | None = None
) -> Method:
    """Selector and policy of these settings. ``model`` is the name or path of the model, for what
    is known of it.

    Raises :class:`~ucm.errors.ConfigError` where settings and shape do not fit.
    """
    settings = resolve_auto(settings, model)
    return Method(
        make_selector(settings, geometry),
        policy_of(settings, geometry.block_size, model, layers),
        settings,
    )
