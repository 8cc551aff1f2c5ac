"""Sparse attention before the first step: whether an engine is configured for it, the method with
the shape of the engine's keys, and from which length choosing pays.

Below the break-even length a request is dense, so that sparse attention is never slower
(:func:`measure`). One layer's decode attention is timed dense and sparse at growing lengths, with
random queries over the blocks' present content, and nothing is written. A step costs its layers and
one overhead of choosing; with a stride most steps do not choose.

A kernel that is run where it cannot run ends the process. So nothing is run here before vLLM has
computed a step: the layer is computed first with the metadata of that step itself, then with copies
of it in which only the rows differ.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ucm.config import UcmConfig, load
from ucm.config.sparse import AlgorithmConfig, BlendConfig, algorithm_of
from ucm.errors import ConfigError, UnsupportedError
from ucm.integration.vllm.attention.host import SparseHost
from ucm.integration.vllm.attention.offload import SPARE
from ucm.integration.vllm.attention.plan import SparsePlan
from ucm.integration.vllm.attention.tables import Rewriter
from ucm.integration.vllm.compat.versions import installed, why_unserved
from ucm.integration.vllm.connector.identity.engine_identity import layer_specs, transferable_groups
from ucm.integration.vllm.early import extra_config
from ucm.sparse.base import SparseRow, UcmSparseBase, UcmSparseRole
from ucm.sparse.factory import UcmSparseFactory
from ucm.sparse.method import BlockSparse
from ucm.sparse.policy import method_of
from ucm.sparse.rep_store import bytes_per_block
from ucm.sparse.selector import Geometry

#: A request that no length makes sparse.
NEVER = 1 << 40
#: Reported by a rank that could not measure: requests stay dense, and the next engine tries again.
FAILED = NEVER + 1
#: First and last length that is tried, in tokens.
FIRST, LAST = 512, 64 * 1024
#: Each time is the best of at least this many, and of as many as fit in this many seconds: other
#: processes delay single runs by some milliseconds.
TIMES, SECONDS = 5, 0.03
#: Choosing pays where a step takes at most this share of a dense one.
PAYS = 0.95
_NAME = "ucm: measuring"

#: The configuration that was read last, and the result for it.
_last: tuple[Any, UcmConfig | None] = (None, None)


def sparse_config(vllm_config: Any) -> UcmConfig | None:
    """Our configuration where blocks are selected and this version of vLLM is served, else None.
    Raises :class:`~ucm.errors.ConfigError` where it is wrong."""
    config = _wanted(vllm_config)
    return config if config is not None and config.sparse.selects else None


def blend_config(vllm_config: Any) -> BlendConfig | None:
    """The keys of Blend, under the same conditions."""
    config = _wanted(vllm_config)
    return None if config is None else config.sparse.blend


def _wanted(vllm_config: Any) -> UcmConfig | None:
    global _last
    found = extra_config(vllm_config)
    if found is None:
        return None
    if _last[0] is not found:
        config = load(found)
        wanted = config.enabled and config.sparse.enabled and not why_unserved(installed())
        _last = found, config if wanted else None
    return _last[1]


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises :class:`~ucm.errors.ConfigError`, with what to change, where sparse attention cannot
    be right."""
    parallel = vllm_config.parallel_config
    groups = transferable_groups(kv_cache_config)
    dtype = vllm_config.cache_config.cache_dtype
    problem = ""
    if vllm_config.speculative_config is not None:
        problem = "speculative decoding computes several tokens a step and takes some back"
    elif getattr(parallel, "decode_context_parallel_size", 1) > 1:
        problem = "decode context parallelism splits a block's tokens over ranks"
    elif getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        problem = "prefill context parallelism splits a request's tokens over ranks"
    elif getattr(parallel, "enable_dbo", False) or (getattr(parallel, "num_ubatches", 1) or 1) > 1:
        problem = "microbatches (enable_dbo) split the rows of a step"
    elif len(groups) != 1:
        problem = f"this model has {len(groups)} KV cache groups, and blocks are chosen in one"
    elif any(getattr(spec, "kv_quant_mode", 0) for spec in layer_specs(groups[0].kv_cache_spec)):
        problem = f'the KV cache is quantised (kv_cache_dtype "{dtype}")'
    if problem:
        raise ConfigError(
            f"sparse attention: {problem}: not supported; change that, or set ENABLE_SPARSE=false"
        )


def method_class(config: UcmConfig) -> type[UcmSparseBase]:
    """The class that the configuration names: of an algorithm, or in a user's module, which may
    register selectors too. Raises :class:`~ucm.errors.ConfigError` where there is none of that
    name."""
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
    """The keys of a method's algorithm, its defaults where none are written."""
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
    """Bytes of one device block in one layer that selects, beside its KV: its representation, and
    with offload those of the blocks that have left."""
    kind = method_class(config)
    if not issubclass(kind, BlockSparse):
        return 0
    settings = settings_for(kind, config)
    geometry = geometry_of(spec, vllm_config)
    method = method_of(settings, geometry, str(vllm_config.model_config.model))
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
    """Set up a worker's method for the KV cache of its rank. Raises
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


def ask_for_tiles() -> None:
    """Request the tiles of AMX for all threads of this process; does nothing without AMX. Raises
    :class:`~ucm.errors.UnsupportedError` where the system refuses them."""
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise UnsupportedError(
            "the system refuses this process the tiles of AMX, which this processor has"
        )


def length_text(tokens: int) -> str:
    """A length for the log."""
    return "no number of" if tokens >= NEVER else str(tokens)


@dataclass(slots=True)
class _Bench:
    """One layer of the engine, to be timed."""

    host: SparseHost
    method: BlockSparse
    name: str
    layer: Any
    metadata: Any  # of the last step that vLLM computed
    layers: int  # of a step
    selecting: int  # of these, layers that choose
    block_tokens: int
    blocks: int  # of the KV cache

    def pays(self, tokens: int) -> bool:
        """Whether a step of one request of this length is faster sparse than dense."""
        dense, sparse = self._times(tokens)
        return sparse <= PAYS * dense

    def _times(self, tokens: int) -> tuple[float, float]:
        """Seconds of attention in a dense step, and in a sparse one."""
        device = self.layer.kv_cache.device
        metadata = _of_one_row(self.metadata, self.layer, tokens, self.block_tokens, self.blocks)
        attend = self._attention(metadata)
        context = _Context({self.name: metadata})

        def begin(step: int) -> None:
            prefill = tokens - step
            row = SparseRow(_NAME, tokens, prefill_tokens=prefill, prompt_tokens=prefill)
            last = [int(metadata.slot_mapping[0]) // self.block_tokens]
            plan = SparsePlan(self.block_tokens, 0, rows=[row], last_blocks=last)
            self.host.begin_step(plan, context)

        policy = self.method.policy
        dense = choosing = later = float("inf")
        turns, end = 0, time.perf_counter() + SECONDS
        while turns < TIMES or time.perf_counter() < end:
            # In turns, so that a disturbance affects all.
            dense = min(dense, _timed(attend, device))
            choosing = min(choosing, self._step(begin, attend, device, 1))
            if policy.stride > 1:
                later = min(later, self._step(begin, attend, device, 2))
            turns += 1
        mean = choosing if policy.stride == 1 else choosing + (policy.stride - 1) * later
        sparse = mean / policy.stride
        return dense * self.layers, sparse + dense * (self.layers - self.selecting)

    def repeat_step(self) -> None:
        """The attention of vLLM's own step again, by the same kernel with the same metadata."""
        self._attention(self.metadata)()
        _settle(self.layer.kv_cache.device)

    def _attention(self, metadata: Any) -> Callable[[], None]:
        """Computes the layer with this metadata, for random queries."""
        layer, impl = self.layer, self.layer.impl
        device, dtype = layer.kv_cache.device, layer.dtype
        count = int(metadata.num_actual_tokens)
        query = torch.randn(count, impl.num_heads, impl.head_size, device=device).to(dtype)
        key = torch.zeros(count, impl.num_kv_heads, impl.head_size, device=device, dtype=dtype)
        output = torch.zeros_like(query)
        return lambda: impl.forward(layer, query, key, key, layer.kv_cache, metadata, output=output)

    def _step(
        self, begin: Callable[[int], None], attend: Callable[[], None], device: Any, step: int
    ) -> float:
        """Seconds of the selecting layers in a step that chooses (1), or that reuses the choice
        (2)."""
        if step == 1:
            self.method.retriever.forget(_NAME)
        began = time.perf_counter()
        begin(step)
        first = _timed(attend, device)
        whole = time.perf_counter() - began
        again = _timed(attend, device)
        self.host.end_step()
        # With a lag the second call uses the choice that the first one waited for.
        choosing = first if self.method.policy.lag else min(first, again)
        return whole + (self.selecting - 1) * choosing


class _Context:
    """The parts of a forward context that attention reads."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.attn_metadata = metadata
        self.no_compile_layers: dict[str, Any] = {}


def measure(
    host: SparseHost,
    layers: dict[str, Any],
    step: Mapping[str, Any],
    *,
    block_tokens: int,
    num_blocks: int,
    max_tokens: int,
) -> int:
    """The break-even length of a request in tokens; :data:`NEVER` where no length within reach
    pays.

    ``step`` is the attention metadata, by layer, of the last step that vLLM computed;
    ``max_tokens`` the longest request. Raises the errors of kernels, and
    :class:`~ucm.errors.UnsupportedError` where one may not run.

    Not measured are latent attention; a method with an ``attention_begin`` of its own, which could
    write to the blocks of running requests; ranks that choose together, which would wait for each
    other; a method that chooses only for several requests at once. There it is four times the kept
    tokens (``docs/sparse.md``).
    """
    method = host.blocks
    assert method is not None
    limit = min(max_tokens, (num_blocks - 1) * block_tokens, LAST)
    kept = method.policy.windows + method.policy.budget(-(-limit // block_tokens))
    by_rule: int = 4 * kept * block_tokens
    name = next((name for name in layers if method.writes(name)), None)
    together = method.policy.shared_ranks or method.policy.min_concurrency > 1
    if name is None or method.selector.geometry.rope_dim or host.changes or together:
        return by_rule
    selecting = sum(method.selects(each) for each in layers)
    bench = _Bench(
        host,
        method,
        name,
        layers[name],
        step[name],
        layers=len(layers),
        selecting=selecting,
        block_tokens=block_tokens,
        blocks=num_blocks,
    )
    ask_for_tiles()
    bench.repeat_step()
    with method.store.as_if_ready(range(1, num_blocks)):
        try:
            return _first_that_pays(bench.pays, limit)
        finally:
            method.request_finished_in_worker(_NAME)
            method.stats.clear()


def _first_that_pays(pays: Callable[[int], bool], limit: int) -> int:
    """The first length that pays, of those that double, and of the middle before it."""
    lengths = [FIRST]
    while lengths[-1] * 2 <= limit:
        lengths.append(lengths[-1] * 2)
    found = NEVER
    # from long to short: where a length does not pay, shorter ones do not either
    for length in reversed(lengths):
        if length > limit or not pays(length):
            break
        found = length
    middle = found * 3 // 4
    return middle if found != NEVER and middle >= FIRST and pays(middle) else found


def _of_one_row(step: Any, layer: Any, tokens: int, block_tokens: int, num_blocks: int) -> Any:
    """The metadata of a step with one row, of one query and this length."""
    if step.causal is not True:
        raise UnsupportedError("the attention of this engine's steps is not causal")
    device = step.seq_lens.device
    table = 1 + torch.arange(-(-tokens // block_tokens), device=device)[None] % (num_blocks - 1)
    slot = int(table[0, -1]) * block_tokens + (tokens - 1) % block_tokens
    made = copy.copy(step)
    for name in vars(step):
        if name.startswith("mm_prefix"):  # of the step's rows, one by one
            setattr(made, name, None)
    made.num_actual_tokens = made.max_query_len = 1
    made.max_seq_len = tokens
    made.query_start_loc = torch.tensor([0, 1], dtype=step.query_start_loc.dtype, device=device)
    made.seq_lens = torch.tensor([tokens], dtype=step.seq_lens.dtype, device=device)
    made.block_table = table.to(step.block_table.dtype)
    made.slot_mapping = torch.tensor([slot], dtype=step.slot_mapping.dtype, device=device)
    return Rewriter().complete(layer.impl, layer, made, step, None, deep=False)


def _timed(work: Callable[[], None], device: Any) -> float:
    _settle(device)
    began = time.perf_counter()
    work()
    _settle(device)
    return time.perf_counter() - began


def _settle(device: Any) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
