"""``ucm export`` from a server or a bucket into a directory, and ``ucm import`` back into an empty
one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner
from server_contents import Objects, Values
from test_tools import Tools, come_back, contents, everything, source, stored, tools

from ucm.cli import main

__all__ = ["come_back", "contents", "source", "stored", "tools"]


def test_records_of_a_server_go_into_an_archive_and_back(
    tools: Tools,
    stored: Callable[..., None],
    come_back: Callable[..., list[bool]],
    contents: Values | Objects,
    tmp_path: Path,
) -> None:
    """ucm export and import."""
    stored(5)
    out = tools.json("export", tmp_path / "archive")
    assert (out["exit"], out["copied"], out["failed"]) == (0, 5, 0)
    assert tools.json("export", tmp_path / "archive")["present"] == 5
    for name in everything(contents):
        contents.remove(name)
    assert come_back(5) == [False] * 5
    options = [part for key, value in tools.told.items() for part in ("-o", f"{key}={value}")]
    result = CliRunner().invoke(
        main, ["import", str(tmp_path / "archive"), tools.address, *options, "--json"]
    )
    document = json.loads(result.stdout)
    assert (result.exit_code, document["copied"]) == (0, 5)
    assert come_back(5) == [True] * 5
