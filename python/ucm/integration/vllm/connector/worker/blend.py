"""Blend in the worker side: chunks of other prompts become the KV of a request, in its own blocks.

The load has brought the records of the chunks into blocks of the request, one after the other. In
the step that first runs the request, before the model, :meth:`BlendWorker.run` brings every key and
value to its slot, turned to its position; finds which tokens of the chunks matter; and computes
those, and all tokens between the chunks, by the model's own layers. Each layer is called as the
model calls it, with attention metadata from vLLM's builder in which tokens that follow each other
are one row: each token sees exactly the tokens before it.

Whatever fails, all tokens behind the exact prefix are computed in place, so no token is wrong.
Ranks that compute together agree on this before the first layer. If a layer fails where other ranks
wait in it, or if computing all tokens fails too, the error ends the engine: vLLM counts the tokens
as computed. Blocks of the exact prefix are never written: other requests share them.

Only models whose layers are known to be called like this are served (:func:`parts_of`): others
scale or shift what goes into their layers, and would be computed wrongly without an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ucm.errors import InvalidInputError, UnsupportedError
from ucm.integration.vllm.attention.backends import AsksApart, OwnAttention
from ucm.integration.vllm.attention.host import decoder_layers, served_layers
from ucm.integration.vllm.attention.pages import TokenPages, is_packed
from ucm.integration.vllm.attention.setup import ask_for_tiles
from ucm.integration.vllm.compat.block_size import common_block_size
from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.identity.engine_identity import layer_specs
from ucm.integration.vllm.connector.identity.weights import models_with
from ucm.integration.vllm.connector.metadata import Blend, Blended
from ucm.sparse.blend.chunks import Hit, check_hits
from ucm.sparse.blend.rotation import Rotation
from ucm.sparse.blend.tokens import HKVDCalculator, Question, Total, choose, positions_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ucm.config.sparse import BlendConfig

_MODELS = "vllm.model_executor.models."
#: Modules of vLLM whose model passes a token's embedding to the first layer, and calls each layer
#: with positions, hidden states and residual; whose attention rotates keys by ``rotary_emb``, and
#: nothing else depends on the position.
KNOWN = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral")
#: Tokens of a layer that are turned and written at once.
_SLICE = 4096


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer of the model, and its attention."""

    module: torch.nn.Module
    attention: Any
    rotation: Rotation


@dataclass(frozen=True, slots=True)
class Parts:
    """What computes the tokens of a model."""

    embed: Callable[[Tensor], Tensor]
    layers: list[_Layer]
    pages: TokenPages
    builder: Any  # vLLM's, of attention metadata
    block_tokens: int
    device: torch.device


def parts_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, caches: Mapping[str, Tensor]
) -> Parts:
    """The parts of the model of this process, whose KV lies in ``caches``. Raises
    :class:`~ucm.errors.UnsupportedError` for a model or an engine whose tokens could be computed
    wrongly."""
    group = kv_cache_config.kv_cache_groups[0]
    specs = layer_specs(group.kv_cache_spec)
    attention = served_layers(vllm_config, group.layer_names)
    _refuse(vllm_config, specs, attention.values())
    if len(attention) < len(group.layer_names):
        raise UnsupportedError("some layers of this model do not attend to all of their context")
    first = next(iter(attention.values()))
    backend, spec = first.get_attn_backend(), specs[0]
    cache = caches[group.layer_names[0]]
    if not issubclass(backend.get_impl_cls(), AsksApart):
        raise UnsupportedError(f"this engine runs the attention backend {backend.get_name()}")
    if (size := common_block_size(spec.block_size, backend, spec)) != spec.block_size:
        raise UnsupportedError(
            f"this backend computes with blocks of {size} tokens; write --block-size {size}"
        )
    inner, modules = _modules_of(list(attention.values()))
    builder = backend.get_builder_cls()(spec, list(attention), vllm_config, cache.device)
    rotations: dict[int, Rotation] = {}
    layers = [
        _layer_of(module, attention, rotations, vllm_config, cache.device) for module in modules
    ]
    if sorted(layer.attention.layer_name for layer in layers) != sorted(attention):
        raise UnsupportedError("some layers of this model have no attention, or several")
    if is_packed(backend.get_name()):
        ask_for_tiles()
    pages = TokenPages(first, backend.get_name(), cache)
    size = int(spec.block_size)
    return Parts(inner.embed_input_ids, layers, pages, builder, size, cache.device)


def _refuse(vllm_config: VllmConfig, specs: Sequence[Any], layers: Iterable[Any]) -> None:
    """Raises :class:`~ucm.errors.UnsupportedError` for settings and layers that compute otherwise.
    The scheduler side knows of others."""
    model, problem = vllm_config.model_config, ""
    impls = [layer.impl for layer in layers]
    if vllm_config.lora_config is not None:
        problem = "adapters (enable_lora) are chosen for the tokens of a step"
    elif model.is_multimodal_model or getattr(model, "uses_mrope", False):
        problem = "positions and embeddings of a multimodal model are not those of its tokens"
    elif any(getattr(spec, "kv_quant_mode", 0) or spec.dtype.itemsize < 2 for spec in specs):
        problem = "keys of a quantised KV cache cannot be turned"
    elif any(spec != specs[0] for spec in specs):
        problem = "the KV of its layers has several shapes"
    elif any(
        getattr(impl, "sinks", None) is not None or getattr(impl, "logits_soft_cap", None)
        for impl in impls
    ):
        problem = "this model changes the logits of attention (sinks, soft cap)"
    if problem:
        raise UnsupportedError(problem)


def _modules_of(attention: Sequence[Any]) -> tuple[Any, list[torch.nn.Module]]:
    """The module that embeds tokens and calls the decoder layers, and these in order."""
    found = models_with(attention)
    layers = [decoder_layers(model) for model in found]
    if len(found) != 1 or not layers[0]:
        raise UnsupportedError(f"{len(found)} models with these layers were found in the process")
    inner = next(
        module
        for module in found[0].modules()
        if any(child is layers[0][0] for child in getattr(module, "layers", ()))
    )
    _refuse_unknown(inner)
    if list(inner.layers) != layers[0] or not hasattr(inner, "embed_input_ids"):
        raise UnsupportedError(f"{type(inner).__name__} has other layers than its own")
    return inner, layers[0]


def _refuse_unknown(module: torch.nn.Module) -> None:
    """Raises :class:`~ucm.errors.UnsupportedError` where the ``forward`` of a module is not one
    that was read."""
    where = type(module).forward.__module__
    if where not in [f"{_MODELS}{name}" for name in KNOWN]:
        raise UnsupportedError(
            f"{type(module).__name__} ({where}) is not known to compute its layers as Llama does"
        )


def _layer_of(
    module: torch.nn.Module,
    attention: Mapping[str, Any],
    rotations: dict[int, Rotation],
    vllm_config: VllmConfig,
    device: torch.device,
) -> _Layer:
    """A decoder layer; those with one rotary embedding share its rotation."""
    _refuse_unknown(module)
    names = list(inspect.signature(type(module).forward).parameters)
    if names[:4] != ["self", "positions", "hidden_states", "residual"]:
        raise UnsupportedError(f"{type(module).__name__} takes {', '.join(names[1:])}")
    known = {id(layer) for layer in attention.values()}
    owners = [
        (owner, child)
        for owner in module.modules()
        for child in owner.children()
        if id(child) in known
    ]
    if len(owners) != 1 or getattr(owners[0][0], "rotary_emb", None) is None:
        raise UnsupportedError(f"{type(module).__name__} has no rotary embedding, or several")
    owner, layer = owners[0]
    _refuse_unknown(owner)
    rotary = owner.rotary_emb
    if id(rotary) not in rotations:
        model = vllm_config.model_config
        rotations[id(rotary)] = Rotation(
            rotary, layer.head_size, model.max_model_len, dtype=model.dtype, device=device
        )
    return _Layer(module, layer, rotations[id(rotary)])


def _alone(scores: Tensor) -> Tensor:
    """The total of one rank."""
    return scores


def _over_ranks(device: torch.device) -> Total | None:
    """Adds up integers over the ranks of tensor parallelism; None for one."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return None

    def total(scores: Tensor) -> Tensor:
        there = scores.to(device, copy=True)
        torch.distributed.all_reduce(there, group=group.device_group)
        return there.to(scores.device)

    return total


# The work of a step
# --------------------------------------------------------------------------------------------------


class BlendWorker:
    """One rank's part of Blend."""

    def __init__(
        self,
        settings: BlendConfig,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        total: Total | None = None,
    ) -> None:
        """``total`` adds up integers over the ranks of tensor parallelism, by default over those of
        this process's group; there is none for one rank."""
        self._settings, self._total = settings, total
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._parts: Parts | None = None
        self._checks: HKVDCalculator | None = None  # of the rule hkvd
        #: Why no request of this engine can be blended, empty when it can.
        self.why_not = "the KV cache is not registered"

    def register_kv_caches(self, caches: Mapping[str, Tensor]) -> None:
        """Get ready for these KV caches, by the names of their layers; :attr:`why_not` says why
        that is not possible, which the scheduler side logs for all ranks."""
        try:
            parts = parts_of(self._vllm_config, self._kv_cache_config, caches)
            self._rehearse(parts)
            self.use(parts)
        except Exception as error:
            self._parts, self.why_not = None, str(error) or repr(error)

    def use(self, parts: Parts) -> None:
        """Compute with these parts. Raises :class:`~ucm.errors.ConfigError` for wrong check
        layers."""
        self._total = self._total or _over_ranks(parts.device)
        settings, self._checks = self._settings, None
        if settings.select == "hkvd":
            self._checks = HKVDCalculator(
                len(parts.layers),
                settings.hkvd_threshold,
                compute_meta=settings.compute_meta,
                ratio=settings.ratio,
                criterion=settings.criterion,
                total=self._total or _alone,
            )
        self._parts, self.why_not = parts, ""

    def _rehearse(self, parts: Parts) -> None:
        """Everything but the model, for a first token: raises what another version of vLLM
        raises."""
        table, token = (0,), np.zeros(parts.block_tokens, np.uint32)
        blend = Blend("", table, 0, parts.block_tokens, (), token, 0, parts.block_tokens)
        request = _Request(blend, parts)
        metadata, slots = request.metadata(torch.zeros(1, dtype=torch.int64))
        state = _State(torch.zeros(1, 1), None, 0)
        self._through_layers(request, slots, {"": metadata}, {"": slots}, (0, 0), state)

    def run(self, blends: Sequence[Blend]) -> list[Blended]:
        """Complete the KV of these requests, and return what was done for each. Raises the error of
        a request whose tokens could not be computed."""
        with torch.inference_mode():
            return [self._one(blend) for blend in blends]

    def _one(self, blend: Blend) -> Blended:
        if self._parts is None:
            raise UnsupportedError(f"Blend was planned, and this rank cannot: {self.why_not}")
        request, error = _Request(blend, self._parts), None
        try:
            request.check_hits()
            self._turn(request)
        except Exception as own:
            error = own.with_traceback(None)  # which would keep a layer's tensors
        if self._total is not None and self._total(torch.tensor([int(error is not None)])).any():
            error = error or RuntimeError("another rank has failed")
        try:
            if error is None:
                return self._choose(request)
        except Exception as own:
            if self._total is not None:  # the other ranks wait in a layer
                raise
            error = own.with_traceback(None)
        text = "Blend: all %d tokens of request %s are computed, after an error: %r"
        throttle.warning("blend", text, blend.end - blend.exact, blend.request, error)
        self._in_pieces(request, torch.arange(blend.exact, blend.end))
        of_hits = sum(hit.end - hit.start for hit in blend.hits)
        return Blended(computed=of_hits, missed=blend.end - blend.exact - of_hits)

    def _choose(self, request: _Request) -> Blended:
        """Compute the tokens that matter, and those between the hits."""
        settings, hits = self._settings, request.hits
        new, _ = positions_of(hits)
        if self._checks is not None:
            kept = self._by_deviation(request, self._checks)
            chosen = int(torch.isin(kept, new).sum())
        else:
            scores = self._ask(request) if settings.select in ("union", "query") else None
            picked = choose(
                settings.select,
                hits,
                settings.ratio,
                head_tokens=settings.head_tokens,
                scores=scores,
            )
            chosen = len(picked)
            self._in_pieces(request, torch.cat([request.misses, picked]).sort().values)
        return Blended(len(new) - chosen, chosen, len(request.misses))

    @staticmethod
    def _turn(request: _Request) -> None:
        """Bring the loaded tokens of all layers to their slots. A layer is read whole before it is
        written: these are the same blocks in another order."""
        parts, (new, old) = request.parts, positions_of(request.hits)
        if not len(new):
            return
        source, target = request.source(), request.slots(new)
        rotations = {id(layer.rotation): layer.rotation for layer in parts.layers}
        turning = {key: rotation.factors(old, new) for key, rotation in rotations.items()}
        for layer in parts.layers:
            cache = layer.attention.kv_cache
            keys, values = parts.pages.read(cache, source)
            for at in range(0, len(new), _SLICE):
                part = slice(at, at + _SLICE)
                turned = layer.rotation.turn(keys[part], turning[id(layer.rotation)][part])
                parts.pages.write(cache, target[part], turned, values[part])

    def _ask(self, request: _Request) -> Tensor:
        """The scores of all tokens, by the attention of the question; all 0 without one."""
        blend, parts = request.blend, request.parts
        asking = _Asking(request, Question(len(parts.layers), blend.end))
        places = torch.arange(blend.asks_at, blend.asks_at + blend.question)
        if len(places):
            attend = {layer.attention.layer_name: asking for layer in parts.layers}
            self._through_layers(request, places, attend, {}, (0, len(parts.layers)), None)
        return asking.question.scores(self._total or _alone)

    def _by_deviation(self, request: _Request, hkvd: HKVDCalculator) -> Tensor:
        """All tokens up to the first check layer, which writes fresh keys for each; behind it those
        that are kept, which are returned."""
        parts, state, first = request.parts, None, 0
        hits = positions_of(request.hits)[0]
        places = torch.arange(request.blend.exact, request.blend.end)
        for check in hkvd.checks:
            of_hits = torch.isin(places, hits)
            before = request.read(check, places[of_hits])
            state = self._in_pieces(request, places, (first, check + 1), state, keep=True)
            fresh, first = request.read(check, places[of_hits]), check + 1
            name = parts.layers[check].attention.layer_name
            mask = hkvd.compute_attention_mask(
                name, fresh[0], *fresh, *before, candidates=len(hits)
            )
            assert state is not None and mask is not None
            kept = torch.ones_like(of_hits)
            kept[of_hits] = mask.cpu()
            places, state = places[kept], state.of(kept)
            if not len(places):
                return places
        self._in_pieces(request, places, (first, len(parts.layers)), state)
        return places

    def _in_pieces(
        self,
        request: _Request,
        places: Tensor,
        layers: tuple[int, int] | None = None,
        state: _State | None = None,
        *,
        keep: bool = False,
    ) -> _State | None:
        """Layers ``[first, last)``, by default all, for tokens (int64, ascending): in pieces one
        after the other, so that each sees those before it. ``keep``: what goes on is returned."""
        layers = layers or (0, len(request.parts.layers))
        scheduler = self._vllm_config.scheduler_config
        limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        done: list[_State] = []
        at = 0
        for piece in pieces_of_rows(places, *limits):
            part = None if state is None else state.of(slice(at, at + len(piece)))
            at += len(piece)
            metadata, slots = request.metadata(piece)
            names = [layer.attention.layer_name for layer in request.parts.layers]
            attend, written = dict.fromkeys(names, metadata), dict.fromkeys(names, slots)
            found = self._through_layers(request, piece, attend, written, layers, part)
            if keep:
                done.append(found)
        return _State.join(done) if done else None

    def _through_layers(
        self,
        request: _Request,
        places: Tensor,
        attend: Mapping[str, Any],
        slots: Mapping[str, Tensor],
        layers: tuple[int, int],
        state: _State | None,
    ) -> _State:
        """Layers ``[first, last)`` for tokens, with attention metadata and slots by layer."""
        from vllm.forward_context import get_forward_context, set_forward_context

        parts, (first, last) = request.parts, layers
        positions = places.to(parts.device)
        with set_forward_context(
            dict(attend), self._vllm_config, num_tokens=len(places), slot_mapping=dict(slots)
        ):
            context = get_forward_context()
            if state is None:
                hidden, residual = parts.embed(request.ids(places)), None
            else:  # experts find their layer by counting
                hidden, residual = state.hidden, state.residual
                context.moe_layer_index = state.experts
            for layer in parts.layers[first:last]:
                hidden, residual = layer.module(
                    positions=positions, hidden_states=hidden, residual=residual
                )
            return _State(hidden, residual, context.moe_layer_index)


@dataclass(frozen=True, slots=True)
class _State:
    """Tokens between two layers ``[t, width]``."""

    hidden: Tensor
    residual: Tensor | None
    experts: int

    def of(self, which: Any) -> _State:
        residual = None if self.residual is None else self.residual[which]
        return replace(self, hidden=self.hidden[which], residual=residual)

    @staticmethod
    def join(parts: Sequence[_State]) -> _State:
        rest = [part.residual for part in parts if part.residual is not None]
        hidden = torch.cat([part.hidden for part in parts])
        return _State(hidden, torch.cat(rest) if rest else None, parts[0].experts)


class _Request:
    """A request's tokens and slots. Raises :class:`~ucm.errors.InvalidInputError` where it could
    not be computed."""

    def __init__(self, blend: Blend, parts: Parts) -> None:
        self.blend, self.parts = blend, parts
        size = parts.block_tokens
        own = blend.table[blend.exact // size : blend.end // size]
        whole = blend.exact % size == 0 and blend.end % size == 0
        if not whole or len(own) != (blend.end - blend.exact) // size or len({*own}) < len(own):
            raise InvalidInputError(
                "the blocks of a request are those of its tokens",
                context={"exact": blend.exact, "end": blend.end, "blocks": len(blend.table)},
            )
        tokens = blend.end + blend.question - blend.exact
        if len(blend.tokens) != tokens or blend.asks_at < blend.end:
            raise InvalidInputError(
                "the ids of all tokens are given", context={"is": len(blend.tokens)}
            )
        self._table = torch.tensor(blend.table, dtype=torch.int64)
        self._ids = torch.from_numpy(blend.tokens.astype("int64"))
        self.hits = [Hit(hit.start, hit.end, hit.source) for hit in blend.hits]

    def check_hits(self) -> None:
        """Raises :class:`~ucm.errors.InvalidInputError` for hits that are not in the loaded
        blocks."""
        blend, size = self.blend, self.parts.block_tokens
        check_hits(self.hits, blend.end)
        for hit in blend.hits:
            last = (hit.source + hit.end - hit.start - 1) // size
            there = len(hit.blocks) == last - hit.source // size + 1
            if hit.start < blend.exact or not there or not {*blend.table}.issuperset(hit.blocks):
                raise InvalidInputError(
                    "a chunk lies in blocks of its request",
                    context={"start": hit.start, "end": hit.end, "source": hit.source},
                )

    @property
    def misses(self) -> Tensor:
        """Tokens between hits, ascending."""
        ends = [(self.blend.exact, self.blend.exact)]
        ends += [(hit.start, hit.end) for hit in self.hits]
        ends.append((self.blend.end, self.blend.end))
        between = [torch.arange(a[1], b[0]) for a, b in pairwise(ends)]
        return torch.cat(between)

    def ids(self, places: Tensor) -> Tensor:
        """The tokens at these places."""
        blend = self.blend
        at = torch.where(places < blend.end, places, places - blend.asks_at + blend.end)
        return self._ids[at - blend.exact].to(self.parts.device)

    def slots(self, places: Tensor) -> Tensor:
        """Where the KV of the tokens at these places is."""
        size = self.parts.block_tokens
        return self._table[places // size] * size + places % size

    def source(self) -> Tensor:
        """Where the tokens of hits were loaded, one hit after the other."""
        found, size = [], self.parts.block_tokens
        for hit in self.blend.hits:
            places = torch.arange(hit.end - hit.start) + hit.source % size
            blocks = torch.tensor(hit.blocks, dtype=torch.int64)
            found.append(blocks[places // size] * size + places % size)
        return torch.cat(found)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens, in their slots."""
        cache = self.parts.layers[layer].attention.kv_cache
        return self.parts.pages.read(cache, self.slots(places))

    def metadata(self, places: Tensor) -> tuple[Any, Tensor]:
        """The attention metadata of tokens behind the exact prefix, in which those that follow each
        other are one row, and their slots."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        assert len(places) and int(places[0]) >= self.blend.exact
        device, size = self.parts.device, self.parts.block_tokens
        cuts = (places.diff() != 1).nonzero()[:, 0] + 1
        ends = torch.cat([cuts, torch.tensor([len(places)])])
        starts = torch.cat([torch.tensor([0]), ends]).int()
        lens = (places[ends - 1] + 1).int()
        slots = self.slots(places).to(device)
        table = self._table[: -(-int(lens[-1]) // size)].int().to(device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(device),
            seq_lens_cpu_upper_bound=lens,
            num_reqs=len(lens),
            num_actual_tokens=len(places),
            max_query_len=int(starts.diff().max()),
            max_seq_len=int(lens[-1]),
            block_table_tensor=table.expand(len(lens), -1).contiguous(),
            slot_mapping=slots,
            causal=True,
            is_prefilling=torch.ones(len(lens), dtype=torch.bool),
            positions=places.to(device),
        )
        return self.parts.builder.build(0, common), slots


def pieces_of_rows(places: Tensor, rows: int, tokens: int) -> Iterator[Tensor]:
    """Ascending places in pieces of at most ``tokens``, in which at most ``rows`` do not follow the
    one before."""
    at = 0
    while at < len(places):
        part = places[at : at + tokens]
        row = (part.diff() != 1).cumsum(0)
        part = part[: 1 + int((row < rows).sum())]
        yield part
        at += len(part)


class _Asking(OwnAttention):
    """The attention of a question, whose keys and values are written nowhere."""

    def __init__(self, request: _Request, question: Question) -> None:
        self.question, self._request = question, request
        self._slots = request.slots(torch.arange(request.blend.end))
        self._known = torch.ones(request.blend.end, dtype=torch.bool)
        self._known[request.misses] = False
        layers = request.parts.layers
        self._numbers = {layer.attention.layer_name: at for at, layer in enumerate(layers)}

    def attend(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, output: Tensor
    ) -> None:
        """A layer of the question."""
        keys, values = self._request.parts.pages.read(cache, self._slots)
        number, scale = self._numbers[layer.layer_name], float(layer.impl.scale)
        output.copy_(
            self.question.attend(number, query, (keys, key), (values, value), scale, self._known)
        )
