"""The counts of ``tools/lines.py``, and its names of exceeded budgets."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "tools" / "lines.py"


@pytest.fixture
def lines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lines", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(lines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four lines of Rust beside tests, six of Python beside a re-export, three of benches."""
    tests = "#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n"
    rust = f"//! A comment.\nfn f() {{}}\n{tests}fn h() {{}}\nfn i() {{}}\n"
    for name, text in {
        "crates/one/src/lib.rs": rust,
        "crates/one/src/tests.rs": rust,
        "crates/ucm-testkit/src/lib.rs": rust,
        "python/ucm/one.py": '"""One\ncomment."""\n\nA = 1\nB = 2\nC = 3\n',
        "python/ucm/again.py": '"""Re-export."""\n\nfrom ucm.one import A as A\n',
        "benches/bench.py": "A = 1\nB = 2\nC = 3\n",
        "benches/lock.txt": "1\n" * 9,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(lines, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["lines.py", "--budget"])
    return tmp_path


BUDGETS = {"Rust": 4, "Python": 6, "Python files": 1, "benches": 3}


def test_what_is_counted_is_within_a_budget_of_as_much(
    lines: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BUDGETS", BUDGETS)
    assert lines.main() == 0


@pytest.mark.parametrize("name", BUDGETS)
def test_one_line_more_is_over_and_is_named(
    lines: ModuleType,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setattr(lines, "BUDGETS", BUDGETS | {name: BUDGETS[name] - 1})
    assert lines.main() == 1
    assert f"{name}: {BUDGETS[name]}, the budget is" in capsys.readouterr().err


def test_too_few_comments_are_over(
    lines: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BUDGETS", BUDGETS)
    (tree / "python/ucm/one.py").write_text("A = 1\n" * 6)
    assert lines.main() == 1
