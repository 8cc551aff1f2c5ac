"""Blend in the scheduler side without an engine: which chunks a request claims, where their records
are loaded, and what becomes of them."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Rig
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from ucm.config.sparse import BlendConfig
from ucm.integration.vllm.connector.admission.rates import ComputeSpeed, LoadSpeed
from ucm.integration.vllm.connector.identity.weights import WeightSource
from ucm.integration.vllm.connector.metadata import (
    Blended,
    LoadFailure,
    RankReport,
    UCMConnectorWorkerMetadata,
    join_keys,
    split_keys,
)
from ucm.integration.vllm.connector.scheduler.blend import (
    TRIED,
    BlendPlanner,
    claim_of,
    why_not_blended,
)
from ucm.integration.vllm.connector.stats import MissStats
from ucm.sparse.base import ALL_TOKENS
from ucm.sparse.blend.chunks import Hit
from ucm.store import part_mask, record_ids

STORED = [(7 * at + 3) % 997 for at in range(12 * BLOCK)]
QUESTION = [1001, 1002, 1003]
#: A prefix of two blocks, three other tokens, and a chunk.
MIXED = [*STORED[: 2 * BLOCK], 500, 501, 502, *STORED[4 * BLOCK : 9 * BLOCK], *QUESTION]


def planner(step_tokens: int = 0, **keys: Any) -> BlendPlanner:
    given: dict[str, Any] = {"chunk_size": 2 * BLOCK, "min_hit_blocks": 1, "ratio": 0.0, **keys}
    return BlendPlanner(BlendConfig(**given), BLOCK, step_tokens=step_tokens)


def rig_with(blend: BlendPlanner | None = None, **settings: Any) -> Rig:
    """A rig whose store has a prompt of twelve blocks; a request for it has found that."""
    rig = Rig(blend=blend or planner(), **settings)
    first = rig.request("stored", 0, tokens=STORED + QUESTION)
    rig.stored(first, 12)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(first, 0) == (12 * BLOCK, True)
    return rig


def other(rig: Rig, name: str = "other", lead: int = 2 * BLOCK, **more: Any) -> Request:
    """A request for blocks two to five of it behind other tokens."""
    tokens = [*range(500, 500 + lead), *STORED[2 * BLOCK : 6 * BLOCK], *QUESTION]
    made = rig.request(name, 0, tokens=tokens, **more)
    rig.later.run()
    return made


def asked(rig: Rig, request: Request, local: int = 0) -> tuple[int | None, bool]:
    assert rig.blend is not None
    rig.blend.asked(request)  # as the connector does, also once the side is given up
    found = rig.scheduler.get_num_new_matched_tokens(request, local)
    rig.later.run()
    return found


def admitted(rig: Rig, request: Request, tokens: int, local: int = 0) -> Any:
    """vLLM gives it blocks for a load of ``tokens``; returns the table."""
    table = rig.tables.allocate(request, -(-request.num_tokens // BLOCK) + 1)
    rig.scheduler.update_state_after_alloc(request, table, tokens)
    request.num_computed_tokens = local + tokens
    return [block.block_id for block in table.blocks[0]]


def runs(rig: Rig, request: Request) -> Any:
    """It is scheduled for the first time since its load has ended."""
    rig.scheduler.update_state_after_alloc(request, rig.tables.get_blocks(request.request_id), 0)
    return rig.step(request).blends


# A claim
# --------------------------------------------------------------------------------------------------


def test_chunks_are_claimed_with_what_is_between_them_and_loaded_side_by_side() -> None:
    rig = rig_with()
    request = other(rig)
    assert rig.blend is not None
    keys = rig.keys_of(rig.scheduler._live["stored"].request)
    assert asked(rig, request) == (6 * BLOCK, True)
    assert rig.blend.exact_tokens(request) == 0  # before anything is loaded
    table = admitted(rig, request, 6 * BLOCK)
    (load,) = rig.step().loads
    assert load.whole and load.first == 0 and load.blocks.tolist() == table[:4]
    assert split_keys(load.keys) == keys[2:6]
    (blend,) = runs(rig, request)
    assert (blend.exact, blend.end, blend.table) == (0, 6 * BLOCK, tuple(table[:6]))
    (hit,) = blend.hits
    assert (hit.start, hit.end, hit.source) == (2 * BLOCK, 6 * BLOCK, 2 * BLOCK)
    assert hit.blocks == tuple(table[:4])
    assert blend.tokens.tolist() == request.prompt_token_ids
    assert (blend.question, blend.asks_at) == (3, 6 * BLOCK)
    assert not rig.step(request).blends  # once
    assert rig.blend.exact_tokens(request) == 0


def test_the_question_is_the_end_of_the_prompt() -> None:
    rig = rig_with(planner(question_tokens=2))
    request = other(rig)
    assert asked(rig, request) == (6 * BLOCK, True)
    admitted(rig, request, 6 * BLOCK)
    rig.step()
    (blend,) = runs(rig, request)
    assert (blend.question, blend.asks_at) == (2, request.num_tokens - 2)
    assert blend.tokens.tolist() == [*request.prompt_token_ids[: 6 * BLOCK], *QUESTION[1:]]


def test_vllm_may_ask_until_it_has_room() -> None:
    rig = rig_with()
    request = other(rig)
    assert rig.blend is not None
    for _ in range(3):
        assert asked(rig, request) == (6 * BLOCK, True)
        assert rig.blend.exact_tokens(request) == 0
    assert not rig.step().loads
    # By now a longer prefix is on the device than chunks begin behind.
    assert asked(rig, request, 3 * BLOCK) == (3 * BLOCK, True)
    assert rig.blend.exact_tokens(request) == 3 * BLOCK


def test_a_claim_that_is_not_admitted_leaves_a_request_exact() -> None:
    rig = rig_with()
    request = other(rig)
    assert rig.blend is not None
    assert asked(rig, request) == (6 * BLOCK, True)
    rig.store.ids.clear()
    rig.scheduler._block_tracker.refuse(rig.keys_of(rig.scheduler._live["stored"].request)[3])
    # Two chunks of one block are left of it, behind which there is no whole one.
    assert asked(rig, request) == (6 * BLOCK, True)
    for key in rig.keys_of(rig.scheduler._live["stored"].request):
        rig.scheduler._block_tracker.refuse(key)
    assert asked(rig, request) == (0, False)
    assert rig.blend.exact_tokens(request) == ALL_TOKENS


def test_records_that_some_rank_lacks_are_no_hits() -> None:
    rig = Rig(ranks=2, blend=planner())
    first = rig.request("stored", 0, tokens=STORED + QUESTION)
    rig.stored(first, 12)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(first, 0)
    for key in record_ids(rig.keys_of(first)[4:6], part_mask(0, 0, 1)):
        rig.store.ids.discard(key)
    request = other(rig)
    assert asked(rig, request) == (4 * BLOCK, True)


def test_a_request_names_its_chunks_and_nothing_behind_them_is_claimed() -> None:
    rig = rig_with()
    tokens = [*STORED[: 4 * BLOCK], 999, *STORED[4 * BLOCK : 8 * BLOCK], *QUESTION]
    named = {"ucm": {"chunks": [[0, 4 * BLOCK + 1]]}}
    request = rig.request("named", 0, tokens=tokens, params=named)
    rig.later.run()
    # Its prefix is exact. What follows its last chunk is the question.
    assert asked(rig, request) == (4 * BLOCK, True)
    assert rig.blend is not None and rig.blend.exact_tokens(request) == ALL_TOKENS


def test_chunks_alone_are_those_with_which_a_stored_prompt_began() -> None:
    rig = rig_with(planner(chunk_alone=True))
    assert asked(rig, other(rig)) == (0, False)
    tokens = [500, 501, *STORED[: 6 * BLOCK], *QUESTION]
    request = rig.request("begin", 0, tokens=tokens)
    assert asked(rig, request)[0] is None
    assert asked(rig, request) == (2 * BLOCK, True)  # a chunk, up to its last whole block
    assert rig.blend is not None and not rig.blend.exact_tokens(request)


def test_wrong_chunks_are_no_reason_not_to_load_a_prefix() -> None:
    rig = rig_with()
    odd: tuple[Any, ...] = ([[5, 3]], "all", [[0, 10_000]], [["a", "b"]])
    for at, params in enumerate(["all", ["ucm"], *({"ucm": {"chunks": one}} for one in odd)]):
        request = rig.request(f"wrong {at}", 0, tokens=STORED + QUESTION, params=params)
        rig.later.run()
        assert asked(rig, request) == (12 * BLOCK, True)


@pytest.mark.parametrize(
    "more",
    [
        {"salt": "another"},
        {"params": {"ucm": {"load": False}}},
        {"params": {"ucm": {"max_load_tokens": 8}}},
        {"params": {"do_remote_decode": True}},  # whose KV is all that is wanted of it
        {"adapter": LoRARequest("a", 1, "/nowhere")},
    ],
)
def test_some_requests_claim_no_chunks(more: dict[str, Any]) -> None:
    rig = rig_with()
    request = other(rig, **more)
    found, _ = asked(rig, request)
    assert not found
    assert rig.blend is not None and rig.blend.exact_tokens(request) == ALL_TOKENS


def test_chunks_of_one_salt_are_found_by_its_own_requests() -> None:
    rig = Rig(blend=planner())
    first = rig.request("stored", 0, tokens=STORED + QUESTION, salt="mine")
    rig.stored(first, 12)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(first, 0)
    assert asked(rig, other(rig, "theirs")) == (0, False)
    assert asked(rig, other(rig, "mine", salt="mine")) == (6 * BLOCK, True)


def test_prompt_logprobs_need_every_token_computed() -> None:
    rig = rig_with()
    request = other(rig)
    request.skip_reading_prefix_cache = True
    assert asked(rig, request) == (0, False)


def test_a_claim_computes_no_more_than_a_step() -> None:
    """Between the chunks, and of their tokens, beside the question."""
    tokens = 2 * BLOCK + int(0.25 * 4 * BLOCK)
    for room, claimed in ((tokens, 6 * BLOCK), (tokens - 1, 0)):
        blend = planner(step_tokens=room + 3, question_tokens=3, ratio=0.25)
        rig = rig_with(blend)
        assert asked(rig, other(rig)) == (claimed, claimed > 0)


@pytest.mark.parametrize("release", ["runs", "ends", "fails"])
def test_claims_that_may_run_in_one_step_fit_into_it_together(release: str) -> None:
    """Each has twelve tokens between its chunks, four of them, and a question of three: the second
    claim has room for its first chunk alone, and the third request computes as usual. The room of a
    claim is free once its request runs, or will not."""
    blend = planner(step_tokens=32, question_tokens=3, ratio=0.25)
    rig, ends = rig_with(blend), list[int]()
    tokens = [*range(500, 508), *STORED[8:16], *range(600, 604), *STORED[24:32], *QUESTION]

    def claims(name: str) -> Request:
        request = rig.request(name, 0, tokens=tokens)
        rig.later.run()
        ends.append(asked(rig, request)[0] or 0)
        admitted(rig, request, ends[-1])
        return request

    first, _, third = [claims(f"r{at}") for at in range(3)]
    assert ends == [7 * BLOCK, 4 * BLOCK, 0]
    assert blend.exact_tokens(third) == ALL_TOKENS
    rig.step()
    if release == "runs":
        assert runs(rig, first)
    elif release == "ends":
        blend.finished(first)
        rig.scheduler.request_finished(first)
    else:
        rig.report(failed(rig, first), recved={"r0"})
        assert asked(rig, first) == (0, False)
    claims("r3")
    assert ends[3] == 7 * BLOCK


def test_a_claim_that_vllm_has_no_room_for_takes_none_from_others() -> None:
    rig = rig_with(planner(step_tokens=15, question_tokens=3, ratio=0.25))
    for at in range(3):
        assert asked(rig, other(rig, f"r{at}")) == (6 * BLOCK, True)
    admitted(rig, rig.scheduler._live["r1"].request, 6 * BLOCK)
    assert asked(rig, rig.scheduler._live["r0"].request) == (0, False)


def test_fewer_blocks_than_the_least_are_not_blended() -> None:
    for least, claimed in ((4, 6 * BLOCK), (5, 0)):
        rig = rig_with(planner(min_hit_blocks=least))
        assert asked(rig, other(rig)) == (claimed, claimed > 0)


@pytest.mark.parametrize("seed", range(40))
def test_any_claim_has_room_for_its_records(seed: int) -> None:
    """Hits of any length, anywhere in blocks, some of whose records were evicted, some in the exact
    prefix."""
    source, size = random.Random(seed), source_size(seed)
    chains = [[bytes([chain, at]) * 8 for at in range(40)] for chain in range(3)]
    prefix = chains[0][: source.randrange(4)]
    hits, at = list[Hit](), source.randrange(3 * size)
    while at < 30 * size:
        tokens, begin = source.randrange(1, 6 * size), source.randrange(20 * size)
        keys = source.choice(chains)[begin // size : -(-(begin + tokens) // size)]
        hits.append(Hit(at, at + tokens, begin, join_keys(keys)))
        at += tokens + source.choice([0, 0, source.randrange(2 * size)])
    there = {key for keys in chains for key in keys if source.random() < 0.9}
    limit, most = 28 * size, source.choice([math.inf, 5 * size, 20 * size])
    claim = claim_of(
        hits,
        there,
        prefix,
        limit,
        size,
        ratio=0.2,
        most_computed=most,
        fewest=size,
    )
    if claim is None:
        return
    exact = len(prefix) * size
    assert exact < claim.end <= limit and claim.end % size == 0
    assert len(claim.keys) == len(set(claim.keys)) <= (claim.end - exact) // size
    assert set(claim.keys) <= there and not set(claim.keys) & set(prefix)
    assert claim.missed + claim.reused // 5 <= most
    before = exact
    for hit in claim.hits:
        assert before <= hit.start and hit.tokens >= size and hit.end <= claim.end
        before = hit.end
        (whole,) = [each for each in hits if each.start <= hit.start and hit.end <= each.end]
        assert hit.source - whole.source == hit.start - whole.start
        skipped = hit.source // size - whole.source // size
        held = split_keys(hit.keys)
        assert held == split_keys(whole.keys)[skipped : skipped + len(held)]
        assert len(held) == -(-(hit.source + hit.tokens) // size) - hit.source // size
        for key in held:
            place = claim.places[key]
            assert place < len(prefix) + len(claim.keys)
            assert (
                prefix[place] if place < len(prefix) else claim.keys[place - len(prefix)]
            ) == key


def source_size(seed: int) -> int:
    return (1, 4, 16)[seed % 3]


# What becomes of it
# --------------------------------------------------------------------------------------------------


def failed(rig: Rig, request: Request, rank: int = 0, refused: bytes = b"") -> RankReport:
    failure = LoadFailure(request.request_id, 0, refused, ("not_found",) * 4)
    return RankReport(rank, ready=True, load_failures=[failure])


def test_a_failed_load_is_computed_and_not_tried_again() -> None:
    rig = rig_with()
    request = other(rig)
    assert rig.blend is not None
    assert asked(rig, request) == (6 * BLOCK, True)
    table = admitted(rig, request, 6 * BLOCK)
    (load,) = rig.step().loads
    rig.report(failed(rig, request, refused=load.keys[:16]), recved={"other"})
    # vLLM has nothing of it, so it queries again.
    rig.tables.free(request)
    request.num_computed_tokens = 0
    assert asked(rig, request) == (0, False)
    assert rig.blend.exact_tokens(request) == ALL_TOKENS
    assert admitted(rig, request, 0) != table
    assert not rig.step(request).blends
    # Others claim what is left of the chunk: without the first of its four records.
    assert asked(rig, other(rig, "third")) == (6 * BLOCK, True)


def test_a_load_that_fails_after_its_request_has_ended_is_forgotten() -> None:
    rig = rig_with()
    request = other(rig)
    assert asked(rig, request) == (6 * BLOCK, True)
    admitted(rig, request, 6 * BLOCK)
    rig.step()
    assert rig.blend is not None
    rig.blend.finished(request)  # by the connector
    rig.scheduler.request_finished(request)
    rig.report(failed(rig, request), recved={"other"})
    assert asked(rig, other(rig)) == (6 * BLOCK, True)


def test_after_a_failed_load_vllm_goes_on_from_what_it_has() -> None:
    """It has a prefix of its own: it queries no more, and computes from there on."""
    rig = rig_with()
    request = other(rig)
    assert rig.blend is not None
    assert asked(rig, request, BLOCK) == (5 * BLOCK, True)
    admitted(rig, request, 5 * BLOCK, BLOCK)
    rig.step()
    rig.report(failed(rig, request), recved={"other"})
    assert rig.blend.exact_tokens(request) == BLOCK  # until it runs
    request.num_computed_tokens = BLOCK
    assert not runs(rig, request)
    assert rig.blend.exact_tokens(request) == ALL_TOKENS
    rig.tables.free(request)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert [asked(rig, request)[0] for _ in range(2)] == [None, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_if_vllm_goes_on_behind_a_failed_load_the_workers_compute_all_of_it(rank: int) -> None:
    """Of several ranks one has failed: nothing that any of them loaded is used, not even the second
    block of the prefix."""
    rig = Rig(ranks=2, blend=planner())
    first = rig.request("stored", 0, tokens=STORED + QUESTION)
    rig.stored(first, 12)
    rig.later.run()
    rig.scheduler.get_num_new_matched_tokens(first, 0)
    request = rig.request("other", 0, tokens=MIXED)
    rig.later.run()
    assert rig.blend is not None
    assert asked(rig, request, BLOCK) == (5 * BLOCK, True)
    assert rig.blend.exact_tokens(request) == 2 * BLOCK
    admitted(rig, request, 5 * BLOCK, BLOCK)
    rig.step()
    rig.report(failed(rig, request, rank), recved={"other"})
    (blend,) = runs(rig, request)
    assert (blend.hits, blend.exact, blend.end) == ((), BLOCK, 6 * BLOCK)
    assert blend.tokens.tolist()[: 5 * BLOCK] == request.prompt_token_ids[BLOCK : 6 * BLOCK]
    assert rig.blend.exact_tokens(request) == BLOCK


def test_vllm_may_take_less_of_a_claim_than_its_chunks() -> None:
    """A part of it is no load, and the connector has it fail: records of chunks are not where its
    tokens are. Had vLLM continued behind it, the workers would compute it."""
    rig = rig_with()
    assert rig.blend is not None
    for at, external in enumerate((2 * BLOCK, 4 * BLOCK)):
        request = rig.request(f"less {at}", 0, tokens=MIXED)
        rig.later.run()
        found, _ = asked(rig, request)
        assert found == 6 * BLOCK and rig.blend.exact_tokens(request) == 2 * BLOCK
        admitted(rig, request, external)
        assert not rig.step().loads
        assert rig.blend.exact_tokens(request) == 0
        (blend,) = runs(rig, request)
        assert (blend.hits, blend.exact, blend.end) == ((), 0, external)
    assert rig.scheduler.stats()["hit_blocks"] == 0


@pytest.mark.parametrize("local", [0, BLOCK])
def test_vllm_may_take_nothing_of_a_claim(local: int) -> None:
    """It waits for no load then, and computes the prompt in the same step."""
    rig = rig_with()
    request = other(rig)
    assert rig.blend is not None
    assert asked(rig, request, local) == (6 * BLOCK - local, True)
    admitted(rig, request, 0, local)
    plan = rig.step(request)
    assert not plan.loads and not plan.blends
    assert rig.blend.exact_tokens(request) == ALL_TOKENS


def test_a_preempted_request_asks_anew() -> None:
    rig = rig_with()
    request = other(rig)
    assert rig.blend is not None
    assert asked(rig, request) == (6 * BLOCK, True)
    admitted(rig, request, 6 * BLOCK)
    rig.step()
    assert runs(rig, request)
    assert rig.blend.exact_tokens(request) == 0
    request.append_output_token_ids([5, 6])
    rig.tables.free(request)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert asked(rig, request) == (None, False)  # its chunks are looked up again
    assert asked(rig, request) == (6 * BLOCK, True)
    admitted(rig, request, 6 * BLOCK)
    rig.step()
    (blend,) = runs(rig, request)
    assert (blend.question, blend.tokens.tolist()[-2:]) == (5, [5, 6])


def test_blocks_behind_the_exact_prefix_are_not_offered() -> None:
    """Neither while the request runs nor when it ends."""
    rig = rig_with()
    request = other(rig)
    assert asked(rig, request, BLOCK) == (5 * BLOCK, True)
    admitted(rig, request, 5 * BLOCK, BLOCK)
    rig.step()
    rig.report(RankReport(0, ready=True), recved={"other"})
    rig.scheduler.update_state_after_alloc(request, rig.tables.get_blocks("other"), 0)
    plans = [rig.step(request)]
    request.append_output_token_ids(list(range(3 * BLOCK)))
    plans.append(rig.step(request))
    rig.scheduler.request_finished(request)
    plans.append(rig.step())
    offered = [(one.first, len(one.blocks)) for plan in plans for one in plan.dumps]
    assert offered == [(0, 1)]


@pytest.mark.parametrize("changed", [False, True])
def test_other_weights_have_no_chunks_of_these(changed: bool) -> None:
    """vLLM empties its cache: where the weights are the same, so are the chunks."""
    rig = rig_with()
    request, other_name = other(rig), '{"weights":"b"}'
    assert asked(rig, request) == (6 * BLOCK, True)
    rig.named.after = {rig.readiness.identity_text: other_name}
    assert rig.scheduler.reset_cache()
    assert asked(rig, request) == (None, False)
    rig.weights_checked(rig.step(), not changed, WeightSource(other_name))
    if changed:
        assert rig.step().setup is not None
        rig.later.run()
        rig.ready(2)
    assert asked(rig, request) == (None, False)
    assert asked(rig, request) == ((0, False) if changed else (6 * BLOCK, True))


def test_a_prompt_is_remembered_once_all_of_it_is_stored() -> None:
    rig = Rig(blend=planner())
    first = rig.request("stored", 0, tokens=STORED + QUESTION)
    rig.report(RankReport(0, ready=True, free_slots=64))
    rig.admit(first)
    plan = rig.step(first)
    assert sum(len(dump.blocks) for dump in plan.dumps) == 12
    assert asked(rig, other(rig, "early")) == (0, False)
    rig.stored(first, 12)
    rig.report(rig.ended(plan))
    assert asked(rig, other(rig, "late")) == (6 * BLOCK, True)


def test_a_prompt_is_hashed_once_however_long_its_answer_is() -> None:
    """Its chunks stay the same while blocks of the answer are stored."""
    rig = Rig(blend=planner())
    first = rig.request("stored", 0, tokens=STORED + QUESTION)
    rig.report(RankReport(0, ready=True, free_slots=64))
    rig.admit(first)
    plan, counts = rig.step(first), list[int]()
    for _ in range(3):
        rig.stored(first, first.num_tokens // BLOCK)
        rig.report(rig.ended(plan))
        assert rig.blend is not None
        counts.append(rig.blend._finder._prompts)
        first.num_computed_tokens = first.num_tokens
        first.append_output_token_ids(list(range(2 * BLOCK)))
        plan = rig.step(first)
        assert plan.dumps
    assert counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ({"no_blend": "no rotary embedding"}, "no rotary embedding"),
        ({"beside": True}, "other connectors"),
    ],
)
def test_workers_may_refuse(
    why: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is logged once, for all ranks, however often they connect."""
    blend = planner()
    rig = Rig(ranks=2, opened=False, blend=blend)
    for _ in range(2):
        rig.shake(**why)
    rig.later.run()
    (said,) = [each.getMessage() for each in caplog.records if "Blend is off" in each.msg]
    assert text in said
    rig.ready()
    rig.readiness.request_weights_check()
    rig.weights_checked(rig.step())
    first = rig.request("stored", 0, tokens=STORED + QUESTION)
    rig.stored(first, 12)
    rig.later.run()
    assert asked(rig, first) == (12 * BLOCK, True)
    assert asked(rig, other(rig)) == (0, False)


def test_without_a_manager_of_ours_nothing_is_blended(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own manager would put approximate KV into its prefix cache. Of several reasons the
    first one is logged."""
    blend = planner()
    blend.bind_kv_cache_manager(
        SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[object()] * 2))
    )
    blend.refuse("another reason")
    rig = rig_with(blend)
    assert asked(rig, other(rig)) == (0, False)
    (said,) = [each.getMessage() for each in caplog.records if "Blend is off" in each.msg]
    assert "no place where ucm can keep approximate KV out" in said


def test_what_the_workers_did_is_counted() -> None:
    rig = Rig(blend=planner())
    rig.scheduler.miss_stats.take()
    news = UCMConnectorWorkerMetadata(blended=[Blended(60, 10, 7)])
    rig.scheduler._on_rank_reports(news)
    found = rig.scheduler.miss_stats.take()
    assert found is not None
    counts = {name: found[name] for name in found if name.startswith("blend_")}
    assert counts == {"blend_hit": 70, "blend_computed": 10, "blend_missed": 7}
    assert isinstance(rig.scheduler.miss_stats, MissStats)


# Whether it pays
# --------------------------------------------------------------------------------------------------


def measured(rig: Rig, load_rate: float) -> Rig:
    """Computing takes 1 ms a token; loads have this speed in bytes a second."""
    rig.readiness.block_bytes = 1 << 20
    rig.admission.recall(
        ComputeSpeed(0.0, 0.001, 256), {0: LoadSpeed(0.0, 1 / load_rate, 1 << 20, 1 << 24, 0.0)}
    )
    return rig


@pytest.mark.parametrize(("rate", "claimed"), [(1e9, 6 * BLOCK), (1e6, 0)])
def test_chunks_are_loaded_where_that_is_quicker(rate: float, claimed: int) -> None:
    """Four blocks of 1 MiB, or sixteen tokens."""
    rig = rig_with()
    measured(rig, rate)
    assert asked(rig, other(rig)) == (claimed, claimed > 0)


def test_where_blending_is_slower_than_computing_it_is_tried_now_and_then() -> None:
    """Two steps that blended took a second for 64 tokens."""
    rig = rig_with(planner(ratio=0.25))
    measured(rig, 1e9)
    rate = rig.admission.compute_rate
    now = rig.clock.now
    for step in range(2):
        rate.planned({"a": 4}, 4, now + step, 64)
        rate.ended(now + step + 1.0)
    assert rate.blend_seconds(64) == pytest.approx(1.0, rel=0.1)
    answers = [asked(rig, other(rig, f"r{at}", lead=2 * BLOCK))[0] for at in range(2 * TRIED)]
    assert [at for at, found in enumerate(answers, 1) if found] == [TRIED, 2 * TRIED]


def test_a_step_that_blends_says_nothing_of_the_speed_of_computing() -> None:
    rig = rig_with(step_tokens=512)
    measured(rig, 1e9)
    request, rate = other(rig), rig.admission.compute_rate
    assert asked(rig, request) == (6 * BLOCK, True)
    admitted(rig, request, 6 * BLOCK)
    rig.step()
    rig.scheduler.step_ended()
    before = rate.known()
    assert runs(rig, request)
    rig.clock.now += 100.0
    rig.scheduler.step_ended()
    assert rate.known() == before


# Engines
# --------------------------------------------------------------------------------------------------


def engine(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_dbo": False,
        "num_ubatches": 1,
    }
    parallel = fields | {key: value for key, value in changes.items() if key in fields}
    model = {key: changes.get(key, False) for key in ("is_moe", "is_encoder_decoder")}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=changes.get("speculative_config"),
        model_config=SimpleNamespace(**model),
    )


@pytest.mark.parametrize(
    ("changes", "groups", "why"),
    [
        ({}, 1, ""),
        ({"speculative_config": SimpleNamespace(method="ngram")}, 1, ""),
        ({"data_parallel_size": 2}, 1, ""),
        ({}, 2, "2 KV cache groups"),
        ({"is_encoder_decoder": True}, 1, "attends to an encoder"),
        ({"pipeline_parallel_size": 2}, 1, "pipeline"),
        ({"decode_context_parallel_size": 2}, 1, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, 1, "context parallelism"),
        ({"enable_dbo": True}, 1, "microbatches"),
        ({"data_parallel_size": 2, "is_moe": True}, 1, "experts"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, 1, "draft model"),
    ],
)
def test_engines_that_do_not_blend_say_why(changes: Any, groups: int, why: str) -> None:
    found = why_not_blended(engine(**changes), SimpleNamespace(kv_cache_groups=[None] * groups))
    assert why in found and bool(found) == bool(why)
