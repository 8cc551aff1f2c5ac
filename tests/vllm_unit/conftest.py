"""Fixtures of the tests that use vLLM's own objects without starting an engine."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM; install the extra ucm-kv[vllm]")


def _load(name: str) -> ModuleType:
    """A module that lies beside this file (pytest does not put this directory on the path)."""
    spec = importlib.util.spec_from_file_location(
        f"ucm_tests_vllm_unit_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sys.path.append(str(Path(__file__).parents[1] / "vllm"))  # the software driver
importlib.import_module("fork_server").inspect_here()
_engine_free = _load("engine_free")
for name in ("sparse_parts", "tiny_models", "toy_engine"):  # what modules of tests import
    sys.modules[name] = _load(name)


@pytest.fixture(scope="session")
def engines() -> Any:
    """The helpers of ``engine_free.py``."""
    return _engine_free


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that no test changes."""
    return _engine_free.make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def far_future() -> Callable[[], int]:
    """A clock by which every file of the test was last touched long ago."""
    return lambda: 4_000_000_000_000_000_000


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that hash, read and remember are waited for, however busy the machine is; a test
    about one that is late says how long it waits."""
    from ucm.integration.vllm.connector import stores
    from ucm.integration.vllm.connector.identity import keys

    monkeypatch.setattr(keys, "FIRST_WAIT_S", 60.0)
    monkeypatch.setattr(stores, "ANSWER_S", 60.0)


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that an earlier test brought up are not held back in this one."""
    from ucm.integration.vllm.connector.guard import throttle

    monkeypatch.setattr(throttle, "_last", {})


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    from ucm.integration.vllm import plugin

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not the one for CPUs")
    plugin.register()
    at = tmp_path_factory.mktemp("ranks") / "meet"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{at}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
