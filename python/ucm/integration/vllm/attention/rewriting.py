"""Copies of attention metadata that may be changed for one layer, and what has to follow from a
change.

vLLM makes one metadata object for a step, which all layers of a group share; nothing in it is ever
written to here. A method gets a copy and gives other block tables and lengths to it; what a backend
computed ahead from the old ones is made anew (:class:`Rewriter`). A copy that was not changed is
thrown away: the layer computes with vLLM's own object.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ucm.errors import InvalidInputError

#: What a method may change, where the rows of one call are.
CHANGED = ("block_table", "seq_lens")

#: Parts of the metadata of latent attention, which computes rows of one token and prompts apart, by
#: the phase.
PARTS = ("decode", "prefill")


def rows_of(metadata: Any, phase: str | None) -> Any:
    """The part of the metadata that has the block table of the rows of one call."""
    part = getattr(metadata, phase, None) if phase in PARTS else None
    return metadata if part is None else part


def copy_of(metadata: Any, phase: str | None, *, deep: bool) -> Any:
    """A copy for one layer; ``deep`` where somebody may write into its block table and lengths."""
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
    """Whether a copy differs from the original in anything. Only a deep copy has to be compared by
    its content."""
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
    """Makes a changed copy whole: what the kernels of a backend take besides block table and
    lengths.

    What is made from lengths is kept for the step, because most layers keep as many blocks as the
    one before.
    """

    def __init__(self) -> None:
        self._plans: list[tuple[tuple[Any, ...], Tensor, Any]] = []

    def begin_step(self) -> None:
        """What was made belongs to the step before."""
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
        """What a kernel of this kind computes ahead from the lengths of its rows: by ``make``, once
        a step."""
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
    """The longest row; where prompts are computed apart from single tokens, their lengths count as
    well."""
    longest = int(part.seq_lens.max())
    return (
        max(longest, int(made.max_seq_len)) if part is not made and made.num_prefills else longest
    )


def _check(part: Any, before: Any) -> None:
    """Raises :class:`~ucm.errors.InvalidInputError` where a kernel could not read what somebody
    wrote there."""
    for name in CHANGED:
        found, was = getattr(part, name, None), getattr(before, name, None)
        if isinstance(was, Tensor) and not (
            isinstance(found, Tensor)
            and (found.dtype, found.device, found.dim()) == (was.dtype, was.device, was.dim())
            and len(found) == len(was)
        ):
            raise InvalidInputError(
                f"{name} must be a tensor like the one that came: {tuple(was.shape)}, {was.dtype}"
            )


def _renew_notes(part: Any, before: Any) -> None:
    """What an implementation noted down on the object besides its fields was made from other blocks
    and lengths: make that of AMX_MLA anew, which is read in every layer, and forget the rest."""
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
    """What vLLM's CPU kernel computes ahead from the lengths of its rows."""
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
