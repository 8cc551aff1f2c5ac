"""What a user sees: the second engine process answers with the same tokens and computes almost
nothing again."""

from __future__ import annotations

import pytest
from cases import CROWD, FRESH, PRESSURE, SALTED, STORED, next_turn, output_blocks
from checks import assert_reused, assert_same, assert_stored
from harness import Engine, wait_until
from lives import Life
from specs import BLOCK, Ask, Result, prompt


def test_prompts_decide_the_answers(reference: dict[str, Result]) -> None:
    """Otherwise equal tokens would prove nothing: answers differ from prompt to prompt, also far
    from its end."""
    for one, other in (("shared_a", "shared_b"), ("crowd_0", "crowd_1"), ("long", "middle")):
        assert reference[one].tokens != reference[other].tokens
    assert all(len(set(answer.tokens)) > len(answer.tokens) // 2 for answer in reference.values())


def test_disabled_engine_reuses_nothing(reference: dict[str, Result]) -> None:
    assert_same(reference["disabled"], reference["long"])
    assert reference["disabled"].cached == 0


@pytest.mark.versions
def test_runner_is_the_one_asked_for(cold: Life) -> None:
    modules = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
    assert cold.runner_module == modules[cold.runner]


def test_failed_loads_are_recomputed_by_policy(cold: Life) -> None:
    """vLLM's default would end a user's request with an error when a load fails."""
    assert cold.policy == "recompute"


@pytest.mark.parametrize("name", [*STORED, *CROWD])
def test_cold_answers_are_right(cold: Life, reference: dict[str, Result], name: str) -> None:
    assert_same(cold.answers[name], reference[name])


@pytest.mark.versions
def test_cold_engine_stored_every_full_block_once(cold: Life) -> None:
    """Prompt and output blocks, each distinct one once, although the engine was ended right after
    its last answer."""
    held: set[tuple[int, ...]] = set()
    salted: set[tuple[int, ...]] = set()
    for name, case in (STORED | CROWD | {"salted": SALTED}).items():
        tokens = case.tokens + cold.answers[name].tokens
        for block in range(output_blocks(case)):
            (salted if name == "salted" else held).add(tuple(tokens[: (block + 1) * BLOCK]))
    assert cold.stored == len(held) + len(salted)


@pytest.mark.shows("Llama, Qwen", "V1", "V2", "0.30", "0.31", "0.33")
@pytest.mark.versions
@pytest.mark.parametrize("name", STORED)
def test_restarted_engine_reuses(
    warm: Engine, cold: Life, reference: dict[str, Result], name: str
) -> None:
    answer = warm.generate(STORED[name].ask())[0]
    assert_same(answer, reference[name])
    assert_reused(answer, STORED[name])


def test_restarted_engine_stores_nothing_again(warm: Engine, cold: Life) -> None:
    """What is present is neither written nor offered to the store again."""
    before, since = cold.disk.files(), len(cold.disk.faults.events("dump"))
    warm.generate(STORED["middle"].ask())
    warm.wait_idle()
    offered = {block for event in cold.disk.faults.events("dump")[since:] for block in event["ids"]}
    assert cold.disk.files() == before
    assert not offered & {path.name.partition(".")[0] for path in before}


def test_prompt_shorter_than_a_block(
    warm: Engine, cold: Life, reference: dict[str, Result]
) -> None:
    warm.wait_idle()  # what the test before dumped is there
    before = len(cold.disk.files())
    answer = warm.generate(FRESH["less_than_a_block"].ask())[0]
    assert_same(answer, reference["less_than_a_block"])
    assert answer.cached == 0
    warm.wait_idle()
    assert len(cold.disk.files()) == before


@pytest.mark.versions
def test_shared_prefix_of_a_new_prompt(
    warm: Engine, cold: Life, reference: dict[str, Result]
) -> None:
    warm.wait_idle()  # what the test before dumped is there
    before = len(cold.disk.files())
    answer = warm.generate(FRESH["shared_c"].ask())[0]
    assert_same(answer, reference["shared_c"])
    assert answer.cached == 320
    assert_stored(cold.disk, before, output_blocks(FRESH["shared_c"]) - 10)


def test_device_prefix_is_continued_from_the_store(
    warm: Engine, reference: dict[str, Result]
) -> None:
    """Part of the prefix is in vLLM's own cache, the rest only in the store."""
    part = warm.ask(STORED["middle"].tokens[:200], 1)
    assert part.cached >= 160
    answer = warm.generate(STORED["middle"].ask())[0]
    assert_same(answer, reference["middle"])
    assert_reused(answer, STORED["middle"])


@pytest.mark.versions
def test_concurrent_requests(warm: Engine, reference: dict[str, Result]) -> None:
    """Six loads at a time, two of them of the same blocks, beside a request that computes."""
    asks = [case.ask() for case in CROWD.values()]
    *answers, bystander = warm.generate(*asks, FRESH["bystander"].ask())
    for (name, case), answer in zip(CROWD.items(), answers, strict=True):
        assert_same(answer, reference[name])
        assert_reused(answer, case)
    assert_same(bystander, reference["bystander"])


def test_follow_up_turn_reuses_the_output(
    warm: Engine, cold: Life, reference: dict[str, Result]
) -> None:
    case = next_turn(cold.answers["turn"])
    answer = warm.generate(case.ask())[0]
    assert_same(answer, reference["next_turn"])
    assert output_blocks(STORED["turn"]) > STORED["turn"].full_blocks
    assert answer.cached == output_blocks(STORED["turn"]) * BLOCK


def test_second_time_comes_from_the_device(
    warm: Engine, cold: Life, reference: dict[str, Result]
) -> None:
    """vLLM's own cache is used first: nothing is loaded for what is there."""
    warm.generate(STORED["short"].ask())
    loads = len(cold.disk.faults.events("load"))
    answer = warm.generate(STORED["short"].ask())[0]
    assert_same(answer, reference["short"])
    assert_reused(answer, STORED["short"])
    assert len(cold.disk.faults.events("load")) == loads


def test_cache_salt_separates(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    """Stored under the salt ``red`` only: found with it, neither with another nor without one."""
    assert_same(cold.answers["salted"], reference["salted"])
    for salt, found in (("blue", False), (None, False), ("red", True)):
        warm.reset()
        answer = warm.generate(SALTED.ask(salt=salt))[0]
        assert_same(answer, reference["salted"])
        if found:
            assert_reused(answer, SALTED)
        else:
            assert answer.cached == 0


def test_preempted_requests(warm: Engine, reference: dict[str, Result]) -> None:
    """The pool is too small for all: some are preempted, resumed, and end with the right tokens."""
    before = warm.metrics()["vllm:num_preemptions_total"]

    def preempted() -> bool:
        """Some are, unless one of the requests arrives when the first one has ended."""
        answers = warm.generate(*(case.ask() for case in PRESSURE.values()))
        for name, answer in zip(PRESSURE, answers, strict=True):
            assert_same(answer, reference[name])
        return warm.metrics()["vllm:num_preemptions_total"] > before

    wait_until(preempted, "some are preempted, or the pool is too large")
    warm.wait_idle()


@pytest.mark.one_runner
def test_preempted_requests_again_from_the_store(
    warm: Engine, reference: dict[str, Result]
) -> None:
    """The same pressure with loads under way: what was preempted and stored before is loaded,
    preempted, resumed."""
    warm.generate(*(case.ask() for case in PRESSURE.values()))
    warm.wait_idle()
    warm.reset()
    answers = warm.generate(*(case.ask() for case in PRESSURE.values()))
    for (name, case), answer in zip(PRESSURE.items(), answers, strict=True):
        assert_same(answer, reference[name])
        assert_reused(answer, case)
    warm.wait_idle()


def test_hits_are_counted_by_vllm(warm: Engine, cold: Life) -> None:
    before = warm.metrics()["vllm:external_prefix_cache_hits_total"]
    answer = warm.generate(STORED["middle"].ask())[0]
    assert warm.metrics()["vllm:external_prefix_cache_hits_total"] - before >= answer.cached > 0


def test_many_unrelated_requests_leave_no_block_held(warm: Engine) -> None:
    warm.generate(*(Ask(prompt(900 + i, 40 + 11 * i), 5) for i in range(12)))
    warm.wait_idle()
