"""Models with layers of several kinds: windows, chunks or states beside full attention (several KV
groups of vLLM), and windows alone. A prompt that comes again is a hit as long as one of full
attention.

Right answers are those of requests that neither load nor store, in the same engine before it has
stored anything; the long form takes them from an engine with ``UCM_DISABLE=1`` too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matrix
import pytest
from cases import STORED, Case
from checks import assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import Disk, new_disk, store_under_test
from models import CHUNKS, CONFIGS, GROUPS, write_model
from specs import EngineSpec, Result, prompt

MODELS = matrix.models_of("tests/vllm/test_groups.py::test_a_prompt_that_comes_again_is_a_hit")
#: For make test-long. For every day test_forms.py has less of them. Not LFM2: its answers on a CPU
#: depend on the other prompts of a step, also without ucm.
LONG = ["gpt_oss", "llama4"]
#: Blocks of the device: enough for the longest prompt, and too few for all of GROWING. Dumps under
#: way are at most half of them, so Llama 4, of four groups, loses blocks of a long prompt in fewer.
POOLS = {"gemma3": 64, "mistral": 16, "llama4": 80, "gpt_oss": 48}
#: Short prompts, so that vLLM admits all of them; later it has no room for their answers.
GROWING = {f"growing_{i}": Case(prompt(60 + i, 40), 60) for i in range(12)}
#: Begins as a stored prompt and leaves it in the middle.
SHARED = Case(STORED["long"].tokens[:500] + prompt(77, 40))
ASKED = STORED | GROWING | {"shared": SHARED}
NO_CACHE = {"kv_transfer_params": {"ucm": {"load": False, "dump": False}}}


@dataclass(frozen=True)
class Served:
    """An engine that has computed and stored the prompts, its answers, the right ones, the files
    that it stored for each prompt, and its disk."""

    name: str
    engine: Engine
    spec: EngineSpec
    disk: Disk
    answers: dict[str, Result]
    right: dict[str, Result]
    stored: dict[str, list[Path]]


pytestmark = [
    pytest.mark.one_runner,
    pytest.mark.parametrize("runner", ["v1", "v2"], scope="module"),
    pytest.mark.parametrize(
        "name",
        [*MODELS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)],
        scope="module",
    ),
]


def alone(engine: Engine, **options: object) -> dict[str, Result]:
    """The answers of an engine, one after the other, and each from an empty cache."""
    answers = {}
    for one, case in ASKED.items():
        engine.reset()
        answers[one] = engine.generate(case.ask(**options))[0]
        assert answers[one].cached == 0
    engine.reset()
    return answers


@pytest.fixture(scope="session")
def disabled(host: EngineHost, work: Path) -> Callable[[EngineSpec], dict[str, Result]]:
    """The answers of an engine with ``UCM_DISABLE=1``, started once for each model."""
    known: dict[Path, dict[str, Result]] = {}

    def answers(spec: EngineSpec) -> dict[str, Result]:
        if spec.model not in known:
            env = {**spec.env, "UCM_DISABLE": "1"}
            known[spec.model] = alone(host.get(spec.but(env=env, label=f"{spec.label}-disabled")))
        return known[spec.model]

    return answers


@pytest.fixture(scope="module")
def served(
    name: str,
    runner: str,
    host: EngineHost,
    work: Path,
    disabled: Callable[[EngineSpec], dict[str, Result]],
) -> Served:
    label = f"groups-{name}-{runner}"
    disk = new_disk(work, label)
    model = work / f"groups-{name}"
    if not model.exists():
        write_model(model, CONFIGS[name]())
    spec = EngineSpec(model, runner, disk.store(), blocks=POOLS[name], env=CHUNKS, label=label)
    without = disabled(spec) if os.environ.get("UCM_TEST_LONG") else {}
    engine = host.get(spec)
    right = alone(engine, extra_args=NO_CACHE)
    assert not disk.files()
    for one, answer in without.items():
        assert_same(right[one], answer)
    answers, stored = {}, {}
    for one, case in STORED.items():
        before = set(disk.files())
        answers[one] = engine.generate(case.ask())[0]
        engine.wait_idle()
        stored[one] = [path for path in disk.files() if path not in before]
    engine.reset()
    return Served(name, engine, spec, disk, answers, right, stored)


def test_vllm_has_the_groups_that_these_tests_are_about(served: Served) -> None:
    assert served.engine.scheduler()["groups"] == GROUPS[served.name]
    assert all(served.stored.values())
    for cases in (STORED, GROWING):
        said = [tuple(served.right[one].tokens) for one in cases]
        assert len(set(said)) == len(said), (
            "prompts do not decide the answers: equal ones prove nothing"
        )


@pytest.mark.shows(None, "V1", "V2")
@pytest.mark.parametrize("case", STORED)
def test_a_prompt_that_comes_again_is_a_hit(served: Served, case: str) -> None:
    """Longer and shorter than the window, and in several chunks of prefill."""
    assert_same(served.answers[case], served.right[case])
    served.engine.reset()
    answer = served.engine.generate(STORED[case].ask())[0]
    assert_same(answer, served.right[case])
    assert answer.cached_blocks == STORED[case].full_blocks
    served.engine.wait_idle()


def test_a_shared_beginning_is_a_hit(served: Served) -> None:
    served.engine.reset()
    first = served.engine.generate(SHARED.ask())[0]
    assert_same(first, served.right["shared"])
    assert first.cached == 480
    served.engine.wait_idle()
    served.engine.reset()
    again = served.engine.generate(SHARED.ask())[0]
    assert_same(again, served.right["shared"])
    assert again.cached == 512


def test_what_the_device_has_is_continued(served: Served) -> None:
    served.engine.reset()
    served.engine.ask(STORED["long"].tokens[:200], 1)
    answer = served.engine.generate(STORED["long"].ask())[0]
    assert_same(answer, served.right["long"])
    assert_reused(answer, STORED["long"])
    served.engine.wait_idle()


def test_requests_that_do_not_fit_together_get_right_answers(served: Served) -> None:
    """vLLM preempts some, frees blocks behind their windows, and hands them out again."""
    before = served.engine.metrics()["vllm:num_preemptions_total"]

    def preempted() -> bool:
        """Some are, unless one of the requests arrives when the first one has ended."""
        served.engine.reset()
        answers = served.engine.generate(*(case.ask() for case in GROWING.values()))
        for one, answer in zip(GROWING, answers, strict=True):
            assert_same(answer, served.right[one])
        served.engine.wait_idle()
        return served.engine.metrics()["vllm:num_preemptions_total"] > before

    wait_until(preempted, "some are preempted, or the pool is too large")


# Another engine on the same disk: these come last.
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def again(served: Served, host: EngineHost) -> Engine:
    return host.get(served.spec.but(label=f"{served.spec.label}-again"))


def test_a_restarted_engine_hits(served: Served, again: Engine) -> None:
    again.reset()
    for name, case in STORED.items():
        answer = again.generate(case.ask())[0]
        assert_same(answer, served.right[name])
        assert answer.cached_blocks == case.full_blocks


@pytest.mark.skipif(store_under_test() != "posix", reason="only our records have checksums")
def test_a_damaged_record_of_any_group_is_refused_and_replaced(
    served: Served, again: Engine
) -> None:
    """The last record of one group that the hit needs, and then that of the next group. vLLM frees
    all blocks of a failed load, and the request loads the longest prefix that is left. Without the
    last state there is none."""
    from ucm.cli.inspect import inspect_file

    case, right = STORED["middle"], served.right["middle"]
    last: dict[str, tuple[int, Path]] = {}
    for path in served.stored["middle"]:
        header = inspect_file(str(path))["header"]
        if header["ordinal"] < case.full_blocks:
            group = header["part"].partition("p")[0]
            last[group] = max(last.get(group, (-1, path)), (header["ordinal"], path))
    assert sorted(last) == [f"g{number}" for number in range(GROUPS[served.name])]
    for group, (ordinal, path) in last.items():
        again.wait_idle()
        again.reset()
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        before = again.metrics()
        answer = again.generate(case.ask())[0]
        assert_same(answer, right)

        def refused(before: dict[str, float] = before) -> bool:
            name = "ucm_missed_blocks_total:bad_checksum"
            return again.metrics()[name] > before[name]

        wait_until(refused, f"the record of group {group} is counted as refused")
        assert answer.cached_blocks == ordinal, f"group {group}"
        again.wait_idle()
        again.reset()
        assert inspect_file(str(path))["reason"] is None, f"group {group}: not replaced"
        answer = again.generate(case.ask())[0]
        assert_same(answer, right)
        assert answer.cached_blocks == case.full_blocks
