"""The algorithms of block selection, one file each; this is the list of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ucm.config.sparse import AlgorithmConfig
from ucm.errors import ConfigError
from ucm.sparse.selector import Geometry, Selector
from ucm.sparse.selectors.controls import Oracle, Random, Windows
from ucm.sparse.selectors.hash import Hash
from ucm.sparse.selectors.infllm import InfLLM
from ucm.sparse.selectors.kvstar import KVStar
from ucm.sparse.selectors.mean_k import MeanK
from ucm.sparse.selectors.periodic import Periodic
from ucm.sparse.selectors.quest import Quest

#: Name of an algorithm -> its selector, and the selector's options as keys of the configuration.
_SELECTORS: dict[str, tuple[Callable[..., Selector], dict[str, str]]] = {
    "ESA": (MeanK, {"pool": "pool", "score": "score", "rep_dtype": "rep_dtype"}),
    "GSA": (MeanK, {"pool": "pool", "score": "score", "rep_dtype": "rep_dtype"}),
    "GSAOnDevice": (
        Hash,
        {
            "bits": "hash_bits",
            "seed": "hash_seed",
            "weights_file": "hash_weights_file",
            "reduction_heads": "reduction_heads",
        },
    ),
    "KVStarMultiStep": (
        KVStar,
        {
            "prune_ratio": "prune_ratio",
            "merge": "merge",
            "group": "group",
            "scale": "score_scale",
            "average_heads": "average_heads",
        },
    ),
    "Quest": (Quest, {}),
    "InfLLM": (InfLLM, {"rep_tokens": "rep_tokens"}),
    "Periodic": (Periodic, {}),
    "Random": (Random, {"seed": "seed"}),
    "Windows": (Windows, {}),
    "Oracle": (Oracle, {}),
}


def make_selector(settings: AlgorithmConfig, geometry: Geometry) -> Selector:
    """The selector of an algorithm. Raises :class:`~ucm.errors.ConfigError` where settings and
    shape do not fit."""
    if settings.algorithm not in _SELECTORS:
        raise ConfigError(f"no selector is known for the sparse algorithm {settings.algorithm}")
    make, options = _SELECTORS[settings.algorithm]
    given: dict[str, Any] = {option: getattr(settings, key) for option, key in options.items()}
    return make(geometry, **given)


def register_selector(
    algorithm: str, make: Callable[..., Selector], options: dict[str, str] | None = None
) -> None:
    """Make a selector known for an algorithm: ``make(geometry, **options)``, of which each takes
    the value of the key of the configuration that it names."""
    _SELECTORS[algorithm] = (make, options or {})
