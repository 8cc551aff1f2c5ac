"""The interface of sparse attention: the hooks that an engine calls, and that every method, ours or
a user's, may override.

A method exists once per process, as scheduler or as worker. Nothing here needs torch or vLLM. The
order of the calls in one step of an engine:

```
scheduler   request_begin   estimate_num_slots_sparsed
            update_state_after_alloc   build_sparse_meta
worker      bind_sparse_metadata   execute_begin
              per layer   layer_begin   attention_begin   attention_finished
                          ffn_begin   ffn_finished   layer_finished
            execute_finished   clear_sparse_metadata
scheduler   request_finished_in_scheduler              worker   request_finished_in_worker
```

:class:`SparseBatch` has the rows of a step, :class:`SparseStats` the counters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: Result of :meth:`UcmSparseBase.estimate_num_slots_sparsed`: allocated as without a method.
INVALID_SLOT = -1

#: More tokens than a request can have.
ALL_TOKENS = 1 << 62

#: Hooks that an engine can call only in eager mode.
EAGER_HOOKS: tuple[str, ...] = ("layer_begin", "layer_finished", "ffn_begin", "ffn_finished")

#: Hooks by which a method may change the computation.
CHANGING_HOOKS: tuple[str, ...] = ("attention_begin", "attention_finished", *EAGER_HOOKS)


class UcmSparseRole(Enum):
    """On which side of an engine a method lives."""

    SCHEDULER = 0
    WORKER = 1


class UcmSparseMetadata:
    """The scheduler side's message to the worker side for one step. A user's method subclasses it;
    it must pickle."""


class UcmSparseBase:
    """A method of sparse attention. Every hook has a default that changes nothing. Hooks must be
    quick and must not wait without a bound: they run between the kernels of a step."""

    def __init__(self, vllm_config: Any, role: UcmSparseRole) -> None:
        """``vllm_config`` is vLLM's ``VllmConfig``, ``role`` the side this object is on."""
        self._vllm_config = vllm_config
        self._role = role
        self._sparse_metadata: UcmSparseMetadata | None = None

    @property
    def role(self) -> UcmSparseRole:
        """The side this object is on."""
        return self._role

    def overrides(self, hook: str) -> bool:
        """Whether this method defines the hook of that name."""
        return getattr(type(self), hook) is not getattr(UcmSparseBase, hook)

    # Scheduler side
    # ----------------------------------------------------------------------------------------------

    def request_begin(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        """A request has arrived."""

    def estimate_num_slots_sparsed(self, request: Any) -> int:
        """Token slots of KV that the device must hold for ``request`` (vLLM's ``Request``) in its
        next step; :data:`INVALID_SLOT`: all of them, as without a method. Under vLLM it is called
        for subclasses of :class:`~ucm.sparse.method.BlockSparse` with ``offload``. It says whether
        blocks leave; how many hot blocks replace them is the policy's budget."""
        del request
        return INVALID_SLOT

    def exact_tokens(self, prefill_tokens: int) -> int:
        """How many of a request's first tokens have the same KV as without the method, when
        ``prefill_tokens`` are computed before its first decode step. Only their blocks are stored
        and shared.

        By default all tokens where no hook can change anything, else none. A method that does not
        change prompts returns ``prefill_tokens``, one that only reads :data:`ALL_TOKENS`.
        """
        del prefill_tokens
        return 0 if any(self.overrides(hook) for hook in CHANGING_HOOKS) else ALL_TOKENS

    def update_state_after_alloc(self, request: Any, num_blocks: int) -> None:
        """``request`` was admitted with ``num_blocks`` blocks. Not called for later blocks."""

    def build_sparse_meta(
        self,
        scheduler_output: Any,
        requests: Any,
        input_batch: Any = None,
        attn_metadata: Any = None,
    ) -> UcmSparseMetadata | None:
        """The message to the worker side for the next step, None for none. ``scheduler_output`` is
        vLLM's, ``requests`` maps ids to its requests. ``input_batch`` and ``attn_metadata``, which
        the original passed, are None."""
        del scheduler_output, requests, input_batch, attn_metadata
        return None

    def request_finished_in_scheduler(self, request_id: str) -> None:
        """A request has ended, or was aborted."""

    # Worker side
    # ----------------------------------------------------------------------------------------------

    def bind_sparse_metadata(self, metadata: UcmSparseMetadata | None) -> None:
        """Keep the scheduler side's message for the step that begins."""
        self._sparse_metadata = metadata

    def clear_sparse_metadata(self) -> None:
        """The step is over."""
        self._sparse_metadata = None

    def _get_sparse_metadata(self) -> UcmSparseMetadata | None:
        """The message of the step under way, None outside a step."""
        return self._sparse_metadata

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The KV of each layer: layer name to tensor, in the shape of the attention backend. Once,
        at start."""

    def execute_begin(self, scheduler_output: Any) -> None:
        """The forward pass is about to begin."""

    def execute_finished(self, logits_indices: Any = None) -> Any:
        """The forward pass has ended. Returns ``logits_indices`` unchanged: vLLM cannot change them
        here."""
        return logits_indices

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
        """Attention of a layer is about to be computed, with the returned query, key, value and
        output.

        ``query`` is ``[tokens, query heads, head size]``, ``key`` and ``value`` ``[tokens, KV
        heads, head size]``, ``output`` has the result.
        ``forward_context.attn_metadata[layer_name]`` is a copy made for this layer, and may be
        changed: ``block_table [rows, blocks]`` and ``seq_lens [rows]`` are the blocks that a row
        attends to. ``phase`` is ``"prefill"``, ``"decode"`` or None where a batch has both.

        Keys and values are in the cache already; the returned ones are written over them, so later
        steps read them too. All of these may be written into in place. All else in the metadata is
        vLLM's own, and is only read.

        Models with latent attention compute rows of one token and prompts by two calls, each with
        its phase. There ``key`` is the latent ``[tokens, rank]`` and ``value`` the rotary part of
        the key ``[tokens, 1, rope size]``. ``"decode"``: ``query [tokens, heads, rank + rope
        size]`` is over the latent, ``output [tokens, heads, rank]`` too, and rows are in
        ``metadata.decode.block_table`` and ``.seq_lens``; ``kwargs`` has ``decode_ql_nope [tokens,
        heads, rank]`` and ``decode_q_pe [tokens, heads, rope size]``, which are views of the query.
        ``"prefill"``: ``query [tokens, heads, head size]``, ``output [tokens, heads * value
        size]``, rows in ``metadata.prefill.block_table``, for tokens of earlier steps; both are
        None. In either ``k_hash [blocks, block size, 1, bytes]`` has the codes of the layer's keys,
        by physical block, where the method keeps some (GSAOnDevice), else None.

        A result that cannot be used (not four values, a tensor of another shape, dtype or device)
        changes nothing, and is logged; so does a hook that raises.
        """
        del layer_name, forward_context, phase, kwargs
        return query, key, value, output

    def attention_finished(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_output: Any,
        layer_name: str,
        forward_context: Any,
        phase: str | None = None,
    ) -> None:
        """Attention of a layer was computed into ``attn_output [tokens, query heads, head size]``,
        which may be written into. A method that only reads overrides :meth:`exact_tokens`, or none
        of its KV is stored."""

    def layer_begin(
        self, positions: Any, hidden_states: Any, residual: Any
    ) -> tuple[Any, Any, Any]:
        """A decoder layer begins, with the returned values. Eager mode only."""
        return positions, hidden_states, residual

    def layer_finished(
        self, positions: Any, hidden_states: Any, residual: Any
    ) -> tuple[Any, Any, Any]:
        """A decoder layer has ended, with the returned values. Eager mode only."""
        return positions, hidden_states, residual

    def ffn_begin(self, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
        """The feed-forward part of a layer begins, with the returned values. Eager mode only."""
        return hidden_states, residual

    def ffn_finished(self, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
        """The feed-forward part of a layer has ended, with the returned values. Eager mode only."""
        return hidden_states, residual

    def request_finished_in_worker(self, request_id: str) -> None:
        """A request has ended; its state may be dropped."""

    def close(self) -> None:
        """The engine ends: stop threads, free memory. Idempotent."""


@dataclass(frozen=True, slots=True)
class SparseRow:
    """One row of the batch: the tokens of one sequence that are computed in this step."""

    request_id: str
    #: Tokens whose KV exists once this step has run (vLLM's ``seq_len`` of the row).
    tokens: int
    #: Tokens that are computed densely before the first decode step: the prompt, and after a
    #: preemption also the output that is computed again; of a prompt that is selected from without
    #: being read, the stored ones.
    prefill_tokens: int
    #: Tokens of the prompt: steps are counted from here, also after a preemption.
    prompt_tokens: int
    #: Tokens computed in this step.
    queries: int = 1

    @property
    def decodes(self) -> bool:
        """Whether all tokens of the row follow the densely computed ones: one, or the last ones of
        a prompt that is selected from."""
        return self.tokens - self.queries >= self.prefill_tokens

    @property
    def step(self) -> int:
        """Number of the decode step, 1 for the first token after the prompt; 0 or less for the
        prompt."""
        return self.tokens - self.prompt_tokens


@dataclass(slots=True)
class SparseBatch(UcmSparseMetadata):
    """The rows of a step, in the order of the attention metadata, and the requests that have ended
    since the last one."""

    rows: Sequence[SparseRow] = ()
    finished: Sequence[str] = field(default=())


class SparseStats:
    """Counters since the start; written by the thread of the step and by those that retrieve."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Add to counters."""
        with self._lock:  # several times a layer: a Counter's update takes thrice as long
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def clear(self) -> None:
        """Reset all counters."""
        with self._lock:
            self._sums.clear()

    def snapshot(self) -> dict[str, float]:
        """All counters, and the ratios made from them: ``density`` kept blocks / blocks of sparse
        rows; ``turnover`` newly chosen blocks / chosen blocks; ``lag`` mean decode steps from a
        query to a use of its choice; ``recall`` attention mass on kept blocks / all of it, where it
        is measured; ``hit_rate`` predicted blocks / chosen blocks. ``selection_s``: seconds of
        steps for representations of new keys and for choosing."""
        with self._lock:
            found = dict(self._sums)
        for name, part, whole in RATIOS:
            if found.get(whole):
                found[name] = found.get(part, 0) / found[whole]
        return found


#: Name of a ratio, and the counters it is made from.
RATIOS: tuple[tuple[str, str, str], ...] = (
    ("density", "blocks_kept", "blocks_seen"),
    ("turnover", "blocks_new", "blocks_chosen"),
    ("lag", "steps_waited", "choices_used"),
    ("recall", "mass_kept", "mass_seen"),
    ("hit_rate", "blocks_predicted", "blocks_asked"),
)
