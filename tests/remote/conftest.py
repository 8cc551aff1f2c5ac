"""Network stores over real servers: the matrix of harms, its table, and engines of vLLM."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
# Behind: modules of the tests have names of theirs, too.
sys.path += [str(Path(__file__).parents[1] / "mooncake"), str(Path(__file__).parents[2] / "demo")]

from proxy import Proxy
from remote_columns import COLUMNS, Column, started

from servers import KEYS, Server

if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["test_engine.py"]

HERE = Path(__file__).parent

#: Row -> column -> outcome.
_cells: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="session", autouse=True)
def _keys() -> Iterator[None]:
    """The keys of the S3 servers, at the client's default location."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in KEYS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(params=COLUMNS, ids=lambda column: column.name)
def column(request: pytest.FixtureRequest) -> Column:
    """Every kind of store and server."""
    found: Column = request.param
    return found


@pytest.fixture
def server(column: Column, tmp_path: Path) -> Iterator[Server]:
    """A server of this test alone."""
    with started(column, tmp_path / "server") as server:
        yield server


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """What stands before it."""
    with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records the result of a row of the matrix."""
    report = yield
    column = getattr(getattr(item, "callspec", None), "params", {}).get("column")
    if (
        column is not None
        and HERE in item.path.parents
        and (report.when == "call" or report.outcome != "passed")
    ):
        row = item.function.__doc__.splitlines()[0].rstrip(".")  # type: ignore[attr-defined]
        outcome = {"passed": "ok", "failed": "FAILED", "skipped": "-"}[report.outcome]
        _cells.setdefault(row, {})[column.name] = outcome
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the matrix: scenarios by kind of store and server."""
    if not _cells:
        return
    terminalreporter.section("stores of the network")
    names = [column.name for column in COLUMNS]
    width = max(map(len, _cells))
    terminalreporter.write_line("  ".join([" " * width, *names]))
    for row, cells in _cells.items():
        line = [cells.get(name, "").ljust(len(name)) for name in names]
        terminalreporter.write_line("  ".join([row.ljust(width), *line]).rstrip())
