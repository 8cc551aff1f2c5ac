"""Roots written by the real store, and the command line run on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ucm.cli import main

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside these tests
sys.path.append(str(Path(__file__).parents[1] / "store"))

from cli_roots import Written


@pytest.fixture
def root(tmp_path: Path) -> Written:
    return Written(tmp_path / "root")


@pytest.fixture
def ucm() -> Callable[..., Result]:
    """Runs the command line; an exception is reported with its text."""

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def ucm_json(ucm: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """Runs the command line and parses its one document, which has only numbers of JSON; the status
    is added as ``exit``."""

    def refused(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def run(*arguments: object) -> dict[str, Any]:
        result = ucm(*arguments, "--json")
        document: dict[str, Any] = json.loads(result.stdout, parse_constant=refused)
        return document | {"exit": result.exit_code}

    return run
