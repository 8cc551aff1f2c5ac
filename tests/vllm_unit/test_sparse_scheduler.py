"""The scheduler's side of sparse attention without an engine: which tokens count as exact, and since when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ucm.config.sparse import QuestConfig
from ucm.integration.vllm.attention.break_even import NEVER
from ucm.integration.vllm.connector.scheduler.sparse import SparseScheduler
from ucm.sparse.base import UcmSparseRole
from ucm.sparse.methods import Quest

BLOCK = 32


def scheduler() -> SparseScheduler:
    vllm = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK), model_config=SimpleNamespace(model="m", max_model_len=4096)
    )
    return SparseScheduler(Quest(vllm, UcmSparseRole.SCHEDULER, QuestConfig(ratio=0.3)), BLOCK)


def step() -> Any:
    """A step of no request."""
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=[], num_scheduled_tokens={})


class Request:
    num_tokens, num_preemptions = 100, 0


def test_what_is_learnt_while_a_step_is_planned_holds_from_the_next_on() -> None:
    """vLLM has cached the blocks of the step by then, as exact ones: the workers are to compute them so."""
    first = scheduler()
    first.break_even.report([1000])
    remembered = first.break_even.known()
    assert remembered["sparse"]["tokens"] == 1000
    for learn in (
        lambda sparse: sparse.break_even.recall(remembered),
        lambda sparse: sparse.measured([1000]),
    ):
        sparse, request = scheduler(), Request()
        exact = sparse.exact_tokens(request)  # type: ignore[arg-type]
        assert exact == 4096, "all tokens are, nothing is chosen yet"
        learn(sparse)
        assert sparse.exact_tokens(request) == exact  # type: ignore[arg-type]
        assert sparse.plan(step(), settled=True).break_even == NEVER
        assert sparse.exact_tokens(request) < 1000 + BLOCK  # type: ignore[arg-type]
        assert sparse.plan(step(), settled=True).break_even == 1000
