"""Sparse attention in real engines: what a torch model computes over the same blocks, and the blocks that it chooses,
alone, together, again, after a preemption, from the store and on two ranks; and no dense engine ever meets KV that was
computed under a selection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import STORED, Case
from checks import assert_as_computed, assert_chosen, assert_reused, assert_same, assert_stored
from harness import Engine, EngineHost
from lives import Life
from models import HEAD_SIZE, KV_HEADS
from software_driver import IN_USE
from sparse_reference import Answer, Keep, Llama, choosing
from specs import BLOCK, EngineSpec, Result, prompt

from ucm.config.sparse import QuestConfig

pytestmark = pytest.mark.skipif(IN_USE, reason="keys are read from memory that only a device may touch")

#: Requests of fewer tokens are dense.
GATE = 330
QUEST = {"ratio": 0.2, "min_tokens": GATE}
#: Never asked before. One begins in the middle of a prompt that is stored.
NEW = {
    "alone": Case(prompt(70, 700), 10),
    "turns_sparse": Case(prompt(71, 300), 60),  # gets long enough while it is decoded
    "brief": Case(prompt(72, 90), 10),
    "continues": Case(STORED["middle"].tokens + prompt(73, 50), 10),
    "goes_on": Case(prompt(74, 400), 70),  # its output fills two blocks
}
#: Together more than the pool holds when each is as long as the gate, and not before.
CROWDED = {f"crowded_{i}": Case(prompt(80 + i, 280), 60) for i in range(4)}


@pytest.fixture(scope="module")
def answers(model: Path) -> Callable[[str], Answer]:
    """What torch answers to a case, by its name."""
    llama = Llama(model, BLOCK)
    begin: Callable[[], Keep] = choosing(QuestConfig(**QUEST), BLOCK, KV_HEADS, HEAD_SIZE)
    cases = STORED | NEW | CROWDED
    known: dict[str, Answer] = {}

    def answer(name: str) -> Answer:
        if name not in known:
            known[name] = llama.answer(cases[name].tokens, cases[name].max_tokens, begin())
        return known[name]

    return answer


def spec_of(life: Life) -> EngineSpec:
    """An engine on the disk that a dense one has filled, of the same identity."""
    return life.cold_spec.but(
        blocks=40,
        extra_config={"sparse_type": "Quest", "ucm_sparse_config": {"Quest": QUEST}},
        label=f"sparse-{life.runner}",
        fork=True,
    )


@pytest.fixture
def sparse(cold: Life, host: EngineHost) -> Engine:
    """The engine with sparse attention, with vLLM's own cache empty."""
    engine = host.get(spec_of(cold))
    engine.reset()
    engine.rpc("probe_record_choices")
    return engine


def assert_selected(engine: Engine, result: Result, answer: Answer) -> None:
    """What torch answers, from the blocks that torch keeps: whatever the batch and the past of the request."""
    assert_as_computed(result, answer)
    assert_chosen(engine, result, answer)


def test_the_reference_selects(answers: Callable[[str], Answer], reference: dict[str, Result]) -> None:
    """Otherwise equal tokens would prove nothing: what is left out decides the answer."""
    long = answers("long")
    assert 0 < long.kept < 0.5 * long.seen
    assert long.tokens != reference["long"].tokens
    assert answers("brief").seen == 0


@pytest.mark.parametrize("name", ["long", "middle"])
def test_prompts_of_a_dense_engine_are_loaded_and_selected_from(
    sparse: Engine, answers: Callable[[str], Answer], name: str
) -> None:
    """One identity for both, and representations of what was not computed here."""
    result = sparse.generate(STORED[name].ask())[0]
    assert_reused(result, STORED[name])
    assert_selected(sparse, result, answers(name))


@pytest.mark.parametrize("name", ["alone", "turns_sparse", "brief", "goes_on"])
def test_new_prompts(sparse: Engine, answers: Callable[[str], Answer], name: str) -> None:
    """In chunks, and across the length from which on blocks are chosen."""
    result = sparse.generate(NEW[name].ask())[0]
    assert_selected(sparse, result, answers(name))


def test_what_the_device_still_has_is_selected_from_again(sparse: Engine, answers: Callable[[str], Answer]) -> None:
    for _ in range(2):
        result = sparse.generate(NEW["alone"].ask())[0]
        assert_selected(sparse, result, answers("alone"))
    assert_reused(result, NEW["alone"])
    result = sparse.generate(NEW["continues"].ask())[0]
    assert result.cached >= STORED["middle"].full_blocks * BLOCK
    assert_selected(sparse, result, answers("continues"))


def test_neighbours_change_nothing(sparse: Engine, answers: Callable[[str], Answer]) -> None:
    """Rows of prompts, of short requests and of sparse ones in one step."""
    names = ["brief", "continues", "turns_sparse", "middle"]
    results = sparse.generate(*((NEW | STORED)[name].ask() for name in names))
    for name, result in zip(names, results, strict=True):
        assert_selected(sparse, result, answers(name))


def test_several_sequences_of_one_request(sparse: Engine, runner: str, answers: Callable[[str], Answer]) -> None:
    if runner == "v2":
        pytest.skip("vLLM's sampling of several sequences does not run in Triton's interpreter")
    result = sparse.ask(NEW["alone"].tokens, NEW["alone"].max_tokens, sequences=3)
    assert [result.tokens, *result.others] == [answers("alone").tokens] * 3


def test_preempted_requests(sparse: Engine, answers: Callable[[str], Answer]) -> None:
    """Preempted while they are dense, resumed, and sparse in the end as if nothing had happened."""
    before = sparse.metrics()["vllm:num_preemptions_total"]
    results = sparse.generate(*(case.ask() for case in CROWDED.values()))
    assert sparse.metrics()["vllm:num_preemptions_total"] > before, "nothing was preempted: the pool is too large"
    for name, result in zip(CROWDED, results, strict=True):
        assert_selected(sparse, result, answers(name))


def test_output_stays_out_of_the_device_cache(sparse: Engine, answers: Callable[[str], Answer]) -> None:
    """A prompt that goes on from an answer finds the blocks of its prompt, and computes the answer densely."""
    first = sparse.generate(NEW["goes_on"].ask())[0]
    longer = sparse.ask(NEW["goes_on"].tokens + first.tokens + prompt(75, 20), 1)
    assert longer.cached == NEW["goes_on"].full_blocks * BLOCK


def test_dense_engine_meets_prompts_and_never_output(
    cold: Life, sparse: Engine, host: EngineHost, reference: dict[str, Result], request: pytest.FixtureRequest
) -> None:
    """What was stored here is what a dense engine would have stored, up to the length from which on blocks are
    chosen."""
    before = len(cold.disk.files())
    case, low = Case(prompt(76, 400), 70), Case(prompt(77, 200), 150)
    fresh = sparse.generate(case.ask(), low.ask())
    sparse.wait_idle()
    exact = GATE - 1
    assert_stored(cold.disk, before, case.full_blocks + exact // BLOCK)
    warm: Engine = request.getfixturevalue("warm")
    again = warm.ask(case.tokens + fresh[0].tokens + prompt(78, 40), 4)
    assert again.cached == case.full_blocks * BLOCK
    again = warm.ask(low.tokens + fresh[1].tokens + prompt(79, 40), 4)
    assert again.cached == exact // BLOCK * BLOCK
    warm.reset()
    assert_same(warm.generate(STORED["long"].ask())[0], reference["long"])


def test_answers_of_the_dense_engine_to_what_the_sparse_one_stored(cold: Life, warm: Engine, model: Path) -> None:
    """Loaded KV is the KV that a dense engine computes: its answer is that of a dense model."""
    case = NEW["goes_on"]
    result = warm.generate(case.ask())[0]
    assert_reused(result, case)
    dense = Llama(model, BLOCK).answer(case.tokens, case.max_tokens, None)
    assert_as_computed(result, dense)
