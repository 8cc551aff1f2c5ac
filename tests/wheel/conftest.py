"""The wheel under test and a clean environment made from it: no Rust on the PATH, no vLLM, no
torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel named by ``make test-wheel``."""
    name = os.environ.get("UCM_TEST_WHEEL")
    if not name:
        pytest.skip("no wheel given; `make test-wheel` builds one and runs these tests")
    return Path(name)


@pytest.fixture(scope="session")
def clean_env() -> dict[str, str]:
    """Variables of a process that finds no Rust and nothing of the source tree."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("CARGO", "RUST", "PYTHON", "VIRTUAL_ENV", "UCM_"))
    }
    rustless = [
        part for part in os.environ["PATH"].split(os.pathsep) if not (Path(part) / "cargo").exists()
    ]
    return {**kept, "PATH": os.pathsep.join(rustless)}


@pytest.fixture(scope="session")
def clean_python(
    wheel: Path, clean_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Interpreter of a new environment into which the wheel was installed, and what it requires."""
    uv = os.environ["UCM_TEST_UV"]
    where = tmp_path_factory.mktemp("clean") / "venv"
    python = where / "bin" / "python"
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, str(where)],
        [
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            str(python),
            "--only-binary",
            ":all:",
            str(wheel),
        ],
    ):
        subprocess.run(command, check=True, env=clean_env, timeout=110)
    return python
