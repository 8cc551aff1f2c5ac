"""Two tensor ranks: with a shared selection they select like one rank; a hit needs both, a failure
on one fails the block, and nothing is shared with one rank.

The engine is ended during a load, as its last use; that needs no second rank.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from cases import STORED, Case
from checks import ask_until_reused, assert_as_computed, assert_chosen, assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import Disk, Life, new_disk
from models import HEAD_SIZE, KV_HEADS
from software_driver import IN_USE
from sparse_reference import Llama, choosing
from specs import BLOCK, ON_GPU, EngineSpec, Result, prompt

from ucm.config.sparse import keys_of

QuestConfig = keys_of("Quest")

pytestmark = pytest.mark.skipif(
    ON_GPU and torch.cuda.device_count() < 2, reason="a GPU for each rank"
)


@pytest.fixture
def ranks(cold: Life, host: EngineHost) -> Engine:
    """An engine of two ranks on the disk of an engine of one rank."""
    cold.disk.faults.clear()
    spec = cold.cold_spec.but(store=cold.disk.faulty(), tensor_parallel=2, label="two-ranks")
    engine = host.get(spec)
    engine.reset()
    return engine


def of_rank(disk: Disk, rank: int, since: int) -> list[str]:
    """Ids loaded by a rank since this number of loads."""
    return [
        i
        for event in disk.faults.events("load")[since:]
        if event["rank"] == rank
        for i in event["ids"]
    ]


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
class TestTwoRanks:
    """In this order: the first test fills the disk for the others, the last ends the engine."""

    def test_one_rank_and_two_share_nothing(
        self, ranks: Engine, cold: Life, reference: dict[str, Result]
    ) -> None:
        before = len(cold.disk.files())
        answer = ranks.generate(STORED["middle"].ask())[0]
        assert_same(answer, reference["middle"])
        assert answer.cached == 0
        ranks.wait_idle()
        assert len(cold.disk.files()) == before + 2 * STORED["middle"].full_blocks

    @pytest.mark.shows("Llama, Qwen", "TP 2")
    def test_both_ranks_load(self, ranks: Engine, cold: Life, reference: dict[str, Result]) -> None:
        since = len(cold.disk.faults.events("load"))
        answer = ranks.generate(STORED["middle"].ask())[0]
        assert_same(answer, reference["middle"])
        assert_reused(answer, STORED["middle"])
        first, second = of_rank(cold.disk, 0, since), of_rank(cold.disk, 1, since)
        assert len(first) == len(second) == STORED["middle"].full_blocks
        assert not set(first) & set(second), "two ranks read the same record"

    def test_failure_on_one_rank(
        self, ranks: Engine, cold: Life, reference: dict[str, Result]
    ) -> None:
        cold.disk.faults.set("fail-load", "rank=1")
        answer = ranks.generate(STORED["middle"].ask())[0]
        assert {event["rank"] for event in cold.disk.faults.events("load-failed")} >= {1}
        assert_same(answer, reference["middle"])
        cold.disk.faults.clear()
        ask_until_reused(ranks, STORED["middle"], reference["middle"])

    def test_block_missing_on_one_rank(
        self, ranks: Engine, cold: Life, reference: dict[str, Result]
    ) -> None:
        """The shortest prefix counts; the block is stored again."""
        since = len(cold.disk.faults.events("load"))
        ranks.generate(STORED["middle"].ask())
        ids = of_rank(cold.disk, 1, since)
        ranks.wait_idle()
        ranks.reset()
        next(path for path in cold.disk.files() if path.name.startswith(ids[6])).unlink()
        answer = ranks.generate(STORED["middle"].ask())[0]
        assert_same(answer, reference["middle"])
        assert answer.cached_blocks == 6
        ask_until_reused(ranks, STORED["middle"], reference["middle"])

    def test_failed_dump_on_one_rank_is_no_hit(
        self, ranks: Engine, cold: Life, reference: dict[str, Result]
    ) -> None:
        cold.disk.faults.set("fail-dump", "rank=1")
        ranks.generate(STORED["long"].ask())
        ranks.wait_idle()
        cold.disk.faults.clear()
        ranks.reset()
        answer = ranks.generate(STORED["long"].ask())[0]
        assert_same(answer, reference["long"])
        assert answer.cached == 0
        ask_until_reused(ranks, STORED["long"], reference["long"])

    def test_shutdown_while_loading(self, ranks: Engine, host: EngineHost, cold: Life) -> None:
        """An engine that is stopped in the middle of a load ends, and nothing of it is left
        running.

        vLLM lets the load end first, as it does by its deadline if by nothing else."""
        cold.disk.faults.set("hold-load", "3")
        since = len(cold.disk.faults.events("load"))
        ranks.submit(STORED["long"].ask())
        wait_until(lambda: len(cold.disk.faults.events("load")) > since, "a load began")
        host.stop()
        cold.disk.faults.clear()


@pytest.mark.long
@pytest.mark.skipif(IN_USE, reason="keys are read from memory that only a device may touch")
def test_two_ranks_that_share_a_selection_choose_what_one_chooses(
    work: Path, model: Path, host: EngineHost
) -> None:
    """Each has half of the KV heads, and they add up integer scores: what they keep is what torch
    keeps by the scores of all heads, and so are the tokens. What they keep leaves the device and
    comes back on both."""
    quest = {"ratio": 0.2, "min_tokens": 330}
    method = quest | {"shared_selection": True, "offload": True, "retrieval_ms": 60_000}
    spec = EngineSpec(
        model,
        store=new_disk(work, "sparse-ranks").store(),
        tensor_parallel=2,
        extra_config={"sparse_type": "Quest", "ucm_sparse_config": {"Quest": method}},
        label="sparse-ranks",
    )
    engine = host.get(spec)
    engine.rpc("probe_record_choices")
    cases = [Case(prompt(95, 700), 30), Case(prompt(96, 420), 30)]
    torch, keep = Llama(model, BLOCK), choosing(QuestConfig(**quest), BLOCK, KV_HEADS, HEAD_SIZE)
    for case, result in zip(cases, engine.generate(*(case.ask() for case in cases)), strict=True):
        answer = torch.answer(case.tokens, case.max_tokens, keep())
        assert 0 < answer.kept < 0.5 * answer.seen
        assert_as_computed(result, answer)
        assert_chosen(engine, result, answer)
    for said in engine.rpc("probe_choices", ""):
        _, reduced = ast.literal_eval(said)
        scores = [
            shape for dtype, shape, combine in reduced if (dtype, combine) == ("torch.int64", "sum")
        ]
        assert any(len(shape) == 2 and shape[1] > 1 for shape in scores), "no scores were added up"
    for stats in engine.rpc("probe_worker_eval", "connector.stats()['sparse']"):
        counted = ast.literal_eval(stats)
        assert counted["blocks_loaded"] > 0
        assert counted.get("blocks_absent", 0) == counted.get("blocks_without_slot", 0) == 0
