"""The trust matrix: its columns, and its table at the end of a run (``rows.py`` describes the
matrix)."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))  # the engines' harness
sys.path.insert(0, str(Path(__file__).parent))

from apart import ENGINES
from table import Table

if importlib.util.find_spec("vllm") is None:  # the store needs no vLLM; the engine's column does
    collect_ignore = ["test_engine.py"]

HERE = Path(__file__).parent
_table = Table()


@pytest.fixture(scope="session")
def kv_transfer_config(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    """Another connector to use instead of ours, as in vLLM's --kv-transfer-config."""
    text = request.config.getoption("--kv-transfer-config")
    return None if text is None else dict(json.loads(text))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The engine's tests come last, one engine after the other, so that every one is started
    once."""
    ours = [item for item in items if item.path == HERE / "test_engine.py"]
    items[:] = [item for item in items if item.path != HERE / "test_engine.py"]
    items.extend(sorted(ours, key=lambda item: ENGINES.index(item.callspec.params["engine"])))  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records the result of a row."""
    report = yield
    row = getattr(getattr(item, "callspec", None), "params", {}).get("row")
    if (
        row is not None
        and HERE in item.path.parents
        and (report.when == "call" or report.outcome != "passed")
    ):
        known = hasattr(report, "wasxfail")
        outcome = {
            "passed": "ok",
            "failed": "FAILED",
            "skipped": "known fault" if known else "skipped",
        }[report.outcome]
        params = item.callspec.params  # type: ignore[attr-defined]
        _table.add(
            row.line, params["column"].name if "column" in params else params["engine"], outcome
        )
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints the table, and writes it to the requested file."""
    if not _table.cells:
        return
    terminalreporter.section("trust matrix")
    for line in _table.text():
        terminalreporter.write_line(line)
    if (path := config.getoption("--trust-table")) is not None:
        Path(path).write_text(_table.markdown())
