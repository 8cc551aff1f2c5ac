"""The host of the selectors: a method of sparse attention that chooses blocks for each decode row
of each layer.

An engine's side calls, for each step: :meth:`BlockSparse.bind_sparse_metadata` with a
:class:`~ucm.sparse.base.SparseBatch`; for each layer :meth:`BlockSparse.write_keys` when keys are
written to the cache, then :meth:`BlockSparse.attention_begin`, which replaces block table and
lengths in the layer's copy of the metadata (or :meth:`BlockSparse.select_rows`, where attention
reads the kept blocks itself); and at the end :meth:`BlockSparse.clear_sparse_metadata`. Rows that
compute a prompt, and requests that are dense by the policy, keep all blocks.

:class:`PositionalMethod` also takes the calls of document 002, without layer names and engine:
``attention_begin(layer_idx, q, k, v, metadata)``. A caller of this form registers the KV cache once
and passes, for each layer, metadata with the block table and the lengths; the shape of the keys is
read from the cache, representations from its blocks. A row is a request; ``metadata.request_ids``
names it, else its place in the batch.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ucm.config.loading import config_of
from ucm.config.sparse import AlgorithmConfig
from ucm.errors import ConfigError, InvalidInputError
from ucm.sparse.base import (
    CHANGING_HOOKS,
    INVALID_SLOT,
    SparseBatch,
    SparseRow,
    SparseStats,
    UcmSparseBase,
    UcmSparseMetadata,
    UcmSparseRole,
)
from ucm.sparse.kernels import kernels_for
from ucm.sparse.policy import Method, Policy, method_of, policy_of, resolve_auto, settings_of
from ucm.sparse.rep_store import RepStore, WritePlan
from ucm.sparse.retriever import Retriever, Rows, make_retriever
from ucm.sparse.selection import (
    SAMPLE_EVERY,
    Chooser,
    Reduce,
    Selection,
    Step,
    compact_rows,
    with_windows,
)
from ucm.sparse.selector import Geometry
from ucm.sparse.selectors.oracle import Oracle

_log = logging.getLogger("ucm.sparse")


class BlockSparse(UcmSparseBase):
    """A method that chooses blocks. Subclasses name their algorithm; the rest is configuration."""

    algorithm: ClassVar[str] = "Auto"

    def __init__(
        self,
        vllm_config: Any,
        role: Any,
        settings: AlgorithmConfig | Mapping[str, Any] | None = None,
    ) -> None:
        """``vllm_config`` is vLLM's, or the keys of the algorithm; ``settings`` are the keys beside
        it. The order of document 002, ``GSA(role, config)``, works too."""
        if isinstance(vllm_config, UcmSparseRole):
            vllm_config, role = role, vllm_config
        super().__init__(vllm_config, role)
        if settings is None:
            plain = vllm_config is None or isinstance(vllm_config, Mapping | AlgorithmConfig)
            found = vllm_config if plain else config_of(vllm_config).sparse.section(self.algorithm)
            settings = cast("AlgorithmConfig | Mapping[str, Any] | None", found)
        self.model = str(getattr(getattr(vllm_config, "model_config", None), "model", "") or "")
        self.settings = resolve_auto(settings_of(self.algorithm, settings), self.model)
        self.stats = SparseStats()
        #: Requests shorter than this are dense where ``min_tokens`` is not configured: measured.
        self.break_even_tokens = 0
        self._method: Method | None = None
        self._scheduler_policy: Policy | None = None
        self._dense_until: tuple[int, int] | None = None  # for these break-even tokens

    # Scheduler's side
    # ----------------------------------------------------------------------------------------------

    def estimate_num_slots_sparsed(self, request: Any) -> int:
        """Slots of the blocks that a decoding request keeps on the device with offload."""
        if not self.settings.offload or request.num_output_tokens < 1:
            return INVALID_SLOT
        size = int(self._vllm_config.cache_config.block_size)
        tokens = int(request.num_tokens)
        blocks = -(-tokens // size)
        kept = self.policy_of_blocks(size).kept(blocks, tokens)
        return INVALID_SLOT if kept >= blocks else (kept - 1) * size + (tokens - 1) % size + 1

    def policy_of_blocks(self, block_size: int) -> Policy:
        """The policy, on a side that has no layers."""
        if self._scheduler_policy is None:
            self._scheduler_policy = policy_of(self.settings, block_size, self.model)
        return self._scheduler_policy

    def exact_tokens(self, prefill_tokens: int) -> int:
        """Prompts are dense, and so are tokens decoded before a request is long enough for a
        choice. With a subclass's own hooks, which may change more, 0 is exact, unless it overrides
        this."""
        hooks = (getattr(type(self), hook) for hook in CHANGING_HOOKS)
        if not all(hook.__module__.startswith("ucm.sparse.") for hook in hooks):
            return 0
        config = self._vllm_config
        size, most = int(config.cache_config.block_size), int(config.model_config.max_model_len)
        gate = self._break_even
        if self._dense_until is None or self._dense_until[0] != gate:
            self._dense_until = gate, self.policy_of_blocks(size).dense_until(size, most, gate)
        return max(prefill_tokens, self._dense_until[1])

    @property
    def _break_even(self) -> int:
        """Requests with fewer tokens are dense, by measurement."""
        return self.break_even_tokens if self.settings.min_tokens is None else 0

    # Set-up in a worker
    # ----------------------------------------------------------------------------------------------

    def setup(
        self,
        geometry: Geometry,
        layer_names: Sequence[str],
        num_blocks: int,
        *,
        device: str | torch.device = "cpu",
        max_sequences: int = 256,
        key_dtype: torch.dtype = torch.float32,
        spare_blocks: int = 0,
        per_head: bool = False,
        reduce: Reduce | None = None,
    ) -> None:
        """Get ready for keys of this shape, in these layers (in the order of the model), and for
        ``num_blocks`` physical blocks.

        ``max_sequences`` bounds how many run at once; ``spare_blocks`` are rows for the
        representations of offloaded blocks; ``per_head``: attention can read another selection for
        each KV head; ``reduce`` is needed for ``shared_selection`` with several tensor ranks.
        Raises :class:`~ucm.errors.ConfigError` where the settings do not fit.
        """
        numbers = [layer_index(name, place) for place, name in enumerate(layer_names)]
        if len(set(numbers)) < len(numbers):
            _log.warning(
                "some layers have several attentions: settings of layers count attentions, from 0"
            )
            numbers = list(range(len(numbers)))
        self._layers = dict(zip(layer_names, numbers, strict=True))
        count = max(self._layers.values(), default=-1) + 1
        method = method_of(self.settings, geometry, self.model, count)
        policy = method.policy
        if policy.heads == "kv" and not per_head:
            wrong = "heads: kv needs attention that reads a block table for each head"
            raise ConfigError(f"{wrong}; write heads: shared")
        if policy.heads == "kv" and policy.shared_ranks:
            raise ConfigError(
                "heads: kv and shared_selection exclude each other: ranks have different heads"
            )
        own = set(self._layers.values())
        selecting = [layer for layer in policy.selecting_layers(count) if layer in own]
        self._method, self.policy, self.selector = method, policy, method.selector
        self._reduce = reduce
        self.store = RepStore(
            method.selector,
            selecting,
            num_blocks,
            device=device,
            spare=spare_blocks,
            open_blocks=2 * max_sequences,
            key_dtype=key_dtype,
        )
        kernels_for(torch.empty(0, device=device))  # a GPU's are tried now, not in the first step
        self.chooser = Chooser(policy, method.selector, self.store, reduce)
        self.retriever: Retriever = make_retriever(
            policy,
            self.chooser.find,
            self.stats,
            threads=self.settings.retrieval_threads,
            bound_s=self.settings.retrieval_ms / 1000,
        )
        self._probe: RecallProbe | None = None
        if self.settings.measure_recall:
            self._probe = RecallProbe(geometry, selecting, num_blocks, device, key_dtype)
        self._queries: dict[str, dict[int, Tensor]] = {}
        self._sampled: dict[tuple[str, int], set[int]] = {}
        self._rep_rows: dict[str, Tensor] = {}
        self._chosen: dict[int, Selection | None] = {}
        self._steps: dict[tuple[int, ...], Step] = {}
        self._plans: list[tuple[Tensor, WritePlan]] = []
        self._spent_s = 0.0  # of this step, on selection

    def layer_number(self, layer_name: str) -> int:
        """The number of a layer of :meth:`setup` in :attr:`store`."""
        return self._layers[layer_name]

    def writes(self, layer_name: str) -> bool:
        """Whether :meth:`write_keys` is needed for a layer."""
        return self._layers.get(layer_name) in self.store.layers

    def selects(self, layer_name: str) -> bool:
        """Whether rows of a layer may keep fewer blocks than all: it chooses, or reuses a
        choice."""
        layer = self._layers.get(layer_name)
        return layer is not None and layer not in self.policy.dense_layers

    # A step
    # ----------------------------------------------------------------------------------------------

    def bind_sparse_metadata(self, metadata: UcmSparseMetadata | None) -> None:
        """A step begins, with these rows; with None, or a batch without rows, nothing is chosen."""
        super().bind_sparse_metadata(metadata)
        self._forget_step()
        if isinstance(metadata, SparseBatch):
            for request_id in metadata.finished:
                self.request_finished_in_worker(request_id)
            for row in metadata.rows:
                if not row.decodes:
                    self.retriever.forget(row.request_id)
            self.retriever.begin_step()

    def clear_sparse_metadata(self) -> None:
        """The step is over."""
        super().clear_sparse_metadata()
        self._forget_step()

    def _forget_step(self) -> None:
        if self._spent_s:
            self.stats.add(selection_s=self._spent_s)
        self._chosen, self._steps, self._plans, self._spent_s = {}, {}, [], 0.0

    def write_keys(self, layer_name: str, key: Tensor, slot_mapping: Any) -> None:
        """Keys ``[t, h, d]`` of a layer are written to the slots ``slot_mapping [t]`` of the cache
        (negative: padding)."""
        if not self.writes(layer_name):
            return
        began = time.perf_counter()
        layer, plan = self._layers[layer_name], self._write_plan(torch.as_tensor(slot_mapping))
        try:
            self.store.write(layer, key, plan)
        except Exception:  # the plan marked some as ready, which they are not
            self.store.invalidate(plan.blocks)
            raise
        self._spent_s += time.perf_counter() - began
        if self._probe is not None:
            self._probe.write(layer, key, plan)

    def _write_plan(self, slots: Tensor) -> WritePlan:
        """The plan of these slots: made once a step, for the first layer, and used by all."""
        for known, plan in self._plans:
            if known is slots or (known.shape == slots.shape and torch.equal(known, slots)):
                return plan
        self._plans.append((slots, self.store.plan_write(slots.cpu())))
        return self._plans[-1][1]

    def attention_begin(
        self,
        query: Any,
        key: Any,
        value: Any,
        layer_name: str,
        forward_context: Any,
        output: Any = None,
        phase: str | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """Replace block table and lengths in the layer's copy of the metadata by those of the kept
        blocks.

        With latent attention the query is ``decode_ql_nope`` and ``decode_q_pe`` of ``kwargs``, and
        the metadata that of ``metadata.decode``; prompts, which have neither, keep all blocks.
        """
        del phase
        metadata = forward_context.attn_metadata
        metadata = metadata[layer_name] if isinstance(metadata, Mapping) else metadata
        latent = kwargs.get("decode_ql_nope")
        whole = query if latent is None else torch.cat([latent, kwargs["decode_q_pe"]], dim=-1)
        place = metadata if latent is None else metadata.decode
        table = getattr(place, "block_table", None)
        selection = None if table is None else self.select_rows(layer_name, whole, table)
        if selection is not None:
            size = self.selector.geometry.block_size
            found = compact_rows(selection, place.block_table, place.seq_lens, size)
            place.block_table, place.seq_lens = found
        return query, key, value, output

    def select_rows(self, layer_name: str, query: Tensor, block_table: Tensor) -> Selection | None:
        """The blocks that each row of the step keeps in a layer; None: every row keeps all.

        ``query [tokens, heads, d]`` are the queries of the step's rows in order, ``block_table
        [rows, N]`` their physical blocks. With latent attention both hold only the decode rows.
        """
        batch, layer = self._sparse_metadata, self._layers.get(layer_name)
        if not isinstance(batch, SparseBatch) or not batch.rows:
            return None
        if layer is None or layer in self.policy.dense_layers:
            return None
        source = self.policy.reuse_from.get(layer)
        if source is not None:
            return self._chosen.get(source)
        began = time.perf_counter()
        step = self._step(block_table)
        if step.ends[-1] > query.shape[0]:
            raise InvalidInputError(
                "fewer queries than the rows of the step have tokens",
                context={"queries": query.shape[0], "tokens": step.ends[-1], "layer": layer_name},
            )
        self._chosen[layer] = self._select(layer, step, query, block_table)
        self._spent_s += time.perf_counter() - began
        return self._chosen[layer]

    def request_finished_in_worker(self, request_id: str) -> None:
        """Forget a request."""
        self.retriever.forget(request_id)
        self._queries.pop(request_id, None)
        for layer in self.store.layers:
            self._sampled.pop((request_id, layer), None)
        rows = self._rep_rows.pop(request_id, None)
        if rows is not None:
            self.store.release([int(row) for row in rows if row >= self.store.num_blocks])

    def set_rep_rows(self, request_id: str, rows: Sequence[int]) -> None:
        """Set the rows of :attr:`store` that hold the representations of a request with offloaded
        blocks, by logical block (:meth:`~ucm.sparse.rep_store.RepStore.adopt`). Blocks beyond them
        are found by the block table."""
        self._rep_rows[request_id] = torch.tensor(list(rows), dtype=torch.int64)

    def close(self) -> None:
        """Stop the threads."""
        if self._method is not None:
            self.retriever.close()

    # Choosing
    # ----------------------------------------------------------------------------------------------

    def _step(self, block_table: Tensor) -> Step:
        """The facts of the step for every layer that reads this table."""
        assert isinstance(self._sparse_metadata, SparseBatch)
        key = (block_table.data_ptr(), *block_table.shape)
        if key not in self._steps:
            self._steps[key] = Step(
                self._sparse_metadata,
                block_table,
                self.policy,
                self.store,
                self._rep_rows,
                self._break_even,
                self._agree if self.policy.shared_ranks and self._reduce is not None else None,
            )
            self.stats.add(rows_unready=self._steps[key].unready)
        return self._steps[key]

    def _agree(self, ready: list[bool]) -> list[bool]:
        """Which rows have their representations on every rank: ranks that add up scores choose for
        the same rows."""
        assert self._reduce is not None
        missing = self._reduce(torch.tensor([not each for each in ready], dtype=torch.int64), "max")
        return [not each for each in missing.tolist()]

    def _select(
        self, layer: int, step: Step, query: Tensor, block_table: Tensor
    ) -> Selection | None:
        if self.selector.queries > 1:
            self._keep_queries(layer, step, query)
        if not step.sparse:
            return None
        selection = None
        if self.policy.stride == 1 and self.policy.lag == 0:
            selection = self.chooser.now(layer, step, self._last_queries(step, query))
        if selection is not None:
            self._sample_turnover(layer, step, selection)
            kept, dense = step.kept, step.kept == step.seen
        else:
            selection = self._retrieve(layer, step, query)
            kept, dense = float(selection.counts.sum()) / selection.counts.shape[1], selection.dense
        self.stats.add(blocks_kept=kept, blocks_seen=step.seen, rows_sparse=len(step.sparse))
        if self._probe is not None:
            self._measure_recall(self._probe, layer, step, query, block_table, selection)
        return None if dense else selection

    def _retrieve(self, layer: int, step: Step, query: Tensor) -> Selection:
        """By the retriever: choices that are used for several steps, or later than their query."""
        choices = self.retriever.step(layer, self._rows(layer, step, query))
        heads = self.selector.geometry.kv_heads if self.policy.heads == "kv" else 1
        kept = []
        for n, choice in zip(step.blocks, choices, strict=True):
            middle = [] if choice is None else choice.middle
            at = 0 if choice is None else choice.blocks
            chosen = [with_windows(self.policy, ids, at, n) for ids in middle]
            kept.append(chosen or [torch.arange(n)] * heads)
        return Selection.of(kept, step.blocks, step.places)

    def _last_queries(self, step: Step, query: Tensor) -> Tensor:
        return query if len(step.sparse) == query.shape[0] else query.index_select(0, step.last)

    def _rows(self, layer: int, step: Step, query: Tensor) -> Rows:
        """The rows that choose, with their latest queries."""
        rows, wanted = [step.rows[i] for i in step.sparse], self.selector.queries
        if wanted == 1:
            queries, counts = self._last_queries(step, query)[:, None], [1] * len(rows)
        else:
            kept = [self._queries[row.request_id][layer] for row in rows]
            pad = torch.nn.functional.pad
            queries = torch.stack([pad(q, (0, 0, 0, 0, wanted - len(q), 0)) for q in kept])
            counts = [len(q) for q in kept]
        names, steps = [row.request_id for row in rows], [row.step for row in rows]
        return Rows(names, steps, step.blocks, queries, counts, step.candidates.reps)

    def _keep_queries(self, layer: int, step: Step, query: Tensor) -> None:
        """Keep the latest queries of each row, for an algorithm that scores with several."""
        wanted = self.selector.queries
        for row, end in zip(step.rows, step.ends, strict=True):
            kept = self._queries.setdefault(row.request_id, {})
            new = query[end - min(row.queries, wanted) : end]
            kept[layer] = torch.cat([kept.get(layer, new[:0]), new])[-wanted:]

    # Measuring
    # ----------------------------------------------------------------------------------------------

    def _sample_turnover(self, layer: int, step: Step, selection: Selection) -> None:
        """The share of new blocks in a choice, for two steps in every
        :data:`~ucm.sparse.selection.SAMPLE_EVERY`; the retriever counts all of its choices."""
        for number in step.sampled:
            row = step.rows[step.sparse[number]]
            key = (row.request_id, layer)
            chosen = set(selection.kept(number).tolist()[self.policy.init : -self.policy.local])
            before = self._sampled.pop(key, None)
            if row.step % SAMPLE_EVERY == 0:
                self._sampled[key] = chosen
            elif before is not None:
                self.stats.add(blocks_new=len(chosen - before), blocks_chosen=len(chosen))

    def _measure_recall(
        self,
        probe: RecallProbe,
        layer: int,
        step: Step,
        query: Tensor,
        block_table: Tensor,
        selection: Selection,
    ) -> None:
        heads = selection.ids.shape[1]
        for number, i in enumerate(step.sparse):
            own, last = block_table[i, : step.blocks[number]], query[step.ends[i] - 1]
            seen = probe.mass(layer, last, own, step.rows[i].tokens)
            held = 0.0
            for head in range(heads):
                of = seen[head] if heads > 1 else seen
                held += float(of[..., selection.kept(number, head)].sum())
            self.stats.add(mass_seen=float(seen.sum()), mass_kept=held)


class RecallProbe:
    """All keys of the layers that select, by physical block."""

    def __init__(
        self,
        geometry: Geometry,
        layers: Sequence[int],
        num_blocks: int,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        self._oracle = Oracle(geometry)
        shape = (num_blocks, geometry.block_size, geometry.kv_heads, geometry.head_dim)
        self._keys = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in layers}

    def write(self, layer: int, keys: Tensor, plan: WritePlan) -> None:
        """Keep the keys ``[t, h, d]`` that a step writes."""
        kept, new = self._keys[layer], keys[plan.tokens.to(keys.device)]
        kept[plan.blocks.to(kept.device), plan.places.to(kept.device)] = new.to(kept)

    def mass(self, layer: int, query: Tensor, table: Tensor, tokens: int) -> Tensor:
        """Attention mass ``[h, n]`` of each block of ``table [n]`` for one query ``[heads, d]``
        over ``tokens`` tokens."""
        keys = self._keys[layer].index_select(0, table.long())
        return self._oracle.mass(query[None], keys, tokens)


def layer_index(name: str, place: int) -> int:
    """The number of a layer by its name (``model.layers.12.self_attn.attn``), else its place."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else place


class PositionalMethod(BlockSparse):
    """A host that takes both forms: with a layer's name (an engine's), and with its number."""

    _caches: tuple[Tensor, ...] = ()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The KV by layer name in the order of the model: ``[2, blocks, b, h, d]``, or keys alone
        in ``[blocks, b, h, d]``. Ignored after :meth:`setup`."""
        super().register_kv_caches(kv_caches)
        if self._method is not None or not kv_caches:
            return
        keys = [cache[0] if cache.dim() == 5 else cache for cache in kv_caches.values()]
        if any(cache.dim() != 4 or cache.shape != keys[0].shape for cache in keys):
            shapes = sorted({tuple(cache.shape) for cache in kv_caches.values()})
            raise InvalidInputError(
                "the KV of each layer is [2, blocks, tokens, heads, size] or [blocks, tokens,"
                " heads, size], the same for all",
                context={"shapes": shapes},
            )
        blocks, size, heads, dim = keys[0].shape
        self._caches = tuple(keys)
        self._names = list(kv_caches)
        self._encoded: list[set[int]] = [set() for _ in keys]
        geometry = Geometry(block_size=size, kv_heads=heads, head_dim=dim)
        names = [f"layers.{place}" for place in range(len(keys))]
        self.setup(geometry, names, blocks, device=keys[0].device)

    def attention_begin(
        self,
        query: Any,
        key: Any,
        value: Any,
        layer_name: Any,
        forward_context: Any,
        output: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """With a layer's number in the first place: ``(layer_idx, query, key, value, metadata)``.
        Block table and lengths of the metadata, the caller's own copy, are replaced; returns query,
        key, value and None."""
        if not isinstance(query, int):
            given = (query, key, value, layer_name, forward_context, output)
            return super().attention_begin(*given, *args, **kwargs)
        layer, query, key, value, metadata = query, key, value, layer_name, forward_context
        self._check(layer)
        lens = [int(length) for length in metadata.seq_lens]
        places = [f"row {place}" for place in range(len(lens))]
        if self._sparse_metadata is None or layer == 0:
            self._begin(getattr(metadata, "request_ids", None) or places, lens, query)
        self._encode(layer, metadata.block_table, lens)
        context = SimpleNamespace(attn_metadata=metadata)
        return super().attention_begin(query, key, value, f"layers.{layer}", context)

    def attention_finished(self, *args: Any, **kwargs: Any) -> Any:
        """``attention_finished(layer_idx, output)`` returns the output; else as in the base
        class."""
        if len(args) == 2 and isinstance(args[0], int):
            return args[1]
        return super().attention_finished(*args, **kwargs)

    def _check(self, layer: int) -> None:
        if not self._caches:
            raise InvalidInputError("call register_kv_caches before attention_begin")
        if not 0 <= layer < len(self._caches):
            raise InvalidInputError(f"there are layers 0 to {len(self._caches) - 1}, got {layer}")

    def _begin(self, names: list[str], lens: list[int], query: Tensor) -> None:
        """A step begins: every row decodes one token."""
        if query.shape[0] != len(lens):
            raise InvalidInputError(
                "this form is for decoding: one query for each row",
                context={"queries": query.shape[0], "rows": len(lens)},
            )
        self._first = getattr(self, "_first", {})
        for name, length in zip(names, lens, strict=True):
            if length <= self._first.get(name, length + 1):  # another request of that name
                self.request_finished_in_worker(name)
                self._first[name] = length - 1
        every = zip(names, lens, strict=True)
        rows = [SparseRow(name, n, self._first[name], self._first[name]) for name, n in every]
        self.bind_sparse_metadata(SparseBatch(rows))

    def _encode(self, layer: int, block_table: Tensor, lens: list[int]) -> None:
        """Representations of full blocks without one. Blocks in use are assumed to be unchanged."""
        size, known = self.selector.geometry.block_size, self._encoded[layer]
        pairs = zip(block_table, lens, strict=True)
        used = {int(block) for row, length in pairs for block in row[: length // size]}
        known &= used
        new = sorted(used - known)
        if new and layer in self.store.layers:
            self.store.update(layer, self._caches[layer][torch.tensor(new)], new)
        if new:
            self.store.mark_ready(new)
        known.update(new)


@cache
def method_for(algorithm: str) -> type[PositionalMethod]:
    """The method of an algorithm without code of its own."""
    about = f"Blocks chosen by {algorithm}."
    given = {"algorithm": algorithm, "__module__": __name__, "__doc__": about}
    return type(algorithm, (PositionalMethod,), given)
