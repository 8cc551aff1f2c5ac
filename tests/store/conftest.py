"""What every store of these tests is given beside its shape."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside these tests


@pytest.fixture
def common(tmp_path: Path) -> dict[str, Any]:
    return {
        "storage_backends": str(tmp_path / "root"),
        "identity": "tests",
        "storage_capacity": "1GiB",
        "staging_capacity": "4MiB",
        "layout": "file",
        "deadlines": {"lookup_ms": 20_000},
    }
