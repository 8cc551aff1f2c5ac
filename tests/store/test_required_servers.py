"""A missing server is a skip on a developer's machine, and a failure in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from required_servers import SWITCH, missing_server

ROOT = Path(__file__).parents[2]


def test_a_missing_server_is_skipped_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    with pytest.raises(pytest.skip.Exception, match="there is no server"):
        missing_server("there is no server")
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(pytest.fail.Exception, match="there is no server"):
        missing_server("there is no server")


def test_ci_requires_servers(tmp_path: Path) -> None:
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "{SWITCH}=${SWITCH}"\n')
    (tmp_path / "make").chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    environment = {key: value for key, value in os.environ.items() if key != SWITCH}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(
        [bash, ROOT / ".ci/run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == f"{SWITCH}=1"


@pytest.mark.parametrize("required", [False, True], ids=["skipped", "failed"])
def test_mooncake_obeys_the_switch(tmp_path: Path, required: bool) -> None:
    (tmp_path / "test_one.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests/mooncake')!r})\n"
        "import conftest as mooncake, mooncake_pool\n"
        "def test_it(monkeypatch):\n"
        "    monkeypatch.setattr(mooncake_pool, 'PACKAGE', mooncake.HERE / 'none')\n"
        "    mooncake.need_mooncake()\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != SWITCH}
    environment |= {SWITCH: "1"} if required else {}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ("1 failed" if required else "1 skipped") in done.stdout, done.stdout + done.stderr
