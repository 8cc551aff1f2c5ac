"""The scheduler's side of sparse attention without an engine: which tokens count as exact, and
since when."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ucm.config.sparse import keys_of
from ucm.integration.vllm.attention.setup import NEVER
from ucm.integration.vllm.connector.scheduler.sparse import SparseScheduler
from ucm.sparse.base import UcmSparseBase, UcmSparseRole
from ucm.sparse.method import method_for

Quest = method_for("Quest")
QuestConfig = keys_of("Quest")

BLOCK = 32


def scheduler(**keys: Any) -> SparseScheduler:
    vllm = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK),
        model_config=SimpleNamespace(model="m", max_model_len=4096),
    )
    return SparseScheduler(
        Quest(vllm, UcmSparseRole.SCHEDULER, QuestConfig(ratio=0.3, **keys)), BLOCK
    )


def step(*names: str) -> Any:
    """A step of these requests."""
    cached = SimpleNamespace(req_ids=list(names), num_computed_tokens=[100] * len(names))
    return SimpleNamespace(
        scheduled_cached_reqs=cached,
        scheduled_new_reqs=[],
        num_scheduled_tokens=dict.fromkeys(names, 1),
    )


class Request:
    request_id, num_tokens, num_preemptions = "a", 100, 0


def test_measurements_during_planning_apply_from_the_next_step_on() -> None:
    """vLLM has cached the blocks of the step by then, as exact ones: the workers are to compute
    them so."""
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


def test_removed_blocks_are_reported_with_the_next_plan_after_a_failure() -> None:
    sparse = scheduler(offload=True, min_tokens=0)
    assert sparse.offload is not None
    sparse._requests["a"] = Request()  # type: ignore[assignment]
    sparse._finished.append("b")
    sparse.offload.given("a", [7])
    sparse.offload.gave_back("c")
    sparse._manager = SimpleNamespace(get_blocks=lambda _: SimpleNamespace(blocks=[[]]))  # type: ignore[assignment]
    with pytest.raises(IndexError):
        sparse.plan(step("a"), settled=True)
    plan = sparse.plan(step(), settled=True)
    assert plan.finished == ["b"]
    assert [(change.request, change.hot) for change in plan.offloaded] == [("a", [7])]


def test_a_measurement_lost_with_a_failed_plan_is_requested_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sparse = scheduler(offload=True)
    assert sparse.offload is not None
    sparse._requests["a"] = Request()  # type: ignore[assignment]
    table = [SimpleNamespace(block_id=at) for at in range(4)]
    sparse._manager = SimpleNamespace(get_blocks=lambda _: SimpleNamespace(blocks=[table]))  # type: ignore[assignment]
    monkeypatch.setattr(Request, "num_prompt_tokens", 90, raising=False)
    with monkeypatch.context() as planted:
        planted.setattr(sparse.offload, "take", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sparse.plan(step("a"), settled=True)
    assert not sparse.measuring()
    assert sparse.plan(step("a"), settled=True).measure
    assert sparse.measuring()


def test_a_warning_names_a_users_hook_that_is_not_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slots(UcmSparseBase):
        def estimate_num_slots_sparsed(self, request: Any) -> int:
            return 3

    logging.getLogger("ucm").propagate = True
    with caplog.at_level(logging.WARNING):
        SparseScheduler(UcmSparseBase(None, UcmSparseRole.SCHEDULER), BLOCK)
        assert "estimate_num_slots_sparsed" not in caplog.text
        SparseScheduler(Slots(None, UcmSparseRole.SCHEDULER), BLOCK)
    assert "estimate_num_slots_sparsed of Slots is not called" in caplog.text


def test_blocks_of_a_request_are_reported_once() -> None:
    """When it is admitted, and not again when a load of it has ended: it has filled them by
    then."""
    sparse, request = scheduler(), Request()
    table = [SimpleNamespace(block_id=number, is_null=number == 6) for number in range(3, 9)]
    blocks: Any = SimpleNamespace(blocks=[table])
    sparse.found_on_device(request, 2 * BLOCK)  # type: ignore[arg-type]
    sparse.update_state_after_alloc(request, blocks)  # type: ignore[arg-type]
    assert sparse.plan(step(), settled=True).given.tolist() == [5, 7, 8]
    sparse.update_state_after_alloc(request, blocks)  # type: ignore[arg-type]
    assert not len(sparse.plan(step(), settled=True).given)
