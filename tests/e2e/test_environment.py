"""Stage 0: the server has what the other stages need."""

from __future__ import annotations

import pytest
from e2e_target import Target

pytestmark = [pytest.mark.stage(0), pytest.mark.feature("environment")]


def test_it_serves_a_model(target: Target) -> None:
    assert target.model
    assert target.max_model_len is None or target.max_model_len >= 1024
    assert target.ask(target.prompt("environment", 5), 4).prompt_tokens >= 5


def test_it_is_a_vllm_with_ucm(target: Target) -> None:
    version = target.client.get("/version").json()["version"]
    assert tuple(int(part) for part in version.split(".")[:2]) >= (0, 30)
    assert target.label("vllm:cache_config_info", "enable_prefix_caching") == "True"
    names = target.metrics()
    assert "ucm_asked_blocks_total" in names, "no request met the connector of ucm"


def test_every_tier_works(target: Target) -> None:
    text = target.client.get("/metrics").text
    tiers = [line for line in text.splitlines() if line.startswith("ucm_tier_healthy{")]
    assert tiers
    assert all(float(line.rpartition(" ")[2]) == 1 for line in tiers), tiers


@pytest.mark.platform("cpu")
def test_a_block_of_a_cpu_has_its_tokens(target: Target) -> None:
    """vLLM computes attention on a CPU in blocks of a multiple of 32 tokens; on a GPU it has 16."""
    size = target.label("vllm:cache_config_info", "block_size")
    assert size is not None
    assert int(size) % 32 == 0
