"""The wheel contains the licences of all linked crates, in the linked versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ROOT / "THIRD-PARTY-LICENSES.txt"


def test_what_is_named_is_what_is_locked() -> None:
    named = set(
        re.findall(r"^([\w-]+) (\d\S+) \(.+\)$", TEXTS.read_text(encoding="utf-8"), re.MULTILINE)
    )
    locked = {
        (package["name"], package["version"])
        for package in tomllib.loads((ROOT / "Cargo.lock").read_text(encoding="utf-8"))["package"]
    }
    assert len(named) > 30
    assert named <= locked, "run: python tools/licences.py"


def test_c_sources_have_their_licence() -> None:
    text = TEXTS.read_text(encoding="utf-8")
    assert "For Zstandard software" in text
    assert "GNU GENERAL PUBLIC" not in text


def test_everything_linked_is_there() -> None:
    if shutil.which("cargo") is None:
        pytest.skip("only cargo knows the linked crates")
    command = [sys.executable, str(ROOT / "tools" / "licences.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
