"""The picture and the tables of ``make bench-sparse`` show the figures that were measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("matplotlib")

FILE = Path(__file__).resolve().parents[2] / "benches" / "python" / "plot_sparse.py"
MACHINE = {"isa": "avx512", "threads": 2}


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_plot_sparse", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layer() -> dict[str, Any]:
    columns = ("dense", "vLLM", "ours", "choose", "step")
    rows = [
        (4096, 1, 4096, (1.5, 1.6, 0.9, 0.1, 1.0)),
        (32768, 4, 3584, (40.0, 4.0, 2.0, 1.0, 3.2)),
    ]
    named = [
        {
            "tokens": tokens,
            "requests": requests,
            "kept": kept,
            "ms": dict(zip(columns, ms, strict=True)),
        }
        for tokens, requests, kept, ms in rows
    ]
    return {"machine": MACHINE, "rows": named}


def steps() -> dict[str, Any]:
    times: dict[str, tuple[list[float], list[float]]] = {
        "dense": ([100.0, 200.0, 120.0], []),
        "hash-128": ([30.0, 30.0, 30.0], [3.0, 6.0, 3.0]),
        "mean-K": ([25.0, 100.0, 30.0], [1.0, 1.0, 1.0]),
    }
    rows = [
        {
            "method": method,
            "tokens": 32768,
            "requests": 1,
            "step_ms": step,
            "selection_ms": selection,
        }
        for method, (step, selection) in times.items()
    ]
    return {"machine": MACHINE, "rows": rows}


def test_tables(plot: ModuleType) -> None:
    assert "| 4096 | 1 | 4096 | 1.50 | 1.60 | 0.90 | 0.10 | 1.00 | 1.5 |" in plot.layer_table(
        layer()
    )
    assert "| 32768 | 4 | 3584 | 40.00 | 4.00 | 2.00 | 1.00 | 3.20 | 12.5 |" in plot.layer_table(
        layer()
    )
    # The median of the ratios within a round, and of choosing.
    assert "| 32768 | 1 | 120.0 | 30.0 (0.25, 10 %) | 30.0 (0.25, 3 %) |" in plot.step_table(
        steps()
    )


def test_the_picture_is_the_same_for_the_same_figures(
    plot: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "layer.json").write_text(json.dumps(layer()))
    (tmp_path / "steps.json").write_text(json.dumps(steps()))
    for name in ("a.svg", "b.svg"):
        files = [str(tmp_path / each) for each in ("layer.json", "steps.json", name)]
        monkeypatch.setattr(sys, "argv", ["plot_sparse.py", *files])
        plot.main()
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    for text in ("avx512, 2 threads", "hash-128, 4096 tokens kept", "4 requests", "32 K"):
        assert text in drawn
    assert "12.5" in capsys.readouterr().out
