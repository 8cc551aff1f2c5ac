"""Keys of a request whose KV is not that of its tokens alone from some block on: no other request
can have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ucm.integration.vllm.connector.identity.keys import ExtraKeys, KeyMaker
from ucm.integration.vllm.connector.metadata import UCMConnectorWorkerMetadata, split_keys
from ucm.integration.vllm.connector.scheduler.lookup import BlockTracker, Lookup
from ucm.integration.vllm.connector.scheduler.requests import RequestTracker

PROMPT, BLOCKS = 4, 8


class Case:
    """A request that has decoded, the keys of its tokens, and what is kept of it."""

    def __init__(self) -> None:
        self.maker = KeyMaker("identity", BLOCK, "sha256", ExtraKeys(BLOCK))
        self.known = BlockTracker()
        tokens = list(range(BLOCKS * BLOCK + 1))
        self.request = Request("a", tokens[: PROMPT * BLOCK], SamplingParams(max_tokens=64), None)
        self.request.append_output_token_ids(tokens[PROMPT * BLOCK :])
        self.real = self.maker.first(self.request)
        self.tracker = RequestTracker(self.request)

    def grow(self, private_from: int | None) -> list[bytes]:
        """Keys of all its blocks."""
        assert self.tracker.grow(BLOCKS, self.maker, self.known, private_from) == BLOCKS
        return list(self.tracker.keys)


def test_a_lookup_that_hashed_output_too_gives_no_keys_to_approximate_blocks() -> None:
    """It ran on a thread, after the request had begun to decode."""
    case = Case()
    case.tracker.lookup = Lookup()
    case.tracker.lookup.hashed(list(case.real))
    case.tracker.chains[0].cursor = PROMPT - 1
    found = case.grow(PROMPT)
    assert found[:PROMPT] == case.real[:PROMPT]
    assert not set(found[PROMPT:]) & set(case.real)
    assert case.grow(PROMPT) == found, "and it does not bring them later"


def test_keys_behind_the_last_exact_block_are_forgotten() -> None:
    """From which length on choosing pays has just become known, and the keys were made before."""
    case = Case()
    assert case.grow(None) == case.real
    case.tracker.chains[0].cursor = PROMPT
    found = case.grow(PROMPT)
    assert found[:PROMPT] == case.real[:PROMPT]
    assert not set(found[PROMPT:]) & set(case.real)


def test_blocks_that_were_offered_as_exact_keep_their_keys() -> None:
    """They were computed before choosing began, and are in the store under these."""
    case = Case()
    case.grow(None)
    case.tracker.chains[0].cursor = 6
    case.known.writing(case.real, 1)
    for key in case.real[:6]:
        case.known.written(key)
    assert list(case.tracker.stored_keys(case.known)) == case.real[:6]
    found = case.grow(PROMPT)
    assert found[:6] == case.real[:6]
    assert not set(found[6:]) & set(case.real)
    assert list(case.tracker.stored_keys(case.known)) == case.real[:6]


def test_approximate_blocks_are_not_in_the_store_because_exact_ones_of_their_tokens_are() -> None:
    case = Case()
    case.known.found(case.real, BLOCKS)
    case.grow(None)
    assert list(case.tracker.stored_keys(case.known)) == case.real
    assert list(case.tracker.stored_keys(case.known, PROMPT)) == case.real[:PROMPT]
    case.grow(PROMPT)
    assert list(case.tracker.stored_keys(case.known, PROMPT)) == case.real[:PROMPT]


def test_a_block_that_a_rank_does_not_find_counts_as_not_stored() -> None:
    """Neither for the request whose block it was, nor for others with the same tokens."""
    rig = Rig()
    told: list[Request] = []
    rig.scheduler._offload = SimpleNamespace(lost=told.append, forget=lambda _: None)  # type: ignore[assignment]
    requests = [rig.request(name, 6 * BLOCK) for name in "ab"]
    keys = rig.keys_of(requests[0])
    for request in requests:
        tracker = rig.scheduler._live[request.request_id]
        tracker.chains[0].keys, tracker.stored = list(keys), 6
    news = UCMConnectorWorkerMetadata(lost=[("a", 2), ("nobody", 1), ("a", 99)])
    news = news.aggregate(UCMConnectorWorkerMetadata(lost=[("a", 4)]))
    rig.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=news))
    assert told == [requests[0]] * 2
    for request in requests:
        assert list(rig.scheduler._stored_keys(request)) == keys[:2]


def test_blocks_behind_an_offloaded_block_are_stored() -> None:
    """The block was stored before it left; where that has failed since, it cannot be offered again,
    and others can."""
    rig = Rig()
    request = rig.request("a", 6 * BLOCK)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 6), 0)
    table = rig.tables.tables["a"]
    table[2] = rig.tables.block_pool.null_block
    keys = rig.keys_of(request)
    plans = rig.step(request).dumps
    assert [split_keys(plan.keys) for plan in plans] == [keys[:2], keys[3:]]
    assert rig.scheduler._live["a"].cursor == 6


def test_a_preempted_request_has_the_keys_of_its_tokens_again() -> None:
    case = Case()
    case.grow(PROMPT)
    case.tracker.restart()
    assert case.grow(None) == case.real
