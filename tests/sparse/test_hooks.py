"""The face of a method: what a user's subclass must write, and the method of a process."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ucm.errors import InvalidInputError
from ucm.sparse.base import (
    ALL_TOKENS,
    CHANGING_HOOKS,
    EAGER_HOOKS,
    INVALID_SLOT,
    UcmSparseBase,
    UcmSparseMetadata,
    UcmSparseRole,
)
from ucm.sparse.state import (
    ensure_ucm_sparse_initialized,
    get_ucm_sparse,
    has_ucm_sparse,
    set_ucm_sparse,
)


class Meta(UcmSparseMetadata):
    """What a user's scheduler side sends to a user's worker side."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Scaled(UcmSparseBase):
    """A user's method: it scales queries by what its scheduler side said, and remembers what it
    saw."""

    def __init__(self, vllm_config: Any, role: UcmSparseRole) -> None:
        super().__init__(vllm_config, role)
        self.seen: list[str] = []

    def build_sparse_meta(
        self,
        scheduler_output: Any,
        requests: Any,
        input_batch: Any = None,
        attn_metadata: Any = None,
    ) -> Meta:
        return Meta(scale=len(requests))

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
        meta = self._get_sparse_metadata()
        assert isinstance(meta, Meta)
        return query * meta.scale, key, value, output

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
        self.seen.append(layer_name)


def test_a_small_subclass_is_a_method() -> None:
    scheduler, worker = Scaled(None, UcmSparseRole.SCHEDULER), Scaled(None, UcmSparseRole.WORKER)
    worker.bind_sparse_metadata(scheduler.build_sparse_meta(None, {"a": 1, "b": 2}))
    assert worker.attention_begin(3, 4, 5, "layer", None) == (6, 4, 5, None)
    worker.attention_finished(6, 4, 5, None, "layer", None)
    worker.clear_sparse_metadata()
    assert worker.seen == ["layer"] and worker._get_sparse_metadata() is None


def test_every_hook_has_a_default_that_changes_nothing() -> None:
    method = UcmSparseBase("config", UcmSparseRole.SCHEDULER)
    a, b, c, d = object(), object(), object(), object()
    assert method.role is UcmSparseRole.SCHEDULER and method._vllm_config == "config"
    assert method.estimate_num_slots_sparsed(a) == INVALID_SLOT == -1
    assert method.attention_begin(
        a, b, c, "l", None, d, "decode", decode_ql_nope=1, decode_q_pe=2, k_hash=3
    ) == (
        a,
        b,
        c,
        d,
    )
    assert method.layer_begin(a, b, c) == method.layer_finished(a, b, c) == (a, b, c)
    assert method.ffn_begin(a, b) == method.ffn_finished(a, b) == (a, b)
    assert method.execute_finished(a) is a
    assert method.build_sparse_meta(a, b, c, d) is None
    for result in (
        method.request_begin("r", [1]),
        method.update_state_after_alloc(a, 3),
        method.request_finished_in_scheduler("r"),
        method.request_finished_in_worker("r"),
        method.register_kv_caches({}),
        method.execute_begin(a),
        method.attention_finished(a, b, c, d, "l", None),
        method.close(),
    ):
        assert result is None


@pytest.mark.parametrize(
    "hook", [*CHANGING_HOOKS, "attention_finished", "execute_finished", "request_begin"]
)
def test_blocks_that_a_hook_may_have_changed_are_not_stored(hook: str) -> None:
    """One after attention may write into its output, of which the KV of the next layer is made."""
    own = type("Own", (UcmSparseBase,), {hook: lambda self, *args, **kwargs: None})
    changes = hook not in ("execute_finished", "request_begin")
    assert own(None, UcmSparseRole.SCHEDULER).exact_tokens(100) == (0 if changes else ALL_TOKENS)


def test_the_signatures_of_the_book() -> None:
    """Names and order of the arguments, as users of the original call and override them."""
    expected = {
        "request_begin": ["request_id", "prompt_token_ids"],
        "estimate_num_slots_sparsed": ["request"],
        "update_state_after_alloc": ["request", "num_blocks"],
        "build_sparse_meta": ["scheduler_output", "requests", "input_batch", "attn_metadata"],
        "request_finished_in_scheduler": ["request_id"],
        "request_finished_in_worker": ["request_id"],
        "bind_sparse_metadata": ["metadata"],
        "clear_sparse_metadata": [],
        "register_kv_caches": ["kv_caches"],
        "execute_begin": ["scheduler_output"],
        "execute_finished": ["logits_indices"],
        "attention_begin": [
            "query",
            "key",
            "value",
            "layer_name",
            "forward_context",
            "output",
            "phase",
            "kwargs",
        ],
        "attention_finished": [
            "query",
            "key",
            "value",
            "attn_output",
            "layer_name",
            "forward_context",
            "phase",
        ],
        "layer_begin": ["positions", "hidden_states", "residual"],
        "layer_finished": ["positions", "hidden_states", "residual"],
        "ffn_begin": ["hidden_states", "residual"],
        "ffn_finished": ["hidden_states", "residual"],
    }
    for name, arguments in expected.items():
        assert list(inspect.signature(getattr(UcmSparseBase, name)).parameters)[1:] == arguments
    assert [role.value for role in UcmSparseRole] == [0, 1]


def test_an_engine_may_ask_which_hooks_a_method_has() -> None:
    method = Scaled(None, UcmSparseRole.WORKER)
    assert method.overrides("attention_begin") and not method.overrides("ffn_begin")
    assert not any(method.overrides(hook) for hook in EAGER_HOOKS)


def test_the_method_of_a_process() -> None:
    assert not has_ucm_sparse()
    with pytest.raises(InvalidInputError, match="no method of sparse attention"):
        get_ucm_sparse()
    closed: list[str] = []

    class Closing(UcmSparseBase):
        def close(self) -> None:
            closed.append("closed")

    method = Closing(None, UcmSparseRole.WORKER)
    set_ucm_sparse(method)
    set_ucm_sparse(method)
    assert has_ucm_sparse() and get_ucm_sparse() is method and closed == []
    assert ensure_ucm_sparse_initialized(None) is method
    set_ucm_sparse(None)
    assert closed == ["closed"] and not has_ucm_sparse()
