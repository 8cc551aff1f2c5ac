"""Few processor cores: vLLM decides how many its threads compute with, and ucm says what to set."""

from __future__ import annotations

import importlib
import os

import pytest

import ucm.integration.vllm.connector as package
from ucm.integration.vllm.connector import platforms
from ucm.integration.vllm.connector.platforms import cores_here, why_slower

NAMES = ("VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_SIM_MULTI_NUMA")


def test_few_cores_are_reported_with_what_to_write() -> None:
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU=1 has it keep" in why_slower(1, 2, {})
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU=2 has it keep" in why_slower(2, 4, {})
    assert why_slower(1, 1, {}) == why_slower(1, 3, {}) == ""  # the same with and without
    assert why_slower(1, 2, {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}) == ""
    assert why_slower(1, 2, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) == ""
    assert why_slower(1, 2, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}) != ""
    assert 1 <= cores_here() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_cache_leaves_the_threads_of_a_model_alone(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads the variables after it has imported the connector."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platforms, "cores_here", lambda: count)
    before = dict(os.environ)
    importlib.reload(package)
    assert dict(os.environ) == before
