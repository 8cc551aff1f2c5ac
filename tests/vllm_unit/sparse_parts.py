"""Attention layers without a model, filled caches, and attention by plain torch to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ucm.config.sparse import keys_of
from ucm.integration.vllm.attention.backends import derive_impl
from ucm.integration.vllm.attention.host import SparseHost, set_active_host
from ucm.integration.vllm.attention.plan import SparsePlan
from ucm.sparse.base import SparseRow, UcmSparseBase, UcmSparseRole
from ucm.sparse.method import BlockSparse, method_for
from ucm.sparse.selector import Geometry

Windows = method_for("Windows")
WindowsConfig = keys_of("Windows")

BLOCK, HEADS, KV_HEADS, SIZE = 32, 4, 2, 32
NAME = "model.layers.0.self_attn.attn"
QUEST = {"sparse_type": "Quest", "ucm_sparse_config": {"Quest": {"ratio": 0.2}}}


@dataclass
class Rows:
    """Sequences with keys and values of their own, and the queries of a step: the last ``queries``
    tokens of each."""

    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    table: Tensor  # [rows, blocks], physical

    @classmethod
    def of(cls, lengths: Sequence[int], queries: Sequence[int], seed: int = 0) -> Rows:
        """Random ones, in blocks that lie in no order; block 0 is vLLM's own."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        blocks = [-(-length // BLOCK) for length in lengths]
        ids = (1 + torch.randperm(sum(blocks), generator=generator)).int().split(blocks)
        return cls(
            [random(length, KV_HEADS, SIZE) for length in lengths],
            [random(length, KV_HEADS, SIZE) for length in lengths],
            [random(count, HEADS, SIZE) for count in queries],
            torch.stack([torch.nn.functional.pad(row, (0, max(blocks) - len(row))) for row in ids]),
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(keys) for keys in self.keys]

    @property
    def counts(self) -> list[int]:
        """Queries of each sequence."""
        return [len(queries) for queries in self.queries]

    @property
    def blocks(self) -> int:
        """Blocks that a cache for them has."""
        return int(self.table.max()) + 1

    def slots(self, row: int, begin: int = 0) -> Tensor:
        """Where the tokens of a row are, from one on."""
        places = torch.arange(begin, self.lengths[row])
        return self.table[row].long()[places // BLOCK] * BLOCK + places % BLOCK

    def step(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of the step's tokens, and the slots that these are written
        to."""
        new = [
            slice(length - count, length)
            for length, count in zip(self.lengths, self.counts, strict=True)
        ]
        return (
            torch.cat(self.queries),
            torch.cat([keys[s] for keys, s in zip(self.keys, new, strict=True)]),
            torch.cat([values[s] for values, s in zip(self.values, new, strict=True)]),
            torch.cat([self.slots(row, s.start) for row, s in enumerate(new)]),
        )

    def starts(self) -> Tensor:
        """Where the queries of each row begin."""
        return torch.tensor([0, *torch.tensor(self.counts).cumsum(0).tolist()], dtype=torch.int32)

    def attended(self, kept: Sequence[Sequence[int] | None], heads: slice = slice(None)) -> Tensor:
        """Attention of every query to the blocks that its row keeps (None: all), for these KV
        heads."""
        outputs = []
        for keys, values, queries, blocks in zip(
            self.keys, self.values, self.queries, kept, strict=True
        ):
            seen = torch.ones(len(keys), dtype=torch.bool)
            if blocks is not None:
                seen = torch.isin(torch.arange(len(keys)) // BLOCK, torch.tensor(list(blocks)))
            outputs.append(attention(queries, keys, values, seen))
        return (
            torch.cat(outputs).view(-1, KV_HEADS, HEADS // KV_HEADS, SIZE)[:, heads].flatten(1, 2)
        )


def attention(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float = SIZE**-0.5
) -> Tensor:
    """Causal attention of the last tokens ``query [t, heads, d]`` to ``keys [n, kv heads, d]``,
    where ``seen [n]``."""
    group = query.shape[1] // keys.shape[1]
    places = torch.arange(len(keys) - len(query), len(keys))
    mask = (torch.arange(len(keys))[None] <= places[:, None]) & seen
    scores = torch.einsum("thd,shd->hts", query, keys.repeat_interleave(group, 1)) * scale
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return torch.einsum("hts,shd->thd", weights, values.repeat_interleave(group, 1))


def paged(
    query: Tensor,
    pages: Tensor,
    starts: Tensor,
    table: Tensor,
    lens: Tensor,
    size: int,
    scale: float,
) -> Tensor:
    """What a paged kernel computes: ``pages [blocks, b, heads, k and v]``, whose keys are the first
    ``size``."""
    outputs = []
    for row, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        held = pages[table[row].long()].flatten(0, 1)[: int(lens[row])]
        seen = torch.ones(len(held), dtype=torch.bool)
        outputs.append(attention(query[begin:end], held[..., :size], held[..., size:], seen, scale))
    return torch.cat(outputs)


class Layer:
    """The part of vLLM's attention layer that an implementation uses."""

    _k_scale_float = _v_scale_float = 1.0
    sliding_window = kv_sharing_target_layer_name = None
    num_kv_heads, head_size, num_heads = KV_HEADS, SIZE, HEADS

    def __init__(self, name: str, impl: Any, cache: Tensor, isa: str = "vec") -> None:
        self.layer_name, self.impl, self.kv_cache, self.isa = name, impl, cache, isa
        self.dtype = cache.dtype
        self._q_scale = self._k_scale = self._v_scale = torch.ones(())


def context_of(layers: dict[str, Layer], metadata: Any) -> Any:
    """A forward context in which every layer has the same metadata."""
    return SimpleNamespace(attn_metadata=dict.fromkeys(layers, metadata), no_compile_layers=layers)


class Packing(NamedTuple):
    """What the pages of a CPU hold, and the instruction set that they are packed for: vLLM's
    kernels end a process that hands them another pair."""

    dtype: torch.dtype = torch.float32
    isa: str = "vec"

    @classmethod
    def of(cls, dtype: torch.dtype) -> Packing:
        """That of vLLM on this processor."""
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return cls(dtype, _get_attn_isa(dtype, BLOCK, SIZE))


#: What these tests compute with unless they name another.
FLOATS = Packing()
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


class Rig:
    """Two layers over one set of sequences, and the step that computes their last tokens."""

    def __init__(
        self,
        config: Any,
        method: UcmSparseBase | None,
        rows: Rows,
        spare: int = 0,
        packing: Packing = FLOATS,
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        self.rows, self.packing = rows, packing
        kind = derive_impl(CPUAttentionBackendImpl, latent=False)
        self.layers: dict[str, Layer] = {}
        for name in NAMES:
            with set_current_vllm_config(config):
                impl = kind(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
            cache = torch.zeros(rows.blocks, KV_HEADS, BLOCK, 2 * SIZE, dtype=packing.dtype)
            self.layers[name] = Layer(name, impl, cache, packing.isa)
        if isinstance(method, BlockSparse):
            geometry = Geometry(BLOCK, KV_HEADS, SIZE)
            method.setup(
                geometry,
                list(self.layers),
                rows.blocks,
                per_head=True,
                spare_blocks=spare,
                key_dtype=packing.dtype,
            )
        self.host = None if method is None else SparseHost(method, self.layers)
        self.metadata = self._metadata()
        self._fill()

    def _metadata(self) -> Any:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

        rows = self.rows
        lens = torch.tensor(rows.lengths, dtype=torch.int32)
        made = CPUAttentionMetadata(
            num_actual_tokens=sum(rows.counts),
            max_query_len=max(rows.counts),
            query_start_loc=rows.starts(),
            max_seq_len=max(rows.lengths),
            seq_lens=lens,
            block_table=rows.table.clone(),
            slot_mapping=rows.step()[3],
            scheduler_metadata=None,
            causal=True,
        )
        made.scheduler_metadata = plan_of(made, self.packing)
        return made

    def _fill(self) -> None:
        """Everything before the step: written as a step of a prompt, which is where keys are
        encoded."""
        set_active_host(self.host)
        rows = self.rows
        slots = torch.cat([rows.slots(row) for row in range(len(rows.lengths))])
        keys, values = (torch.cat(each).to(self.packing.dtype) for each in (rows.keys, rows.values))
        if self.host is not None:
            self.host.begin_step(SparsePlan(BLOCK, 0), context_of(self.layers, self.metadata))
        for layer in self.layers.values():
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
        if self.host is not None:
            self.host.end_step()

    def plan(self, prefilled: Sequence[int] | None = None) -> SparsePlan:
        """The step as the scheduler side describes it, its requests in another order than the
        rows."""
        plan = SparsePlan(BLOCK, 0)
        for row in reversed(range(len(self.rows.lengths))):
            tokens, count = self.rows.lengths[row], self.rows.counts[row]
            before = tokens - 1 if count == 1 else tokens
            prefill = before if prefilled is None else prefilled[row]
            plan.rows.append(SparseRow(f"r{row}", tokens, prefill, prefill, count))
            plan.last_blocks.append(int(self.rows.table[row, (tokens - 1) // BLOCK]))
        return plan

    def attend(self, plan: SparsePlan | None = None, name: str = NAMES[0]) -> Tensor:
        """A layer of the step."""
        query, keys, values, slots = self.rows.step()
        layer = self.layers[name]
        output = torch.zeros_like(query)
        if self.host is not None:
            self.host.begin_step(plan or self.plan(), context_of(self.layers, self.metadata))
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
        layer.impl.forward(layer, query, keys, values, layer.kv_cache, self.metadata, output)
        if self.host is not None:
            self.host.end_step()
        return output


def plan_of(metadata: Any, packing: Packing = FLOATS) -> Tensor:
    """What vLLM's kernel computes ahead."""
    from vllm import _custom_ops as ops

    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(metadata.seq_lens),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        seq_lens=metadata.seq_lens,
        dtype=packing.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=packing.isa,
        enable_kv_split=True,
    )


def sparse_engine(engines: Any, tiny: Path, tmp_path: Path, args: Any = None, **extra: Any) -> Any:
    """vLLM's configuration with our connector in it."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="UCMConnector",
        kv_role="kv_both",
        kv_connector_module_path="ucm.integration.vllm.connector",
        kv_connector_extra_config={"storage_path": str(tmp_path), **extra},
    )
    return engines.engine_config(tiny, kv_transfer_config=transfer, **(args or {}))


class SparseEngine:
    """What the processes of an engine with sparse attention make their sides of: its
    configuration, and its KV cache as the scheduler sees it and as its worker does."""

    def __init__(self, engines: Any, tiny: Path, tmp_path: Path, **keys: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.core.kv_cache_utils import init_none_hash

        from ucm.integration.vllm.attention import registering

        self.config = sparse_engine(engines, tiny, tmp_path, **keys)
        with set_current_vllm_config(self.config):
            self.backend = registering.CPU_ATTN
        specs = {
            name: self.backend.customize_spec(spec)
            for name, spec in engines.layer_specs(self.config).items()
        }
        self.kv_cache, (self.worker_kv_cache,) = engines.kv_configs(self.config, [specs])
        self.hash = _sha256()
        init_none_hash(self.hash)

    def request(self, tokens: list[int], name: str, max_tokens: int = 100) -> Any:
        """One of vLLM's requests, whose blocks have hashes."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        hasher = get_request_block_hasher(BLOCK, self.hash)
        return Request(
            name, tokens, SamplingParams(max_tokens=max_tokens), None, block_hasher=hasher
        )


def _sha256() -> Any:
    try:
        from vllm.utils.hashing import sha256
    except ImportError:
        from vllm.utils import sha256  # type: ignore[no-redef]
    return sha256


def windows(geometry: Geometry, blocks: int) -> Windows:
    """The first block and the last two."""
    method = Windows(None, UcmSparseRole.WORKER, WindowsConfig(min_tokens=0))
    method.setup(geometry, [NAME], blocks)
    return method
