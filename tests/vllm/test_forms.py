"""Models of every kind in every form of an engine that tools/matrix.py names: a prompt that comes
again is a hit, also after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matrix
import pytest
from cases import STORED
from checks import ask_until_reused, assert_same
from harness import EngineHost, wait_until
from lives import new_disk
from models import CONFIGS, GROUPS, write_model
from specs import ON_GPU, EngineSpec

from ucm.integration.vllm.compat.versions import installed

pytestmark = [pytest.mark.skipif(ON_GPU, reason="ranks share the CPU")]


@dataclass(frozen=True)
class Form:
    """Ranks, runner, arguments of vLLM, and the environment."""

    ranks: int
    runner: str
    args: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
#: What tensor ranks compile cannot be compiled beside interpreted Triton.
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
#: By their names in the table. The first runner of vLLM's build for CPUs has no pipelines.
FORMS = {
    "V1": Form(1, "v1", {}),
    "V2": Form(1, "v2", {}),
    "TP 2": Form(2, "v1", TENSOR),
    "PP 2": Form(2, "v2", PIPELINE),
    "TP + PP": Form(4, "v2", TENSOR | PIPELINE, UNCOMPILED),
    **dict.fromkeys(matrix.OTHER_VERSIONS, Form(1, "v1", {})),
}
#: For every day; the others are for make test-long.
DAILY = {("gemma3", "PP 2"), ("llama4", "V1"), ("lfm2", "V1")}


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
        env={
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1",
            **chosen.env,
        },
        label=label,
        fork=not chosen.env,
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


@pytest.mark.parametrize(
    "name",
    matrix.models_of(
        "tests/vllm/test_forms.py::test_two_engines_of_one_deployment_share_the_store"
    ),
)
def test_two_engines_of_one_deployment_share_the_store(
    work: Path, host: EngineHost, name: str
) -> None:
    """Each hits what the other one stored, and does not store it again. Of a prompt that both
    compute at once, one copy is kept."""
    disk = new_disk(work, f"{name}-dp")
    model = write_model(work / f"{name}-dp-model", CONFIGS[name]())
    spec = EngineSpec(
        model,
        "v1",
        disk.store(),
        args={"data_parallel_size": 2},
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        label=f"{name}-dp",
    )
    engine = host.get(spec)
    case, both = STORED["middle"], STORED["long"]
    first = engine.generate(case.ask(engine=0))[0]
    assert first.cached == 0
    groups = GROUPS[name]
    wait_until(lambda: len(disk.files()) == groups * case.full_blocks, "the prompt is stored")
    stored = disk.files()
    second = engine.generate(case.ask(engine=1))[0]
    assert_same(second, first)
    assert second.cached_blocks == case.full_blocks
    answers = engine.generate(both.ask(engine=0), both.ask(engine=1))
    assert_same(*answers)
    wait_until(
        lambda: len(disk.files()) == len(stored) + groups * both.full_blocks,
        "what both computed is stored once",
    )
    assert set(stored) <= set(disk.files())
