"""From which length on choosing blocks pays: measured on this machine, with the engine's own kernels and KV cache.

Below it a request is dense, so that sparse attention is never slower. One layer's decode attention is timed dense and
sparse at growing lengths, with random queries over whatever the blocks hold, and nothing is written. A step costs its
layers and what choosing costs once a step; with a stride only every so many steps choose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ucm.integration.vllm.attention.host import SparseHost
from ucm.integration.vllm.attention.rows import SparsePlan
from ucm.sparse.batch import SparseRow
from ucm.sparse.method import BlockSparse

#: A request that no length makes sparse.
NEVER = 1 << 40
#: Lengths that are tried, in tokens: the first one, and the last.
FIRST, LAST = 512, 64 * 1024
#: Each time is the best of so many, and of as many as go into so many seconds: what else runs on the machine takes a
#: processor for some milliseconds, which is longer than a step over few blocks.
TIMES, SECONDS = 5, 0.03
#: Choosing pays where a step takes at most this share of a dense one.
PAYS = 0.95

_NAME = "ucm: measuring"


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
    builder: Any
    layers: int  # that a step has
    selecting: int  # of which so many choose
    block_tokens: int
    blocks: int  # of the KV cache

    def pays(self, tokens: int) -> bool:
        """Whether a step of one request of this length is faster sparse than dense."""
        dense, sparse = self._times(tokens)
        return sparse <= PAYS * dense

    def _times(self, tokens: int) -> tuple[float, float]:
        """Seconds of attention in a dense step, and in a sparse one."""
        layer, impl = self.layer, self.layer.impl
        device, dtype = layer.kv_cache.device, layer.kv_cache.dtype
        metadata = self.builder.build(0, _common(tokens, self.block_tokens, self.blocks, device))
        query = torch.randn(1, impl.num_heads, impl.head_size, device=device).to(dtype)
        key = torch.zeros(1, impl.num_kv_heads, impl.head_size, device=device, dtype=dtype)
        output = torch.zeros_like(query)
        context = _Context({self.name: metadata})

        def attend() -> None:
            impl.forward(layer, query, key, key, layer.kv_cache, metadata, output=output)

        def begin(step: int) -> None:
            prefill = tokens - step
            row = SparseRow(_NAME, tokens, prefill_tokens=prefill, prompt_tokens=prefill)
            last = [int(metadata.slot_mapping[0]) // self.block_tokens]
            self.host.begin_step(SparsePlan(self.block_tokens, 0, rows=[row], last_blocks=last), context)

        policy = self.method.policy
        dense = choosing = later = float("inf")
        turns, end = 0, time.perf_counter() + SECONDS
        while turns < TIMES or time.perf_counter() < end:
            # In turns, so that what disturbs one of them disturbs all.
            dense = min(dense, _timed(attend, device))
            choosing = min(choosing, self._step(begin, attend, device, 1))
            if policy.stride > 1:
                later = min(later, self._step(begin, attend, device, 2))
            turns += 1
        sparse = choosing if policy.stride == 1 else (choosing + (policy.stride - 1) * later) / policy.stride
        return dense * self.layers, sparse + dense * (self.layers - self.selecting)

    def _step(self, begin: Callable[[int], None], attend: Callable[[], None], device: Any, step: int) -> float:
        """The layers that may choose, of a step that chooses (1), or that goes on with what was chosen (2)."""
        if step == 1:
            self.method.retriever.forget(_NAME)
        began = time.perf_counter()
        begin(step)
        first = _timed(attend, device)
        whole = time.perf_counter() - began
        again = _timed(attend, device)
        self.host.end_step()
        # With a lag the second call goes on with the choice that the first one waited for: it chooses nothing.
        choosing = first if self.method.policy.lag else min(first, again)
        return whole + (self.selecting - 1) * choosing


class _Context:
    """As much of a forward context as attention asks for."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.attn_metadata = metadata
        self.no_compile_layers: dict[str, Any] = {}


def measure(host: SparseHost, layers: dict[str, Any], spec: Any, vllm_config: Any, num_blocks: int) -> int:
    """Tokens from which on a request is worth choosing for; :data:`NEVER` where none within reach is.

    Not measured is latent attention; nor a method with an ``attention_begin`` of its own: the keys and values that it
    is handed are written to the cache, whose blocks hold the KV of requests that run; nor ranks that choose together,
    each of which would leave off by its own clock while others wait for its scores; nor a method that chooses for
    several requests at once alone. There it is four times what is kept, by the arithmetic of bytes in
    ``docs/sparse.md``.
    """
    method = host.blocks
    assert method is not None
    limit = min(vllm_config.model_config.max_model_len, (num_blocks - 1) * spec.block_size, LAST)
    by_rule: int = 4 * (method.policy.windows + method.policy.budget(-(-limit // spec.block_size))) * spec.block_size
    name = next((name for name in layers if method.writes(name)), None)
    together = method.policy.shared_ranks or method.policy.min_concurrency > 1
    if name is None or method.selector.geometry.rope_dim or host.changes or together:
        return by_rule
    bench = _bench(host, method, layers, name, spec, vllm_config, num_blocks)
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
    for length in reversed(lengths):  # long ones first: where they do not pay, short ones do not either
        if length > limit or not pays(length):
            break
        found = length
    middle = found * 3 // 4
    return middle if found != NEVER and middle >= FIRST and pays(middle) else found


def _bench(
    host: SparseHost, method: BlockSparse, layers: dict[str, Any], name: str, spec: Any, vllm_config: Any, blocks: int
) -> _Bench:
    from vllm.config import set_current_vllm_config

    layer = layers[name]
    with set_current_vllm_config(vllm_config):
        builder = layer.get_attn_backend().get_builder_cls()(spec, [name], vllm_config, layer.kv_cache.device)
    selecting = sum(method.selects(each) for each in layers)
    return _Bench(host, method, name, layer, builder, len(layers), selecting, spec.block_size, blocks)


def _common(tokens: int, block_tokens: int, num_blocks: int, device: Any) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    blocks = -(-tokens // block_tokens)
    table = 1 + torch.arange(blocks, dtype=torch.int32, device=device)[None] % (num_blocks - 1)
    start, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    slot = int(table[0, -1]) * block_tokens + (tokens - 1) % block_tokens
    return CommonAttentionMetadata(
        query_start_loc=start.to(device),
        query_start_loc_cpu=start,
        seq_lens=lens.to(device),
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        max_seq_len=tokens,
        block_table_tensor=table,
        slot_mapping=torch.tensor([slot], dtype=torch.int64, device=device),
        causal=True,
    )


def _timed(work: Callable[[], None], device: Any) -> float:
    _settle(device)
    began = time.perf_counter()
    work()
    _settle(device)
    return time.perf_counter() - began


def _settle(device: Any) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
