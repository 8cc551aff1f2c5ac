"""Configuration of every store of these tests, in addition to its shape."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside these tests

from blocks import PATIENT, await_room


@pytest.fixture
def common(tmp_path: Path) -> dict[str, Any]:
    return {
        "storage_backends": str(tmp_path / "root"),
        "identity": str(tmp_path),  # processes of other tests share memory under the same one
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
        "staging_capacity": "4MiB",
        "layout": "file",
        "deadlines": PATIENT,
    }


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store is passed to its test when it accepts dumps."""
    from ucm.store.posix import UcmPosixStore

    opened = UcmPosixStore.__init__

    def init(store: UcmPosixStore, config: Any) -> None:
        opened(store, config)
        await_room(store)

    monkeypatch.setattr(UcmPosixStore, "__init__", init)
