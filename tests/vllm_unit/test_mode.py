"""The scheduler side of an engine follows the mode of its roots and of the state directory, which
``ucm mode --url`` writes through vLLM's endpoint plug-in."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner, Result
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser

import ucm.mode
from ucm.cli import main
from ucm.integration.vllm.connector import UCMConnector, factory
from ucm.mode import Mode, read_mode, write_mode

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser


def test_the_scheduler_side_alone_follows_every_directory(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("one", "two", "other", "state")
    one, two, other, state = directories = [str(tmp_path / name) for name in names]
    for directory in directories:
        Path(directory).mkdir()
    monkeypatch.setenv("UCM_STATE_DIR", state)
    read: set[tuple[str, str]] = set()

    def noted(directory: str) -> Mode:
        read.add((threading.current_thread().name, directory))
        return read_mode(directory)

    monkeypatch.setattr(ucm.mode, "read_mode", noted)
    monkeypatch.setattr(ucm.mode, "FIRST_S", 60.0)
    write_mode(state, Mode.READ_ONLY)
    write_mode(other, Mode.WRITE_ONLY)
    entries = [{"storage_backends": [one, two]}, {"storage_backends": other}]
    stores = [
        {"ucm_connector_name": "UcmPosixStore", "ucm_connector_config": entry} for entry in entries
    ]
    config = engines.engine_config(
        tiny,
        kv_transfer_config={
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "ucm_connectors": stores,
                "identity": {"weights": "declared:tests"},
            },
        },
    )
    scheduler, workers = engines.kv_configs(config)
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    for group in ("get_tp_group", "get_pp_group"):
        monkeypatch.setattr(parallel_state, group, lambda: alone)
    monkeypatch.setattr(factory, "ModelMemory", lambda *_: None)
    UCMConnector(config, KVConnectorRole.WORKER, workers[0]).shutdown()
    assert read == set()
    side = UCMConnector(config, KVConnectorRole.SCHEDULER, scheduler)
    assert read == {("ucm-mode", directory) for directory in directories}
    assert side._scheduler is not None
    assert side._scheduler._mode.now is Mode.OFF  # neither directory allows all
    watch = side._scheduler._mode
    side.shutdown()
    assert watch._ended.is_set()


@pytest.fixture
def switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str | None, str], Result]]:
    """``ucm mode --url`` at vLLM's own application, with the key "secret" and these plug-ins
    allowed; our entry points are those of pyproject.toml."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "ucm_kv-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ucm-kv\nVersion: 1.0\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--api-key", "secret"])
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def run(allowed: str | None, *words: str) -> Result:
        if allowed is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", allowed)
        config = uvicorn.Config(
            build_app(args, ("generate",)), port=0, lifespan="off", log_config=None
        )
        server = uvicorn.Server(config)
        socket = config.bind_socket()
        socket.listen()  # requests wait until it serves
        thread = threading.Thread(target=server.run, args=([socket],))
        servers.append((server, thread))
        thread.start()
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        return CliRunner().invoke(main, ["mode", "--url", url, *words])

    yield run
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def test_a_server_is_switched_where_it_allows_the_plug_in(
    switch: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "deep" / "state"
    monkeypatch.setenv("UCM_STATE_DIR", str(state))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    both = "ucm,ucm_mode"
    assert switch(both, "read-only").stdout == f"read-only  ({state / 'ucm-mode.json'})\n"
    assert read_mode(str(state)) is Mode.READ_ONLY
    assert '"mode": "read-only"' in switch(both, "--json").stdout
    for allowed in (None, "ucm"):
        refused = switch(allowed, "off")
        assert refused.exit_code == 2
        assert "VLLM_PLUGINS=ucm,ucm_mode, or give --root or --state-dir on" in refused.stderr
    monkeypatch.delenv("OPENAI_API_KEY")
    refused = switch(both, "off")
    assert refused.exit_code == 2
    assert "answers 401: its key is wanted: give --api-key" in refused.stderr
    assert read_mode(str(state)) is Mode.READ_ONLY
    (state / "ucm-mode.json").write_text("{")
    refused = switch(both, "--api-key", "secret")
    assert "is damaged, and engines keep their mode; write one" in refused.stderr
    both_ways = CliRunner().invoke(main, ["mode", "--url", "localhost:1", "--root", "/tmp"])
    assert "--root, --state-dir and --url exclude each other" in both_ways.stderr
    nobody = CliRunner().invoke(main, ["mode", "--url", "localhost:1"])
    assert "http://localhost:1/v1/ucm/mode cannot be read" in nobody.stderr
