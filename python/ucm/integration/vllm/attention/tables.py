"""Attention metadata for one layer: copies that may be changed, the consequences of a change, and
the rows that ucm's own kernel computes.

vLLM makes one metadata object for a step, which all layers of a group share; it is never written to
here. A method gets a copy and sets other block tables and lengths; results that a backend computed
ahead from the old ones are made again (:class:`Rewriter`). For an unchanged copy the layer computes
with vLLM's own object.

Two cases are not computed by one call of vLLM's kernel with one table. Where each KV head has a
table of its own, every row becomes one row for each head (:class:`HeadRows`). Rows that chose on a
CPU are computed by ucm's kernel (:func:`attend`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse import retrieval

#: Attributes that a method may change, on the object with the rows of one call.
CHANGED = ("block_table", "seq_lens")

#: Parts of the metadata of latent attention, which computes rows of one token and prompts apart, by
#: the phase.
PARTS = ("decode", "prefill")


def rows_of(metadata: Any, phase: str | None) -> Any:
    """The part of the metadata with the block table of the rows of one call."""
    part = getattr(metadata, phase, None) if phase in PARTS else None
    return metadata if part is None else part


def copy_of(metadata: Any, phase: str | None, *, deep: bool) -> Any:
    """A copy for one layer; ``deep`` where a hook may write into its block table and lengths."""
    made = copy.copy(metadata)
    part = rows_of(made, phase)
    if part is not made:
        part = copy.copy(part)
        setattr(made, str(phase), part)
    if deep:
        for name in CHANGED:
            if (tensor := getattr(part, name, None)) is not None:
                setattr(part, name, tensor.clone())
    return made


def is_changed(made: Any, original: Any, *, deep: bool) -> bool:
    """Whether a copy differs from the original. Only a deep copy is compared by its content."""
    if type(made) is not type(original):
        return True
    for name, value in vars(made).items():
        before = vars(original).get(name)
        if value is before:
            continue
        if deep and isinstance(value, Tensor) and isinstance(before, Tensor):
            if value.shape != before.shape or not torch.equal(value, before):
                return True
        elif name in PARTS and dataclasses.is_dataclass(value):
            if is_changed(value, before, deep=deep):
                return True
        elif not isinstance(value, Tensor) and type(value) is type(before) and value == before:
            continue
        else:
            return True
    return False


class Rewriter:
    """Completes a changed copy: the other inputs of a backend's kernels besides block table and
    lengths. Results made from lengths are kept for the step, because most layers keep as many
    blocks as the one before."""

    def __init__(self) -> None:
        self._plans: list[tuple[tuple[Any, ...], Tensor, Any]] = []

    def begin_step(self) -> None:
        """Drop the results of the step before."""
        self._plans = []

    def complete(
        self, impl: Any, layer: Any, made: Any, original: Any, phase: str | None, *, deep: bool
    ) -> Any:
        """The copy with everything that follows from its block table and lengths; the original
        where nothing was changed."""
        if not is_changed(made, original, deep=deep):
            return original
        part, before = rows_of(made, phase), rows_of(original, phase)
        if deep:
            _check(part, before)
        _renew_notes(part, before)
        name = _family(part)
        if name == "cpu":
            part.scheduler_metadata = self.planned(
                ("cpu", impl.num_heads, impl.num_kv_heads, impl.head_size, impl.sliding_window),
                part.seq_lens,
                lambda lens: cpu_plan(impl, layer, part, lens, impl.num_heads, impl.num_kv_heads),
            )
        elif name == "flashmla":
            heads = impl.num_heads * max(1, made.num_decode_tokens // max(1, made.num_decodes))
            part.scheduler_metadata = self.planned(
                ("flashmla", heads), part.seq_lens, lambda lens: _flashmla_plan(heads, lens)
            )
        elif hasattr(part, "scheduler_metadata"):
            part.scheduler_metadata = None  # the kernel plans by itself
        if not hasattr(part, "seq_lens"):  # prompts of latent attention
            return made
        for place in {id(each): each for each in (made, part)}.values():
            if hasattr(place, "max_seq_len") and part.seq_lens.numel():
                place.max_seq_len = _longest(made, part)
        return made

    def planned(self, kind: tuple[Any, ...], lens: Tensor, make: Callable[[Tensor], Any]) -> Any:
        """The result that a kernel of this kind computes ahead from the lengths of its rows: by
        ``make``, once a step."""
        for known, before, plan in self._plans:
            if known == kind and before.shape == lens.shape and torch.equal(before, lens):
                return plan
        plan = make(lens)
        self._plans.append((kind, lens, plan))
        return plan


def _family(part: Any) -> str:
    name = type(part).__name__
    if name == "CPUAttentionMetadata":
        return "cpu"
    return "flashmla" if name == "FlashMLADecodeMetadata" else ""


def _longest(made: Any, part: Any) -> int:
    """The longest row; where prompts are computed apart from single tokens, with their lengths."""
    longest = int(part.seq_lens.max())
    apart = part is not made and made.num_prefills
    return max(longest, int(made.max_seq_len)) if apart else longest


def _check(part: Any, before: Any) -> None:
    """Raises :class:`~ucm.errors.InvalidInputError` where a kernel could not read a hook's
    tensors."""
    for name in CHANGED:
        found, was = getattr(part, name, None), getattr(before, name, None)
        if not isinstance(was, Tensor):
            continue
        if not isinstance(found, Tensor) or _form(found) != _form(was):
            raise InvalidInputError(
                f"{name} must be a tensor like the one it replaces: {tuple(was.shape)}, {was.dtype}"
            )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.dim(), len(tensor)


def _renew_notes(part: Any, before: Any) -> None:
    """Attributes that an implementation set on the object besides its fields were made from other
    blocks and lengths: those of AMX_MLA, read in every layer, are made again, and others are
    dropped."""
    fields = {field.name for field in dataclasses.fields(part)}
    notes = [name for name in vars(part) if name not in fields]
    if "req_to_token" in notes:  # the slot of each token
        size = before.req_to_token.shape[1] // before.block_table.shape[1]
        places = torch.arange(size, device=part.block_table.device, dtype=before.req_to_token.dtype)
        part.req_to_token = (part.block_table[..., None] * size + places).flatten(1)
        if "seq_lens_i64" in notes:
            part.seq_lens_i64 = part.seq_lens.long()
        return
    for name in notes:
        delattr(part, name)


def cpu_plan(impl: Any, layer: Any, part: Any, lens: Tensor, heads: int, kv_heads: int) -> Any:
    """The result that vLLM's CPU kernel computes ahead from the lengths of its rows."""
    from vllm import _custom_ops as ops
    from vllm import envs

    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=lens.shape[0],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=impl.head_size,
        seq_lens=lens,
        dtype=layer.dtype,
        query_start_loc=part.query_start_loc,
        causal=part.causal,
        sliding_window_size=impl.sliding_window,
        isa=layer.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=part.dynamic_causal,
        kv_cache_dtype=impl.kv_cache_dtype,
    )


def _flashmla_plan(heads: int, lens: Tensor) -> Any:
    from vllm.v1.attention.ops.flashmla import get_mla_metadata

    return get_mla_metadata(lens, heads, 1, is_fp8_kvcache=False)[0]


@dataclass(slots=True)
class HeadRows:
    """The rows of a step, one for each KV head."""

    #: ``[tokens * heads]``: token and head at each place, the tokens of a row and head together.
    order: Tensor
    starts: Tensor
    tokens: int
    heads: int

    @classmethod
    def of(cls, query_start_loc: Tensor, rows: int, heads: int) -> HeadRows:
        """From the beginning of the queries of each row ``[rows + 1]``."""
        starts = query_start_loc[: rows + 1].long()
        lengths = (starts[1:] - starts[:-1]).repeat_interleave(heads)
        order = [
            (torch.arange(begin, end)[None] * heads + torch.arange(heads)[:, None]).flatten()
            for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(query_start_loc.dtype)
        return cls(torch.cat(order), ends, int(starts[-1]), heads)

    def split(self, query: Tensor) -> Tensor:
        """Queries ``[tokens, query heads, d]`` as ``[tokens * heads, query heads / heads, d]``."""
        shape = (self.tokens * self.heads, query.shape[1] // self.heads, query.shape[2])
        return query[: self.tokens].reshape(shape).index_select(0, self.order)

    def join(self, parts: Tensor, output: Tensor) -> None:
        """The opposite, into ``output``."""
        joined = torch.empty_like(parts)
        joined[self.order] = parts
        output[: self.tokens] = joined.view(self.tokens, output.shape[1], output.shape[2])


def metadata_of(made: Any, rows: HeadRows, plan: Callable[[Any], Any]) -> Any:
    """The metadata of these rows, from a copy whose block table is ``[rows, heads, blocks]`` and
    whose lengths are ``[rows, heads]``; ``plan`` computes the kernel's plan."""
    found = copy.copy(made)
    heads = torch.arange(rows.heads, dtype=made.block_table.dtype)[None, :, None]
    found.block_table = (made.block_table * rows.heads + heads).flatten(0, 1).contiguous()
    found.seq_lens = made.seq_lens.flatten().contiguous()
    found.query_start_loc = rows.starts
    found.num_actual_tokens = rows.tokens * rows.heads
    found.scheduler_metadata = plan(found)
    return found


def reads_pages_of(layers: Mapping[str, Any]) -> bool:
    """Whether ucm's kernel can compute these layers (of vLLM, all of one KV cache group):
    instruction set, packing and type of the pages, and nothing that vLLM adds to a logit."""
    served = retrieval.instruction_sets() != ("scalar",)
    return served and all(_reads(layer) for layer in layers.values())


def _reads(layer: Any) -> bool:
    packed_for = getattr(layer, "isa", None)  # of the CPU backend alone
    if packed_for is None:
        return False
    impl, cache = layer.impl, layer.kv_cache
    plain = impl.sinks is None and impl.alibi_slopes is None and not impl.logits_soft_cap
    if not plain or impl.sliding_window != -1 or impl.kv_cache_dtype != "auto" or not cache.is_cpu:
        return False
    return retrieval.can_attend(packed_for, cache.dtype, impl.head_size, int(cache.shape[2]))


def attend(
    layer: Any,
    rows: Tensor,
    tables: tuple[Tensor, Tensor],
    metadata: Any,
    query: Tensor,
    output: Tensor,
    compute: Callable[[Tensor, Any, Tensor], Any],
    rewriter: Rewriter,
) -> None:
    """Attention of rows that chose by ucm's kernel (:func:`ucm.sparse.retrieval.paged_attention`),
    which takes about half the time of vLLM's for rows of one query (``docs/performance.md``). Rows
    that keep every block are computed by vLLM's kernel as in a dense engine, so the kernel of a row
    does not depend on its neighbours.

    Computes a layer of a step into ``output [tokens, heads, d]``, for the queries ``query [tokens,
    heads, d]``. ``tables`` are the blocks and tokens of ``rows [s]``, which have one query each,
    ``[s, N]`` and ``[s]``, or one for each KV head, ``[s, heads, N]`` and ``[s, heads]``. All other
    rows are computed by ``compute(query, metadata, output)``, vLLM's kernel, from ``metadata``,
    that of all rows of the step.
    """
    scale, count = float(layer.impl.scale), metadata.query_start_loc.shape[0] - 1
    if len(rows) == count:  # each has one query, so these are all queries
        retrieval.paged_attention(query[:count], layer.kv_cache, *tables, scale, output[:count])
        return
    places = metadata.query_start_loc[1:].index_select(0, rows).long() - 1
    chosen = query.index_select(0, places)
    attended = retrieval.paged_attention(chosen, layer.kv_cache, *tables, scale)
    output.index_copy_(0, places, attended)
    others = _all_but(rows, count)
    tokens = _all_but(places, int(metadata.query_start_loc[-1]))
    rest = query.index_select(0, tokens)
    found = torch.empty_like(rest)
    compute(rest, _metadata_of_some(layer, metadata, others, rewriter), found)
    output.index_copy_(0, tokens, found)


def _all_but(some: Tensor, count: int) -> Tensor:
    """The numbers below ``count`` except these."""
    left = torch.ones(count, dtype=torch.bool)
    left[some.long()] = False
    return left.nonzero()[:, 0]


def _metadata_of_some(layer: Any, original: Any, rows: Tensor, rewriter: Rewriter) -> Any:
    """The metadata of some rows of a step, of any number of queries."""
    impl, found = layer.impl, copy.copy(original)
    lengths = original.query_start_loc.diff().index_select(0, rows)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    found.query_start_loc = starts.to(original.query_start_loc.dtype)
    found.num_actual_tokens = int(found.query_start_loc[-1])
    found.max_query_len = int(lengths.max())
    found.block_table = original.block_table.index_select(0, rows)
    found.seq_lens = original.seq_lens.index_select(0, rows)
    found.max_seq_len = int(found.seq_lens.max())
    found.scheduler_metadata = rewriter.planned(
        ("cpu", "some", impl.num_heads, impl.num_kv_heads, tuple(found.query_start_loc.tolist())),
        found.seq_lens,
        lambda lens: cpu_plan(impl, layer, found, lens, impl.num_heads, impl.num_kv_heads),
    )
    return found
