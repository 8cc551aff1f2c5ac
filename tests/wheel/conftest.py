"""The wheels under test and a clean environment made from that of this machine: no Rust on the
PATH, no vLLM, no torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wheels import GIVEN


@pytest.fixture(scope="session", params=GIVEN or [None], ids=lambda wheel: wheel and wheel.name)
def wheel(request: pytest.FixtureRequest) -> Path:
    """Each wheel."""
    if request.param is None:
        pytest.skip("no wheel given; `make test-wheel` builds one and runs these tests")
    return request.param


@pytest.fixture(scope="session")
def native_wheel() -> Path:
    """The wheel for this machine's processor."""
    for wheel in GIVEN:
        if wheel.stem.endswith(platform.machine()):
            return wheel
    pytest.skip(f"no wheel for {platform.machine()} given; `make test-wheel` builds one")


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
    native_wheel: Path, clean_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
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
            str(native_wheel),
        ],
    ):
        subprocess.run(command, check=True, env=clean_env, timeout=110)
    return python
