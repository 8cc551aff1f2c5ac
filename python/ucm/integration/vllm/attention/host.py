"""The method of sparse attention inside a worker: which hooks are called, where, and with what.

The connector's worker side makes one host per process, and calls it every step before the model
runs (:meth:`SparseHost.begin_step`) and after it (:meth:`SparseHost.end_step`); the implementations
of :mod:`.backends` call it in each layer. Between the two the method may change the inputs of
attention: the query, keys, values, the output, and its copy of the metadata. A hook that raises
changes nothing, and is logged: the layer is computed as without it.

Hooks around decoder layers and their feed-forward part are torch's own hooks of modules
(:class:`EagerHooks`), in eager mode only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ucm.integration.vllm.attention.offload import Offload
from ucm.integration.vllm.attention.plan import SparsePlan, by_last_block, in_order
from ucm.integration.vllm.attention.tables import (
    HeadRows,
    Rewriter,
    attend,
    copy_of,
    cpu_plan,
    metadata_of,
    reads_pages_of,
)
from ucm.integration.vllm.connector.guard import logger, throttle
from ucm.sparse.base import EAGER_HOOKS, SparseBatch, SparseRow, UcmSparseBase
from ucm.sparse.method import BlockSparse
from ucm.sparse.selection import Selection, compact, compact_rows

_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+$")
#: Names of the norm before a layer's feed-forward part, which takes and returns hidden states and
#: residual.
_BEFORE_FFN = ("post_attention_layernorm", "pre_feedforward_layernorm", "ln_2")

T = TypeVar("T")

_active: SparseHost | None = None


def active_host() -> SparseHost | None:
    """The host of this process; None where nothing is selected."""
    return _active


def set_active_host(host: SparseHost | None) -> None:
    """Make ``host`` the one that attention calls."""
    global _active
    _active = host


class _Context:
    """vLLM's forward context with the copy of one layer's metadata in it."""

    def __init__(self, real: Any, layer_name: str, metadata: Any) -> None:
        self._real = real
        self.attn_metadata = {layer_name: metadata}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@dataclass(slots=True)
class Written:
    """Keys that were written to the cache of a layer in this step."""

    name: str
    slots: Tensor  # of all tokens of the step
    keys: tuple[Tensor, ...] = ()  # latent ones, and their rotary part


@dataclass(slots=True)
class LayerCall:
    """One computation of a layer."""

    name: str
    layer: Any
    phase: str | None
    original: Any
    made: Any  # the copy of the metadata
    context: _Context
    selection: Selection | None = None  # of its rows, where our kernel may compute them
    placed: bool = False  # blocks of its rows are elsewhere than in the original


class SparseHost:
    """Calls the hooks of one method."""

    def __init__(self, method: UcmSparseBase, layers: Mapping[str, Any]) -> None:
        """``layers``: vLLM's attention layers of the one served KV group, by name."""
        self.method = method
        self.layers = self._layers = dict(layers)
        self._names = {id(layer.impl): name for name, layer in self._layers.items()}
        self._rewriter = Rewriter()
        #: Places of blocks that are not where vLLM put them.
        self.offload: Offload | None = None
        self._rows: Sequence[SparseRow | None] = ()
        self._context: Any = None
        self._phase: str | None = None
        self._written: Written | None = None  # in the layer that is computed now
        self.blocks = method if isinstance(method, BlockSparse) else None
        #: Whether the hook before attention is a user's: it may change its arguments, so it gets
        #: copies, and keys are written again after it.
        self.changes = _own(method, "attention_begin")
        self._observes = _own(method, "attention_finished")
        self.hooked = self.changes or self._observes
        #: Whether rows that choose are computed by ucm's kernel (:func:`~.tables.attend`). A hook
        #: after attention that only reads gets the metadata of vLLM's kernel.
        blocks = self.blocks
        wanted = blocks is not None and blocks.settings.attention_kernel == "auto"
        self.uses_own_kernel = wanted and not self.hooked and reads_pages_of(self._layers)

    # A step
    # ----------------------------------------------------------------------------------------------

    def begin_step(self, plan: SparsePlan, context: Any) -> None:
        """The model is about to run, with vLLM's forward context of the step; an empty step has no
        metadata in it."""
        self._rewriter.begin_step()
        self._written, self._rows = None, ()
        if self.offload is not None:
            self.offload.begin_step(plan.offloaded, [*plan.given_back, *plan.finished])
        if self.blocks is not None:  # after blocks that leave were put aside
            self.blocks.store.invalidate(plan.given)
        for request_id in plan.finished:
            self._call("request_finished_in_worker", None, request_id)
        batch = self._batch(plan, context)
        if self.blocks is not None:
            self.blocks.break_even_tokens = plan.break_even
        self._call("bind_sparse_metadata", None, batch)
        self._call("execute_begin", None, _summary(plan))
        metadata = getattr(context, "attn_metadata", None)
        self._context = context if isinstance(metadata, Mapping) else None
        decodes = [row.decodes for row in plan.rows]
        self._phase = "decode" if all(decodes) else None if any(decodes) else "prefill"

    def end_step(self) -> None:
        """The model has run."""
        if self._call("execute_finished", None, None) is not None:
            text = "execute_finished returned logits indices, which vLLM has no use for: ignored"
            throttle.warning("execute_finished", text)
        self._call("clear_sparse_metadata", None)
        self._context = self._written = None

    def _batch(self, plan: SparsePlan, context: Any) -> Any:
        """The metadata for the method: its own, or the rows in the order of the batch."""
        batch = plan.metadata if plan.metadata is not None else SparseBatch()
        if not isinstance(batch, SparseBatch):
            return batch
        batch.finished, batch.rows = plan.finished, []
        metadata = getattr(context, "attn_metadata", None) or {}
        first = next((metadata[name] for name in self._layers if name in metadata), None)
        if first is not None and plan.rows:
            rows = in_order(plan, first)
            if self.offload is not None:  # blocks that left are not read, in any row
                self._rows = by_last_block(plan, first)
            if rows is None:
                text = "the rows of a step could not be assigned to requests: it is dense"
                throttle.warning("rows", text)
            batch.rows = rows or []
        return batch

    # Layers
    # ----------------------------------------------------------------------------------------------

    def name_of(self, impl: Any) -> str | None:
        """Name of the layer of an implementation."""
        return self._names.get(id(impl))

    def keys_written(self, name: str, key: Tensor, slot_mapping: Tensor) -> None:
        """Keys ``[t, h, d]`` were written to the cache of a layer."""
        if self._context is None or name not in self._layers:
            return
        self._written = Written(name, slot_mapping)
        if self.blocks is not None:
            self._call("write_keys", None, name, key[: slot_mapping.shape[0]], slot_mapping)

    def latent_keys_written(
        self, name: str, latent: Tensor, rope: Tensor, slot_mapping: Tensor
    ) -> None:
        """The same with latent attention, whose key is ``latent [t, rank]`` and ``rope [t, (1,)
        size]``."""
        if self._context is None:
            return
        tokens = slot_mapping.shape[0]
        latent, rope = latent[:tokens], rope[:tokens]
        self._written = Written(name, slot_mapping, (latent, rope))
        if self.blocks is not None:
            key = torch.cat([latent, rope.reshape(tokens, -1)], dim=-1)
            self._call("write_keys", None, name, key[:, None], slot_mapping)

    def to_rewrite(self, call: LayerCall) -> Written | None:
        """What is written again after a user's hook before attention, which may have changed keys
        and values: all that was written, in place, so that representations are made again."""
        written = self._written
        ours = self.changes and written is not None and written.name == call.name
        return written if ours else None

    def begin_layer(
        self, impl: Any, name: str, metadata: Any, phase: str | None = None
    ) -> LayerCall | None:
        """The arguments of a layer's hooks; None: the layer is computed by vLLM alone."""
        del impl
        if metadata is None or name not in self._layers:
            return None
        if self._context is None:
            if self.offload is not None and self.offload.holds_any:
                raise RuntimeError(
                    "sparse attention: blocks of requests have left the device, and this step's"
                    " plan did not arrive; a dense layer would read blocks of other requests"
                )
            return None
        selects = self.blocks is not None and self.blocks.selects(name)
        if not (selects or self.hooked):
            return None
        phase = phase or self._phase
        made = copy_of(metadata, phase, deep=self.changes)
        context = _Context(self._context, name, made)
        return LayerCall(name, self._layers[name], phase, metadata, made, context)

    def attention_begin(
        self, call: LayerCall, query: Tensor, key: Any, value: Any, output: Tensor
    ) -> tuple[Tensor, Any, Any, Tensor]:
        """The hook before attention; its results are used."""
        given = (query, key, value, output)
        if self.offload is not None and self.offload.has_any(self._rows):
            self._choose(call, query, call.made)
            return given
        if self.uses_own_kernel and call.original.dynamic_causal is None:
            table = call.original.block_table
            call.selection = self._call("select_rows", None, call.name, query, table)
            return given
        return self._begin(call, given)

    def attend_by_own_kernel(
        self,
        call: LayerCall,
        query: Tensor,
        output: Tensor,
        compute: Callable[[Tensor, Any, Tensor], Any],
    ) -> bool:
        """Attention of a layer where some rows chose, by ucm's kernel and for the other rows by
        vLLM's, ``compute(query, metadata, output)``. False: the layer is still to be computed, from
        the copy of its metadata."""
        selection, made = call.selection, call.made
        if selection is None:
            return False
        assert self.blocks is not None
        size = self.blocks.selector.geometry.block_size
        # the end of a stored prompt has several queries
        if int(made.query_start_loc.diff().index_select(0, selection.rows).max()) > 1:
            self._compact(call, selection, size)
            return False
        try:
            table, lens = made.block_table, made.seq_lens
            if call.placed:
                picked = [whole.index_select(0, selection.rows) for whole in (table, lens)]
                tables = picked[0], picked[1]
            else:
                tables = compact(selection, table, lens, size)
            attend(call.layer, selection.rows, tables, made, query, output, compute, self._rewriter)
        except Exception as error:
            text = "sparse attention: ucm's kernel failed, so vLLM's computes from here on: %r"
            logger.warning(text, error)
            self.uses_own_kernel = False
            self._compact(call, selection, size)
            return False
        return True

    @staticmethod
    def _compact(call: LayerCall, selection: Selection, size: int) -> None:
        """Put the selection into the copy of the metadata, unless it is there."""
        if not call.placed:
            made = call.made
            found = compact_rows(selection, made.block_table, made.seq_lens, size)
            made.block_table, made.seq_lens = found

    def _choose(self, call: LayerCall, query: Tensor, part: Any) -> None:
        """As the method does by itself, with blocks that have left at their present places. After
        any failure here the layer must not be dense: those blocks are not where vLLM's table
        says."""
        assert self.blocks is not None
        assert self.offload is not None
        call.placed = True
        table, lens = part.block_table, part.seq_lens
        selection = None
        try:
            selection = self.blocks.select_rows(call.name, query, table)
        except Exception as error:
            text = "blocks could not be chosen; resident ones are attended to: %r"
            throttle.warning("choose", text, error)
        if selection is None:
            part.block_table, part.seq_lens = table.clone(), lens.clone()
        else:
            size = self.blocks.selector.geometry.block_size
            part.block_table, part.seq_lens = compact_rows(selection, table, lens, size)
        if self.uses_own_kernel:
            call.selection = selection
        layer = self.blocks.layer_number(call.name)
        self.offload.place(layer, self._rows, selection, table, part.block_table, part.seq_lens)

    def latent_prompt_begin(
        self, call: LayerCall, query: Tensor, latent: Tensor, rope: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same for rows of prompts with latent attention, where no blocks are chosen."""
        given, codes = (query, latent, rope, output), self._codes(call.name)
        if not self.changes:
            return given
        return self._begin(call, given, decode_ql_nope=None, decode_q_pe=None, k_hash=codes)

    def latent_attention_begin(self, call: LayerCall, query: Any) -> tuple[Any, Any, Any, Any]:
        """The same for rows of one token with latent attention. ``query`` is that over the latent,
        in two parts or joined. A returned output of None is made by the kernel."""
        rank = query[0].shape[-1] if isinstance(query, tuple) else call.layer.kv_lora_rank
        if isinstance(query, tuple) and self.hooked:
            query = torch.cat(query, dim=-1)
        # Of a joined query the parts are views, so a hook may write into either.
        latent, rope = query if isinstance(query, tuple) else (query[..., :rank], query[..., rank:])
        key, value = self._keys_of(call.name, latent.shape[0])
        output = latent.new_empty(latent.shape) if self.changes else None
        given = (query, key, value, output)
        if self.offload is not None and self.offload.has_any(self._rows):
            self._choose(call, torch.cat([latent, rope], dim=-1), call.made.decode)
            return given
        codes = self._codes(call.name)
        return self._begin(call, given, decode_ql_nope=latent, decode_q_pe=rope, k_hash=codes)

    def _keys_of(self, name: str, tokens: int) -> tuple[Tensor | None, Tensor | None]:
        """Latent and rotary part of the keys of the first tokens of the step."""
        if self._written is None or self._written.name != name:
            return None, None
        latent, rope = self._written.keys
        return latent[:tokens], rope[:tokens]

    def _codes(self, name: str) -> Tensor | None:
        """Codes of the keys of a layer, where the method keeps some."""
        if self.blocks is None or not self.blocks.writes(name):
            return None
        kept = self.blocks.store.all(self.blocks.layer_number(name))
        return kept if kept.dtype == torch.uint8 else None

    def compute(self, impl: Any, call: LayerCall, run: Callable[[Any], T]) -> T:
        """Attention with the hook's copy of the metadata."""
        metadata = call.original
        try:
            metadata = self._rewriter.complete(
                impl, call.layer, call.made, call.original, call.phase, deep=self.changes
            )
        except Exception as error:
            if call.placed:  # the original names blocks of other requests by now
                raise
            text = "changed metadata could not be used, a layer is dense: %r"
            throttle.warning("metadata", text, error)
        return run(metadata)

    def heads_chose_apart(self, call: LayerCall) -> bool:
        """Whether the copy of the metadata has a block table for each KV head."""
        table, blocks = call.made.block_table, self.blocks
        per_head = blocks is not None and blocks.policy.heads == "kv"
        return per_head and isinstance(table, Tensor) and table.dim() == 3

    def metadata_of_heads(self, impl: Any, call: LayerCall, rows: HeadRows) -> Any:
        """The metadata of rows that are split by KV head."""
        group = impl.num_heads // rows.heads
        return metadata_of(
            call.made, rows, lambda made: cpu_plan(impl, call.layer, made, made.seq_lens, group, 1)
        )

    def attention_finished(
        self, call: LayerCall, query: Any, key: Any, value: Any, output: Any
    ) -> None:
        """The hook after attention."""
        if self._observes:
            arguments = (query, key, value, output, call.name, call.context, call.phase)
            self._call("attention_finished", None, *arguments)

    # Hooks
    # ----------------------------------------------------------------------------------------------

    def _begin(
        self, call: LayerCall, given: tuple[Any, Any, Any, Any], **kwargs: Any
    ) -> tuple[Any, Any, Any, Any]:
        """The result of the hook before attention; where it cannot be used, its arguments, with the
        metadata as before."""
        query, key, value, output = given
        arguments, failed = (
            (query, key, value, call.name, call.context, output, call.phase),
            object(),
        )
        found = self._call("attention_begin", failed, *arguments, **kwargs)
        if found is not failed and fits(found, given):
            query, key, value, output = found
            return query, key, value, output
        if found is not failed:
            text = (
                "attention_begin of %s did not return query, key, value and output in the shapes"
                " that it was given; it changes nothing"
            )
            throttle.warning("result attention_begin", text, type(self.method).__name__)
        call.made = copy_of(call.original, call.phase, deep=self.changes)
        return given

    def _call(self, hook: str, default: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self.method, hook)(*args, **kwargs)
        except Exception as error:
            kind = type(self.method).__name__
            throttle.warning(f"hook {hook}", "%s of %s failed: %r", hook, kind, error)
            return default

    def close(self) -> None:
        """The engine ends."""
        if active_host() is self:
            set_active_host(None)
        self._call("close", None)


def _own(method: UcmSparseBase, hook: str) -> bool:
    """Whether a hook is a user's, not one of ours."""
    module = getattr(type(method), hook).__module__
    return method.overrides(hook) and not module.startswith("ucm.sparse.")


def _summary(plan: SparsePlan) -> Any:
    """The argument of ``execute_begin``: the part of vLLM's SchedulerOutput that a worker needs."""
    scheduled = {row.request_id: row.queries for row in plan.rows}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=set(plan.finished),
    )


def served_layers(vllm_config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Of the layers of a KV cache group, those in which blocks can be left out: decoder layers that
    see all of their context and weigh a key by its value, not by its place in the table."""
    found = {}
    for name in names:
        layer = vllm_config.compilation_config.static_forward_context.get(name)
        impl = getattr(layer, "impl", None)
        shares = getattr(layer, "kv_sharing_target_layer_name", None) is not None
        if layer is None or impl is None or shares or not _attends_backwards(impl):
            continue
        names = "sliding_window", "attention_chunk_size"
        whole = all(getattr(layer, each, None) is None for each in names)
        if whole and getattr(impl, "alibi_slopes", None) is None:
            found[name] = layer
    return found


def _attends_backwards(impl: Any) -> bool:
    return str(getattr(impl, "attn_type", "decoder")).rsplit(".", 1)[-1].lower() == "decoder"


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers of a model, in order."""
    return [module for name, module in model.named_modules() if _LAYER.search(name)]


class EagerHooks:
    """The hooks of one method in one model."""

    def __init__(self, method: UcmSparseBase, *, eager: bool) -> None:
        """``eager``: whether the model is run by Python, layer by layer."""
        self._method = method
        self._handles: list[RemovableHandle] = []
        wanted = [hook for hook in EAGER_HOOKS if method.overrides(hook)]
        if not wanted:
            return
        kind, names = type(method).__name__, ", ".join(wanted)
        if not eager:
            logger.warning(
                "sparse attention: %s of %s are called in eager mode only, and this engine compiles"
                " its model: none is called (--enforce-eager has them called)",
                names,
                kind,
            )
            return
        logger.info("sparse attention: %s of %s are called: eager mode", names, kind)
        self._first = torch.nn.modules.module.register_module_forward_pre_hook(self._found)
        self._handles.append(self._first)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _found(self, model: torch.nn.Module, _args: Any) -> None:
        """The first module of a step: the model itself."""
        self._first.remove()
        self._handles.remove(self._first)
        layers = decoder_layers(model)
        for layer in layers:
            self._hang(layer)
        if not layers:
            text = "sparse attention: %s has no decoder layers that can be hooked"
            logger.warning(text, type(model).__name__)

    def _hang(self, layer: torch.nn.Module) -> None:
        method, handles = self._method, self._handles
        if method.overrides("layer_begin"):
            begin = self._layer_begin
            handles.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
        if method.overrides("ffn_finished") or method.overrides("layer_finished"):
            finished = self._layer_finished
            handles.append(layer.register_forward_hook(finished, with_kwargs=True))
        norm = next((getattr(layer, name) for name in _BEFORE_FFN if hasattr(layer, name)), None)
        if method.overrides("ffn_begin") and norm is not None:
            handles.append(norm.register_forward_hook(self._ffn_begin))

    def _layer_begin(self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("positions", "hidden_states", "residual")
        given = dict(zip(names, args, strict=False))
        given |= {name: kwargs[name] for name in names if name in kwargs}
        if len(given) != len(names):
            return None
        found = dict(zip(names, self._call("layer_begin", *given.values()), strict=True))
        rest = {name: value for name, value in kwargs.items() if name not in names}
        placed = tuple(found.pop(name) for name in names[: len(args)])
        return placed + args[len(names) :], rest | found

    def _layer_finished(
        self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not (isinstance(output, tuple) and len(output) == 2):
            return None
        positions = args[0] if args else kwargs.get("positions")
        # The feed-forward part is the last of a layer: its output is that of the layer.
        hidden, residual = self._call("ffn_finished", *output)
        _, hidden, residual = self._call("layer_finished", positions, hidden, residual)
        return hidden, residual

    def _ffn_begin(self, _norm: Any, _args: Any, output: Any) -> Any:
        pair = isinstance(output, tuple) and len(output) == 2
        return self._call("ffn_begin", *output) if pair else None

    def _call(self, hook: str, *given: Any) -> tuple[Any, ...]:
        """The results of a hook; its arguments if it raises, or their number is wrong."""
        method = type(self._method).__name__
        try:
            found = getattr(self._method, hook)(*given)
        except Exception as error:
            throttle.warning(f"hook {hook}", "%s of %s failed: %r", hook, method, error)
            return given
        if not fits(found, given):
            text = "%s of %s did not return %d tensors as it was given; its result is not used"
            throttle.warning(f"result {hook}", text, hook, method, len(given))
            return given
        return tuple(found)


def fits(found: Any, given: Sequence[Any]) -> bool:
    """Whether a hook returned as many values as it was given, and tensors of the same shape and
    kind for tensors."""
    if not isinstance(found, tuple | list) or len(found) != len(given):
        return False
    return all(map(_alike, found, given))


def _alike(found: Any, given: Any) -> bool:
    if found is given:
        return True
    if not isinstance(given, Tensor):
        return found is None or isinstance(found, Tensor)
    if not isinstance(found, Tensor):
        return False
    return (found.shape, found.dtype, found.device) == (given.shape, given.dtype, given.device)
