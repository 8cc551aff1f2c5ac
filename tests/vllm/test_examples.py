"""The programs in ``examples`` run as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import EngineHost, machine_lock

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
def test_a_selector_of_ones_own(host: EngineHost, tmp_path: Path) -> None:
    host.stop()
    others = ("VLLM_", "UCM_", "TRITON_", "PYTEST_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env |= {
        "UCM_STATE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with machine_lock():
        done = subprocess.run(
            [sys.executable, EXAMPLES / "own_selector.py"],
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    dense, sparse = lines
    assert (dense["engine"], sparse["engine"]) == ("dense", "sparse")
    assert dense["blocks_read"] == 1
    assert 0.2 < sparse["blocks_read"] < 0.4  # a fifth, and the windows
    assert len(sparse["tokens"]) == len(dense["tokens"]) == 32
    assert sparse["tokens"] != dense["tokens"], "omitted blocks of a random model change its answer"
