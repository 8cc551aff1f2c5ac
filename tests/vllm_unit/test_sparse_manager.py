"""vLLM's KV cache manager under sparse attention: which blocks are cached, and what an offloaded
request holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sparse_parts import BLOCK, QUEST, SparseEngine

from ucm.config.sparse import keys_of
from ucm.sparse.base import UcmSparseRole
from ucm.sparse.method import method_for

Quest = method_for("Quest")
Windows = method_for("Windows")
QuestConfig = keys_of("Quest")
WindowsConfig = keys_of("Windows")

pytestmark = pytest.mark.timeout(300)

OFFLOAD: dict[str, Any] = {"ratio": 0.3, "min_tokens": 0, "offload": True}


class Managed(SparseEngine):
    """vLLM's KV cache manager of an engine with sparse attention."""

    def __init__(self, engines: Any, tiny: Path, tmp_path: Path, **keys: Any) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        from ucm.integration.vllm.attention.spec import SparseManager

        super().__init__(engines, tiny, tmp_path, **keys)
        self.manager = KVCacheManager(
            self.kv_cache,
            max_model_len=1024,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=2048,
        )
        (self.single,) = self.manager.coordinator.single_type_managers
        assert isinstance(self.single, SparseManager)


def test_the_manager_caches_exact_blocks_alone(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """A request of 100 tokens of prompt whose first decode step selects: its output is no prefix
    for anybody."""
    from ucm.integration.vllm.attention.spec import ExactTokens

    managed = Managed(engines, tiny, tmp_path, **QUEST)
    manager, request = managed.manager, managed.request

    class Method(Windows):
        def exact_tokens(self, prefill_tokens: int) -> int:
            return max(prefill_tokens, 40)

    exact = ExactTokens(Method(None, UcmSparseRole.SCHEDULER, WindowsConfig(min_tokens=0)))
    managed.single.exact_tokens = exact
    prompt = list(range(3, 103))
    first = request(prompt, "a")
    assert manager.allocate_slots(first, 100) is not None
    first.num_computed_tokens = 100
    for token in range(60):
        first.append_output_token_ids(token)
        assert manager.allocate_slots(first, 1) is not None
        first.num_computed_tokens += 1
    again = request(list(first.all_token_ids), "b")
    assert manager.get_computed_blocks(again)[1] == 96
    # Preempted and computed again: what was output before is a prompt now.
    manager.free(first)
    first.num_preemptions += 1
    first.num_computed_tokens = 0
    blocks, found, _ = manager.get_computed_blocks(first)
    assert manager.allocate_slots(first, 160 - found, found, blocks) is not None
    assert exact.prefill_tokens(first) == 160
    assert manager.get_computed_blocks(again)[1] == 128


def test_the_manager_keeps_blocks_that_others_hold_too(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    """Two requests with one prompt: neither's blocks leave, which would free none; those of the
    last one do."""
    from ucm.integration.vllm.attention.spec import ExactTokens
    from ucm.integration.vllm.connector.scheduler.offload import OffloadPlanner

    managed = Managed(engines, tiny, tmp_path, **QUEST)
    manager, free = managed.manager, managed.manager.block_pool.get_num_free_blocks()
    method, requests = Quest(managed.config, UcmSparseRole.SCHEDULER, QuestConfig(**OFFLOAD)), {}
    exact = ExactTokens(method)
    planner = managed.single.offload = OffloadPlanner(method, requests, exact, BLOCK, 1000)
    planner.stored = lambda _request: [bytes(16)] * 28
    for name in "ab":
        request = requests[name] = managed.request(list(range(30 * BLOCK + 1)), name)
        exact.prefill_tokens(request)
        found, hit, *_ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 30 * BLOCK + 1 - hit, hit, found) is not None
        request.num_computed_tokens = 30 * BLOCK + 1

    def step(name: str) -> bool:
        request = requests[name]
        request.append_output_token_ids(1)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        return any(block.is_null for block in manager.get_blocks(name).blocks[0])

    assert not step("a") and not step("b")
    assert free - manager.block_pool.get_num_free_blocks() == 32
    manager.free(requests.pop("a"))
    assert any(step("b") for _ in range(BLOCK + 1))
    assert free - manager.block_pool.get_num_free_blocks() < 16


def test_the_manager_has_no_room_for_a_request_that_is_to_begin_anew(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    """vLLM preempts it; admitted again, it is given all of its blocks."""
    from ucm.integration.vllm.attention.spec import ExactTokens
    from ucm.integration.vllm.connector.scheduler.offload import OffloadPlanner

    managed = Managed(engines, tiny, tmp_path, **QUEST)
    manager = managed.manager
    method, requests = Quest(managed.config, UcmSparseRole.SCHEDULER, QuestConfig(**OFFLOAD)), {}
    exact = ExactTokens(method)
    planner = managed.single.offload = OffloadPlanner(method, requests, exact, BLOCK, 1000)
    planner.stored = lambda _request: [bytes(16)] * 30
    request = requests["a"] = managed.request(list(range(30 * BLOCK)), "a")
    exact.prefill_tokens(request)
    assert manager.allocate_slots(request, 30 * BLOCK) is not None
    request.num_computed_tokens = 30 * BLOCK
    request.append_output_token_ids(1)
    assert manager.allocate_slots(request, 1) is not None
    assert any(block.is_null for block in manager.get_blocks("a").blocks[0])
    request.num_computed_tokens += 1
    request.append_output_token_ids(1)
    planner.lost(request)
    assert manager.allocate_slots(request, 1) is None
    manager.free(request)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    exact.prefill_tokens(request)
    assert manager.allocate_slots(request, 30 * BLOCK + 2) is not None
    request.num_computed_tokens = 30 * BLOCK + 2
    request.append_output_token_ids(1)
    assert manager.allocate_slots(request, 1) is not None
    assert not any(block.is_null for block in manager.get_blocks("a").blocks[0])


def test_vllms_scheduler_computes_a_request_anew_that_has_lost_a_block(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    """And those admitted after it, whose blocks it finds in its prefix cache; one admitted before
    goes on."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from ucm.integration.vllm.attention.spec import ExactTokens
    from ucm.integration.vllm.connector.scheduler.offload import OffloadPlanner

    managed = Managed(engines, tiny, tmp_path, **QUEST)
    managed.config.kv_transfer_config = None
    managed.config.cache_config.num_gpu_blocks = managed.kv_cache.num_blocks
    unused: Any = SimpleNamespace(accept_tokens=lambda *_: True, should_advance=lambda _: False)
    scheduler = Scheduler(managed.config, managed.kv_cache, unused, BLOCK, hash_block_size=BLOCK)
    manager = scheduler.kv_cache_manager
    exact = ExactTokens(
        method := Quest(managed.config, UcmSparseRole.SCHEDULER, QuestConfig(**OFFLOAD))
    )
    planner = OffloadPlanner(method, scheduler.requests, exact, BLOCK, 1000)
    manager.coordinator.single_type_managers[0].offload = planner
    planner.stored = lambda _request: [bytes(16)] * 28
    for number, name in enumerate("abc"):
        scheduler.add_request(
            managed.request([(7 * number + at) % 500 for at in range(20 * BLOCK)], name)
        )

    def step() -> dict[str, int]:
        for request in scheduler.requests.values():
            exact.prefill_tokens(request)
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        done = [
            scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_tokens
            for name in names
        ]
        places = {name: at for at, name in enumerate(names)}
        scheduler.update_from_output(
            output, ModelRunnerOutput(names, places, [[5] if each else [] for each in done])
        )
        return dict(output.num_scheduled_tokens)

    def away(name: str) -> bool:
        return any(block.is_null for block in manager.get_blocks(name).blocks[0])

    for _ in range(6):
        step()
    assert all(away(name) for name in "abc")
    planner.lost(scheduler.requests["b"])
    tokens = scheduler.requests["b"].num_tokens
    for _ in range(8):
        step()
    assert [scheduler.requests[name].num_preemptions for name in "abc"] == [0, 1, 1]
    assert scheduler.requests["b"].num_tokens > tokens
    assert away("a") and not away("b") and away("c")


def test_the_manager_gives_a_prompt_that_is_not_read_its_windows_and_hot_blocks(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    """While its load goes on, when it decodes, and when the load has failed and it is loaded
    whole."""
    managed = Managed(engines, tiny, tmp_path, **QUEST)
    manager, single = managed.manager, managed.single
    free = manager.block_pool.get_num_free_blocks()
    given: list[int] = []
    plan = SimpleNamespace(
        unread=lambda _: range(1, 28),
        hot=lambda *_: 5,
        given=lambda _, blocks: given.extend(blocks),
        leaving=lambda *_: range(0),
        gave_back=lambda _: None,
        begins_anew=lambda _: False,
    )
    single.offload = plan
    first = managed.request(list(range(30 * BLOCK + 5)), "a")
    manager.block_pool.get_new_blocks(free - 9)  # there is no room for all of it
    assert manager.allocate_slots(
        first,
        0,
        num_external_computed_tokens=30 * BLOCK,
        delay_cache_blocks=True,
        full_sequence_must_fit=True,
    )
    table = manager.get_blocks("a").blocks[0]
    assert [at for at, block in enumerate(table) if not block.is_null] == [0, 28, 29]
    assert len(given) == 5 and manager.block_pool.get_num_free_blocks() == 1
    first.num_computed_tokens = 30 * BLOCK
    plan.unread = lambda _: range(0)  # it is admitted
    manager.cache_blocks(first, first.num_computed_tokens)
    assert manager.get_computed_blocks(managed.request(list(range(30 * BLOCK + 5)), "b"))[1] == 0
    assert manager.allocate_slots(first, 5)
    assert (
        len(manager.get_blocks("a").blocks[0]) == 31
        and manager.block_pool.get_num_free_blocks() == 0
    )
    manager.free(first)
    assert manager.block_pool.get_num_free_blocks() == 9
    first.num_computed_tokens = 0
    assert (
        manager.allocate_slots(
            first, 0, num_external_computed_tokens=30 * BLOCK, delay_cache_blocks=True
        )
        is None
    )
