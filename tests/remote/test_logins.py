"""A login works with the password in each permitted place, and the store never shows it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from remote_columns import REDIS, Column, redis_says

from servers import Server
from ucm.config import load
from ucm.store.factory_v1 import UcmConnectorFactoryV1

MARK = "qf7-marked-secret"
SIZES = {"tensor_size": 4096, "shard_size": 4096, "block_size": 4096, "device_id": -1}


def placed(place: str, at: str, directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A configuration with the password in this place, and its environment."""
    bare, login = f"redis://{at}", f"redis://default:{MARK}@{at}"
    file = directory / "ucm.yaml"
    file.write_text(f"storage_backends: {bare}\nredis_password: {MARK}\n")
    inline: dict[str, dict[str, Any]] = {
        "address": {"storage_backends": login},
        "key": {"storage_backends": bare, "redis_password": MARK},
        "environment": {"storage_backends": bare},
        "file": {"ucm_config_path": str(file)},
        "stage's address": {
            "store_pipeline": ["cache", {"type": "redis", "path": login}],
            "cache_size": "1MiB",
        },
        "stage's key": {
            "store_pipeline": ["cache", {"type": "redis", "path": bare, "redis_password": MARK}],
            "cache_size": "1MiB",
        },
        "beside a pipeline": {"store_pipeline": "Cache|Redis", "path": login, "cache_size": "1MiB"},
        "list of stores": {
            "ucm_connectors": [
                {
                    "ucm_connector_name": "UcmRedisStore",
                    "ucm_connector_config": {"storage_backends": bare, "redis_password": MARK},
                }
            ]
        },
    }
    return inline[place], {"UCM_REDIS_PASSWORD": MARK} if place == "environment" else {}


@pytest.mark.parametrize("column", [REDIS], ids=[REDIS.name])
def test_a_login_from_each_place(
    column: Column, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """a login with the password in each permitted place"""
    caplog.set_level(logging.DEBUG)
    redis_says(server, "CONFIG", "SET", "requirepass", MARK)
    places = (
        *("address", "key", "environment", "file", "stage's address", "stage's key"),
        *("beside a pipeline", "list of stores"),
    )
    for place in places:
        config = load(*placed(place, server.at, tmp_path))
        store = UcmConnectorFactoryV1.create_connector(
            config.ucm_connector_name, config.store_config() | SIZES | {"identity": place}
        )
        try:
            assert store.healthy(), place
            assert all(
                tier["healthy"] for tier in store.stats()["tiers"] if tier["name"] == "redis"
            ), place
            assert store.lookup([bytes(16)]) == [False]
            settings = store.settings  # type: ignore[attr-defined]
            told = (
                repr(store),
                repr(store.config),
                repr(settings),
                str(settings),
                settings.model_dump_json(),
            )
            assert MARK not in " ".join((*told, json.dumps(store.stats()), store.trouble()))
        finally:
            store.close()
    assert MARK not in caplog.text
    wrong = load({"storage_backends": f"redis://:{MARK}-not@{server.at}"}, {})
    store = UcmConnectorFactoryV1.create_connector(
        wrong.ucm_connector_name, wrong.store_config() | SIZES
    )
    assert not store.healthy()
    store.close()
    assert "redis_password" in caplog.text and MARK not in caplog.text
    _tools_show_none(server, tmp_path)


def _tools_show_none(server: Server, directory: Path) -> None:
    """The output of a tool, and the command lines of its child processes, which other users can
    read."""
    script = directory / "tool.py"
    script.write_text(
        "import pathlib, sys\n"
        "from ucm.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    for task in pathlib.Path('/proc/self/task').iterdir():\n"
        "        for child in (task / 'children').read_text().split():\n"
        "            print(pathlib.Path('/proc', child, 'cmdline').read_text())\n"
        "    print(pathlib.Path('/proc/self/cmdline').read_text())\n"
    )
    for command in ("inspect", "verify"):
        done = subprocess.run(
            [sys.executable, script, command, f"redis://{server.at}"],
            env=os.environ | {"UCM_REDIS_PASSWORD": MARK},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0 and server.at in done.stdout, done.stdout + done.stderr
        assert MARK not in done.stdout + done.stderr
