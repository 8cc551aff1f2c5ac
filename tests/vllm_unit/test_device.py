"""What vLLM runs on: anything but a CPU is left alone, with one sentence of the scheduler half."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ucm.config import parse
from ucm.errors import ConfigError
from ucm.integration.vllm.connector import UCMConnector
from ucm.integration.vllm.connector.device import cores_here, keep_a_core, why_not_here, why_slower
from ucm.integration.vllm.connector.factory import why_off
from ucm.reasons import MissReason

CPU = SimpleNamespace(is_cpu=lambda: True, device_type="cpu")
CUDA = SimpleNamespace(is_cpu=lambda: False, device_type="cuda")


@pytest.mark.parametrize("wanted", [None, "host"])
def test_a_cpu_is_served(wanted: str | None) -> None:
    assert why_not_here(wanted, CPU) == ""


@pytest.mark.parametrize(
    ("wanted", "running", "named"),
    [
        (None, CUDA, "cuda"),
        ("host", CUDA, "cuda"),  # a word does not make a processor of it
        ("cuda", CPU, "cuda"),
        ("ascend", CPU, "ascend"),
        ("cuda", CUDA, "cuda"),
        (None, SimpleNamespace(is_cpu=lambda: False, device_type="xpu"), "xpu"),
        (None, SimpleNamespace(is_cpu=lambda: False, device_type=""), "SimpleNamespace"),
        (None, SimpleNamespace(is_cpu=lambda: 1 / 0), "ZeroDivisionError"),
    ],
)
def test_anything_else_is_named_and_left_alone(wanted: str | None, running: Any, named: str) -> None:
    why = why_not_here(wanted, running)
    assert named in why
    assert "nothing is claimed or stored" in why


@pytest.mark.parametrize(
    ("platform", "extra", "environ"),
    [
        (CUDA, {}, {}),
        (CPU, {"platform": "cuda"}, {}),
        (CPU, {}, {"PLATFORM": "ascend"}),
        (None, {}, {"PLATFORM": "cuda"}),  # on the platform of the tests themselves
    ],
)
def test_both_halves_are_off_and_the_engine_starts(
    engines: Any,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    platform: Any,
    extra: dict[str, Any],
    environ: dict[str, str],
) -> None:
    config = engines.engine_config(
        tiny,
        kv_transfer_config={
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"storage_backends": str(tmp_path / "root"), **extra},
        },
    )
    scheduler, workers = engines.kv_configs(config)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if platform is not None:
        monkeypatch.setattr("vllm.platforms.current_platform", platform)
    off = why_off(parse(config.kv_transfer_config.kv_connector_extra_config), config, scheduler)
    assert off is not None
    assert off[0] == MissReason.UNSUPPORTED
    with caplog.at_level(logging.INFO, "ucm"):
        half = UCMConnector.create(config, KVConnectorRole.SCHEDULER, scheduler)
        worker = UCMConnector(config, KVConnectorRole.WORKER, workers[0])
    monkeypatch.undo()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [f"the cache is off: {off[1]}"]
    assert half._scheduler is None
    assert worker._worker is None
    request: Any = SimpleNamespace(request_id="a", num_tokens=100, num_prompt_tokens=100, prompt_token_ids=[1] * 100)
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["missed.unsupported"] > 0
    worker.register_kv_caches({})
    worker.wait_for_save()
    assert worker.get_handshake_metadata() is None
    assert not (tmp_path / "root").exists()


def test_a_connector_that_is_made_as_the_original_makes_it_needs_the_layout() -> None:
    config: Any = None
    with pytest.raises(ConfigError, match="KVCacheConfig as third argument"):
        UCMConnector.create(config, KVConnectorRole.SCHEDULER)


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
