"""The output of all commands: ``--json``, and colours on a terminal alone."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ucm.cli import main

TOOLS = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
#: Commands without ``--json``, which docs/tools.md names.
WITHOUT = {"dashboard", "pd-proxy", "trace record"}
ESCAPE = "\x1b"


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by its words."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def test_every_command_has_json_or_is_named() -> None:
    found = {
        words
        for words, command in commands(main)
        if not any("--json" in option.opts for option in command.params)
    }
    assert found == WITHOUT
    (sentence,) = [one for one in TOOLS.split("\n\n") if one.startswith("Each command takes")]
    assert all(f"`{words}`" in sentence for words in WITHOUT), sentence


@pytest.fixture
def environment() -> dict[str, str]:
    """That of a terminal with colours."""
    unset = ("NO_COLOR", "FORCE_COLOR", "UCM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    return kept | {"TERM": "xterm-256color"}


def test_a_terminal_has_colours_and_a_pipe_has_none(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """``ucm doctor`` is the command with colours."""
    file = tmp_path / "ucm.yaml"
    file.write_text("storage_backends: /proc/none\nstorage_capacty: 1GiB\n")  # no measurement
    command = [sys.executable, "-m", "ucm", "doctor", "--config", str(file)]
    piped = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert piped.returncode == 2
    assert "storage_capacty" in piped.stdout
    assert ESCAPE not in piped.stdout + piped.stderr
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        with subprocess.Popen(command, env=environment, stdout=theirs, stderr=theirs) as shown:
            os.close(theirs)
            text = b""
            while True:
                try:
                    part = terminal.read(4096)
                except OSError:  # the other end was closed
                    break
                text += part or b""
                if not part:
                    break
        assert shown.returncode == 2
    assert f"{ESCAPE}[31merror" in text.decode()


def test_json_is_one_document_on_a_terminal_too(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "ucm", "doctor", "--symptoms", "--json"]
    done = subprocess.run(
        command,
        env=environment | {"FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["symptoms"]
    assert ESCAPE not in done.stdout
