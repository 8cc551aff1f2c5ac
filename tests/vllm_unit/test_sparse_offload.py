"""Offload without an engine: layers over vLLM's own CPU kernel whose blocks have left, and which
blocks leave. What has left is overwritten with NaN, so that reading any of it shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sparse_parts import BLOCK, KV_HEADS, NAMES, SIZE, Rig, Rows
from torch import Tensor

from ucm.config.sparse import keys_of
from ucm.errors import BusyError, DeadlineError, StoreIOError, TaskError, UcmError, UnsupportedError
from ucm.integration.vllm.attention.host import set_active_host
from ucm.integration.vllm.attention.offload import Offload
from ucm.integration.vllm.attention.plan import OffloadChange, SparsePlan
from ucm.integration.vllm.attention.spec import ExactTokens
from ucm.integration.vllm.connector.connector import UCMConnector
from ucm.integration.vllm.connector.identity.keys import KeyMaker
from ucm.integration.vllm.connector.metadata import UCMConnectorWorkerMetadata
from ucm.integration.vllm.connector.scheduler.lookup import BlockTracker, Found, Lookup
from ucm.integration.vllm.connector.scheduler.offload import OffloadPlanner
from ucm.integration.vllm.connector.scheduler.requests import RequestTracker
from ucm.integration.vllm.connector.worker.sparse import SparseWorker
from ucm.integration.vllm.connector.worker.transfers import LayeredStore
from ucm.reasons import MissReason
from ucm.sparse.base import UcmSparseRole
from ucm.sparse.method import method_for
from ucm.store.kv_layout import KVLayout
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

Quest = method_for("Quest")
QuestConfig = keys_of("Quest")

pytestmark = pytest.mark.timeout(300)

TOKENS, INIT, LOCAL, RATIO = 500, 1, 2, 0.3
BLOCKS = -(-TOKENS // BLOCK)
LEFT = range(INIT, BLOCKS - LOCAL)
HOT = math.ceil(RATIO * len(LEFT))


@pytest.fixture(scope="module")
def config(engines: Any, tiny: Path) -> Any:
    """vLLM's configuration, which an implementation wants while it is made."""
    return engines.engine_config(tiny)


@pytest.fixture(autouse=True)
def _no_host() -> Iterator[None]:
    yield
    set_active_host(None)


def key(block: int) -> bytes:
    return block.to_bytes(16, "little")


def quest(**keys: Any) -> Quest:
    return Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=RATIO, min_tokens=0, **keys))


class Pages:
    """The store by layers, as offload uses it: pages of a request's blocks, by layer."""

    def __init__(self, caches: Sequence[Tensor], blocks: Tensor) -> None:
        self.caches = caches
        self.pages = [cache[blocks.long()].clone() for cache in caches]
        self.absent: set[int] = set()  # logical blocks that cannot be loaded
        self.failure: UcmError = StoreIOError("gone")  # and why
        self.hangs = False
        self.loaded: list[tuple[int, list[int]]] = []
        self.waited: list[float] = []
        self.bounds: list[float | None] = []

    def load_layer(
        self, layer: int, ids: Sequence[bytes], blocks: Any, timeout: float | None = None
    ) -> Any:
        wanted = [int.from_bytes(each, "little") for each in ids]
        self.loaded.append((layer, wanted))
        self.bounds.append(timeout)
        return layer, wanted, [int(block) for block in blocks]

    def check(self, task: Any) -> bool:
        del task
        return not self.hangs

    def wait(self, task: Any, timeout: float) -> None:
        self.waited.append(timeout)
        if self.hangs:
            raise DeadlineError("not yet")
        layer, wanted, blocks = task
        for block, target in zip(wanted, blocks, strict=True):
            if block not in self.absent:
                self.caches[layer][target] = self.pages[layer][block]
        failures = {row: self.failure for row, block in enumerate(wanted) if block in self.absent}
        if failures:
            raise TaskError("some", failures=failures)

    def prefetch(self, ids: Sequence[bytes], priority: str) -> None:
        assert ids and priority == "next_batch"


class Offloaded(Rig):
    """A rig of which the first request's middle blocks leave with the first step. Its hot blocks
    are some of those."""

    def __init__(self, config: Any, rows: Rows) -> None:
        self.now = 0.0
        self.quest = quest(offload=True)
        super().__init__(config, self.quest, rows, spare=len(LEFT))
        physical = rows.table[0]
        caches = [layer.kv_cache for layer in self.layers.values()]
        self.pages = Pages(caches, physical)
        self.gone = physical[LEFT.start : LEFT.stop].long()
        self.offload = Offload(
            self.quest,
            {0: 0, 1: 1},
            lambda: self.pages,
            lambda keys: [keys[at : at + 16] for at in range(0, len(keys), 16)],
            clock=lambda: self.now,
        )
        assert self.host is not None
        self.host.offload = self.offload

    def leaves(self) -> SparsePlan:
        """The step with which they leave; their pages belong to others from here on."""
        for cache in self.pages.caches:
            cache[self.gone] = torch.nan
        plan = self.plan()
        keys = b"".join(map(key, LEFT))
        plan.offloaded = [
            OffloadChange("r0", INIT, self.gone.numpy(), keys, self.gone[:HOT].tolist())
        ]
        return plan

    def count(self, name: str) -> float:
        return self.quest.stats.snapshot().get(name, 0)


@pytest.fixture
def rows() -> Rows:
    """A long request, a short one, and a chunk of a prompt."""
    return Rows.of([TOKENS, 40, 200], [1, 1, 7])


def kept_by(config: Any, rows: Rows) -> list[list[int]]:
    """What each layer keeps of the long request."""
    method = quest()
    rig, kept = Rig(config, method, rows), []
    real = method.select_rows
    method.select_rows = lambda *args: kept.append(real(*args)) or kept[-1]  # type: ignore[method-assign, func-returns-value]
    for name in NAMES:
        rig.attend(name=name)
    return [selection.kept(0).tolist() for selection in kept]  # type: ignore[union-attr]


def test_the_same_selection_has_the_same_bits(config: Any, rows: Rows) -> None:
    whole = Rig(config, quest(), rows)
    expected = [whole.attend(name=name) for name in NAMES]
    rig = Offloaded(config, rows)
    found = [rig.attend(rig.leaves()), rig.attend(name=NAMES[1])]
    for ours, all_there in zip(found, expected, strict=True):
        assert torch.equal(ours, all_there)
    kept = kept_by(config, rows)
    assert rig.pages.loaded == [
        (layer, [block for block in kept[layer] if block in LEFT]) for layer in range(2)
    ]
    assert rig.count("blocks_absent") == rig.count("blocks_without_slot") == 0
    rig.attend()
    assert len(rig.pages.loaded) == 2, "what is there is not loaded again"


def test_blocks_that_leave_and_are_given_to_another_request_in_one_step(
    config: Any, rows: Rows
) -> None:
    """Their representations are put aside before they count as evicted."""
    expected = Rig(config, quest(), rows).attend()
    rig = Offloaded(config, rows)
    plan = rig.leaves()
    plan.given = rig.gone.numpy()
    assert torch.equal(rig.attend(plan), expected)


def test_blocks_that_cannot_be_loaded_are_left_out_and_counted(config: Any, rows: Rows) -> None:
    kept = kept_by(config, rows)[0]
    rig = Offloaded(config, rows)
    absent = next(block for block in kept if block in LEFT)
    rig.pages.absent = {absent}
    found = rig.attend(rig.leaves())
    expected = rows.attended([[block for block in kept if block != absent], None, None])
    assert torch.allclose(found, expected, atol=1e-5)
    assert rig.count("blocks_absent") == 1
    assert rig.offload.take_lost() == [("r0", absent)]
    assert rig.offload.take_lost() == []
    rig.pages.failure = BusyError("no room")
    rig.attend()
    assert rig.offload.take_lost() == [], "that says nothing of the record"
    rig.pages.absent = set()
    assert torch.allclose(rig.attend(), rows.attended([kept, None, None]), atol=1e-5)


def test_blocks_chosen_most_often_are_loaded_first(
    config: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded first, and the last to lose its place."""
    middle = [block for block in kept_by(config, rows)[0] if block in LEFT]
    rig = Offloaded(config, rows)
    rig.attend(rig.leaves())
    request = rig.offload._requests["r0"]
    request.predictors[0].record([middle[-1]])
    wanted: list[int] = []
    monkeypatch.setattr(request.layers[0], "want", lambda blocks: wanted.extend(blocks) or [])
    rig.attend()
    assert wanted == [middle[-1], *middle[:-1]]


def test_a_block_that_leaves_and_can_never_be_chosen_is_computed_again(
    config: Any, rows: Rows
) -> None:
    rig = Offloaded(config, rows)
    rig.quest.store.invalidate(rig.gone[3:5].numpy())
    rig.attend(rig.leaves())
    assert rig.offload.take_lost() == [("r0", LEFT.start + 3)]
    assert rig.offload.take_lost() == []


def test_a_lost_block_is_reported_to_the_scheduler_side(config: Any, rows: Rows) -> None:
    """Once, with the other news of its rank, and without any."""
    rig = Offloaded(config, rows)
    connector, worker = UCMConnector.__new__(UCMConnector), SparseWorker.__new__(SparseWorker)
    worker.offload, worker._measured = rig.offload, None
    connector._sparse_worker, connector._worker, connector._scheduler = worker, None, None
    assert connector.build_connector_worker_meta() is None
    rig.pages.absent = {next(block for block in kept_by(config, rows)[0] if block in LEFT)}
    set_active_host(rig.host)
    rig.attend(rig.leaves())
    connector._worker = SimpleNamespace(build_connector_worker_meta=UCMConnectorWorkerMetadata)  # type: ignore[assignment]
    for _ in range(2):
        news = connector.build_connector_worker_meta()
        assert isinstance(news, UCMConnectorWorkerMetadata)
        assert news.lost == [("r0", block) for block in rig.pages.absent]
        connector._worker = None
        rig.attend()
    assert connector.build_connector_worker_meta() is not None
    assert connector.build_connector_worker_meta() is None


def test_a_step_whose_plan_is_lost_reads_nothing_of_what_has_left(config: Any, rows: Rows) -> None:
    """It fails: where those blocks are is not known, and the block table names blocks of other
    requests."""
    rig = Offloaded(config, rows)
    rig.attend(rig.leaves())
    query, keys, values, _ = rows.step()
    layer = rig.layers[NAMES[0]]

    def attend() -> Tensor:
        output = torch.zeros_like(query)
        layer.impl.forward(layer, query, keys, values, layer.kv_cache, rig.metadata, output)
        return output

    with pytest.raises(RuntimeError, match="plan did not arrive"):
        attend()
    rig.offload.begin_step([], ["r0"])
    assert attend()[1:].isfinite().all(), "nothing is away any more"


def test_a_store_that_is_closed_leaves_the_windows(config: Any, rows: Rows) -> None:
    rig = Offloaded(config, rows)
    rig.offload._store = lambda: None
    found = rig.attend(rig.leaves())
    assert torch.allclose(
        found, rows.attended([[0, BLOCKS - 2, BLOCKS - 1], None, None]), atol=1e-5
    )


def test_a_step_waits_no_longer_than_its_bound(config: Any, rows: Rows) -> None:
    """A load that hangs takes what is left of the step's time; a layer that has none left begins no
    load. What comes later is used later, and until then its slots are given to no other block."""
    kept = kept_by(config, rows)
    rig = Offloaded(config, rows)
    rig.pages.hangs = True
    plan, bound = rig.leaves(), rig.quest.settings.retrieval_ms / 1000
    windows = rows.attended([[0, BLOCKS - 2, BLOCKS - 1], None, None])
    assert torch.allclose(rig.attend(plan), windows, atol=1e-5)
    assert rig.pages.waited == rig.pages.bounds == [bound]
    rig.offload._deadline = rig.now  # the step goes on, and its time is over
    query, keys, values, _ = rows.step()
    assert rig.host is not None
    rig.host.begin_step(
        rig.plan(), SimpleNamespace(attn_metadata=dict.fromkeys(NAMES, rig.metadata))
    )
    rig.now += bound
    layer, output = rig.layers[NAMES[1]], torch.zeros_like(query)
    layer.impl.forward(layer, query, keys, values, layer.kv_cache, rig.metadata, output)
    assert torch.allclose(output, windows, atol=1e-5)
    assert len(rig.pages.loaded) == 1
    rig.pages.hangs = False
    assert torch.allclose(rig.attend(), rows.attended([kept[0], None, None]), atol=1e-5)
    assert len(rig.pages.loaded) == 1, "it was loaded by then"


def test_a_late_load_is_waited_for_before_its_blocks_are_reused(config: Any, rows: Rows) -> None:
    rig = Offloaded(config, rows)
    rig.pages.hangs = True
    rig.attend(rig.leaves())
    waits = len(rig.pages.waited)
    rig.attend()
    assert len(rig.pages.waited) == waits, "a step does not wait again for what is late"
    rig.offload.begin_step([], ["r0"])
    assert rig.pages.waited[waits:] == [rig.quest.settings.retrieval_ms / 1000]
    assert not rig.offload.has_any(rig.plan().rows)
    assert len(rig.quest.store.adopt(list(LEFT))) == len(LEFT), (
        "all rows for representations are free again"
    )


@pytest.mark.parametrize("keep_all", [False, True])
def test_without_a_choice_attention_reads_the_blocks_on_the_device(
    config: Any, rows: Rows, keep_all: bool
) -> None:
    """It failed, or it is late, which elsewhere means that all blocks are kept."""
    kept = kept_by(config, rows)[0]
    rig = Offloaded(config, rows)
    rig.attend(rig.leaves())

    def fails(*args: Any) -> Any:
        del args
        if not keep_all:
            raise RuntimeError("no choice")
        from ucm.sparse.selection import Selection

        return Selection.of([[torch.arange(BLOCKS)]], [BLOCKS], torch.tensor([0]))

    rig.quest.select_rows = fails  # type: ignore[method-assign]
    assert torch.allclose(rig.attend(), rows.attended([kept, None, None]), atol=1e-5)


def test_rows_that_cannot_all_be_distinguished(config: Any, rows: Rows) -> None:
    """Nothing is chosen then; what has left is not read all the same."""
    rig = Offloaded(config, rows)
    plan = rig.leaves()
    plan.last_blocks[1] = 10_000
    found = rig.attend(plan)
    assert torch.allclose(
        found, rows.attended([[0, BLOCKS - 2, BLOCKS - 1], None, None]), atol=1e-5
    )


def test_a_store_whose_loads_have_no_bound_is_refused() -> None:
    layout = KVLayout({"layer.0": torch.zeros(4, KV_HEADS, BLOCK, 2 * SIZE)})

    class Unbounded(UcmKVStoreBaseV1):
        def lookup(self, block_ids: Any) -> Any:
            raise AssertionError

        load_data = dump_data = wait = check = lookup

    with pytest.raises(UnsupportedError, match="takes_load_timeout"):
        LayeredStore(Unbounded({}), layout)  # type: ignore[abstract]


# Which blocks leave
# -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """As much of vLLM's as is looked at."""

    request_id: str = "a"
    num_tokens: int = TOKENS
    num_prompt_tokens: int = TOKENS - 1
    num_output_tokens: int = 1
    num_preemptions: int = 0
    stored: int = BLOCKS


@dataclass
class Planned:
    """A planner and its requests."""

    spare: int = 1000
    keys: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vllm = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            model_config=SimpleNamespace(model="m", max_model_len=4096),
        )
        settings = QuestConfig(ratio=RATIO, min_tokens=0, offload=True, **self.keys)
        method = Quest(vllm, UcmSparseRole.SCHEDULER, settings)
        self.requests: dict[str, Any] = {}
        self.exact = ExactTokens(method)
        self.planner = OffloadPlanner(method, self.requests, self.exact, BLOCK, self.spare)
        self.planner.stored = lambda request: [key(block) for block in range(request.stored)]  # type: ignore[attr-defined]

    def begins(self, prompt: int = TOKENS - 1, name: str = "a") -> Request:
        request = Request(name, prompt, prompt, 0)
        self.requests[name] = request
        self.exact.prefill_tokens(request)  # type: ignore[arg-type]
        return request


def test_only_stored_blocks_between_the_windows_leave_while_decoding() -> None:
    planned = Planned()
    request, leaving = planned.begins(), planned.planner.leaving
    assert not leaving("a", TOKENS - 2, BLOCKS), "the prompt is not computed"
    request.num_tokens, request.num_output_tokens = TOKENS, 1
    assert leaving("a", TOKENS - 1, BLOCKS) == LEFT
    request.stored = 9
    assert leaving("a", TOKENS - 1, BLOCKS) == range(INIT, 9)
    request.stored = INIT + HOT
    assert not leaving("a", TOKENS - 1, BLOCKS), "it would hold more than before"
    planned.planner.stored = None
    assert not leaving("a", TOKENS - 1, BLOCKS)
    assert not leaving("another", TOKENS - 1, BLOCKS)


def test_nothing_more_leaves_of_a_request_that_has_lost_a_block() -> None:
    """It begins anew, which it does once, and then stays where it is."""
    planned = Planned()
    request, planner = planned.begins(), planned.planner
    request.num_tokens, request.num_output_tokens = TOKENS, 1
    planner.lost(request)  # type: ignore[arg-type]
    assert planner.leaving("a", TOKENS - 1, BLOCKS) == LEFT, "none of its blocks had left"
    planner.left("a", LEFT, list(LEFT))
    assert not planner.begins_anew("a")
    planner.lost(request)  # type: ignore[arg-type]
    assert planner.begins_anew("a")
    assert not planner.leaving("a", TOKENS + 300, BLOCKS + 9)
    planner.gave_back("a")
    assert not planner.begins_anew("a")
    assert not planner.leaving("a", TOKENS - 1, BLOCKS)


def test_a_users_method_that_fails_keeps_its_blocks_and_none_of_them_is_exact() -> None:
    planned = Planned()
    request = planned.begins()
    request.num_tokens, request.num_output_tokens = TOKENS, 1

    def fails(_request: Any) -> int:
        raise RuntimeError("a user's mistake")

    method = planned.planner._method
    method.estimate_num_slots_sparsed = fails  # type: ignore[method-assign]
    assert not planned.planner.leaving("a", TOKENS - 1, BLOCKS)
    assert planned.exact(request) > 0  # type: ignore[arg-type]
    for exact_tokens in (fails, lambda _tokens: None):
        method.exact_tokens = exact_tokens  # type: ignore[method-assign, assignment]
        assert planned.exact(request) == 0  # type: ignore[arg-type]
        assert not planned.planner.leaving("a", TOKENS - 1, BLOCKS)


def test_blocks_that_others_hold_too_leave_only_where_that_frees_more_than_hot_blocks_take() -> (
    None
):
    planned = Planned()
    request = planned.begins()
    request.num_tokens, request.num_output_tokens = TOKENS, 1
    asked: list[range] = []

    def leaving(own: int, more: int = 0) -> range:
        def frees(leaving: range) -> int:
            asked.append(leaving)
            return own

        return planned.planner.leaving("a", TOKENS - 1 + more, BLOCKS + -(-more // BLOCK), frees)

    assert not leaving(HOT)
    assert not leaving(HOT + 1) and asked == [LEFT], "it is counted once a block, not in every step"
    request.stored = BLOCKS + 1
    assert leaving(HOT + 1, more=BLOCK) == range(LEFT.start, LEFT.stop + 1)


def test_the_number_of_rows_of_representations() -> None:
    planned = Planned(spare=7)
    request = planned.begins()
    request.num_tokens, request.num_output_tokens = TOKENS, 1
    leaving = planned.planner.leaving("a", TOKENS - 1, BLOCKS)
    assert leaving == range(INIT, INIT + 7)
    planned.planner.left("a", leaving, list(range(7)))
    assert not planned.planner.leaving("a", TOKENS + 300, BLOCKS + 9)
    planned.planner.gave_back("a")
    changes, given_back = planned.planner.take()
    assert (changes, given_back) == ([], ["a"])
    assert planned.planner.leaving("a", TOKENS - 1, BLOCKS) == range(INIT, INIT + 7)


def test_blocks_chosen_before_the_window_moved_stay() -> None:
    planned = Planned(keys={"stride": 40, "lag": 3})
    request = planned.begins()
    request.num_tokens, request.num_output_tokens = TOKENS, 1
    assert planned.planner.leaving("a", TOKENS - 1, BLOCKS) == range(INIT, BLOCKS - LOCAL - 2)


@pytest.mark.parametrize("lag_blocks", [0, 1])
def test_a_decoding_request_holds_its_bound(lag_blocks: int) -> None:
    """Token by token; its blocks are stored when they are full, or one block later."""
    planned = Planned()
    request = planned.begins(prompt=300)
    held_hot, left, told = 0, 0, []
    for tokens in range(301, 1500):
        request.num_tokens, request.num_output_tokens = tokens, tokens - 300
        blocks = -(-tokens // BLOCK)
        request.stored = max(300 // BLOCK, (tokens - 1) // BLOCK - lag_blocks)
        leaving = planned.planner.leaving("a", tokens - 1, -(-(tokens - 1) // BLOCK))
        if leaving:
            planned.planner.left("a", leaving, list(leaving))
            left += len(leaving)
        missing = planned.planner.hot("a", tokens) - held_hot
        if missing > 0:
            planned.planner.given("a", list(range(held_hot, held_hot + missing)))
            held_hot += missing
        changes, _ = planned.planner.take()
        told += changes
        m = blocks - INIT - LOCAL
        assert blocks - left + held_hot <= math.ceil(round(RATIO * m, 9)) + INIT + LOCAL + 1
        assert held_hot >= min(math.ceil(round(RATIO * m, 9)), left), "what is chosen has a place"
    ids = b"".join(change.keys for change in told)
    assert ids == b"".join(map(key, range(INIT, INIT + left)))
    assert np.concatenate([change.blocks for change in told]).tolist() == list(
        range(INIT, INIT + left)
    )
    assert [block for change in told for block in change.hot] == list(range(held_hot))


# Prompts that are stored
# --------------------------------------------------------------------------------------------


def test_the_end_of_a_stored_prompt_is_computed_over_chosen_blocks(config: Any) -> None:
    """Its other blocks were never on the device: their representations are from the store."""
    rows, queries = Rows.of([TOKENS, 40, 200], [5, 1, 7]), 5
    method = quest()
    rig, kept = Rig(config, method, rows), []
    real = method.select_rows
    method.select_rows = lambda *args: kept.append(real(*args)) or kept[-1]  # type: ignore[method-assign, func-returns-value]
    expected = rig.attend(rig.plan([TOKENS - queries, 40, 200]))
    ids = kept[0].kept(0).tolist()  # type: ignore[union-attr]
    assert len(ids) < BLOCKS

    rig = Offloaded(config, rows)
    plan = rig.leaves()
    plan.rows = rig.plan([TOKENS - queries, 40, 200]).rows
    (change,) = plan.offloaded
    change.unread, change.keys, change.blocks = change.keys, b"", np.empty(0, dtype=np.int64)
    reps = {layer: rig.quest.store.get(layer, rig.gone) for layer in rig.quest.store.layers}
    rig.quest.store.invalidate(rig.gone)
    rig.offload.begin_step([change], [])
    places = list(rig.offload.rows_of("r0"))
    assert not rig.quest.store.ready(places)
    for layer, found in reps.items():
        rig.quest.store.put(layer, places, found)
    rig.quest.store.mark_ready(places)
    plan.offloaded = []
    assert torch.equal(rig.attend(plan), expected)
    assert rig.pages.loaded == [(0, [block for block in ids if block in LEFT])]
    assert rig.count("blocks_absent") == rig.count("blocks_without_slot") == 0
    rig.offload.begin_step([], ["r0"])
    assert not rig.offload.rows_of("r0")


def test_which_prompts_are_selected_from_without_being_read() -> None:
    planned = Planned()
    stored = (TOKENS - 1) // BLOCK
    whole = range(INIT, stored + 1 - LOCAL)

    def unread(request: Request, blocks: int = stored, first: int = 0) -> range:
        planned.planner.consider(request, first, blocks)  # type: ignore[arg-type]
        return planned.planner.unread("a")

    request = planned.begins(TOKENS)
    assert unread(request) == whole
    assert unread(request, first=stored - 3) == range(0), "nearly all of it is on the device"
    assert unread(request, stored - LOCAL) == range(0), (
        "what is left to compute is more than the window"
    )
    request.stored = stored - 1
    assert unread(request) == range(0), "a rank lacks one"
    request.stored, request.num_preemptions = stored, 1
    assert unread(request) == range(0), "what was answered is computed densely again"
    request.num_preemptions = 0
    assert unread(request) == whole
    planned.planner.forget("a")
    assert planned.planner.unread("a") == range(0)
    for other in (
        Planned(spare=len(whole) - 1),
        Planned(keys={"select_stored": False}),
        Planned(keys={"min_blocks": 99}),
        Planned(keys={"init_blocks": 0}),
    ):
        other.planner.consider(other.begins(TOKENS), 0, stored)  # type: ignore[arg-type]
        assert other.planner.unread("a") == range(0)


def test_a_request_whose_prompt_is_not_read_is_as_one_whose_blocks_have_left() -> None:
    planned = Planned()
    request = planned.begins(TOKENS)
    stored = (TOKENS - 1) // BLOCK
    planned.planner.consider(request, 0, stored)  # type: ignore[arg-type]
    hot = planned.planner.hot("a", stored * BLOCK)
    planned.planner.given("a", list(range(hot)))
    unread = planned.planner.admitted(request)  # type: ignore[arg-type]
    assert unread == range(INIT, stored + 1 - LOCAL) and not planned.planner.unread("a")
    assert planned.exact(request) == stored * BLOCK, "the end of the prompt is not exact"  # type: ignore[arg-type]
    ((change,), _) = planned.planner.take()
    assert (
        change.unread == b"".join(map(key, unread))
        and len(change.hot) == hot
        and not len(change.blocks)
    )
    request.num_tokens, request.num_output_tokens = TOKENS + 70, 70
    assert planned.planner.leaving("a", TOKENS + 69, BLOCKS + 2).start == unread.stop
    planned.planner.gave_back("a")
    assert planned.planner.take() == ([], ["a"])
    assert planned.exact(request) == TOKENS  # type: ignore[arg-type]


def test_approximate_blocks_have_keys_of_their_own(engines: Any) -> None:
    """The last block of a prompt that is selected from is stored, and hashed, before it turns out
    to be approximate."""
    del engines
    prompt = list(range(4 * BLOCK))
    request = SimpleNamespace(
        num_preemptions=0, lora_request=None, _all_token_ids=prompt, num_tokens=len(prompt)
    )
    maker = KeyMaker("identity", BLOCK, "sha256", SimpleNamespace(of=lambda *_: None))  # type: ignore[arg-type]
    known, tracker = BlockTracker(), RequestTracker(request)  # type: ignore[arg-type]
    real = maker.first(request)  # type: ignore[arg-type]
    tracker.lookup = Lookup()
    tracker.lookup.hashed(real)
    tracker.lookup.answer(Found(4, MissReason.ABSENT, bytes(4)))
    tracker.adopt(known)
    assert list(tracker.stored_keys(known)) == real
    assert tracker.grow(4, maker, known, 3) == 4
    assert tracker.keys[:3] == real[:3] and tracker.keys[3] not in real
    assert list(tracker.stored_keys(known)) == real[:3]
    prompt += range(BLOCK)
    assert tracker.grow(5, maker, known, 3) == 5
    assert tracker.keys[4] not in maker.first(request)  # type: ignore[arg-type]
    tracker.restart()
    assert tracker.keys == real[:3] and tracker.private_at is None
