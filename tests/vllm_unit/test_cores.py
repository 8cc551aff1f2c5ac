"""What vLLM on a CPU is told about processor cores."""

from __future__ import annotations

import os

from ucm.integration.vllm.connector.cores import cores_here, keep_a_core, why_slower


def test_few_cores_are_told_with_what_to_write() -> None:
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU=1 has it keep" in why_slower(1, 2, {})
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU=2 has it keep" in why_slower(2, 4, {})
    assert why_slower(1, 1, {}) == why_slower(1, 3, {}) == ""  # the same with and without
    assert why_slower(1, 2, {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}) == ""
    assert why_slower(1, 2, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) == ""
    assert why_slower(1, 2, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}) != ""


def test_on_two_cores_vllm_keeps_the_core_that_it_keeps_without_a_connector() -> None:
    def after(cores: int, **environ: str) -> dict[str, str]:
        keep_a_core(cores, environ)
        return environ

    assert after(2) == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    assert why_slower(1, 2, after(2)) == ""
    assert after(0) == after(1) == after(3) == after(4) == {}  # two ranks or one: nobody knows yet
    for name in ("VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_SIM_MULTI_NUMA"):
        assert after(2, **{name: "0"}) == {name: "0"}
    assert 1 <= cores_here() <= len(os.sched_getaffinity(0))
