"""Common parts of the configuration's tests: the shapes of the fixtures, and the check of a wrong
one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ucm.config import load
from ucm.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures" / "config"


def shape(name: str) -> dict[str, Any]:
    text = (FIXTURES / name).read_text()
    found = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    assert isinstance(found, dict)
    return found


def fails(extra: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(extra, environ or {})
    assert isinstance(caught.value, ValueError)
    return str(caught.value)
