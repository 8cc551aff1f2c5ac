"""Models of every kind in every form of an engine that tools/matrix.py names: a prompt that comes
again is a hit, also after a restart."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matrix
import pytest
from cases import STORED, Case
from checks import ask_until_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import Disk, new_disk, store_under_test
from models import CHUNKS, CONFIGS, GROUPS, STATES, write_model
from specs import ON_GPU, EngineSpec

from ucm.integration.vllm.compat.versions import installed

pytestmark = [pytest.mark.skipif(ON_GPU, reason="ranks share the CPU")]


@dataclass(frozen=True)
class Form:
    """Ranks, runner, arguments of vLLM, and the environment."""

    ranks: int
    runner: str
    args: Mapping[str, Any]


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
#: By their names in the table. The first runner of vLLM's build for CPUs has no pipelines.
FORMS = {
    "V1": Form(1, "v1", {}),
    "V2": Form(1, "v2", {}),
    "TP 2": Form(2, "v1", TENSOR),
    "PP 2": Form(2, "v2", PIPELINE),
    "TP + PP": Form(4, "v2", TENSOR | PIPELINE),
    **dict.fromkeys(matrix.OTHER_VERSIONS, Form(1, "v1", {})),
}
#: For every day; the others are for make test-long.
DAILY = {
    *(("gemma3", "PP 2"), ("llama4", "V1"), ("lfm2", "V1")),
    *(("llama", "DP 2"), ("gemma3", "DP 2")),
}


def marks(model: str, form: str) -> list[pytest.MarkDecorator]:
    """When it runs."""
    if form in matrix.OTHER_VERSIONS:
        other = not installed().startswith(f"{form}.")
        return [pytest.mark.versions, pytest.mark.skipif(other, reason=f"for vLLM {form}")]
    return [] if (model, form) in DAILY else [pytest.mark.long]


SHOWN = [
    pytest.param(model, form, id=f"{model}-{form}", marks=marks(model, form))
    for model, form in matrix.forms_of(
        "tests/vllm/test_forms.py::test_a_prompt_that_comes_again_is_a_hit"
    )
]


@pytest.mark.shows(None, "V1", "V2", "TP 2", "PP 2", "TP + PP", "0.30", "0.31", "0.33")
@pytest.mark.parametrize(("name", "form"), SHOWN)
def test_a_prompt_that_comes_again_is_a_hit(
    work: Path, host: EngineHost, name: str, form: str
) -> None:
    label = f"{name}-{form}".replace(" ", "")
    disk = new_disk(work, label)
    model = write_model(work / f"{label}-model", CONFIGS[name]())
    chosen = FORMS[form]
    cores = "|".join(str(rank % 2) for rank in range(chosen.ranks))
    spec = EngineSpec(
        model,
        chosen.runner,
        disk.store(),
        args=chosen.args,
        env={"VLLM_CPU_OMP_THREADS_BIND": cores, **CHUNKS},
        label=label,
    )
    asked = {name: STORED[name] for name in ("short", "middle")}
    engine = host.get(spec)
    computed = {one: engine.generate(case.ask())[0] for one, case in asked.items()}
    assert [answer.cached for answer in computed.values()] == [0, 0]
    for again in (False, True):
        engine.wait_idle()
        stored = disk.files()
        if again:
            engine = host.get(spec.but(label=f"{label}-again"))
        for one, case in asked.items():
            ask_until_reused(engine, case, computed[one])
        engine.wait_idle()
        assert disk.files() == stored, "nothing was stored again"


DEPLOYED = [
    pytest.param(model, marks=marks(model, "DP 2"))
    for model in matrix.models_of(
        "tests/vllm/test_forms.py::test_two_engines_of_one_deployment_share_the_store"
    )
]
#: Counts of a worker's store: records that it wrote, and records that were there already.
COUNTS = "[connector.stats()[f'blocks_{name}'] for name in ('published', 'present')]"


class Deployment:
    """Two engines of one deployment on one disk."""

    def __init__(self, engine: Engine, disk: Disk) -> None:
        self.engine, self.disk = engine, disk
        process = "__import__('os').getpid()"
        self.workers = [int(said) for (said,) in engine.rpc_each("probe_worker_eval", process)]
        self.schedulers = [int(said) for said in engine.scheduler_each(process)]

    def counts(self) -> list[tuple[int, int]]:
        """Of each engine: records that it wrote, and records that were there already."""
        said = self.engine.rpc_each("probe_worker_eval", COUNTS)
        return [tuple(ast.literal_eval(one)) for (one,) in said]

    def stored(self) -> dict[Path, tuple[int, bytes]]:
        """Every file with its inode and content, which names its writer and its time."""
        return {path: (path.stat().st_ino, path.read_bytes()) for path in self.disk.files()}

    def compute_at_once(self, case: Case) -> None:
        """Both find nothing of the prompt before either computes it."""
        faults = self.disk.faults
        faults.set("hold-found")
        since = len(faults.events("found"))
        requests = self.engine.submit(case.ask(engine=0), case.ask(engine=1))

        def found() -> bool:
            events = faults.events("found")[since:]
            return {event["process"] for event in events} == set(self.schedulers)

        wait_until(found, "both have looked up the prompt")
        faults.clear("hold-found")
        answers = self.engine.collect(requests)
        assert_same(*answers)
        assert [answer.cached for answer in answers] == [0, 0]

    def first_alone(self) -> None:
        """From now on the second engine cannot store."""
        self.disk.faults.set(f"hold-dump-{self.workers[1]}")


@pytest.mark.shows(None, "DP 2")
@pytest.mark.skipif(store_under_test() != "posix", reason="the other store counts nothing")
@pytest.mark.parametrize("name", DEPLOYED)
def test_two_engines_of_one_deployment_share_the_store(
    work: Path, host: EngineHost, name: str
) -> None:
    """Each hits what the other one stored, and writes nothing. A prompt that both compute at once
    is written twice at most: a record that is there already is counted as present."""
    disk = new_disk(work, f"{name}-dp")
    model = write_model(work / f"{name}-dp-model", CONFIGS[name]())
    spec = EngineSpec(
        model,
        "v1",
        disk.faulty(),
        args={"data_parallel_size": 2},
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1", **CHUNKS},
        label=f"{name}-dp",
    )
    engine = host.get(spec)
    both, case = Deployment(engine, disk), STORED["middle"]
    first = engine.generate(case.ask(engine=0))[0]
    assert first.cached == 0
    engine.wait_idle()
    stored = both.stored()
    records = len(stored)
    if name not in STATES:
        assert records == GROUPS[name] * case.full_blocks
    assert both.counts() == [(records, 0), (0, 0)]

    second = engine.generate(case.ask(engine=1))[0]
    assert_same(second, first)
    assert second.cached_blocks == case.full_blocks
    engine.wait_idle()
    assert both.stored() == stored
    assert both.counts() == [(records, 0), (0, 0)]

    before = both.counts()
    both.compute_at_once(STORED["long"])
    engine.wait_idle()
    new = [
        (now[0] - then[0], now[1] - then[1])
        for now, then in zip(both.counts(), before, strict=True)
    ]
    records = len(both.stored()) - len(stored)
    assert records > 0
    assert [sum(one) for one in new] == [records, records]
    assert records <= new[0][0] + new[1][0] <= 2 * records

    if name != "llama":
        return  # blocks leave the device early, so they are read in time, whatever a test holds
    both.first_alone()
    both.compute_at_once(STORED["last"])
    wait_until(lambda: engine.idle()[0], "the first engine has stored the prompt")
    (of_first, (wrote, present)), stored = both.counts(), both.stored()
    disk.faults.clear()
    engine.wait_idle()
    assert both.counts() == [of_first, (wrote, present + STORED["last"].full_blocks)]
    assert both.stored() == stored
