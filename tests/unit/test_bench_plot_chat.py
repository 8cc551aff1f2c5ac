"""The picture of ``benches/python/chat.py``, from turns made up here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest

FILE = Path(__file__).resolve().parents[2] / "benches" / "python" / "plot_chat.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_plot_chat", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(variant: str, turns: int) -> dict[str, Any]:
    return {
        "variant": variant,
        "turns": [
            {
                "turn": turn,
                "first_token_s": [0.1 * turn, 0.3 * turn],
                "memory_mib": 900.0,
                "descriptors": 40,
            }
            for turn in range(1, turns + 1)
        ],
    }


@pytest.mark.parametrize("turns", [1, 2, 20])
def test_one_line_for_each_variant_in_each_panel(plot: ModuleType, turns: int) -> None:
    figures = {
        "runs": [
            run("none", turns),
            run("a <b>", turns),
            {"variant": "other", "failed": "not built"},
        ]
    }
    root = ET.fromstring(plot.draw(figures))  # noqa: S314 - our own picture
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == 2 * len(plot.PANELS)
    assert all(len(line.get("points", "").split()) == turns for line in lines)
    assert "a <b>" in [text.text for text in root.iter(f"{SVG}text")]


def test_without_a_turn_there_is_an_empty_picture(plot: ModuleType) -> None:
    root = ET.fromstring(plot.draw({"runs": [{"variant": "file", "failed": "it did not start"}]}))  # noqa: S314 - our own picture
    assert not root.findall(f"{SVG}polyline")
