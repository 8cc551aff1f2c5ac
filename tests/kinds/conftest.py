"""Loads the core that ``UCM_TEST_CORE`` names, a build with the feature ``test-utils``, in place of
the usual one."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import ucm

if "UCM_TEST_CORE" in os.environ:
    path = os.environ["UCM_TEST_CORE"]
    assert "ucm._core" not in sys.modules, (
        "run these tests by themselves: the usual core is loaded already"
    )
    loader = ExtensionFileLoader("ucm._core", path)
    spec = importlib.util.spec_from_file_location("ucm._core", path, loader=loader)
    assert spec is not None
    core = importlib.util.module_from_spec(spec)
    sys.modules["ucm._core"] = ucm._core = core  # type: ignore[attr-defined]
    loader.exec_module(core)

sys.path[:0] = [str(Path(__file__).parents[1] / "store"), str(Path(__file__).parents[1] / "unit")]
