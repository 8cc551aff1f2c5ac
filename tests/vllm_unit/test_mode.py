"""The scheduler side of an engine follows the mode of its roots and of the state directory."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import ucm.mode
from ucm.integration.vllm.connector import UCMConnector, factory
from ucm.mode import Mode, read_mode, write_mode


def test_the_scheduler_side_alone_follows_every_directory(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("one", "two", "other", "state")
    one, two, other, state = directories = [str(tmp_path / name) for name in names]
    for directory in directories:
        Path(directory).mkdir()
    monkeypatch.setenv("UCM_STATE_DIR", state)
    read: set[tuple[str, str]] = set()

    def noted(directory: str) -> Mode:
        read.add((threading.current_thread().name, directory))
        return read_mode(directory)

    monkeypatch.setattr(ucm.mode, "read_mode", noted)
    monkeypatch.setattr(ucm.mode, "FIRST_S", 60.0)
    write_mode(state, Mode.READ_ONLY)
    write_mode(other, Mode.WRITE_ONLY)
    entries = [{"storage_backends": [one, two]}, {"storage_backends": other}]
    stores = [
        {"ucm_connector_name": "UcmPosixStore", "ucm_connector_config": entry} for entry in entries
    ]
    config = engines.engine_config(
        tiny,
        kv_transfer_config={
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "ucm_connectors": stores,
                "identity": {"weights": "declared:tests"},
            },
        },
    )
    scheduler, workers = engines.kv_configs(config)
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    for group in ("get_tp_group", "get_pp_group"):
        monkeypatch.setattr(parallel_state, group, lambda: alone)
    monkeypatch.setattr(factory, "ModelMemory", lambda *_: None)
    UCMConnector(config, KVConnectorRole.WORKER, workers[0]).shutdown()
    assert read == set()
    side = UCMConnector(config, KVConnectorRole.SCHEDULER, scheduler)
    assert read == {("ucm-mode", directory) for directory in directories}
    assert side._scheduler is not None
    assert side._scheduler._mode.now is Mode.OFF  # neither directory allows all
    watch = side._scheduler._mode
    side.shutdown()
    assert watch._ended.is_set()
