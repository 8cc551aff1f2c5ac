"""Models with layers of several kinds: sliding windows beside full attention (two KV groups of
vLLM), and windows alone. A prompt that comes again is a hit as long as one of full attention."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import matrix
import pytest
from cases import PRESSURE, STORED
from checks import assert_reused, assert_same
from harness import Engine, EngineHost
from lives import Disk, new_disk, store_under_test
from models import CONFIGS, GROUPS, write_model
from specs import EngineSpec, Result, prompt

MODELS = matrix.models_of("tests/vllm/test_groups.py::test_a_prompt_that_comes_again_is_a_hit")


@dataclass(frozen=True)
class Served:
    """An engine that has computed and stored the prompts, its answers, and its disk."""

    name: str
    engine: Engine
    spec: EngineSpec
    disk: Disk
    answers: dict[str, Result]


pytestmark = [
    pytest.mark.one_runner,
    pytest.mark.parametrize("runner", ["v1", "v2"], scope="module"),
    pytest.mark.parametrize("name", MODELS, scope="module"),
]


@pytest.fixture(scope="module")
def served(name: str, runner: str, host: EngineHost, work: Path) -> Served:
    label = f"groups-{name}-{runner}"
    disk = new_disk(work, label)
    model = write_model(work / label / "model", CONFIGS[name]())
    spec = EngineSpec(model, runner, disk.store(), label=label)
    engine = host.get(spec)
    answers = {one: engine.generate(case.ask())[0] for one, case in STORED.items()}
    engine.wait_idle()
    engine.reset()
    return Served(name, engine, spec, disk, answers)


def test_vllm_has_the_groups_that_these_tests_are_about(served: Served) -> None:
    assert served.engine.scheduler()["groups"] == GROUPS[served.name]
    assert served.disk.files()
    said = [tuple(answer.tokens) for answer in served.answers.values()]
    assert len(set(said)) == len(said), (
        "prompts do not decide the answers: equal ones prove nothing"
    )


@pytest.mark.parametrize("case", STORED)
def test_a_prompt_that_comes_again_is_a_hit(served: Served, case: str) -> None:
    """Longer and shorter than the window, and in several chunks of prefill."""
    served.engine.reset()
    answer = served.engine.generate(STORED[case].ask())[0]
    assert_same(answer, served.answers[case])
    assert answer.cached_blocks == STORED[case].full_blocks
    served.engine.wait_idle()


def test_a_shared_beginning_is_a_hit(served: Served) -> None:
    """It ends inside of the stored prompts, so its windows are there too."""
    tokens = STORED["long"].tokens[:500] + prompt(77, 40)
    served.engine.reset()
    cold = served.engine.ask(tokens)
    assert cold.cached == 480
    served.engine.wait_idle()
    served.engine.reset()
    again = served.engine.ask(tokens)
    assert_same(again, cold)
    assert again.cached == 512


def test_what_the_device_has_is_continued(served: Served) -> None:
    served.engine.reset()
    served.engine.ask(STORED["long"].tokens[:200], 1)
    answer = served.engine.generate(STORED["long"].ask())[0]
    assert_same(answer, served.answers["long"])
    assert_reused(answer, STORED["long"])
    served.engine.wait_idle()


def test_requests_that_do_not_fit_together_get_right_answers(served: Served) -> None:
    """vLLM preempts some, frees blocks behind their windows, and hands them out again."""
    served.engine.reset()
    alone = [served.engine.generate(case.ask())[0] for case in PRESSURE.values()]
    served.engine.wait_idle()
    served.engine.reset()
    for answer, right in zip(
        served.engine.generate(*(case.ask() for case in PRESSURE.values())), alone, strict=True
    ):
        assert_same(answer, right)
    served.engine.wait_idle()


def test_a_restarted_engine_hits_and_damaged_records_cost_hits_alone(
    served: Served, host: EngineHost
) -> None:
    """Last, because it ends the engine of the others. After damage vLLM computes a request again as
    a whole: a shorter prefix would need other blocks of a window."""
    engine = host.get(served.spec.but(label=f"{served.spec.label}-again"))
    for name, case in STORED.items():
        answer = engine.generate(case.ask())[0]
        assert_same(answer, served.answers[name])
        assert answer.cached_blocks == case.full_blocks
    if store_under_test() != "posix":
        return  # only our records have checksums
    for seed in range(4):
        engine.wait_idle()
        engine.reset()
        for path in random.Random(seed).sample(served.disk.files(), 30):
            with path.open("r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(bytes(range(100)))
        answer = engine.generate(STORED["middle"].ask())[0]
        assert_same(answer, served.answers["middle"])
