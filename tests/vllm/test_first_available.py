"""Three stores are configured: one whose directory cannot be created, one whose directory only the
worker cannot create, and a user's store for the original's V0 interface. The engine uses the third,
and logs the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import STORED
from checks import assert_reused, assert_same
from harness import EngineHost
from specs import ON_GPU, EngineSpec


@pytest.mark.skipif(ON_GPU, reason="the store is one of the host's memory")
def test_the_first_available_store_serves(work: Path, host: EngineHost, model: Path) -> None:
    root = work / "first-available"
    root.mkdir()
    (root / "file").write_text("in the way")
    entries: list[dict[str, Any]] = [
        {
            "ucm_connector_name": "UcmPosixStore",
            "ucm_connector_config": {"storage_backends": str(path)},
        }
        # The scheduler side opens a lookup-only store, for which a missing /proc/ucm is no error.
        for path in (root / "file" / "below", "/proc/ucm")
    ]
    entries.append(
        {
            "ucm_connector_name": "FilesV0",
            "ucm_connector_module_path": "v0_stores",
            "ucm_connector_config": {"storage_backends": str(root)},
        }
    )
    engine = host.get(EngineSpec(model, transfer=transfer(entries), label="first-available"))
    case = STORED["middle"]
    computed = engine.generate(case.ask())[0]
    assert computed.cached == 0
    engine.wait_idle()
    assert len(list(root.glob("*.dat"))) >= case.full_blocks
    assert not list(root.glob("*.act"))
    engine.reset()
    loaded = engine.generate(case.ask())[0]
    assert_same(loaded, computed)
    assert_reused(loaded, case)
    (line,) = [
        line for line in engine.log_text().splitlines() if "the first available is used" in line
    ]
    assert f"of 3 stores the first available is used: v0_stores.FilesV0 on {root}" in line
    assert "below: posix is switched off until it can be used" in line
    assert "/proc/ucm: rank 0: posix is switched off until it can be used" in line
    host.stop()


def transfer(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments of vLLM's KVTransferConfig."""
    from specs import PATIENT

    return {
        "kv_connector": "UCMConnector",
        "kv_connector_module_path": "ucm.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ucm_connectors": entries, "deadlines": PATIENT},
    }
