"""Makes the method that an engine is configured for, and tells it the shape of the engine's
keys."""

from __future__ import annotations

import importlib
from typing import Any

from ucm.config import UcmConfig
from ucm.config.sparse import AlgorithmConfig, algorithm_of
from ucm.errors import ConfigError
from ucm.integration.vllm.attention.offload import SPARE
from ucm.sparse.base import UcmSparseBase, UcmSparseRole
from ucm.sparse.config import method_of
from ucm.sparse.factory import UcmSparseFactory
from ucm.sparse.method import BlockSparse
from ucm.sparse.rep_store import bytes_per_block
from ucm.sparse.selector import Geometry


def method_class(config: UcmConfig) -> type[UcmSparseBase]:
    """The class that the configuration names: of an algorithm, or in a user's module, which may
    register selectors as well.

    Raises :class:`~ucm.errors.ConfigError` where there is none of that name.
    """
    name, path = config.sparse.type or "", config.sparse.module_path
    if path is None:
        return UcmSparseFactory.method_class(name)
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(f"ucm_sparse_module_path: {path} cannot be imported: {error}") from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, UcmSparseBase):
        return found
    if algorithm_of(name) is None:
        raise ConfigError(
            f"ucm_sparse_method: {path} has no class {name} derived from"
            " ucm.sparse.base.UcmSparseBase, and registers no selector of that name"
        )
    return UcmSparseFactory.method_class(name)


def make_method(config: UcmConfig, vllm_config: Any, role: UcmSparseRole) -> UcmSparseBase:
    """The method of one side of an engine."""
    kind = method_class(config)
    if issubclass(kind, BlockSparse):
        return kind(vllm_config, role, settings_for(kind, config))
    return kind(vllm_config, role)


def settings_for(kind: type[BlockSparse], config: UcmConfig) -> AlgorithmConfig:
    """The keys of the algorithm of a method, its defaults where none are written."""
    found = config.sparse.section(kind.algorithm)
    assert isinstance(found, AlgorithmConfig)
    return found


def geometry_of(spec: Any, vllm_config: Any, scale: float | None = None) -> Geometry:
    """The shape of the keys of a KV cache spec, on this rank."""
    rope = 0
    if type(spec).__name__.endswith("MLAAttentionSpec"):
        rope = int(getattr(vllm_config.model_config.hf_text_config, "qk_rope_head_dim", 0))
    return Geometry(
        block_size=int(spec.block_size),
        kv_heads=int(spec.num_kv_heads),
        head_dim=int(spec.head_size),
        rope_dim=rope,
        scale=scale,
    )


def bytes_beside(config: UcmConfig, spec: Any, vllm_config: Any) -> int:
    """Bytes that one block of the device costs in one layer that selects, beside its KV: its
    representation, and with offload those of the blocks that have left."""
    kind = method_class(config)
    if not issubclass(kind, BlockSparse):
        return 0
    settings = settings_for(kind, config)
    method = method_of(
        settings, geometry_of(spec, vllm_config), str(vllm_config.model_config.model)
    )
    return bytes_per_block(method.selector, 1) * (1 + SPARE if settings.offload else 1)


def set_up(
    method: BlockSparse,
    layers: dict[str, Any],
    spec: Any,
    vllm_config: Any,
    num_blocks: int,
    *,
    device: Any,
    per_head: bool,
    reduce: Any,
    spare_blocks: int = 0,
) -> None:
    """Get a worker's method ready for the KV cache of its rank. Raises
    :class:`~ucm.errors.ConfigError` where settings and engine do not fit."""
    first = next(iter(layers.values()))
    method.setup(
        geometry_of(spec, vllm_config, float(first.impl.scale)),
        list(layers),
        num_blocks,
        device=device,
        max_sequences=vllm_config.scheduler_config.max_num_seqs,
        key_dtype=first.dtype if hasattr(first, "dtype") else vllm_config.model_config.dtype,
        per_head=per_head,
        spare_blocks=spare_blocks,
        reduce=reduce,
    )
