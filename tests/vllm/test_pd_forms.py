"""Prefill and decode on separate engines: with several KV groups on tensor ranks and with the
second runner, with states, and where the decode engine has another connector beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import STORED
from checks import ask_until_reused, assert_same
from harness import Engine, EngineHost
from lives import new_disk
from models import CONFIGS, write_model
from siblings import SIBLING, several
from specs import BLOCK, ON_GPU, Ask, EngineSpec

pytestmark = [pytest.mark.long, pytest.mark.skipif(ON_GPU, reason="ranks share the CPU")]

#: What vLLM's toy proxy sends to a prefill server.
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize(
    ("name", "runner", "ranks", "beside"),
    [
        ("gemma3", "v1", 2, False),
        ("gemma3", "v2", 1, False),
        ("llama", "v1", 1, True),  # with that connector vLLM keeps one group of any model
        ("lfm2", "v1", 1, False),
    ],
    ids=["gemma3-TP2", "gemma3-V2", "llama-beside", "lfm2"],
)
def test_a_decode_engine_loads_what_a_prefill_engine_stored(
    work: Path, host: EngineHost, name: str, runner: str, ranks: int, beside: bool
) -> None:
    label = f"pd-{name}-{runner}-{ranks}-{beside}"
    model = write_model(work / f"{label}-model", CONFIGS[name]())
    spec = EngineSpec(
        model,
        runner,
        new_disk(work, label).store(),
        tensor_parallel=ranks,
        extra_config={"pd_wait_ms": 60_000},
        label=f"{label}-prefill",
    )
    cases = {one: STORED[one] for one in ("short", "exact", "middle")}
    engine = host.get(spec)
    right = {one: engine.generate(case.ask(salt="alone"))[0] for one, case in cases.items()}
    first = engine.generate(STORED["last"].ask())[0]
    answers: dict[str, Any] = {}
    for one, case in cases.items():
        asked = Ask(case.tokens, 1, extra_args={"kv_transfer_params": PREFILL})
        answers[one] = engine.generate(asked)[0].params
        assert answers[one]["do_remote_prefill"]
        assert answers[one]["ucm"]["tokens"] >= case.full_blocks * BLOCK
    engine.wait_idle()
    transfer = None
    if beside:
        ours = spec.kv_transfer()
        transfer = several(ours, SIBLING, kv_load_failure_policy="recompute")
    engine = host.get(spec.but(transfer=transfer, label=f"{label}-decode"))
    ask_until_reused(engine, STORED["last"], first)  # its store is open then
    for one, case in cases.items():
        before = loaded(engine)
        asked = case.ask(extra_args={"kv_transfer_params": answers[one]})
        assert_same(engine.generate(asked)[0], right[one])
        assert loaded(engine) == before + case.full_blocks


def loaded(engine: Engine) -> int:
    """Blocks that it has loaded so far: vLLM counts those of such requests as a prefill server's.
    It reports them in a step after the load."""
    engine.wait_idle()
    return int(engine.metrics()["ucm_loaded_blocks_total"])
