"""The report of ``make bench-remote``, from invented figures, without stores and servers."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("ucm", "alone", "another")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benches" / "python"))
    return importlib.import_module("remote_report")


def one(dump: float, present: float | None = 10.0) -> dict[str, float | None]:
    return {"dump": dump, "load": 1.0, "lookup_present": present, "dump_one": 2.0, "load_one": 1.0}


@pytest.fixture
def rows(report: ModuleType) -> Any:
    rounds = {
        (256, "ucm"): [one(0.8, 5.0), one(1.0, 5.0), one(0.9, 5.0)],
        (256, "alone"): [one(1.0), one(1.0), one(1.0)],
        (256, "another"): [one(2.0, None), one(2.0, None), one(2.0, None)],
    }
    return report.rows("redis", 256, ARMS, rounds)


def find(rows: Any, figure: str, arm: str) -> Any:
    return next((row for row in rows if (row.figure, row.arm) == (figure, arm)), None)


def test_a_ratio_is_of_ucm_to_the_other_and_above_one_where_it_is_faster(rows: Any) -> None:
    assert find(rows, "put", "ucm").ratio is None
    assert find(rows, "put", "alone").ratio == 0.9
    assert find(rows, "put", "another").ratio == 0.45
    assert find(rows, "exists, all there", "alone").ratio == 2.0


def test_only_the_client_alone_is_judged_and_only_for_what_was_promised(
    report: ModuleType, rows: Any
) -> None:
    judged = {(row.figure, row.arm) for row in rows if row.goal is not None}
    assert judged == {("put", "alone"), ("get", "alone"), ("exists, all there", "alone")}
    assert report.table(rows, True).count("0.9: met") == 3
    assert "met" not in report.table(rows, False)


def test_a_figure_that_an_arm_has_not_is_left_out(rows: Any) -> None:
    assert find(rows, "exists, all there", "another") is None
    assert find(rows, "exists, none there", "ucm") is None


def test_our_own_figures_go_between_the_marks_of_the_docs(
    report: ModuleType, rows: Any, tmp_path: Path
) -> None:
    page = shutil.copy(ROOT / "docs" / "stores-compared.md", tmp_path / "stores-compared.md")
    for _ in range(2):
        report.write(Path(page), report.own_figures(rows))
    text = Path(page).read_text()
    assert text.count("| redis | 256 KiB | 1.00 | 2.00 | 1.00 | 0.90 |") == 1
    (tmp_path / "none.md").write_text("no marks")
    with pytest.raises(SystemExit, match="bench-remote"):
        report.write(tmp_path / "none.md", [])
