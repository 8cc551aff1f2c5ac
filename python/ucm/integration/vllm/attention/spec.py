"""Which KV of a request is exact, and how vLLM's prefix cache keeps only that: a KV cache spec with
vLLM's own pages and a manager of ours.

KV that is computed under a selection is approximate, and so is all KV computed from it later. It
must not be stored under the dense identity, nor stay in vLLM's prefix cache: a later prompt would
continue from it densely, and its blocks would count as exact. One number per request says where
that begins (:class:`ExactTokens`); dumps and the manager of vLLM's prefix cache both stop there. It
is known before a step runs: tokens computed before the first decode step are dense, and from then
on the method says up to which length it selects nothing.

The bytes of representations lie beside the KV, so they are no part of the page; they count in
``max_memory_usage_bytes``, by which vLLM decides whether the longest request fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self
from weakref import WeakKeyDictionary

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ucm.integration.vllm.attention.setup import blend_config, bytes_beside, sparse_config
from ucm.integration.vllm.connector.guard import throttle
from ucm.sparse.base import ALL_TOKENS, UcmSparseBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class ExactTokens:
    """The exact tokens of one engine's requests, for its scheduler side."""

    def __init__(self, method: UcmSparseBase) -> None:
        self._method = method
        #: Tokens of each request when it was last admitted, and its preemptions then.
        self._admitted: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()
        #: Dense tokens of those admitted with the rest of their prompt computed under a selection.
        self._selecting: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def selects_from(self, request: Request, tokens: int | None) -> None:
        """Tokens after the first ``tokens`` of an admitted request are computed under a selection,
        those of its prompt too; None: it has freed its blocks, and is admitted like others."""
        if tokens is None:
            self._selecting.pop(request, None)
        else:
            self._selecting[request] = tokens

    def prefill_tokens(self, request: Request) -> int:
        """Tokens of a request that are computed densely before its first decode step: the prompt,
        and after a preemption also the output that is computed again; of a prompt that is selected
        from in the store, the stored ones."""
        if request in self._selecting:
            return self._selecting[request]
        preemptions, tokens = self._admitted.get(request, (-1, 0))
        if preemptions != request.num_preemptions:
            # Called by both sides while the request is admitted, before it has output.
            tokens = request.num_tokens
            self._admitted[request] = request.num_preemptions, tokens
        return tokens

    def __call__(self, request: Request) -> int:
        """How many of its first tokens have exact KV, now or once they are computed."""
        return self.after_prefill(self.prefill_tokens(request))

    def after_prefill(self, tokens: int) -> int:
        """The same for a request with ``tokens`` computed before its first decode step; 0 where the
        method, perhaps a user's, fails."""
        try:
            return int(self._method.exact_tokens(tokens))
        except Exception as error:
            kind = type(self._method).__name__
            throttle.warning("exact_tokens", "exact_tokens of %s failed: %r", kind, error)
            return 0


class _LeavingBlocks(Protocol):
    """Which blocks of a request leave the device: methods of the connector's planner of offload."""

    def leaving(
        self, request_id: str, computed: int, blocks: int, freed_by: Callable[[range], int], /
    ) -> range: ...
    def left(self, request_id: str, leaving: range, blocks: list[int], /) -> None: ...
    def begins_anew(self, request_id: str, /) -> bool: ...
    def unread(self, request_id: str, /) -> range: ...
    def hot(self, request_id: str, tokens: int, /) -> int: ...
    def given(self, request_id: str, hot: list[int], /) -> None: ...
    def gave_back(self, request_id: str, /) -> None: ...


class _Beside:
    """The additions of both specs to vLLM's."""

    beside_bytes: int
    block_size: int

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """The KV of the longest request and the bytes beside it, of one layer."""
        pages: int = super().max_memory_usage_bytes(vllm_config)  # type: ignore[misc]
        blocks = -(-vllm_config.model_config.max_model_len // self.block_size)
        return pages + int(blocks) * self.beside_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for layers that have the same."""
        merged: Self = super().merge(specs)  # type: ignore[misc]
        beside = {spec.beside_bytes for spec in specs}
        assert len(beside) == 1, (
            "All attention layers in the same KV cache group must keep the same beside their KV."
        )
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
    """The spec of a layer in an engine with sparse attention or Blend; unchanged for one that is
    not selected from."""
    kind, config = _SPARSE.get(type(spec)), sparse_config(vllm_config)
    if kind is None or (config is None and blend_config(vllm_config) is None):
        return spec
    given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    beside = 0 if config is None else bytes_beside(config, spec, vllm_config)
    made: KVCacheSpec = kind(**given, beside_bytes=beside)
    return made


class SparseManager(FullAttentionManager):
    """vLLM's manager of full attention, which puts only blocks with exact KV into the prefix
    cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Tokens of a request with exact KV. The connector sets it before there are requests;
        #: without it nothing is selected, and all are exact.
        self.exact_tokens: Callable[[Request], int] = lambda _request: ALL_TOKENS
        #: The blocks that leave the device; None: none does.
        self.offload: _LeavingBlocks | None = None
        self.hot: dict[str, list[KVCacheBlock]] = {}

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Blocks of the first ``num_tokens`` tokens are full: cache those that are exact."""
        super().cache_blocks(request, min(num_tokens, self.exact_tokens(request)), *args, **kwargs)

    # Offload: a request that decodes holds its windows and hot blocks between them

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that are in the store and not in a window."""
        super().remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)
        blocks = self.req_to_blocks.get(request_id)
        if self.offload is None or not blocks:
            return
        leaving = self.offload.leaving(
            request_id,
            processed_computed_tokens,
            len(blocks),
            lambda leaving: sum(blocks[at].ref_cnt == 1 for at in leaving),
        )
        if not leaving:
            return
        left = blocks[leaving.start : leaving.stop]
        self.offload.left(request_id, leaving, [block.block_id for block in left])
        blocks[leaving.start : leaving.stop] = [self._null_block] * len(leaving)
        self.block_pool.free_blocks(reversed(left))

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Blocks for new tokens, and hot ones that are missing. More than there are for a request
        that has lost one: vLLM preempts it, the only way to compute tokens again, and those
        admitted after it."""
        if self.offload is not None and self.offload.begins_anew(request_id):
            return int(self.block_pool.num_gpu_blocks) + 1
        unread = self._unread(request_id)
        needed: int
        if unread and request_id not in self.num_cached_block:
            needed = max(-(-num_tokens // self.block_size) - len(unread), 0)
        else:
            needed = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        return needed + self._hot_missing(request_id, num_tokens)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Blocks of the prefix cache. A prompt that is selected from in the store uses none and
        adds none, so that nothing continues from a failed load."""
        if not self._unread(request_id):
            local, external = num_local_computed_tokens, num_external_computed_tokens
            super().add_local_computed_blocks(request_id, new_computed_blocks, local, external)
            return
        tokens = num_local_computed_tokens + num_external_computed_tokens
        self.num_cached_block[request_id] = tokens // self.block_size

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Blocks that are loaded. Of a prompt that is selected from in the store, those of the
        windows."""
        unread = self._unread(request_id)
        local, external = num_local_computed_tokens, num_external_computed_tokens
        if not unread:
            super().allocate_external_computed_blocks(request_id, local, external, *args, **kwargs)
            return
        tokens = local + external
        new = self.block_pool.get_new_blocks(-(-tokens // self.block_size) - len(unread))
        # Whether they are to be zeroed before use; an argument of newer versions.
        record_for_zeroing = args[0] if args else kwargs.get("record_for_zeroing", True)
        if self._record_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(block.block_id for block in new)
        absent = [self._null_block] * len(unread)
        self.req_to_blocks[request_id].extend([*new[: unread.start], *absent, *new[unread.start :]])

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> list[KVCacheBlock]:
        """Blocks for new tokens, without the hot ones: the workers' block tables do not have
        them."""
        grow = super().allocate_new_blocks
        new: list[KVCacheBlock] = grow(request_id, num_tokens, *args, **kwargs)
        missing = self._hot_missing(request_id, num_tokens)
        if missing > 0 and self.offload is not None:
            hot = self.block_pool.get_new_blocks(missing)
            self.hot.setdefault(request_id, []).extend(hot)
            self.offload.given(request_id, [block.block_id for block in hot])
        return new

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """All blocks of a request."""
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        if self.offload is not None:
            self.offload.gave_back(request_id)
        return [*self.hot.pop(request_id, ()), *blocks]

    def _unread(self, request_id: str) -> range:
        """Logical blocks that stay in the store, of a request that is being admitted."""
        return range(0) if self.offload is None else self.offload.unread(request_id)

    def _hot_missing(self, request_id: str, num_tokens: int) -> int:
        if self.offload is None:
            return 0
        return max(0, self.offload.hot(request_id, num_tokens) - len(self.hot.get(request_id, ())))


# it registers vLLM's own only where nothing is registered yet
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(
    SparseFullAttentionSpec, SparseManager, uniform_type_base_spec=FullAttentionSpec
)
KVCacheSpecRegistry.register(
    SparseMLAAttentionSpec, SparseManager, uniform_type_base_spec=FullAttentionSpec
)
