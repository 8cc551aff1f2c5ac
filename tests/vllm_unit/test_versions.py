"""Versions of vLLM: which are served, the message for others, and calls whose form differs between
them."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse_parts import QUEST, sparse_engine

from ucm.config import parse
from ucm.integration.vllm.attention import registering, setup
from ucm.integration.vllm.compat import versions
from ucm.integration.vllm.compat.block_size import common_block_size
from ucm.integration.vllm.connector import UCMConnector, factory
from ucm.reasons import MissReason

SERVED = ["0.30.0", "0.30.2rc1", "0.31.0", "0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1.dev7+g0a1b2c3"]
OLD = ["0.9.2", "0.26.0", "0.28.1", "0.29.0rc2"]
UNTESTED = [
    "0.34.0",
    "0.100.0",
    "1.0.0",
    "dev",
    "0.1.dev1+g0a1b2c3",
    "0.1.dev11+gabc.d20261127",
    "0.0.0",
]


def test_the_installed_version_is_served() -> None:
    assert not versions.why_unserved(versions.installed())


@pytest.mark.parametrize("version", SERVED)
def test_served_versions(version: str) -> None:
    assert versions.why_unserved(version) == versions.why_untested(version) == ""


@pytest.mark.parametrize("version", OLD)
def test_older_versions(version: str) -> None:
    assert f"vLLM {version}" in versions.why_unserved(version)
    assert "0.30 to 0.33" in versions.why_unserved(version)
    assert versions.why_untested(version) == ""


@pytest.mark.parametrize("version", UNTESTED)
def test_newer_versions(version: str) -> None:
    assert versions.why_unserved(version) == ""
    assert f"vLLM {version}" in versions.why_untested(version)


def connectors(engines: Any, config: Any) -> tuple[UCMConnector, UCMConnector]:
    """Both sides of an engine, where the cache is off."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    kv_cache, (worker_kv_cache,) = engines.kv_configs(config)
    return (
        UCMConnector(config, KVConnectorRole.SCHEDULER, kv_cache),
        UCMConnector(config, KVConnectorRole.WORKER, worker_kv_cache),
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_below_the_table_the_cache_is_off_with_one_sentence(
    engines: Any,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sparse: bool,
) -> None:
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    monkeypatch.setattr(vllm, "__version__", "0.28.0")
    monkeypatch.setattr(setup, "_last", (None, None))
    config = sparse_engine(engines, tiny, tmp_path, **(QUEST if sparse else {}))
    with set_current_vllm_config(config):
        assert registering.CPU_ATTN is CPUAttentionBackend
    scheduler, worker = connectors(engines, config)
    monkeypatch.setattr(logging.getLogger("ucm"), "propagate", True)
    said = [record.getMessage() for record in caplog.records if "0.28.0" in record.getMessage()]
    assert said == [
        "the cache is off: ucm serves vLLM 0.30 to 0.33, and this is vLLM 0.28.0: update vLLM"
    ]
    assert scheduler._off == MissReason.UNSUPPORTED
    # vLLM 0.28 has neither field that later versions have; no call looks at one.
    request: Any = SimpleNamespace(request_id="r", num_tokens=64, num_prompt_tokens=64)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, SimpleNamespace(), 0)  # type: ignore[arg-type]
    plan = scheduler.build_connector_meta(SimpleNamespace())  # type: ignore[arg-type]
    worker.bind_connector_metadata(plan)
    worker.start_load_kv(SimpleNamespace())  # type: ignore[arg-type]
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    assert scheduler.has_pending_push_work() is False
    assert scheduler.request_finished(request, []) == (False, None)
    ours = [record for record in caplog.records if record.name == "ucm.vllm"]
    warned = [record for record in ours if record.levelno >= logging.WARNING]
    assert len([record for record in warned if record.name.startswith("ucm")]) == 1


def test_above_the_table_there_is_one_warning(
    engines: Any,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    monkeypatch.setenv("UCM_DISABLE", "1")  # nothing but the two constructors is looked at
    connectors(engines, sparse_engine(engines, tiny, tmp_path))
    said = [record.getMessage() for record in caplog.records if "0.34.1" in record.getMessage()]
    assert len(said) == 1
    assert "0.30 to 0.33" in said[0]


def test_the_block_size_is_read_in_the_form_of_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.30 and 0.31 take two arguments, later ones the specs too."""
    from vllm.v1.worker import utils

    def two(size: int, backends: list[type]) -> int:
        assert backends == [int]
        return size * 2

    def three(size: int, backends: list[type], specs: Any = None) -> int:
        assert specs == ["spec"]
        return two(size, backends) * 2

    for form, size in ((two, 32), (three, 64)):
        monkeypatch.setattr(utils, "select_common_block_size", form)
        assert common_block_size(16, int, "spec") == size


def test_a_manager_of_an_older_version_takes_its_own_arguments(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``record_for_zeroing`` is new in vLLM 0.32."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    from ucm.integration.vllm.attention.spec import SparseManager

    seen: list[tuple[Any, ...]] = []

    def older(self: Any, request_id: str, local: int, external: int) -> None:
        seen.append((request_id, local, external))

    def newer(
        self: Any, request_id: str, local: int, external: int, record_for_zeroing: bool = True
    ) -> None:
        seen.append((request_id, local, external, record_for_zeroing))

    manager = object.__new__(SparseManager)
    manager.offload = None
    monkeypatch.setattr(FullAttentionManager, "allocate_external_computed_blocks", older)
    manager.allocate_external_computed_blocks("r", 32, 64)
    monkeypatch.setattr(FullAttentionManager, "allocate_external_computed_blocks", newer)
    manager.allocate_external_computed_blocks("r", 32, 64)
    manager.allocate_external_computed_blocks("r", 32, 64, False)
    manager.allocate_external_computed_blocks("r", 32, 64, record_for_zeroing=False)
    assert seen == [("r", 32, 64), ("r", 32, 64, True), ("r", 32, 64, False), ("r", 32, 64, False)]


@pytest.mark.parametrize("named", [True, False])
def test_the_kv_of_tensor_ranks_is_stored_once_where_vllm_says_that_it_is_the_same(
    engines: Any,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    named: bool,
) -> None:
    """Latent attention on two tensor ranks; vLLM 0.30 does not say it."""
    from vllm.config import KVTransferConfig
    from vllm.distributed import parallel_state
    from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec

    transfer = KVTransferConfig(kv_connector="UCMConnector", kv_role="kv_both")
    config = engines.engine_config(tiny, tensor_parallel_size=2, kv_transfer_config=transfer)
    latent = {"block_size": 32, "num_kv_heads": 1, "head_size": 576, "dtype": torch.float32}
    if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__:
        latent["max_tp_shards"] = 1
    spec = MLAAttentionSpec(**latent)
    names = engines.layer_specs(config)
    scheduler, workers = engines.kv_configs(config, [dict.fromkeys(names, spec)] * 2)
    for known in (scheduler, *workers):
        if not named and hasattr(known, "kv_tp_replicas"):
            del known.kv_tp_replicas
        elif named:
            assert getattr(known, "kv_tp_replicas", 2) == 2
            known.kv_tp_replicas = 2
    monkeypatch.delattr(KVCacheConfig, "kv_tp_replicas", raising=False)
    parts = []
    for rank, worker in enumerate(workers):
        for name, place in (("get_pp_group", 0), ("get_tp_group", rank)):
            group = SimpleNamespace(rank_in_group=place)
            monkeypatch.setattr(parallel_state, name, lambda group=group: group)
        keys = parse({"storage_backends": str(tmp_path)})
        made = factory.make_worker(keys, config, worker).rank
        parts.append((made.part, made.writer))
    second = ((0, 0, 0), False) if named else ((0, 0, 1), True)
    assert parts == [((0, 0, 0), True), second]
    monkeypatch.setattr(logging.getLogger("ucm"), "propagate", True)
    factory._warn_of_copies(config, scheduler)
    said = [record.getMessage() for record in caplog.records if "same KV" in record.getMessage()]
    assert len(said) == (0 if named else 1)


def test_only_one_module_mentions_versions_of_vllm() -> None:
    import re

    import ucm

    package = Path(ucm.__file__).parent
    names = re.compile(r"\bv?LLM 0\.\d|vllm\.__version__|version\(.vllm.\)", re.IGNORECASE)
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if names.search(path.read_text())
    }
    assert found == {
        "integration/vllm/compat/block_size.py",
        "integration/vllm/compat/versions.py",
    }
