"""User errors are one message and status 2; and the cost of importing the command line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from cli_roots import Written
from click.testing import Result

from ucm.cli import main

Run = Callable[..., Result]
COMMANDS = ("inspect", "verify", "gc")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unmarked_directory_is_refused(command: str, tmp_path: Path, ucm: Run) -> None:
    (tmp_path / "file").write_text("mine")
    done = ucm(command, tmp_path, "--json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "is no root of ucm: it has no ucm-root.json" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_namespace_is_not_a_root_and_the_root_is_named(
    command: str, root: Written, ucm: Run
) -> None:
    root.fill("one")
    done = ucm(command, root.path / root.namespace("one"))
    assert done.exit_code == 2
    assert f"it is a namespace of the root {root.path}" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": 1}', "damaged"),
        (json.dumps({"format": 2, "uuid": "u", "storage_capacity": 1}), "made by a newer ucm"),
    ],
)
def test_a_marker_that_cannot_be_believed(
    command: str, marker: str, words: str, root: Written, ucm: Run
) -> None:
    root.fill("one", 1)
    (root.path / "ucm-root.json").write_text(marker)
    before = root.tree()
    done = ucm(command, root.path)
    assert done.exit_code == 2
    assert words in done.stderr
    assert root.tree() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("verify", "ROOT", "--rate", "fast"), "or unlimited"),
        (("verify", "ROOT", "--rate", "0"), "never end"),
        (("verify", "ROOT", "--sample", "120%"), "from 0 to 100"),
        (("verify", "ROOT", "--namespace", "f00"), "no namespace of"),
        (("gc", "ROOT", "--to", "much"), "or a share of the root's limit"),
        (("gc", "ROOT", "--older-than", "7 moons"), "write 90s"),
        (("gc", "ROOT", "--to", "1GiB", "--older-than", "7d"), "exclude each other"),
        (("gc", "ROOT", "--namespace", ""), "no namespace of"),
        (("inspect", "ROOT/nowhere"), "does not exist"),
    ],
)
def test_wrong_words_are_explained(
    arguments: tuple[str, ...], words: str, root: Written, ucm: Run
) -> None:
    root.fill("one", 1)
    done = ucm(*(argument.replace("ROOT", str(root.path)) for argument in arguments))
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_rights_are_told_with_the_path(
    command: str, root: Written, ucm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.fill("one", 1)
    opened = os.open

    def refused(path: Any, *arguments: Any, **more: Any) -> int:
        if path == "blocks":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refused)
    done = ucm(command, root.path)
    assert done.exit_code == 2
    assert f"{root.path / root.namespace('one') / 'blocks'}: Permission denied" in done.stderr


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, ucm.cli; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    assert not {"numpy", "torch", "vllm", "pydantic", "tqdm"} & set(python(code).split())


def test_it_works_without_numpy(root: Written) -> None:
    root.fill("one", 2)
    code = "import sys\nsys.modules['numpy'] = None\nfrom ucm.cli import main\nmain(sys.argv[1:])\n"
    document = json.loads(python(code, "verify", str(root.path), "--json"))
    assert document["good"] == 2
    assert json.loads(python(code, "inspect", str(root.path), "--json"))["roots"][0]["records"] == 2
    assert json.loads(python(code, "gc", str(root.path), "--to", "0", "--json"))["planned"] == 2


def test_the_installed_command_is_this_one() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"ucm": "ucm.cli:main"}
    assert EntryPoint("ucm", project["scripts"]["ucm"], "console_scripts").load() is main


def test_python_m_ucm_is_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ucm", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)
