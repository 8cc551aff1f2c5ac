"""Sparse attention in the worker side: makes the method of this rank, its host, and the
representations of what is loaded, and passes the step's plan on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ucm.config import UcmConfig
from ucm.errors import ConfigError
from ucm.integration.vllm.attention.host import (
    EagerHooks,
    SparseHost,
    served_layers,
    set_active_host,
)
from ucm.integration.vllm.attention.offload import Offload, spare_rows
from ucm.integration.vllm.attention.plan import SparsePlan, written_blocks
from ucm.integration.vllm.attention.registering import OVERRIDDEN
from ucm.integration.vllm.attention.representations import (
    Representations,
    caches_by_layer,
    is_packed,
    key_reader,
)
from ucm.integration.vllm.attention.setup import (
    FAILED,
    ask_for_tiles,
    length_text,
    make_method,
    measure,
    set_up,
)
from ucm.integration.vllm.compat.block_size import common_block_size
from ucm.integration.vllm.connector.guard import logger
from ucm.integration.vllm.connector.identity.engine_identity import layer_specs
from ucm.integration.vllm.connector.stats import SparseCounts
from ucm.integration.vllm.connector.worker.transfers import layer_bytes
from ucm.sparse.base import UcmSparseRole
from ucm.sparse.method import BlockSparse
from ucm.sparse.state import get_ucm_sparse, has_ucm_sparse, set_ucm_sparse
from ucm.store import record_ids
from ucm.store.kv_layout import KVLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Backends whose pages can be read with a block table for each KV head: a page is one head after
#: the other.
_PER_HEAD = ("CPU_ATTN",)


class SparseWorker:
    """One rank's method and what it needs."""

    def __init__(
        self, config: UcmConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        """Makes the method; raises :class:`~ucm.errors.ConfigError` for what is wrong in its
        configuration."""
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self.method = make_method(config, vllm_config, UcmSparseRole.WORKER)
        self.host: SparseHost | None = None
        self.representations: Representations | None = None
        self.offload: Offload | None = None
        self._store: Callable[[], Any] = lambda: None
        self._mask = b""
        self._writer = _writes(kv_cache_config)
        self._eager: EagerHooks | None = None
        # once vLLM has run a step
        self._learn_pages: Callable[[Mapping[str, Any]], None] | None = None
        # attention metadata of the step that runs, by layer
        self._step: Mapping[str, Any] | None = None
        self._measures = False  # after the step that runs
        self._measured: int | None = None
        self._num_blocks = 0
        self._counts = SparseCounts(time.monotonic)

    def bind_store(self, store: Callable[[], Any], mask: bytes) -> None:
        """Where the store is once it is open, and the mask of this rank's part."""
        self._store, self._mask = store, mask

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Where the KV lies: get ready. Raises :class:`~ucm.errors.ConfigError` where this engine
        cannot be served."""
        group = self._kv_cache_config.kv_cache_groups[0]
        layers = served_layers(self._vllm_config, group.layer_names)
        if not layers:
            raise ConfigError(
                "sparse attention: no layer of this model attends to all of its context by a block"
                " table alone; set ENABLE_SPARSE=false"
            )
        backend = _backend_of(layers)
        spec = layer_specs(group.kv_cache_spec)[0]
        cache = caches[next(iter(layers))]
        self._num_blocks = int(cache.shape[0])
        _check_kernel_blocks(next(iter(layers.values())), spec)
        if isinstance(self.method, BlockSparse):
            set_up(
                self.method,
                layers,
                spec,
                self._vllm_config,
                self._num_blocks,
                device=cache.device,
                per_head=backend in _PER_HEAD
                and all(layer.impl.sinks is None for layer in layers.values()),
                reduce=_reduce_over_ranks(),
                spare_blocks=spare_rows(self._num_blocks) if self.method.settings.offload else 0,
            )
            self._prepare_representations(
                self.method, layers, backend, caches, int(spec.block_size)
            )
            if self.method.settings.offload:
                self.offload = self._make_offload(self.method, group.layer_names, caches)
                if self.representations is not None:
                    self.representations.rows_of = self.offload.rows_of
        self.method.register_kv_caches(caches)
        self.host = SparseHost(self.method, layers)
        self.host.offload = self.offload
        self._eager = EagerHooks(
            self.method, eager=bool(self._vllm_config.model_config.enforce_eager)
        )
        set_ucm_sparse(self.method)
        set_active_host(self.host)
        self._say(self.host, layers, backend, cache, len(caches))

    def _prepare_representations(
        self,
        method: BlockSparse,
        layers: dict[str, Any],
        backend: str,
        caches: Mapping[str, Any],
        tokens: int,
    ) -> None:
        first = next(iter(layers))
        made = self.representations = Representations(
            method,
            caches_by_layer(method, list(layers), caches),
            None,
            reads_later=True,
            writer=self._writer,
            shards=len(caches) if method.settings.offload else 1,
        )

        def learn(step: Mapping[str, Any]) -> None:
            try:
                if step:
                    made.overwritten(written_blocks(step[first], tokens))
                ask_for_tiles()
                read = key_reader(layers[first], backend, caches[first], tokens)
            except Exception as error:
                logger.warning(
                    "sparse attention: prompts that are loaded from the store stay dense: %s", error
                )
                read = None
            made.read_by(read)

        if is_packed(backend):
            self._learn_pages = learn
        else:
            learn({})

    def _make_offload(
        self, method: BlockSparse, names: Sequence[str], caches: Mapping[str, torch.Tensor]
    ) -> Offload:
        """Raises :class:`~ucm.errors.ConfigError` where a layer could want a block that has
        left."""
        dense = [name for name in names if not method.selects(name)]
        if dense:
            raise ConfigError(
                f"offload: {len(dense)} layers attend to all blocks ({dense[0]}, ...), so none can"
                " leave the device; write `dense_layers: []`, or leave `offload` out"
            )
        if (
            method.policy.heads == "kv"
            or method.policy.min_concurrency > 1
            or method.settings.measure_recall
        ):
            raise ConfigError(
                "offload needs `heads: shared`, `min_concurrency: 1` and `measure_recall: false`"
            )
        if not type(method).attention_begin.__module__.startswith("ucm.sparse."):
            raise ConfigError(
                f"offload: {type(method).__name__} has an attention_begin of its own, which would"
                " be given blocks that have left the device; leave `offload` out"
            )
        layout = KVLayout(caches, names)
        layer_bytes(layout)
        places = {method.layer_number(name): place for place, name in enumerate(layout.names)}
        assert len(places) == len(layout.names), "each attention has a number of its own"
        return Offload(
            method, places, lambda: self._store(), lambda keys: record_ids(keys, self._mask)
        )

    def _say(
        self,
        host: SparseHost,
        layers: dict[str, Any],
        backend: str,
        cache: torch.Tensor,
        count: int,
    ) -> None:
        method = self.method
        if not isinstance(method, BlockSparse):
            logger.info(
                "sparse attention: %s over %s, %d layers",
                type(method).__name__,
                backend,
                len(layers),
            )
            return
        kv = cache.numel() * cache.element_size() * count
        logger.info(
            "sparse attention: %s over %s, attention over chosen blocks by %s kernel; %d of %d"
            " layers choose blocks; their representations take %.1f MiB beside %.1f MiB of KV"
            " (%.1f %%)",
            method.settings.algorithm,
            backend,
            "ucm's" if host.uses_own_kernel else "vLLM's",
            len(method.store.layers),
            len(layers),
            method.store.nbytes / 2**20,
            kv / 2**20,
            100 * method.store.share(kv),
        )

    # Steps
    # ----------------------------------------------------------------------------------------------

    def begin_step(self, plan: SparsePlan, context: Any) -> None:
        """Before the model runs. Nothing is measured or tried out here: vLLM may not have run a
        step yet."""
        if self.host is None:
            return
        if self._measures:  # the step of that plan had no end
            self._measured, self._measures = self._not_measured("the step had no end"), False
        if self.representations is not None:
            self.representations.overwritten(plan.given)
        self._measures = plan.measure
        metadata = getattr(context, "attn_metadata", None)
        self._step = metadata if plan.rows and isinstance(metadata, Mapping) else None
        self.host.begin_step(plan, context)

    def _after_first_steps(self, host: SparseHost, step: Mapping[str, Any]) -> None:
        """What is tried out or measured by kernels of vLLM's, after a step in which vLLM ran
        them."""
        learn, self._learn_pages = self._learn_pages, None
        if learn is not None:
            learn(step)
        if self._measures:
            self._measured, self._measures = self._measure(host, step), False

    def _measure(self, host: SparseHost, step: Mapping[str, Any]) -> int:
        """From which length on choosing pays; where that cannot be measured, nothing is chosen."""
        spec = layer_specs(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec)[0]
        began = time.perf_counter()
        try:
            found = measure(
                host,
                host.layers,
                step,
                block_tokens=int(spec.block_size),
                num_blocks=self._num_blocks,
                max_tokens=self._vllm_config.model_config.max_model_len,
            )
        except Exception as error:
            return self._not_measured(repr(error))
        took = time.perf_counter() - began
        logger.info(
            "sparse attention pays from %s tokens on (measured in %.1f s)", length_text(found), took
        )
        return found

    @staticmethod
    def _not_measured(why: str) -> int:
        logger.warning(
            "sparse attention: what it gains could not be measured, so requests stay dense: %s", why
        )
        return FAILED

    def take_measured(self) -> int | None:
        """What was measured since the last call."""
        measured, self._measured = self._measured, None
        return measured

    def take_lost(self) -> list[tuple[str, int]]:
        """Blocks that are neither on the device nor in the store, noticed since the last call:
        request and ordinal."""
        return [] if self.offload is None else self.offload.take_lost()

    def take_counts(self) -> dict[str, float]:
        """What the method counted since the last call, about once a second."""
        return self._counts.take(self.method.stats) if isinstance(self.method, BlockSparse) else {}

    def end_step(self) -> None:
        """After it."""
        if self.host is not None:
            self.host.end_step()
        if self.offload is not None:
            self.offload.end_step()
        step, self._step = self._step, None
        if self.host is not None and step is not None:
            self._after_first_steps(self.host, step)

    def stats(self) -> dict[str, float]:
        """What the method counted."""
        return self.method.stats.snapshot() if isinstance(self.method, BlockSparse) else {}

    def close(self) -> None:
        """The engine ends."""
        if self._eager is not None:
            self._eager.remove()
        if self.offload is not None:
            self.offload.close()
        if self.host is not None:
            self.host.close()
            # another engine of this process may have its own
            if has_ucm_sparse() and get_ucm_sparse() is self.method:
                set_ucm_sparse(None)


def _writes(kv_cache_config: Any) -> bool:
    """Whether this rank is the one that stores its part: of ranks that hold the same KV, the
    first."""
    from vllm.distributed.parallel_state import get_tp_group

    return bool(
        get_tp_group().rank_in_group % max(1, getattr(kv_cache_config, "kv_tp_replicas", 1)) == 0
    )


def _backend_of(layers: Mapping[str, Any]) -> str:
    """Name of the attention backend of these layers, which is one of ours;
    :class:`~ucm.errors.ConfigError` where it is not."""
    for layer in layers.values():
        backend = layer.get_attn_backend()
        if vars(backend).get("ucm_packs_like") is None:
            raise ConfigError(
                f"sparse attention: this engine runs the attention backend {backend.get_name()}"
                f" ({backend.__module__}.{backend.__qualname__}), which ucm does not select for."
                f" Choose one of {', '.join(OVERRIDDEN)} (--attention-backend), and let vLLM load"
                " the plug-in ucm (VLLM_PLUGINS), or set ENABLE_SPARSE=false"
            )
    return str(next(iter(layers.values())).get_attn_backend().get_name())


def _check_kernel_blocks(layer: Any, spec: Any) -> None:
    """A kernel that splits vLLM's blocks has a block table of the pieces."""
    size = common_block_size(spec.block_size, layer.get_attn_backend(), spec)
    if size != spec.block_size:
        raise ConfigError(
            f"sparse attention: this backend computes with blocks of {size} tokens and vLLM keeps"
            f" blocks of {spec.block_size}; write --block-size {size}"
        )


def _reduce_over_ranks() -> Callable[..., torch.Tensor] | None:
    """Adds scores up over the tensor ranks, or takes the greatest; None where there is one rank."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return None

    def reduce(scores: torch.Tensor, combine: str) -> torch.Tensor:
        operation = (
            torch.distributed.ReduceOp.MAX if combine == "max" else torch.distributed.ReduceOp.SUM
        )
        scores = scores.contiguous()
        torch.distributed.all_reduce(scores, operation, group=group.device_group)
        return scores

    return reduce
