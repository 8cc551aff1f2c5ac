"""Names of the original, the book and document 002: methods of one algorithm, and their parts as
objects and functions. The modules of those names (``ucm.sparse.esa.esa`` and so on) import from
here. ``cuda`` and ``triton`` in a name are the original's: everything works on any device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ucm.config.sparse import AlgorithmConfig
from ucm.errors import BusyError, InvalidInputError, UnsupportedError
from ucm.sparse.kernels import code, distance, kernels_for, made_code
from ucm.sparse.method import PositionalMethod
from ucm.sparse.policy import Policy, policy_of, settings_of
from ucm.sparse.residency import (
    HybridEvictionPolicy,
    LRUEvictionPolicy,
    PrefetchEngine,
    PrefetchHandle,
    PrefetchPriority,
    PrefetchTask,
    ScoreBasedEvictionPolicy,
    plan_residency,
)
from ucm.sparse.selection import Selection, choose, compact, select
from ucm.sparse.selectors.hash import Hash, directions

__all__ = [
    "ESA",
    "GSA",
    "BlockReprPool",
    "ESARetrievalEngine",
    "ESASparse",
    "GSAOnDevice",
    "GSAPrefetchEngineC",
    "GSAReqStat",
    "GSASparseKernel",
    "HashEncoder",
    "HybridEvictionPolicy",
    "KVStarMultiStep",
    "LRUEvictionPolicy",
    "PrefetchEngine",
    "PrefetchHandle",
    "PrefetchPriority",
    "PrefetchTask",
    "ReqMeta",
    "ReqStage",
    "ScoreBasedEvictionPolicy",
    "compute_block_scores",
    "compute_topk_len",
    "cuda_hamming_topk",
    "hamming_distance",
    "reshape_and_cache_khash_triton",
    "select_topk_blocks",
    "torch_hash_code",
    "triton_hash_code",
    "update_seq_lens",
]

_log = logging.getLogger("ucm.sparse")


class ESA(PositionalMethod):
    """Means of keys."""

    algorithm: ClassVar[str] = "ESA"


class ESASparse(ESA):
    """The book's form of the constructor, with the store beside it."""

    def __init__(self, vllm_config: Any, role: Any, store: Any = None) -> None:
        """``store`` is where offloaded blocks are; the connector's is used without it."""
        super().__init__(vllm_config, role)
        self.kv_store = store


class BlockReprPool:
    """A bounded pool of vectors, one for each block."""

    def __init__(
        self, max_blocks: int, repr_dim: int, device: str = "cpu", dtype: Any = torch.float16
    ) -> None:
        """``max_blocks`` vectors of ``repr_dim`` elements."""
        self.pool = torch.zeros(max_blocks, repr_dim, dtype=dtype, device=device)
        self.free_indices = list(range(max_blocks - 1, -1, -1))
        self.block_to_index: dict[int, int] = {}

    def allocate(self, block_id: int) -> int:
        """The index of a block's vector: the one it has, or a free one. Raises
        :class:`~ucm.errors.BusyError`."""
        if (known := self.block_to_index.get(block_id)) is not None:
            return known
        if not self.free_indices:
            most = {"max_blocks": len(self.pool)}
            raise BusyError("the pool of block representations is full", context=most)
        index = self.free_indices.pop()
        self.block_to_index[block_id] = index
        return index

    def set_repr(self, block_id: int, value: Tensor) -> None:
        """Keep a block's vector."""
        self.pool[self.allocate(block_id)] = value.to(self.pool)

    def get_repr(self, block_id: int) -> Tensor:
        """A block's vector. Raises :class:`~ucm.errors.InvalidInputError` for a block without
        one."""
        return self.pool[self._index(block_id)]

    def free(self, block_id: int) -> None:
        """Give a block's place back."""
        self.free_indices.append(self._index(block_id))
        del self.block_to_index[block_id]

    def _index(self, block_id: int) -> int:
        if (index := self.block_to_index.get(block_id)) is None:
            raise InvalidInputError(
                f"block {block_id} has no place in the pool of block representations"
            )
        return index


class ESARetrievalEngine:
    """Scores blocks on a few threads and calls back with the best."""

    #: Most retrievals that may be under way.
    LIMIT = 1024

    def __init__(self, config: AlgorithmConfig | Mapping[str, Any] | Any, threads: int = 4) -> None:
        """``config.topk`` (or the key ``topk``, or ``topk_blocks``) is the number of chosen
        blocks."""
        self.topk = _topk(config)
        self.thread_pool = ThreadPoolExecutor(threads, thread_name_prefix="ucm-esa")
        self.pending_tasks: dict[str, Future[list[int]]] = {}

    def submit_retrieval(
        self,
        request_id: str,
        query: Tensor,
        block_reprs: Tensor,
        callback: Callable[[str, list[int]], None],
    ) -> None:
        """Choose of ``block_reprs [n, d]`` those with the largest dot product with ``query [d]``,
        of equal ones the earlier; ``callback(request_id, places)`` is called with their places,
        ascending, on one of the threads. An error of the callback is logged. Raises
        :class:`~ucm.errors.BusyError` while too many are under way."""
        under_way = ((name, task) for name, task in self.pending_tasks.items() if not task.done())
        self.pending_tasks = dict(under_way)
        if len(self.pending_tasks) >= self.LIMIT:
            raise BusyError("too many retrievals are under way", context={"limit": self.LIMIT})
        query, reprs = (each.detach().float().cpu().clone() for each in (query, block_reprs))

        def retrieve() -> list[int]:
            found = self.retrieve(query, reprs)
            try:
                callback(request_id, found)
            except Exception:
                _log.exception("the callback of a retrieval failed")
            return found

        self.pending_tasks[request_id] = self.thread_pool.submit(retrieve)

    def retrieve(self, query: Tensor, block_reprs: Tensor) -> list[int]:
        """The same, at once."""
        scores = (block_reprs * query.reshape(-1)).sum(dim=-1)[None]
        # All blocks are candidates: the window of one that a policy needs is a block beyond them.
        policy = Policy(init=0, local=1, ratio=None, topk=self.topk)
        return [int(place) for place in choose(policy, scores, scores.shape[1] + 1)[0]]

    def close(self) -> None:
        """Stop the threads, without waiting."""
        self.thread_pool.shutdown(wait=False, cancel_futures=True)


def _topk(config: Any) -> int:
    found = config.get("topk", config.get("topk_blocks")) if isinstance(config, Mapping) else None
    if found is None:
        found = getattr(config, "topk", None) or getattr(config, "topk_blocks", None)
    if not isinstance(found, int) or found < 1:
        raise InvalidInputError(f"topk says how many blocks are chosen, at least 1; got {found!r}")
    return found


class GSA(PositionalMethod):
    """Means of keys, with larger windows."""

    algorithm: ClassVar[str] = "GSA"


@dataclass
class GSAReqStat:
    """The progress of a request, and its chosen blocks."""

    request_id: str
    index_in_batch: int = 0
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    vllm_block_ids: list[int] = field(default_factory=list)
    ucm_block_hashes: list[str] = field(default_factory=list)
    selected_blocks: list[int] = field(default_factory=list)
    prefetch_task: Any = None

    @property
    def prefetch_ready(self) -> bool:
        """Whether its prefetch (a :class:`~ucm.sparse.residency.PrefetchHandle`) is done, or there
        is none."""
        return self.prefetch_task is None or self.prefetch_task.state == "done"


def compute_block_scores(
    query: Tensor, block_reprs: Tensor, block_size: int = 0, method: str = "l2"
) -> Tensor:
    """Scores ``[n]`` of blocks ``block_reprs [n, heads, d]`` for ``query [heads, d]``, by one of
    the book's methods: ``mean`` or ``max`` of the heads' dot products, or minus the sum of their
    distances (``l2``)."""
    del block_size
    q, r = query.float(), block_reprs.float()
    if method == "l2":
        return -(q - r).norm(dim=-1).sum(dim=-1)
    dots = (q * r).sum(dim=-1)
    if method not in ("mean", "max"):
        raise InvalidInputError(f'the method is mean, max or l2, got "{method}"')
    return dots.mean(dim=-1) if method == "mean" else dots.amax(dim=-1)


def select_topk_blocks(
    scores: Tensor, num_blocks: int, init_window_size: int, local_window_size: int, topk: int
) -> Tensor:
    """The windows and the ``topk`` best blocks between them, ascending. The last block is always
    among them."""
    policy = Policy(init=init_window_size, local=max(1, local_window_size), ratio=None, topk=topk)
    return select(policy, scores[None], num_blocks, num_blocks)[0]


def compute_topk_len(
    block_len: int, config: Mapping[str, Any] | AlgorithmConfig | None = None
) -> int:
    """How many of ``block_len`` blocks are kept, windows included."""
    # The block size matters only for windows in tokens; the book's is 128.
    return policy_of(settings_of("GSA", config), 128).kept(block_len, block_len * 128)


class GSASparseKernel:
    """Attention over chosen blocks of a batch that holds its KV by request: gather, then
    softmax."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """``config`` may have ``head_dim`` (128), by whose root scores are divided."""
        self.head_dim = int((config or {}).get("head_dim", 128))

    def forward(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        selected_indices: Tensor | Sequence[Sequence[int]],
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """``query [batch, heads, q, d]``, caches ``[batch, blocks, b, KV heads, d]``,
        ``selected_indices [batch, k]`` and ``attention_mask [batch, q, blocks * b]`` (true: attend)
        give ``[batch, heads, q, d]``."""
        index = torch.as_tensor(selected_indices, device=key_cache.device).long()
        keys, values = self._gather(key_cache, index), self._gather(value_cache, index)
        group = query.shape[1] // keys.shape[2]
        keys, values = (each.repeat_interleave(group, dim=2).float() for each in (keys, values))
        logits = torch.einsum("bhqd,bkhd->bhqk", query.float(), keys) * self.head_dim**-0.5
        if attention_mask is not None:
            size = key_cache.shape[2]
            places = (index[:, :, None] * size + torch.arange(size, device=index.device)).flatten(1)
            mask = attention_mask.gather(2, places[:, None].expand(-1, attention_mask.shape[1], -1))
            logits = logits.masked_fill(~mask[:, None], -torch.inf)
        attended = torch.einsum("bhqk,bkhd->bhqd", torch.softmax(logits, dim=-1), values)
        return attended.to(query.dtype)

    @staticmethod
    def _gather(cache: Tensor, index: Tensor) -> Tensor:
        return cache[torch.arange(len(index), device=index.device)[:, None], index].flatten(1, 2)


class GSAPrefetchEngineC:
    """The blocks of each request and layer that must be loaded, and their device blocks. All
    tensors have the layer in their first dimension and the place in the batch in their second."""

    def __init__(
        self,
        prefetch_blocks: Tensor,
        load_success_list: Tensor,
        prefetch_block_len: Tensor,
        block_table_len: Tensor,
        kv_shape: Sequence[int],
        use_mla: bool = False,
        is_log: bool = False,
        tp_size: int = 1,
        rank: int = 0,
        num_prefetch_blocks: int = 1,
        is_python_load: bool = True,
    ) -> None:
        """``prefetch_blocks [layers, batch, most]`` gets the physical blocks of each row,
        ``prefetch_block_len [layers, batch]`` their number, and ``load_success_list [layers, batch,
        most]`` 1 for those whose KV is loaded. ``is_python_load`` must be true: loads are the
        caller's (:meth:`obtain_load_blocks`). Other arguments are not used."""
        del block_table_len, kv_shape, use_mla, is_log, tp_size, rank, num_prefetch_blocks
        if not is_python_load:
            raise UnsupportedError(
                "loads through the pointer of a store are not built: pass is_python_load=True and"
                " load what obtain_load_blocks() says, or use ucm.sparse.residency.PrefetchEngine"
            )
        self._blocks, self._there = prefetch_blocks, load_success_list
        self._len = prefetch_block_len
        self._resident: dict[tuple[int, int], dict[int, int]] = {}
        self._loads: list[int] = []
        self._misses: list[int] = []

    def set_blocks_table_info(
        self, block_table: Tensor, block_table_len: Tensor, topk_buf: Tensor, step_time: int = 0
    ) -> None:
        """``block_table [layers, batch, N]`` has each row's physical blocks, of which
        ``block_table_len [layers, batch]`` count; ``topk_buf [layers, batch, k]`` the wanted
        logical blocks, the most wanted first."""
        del step_time
        self._table, self._table_len, self._wanted = block_table, block_table_len, topk_buf

    def run_async_prefetch_bs(
        self,
        req_id_list: Sequence[int],
        topk_len_list: Sequence[int],
        bs_index_list: Sequence[int],
        kvcache: object = None,
        store_ptr: int = 0,
    ) -> None:
        """Plan the step of these requests, each with this number of wanted blocks, at these places
        of the batch. The logical blocks of a new request are in the order of its block table."""
        del kvcache, store_ptr
        self._loads, self._misses = [], []
        for request, count, place in zip(req_id_list, topk_len_list, bs_index_list, strict=True):
            for layer in range(self._wanted.shape[0]):
                wanted = self._wanted[layer, place, :count].tolist()
                self._plan(request, layer, place, [int(block) for block in wanted])

    def _plan(self, request: int, layer: int, place: int, wanted: list[int]) -> None:
        length = int(self._table_len[layer, place])
        physical = [int(block) for block in self._table[layer, place, :length]]
        known = self._resident.get((request, layer))
        resident = {number: number for number in range(len(physical))} if known is None else known
        plan = plan_residency(resident, wanted, len(physical))
        missing = dict(plan.load)
        slots = self._resident[request, layer] = {**plan.keep, **missing}
        chosen = sorted(set(wanted) - set(plan.dropped))
        blocks = torch.tensor([physical[slots[block]] for block in chosen])
        there = torch.tensor([block not in missing for block in chosen])
        self._blocks[layer, place, : len(chosen)] = blocks.to(self._blocks)
        self._there[layer, place, : len(chosen)] = there.to(self._there)
        self._len[layer, place] = len(chosen)
        self._loads += [physical[slot] for _, slot in plan.load]
        self._misses += [logical for logical, _ in plan.load]

    def obtain_load_blocks(self) -> list[int]:
        """The physical blocks to fill, by request and layer in the order of the call."""
        return list(self._loads)

    def obtain_miss_idxs(self) -> list[int]:
        """The logical block that each of them gets."""
        return list(self._misses)

    def finish_request(self, request: int) -> None:
        """Forget a request."""
        for known in [key for key in self._resident if key[0] == request]:
            del self._resident[known]


class GSAOnDevice(PositionalMethod):
    """Hash codes."""

    algorithm: ClassVar[str] = "GSAOnDevice"

    def hash_code(
        self,
        nope: Tensor | None = None,
        rope: Tensor | None = None,
        reduction_head_num: int = 1,
        query: Tensor | None = None,
        layer: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Codes (uint8) of queries ``query [t, heads, d]``, one for each KV head; with latent
        attention of ``nope [t, heads, rank]`` and ``rope [t, heads, size]``, two, each of the means
        of ``reduction_head_num`` heads."""
        selector = getattr(self, "selector", None)
        if not isinstance(selector, Hash):
            raise InvalidInputError(
                "call setup or register_kv_caches first: codes depend on the shape of the keys"
            )
        if not selector.geometry.rope_dim:
            if query is None:
                wrong = "models without latent attention have one query: pass query="
                raise InvalidInputError(wrong)
            return selector.encode(layer, selector.grouped(query).mean(dim=2))
        if nope is None or rope is None:
            wrong = "latent attention has a query of two parts: pass nope= and rope="
            raise InvalidInputError(wrong)
        both = torch.cat([nope, rope], dim=-1).float()
        if reduction_head_num > 1:
            both = both.view(both.shape[0], reduction_head_num, -1, both.shape[-1]).mean(dim=1)
        codes = selector.encode(layer, both)
        split = selector.parts[0][1] // 8
        return codes[..., :split], codes[..., split:]


class HashEncoder:
    """Vectors to codes of sign bits, eight in a byte: the same for the same sizes and seed, in
    every process."""

    def __init__(
        self,
        input_dim: int = 0,
        hash_bits: int = 0,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        *,
        seed: int = 0,
        layer: int = 0,
        head_dim: int = 0,
        hash_dim: int = 0,
    ) -> None:
        """``hash_bits`` is a multiple of 8; ``dtype`` is that of the directions. ``head_dim`` and
        ``hash_dim`` are other names of the first two."""
        input_dim, hash_bits = input_dim or head_dim, hash_bits or hash_dim
        if input_dim < 1 or hash_bits < 8 or hash_bits % 8:
            raise InvalidInputError(
                "an encoder needs channels, and bits that fill bytes",
                context={"input_dim": input_dim, "bits": hash_bits},
            )
        self.input_dim, self.hash_bits, self.hash_numbers = input_dim, hash_bits, hash_bits // 8
        self.dtype, self.device = dtype, torch.device(device)
        made = directions(input_dim, hash_bits, seed=seed, layer=layer).astype(np.float32)
        self.hash_weights = torch.from_numpy(made).to(self.device, dtype)
        powers = [1 << bit for bit in range(8)]
        self.bit_masks = torch.tensor(powers, dtype=torch.uint8, device=self.device)

    def compute_hash(self, x: Tensor) -> Tensor:
        """Codes ``[..., bits/8]`` (uint8) of ``x [..., input_dim]``. Raises
        :class:`~ucm.errors.InvalidInputError`."""
        if x.shape[-1] != self.input_dim:
            raise InvalidInputError(
                f"vectors of {self.input_dim} channels are encoded, got {x.shape[-1]}"
            )
        encode = triton_hash_code if x.device.type == "cuda" else torch_hash_code
        codes = encode(x.reshape(-1, self.input_dim), self.hash_weights, self.bit_masks)
        return codes.view(*x.shape[:-1], -1)

    def hash_code(self, x: Tensor) -> Tensor:
        """:meth:`compute_hash` in numbers of 32 bits, of which ``bits`` are a multiple."""
        return self.compute_hash(x).view(torch.int32)


def torch_hash_code(x: Tensor, hash_weights: Tensor, bit_masks: Tensor | None = None) -> Tensor:
    """Codes ``[n, bits/8]`` of ``x [n, d]`` by directions ``[d, bits]``, little-endian;
    ``bit_masks`` are the powers of 2."""
    del bit_masks
    return code(x, hash_weights)


def triton_hash_code(x: Tensor, hash_weights: Tensor, bit_masks: Tensor | None = None) -> Tensor:
    """:func:`torch_hash_code` by the kernel of the device of ``x``: Triton's on a GPU, that of the
    CPU there, else torch. The same bits, except where ``x·W`` is as small as its rounding."""
    del bit_masks
    return made_code(x[:, None], hash_weights)[:, 0]


def reshape_and_cache_khash_triton(
    k_hash_compute: Tensor, slot_mapping: Tensor, k_hash: Tensor, block_size: int = 128
) -> Tensor:
    """Write codes ``[t, h, bytes]`` into the slots ``slot_mapping [t]`` of ``k_hash [blocks, b, h,
    bytes]``, in place; negative slots and slots beyond the cache are left out. Returns ``k_hash``.
    By Triton on a GPU, else by torch."""
    if k_hash.shape[1] != block_size:
        raise InvalidInputError(
            f"the cache has blocks of {k_hash.shape[1]} tokens, not {block_size}"
        )
    if k_hash.is_cuda and (kernels := kernels_for(k_hash, k_hash_compute)) is not None:
        kernels.scatter_codes(k_hash_compute, slot_mapping, k_hash)
        return k_hash
    there = (slot_mapping >= 0) & (slot_mapping < k_hash.shape[0] * block_size)
    slots = slot_mapping[there].long()
    k_hash[slots // block_size, slots % block_size] = k_hash_compute[there]
    return k_hash


def hamming_distance(hash_a: Tensor, hash_b: Tensor) -> Tensor:
    """Bits in which codes ``hash_a [a, bytes]`` and ``hash_b [b, bytes]`` differ, int32 ``[a,
    b]``."""
    return distance(hash_a[:, None], hash_b[None])


def cuda_hamming_topk(
    q_hash: Tensor,
    k_hash: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    topk_token: int,
    sink_token: int = 64,
    recent_token: int = 512,
    is_mla: bool = False,
) -> Tensor:
    """The block table of the kept blocks, ``[batch, most]``; :func:`update_seq_lens` has the
    lengths for it.

    ``q_hash [batch, 1, heads, bytes]``, ``k_hash [blocks, b, heads, bytes]`` (one head with latent
    attention, whose query heads' distances are added up), uint8. ``topk_token`` tokens are kept,
    windows included; windows are whole blocks. Works on any device: the name is the original's.
    """
    if q_hash.dtype != torch.uint8 or k_hash.dtype != torch.uint8:
        raise InvalidInputError(f"codes are uint8, got {q_hash.dtype} and {k_hash.dtype}")
    size = k_hash.shape[1]
    policy = Policy(
        init=-(-sink_token // size),
        local=max(1, -(-recent_token // size)),
        ratio=None,
        topk=-(-topk_token // size),
        windows_inside=True,
    )
    kept, blocks = [], [-(-int(length) // size) for length in seq_lens]
    for codes, row, length, n in zip(q_hash[:, 0], block_table, seq_lens, blocks, strict=True):
        if int(length) <= topk_token:
            kept.append([torch.arange(n, device=block_table.device)])
            continue
        keys = k_hash[row[:n].long()]  # [n, b, heads, bytes]
        dist = distance(codes, keys)
        near = (dist.sum(dim=-1) if is_mla else dist.amin(dim=-1)).amin(dim=1)
        kept.append(select(policy, -near[None], n, int(length)))
    return compact(Selection.of(kept, blocks), block_table, seq_lens, size)[0]


def update_seq_lens(seq_lens: Tensor, topk_token: int, block_size: int) -> Tensor:
    """The lengths of the kept blocks: whole blocks are left out, so the last one stays as full as
    it was."""
    over = (seq_lens - topk_token).clamp(min=0)
    return seq_lens - (over + block_size - 1) // block_size * block_size


class KVStarMultiStep(PositionalMethod):
    """Estimated attention over pruned and merged keys."""

    algorithm: ClassVar[str] = "KVStarMultiStep"


class ReqStage(Enum):
    """The stage of a request."""

    PREFILL = 0
    DECODE = 1


@dataclass
class ReqMeta:
    """The progress of a request."""

    request_id: str
    index_in_batch: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    num_sparsed_tokens: int = -1
    vllm_block_ids: list[int] = field(default_factory=list)
    token_blk_size: int = 16
    prompt_token_ids: list[int] = field(default_factory=list)
    query_start_loc: int = -1
    query_len: int = -1
    retrieval_stride: int = 8
    block_hashes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Number of its decode step, 0 while the prompt is computed."""
        return self.num_output_tokens

    @property
    def stage(self) -> ReqStage:
        """Whether it decodes."""
        return ReqStage.DECODE if self.num_output_tokens > 0 else ReqStage.PREFILL
