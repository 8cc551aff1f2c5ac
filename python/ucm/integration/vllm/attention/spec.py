"""A KV cache spec with vLLM's own pages, whose manager keeps approximate KV out of vLLM's prefix cache.

The bytes of representations lie beside the KV, so they are no part of the page; they count in
``max_memory_usage_bytes``, by which vLLM decides whether the longest request fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ucm.integration.vllm.attention.configured import sparse_config
from ucm.integration.vllm.attention.making import bytes_beside

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

#: More tokens than a request can have.
ALL = 1 << 62


class _Beside:
    """What both specs add to vLLM's."""

    beside_bytes: int
    block_size: int

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """The KV of the longest request and what lies beside it, of one layer."""
        pages: int = super().max_memory_usage_bytes(vllm_config)  # type: ignore[misc]
        blocks = -(-vllm_config.model_config.max_model_len // self.block_size)
        return pages + int(blocks) * self.beside_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for layers that have the same."""
        merged: Self = super().merge(specs)  # type: ignore[misc]
        beside = {spec.beside_bytes for spec in specs}
        assert len(beside) == 1, "All attention layers in the same KV cache group must keep the same beside their KV."
        return replace(merged, beside_bytes=beside.pop())  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class SparseFullAttentionSpec(_Beside, FullAttentionSpec):
    """Full attention, some of whose rows select."""

    ucm_packs_like: ClassVar[type] = FullAttentionSpec
    #: Bytes of one block's representation in one layer.
    beside_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SparseMLAAttentionSpec(_Beside, MLAAttentionSpec):
    """Latent attention, some of whose rows select."""

    ucm_packs_like: ClassVar[type] = MLAAttentionSpec
    #: Bytes of one block's representation in one layer.
    beside_bytes: int = 0


_SPARSE: dict[type, type] = {
    FullAttentionSpec: SparseFullAttentionSpec,
    MLAAttentionSpec: SparseMLAAttentionSpec,
}


def customize_spec(spec: KVCacheSpec, vllm_config: VllmConfig) -> KVCacheSpec:
    """The spec that a layer of an engine with sparse attention has; one that is not selected from stays as it is."""
    kind, config = _SPARSE.get(type(spec)), sparse_config(vllm_config)
    if kind is None or config is None:
        return spec
    given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    made: KVCacheSpec = kind(**given, beside_bytes=bytes_beside(config, spec, vllm_config))
    return made


class SparseManager(FullAttentionManager):
    """vLLM's manager of full attention, which puts only blocks with exact KV into the prefix cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Tokens of a request with exact KV. The connector gives it when vLLM hands it this manager, before there are
        #: requests; without one nothing is selected, and all are exact.
        self.exact_tokens: Callable[[Request], int] = lambda _request: ALL

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Blocks of the first ``num_tokens`` tokens are full: cache those that are exact."""
        super().cache_blocks(request, min(num_tokens, self.exact_tokens(request)), *args, **kwargs)


KVCacheSpecRegistry._ensure_registered()  # it registers vLLM's own only where nothing is registered yet
KVCacheSpecRegistry.register(SparseFullAttentionSpec, SparseManager, uniform_type_base_spec=FullAttentionSpec)
KVCacheSpecRegistry.register(SparseMLAAttentionSpec, SparseManager, uniform_type_base_spec=FullAttentionSpec)
