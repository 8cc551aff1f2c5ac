"""``ucm plan``: sizes by the estimate of storage, the slowest store that pays, a configuration that
is one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from ucm.config import load
from ucm.utils import estimate_storage_requirements

Json = Callable[..., dict[str, Any]]

#: Llama 3 70B: 320 KiB a token.
LLAMA = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
WORKLOAD = ("--context", 32768, "--concurrency", 4)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_sizes_are_those_of_the_estimate(ucm_json: Json, llama: Path) -> None:
    found = ucm_json("plan", llama, *WORKLOAD)
    room = estimate_storage_requirements(LLAMA, 32768, 4)
    assert found["bytes_per_token"] == 320 << 10
    assert found["bytes_per_block"] == 16 * 320 << 10
    assert found["working_set_bytes"] == room["kv_cache_size_gb"] * (1 << 30) == 40 << 30
    assert (found["memory_bytes"], found["disk_bytes"]) == (60 << 30, 400 << 30)
    assert ucm_json("plan", llama / "config.json", *WORKLOAD)["disk_bytes"] == 400 << 30
    halved = ucm_json("plan", llama, *WORKLOAD, "--kv-dtype", "fp8")
    assert halved["bytes_per_token"] == 160 << 10


def test_computing_costs_two_operations_a_parameter_and_attention(
    ucm_json: Json, llama: Path
) -> None:
    found = ucm_json("plan", llama, *WORKLOAD, "--hit-rate", 1)
    by_size = ucm_json("plan", 70, *WORKLOAD, "--hit-rate", 1)
    attention = 2 * 80 * 8192 * 32768 / 2 / 70e9
    ratio = found["compute_seconds"] / by_size["compute_seconds"]
    assert ratio == pytest.approx(1 + attention, rel=0.05)
    mixture = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    (llama / "config.json").write_text(json.dumps(mixture))
    assert ucm_json("plan", llama, *WORKLOAD, "--hit-rate", 1)["compute_seconds"] < (
        found["compute_seconds"] / 2
    )


def test_the_slowest_store_that_pays_follows_the_speed_of_computing(
    ucm_json: Json, llama: Path
) -> None:
    slow = ucm_json("plan", llama, *WORKLOAD, "--prefill-tps", 1000)
    fast = ucm_json("plan", llama, *WORKLOAD, "--prefill-tps", 30000)
    assert slow["slowest_that_pays"] == "bucket (Object)"
    assert fast["slowest_that_pays"] == "memory (Cache)"
    assert slow["least_gbps"] == pytest.approx(1000 * (320 << 10) / 0.8 / 1e9)
    own = ucm_json("plan", llama, *WORKLOAD, "--prefill-tps", 1000, "--disk-gbps", 0.42)
    assert own["slowest_that_pays"] == "your disk"
    never = ucm_json("plan", llama, *WORKLOAD, "--prefill-tps", 1e9)
    assert never["slowest_that_pays"] is None
    nothing = ucm_json("plan", llama, *WORKLOAD, "--hit-rate", 0)
    assert nothing["slowest_that_pays"] is None


def test_the_configuration_can_be_pasted(ucm: Callable[..., Result], llama: Path) -> None:
    shown = ucm("plan", llama, *WORKLOAD, "--ranks", 4).stdout
    pasted = yaml.safe_load(shown[shown.index("# ucm.yaml") :])
    assert pasted["cache_size"] == "15GiB"  # of each rank
    assert pasted["storage_capacity"] == "400GiB"
    assert load(pasted, {}).storage_capacity is not None
    assert "slowest store that pays" in shown


def test_where_no_store_pays_the_configuration_says_so(
    ucm: Callable[..., Result], llama: Path
) -> None:
    remark = "# Computing is faster than every store at these speeds."
    for more, expected in (
        (("--prefill-tps", 1e9), True),
        (("--prefill-tps", 1000), False),
        (("--hit-rate", 0), False),  # nothing is loaded, so nothing is compared
    ):
        pasted = ucm("plan", llama, *WORKLOAD, *more).stdout.partition("# ucm.yaml")[2]
        assert (remark in pasted) == expected
        assert ("pass --prefill-tps with a measured figure" in pasted) == expected
        assert load(yaml.safe_load(f"#{pasted}"), {}).storage_capacity is not None


def test_what_is_no_model_is_refused_in_one_sentence(
    ucm: Callable[..., Result], tmp_path: Path
) -> None:
    for model in (tmp_path, "no/such-model"):
        done = ucm("plan", model, *WORKLOAD)
        assert done.exit_code == 2
        assert "is neither a number of billions" in done.stderr
    (tmp_path / "config.json").write_text("{}")
    assert "num_hidden_layers" in ucm("plan", tmp_path, *WORKLOAD).stderr
