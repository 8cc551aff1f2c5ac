"""ReRoPE in real engines of an unpatched vLLM: a window that nothing reaches gives RoPE's tokens; a
small one those of the rule in torch, stored, and reused after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import STORED, Case
from checks import ask_until_reused, assert_as_computed, assert_same
from harness import EngineHost
from lives import new_disk
from models import MAX_LEN
from software_driver import IN_USE
from sparse_reference import Llama
from specs import BLOCK, ON_GPU, EngineSpec, Result
from torch import Tensor

from ucm.sparse.rerope.rule import RotationTable, Rule, attention

pytestmark = pytest.mark.skipif(ON_GPU or IN_USE, reason="attention of the CPU backend")

OVERRIDES = {"hf_overrides": {"architectures": ["UcmReRopeLlamaForCausalLM"]}}
SMALL = {"window": 100, "training_length": 256, "log_scale": True}
#: Below the window, across it, and in several chunks of prefill.
ASKED: Mapping[str, Case] = {name: STORED[name] for name in ("short", "middle", "long", "turn")}


def spec_of(model: Path, disk: Any, runner: str, rule: Mapping[str, Any], label: str) -> EngineSpec:
    return EngineSpec(
        model, runner, disk.store(), extra_config={"rerope": rule}, args=OVERRIDES, label=label
    )


class ByRule(Llama):
    """The model with attention by the rule, in torch."""

    rule = Rule(**SMALL)

    def _attend(
        self, layer: int, base: str, hidden: Tensor, at: int, cache: Any, *_: Any
    ) -> Tensor:
        query, key, value = (
            (hidden @ self.weights[base + f"{name}_proj.weight"].T).view(len(hidden), -1, self.size)
            for name in "qkv"
        )
        if at:
            key, value = torch.cat([cache[layer][0], key]), torch.cat([cache[layer][1], value])
        cache[layer] = key, value
        rates = self.config["rope_theta"] ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.arange(len(key))[:, None] * rates
        rotation = RotationTable(torch.cat([angles.cos(), angles.sin()], dim=-1))
        found = attention(query, key, value, rotation, self.rule, self.size**-0.5)
        return found.flatten(1)


def test_a_window_that_nothing_reaches_gives_the_tokens_of_rope(
    work: Path, host: EngineHost, model: Path, reference: dict[str, Result]
) -> None:
    rule = {"window": MAX_LEN}
    disk = new_disk(work, "rerope-whole")
    engine = host.get(spec_of(model, disk, "v1", rule, "rerope-whole"))
    for name, case in ASKED.items():
        assert_same(engine.generate(case.ask())[0], reference[name])


@pytest.mark.parametrize(
    ("runner", "ranks"),
    [  # V2 over the interpreted Triton runs no tensor ranks here, V1 on a CPU no pipelines
        ("v2", {}),
        pytest.param("v1", {"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param("v2", {"pipeline_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=["one rank", "TP 2", "PP 2"],
)
def test_a_small_window_is_computed_stored_and_reused_after_a_restart(
    work: Path,
    host: EngineHost,
    model: Path,
    reference: dict[str, Result],
    runner: str,
    ranks: dict[str, int],
    request: pytest.FixtureRequest,
) -> None:
    """Tokens are those of the rule. Prompts together give what they give alone."""
    label = f"rerope-small-{request.node.callspec.id}".replace(" ", "-")
    disk, torch_model = new_disk(work, label), ByRule(model, BLOCK)
    spec = spec_of(model, disk, runner, SMALL, label)
    if ranks:
        spec = spec.but(args=OVERRIDES | ranks, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    engine = host.get(spec)
    answers = dict(
        zip(ASKED, engine.generate(*(case.ask() for case in ASKED.values())), strict=True)
    )
    for name, case in ASKED.items():
        expected = torch_model.answer(case.tokens, case.max_tokens, None)
        assert_as_computed(answers[name], expected)
    assert answers["long"].tokens != reference["long"].tokens
    engine.wait_idle()
    stored = disk.files()
    assert len(stored) >= sum(case.full_blocks for case in ASKED.values())
    engine = host.get(spec.but(label=f"{label}-again"))
    for name, case in ASKED.items():
        ask_until_reused(engine, case, answers[name])
    engine.wait_idle()
    assert disk.files() == stored, "nothing was stored again"
