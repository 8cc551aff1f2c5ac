"""Sparse attention in the worker side: makes the method of this rank, its host, and the
representations of loaded blocks, and passes the step's plan on."""

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
from ucm.integration.vllm.attention.pages import is_packed
from ucm.integration.vllm.attention.plan import SparsePlan, written_blocks
from ucm.integration.vllm.attention.registering import OVERRIDDEN
from ucm.integration.vllm.attention.representations import (
    Representations,
    caches_by_layer,
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
from ucm.integration.vllm.compat.versions import kv_replicas
from ucm.integration.vllm.connector.guard import logger
from ucm.integration.vllm.connector.identity.engine_identity import layer_specs
from ucm.integration.vllm.connector.stats import SparseCounts
from ucm.integration.vllm.connector.worker.transfers import layer_bytes
from ucm.logger import in_units
from ucm.sparse.base import UcmSparseRole
from ucm.sparse.method import BlockSparse
from ucm.sparse.state import get_ucm_sparse, has_ucm_sparse, set_ucm_sparse
from ucm.store import record_ids
from ucm.store.kv_layout import KVLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Backends whose pages can be read with a block table for each KV head.
_PER_HEAD = ("CPU_ATTN",)


class SparseWorker:
    """One rank's method and its parts."""

    def __init__(
        self, config: UcmConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        """Makes the method; raises :class:`~ucm.errors.ConfigError` for a wrong configuration."""
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
        self._learn_pages: Callable[[Mapping[str, Any]], None] | None = None  # after the first step
        self._step: Mapping[str, Any] | None = None  # attention metadata of the step, by layer
        self._measures = False  # after the step that runs
        self._measured: int | None = None
        self._num_blocks = 0
        self._counts = SparseCounts(time.monotonic)

    def bind_store(self, store: Callable[[], Any], mask: bytes) -> None:
        """``store`` returns the store once it is open; ``mask``: of this rank's part."""
        self._store, self._mask = store, mask

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Get ready for these KV caches. Raises :class:`~ucm.errors.ConfigError` where this engine
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
        eager = bool(self._vllm_config.model_config.enforce_eager)
        if isinstance(self.method, BlockSparse):
            offload = self.method.settings.offload
            plain = all(layer.impl.sinks is None for layer in layers.values())
            set_up(
                self.method,
                layers,
                spec,
                self._vllm_config,
                self._num_blocks,
                device=cache.device,
                per_head=backend in _PER_HEAD and plain,
                reduce=_reduce_over_ranks(),
                spare_blocks=spare_rows(self._num_blocks) if offload else 0,
            )
            tokens = int(spec.block_size)
            made = self._prepare_representations(self.method, layers, backend, caches, tokens)
            self.representations = made
            if offload:
                self.offload = self._make_offload(self.method, group.layer_names, caches)
                made.rows_of = self.offload.rows_of
        self.method.register_kv_caches(caches)
        self.host = SparseHost(self.method, layers)
        self.host.offload = self.offload
        self._eager = EagerHooks(self.method, eager=eager)
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
    ) -> Representations:
        first = next(iter(layers))
        made = Representations(
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
                text = "sparse attention: prompts that are loaded from the store stay dense: %s"
                logger.warning(text, error)
                read = None
            made.read_by(read)

        if is_packed(backend):
            self._learn_pages = learn
        else:
            learn({})
        return made

    def _make_offload(
        self, method: BlockSparse, names: Sequence[str], caches: Mapping[str, torch.Tensor]
    ) -> Offload:
        """Raises :class:`~ucm.errors.ConfigError` where a layer could need a block that has
        left."""
        dense = [name for name in names if not method.selects(name)]
        if dense:
            raise ConfigError(
                f"offload: {len(dense)} layers attend to all blocks ({dense[0]}, ...), so none can"
                " leave the device; write `dense_layers: []`, or leave `offload` out"
            )
        policy, recall = method.policy, method.settings.measure_recall
        if policy.heads == "kv" or policy.min_concurrency > 1 or recall:
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
        store, ids = lambda: self._store(), lambda keys: record_ids(keys, self._mask)
        return Offload(method, places, store, ids)

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
            name = type(method).__name__
            logger.info("sparse attention: %s over %s, %d layers", name, backend, len(layers))
            return
        kv = cache.numel() * cache.element_size() * count
        logger.info(
            "sparse attention: %s over %s, attention over chosen blocks by %s kernel; %d of %d"
            " layers choose blocks; their representations take %s beside %s of KV"
            " (%.1f %%)",
            method.settings.algorithm,
            backend,
            "ucm's" if host.uses_own_kernel else "vLLM's",
            len(method.store.layers),
            len(layers),
            in_units(method.store.nbytes),
            in_units(kv),
            100 * method.store.share(kv),
        )

    # Steps
    # ----------------------------------------------------------------------------------------------

    def begin_step(self, plan: SparsePlan, context: Any) -> None:
        """Before the model runs. Nothing is measured or tried here: vLLM may not have run a step
        yet."""
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
        """Try and measure kernels of vLLM's, after a step in which vLLM ran them."""
        learn, self._learn_pages = self._learn_pages, None
        if learn is not None:
            learn(step)
        if self._measures:
            self._measured, self._measures = self._measure(host, step), False

    def _measure(self, host: SparseHost, step: Mapping[str, Any]) -> int:
        """The break-even length; where it cannot be measured, nothing is chosen."""
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
        text = "sparse attention pays from %s tokens on (measured in %.1f s)"
        logger.info(text, length_text(found), took)
        return found

    @staticmethod
    def _not_measured(why: str) -> int:
        text = "sparse attention: its gain could not be measured, so requests stay dense: %s"
        logger.warning(text, why)
        return FAILED

    def take_measured(self) -> int | None:
        """The measurement since the last call."""
        measured, self._measured = self._measured, None
        return measured

    def take_lost(self) -> list[tuple[str, int]]:
        """Blocks (request and ordinal) found lost since the last call: neither on the device nor in
        the store."""
        return [] if self.offload is None else self.offload.take_lost()

    def take_counts(self) -> dict[str, float]:
        """The method's counts since the last call, about once a second."""
        return self._counts.take(self.method.stats) if isinstance(self.method, BlockSparse) else {}

    def end_step(self) -> None:
        """After the model has run."""
        if self.host is not None:
            self.host.end_step()
        if self.offload is not None:
            self.offload.end_step()
        step, self._step = self._step, None
        if self.host is not None and step is not None:
            self._after_first_steps(self.host, step)

    def stats(self) -> dict[str, float]:
        """The method's counts."""
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
    """Whether this rank stores its part: of ranks with the same KV, the first does."""
    from vllm.distributed.parallel_state import get_tp_group

    return bool(get_tp_group().rank_in_group % kv_replicas(kv_cache_config) == 0)


def _backend_of(layers: Mapping[str, Any]) -> str:
    """Name of the attention backend of these layers; :class:`~ucm.errors.ConfigError` if it is not
    one of ours."""
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
    """Returns the sum or the maximum of scores over the tensor ranks; None for one rank."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return None

    def reduce(scores: torch.Tensor, combine: str) -> torch.Tensor:
        operations = torch.distributed.ReduceOp
        operation = operations.MAX if combine == "max" else operations.SUM
        scores = scores.contiguous()
        torch.distributed.all_reduce(scores, operation, group=group.device_group)
        return scores

    return reduce
