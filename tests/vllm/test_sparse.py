"""Sparse attention in real engines: what a torch model computes over the same blocks, and the
blocks that it chooses, alone, together, again, after a preemption, from the store and on two ranks;
and no dense engine ever meets KV that was computed under a selection."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import STORED, Case
from checks import assert_as_computed, assert_chosen, assert_reused, assert_same, assert_stored
from harness import Engine, EngineHost, wait_until
from lives import LAYERS, Life
from models import HEAD_SIZE, KV_HEADS
from software_driver import IN_USE
from sparse_reference import Answer, Keep, Llama, choosing
from specs import BLOCK, EngineSpec, Result, prompt

from ucm.config.sparse import AlgorithmConfig, keys_of

GsaOnDeviceConfig = keys_of("GSAOnDevice")
QuestConfig = keys_of("Quest")

pytestmark = pytest.mark.skipif(
    IN_USE, reason="keys are read from memory that only a device may touch"
)

#: Requests of fewer tokens are dense.
GATE = 330
QUEST = {"ratio": 0.2, "min_tokens": GATE}
#: The first block, the last two, and in every other step three anew of those between.
CODES = {
    "topk_tokens": 6 * BLOCK,
    "init_tokens": BLOCK,
    "local_tokens": 2 * BLOCK,
    "min_tokens": GATE,
    "stride": 2,
}
#: New prompts. One begins in the middle of a prompt that is stored.
NEW = {
    "alone": Case(prompt(70, 700), 10),
    "turns_sparse": Case(prompt(71, 300), 60),  # gets long enough while it is decoded
    "brief": Case(prompt(72, 90), 10),
    "continues": Case(STORED["middle"].tokens + prompt(73, 50), 10),
    "goes_on": Case(prompt(74, 400), 70),  # its output fills two blocks
}
#: Together more than the pool holds when each is as long as the gate, and not before.
CROWDED = {f"crowded_{i}": Case(prompt(80 + i, 280), 60) for i in range(4)}
#: Prompts for the engine with codes alone, of which the next tests are.
CODED = {"alone": Case(prompt(101, 700), 20), "turns_sparse": Case(prompt(102, 300), 60)}


def torch_answers(
    model: Path, settings: AlgorithmConfig, cases: Mapping[str, Case]
) -> Callable[[str], Answer]:
    """What torch answers to a case, by its name, over the blocks that an algorithm chooses."""
    llama = Llama(model, BLOCK)
    begin: Callable[[], Keep] = choosing(settings, BLOCK, KV_HEADS, HEAD_SIZE)
    known: dict[str, Answer] = {}

    def answer(name: str) -> Answer:
        if name not in known:
            known[name] = llama.answer(cases[name].tokens, cases[name].max_tokens, begin())
        return known[name]

    return answer


@pytest.fixture(scope="module")
def answers(model: Path) -> Callable[[str], Answer]:
    """Of the engine with Quest."""
    return torch_answers(
        model, QuestConfig(**QUEST), STORED | NEW | CROWDED | {"coded": CODED["alone"]}
    )


@pytest.fixture(scope="module")
def coded_answers(model: Path) -> Callable[[str], Answer]:
    """Of the engine with codes."""
    return torch_answers(model, GsaOnDeviceConfig(**CODES), STORED | CODED)


def spec_of(life: Life, algorithm: str, keys: Mapping[str, Any], label: str) -> EngineSpec:
    """An engine on the disk that a dense one has filled, of the same identity."""
    return life.cold_spec.but(
        blocks=40,
        extra_config={"sparse_type": algorithm, "ucm_sparse_config": {algorithm: dict(keys)}},
        label=f"{label}-{life.runner}",
    )


@pytest.fixture
def sparse(cold: Life, host: EngineHost) -> Engine:
    """The engine with sparse attention, with vLLM's own cache empty."""
    engine = host.get(spec_of(cold, "Quest", QUEST, "sparse"))
    engine.reset()
    engine.rpc("probe_record_choices")
    return engine


@pytest.fixture(scope="module")
def coded(cold: Life, host: EngineHost) -> Case:
    """A prompt that the engine with codes has computed and stored."""
    engine = host.get(spec_of(cold, "GSAOnDevice", CODES, "codes"))
    engine.generate(CODED["alone"].ask())
    engine.wait_idle()
    return CODED["alone"]


@pytest.fixture
def codes(cold: Life, host: EngineHost) -> Engine:
    """The engine whose blocks are chosen by a code of each token, with vLLM's own cache empty."""
    engine = host.get(spec_of(cold, "GSAOnDevice", CODES, "codes"))
    engine.reset()
    engine.rpc("probe_record_choices")
    return engine


def counted(engine: Engine) -> Counter[str]:
    """What its worker has counted: of choices, and of blocks whose representations are from the
    store or from keys."""
    made = "connector._sparse_worker.representations"
    said = f"connector.stats()['sparse'] | {{'loaded': {made}.loaded, 'rebuilt': {made}.rebuilt}}"
    return Counter(ast.literal_eval(engine.rpc("probe_worker_eval", said)[0]))


def made_are_stored(engine: Engine) -> bool:
    """Whether the store has all representations that were made of loaded keys."""
    writing = "connector._sparse_worker.representations._writing"
    return engine.rpc(
        "probe_worker_eval", f"all(store.check(task) for store, task in {writing})"
    ) == ["True"]


def assert_selected(engine: Engine, result: Result, answer: Answer) -> None:
    """What torch answers, from the blocks that torch keeps: whatever the batch and the past of the
    request."""
    assert_as_computed(result, answer)
    assert_chosen(engine, result, answer)


def test_the_reference_selects(
    answers: Callable[[str], Answer],
    coded_answers: Callable[[str], Answer],
    reference: dict[str, Result],
) -> None:
    """Otherwise equal tokens would prove nothing: what is left out decides the answer."""
    long, coded = answers("long"), coded_answers("long")
    assert 0 < long.kept < 0.5 * long.seen and 0 < coded.kept < 0.5 * coded.seen
    assert len({tuple(answer.tokens) for answer in (long, coded, reference["long"])}) == 3
    assert answers("brief").seen == 0


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
class TestCodes:
    """GSA On-Device: a code of each token, and choices that are used twice. One of vLLM's model
    runners is enough for what they have in common; these come first, so that its engine is started
    once."""

    @pytest.mark.parametrize("name", ["long", "middle"])
    def test_codes_of_a_dense_engines_prompts_are_made_of_its_keys_and_stored(
        self, codes: Engine, coded_answers: Callable[[str], Answer], name: str
    ) -> None:
        """Once: the next load brings them."""
        for source in ("rebuilt", "loaded"):
            before = counted(codes)
            result = codes.generate(STORED[name].ask())[0]
            assert_reused(result, STORED[name])
            assert_selected(codes, result, coded_answers(name))
            news = counted(codes) - before
            assert (news["rebuilt"] + news["loaded"], news[source]) == (
                result.cached_blocks,
                result.cached_blocks,
            )
            wait_until(lambda: made_are_stored(codes), "the codes are stored")
            codes.reset()

    def test_codes_of_new_prompts_are_stored_with_them(
        self, codes: Engine, coded: Case, coded_answers: Callable[[str], Answer]
    ) -> None:
        before = counted(codes)
        result = codes.generate(coded.ask())[0]
        assert result.cached_blocks == coded.full_blocks
        assert_selected(codes, result, coded_answers("alone"))
        news = counted(codes) - before
        assert (news["loaded"], news["rebuilt"]) == (coded.full_blocks, 0)

    def test_a_choice_is_used_twice(
        self, codes: Engine, coded_answers: Callable[[str], Answer]
    ) -> None:
        """When the request gets long enough in a step in which none would be due, it chooses all
        the same."""
        case, answer = CODED["turns_sparse"], coded_answers("turns_sparse")
        before = counted(codes)
        assert_selected(codes, codes.generate(case.ask())[0], answer)
        news = counted(codes) - before
        steps = sorted({tokens - len(case.tokens) for tokens, _ in answer.choices})
        assert steps == list(range(GATE - len(case.tokens), case.max_tokens)) and steps[0] % 2 == 0
        assert (news["blocks_kept"], news["blocks_seen"]) == (answer.kept, answer.seen)
        assert news["choices_used"] == news["rows_sparse"] == LAYERS * len(steps)
        assert news["steps_waited"] == LAYERS * sum(step % 2 == 0 for step in steps[1:])
        assert news["late"] == news["failed"] == news["rows_unready"] == 0

    def test_codes_are_no_representations_of_another_method(
        self, coded: Case, sparse: Engine, answers: Callable[[str], Answer]
    ) -> None:
        """Which makes its own of the same keys, in an engine that finds the same KV."""
        before = counted(sparse)
        result = sparse.generate(coded.ask())[0]
        assert result.cached_blocks == coded.full_blocks
        assert_selected(sparse, result, answers("coded"))
        news = counted(sparse) - before
        assert (news["loaded"], news["rebuilt"]) == (0, coded.full_blocks)


@pytest.mark.shows("Llama, Qwen", "sparse")
@pytest.mark.versions
@pytest.mark.parametrize("name", ["long", "middle"])
def test_prompts_of_a_dense_engine_are_loaded_and_selected_from(
    sparse: Engine, answers: Callable[[str], Answer], name: str
) -> None:
    """One identity for both, and representations of what was not computed here."""
    result = sparse.generate(STORED[name].ask())[0]
    assert_reused(result, STORED[name])
    assert_selected(sparse, result, answers(name))


@pytest.mark.versions
@pytest.mark.parametrize("name", ["alone", "turns_sparse", "brief", "goes_on"])
def test_new_prompts(sparse: Engine, answers: Callable[[str], Answer], name: str) -> None:
    """In chunks, and across the length from which on blocks are chosen."""
    result = sparse.generate(NEW[name].ask())[0]
    assert_selected(sparse, result, answers(name))


@pytest.mark.one_runner
def test_what_the_device_still_has_is_selected_from_again(
    sparse: Engine, answers: Callable[[str], Answer]
) -> None:
    for _ in range(2):
        result = sparse.generate(NEW["alone"].ask())[0]
        assert_selected(sparse, result, answers("alone"))
    assert_reused(result, NEW["alone"])
    result = sparse.generate(NEW["continues"].ask())[0]
    assert result.cached >= STORED["middle"].full_blocks * BLOCK
    assert_selected(sparse, result, answers("continues"))


@pytest.mark.one_runner
def test_neighbours_change_nothing(sparse: Engine, answers: Callable[[str], Answer]) -> None:
    """Rows of prompts, of short requests and of sparse ones in one step."""
    names = ["brief", "continues", "turns_sparse", "middle"]
    results = sparse.generate(*((NEW | STORED)[name].ask() for name in names))
    for name, result in zip(names, results, strict=True):
        assert_selected(sparse, result, answers(name))


@pytest.mark.one_runner
def test_several_sequences_of_one_request(
    sparse: Engine, runner: str, answers: Callable[[str], Answer]
) -> None:
    if runner == "v2":
        pytest.skip("vLLM's sampling of several sequences does not run in Triton's interpreter")
    result = sparse.ask(NEW["alone"].tokens, NEW["alone"].max_tokens, sequences=3)
    assert [result.tokens, *result.others] == [answers("alone").tokens] * 3


@pytest.mark.one_runner
def test_preempted_requests(sparse: Engine, answers: Callable[[str], Answer]) -> None:
    """Preempted while they are dense, resumed, and sparse in the end as if nothing had happened."""
    before = sparse.metrics()["vllm:num_preemptions_total"]

    def preempted() -> bool:
        """Some are, unless one of the requests arrives when the first one has ended."""
        results = sparse.generate(*(case.ask() for case in CROWDED.values()))
        for name, result in zip(CROWDED, results, strict=True):
            assert_selected(sparse, result, answers(name))
        return sparse.metrics()["vllm:num_preemptions_total"] > before

    wait_until(preempted, "some are preempted, or the pool is too large")


@pytest.mark.one_runner
def test_output_stays_out_of_the_device_cache(
    sparse: Engine, answers: Callable[[str], Answer]
) -> None:
    """A prompt that goes on from an answer finds the blocks of its prompt, and computes the answer
    densely."""
    first = sparse.generate(NEW["goes_on"].ask())[0]
    longer = sparse.ask(NEW["goes_on"].tokens + first.tokens + prompt(75, 20), 1)
    assert longer.cached == NEW["goes_on"].full_blocks * BLOCK


def test_dense_engine_meets_prompts_and_never_output(
    cold: Life,
    sparse: Engine,
    host: EngineHost,
    reference: dict[str, Result],
    request: pytest.FixtureRequest,
) -> None:
    """What was stored here is what a dense engine would have stored, up to the length from which on
    blocks are chosen."""
    sparse.wait_idle()  # what the test before dumped is there
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


@pytest.mark.one_runner
def test_answers_of_the_dense_engine_to_what_the_sparse_one_stored(
    cold: Life, warm: Engine, model: Path
) -> None:
    """Loaded KV is the KV that a dense engine computes: its answer is that of a dense model."""
    assert_dense(warm, NEW["goes_on"], model)


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_answers_of_the_dense_engine_to_what_the_one_with_codes_stored(
    coded: Case, warm: Engine, model: Path
) -> None:
    assert_dense(warm, coded, model)


def assert_dense(engine: Engine, case: Case, model: Path) -> None:
    """A stored prompt is loaded, and answered as a dense model answers it."""
    result = engine.generate(case.ask())[0]
    assert_reused(result, case)
    assert_as_computed(result, Llama(model, BLOCK).answer(case.tokens, case.max_tokens, None))
