"""Shared by several directories of tests: options of the run, and the one host that starts vLLM
engines.

Options are here because pytest reads them only from the first loaded conftest. The fixtures of
engines need the modules of ``tests/vllm``; the directories that use them add these to the path, and
nothing imports them before.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from harness import EngineHost

    from ucm.store.posix import UcmPosixStore

#: Most starts of engines in one run of every day: each takes about ten seconds. Add to it with a
#: reason. Four are those of two models with windows, each started again; eight those of other forms
#: and kinds of layers (test_forms.py); three those of ReRoPE.
ENGINE_LIMIT = 57
_hosts: list[EngineHost] = []

# No property is about the time of an example, which on a busy machine may be any.
settings.register_profile("ucm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ucm")


# The second reader of records, for tests and for the programs that they start.
SECOND_READER = str(Path(__file__).with_name("second_reader"))
sys.path.append(SECOND_READER)
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (os.environ.get("PYTHONPATH"), SECOND_READER) if path
)
# The table of what is cached (matrix.py), from which tests take what they run.
sys.path.append(str(Path(__file__).parents[1] / "tools"))
if os.environ.get("UCM_TEST_ISA"):  # before anything imports vLLM
    sys.path.append(str(Path(__file__).with_name("vllm")))
    importlib.import_module("instruction_sets").pin()


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests do not use the user's state directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCM_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def open_store() -> Iterator[Callable[[str, Mapping[str, Any]], UcmPosixStore]]:
    """Opens our stores by class name with a configuration; closes those that the test left open."""
    from ucm.store import UcmConnectorFactoryV1
    from ucm.store.posix import UcmPosixStore

    stores: list[UcmPosixStore] = []

    def make(name: str, config: Mapping[str, Any]) -> UcmPosixStore:
        store = UcmConnectorFactoryV1.create_connector(name, dict(config))
        assert isinstance(store, UcmPosixStore)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the trust matrix and of end-to-end tests."""
    group = parser.getgroup("trust", "trust matrix (tests/trust)")
    group.addoption(
        "--trust-table", metavar="FILE", help="write the table of the trust matrix as markdown"
    )
    group.addoption(
        "--kv-transfer-config",
        metavar="JSON",
        help=(
            "run the engine's rows with another connector, with {root} for the directory that is"
            " harmed; our own counters are then not checked"
        ),
    )

    group = parser.getgroup("e2e", "end to end (tests/e2e)")
    group.addoption("--url", help="the server under test; else a tiny one is started")
    group.addoption("--sparse-url", help="a server of the same model with sparse attention")
    group.addoption("--stage", metavar="N", help="only these stages: 2, 0-2 or 1+")
    group.addoption("--feature", action="append", default=[], help="only this feature; repeatable")
    group.addoption("--platform", default="cpu", help="of the server: cpu (default), cuda, ...")
    group.addoption("--dataset", metavar="FILE", help="JSON lines of questions and answers")
    group.addoption("--report", metavar="DIR", help="keep figures and plots here")
    group.addoption("--baseline", metavar="DIR", help="figures of an earlier --report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips in the short form tests marked ``long``, and those marked ``one_runner`` on the second
    runner."""
    if os.environ.get("UCM_TEST_LONG"):
        return
    later = pytest.mark.skip(reason="only in the long form: UCM_TEST_LONG=1")
    skip = pytest.mark.skip(
        reason="the short form uses one of vLLM's model runners: UCM_TEST_LONG=1 runs both"
    )
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(later)
        call = getattr(item, "callspec", None)
        if (
            item.get_closest_marker("one_runner")
            and call is not None
            and call.params.get("runner") == "v2"
        ):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the number of started engines."""
    for host in _hosts:
        terminalreporter.write_line(
            f"vLLM engines started: {len(host.started)} ({', '.join(host.started)})"
        )


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the whole run."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def host(work: Path, request: pytest.FixtureRequest) -> Iterator[EngineHost]:
    """Starts engines, one at a time; another connector's may end at every row of the trust
    matrix."""
    from harness import EngineHost

    host = EngineHost(work)
    _hosts.append(host)
    yield host
    host.stop()
    others = request.config.getoption("--kv-transfer-config") is not None or os.environ.get(
        "UCM_TEST_LONG"
    )
    assert others or len(host.started) <= ENGINE_LIMIT, f"too many engine starts: {host.started}"


@pytest.fixture(scope="session")
def model(work: Path) -> Path:
    """A tiny Llama."""
    from lives import LAYERS
    from models import llama_config, write_model

    return write_model(work / "model", llama_config(LAYERS))


@pytest.fixture(scope="session")
def other_model(work: Path) -> Path:
    """Another checkpoint of the same model."""
    from lives import LAYERS
    from models import llama_config, write_model

    return write_model(work / "other-model", llama_config(LAYERS), seed=11)


@pytest.fixture(scope="session", params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    """vLLM's model runner."""
    return str(request.param)
