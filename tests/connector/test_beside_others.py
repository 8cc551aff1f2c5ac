"""Beside other connectors in vLLM's MultiConnector: what they fail to fill is not stored as if it
were right, and our two sides find each other whatever else is configured."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ucm.integration.vllm.connector.connector import UCMConnector
from ucm.integration.vllm.connector.factory import _multi_connector, _only_stores
from ucm.integration.vllm.connector.metadata import (
    Handshake,
    RankReport,
    UCMConnectorMetadata,
    UCMConnectorWorkerMetadata,
)
from ucm.integration.vllm.connector.worker.transfers import PendingLoads


def blocks_of(plan: UCMConnectorMetadata) -> list[tuple[int, int]]:
    """(first ordinal, number of blocks) of every dump of a plan."""
    return [(dump.first, len(dump.blocks)) for dump in plan.dumps]


def filled_by_another(rig: Rig, request: Request, blocks: int) -> None:
    """Another connector is to fill the first blocks of a request; vLLM counts them as computed from
    now on."""
    rig.admit(request)
    request.num_computed_tokens = blocks * BLOCK


def invalid(rig: Rig, *blocks: Any) -> None:
    """The output of a step says that these were not filled."""
    rig.scheduler.update_connector_output(
        KVConnectorOutput(invalid_block_ids={block.block_id for block in blocks})
    )


def table_of(rig: Rig, request: Request) -> list[Any]:
    return rig.tables.tables[request.request_id]


# Loads of others
# ----------------------------------------------------------------------------------------------


def test_blocks_another_connector_still_fills_are_not_offered_at_the_end_of_a_request() -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK)
    filled_by_another(rig, request, 3)
    rig.step()
    rig.scheduler.request_finished(request)
    assert blocks_of(rig.step()) == []


def test_blocks_that_another_connector_filled_are_offered_once_the_request_runs() -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK)
    filled_by_another(rig, request, 3)
    rig.step()
    rig.report(recved={"a"})
    assert blocks_of(rig.step(request)) == [(0, 4)]


def test_a_request_that_ran_and_was_preempted_has_to_run_again() -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK)
    rig.admit(request)
    rig.scheduler.dumps.room = lambda: 0  # type: ignore[method-assign]
    rig.step(request)
    del rig.scheduler.dumps.room
    rig.tables.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    filled_by_another(rig, request, 3)
    rig.scheduler.request_finished(request)
    assert blocks_of(rig.step()) == []


def test_nothing_is_offered_before_the_output_of_the_first_step() -> None:
    rig = Rig()
    request: Any = rig.request("a", 4 * BLOCK)
    filled_by_another(rig, request, 3)
    rig.scheduler.dumps.room = lambda: 0  # type: ignore[method-assign]
    rig.step(request)
    del rig.scheduler.dumps.room
    request.num_in_flight_tokens = BLOCK  # aborted while it runs
    rig.scheduler.request_finished(request)
    assert blocks_of(rig.step()) == []


def test_loaded_and_computed_blocks_are_offered_after_the_output_of_their_step() -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK)
    filled_by_another(rig, request, 2)
    assert blocks_of(rig.step(request, sync=True)) == []
    request.append_output_token_ids([1])
    assert blocks_of(rig.step(request)) == [(0, 4)]


def test_blocks_are_not_offered_before_their_output_when_steps_overlap() -> None:
    rig = Rig()
    request: Any = rig.request("a", 4 * BLOCK)
    filled_by_another(rig, request, 2)
    rig.step(request, sync=True)
    request.append_output_token_ids([1])
    request.num_in_flight_tokens = 2 * BLOCK
    assert blocks_of(rig.step(request)) == []
    request.append_output_token_ids([2])
    request.num_in_flight_tokens = 1
    assert blocks_of(rig.step(request)) == [(0, 4)]


def test_the_last_step_is_offered_too() -> None:
    rig = Rig()
    request, other = rig.request("a", 4 * BLOCK), rig.request("b", 2 * BLOCK, seed=1)
    filled_by_another(rig, request, 2)
    rig.admit(other)
    assert blocks_of(rig.step(request, other, sync=True)) == []
    rig.scheduler.request_finished(request)
    rig.scheduler.request_finished(other)
    assert blocks_of(rig.step()) == [(0, 4), (0, 2)]


def test_only_blocks_before_an_invalid_block_are_offered() -> None:
    rig = Rig()
    request = rig.request("a", 5 * BLOCK)
    filled_by_another(rig, request, 3)
    rig.step(request, sync=True)
    invalid(rig, table_of(rig, request)[1])
    request.num_computed_tokens = BLOCK  # as vLLM does
    # it computes the block again: nothing of that was seen
    assert blocks_of(rig.step(request)) == []
    request.append_output_token_ids([1] * BLOCK)
    assert blocks_of(rig.step(request)) == [(0, 1)]
    rig.scheduler.request_finished(request)
    assert blocks_of(rig.step()) == []


def test_requests_that_share_the_block_offer_nothing_from_there_on() -> None:
    rig = Rig()
    first, second = rig.request("a", 5 * BLOCK), rig.request("b", 6 * BLOCK)
    filled_by_another(rig, first, 3)
    rig.later.run()
    for ordinal, block in enumerate(table_of(rig, first)[:5]):
        block._block_hash = make_block_hash_with_group_id(BlockHash(bytes([ordinal]) * 32), 0)
    assert rig.scheduler.get_num_new_matched_tokens(second, 3 * BLOCK) == (0, False)
    share(rig, first, second, 3)
    second.num_computed_tokens = 3 * BLOCK
    assert blocks_of(rig.step(first, second, sync=True)) == []
    invalid(rig, table_of(rig, first)[1])
    first.num_computed_tokens = BLOCK
    for request in (first, second):
        request.append_output_token_ids([1])
    rig.step(first, second)
    rig.scheduler.request_finished(second)
    third = rig.request("c", 6 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(third, 3 * BLOCK) == (0, False)
    share(rig, first, third, 3)
    third.num_computed_tokens = 3 * BLOCK
    plan = rig.step(first, third)
    assert {dump.first for dump in plan.dumps} <= {0}
    rig.scheduler.request_finished(first)
    rig.scheduler.request_finished(third)
    assert blocks_of(rig.step()) == []


def share(rig: Rig, owner: Request, other: Request, blocks: int) -> None:
    """vLLM finds the first blocks of one request in its prefix cache for another."""
    fresh = rig.tables.block_pool.get_new_blocks(8)
    rig.tables.tables[other.request_id] = table_of(rig, owner)[:blocks] + fresh
    rig.scheduler.update_state_after_alloc(other, rig.tables.get_blocks(other.request_id), 0)


# Handshakes of others
# -----------------------------------------------------------------------------------------


@dataclass
class TheirHandshake(KVConnectorHandshakeMetadata):
    """The statistics of another connector's worker."""


class Other:
    """A connector that shakes hands through vLLM and takes no other's word, as Nixl does."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def get_handshake_metadata(self) -> TheirHandshake:
        return TheirHandshake()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if not all(isinstance(each, TheirHandshake) for each in metadata.values()):
            raise ValueError("TheirHandshake expected")
        self.told.append(metadata)

    def build_connector_worker_meta(self) -> None:
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        assert output.kv_connector_worker_meta is None


def half(scheduler: Any = None, worker: Any = None) -> UCMConnector:
    """One of our connectors without a configuration."""
    made = object.__new__(UCMConnector)
    made._scheduler, made._worker = scheduler, worker
    made._pending, made._found, made._unsent, made._block_tokens = PendingLoads(), {}, {}, BLOCK
    return made


def several(*connectors: Any) -> MultiConnector:
    """A MultiConnector of these."""
    made = object.__new__(MultiConnector)
    made._connectors = list(connectors)
    return made


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
def test_both_sides_connect_beside_another_connector_with_a_handshake(ours_first: bool) -> None:
    rig = Rig(opened=False)
    report = UCMConnectorWorkerMetadata(
        ranks=[
            RankReport(0, Handshake((0, 0, 0), 0, True, {"dtype": "float32"}, {}, "", rig.names))
        ]
    )
    theirs = [Other(), Other()]
    ours = [
        half(worker=SimpleNamespace(build_connector_worker_meta=lambda: report)),
        half(scheduler=rig.scheduler),
    ]
    worker, scheduler = (
        several(*((mine, other) if ours_first else (other, mine)))
        for mine, other in zip(ours, theirs, strict=True)
    )
    said = worker.get_handshake_metadata()
    assert isinstance(said, TheirHandshake)
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): said, (1, 0): said})
    assert len(theirs[1].told) == 1
    assert rig.readiness.phase == "pending"
    scheduler.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=worker.build_connector_worker_meta())
    )
    assert rig.readiness.phase == "opening"


def test_the_first_request_waits_for_the_step_in_which_the_workers_answer_and_no_longer() -> None:
    rig = Rig(opened=False)
    assert rig.scheduler.has_pending_push_work, "an idle engine takes that step at once"
    request = rig.request("a", 2 * BLOCK)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    rig.shake()
    rig.later.run()
    rig.ready()
    rig.weights_checked(rig.step())
    rig.stored(request, 1)
    # open: its lookup begins
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (
        None,
        False,
    )
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (BLOCK, True)

    silent = Rig(opened=False)
    request = silent.request("a", 2 * BLOCK)
    assert silent.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    silent.clock.now += 5.1
    assert silent.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not silent.scheduler.has_pending_push_work


def test_a_missing_handshake_of_a_worker_disables_the_cache() -> None:
    rig = Rig(ranks=2, opened=False)
    rig.report(RankReport(0, Handshake((0, 0, 0), 0, True, {}, {})))
    assert rig.readiness.why_off == "1 of 2 workers answered the handshake"


# Policy
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("role", ["kv_both", "kv_consumer", "kv_producer"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("outer", ["UCMConnector", "MultiConnector"])
def test_a_worker_sees_what_vllm_does_with_loads(
    monkeypatch: pytest.MonkeyPatch, outer: str, policy: str, role: str, batches: int
) -> None:
    """The role and the policy for failed loads count where vLLM's own connector is configured."""

    def config(name: str, **words: Any) -> Any:
        transfer = KVTransferConfig(kv_connector=name, **words)
        return SimpleNamespace(kv_transfer_config=transfer, max_concurrent_batches=batches)

    engine = config(outer, kv_role=role, kv_load_failure_policy=policy)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    several = outer == "MultiConnector"
    own = config("UCMConnector", kv_role="kv_both") if several else engine
    beside = _multi_connector(own)
    assert (beside is not None) == several
    said = _only_stores(beside, own)
    if role == "kv_producer" and batches > 1:
        assert said.endswith(f'write "kv_role": "kv_both" beside "kv_connector": "{outer}"')
    elif several and policy == "fail":  # alone, our scheduler side sets it
        wanted = 'write "kv_load_failure_policy": "recompute" beside "kv_connector"'
        assert said.endswith(f'{wanted}: "MultiConnector"')
    else:
        assert said == ""


def test_nothing_is_loaded_where_a_failed_load_would_fail_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(opened=False)
    rig.shake(only_stores="write the policy")
    rig.later.run()
    rig.ready()
    rig.readiness.request_weights_check()
    rig.weights_checked(rig.step())
    request = rig.request("a", 4 * BLOCK)
    rig.stored(request, 2)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 6), 0)
    assert rig.scheduler.miss_stats.total.missed == {"unsupported": 4}
    assert blocks_of(rig.step(request)) == [(2, 2)], "stored all the same"
    assert "write the policy" in caplog.text
